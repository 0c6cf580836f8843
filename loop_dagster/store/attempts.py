"""Attempts in the registry: the row is the only truth about an attempt, and each move of it is one transaction.

Belongs here: opening under the unique index, moving with the timeline, claiming steps, cancelling. Does not belong
here: reading (attempt_rows.py), when an attempt opens and what is decided about it (rules/), going live (versions.py),
runs of Dagster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from uuid_utils import uuid7

from loop_dagster.errors import BadRequest, Conflict, MoveNotAllowed, NotFound, Refused
from loop_dagster.rules.progress import first_try
from loop_dagster.rules.states import (
    TESTABLE,
    TRIGGERS,
    Step,
    TrainingRunState,
    Trigger,
    check_move,
    is_terminal,
    step_of,
)
from loop_dagster.store.attempt_rows import AttemptRows
from loop_dagster.store.records import (
    FIELDS,
    LOOP,
    Attempt,
    Claim,
    Event,
    StepOutcome,
    check_fields,
    without_workspace,
)
from loop_dagster.store.registry import insert_new
from loop_dagster.store.schema import attempt_events, attempt_steps, attempts, leases, pipelines
from loop_dagster.store.scorings import hand_over_in

__all__ = ["FIELDS", "LOOP", "Attempt", "Attempts", "Claim", "Event", "StepOutcome", "lease_name"]


class Attempts(AttemptRows):
    """The attempts of one workspace."""

    # opening and moving

    def open_attempt(
        self,
        pipeline_id: str,
        *,
        trigger: Trigger,
        frozen: Mapping[str, Any],
        now: datetime,
        sentence: str = "Opened.",
        actor: str = LOOP,
        revision: int | None = None,
        after: int | None = None,
    ) -> Attempt | None:
        """Open the pipeline's next attempt, numbered 1, 2, 3 …, in state `built`.

        None when something came first: an attempt is in progress, the pipeline is paused, its revision is no longer
        `revision`, or its newest attempt is no longer number `after` (0 for none). So any number of callers that saw
        the same reason open one attempt. Raises NotFound for a pipeline that is not there or was deleted.
        """
        if trigger not in TRIGGERS:
            raise BadRequest(f"trigger must be one of {', '.join(TRIGGERS)}, got {trigger!r}.")
        with self.registry.write() as connection:
            pipeline = self._lock_pipeline(connection, pipeline_id)
            newest = self._newest(connection, pipeline_id)
            number, state = newest or (0, None)
            if not pipeline["enabled"] or (state is not None and not is_terminal(state)):
                return None
            if after not in (None, number) or revision not in (None, pipeline["revision"]):
                return None
            row = {
                "workspace": self.registry.workspace,
                "run_id": str(uuid7()),
                "pipeline_id": pipeline_id,
                "attempt_no": number + 1,
                "state": "built",
                "since": now,
                "trigger": trigger,
                "revision": pipeline["revision"],
                "frozen": dict(frozen),
                "counts": {},
                "reason": sentence,
                "created_at": now,
            }
            if not insert_new(connection, attempts, row):  # the pipeline's row is locked; the index has the last word
                return None
            self._say(connection, str(row["run_id"]), "built", sentence, now=now, actor=actor)
            hand_over_in(connection, self.registry.workspace, pipeline_id, str(row["run_id"]))
            used = {"train_now": False, "next_due_at": None}  # one slot and one wish open one attempt
            connection.execute(sa.update(pipelines).where(self._pipeline_is(pipeline_id)).values(**used))
            return self._get(connection, str(row["run_id"]))

    def move(
        self,
        run_id: str,
        new_state: TrainingRunState,
        sentence: str,
        *,
        now: datetime,
        expect: TrainingRunState | Collection[TrainingRunState] | None = None,
        actor: str = LOOP,
        **fields: Any,
    ) -> Attempt:
        """Move an attempt, with its timeline and any of FIELDS, in one transaction; returns it as it is then.

        Raises MoveNotAllowed when the table of rules/states.py says so or it is in none of `expect`; NotFound. When the
        new state needs another step, its tries begin anew (rules/progress.py). When it ends, the pipeline's count of
        attempts in a row without an adapter is kept up.
        """
        with self.registry.write() as connection:
            return self.move_in(
                connection, run_id, new_state, sentence, now=now, expect=expect, actor=actor, fields=fields
            )

    def move_in(
        self,
        connection: sa.Connection,
        run_id: str,
        new_state: TrainingRunState,
        sentence: str,
        *,
        now: datetime,
        expect: TrainingRunState | Collection[TrainingRunState] | None = None,
        actor: str = LOOP,
        fields: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """`move` inside the caller's transaction."""
        check_fields(fields or {})
        old = self.get_in(connection, run_id, ends=is_terminal(new_state))
        if expect is not None and old.state not in ((expect,) if isinstance(expect, str) else expect):
            raise MoveNotAllowed(old.state, new_state, ())
        check_move(old.state, new_state)
        values: dict[str, Any] = {**(fields or {}), "state": new_state, "since": now, "reason": sentence}
        step = step_of(new_state)
        if step != step_of(old.state):
            values["try_no"] = self._first_try(connection, run_id, step)
        if is_terminal(new_state) and old.finished_at is None:
            values["finished_at"] = now
            kept = values.get("adapter_digest", old.adapter_digest) is not None
            count = 0 if kept else pipelines.c.failures + 1
            connection.execute(sa.update(pipelines).where(self._pipeline_is(old.pipeline_id)).values(failures=count))
        connection.execute(sa.update(attempts).where(self._is(run_id)).values(**values))
        code = values.get("error_code")
        self._say(connection, run_id, new_state, sentence, now=now, actor=actor, error_code=code)
        return self._get(connection, run_id)

    def test_again(self, run_id: str, sentence: str, *, now: datetime, actor: str = LOOP) -> Attempt:
        """Take an attempt back to `checkpoint_ready`, also from an end (states.TESTABLE), with nothing decided yet.

        Raises Refused with RUN_ACTIVE while another attempt of the pipeline is in progress, Conflict when its state
        changed meanwhile; NotFound.
        """
        with self.registry.write() as connection:
            old = self.get_in(connection, run_id, ends=True)
            if old.state not in TESTABLE:
                raise Conflict(f"Attempt {old.key} is {old.state} by now; it cannot be tested again.", run_id=run_id)
            newest = self._newest(connection, old.pipeline_id)
            if old.ended and newest is not None and newest[0] != old.attempt_no and not is_terminal(newest[1]):
                raise Refused("RUN_ACTIVE", f"Attempt {newest[0]} is {newest[1]}; a pipeline runs one at a time.")
            undecided: dict[str, Any] = dict.fromkeys(
                ("verdict", "report", "decision", "decided_at", "review_until", "error_code", "finished_at")
            )
            values = {**undecided, "forced": False, "state": "checkpoint_ready", "since": now, "reason": sentence}
            values["try_no"] = self._first_try(connection, run_id, "comparison")
            connection.execute(sa.update(attempts).where(self._is(run_id)).values(**values))
            self._say(connection, run_id, "checkpoint_ready", sentence, now=now, actor=actor)
            return self._get(connection, run_id)

    def note(self, run_id: str, **fields: Any) -> Attempt:
        """Set any of FIELDS without a move. Raises Conflict once it has ended (but for gpu_seconds); NotFound."""
        check_fields(fields)
        with self.registry.write() as connection:
            old = self._get(connection, run_id, lock=True)
            if old.ended and set(fields) - {"gpu_seconds"}:
                raise Conflict(
                    f"Attempt {old.key} is {old.state} and has ended: its {', '.join(sorted(fields))} cannot change.",
                    run_id=run_id,
                    state=old.state,
                )
            if fields:
                connection.execute(sa.update(attempts).where(self._is(run_id)).values(**fields))
            return self._get(connection, run_id)

    def remark(
        self, run_id: str, sentence: str, *, now: datetime, code: str | None = None, actor: str = LOOP
    ) -> Attempt:
        """Put a sentence on the timeline without a move, and as the attempt's last one; nothing once it has ended."""
        with self.registry.write() as connection:
            old = self._get(connection, run_id, lock=True)
            if old.ended:
                return old
            connection.execute(sa.update(attempts).where(self._is(run_id)).values(reason=sentence))
            self._say(connection, run_id, old.state, sentence, now=now, actor=actor, error_code=code)
            return self._get(connection, run_id)

    def fail(self, run_id: str, *, code: str, sentence: str, now: datetime, actor: str = LOOP) -> Attempt:
        """Move it to `failed` with a code. One that has ended already stays as it is, so saying it twice is safe."""
        with self.registry.write() as connection:
            old = self.get_in(connection, run_id, ends=True)
            if old.ended:
                return old
            fields = {"error_code": code[:60]}
            return self.move_in(connection, run_id, "failed", sentence, now=now, actor=actor, fields=fields)

    def request_cancel(self, run_id: str, *, now: datetime, sentence: str = "Cancelled.", actor: str = LOOP) -> Attempt:
        """Cancel an attempt: it is `cancelled` at once and its lease is revoked, so a process at work on it stops.

        Its next write is refused by its state, its next heartbeat by the lease. Repeating it changes nothing. Raises
        Conflict when it has ended otherwise.
        """
        with self.registry.write() as connection:
            return self.cancel_in(connection, run_id, sentence, now=now, actor=actor)

    def cancel_in(
        self, connection: sa.Connection, run_id: str, sentence: str, *, now: datetime, actor: str = LOOP
    ) -> Attempt:
        """`request_cancel` inside the caller's transaction."""
        old = self.get_in(connection, run_id, ends=True)
        if old.state == "cancelled":
            return old
        if old.ended:
            raise Conflict(
                f"Attempt {old.key} is {old.state} and has ended: there is nothing to cancel.", run_id=run_id
            )
        connection.execute(
            sa.update(leases)
            .where(leases.c.workspace == self.registry.workspace, leases.c.name == lease_name(run_id))
            .values(token=None)
        )
        connection.execute(sa.update(attempts).where(self._is(run_id)).values(cancel_requested=True))
        return self.move_in(connection, run_id, "cancelled", sentence, now=now, actor=actor)

    def get_in(self, connection: sa.Connection, run_id: str, *, ends: bool) -> Attempt:
        """The attempt, locked for the caller's transaction; its pipeline before it if a move that ends it may follow.

        Everybody locks in that order.
        """
        if ends:
            owner = sa.select(attempts.c.pipeline_id).where(self._is(run_id)).scalar_subquery()
            query = sa.select(pipelines.c.pipeline_id).where(self._pipeline_is(owner))
            connection.execute(query.with_for_update())
        return self._get(connection, run_id, lock=True)

    # steps

    def claim_step(self, run_id: str, step: Step, try_no: int, dagster_run_id: str, *, now: datetime) -> bool:
        """Claim one try of a step for one run of Dagster; its first act. False: end as skipped, nothing is yours.

        True again for the run that holds the claim until it is ended. False when another run has it, the attempt needs
        another step or another try by now, or it has ended.
        """
        with self.registry.write() as connection:
            attempt = self._get(connection, run_id, lock=True)
            if step_of(attempt.state) != step or attempt.try_no != try_no:
                return False
            row = {
                "workspace": self.registry.workspace,
                "run_id": run_id,
                "step": step,
                "try_no": try_no,
                "dagster_run_id": dagster_run_id,
                "claimed_at": now,
            }
            if insert_new(connection, attempt_steps, row):
                return True
            held = self._claim(connection, run_id, step, try_no)
            return held is not None and held.dagster_run_id == dagster_run_id and held.ended_at is None

    def end_step(self, run_id: str, step: Step, try_no: int, outcome: StepOutcome, *, now: datetime) -> bool:
        """Note how a claimed try ended. False when it was noted before (which stands) or never claimed."""
        with self.registry.write() as connection:
            open_ = self._step_is(run_id, step, try_no), attempt_steps.c.ended_at.is_(None)
            ended = sa.update(attempt_steps).where(*open_).values(ended_at=now, outcome=outcome)
            return connection.execute(ended).rowcount == 1

    def next_try(self, run_id: str, *, expect_try: int, now: datetime) -> Attempt:
        """Let the step that the attempt needs be tried again: `expect_try` + 1.

        The old try, if it was claimed and not ended, ends as lost, and the attempt's lease is revoked, so that what is
        left of it stops. When several callers see the same lost try, one counts it up and all get the same attempt.
        """
        with self.registry.write() as connection:
            attempt = self._get(connection, run_id, lock=True)
            step = step_of(attempt.state)
            if attempt.try_no != expect_try or step is None:
                return attempt
            connection.execute(
                sa.update(attempt_steps)
                .where(self._step_is(run_id, step, expect_try), attempt_steps.c.ended_at.is_(None))
                .values(ended_at=now, outcome="lost")
            )
            connection.execute(
                sa.update(leases)
                .where(leases.c.workspace == self.registry.workspace, leases.c.name == lease_name(run_id))
                .values(token=None)
            )
            connection.execute(sa.update(attempts).where(self._is(run_id)).values(try_no=expect_try + 1))
            return self._get(connection, run_id)

    def claim(self, run_id: str, step: str, try_no: int) -> Claim | None:
        """Who claimed that try; None when nobody did."""
        with self.registry.read() as connection:
            return self._claim(connection, run_id, step, try_no)

    # inside one transaction

    def _pipeline_is(self, pipeline_id: str | sa.ScalarSelect[str]) -> sa.ColumnElement[bool]:
        return sa.and_(pipelines.c.workspace == self.registry.workspace, pipelines.c.pipeline_id == pipeline_id)

    def _step_is(self, run_id: str, step: str, try_no: int) -> sa.ColumnElement[bool]:
        return sa.and_(
            attempt_steps.c.workspace == self.registry.workspace,
            attempt_steps.c.run_id == run_id,
            attempt_steps.c.step == step,
            attempt_steps.c.try_no == try_no,
        )

    def _lock_pipeline(self, connection: sa.Connection, pipeline_id: str) -> sa.RowMapping:
        query = sa.select(pipelines).where(self._pipeline_is(pipeline_id), pipelines.c.deleted_at.is_(None))
        row = connection.execute(query.with_for_update()).mappings().one_or_none()
        if row is None:
            raise NotFound("pipeline", pipeline_id)
        return row

    def _first_try(self, connection: sa.Connection, run_id: str, step: Step | None) -> int:
        if step is None:
            return 1
        mine = sa.and_(
            attempt_steps.c.workspace == self.registry.workspace,
            attempt_steps.c.run_id == run_id,
            attempt_steps.c.step == step,
        )
        newest: int | None = connection.execute(sa.select(sa.func.max(attempt_steps.c.try_no)).where(mine)).scalar()
        return first_try(newest)

    def _newest(self, connection: sa.Connection, pipeline_id: str) -> tuple[int, TrainingRunState] | None:
        query = (
            sa.select(attempts.c.attempt_no, attempts.c.state)
            .where(attempts.c.workspace == self.registry.workspace, attempts.c.pipeline_id == pipeline_id)
            .order_by(attempts.c.attempt_no.desc())
            .limit(1)
        )
        row = connection.execute(query).one_or_none()
        return None if row is None else (row[0], row[1])

    def _claim(self, connection: sa.Connection, run_id: str, step: str, try_no: int) -> Claim | None:
        query = sa.select(attempt_steps).where(self._step_is(run_id, step, try_no))
        row = connection.execute(query).mappings().one_or_none()
        return None if row is None else Claim(**without_workspace(row))

    def _say(
        self,
        connection: sa.Connection,
        run_id: str,
        state: TrainingRunState,
        sentence: str,
        *,
        now: datetime,
        actor: str,
        error_code: str | None = None,
    ) -> None:
        mine = sa.and_(attempt_events.c.workspace == self.registry.workspace, attempt_events.c.run_id == run_id)
        last = connection.execute(sa.select(sa.func.max(attempt_events.c.seq)).where(mine)).scalar()
        connection.execute(
            sa.insert(attempt_events).values(
                workspace=self.registry.workspace,
                run_id=run_id,
                seq=(last or 0) + 1,
                state=state,
                at=now,
                sentence=sentence,
                error_code=error_code,
                actor=actor[:80],
            )
        )


def lease_name(run_id: str) -> str:
    """The lease that a process at work on an attempt holds."""
    return f"attempt/{run_id}"
