"""Attempts as they are: by id, key or number, in lists, counted, with their timelines.

Belongs here: queries. Does not belong here: whatever changes an attempt (attempts.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import sqlalchemy as sa

from loop_dagster.errors import NotFound
from loop_dagster.rules.states import TERMINAL, TrainingRunState
from loop_dagster.store.records import Attempt, Event, attempt_from
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import attempt_events, attempts

_KEY: Final = re.compile(r"(?P<pipeline>.+)/(?P<number>[0-9]{4,})")
#: Longer numbers are no attempt's.
_DIGITS: Final = 10


class AttemptRows:
    """The attempts of one workspace, to read."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def get(self, ref: str) -> Attempt:
        """By run id or by key (`support-replies-3f2a/0007`). Raises NotFound. Also those of deleted pipelines."""
        found = _KEY.fullmatch(ref)
        if found is not None:
            return self.by_number(found["pipeline"], int(found["number"]))
        with self.registry.read() as connection:
            return self._get(connection, ref)

    def find(self, ref: str) -> Attempt:
        """`get` for people: a number is enough where no other pipeline has it. NotFound names those that have it."""
        if not (ref.isascii() and ref.isdigit() and len(ref) < _DIGITS):
            return self.get(ref)
        rows = self._select(attempts.c.attempt_no == int(ref))
        if len(rows) == 1:
            return rows[0]
        raise NotFound("attempt", ref, [row.key for row in rows[:3]])

    def by_number(self, pipeline_id: str, attempt_no: int) -> Attempt:
        rows = self._select(attempts.c.pipeline_id == pipeline_id, attempts.c.attempt_no == attempt_no)
        if not rows:
            raise NotFound("attempt", f"{pipeline_id}/{attempt_no:04d}")
        return rows[0]

    def list(
        self,
        pipeline_id: str | None = None,
        *,
        states: Collection[TrainingRunState] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> tuple[Attempt, ...]:
        """Attempts in the order they opened, the newest last; of one pipeline or of all, deleted ones' included."""
        where = [] if pipeline_id is None else [attempts.c.pipeline_id == pipeline_id]
        if states is not None:
            where.append(attempts.c.state.in_(states))
        return self._select(*where, limit=limit, offset=offset)

    def newest(self) -> dict[str, tuple[int, TrainingRunState]]:
        """Number and state of each pipeline's newest attempt, however many there were."""
        mine = attempts.c.workspace == self.registry.workspace
        last = (
            sa.select(attempts.c.pipeline_id, sa.func.max(attempts.c.attempt_no).label("attempt_no"))
            .where(mine)
            .group_by(attempts.c.pipeline_id)
            .subquery()
        )
        same = sa.and_(attempts.c.pipeline_id == last.c.pipeline_id, attempts.c.attempt_no == last.c.attempt_no)
        query = sa.select(attempts.c.pipeline_id, attempts.c.attempt_no, attempts.c.state).join(last, same).where(mine)
        with self.registry.read() as connection:
            return {row.pipeline_id: (row.attempt_no, row.state) for row in connection.execute(query)}

    def active(self) -> tuple[Attempt, ...]:
        """Every attempt of the workspace that has not ended, oldest first."""
        return self._select(attempts.c.state.not_in(TERMINAL))

    def recent(self, limit: int = 100) -> tuple[Attempt, ...]:
        """The newest attempts of the workspace, oldest of them first, and every one that has not ended."""
        mine = attempts.c.workspace == self.registry.workspace
        newest = sa.select(attempts.c.run_id).where(mine).order_by(attempts.c.created_at.desc()).limit(limit)
        return self._select(sa.or_(attempts.c.state.not_in(TERMINAL), attempts.c.run_id.in_(newest)))

    def counts(self) -> dict[str, dict[str, int]]:
        """How many attempts each pipeline has, by state: pipeline id → state → number."""
        query = (
            sa.select(attempts.c.pipeline_id, attempts.c.state, sa.func.count())
            .where(attempts.c.workspace == self.registry.workspace)
            .group_by(attempts.c.pipeline_id, attempts.c.state)
        )
        found: dict[str, dict[str, int]] = {}
        with self.registry.read() as connection:
            for pipeline_id, state, number in connection.execute(query):
                found.setdefault(pipeline_id, {})[state] = number
        return found

    def timeline(self, run_id: str) -> tuple[Event, ...]:
        """Every move of an attempt, first to last. Raises NotFound."""
        query = (
            sa.select(attempt_events)
            .where(attempt_events.c.workspace == self.registry.workspace, attempt_events.c.run_id == run_id)
            .order_by(attempt_events.c.seq)
        )
        with self.registry.read() as connection:
            rows = connection.execute(query).mappings().all()
        if not rows:
            raise NotFound("attempt", run_id)
        states = [None, *(row["state"] for row in rows)]
        return tuple(
            Event(row["seq"], row["at"], before, row["state"], row["sentence"], row["error_code"], row["actor"])
            for row, before in zip(rows, states, strict=False)
        )

    # inside one transaction

    def _is(self, run_id: str) -> sa.ColumnElement[bool]:
        return sa.and_(attempts.c.workspace == self.registry.workspace, attempts.c.run_id == run_id)

    def _get(self, connection: sa.Connection, run_id: str, *, lock: bool = False) -> Attempt:
        query = sa.select(attempts).where(self._is(run_id))
        row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
        if row is None:
            raise NotFound("attempt", run_id)
        return attempt_from(row)

    def _select(self, *where: sa.ColumnElement[bool], limit: int | None = None, offset: int = 0) -> tuple[Attempt, ...]:
        query = (
            sa.select(attempts)
            .where(attempts.c.workspace == self.registry.workspace, *where)
            .order_by(attempts.c.created_at, attempts.c.run_id)
            .limit(limit)
            .offset(offset)
        )
        with self.registry.read() as connection:
            return tuple(attempt_from(row) for row in connection.execute(query).mappings())
