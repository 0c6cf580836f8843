"""The one reader of samples: lake and inbox together, deleted ones left out, and expired ones for who says when.

Belongs here: frames of keys for the rules, texts for the few samples that an attempt copies, and the pages that people
look at. Does not belong here: any rule about what a sample is worth (rules/) and any write (intake.py).

Order matters and every method keeps it: tombstones and inbox are read first, *then* the newest lake version. A row that
moves from the inbox to the lake meanwhile is then seen in one of them or in both, never in none; in both counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

import polars as pl

from loop_dagster.rules.feedback import COLUMNS as FEEDBACK_COLUMNS
from loop_dagster.rules.selection import SAMPLE_COLUMNS
from loop_dagster.store.expiring import Expiring
from loop_dagster.store.identities import Identities
from loop_dagster.store.inbox import Inbox
from loop_dagster.store.lake import Lake
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES, Table


@dataclass(frozen=True, slots=True)
class KeyFrames:
    """Lazy frames without any text: what the rules need to select, count and explain."""

    samples: pl.LazyFrame
    feedback: pl.LazyFrame
    labels: pl.LazyFrame

    def held(self) -> KeyFrames:
        """What selecting needs of the same frames, read once for a pass over many pipelines."""
        samples = self.samples.select(*SAMPLE_COLUMNS, "bytes", "flag")
        feedback = self.feedback.select(*FEEDBACK_COLUMNS, "right_bytes")
        frames = pl.collect_all([samples, feedback, self.labels])
        return KeyFrames(*(frame.rechunk().lazy() for frame in frames))


#: Text columns that the rules need all the same: with a value, a row of `labels` is an attribute and no tag.
_KEYS = ("value",)


class Samples:
    """Reads samples, feedback and labels of one workspace."""

    def __init__(self, lake: Lake, inbox: Inbox) -> None:
        self._lake = lake
        self._inbox = inbox
        self._identities = Identities(lake)
        self._expiring = Expiring(lake)

    def keys(self, now: datetime | None = None) -> KeyFrames:
        """Every column but text of the three tables, one row per id.

        With `now`, samples that have expired are left out; feedback and labels of theirs are about nobody then.
        """
        frames = self._frames(text=False, now=now)
        return KeyFrames(samples=frames[SAMPLES.name], feedback=frames[FEEDBACK.name], labels=frames[LABELS.name])

    def whole(self, now: datetime | None = None) -> KeyFrames:
        """The same three tables with their text columns."""
        frames = self._frames(text=True, now=now)
        return KeyFrames(samples=frames[SAMPLES.name], feedback=frames[FEEDBACK.name], labels=frames[LABELS.name])

    def count(self, now: datetime | None = None) -> int:
        """How many samples there are, at `now` without those that have expired: what the lake's log says, and a look at
        the few that wait, are deleted or have expired."""
        dead = pl.Series(self._inbox.tombstones(), dtype=pl.String)
        expired = pl.lit(value=False) if now is None else pl.col("expires_at") <= now
        waiting = self._inbox.waiting_frames()[SAMPLES.name].filter(~expired).get_column("sample_id")
        waiting = waiting.filter(~waiting.is_in(dead.implode()))
        lake = self._lake.snapshot(SAMPLES)
        if lake is None:
            return waiting.len()
        there = _there(lake.frame, "sample_id", waiting).len()
        gone = _there(lake.frame, "sample_id", dead)
        if now is not None and (names := self._expiring.files(lake.files, now)):
            over = self._lake.scan_files(SAMPLES, names).filter(expired).select("sample_id").collect()
            gone = pl.concat([gone, over.get_column("sample_id")])
        return lake.rows - gone.n_unique() + waiting.len() - there

    def lesson_texts(self, lessons: pl.DataFrame) -> pl.DataFrame:
        """Texts of what each sample teaches, in the order of `lessons`.

        `lessons` has `sample_id` and `right_key` (null where there is no right answer). Returned: those columns plus
        `messages`, `tools` and `right_answer`: the answer itself where its hash is `right_key`, else the correction
        whose hash it is. A sample that is gone meanwhile is left out.
        """
        ids = lessons.get_column("sample_id")
        frames = self.whole()
        samples = (
            frames.samples.filter(among(ids)).select("sample_id", "messages", "tools", "answer", "answer_key").collect()
        )
        corrections = (
            frames.feedback.filter(among(ids) & pl.col("right_answer").is_not_null())
            .select("sample_id", "right_key", pl.col("right_answer").alias("correction"))
            .unique(subset=["sample_id", "right_key"])
            .collect()
        )
        answered = pl.when(pl.col("right_key") == pl.col("answer_key")).then(pl.col("answer"))
        return (
            lessons.join(samples, on="sample_id", how="inner", maintain_order="left")
            .join(corrections, on=["sample_id", "right_key"], how="left", maintain_order="left")
            .with_columns(right_answer=answered.otherwise(pl.col("correction")))
            .drop("answer", "answer_key", "correction")
        )

    def find_identity(self, identity: str) -> str | None:
        """Id of the sample in the lake that has this identity, None if there is none."""
        return self._identities.find([identity]).get(identity)

    def find_identities(self, identities: Collection[str], now: datetime | None = None) -> dict[str, str]:
        """Those of the identities that the lake has, with the ids of their samples.

        With `now`, the identity of a sample that has expired is free again.
        """
        return self._identities.find(identities, now)

    def get(self, sample_id: str, now: datetime | None = None) -> dict[str, object] | None:
        """One sample with its text, its feedback (oldest first) and its labels; None if it is not there, or with `now`
        if it has expired.

        Cheap, however many there are: one that waits in the inbox is read by its id alone, since nothing about it can
        have left before it, and of the lake statistics leave one stretch of rows.
        """
        dead, waiting = self._inbox.of_sample(sample_id)
        if dead:
            return None
        found = waiting
        if waiting[SAMPLES.name].is_empty():
            here = pl.col("sample_id") == sample_id
            tables = (SAMPLES, FEEDBACK, LABELS)
            stored = pl.collect_all([self._lake.scan(table).filter(here) for table in tables])
            found = {
                table.name: pl.concat([rows, waiting[table.name]]).unique(table.key[0], maintain_order=True)
                for table, rows in zip(tables, stored, strict=True)
            }
        rows = found[SAMPLES.name].to_dicts()
        if not rows or (now is not None and rows[0]["expires_at"] <= now):
            return None
        return {
            **rows[0],
            "feedback": found[FEEDBACK.name].sort("created_at", "feedback_id").to_dicts(),
            "labels": found[LABELS.name].sort("created_at", "label_id").to_dicts(),
        }

    def _frames(self, *, text: bool, now: datetime | None) -> dict[str, pl.LazyFrame]:
        dead = self._inbox.tombstones()
        waiting = self._inbox.waiting_frames()
        lake = self._lake.snapshot(SAMPLES)
        found = {SAMPLES.name: SAMPLES.empty().lazy() if lake is None else lake.frame}
        found |= {table.name: self._lake.scan(table) for table in (FEEDBACK, LABELS)}
        tables = (SAMPLES, FEEDBACK, LABELS)
        frames = {t.name: self._frame(t, found[t.name], waiting[t.name], dead, text) for t in tables}
        if now is not None:
            over = pl.col("expires_at") <= now
            # Mostly nothing has expired since the last upkeep, and then nobody needs to read when anything does.
            in_lake = lake is not None and bool(self._expiring.files(lake.files, now))
            if in_lake or waiting[SAMPLES.name].select(over.any()).item():
                frames[SAMPLES.name] = frames[SAMPLES.name].filter(~over)
        return frames

    def _frame(
        self, table: Table, lake: pl.LazyFrame, waiting: pl.DataFrame, dead: Sequence[str], text: bool
    ) -> pl.LazyFrame:
        columns = [column.name for column in table.columns if text or column.kind != "text" or column.name in _KEYS]
        frame = lake.select(columns)
        if waiting.height:
            # Rows never change, so of one that is in both places either may count; to look for the few that wait is
            # cheaper than to compare all that do not.
            key = table.key[0]
            there = _there(lake, key, waiting.get_column(key))
            only = waiting.filter(~pl.col(key).is_in(there.implode())) if there.len() else waiting
            frame = pl.concat([frame, only.lazy().select(columns)])
        if dead:
            frame = frame.filter(~pl.col("sample_id").is_in(list(dead)))
        return frame


def _there(lake: pl.LazyFrame, key: str, ids: pl.Series) -> pl.Series:
    """Those of the ids that the lake has; no file is read for ids that are newer than all in it."""
    return lake.filter(among(ids, key)).select(key).collect().get_column(key)


def among(ids: pl.Series, key: str = "sample_id") -> pl.Expr:
    """Membership with the smallest and largest id, so that Delta's statistics prune files (ids are UUIDv7)."""
    if ids.is_empty():
        return pl.lit(False)
    return pl.col(key).is_between(pl.lit(ids.min()), pl.lit(ids.max())) & pl.col(key).is_in(ids.implode())
