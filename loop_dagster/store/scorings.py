"""The scoring of unreviewed samples in the registry: what it did and cost, what holds it, which judge was asked.

Belongs here: storing a chunk of scores as feedback together with what it cost, once; handing the cost over to the
attempt that opens next. Does not belong here: which samples are scored (rules/scoring.py), the judge (models/).

A chunk is stored in one transaction: its scores as rows of `feedback` in the inbox, who was asked, the money, and the
chunk's own id, by which a second call with the same chunk stores nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from uuid_utils import uuid7

from loop_dagster.rules.money import NANOCENTS
from loop_dagster.rules.scoring import Asked, Hold, next_try, picked
from loop_dagster.store.inbox import Inbox
from loop_dagster.store.registry import Registry, insert_new, put_row
from loop_dagster.store.schema import attempts, scores, scorings

#: Code of the hold of a pipeline whose unreviewed samples have cost what they may before the next attempt.
SCORING_LIMIT: Final = "SCORING_LIMIT"
#: Ids of one statement.
_AT_ONCE: Final = 500
_NO_HOLD: Final[Mapping[str, None]] = dict.fromkeys(("hold_code", "hold_sentence", "hold_until", "hold_key"))


@dataclass(frozen=True, slots=True)
class Scoring:
    """One pipeline's scoring since its last attempt opened; all zero for one that never scored.

    `nanocents`, `scored` and `picked` are what the next attempt will take over. `failures`: times in a row that the
    judge was away or rated nothing.
    """

    nanocents: int = 0
    scored: int = 0
    picked: int = 0
    last_chunk: str | None = None
    failures: int = 0
    hold: Hold | None = None
    hold_key: str | None = None

    def held(self, key: str) -> Hold | None:
        """What holds it under the settings that `key` stands for; a hold about other settings is none."""
        return self.hold if self.hold_key == key else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What came of a chunk: scores and codes of failures by sample id, and what all of it cost."""

    chunk_id: str
    judge_key: str
    scores: Mapping[str, float]
    failed: Collection[str]
    nanocents: int


class Scorings:
    """The scoring of one workspace's pipelines."""

    def __init__(self, registry: Registry, inbox: Inbox) -> None:
        self.registry = registry
        self._inbox = inbox

    def get(self, pipeline_id: str) -> Scoring:
        """How it stands with one pipeline."""
        with self.registry.read() as connection:
            row = connection.execute(sa.select(scorings).where(self._is(pipeline_id))).mappings().one_or_none()
        return Scoring() if row is None else _scoring(row)

    def all(self) -> dict[str, Scoring]:
        """How it stands with every pipeline that was ever scored for, by pipeline id."""
        mine = scorings.c.workspace == self.registry.workspace
        with self.registry.read() as connection:
            rows = connection.execute(sa.select(scorings).where(mine)).mappings()
            return {row["pipeline_id"]: _scoring(row) for row in rows}

    def asked(self, judge_key: str, now: datetime) -> Asked:
        """Which samples this judge failed to rate and is not asked about now, and which only other judges scored."""
        mine = sa.and_(scores.c.workspace == self.registry.workspace, scores.c.judge_key == judge_key)
        waits = sa.or_(scores.c.next_try_at.is_(None), scores.c.next_try_at > now)
        resting = sa.select(scores.c.sample_id).where(mine, ~scores.c.scored, waits)
        by_me = sa.select(scores.c.sample_id).where(mine, scores.c.scored)
        by_others = sa.select(scores.c.sample_id).where(
            scores.c.workspace == self.registry.workspace,
            scores.c.judge_key != judge_key,
            scores.c.scored,
            scores.c.sample_id.not_in(by_me),
        )
        with self.registry.read() as connection:
            return Asked(
                resting=tuple(connection.execute(resting).scalars()),
                by_others=tuple(connection.execute(by_others.distinct()).scalars()),
            )

    def keep(self, pipeline_id: str, chunk: Chunk, *, now: datetime) -> bool:
        """Store a chunk; False when it is stored already. Scores of samples deleted meanwhile are dropped, not their
        cost. A chunk with any score ends a hold.
        """
        rows = [_feedback(sample_id, score, now) for sample_id, score in chunk.scores.items()]
        with self.registry.write() as connection:
            self._inbox.put_feedback_in(connection, [], now=now)  # its lock comes before any other
            state = self._locked(connection, pipeline_id, now)
            if state.last_chunk == chunk.chunk_id:
                return False
            dead = self._inbox.put_feedback_in(connection, rows, now=now)
            for sample_id in chunk.scores:
                if sample_id not in dead:
                    self._note(connection, chunk.judge_key, sample_id, scored=True, now=now)
            for sample_id in chunk.failed:
                self._note(connection, chunk.judge_key, sample_id, scored=False, now=now)
            values: dict[str, Any] = {
                "nanocents": state.nanocents + chunk.nanocents,
                "scored": state.scored + len(chunk.scores),
                "picked": state.picked + sum(picked(score) for score in chunk.scores.values()),
                "last_chunk": chunk.chunk_id,
                **({"failures": 0, **_NO_HOLD} if chunk.scores else {}),
            }
            connection.execute(sa.update(scorings).where(self._is(pipeline_id)).values(**values, updated_at=now))
            return True

    def hold(self, pipeline_id: str, hold: Hold, *, key: str, now: datetime, failed: bool = True) -> None:
        """Note what holds scoring under the settings of `key`; `failed` counts it as one more failure in a row."""
        with self.registry.write() as connection:
            state = self._locked(connection, pipeline_id, now)
            values = {
                "hold_code": hold.code[:40],
                "hold_sentence": hold.sentence,
                "hold_until": hold.until,
                "hold_key": key,
                "failures": state.failures + failed,
            }
            connection.execute(sa.update(scorings).where(self._is(pipeline_id)).values(**values, updated_at=now))

    def forget(self, sample_ids: Iterable[str]) -> None:
        """Forget who was asked about samples that are gone."""
        ids = list(sample_ids)
        with self.registry.write() as connection:
            for start in range(0, len(ids), _AT_ONCE):
                some = scores.c.sample_id.in_(ids[start : start + _AT_ONCE])
                connection.execute(sa.delete(scores).where(scores.c.workspace == self.registry.workspace, some))

    # inside one transaction

    def _is(self, pipeline_id: str) -> sa.ColumnElement[bool]:
        return sa.and_(scorings.c.workspace == self.registry.workspace, scorings.c.pipeline_id == pipeline_id)

    def _locked(self, connection: sa.Connection, pipeline_id: str, now: datetime) -> Scoring:
        """The pipeline's row, made if it is not there, and locked."""
        fresh = {"nanocents": 0, "scored": 0, "picked": 0, "failures": 0, "updated_at": now}
        mine = {"workspace": self.registry.workspace, "pipeline_id": pipeline_id}
        insert_new(connection, scorings, {**mine, **fresh})
        query = sa.select(scorings).where(self._is(pipeline_id)).with_for_update()
        return _scoring(connection.execute(query).mappings().one())

    def _note(self, connection: sa.Connection, judge_key: str, sample_id: str, *, scored: bool, now: datetime) -> None:
        here = sa.and_(
            scores.c.workspace == self.registry.workspace,
            scores.c.sample_id == sample_id,
            scores.c.judge_key == judge_key,
        )
        before = connection.execute(sa.select(scores.c.tries).where(here)).scalar() or 0
        row = {
            "workspace": self.registry.workspace,
            "sample_id": sample_id,
            "judge_key": judge_key,
            "scored": scored,
            "tries": before + 1,
            "next_try_at": None if scored else next_try(before + 1, now),
            "created_at": now,
        }
        put_row(connection, scores, row)


def hand_over_in(connection: sa.Connection, workspace: str, pipeline_id: str, run_id: str) -> None:
    """Freeze into an attempt that opens what scoring did for it: whole cents; the rest accrues for the next one."""
    mine = sa.and_(scorings.c.workspace == workspace, scorings.c.pipeline_id == pipeline_id)
    row = connection.execute(sa.select(scorings).where(mine).with_for_update()).mappings().one_or_none()
    if row is None:
        return
    state = _scoring(row)
    taken = state.nanocents // NANOCENTS * NANOCENTS
    if taken or state.scored:
        frozen = {"nanocents": taken, "scored": state.scored, "picked": state.picked}
        attempt = sa.and_(attempts.c.workspace == workspace, attempts.c.run_id == run_id)
        before: dict[str, Any] = connection.execute(sa.select(attempts.c.frozen).where(attempt)).scalar_one()
        connection.execute(sa.update(attempts).where(attempt).values(frozen={**before, "sample_scoring": frozen}))
    over = _NO_HOLD if row["hold_code"] == SCORING_LIMIT else {}
    left = {"nanocents": state.nanocents - taken, "scored": 0, "picked": 0, **over}
    connection.execute(sa.update(scorings).where(mine).values(**left))


def _scoring(row: sa.RowMapping) -> Scoring:
    hold = None if row["hold_code"] is None else Hold(row["hold_code"], row["hold_sentence"], row["hold_until"])
    own = ("nanocents", "scored", "picked", "last_chunk", "failures", "hold_key")
    return Scoring(**{name: row[name] for name in own}, hold=hold)


def _feedback(sample_id: str, score: float, now: datetime) -> dict[str, Any]:
    """The judge's score as a row of FEEDBACK."""
    return {
        "feedback_id": str(uuid7()),
        "sample_id": sample_id,
        "verdict": "scored",
        "origin": "judge",
        "right_answer": None,
        "right_key": None,
        "right_bytes": None,
        "score": score,
        "reason": None,
        "created_at": now,
    }
