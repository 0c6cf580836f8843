"""The one reader of samples: lake and inbox together, deleted ones left out.

Belongs here: frames of keys for the rules, texts for the few samples that an attempt copies, and the pages that people
look at. Does not belong here: any rule about what a sample is worth (rules/) and any write (intake.py).

Order matters and every method keeps it: tombstones and inbox are read first, *then* the newest lake version. A row that
moves from the inbox to the lake meanwhile is then seen in one of them or in both, never in none; in both counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from loop_dagster.rules.feedback import COLUMNS as FEEDBACK_COLUMNS
from loop_dagster.rules.selection import SAMPLE_COLUMNS
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

    def keys(self) -> KeyFrames:
        """Every column but text of the three tables, one row per id."""
        frames = self._frames(text=False)
        return KeyFrames(samples=frames[SAMPLES.name], feedback=frames[FEEDBACK.name], labels=frames[LABELS.name])

    def whole(self) -> KeyFrames:
        """The same three tables with their text columns."""
        frames = self._frames(text=True)
        return KeyFrames(samples=frames[SAMPLES.name], feedback=frames[FEEDBACK.name], labels=frames[LABELS.name])

    def count(self) -> int:
        return int(self.keys().samples.select(pl.len()).collect().item())

    def lesson_texts(self, lessons: pl.DataFrame) -> pl.DataFrame:
        """Texts of what each sample teaches, in the order of `lessons`.

        `lessons` has `sample_id` and `right_key` (null where there is no right answer). Returned: those columns plus
        `messages`, `tools` and `right_answer`: the answer itself where its hash is `right_key`, else the correction
        whose hash it is. A sample that is gone meanwhile is left out.
        """
        ids = lessons.get_column("sample_id")
        frames = self.whole()
        samples = (
            frames.samples.filter(among(ids))
            .select("sample_id", "messages", "tools", "answer", "answer_key")
            .collect()
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
        found = self._lake.scan(SAMPLES).filter(pl.col("identity") == identity).select("sample_id").collect()
        return str(found.item(0, 0)) if found.height else None

    def get(self, sample_id: str) -> dict[str, object] | None:
        """One sample with its text, its feedback (oldest first) and its labels; None if it is not there."""
        frames = self.whole()
        here = pl.col("sample_id") == sample_id
        rows = frames.samples.filter(here).collect().to_dicts()
        if not rows:
            return None
        return {
            **rows[0],
            "feedback": frames.feedback.filter(here).sort("created_at", "feedback_id").collect().to_dicts(),
            "labels": frames.labels.filter(here).sort("created_at", "label_id").collect().to_dicts(),
        }

    def _frames(self, *, text: bool) -> dict[str, pl.LazyFrame]:
        dead = self._inbox.tombstones()
        waiting = self._inbox.waiting_frames()
        return {
            table.name: self._frame(table, waiting[table.name], dead, text) for table in (SAMPLES, FEEDBACK, LABELS)
        }

    def _frame(self, table: Table, waiting: pl.DataFrame, dead: Sequence[str], text: bool) -> pl.LazyFrame:
        columns = [column.name for column in table.columns if text or column.kind != "text" or column.name in _KEYS]
        frame = self._lake.scan(table).select(columns)
        key = table.key[0]
        if waiting.height:
            frame = pl.concat(
                [frame.filter(~pl.col(key).is_in(waiting.get_column(key).implode())), waiting.lazy().select(columns)]
            )
        if dead:
            frame = frame.filter(~pl.col("sample_id").is_in(list(dead)))
        return frame


def among(ids: pl.Series) -> pl.Expr:
    """Membership with the smallest and largest id, so that Delta's statistics prune files (ids are UUIDv7)."""
    if ids.is_empty():
        return pl.lit(False)
    return pl.col("sample_id").is_between(pl.lit(ids.min()), pl.lit(ids.max())) & pl.col("sample_id").is_in(
        ids.implode()
    )
