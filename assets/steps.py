"""What every asset of an attempt does first and last: claim the step, hold its lease, say how it ended.

Belongs here: the frame around the bodies. A run's first act is to claim (attempt, step, try) by a unique row; a second
run of the same claim ends as skipped. While a body runs it holds the lease `attempt/<run id>`; losing it means that
somebody cancelled or took over, and nothing more is written.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from loop_dagster.errors import LeaseLost, LoopError
from loop_dagster.partitions import AttemptKey
from loop_dagster.rules.states import Step, TrainingRunState, reached, step_of
from loop_dagster.settings import Settings
from loop_dagster.store.intake import lake_lease
from loop_dagster.store.leases import TTL_S, HeldLease
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt
from loop_dagster.store.work import run_lease_name
from loop_dagster.tables import Table

#: Tags of the runs of an attempt, also how a person finds them in the UI.
ATTEMPT_TAG = "loop/attempt"
STEP_TAG = "loop/step"
TRY_TAG = "loop/try"


@dataclass(slots=True)
class StepRun:
    """One body at work on one attempt."""

    store: Store
    attempt: Attempt
    pipeline: Pipeline
    lease: HeldLease

    def advance(self, state: TrainingRunState, sentence: str, **fields: Any) -> None:
        """Move the attempt on, unless an earlier try has brought it there already; the lease is checked first."""
        self.lease.check()
        fresh = self.store.attempts.get(self.attempt.run_id)
        if not reached(fresh.state, state):
            fresh = self.store.attempts.move(self.attempt.run_id, state, sentence, now=utc_now(), **fields)
        elif fields:
            fresh = self.store.attempts.note(self.attempt.run_id, **fields)
        self.attempt = fresh

    def note_counts(self, **counts: Any) -> None:
        """Add to what the attempt counts (samples gone, judge's calls …)."""
        self.lease.check()
        self.attempt = self.store.attempts.note(self.attempt.run_id, counts={**self.attempt.counts, **counts})

    def rows(self, table: Table) -> pl.DataFrame:
        """This attempt's rows of a table that is written per attempt."""
        return self.store.lake.scan(table).filter(pl.col("attempt") == self.attempt.key).collect()

    def write(self, table: Table, frame: pl.DataFrame) -> int:
        """Make `frame` (with or without the attempt's own columns) this attempt's only rows; returns the Delta version.

        What an earlier try wrote is replaced; nothing is written without a valid lease.
        """
        mine = {
            "attempt": pl.lit(self.attempt.key),
            "pipeline_id": pl.lit(self.attempt.pipeline_id),
            "attempt_no": pl.lit(self.attempt.attempt_no, dtype=pl.Int64),
        }
        rows = frame.with_columns(**mine).select(list(table.schema))
        with lake_lease(self.store, self.lease.lease.holder):
            self.lease.verify()
            return self.store.lake.replace_attempt(table, self.attempt.key, rows)

    def lost(self) -> bool:
        """Whether the lease is lost: for loops that must end early rather than raise."""
        try:
            self.lease.check()
        except LeaseLost:
            return True
        return False

    def work_folder(self, name: str) -> Path:
        """Private folder of one step of this attempt; what an earlier try left there is gone on with."""
        folder = self.store.settings.work / self.attempt.run_id / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@contextlib.contextmanager
def first_step(
    context: dg.AssetExecutionContext, store: Store, step: Step, *, ends: bool = False
) -> Iterator[StepRun | None]:
    """Frame of a job's first asset, which claims; yields None when this run has nothing to do and yields nothing."""
    if not _claimed(context, store, _attempt_of(context, store), step):
        yield None
        return
    with attempt_step(context, store, step, ends=ends) as claimed:
        yield claimed


@contextlib.contextmanager
def attempt_step(
    context: dg.AssetExecutionContext, store: Store, step: Step, *, ends: bool = False
) -> Iterator[StepRun]:
    """Frame of one asset body of a claimed step; `ends` marks the job's last asset, which closes the claim.

    A LoopError fails the attempt with its code and sentence, unless it may pass; that one and any other error close the
    claim as failed, and the step is tried again.
    """
    attempt = _attempt_of(context, store)
    try_no = int(context.run.tags.get(TRY_TAG, attempt.try_no))
    with contextlib.ExitStack() as leaving:
        leaving.callback(_release, context.run.run_id)
        try:
            lease = _lease_of(context.run.run_id, store, attempt)
            yield StepRun(store, attempt, store.pipelines.get(attempt.pipeline_id, deleted=True), lease)
        except (LeaseLost, dg.DagsterExecutionInterruptedError):
            raise  # cancelled or taken over: whoever did that also says what becomes of the attempt
        except LoopError as error:
            if error.passes:
                store.attempts.remark(attempt.run_id, error.message, now=utc_now(), code=error.code)
            else:
                store.attempts.fail(attempt.run_id, code=error.code, sentence=error.message, now=utc_now())
            store.attempts.end_step(attempt.run_id, step, try_no, "failed", now=utc_now())
            raise dg.Failure(description=f"{error.code}: {error.message}", allow_retries=False) from error
        except Exception as error:
            # Its text may quote a sample, so only its kind goes on record.
            sentence = f"The {step} stopped with {type(error).__name__}; the log of its run says where."
            store.attempts.remark(attempt.run_id, sentence, now=utc_now(), code="STEP_BROKE")
            store.attempts.end_step(attempt.run_id, step, try_no, "failed", now=utc_now())
            raise
        if ends:
            store.attempts.end_step(attempt.run_id, step, try_no, "done", now=utc_now())
        else:
            leaving.pop_all()  # the run's next asset goes on under the same lease


#: Leases that runs of this process hold, by Dagster run: from the first asset of a job to its last, so that the
#: attempt never looks abandoned between two of them.
_HELD: dict[str, tuple[contextlib.ExitStack, HeldLease]] = {}


def _lease_of(dagster_run_id: str, store: Store, attempt: Attempt) -> HeldLease:
    if dagster_run_id not in _HELD:
        stack = contextlib.ExitStack()
        # An executor with a process per asset finds the lease of the process before it, which ends by itself.
        lease = stack.enter_context(
            store.leases.hold(f"attempt/{attempt.run_id}", holder=f"run {dagster_run_id}", wait_s=2 * TTL_S)
        )
        _HELD[dagster_run_id] = (stack, lease)
    lease = _HELD[dagster_run_id][1]
    lease.check()
    return lease


def _release(dagster_run_id: str) -> None:
    held = _HELD.pop(dagster_run_id, None)
    if held is not None:
        with contextlib.suppress(LeaseLost):
            held[0].close()


def frozen_judge(step: StepRun) -> Settings:
    """The installation's settings with the judge that the attempt froze when it opened."""
    frozen = step.attempt.frozen
    return step.store.settings.model_copy(update={"judge": frozen["judge"], "judge_model": frozen["judge_model"]})


@contextlib.contextmanager
def sign_of_life(store: Store, dagster_run_id: str) -> Iterator[None]:
    """Held by every step of a run that belongs to no attempt, so that a sensor can tell when its process is gone."""
    with store.leases.hold(run_lease_name(dagster_run_id), holder=f"run {dagster_run_id}", wait_s=TTL_S):
        yield


def utc_now() -> datetime:
    return datetime.now(UTC)


def _attempt_of(context: dg.AssetExecutionContext, store: Store) -> Attempt:
    key = AttemptKey.parse(context.partition_key)
    return store.attempts.by_number(key.pipeline_id, key.attempt_no)


def _claimed(context: dg.AssetExecutionContext, store: Store, attempt: Attempt, step: Step) -> bool:
    if step_of(attempt.state) != step:
        context.log.info(f"Skipped: the attempt is {attempt.state}, which needs no {step}.")
        return False
    try_no = int(context.run.tags.get(TRY_TAG, attempt.try_no))
    if try_no == attempt.try_no and store.attempts.claim_step(
        attempt.run_id, step, try_no, context.run.run_id, now=utc_now()
    ):
        return True
    context.log.info(f"Skipped: another run has claimed try {try_no} of {step} of this attempt.")
    return False
