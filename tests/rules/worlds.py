"""Small worlds of samples, feedback and labels for the tests of selection and hold-back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.selection import History, Scope, Selection, select
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES

START = datetime(2026, 1, 1, tzinfo=UTC)
TAG = "support"


def key(*parts: object) -> int:
    """A stable 63-bit key of anything printable."""
    value = 1_469_598_103_934_665_603
    for char in repr(parts):
        value = (value ^ ord(char)) * 1_099_511_628_211 % 2**63
    return value


@dataclass
class World:
    """What is stored, and what a pipeline with the tag `support` did so far; `run` makes an attempt."""

    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 7
    samples: list[dict[str, Any]] = field(default_factory=list)
    feedback: list[dict[str, Any]] = field(default_factory=list)
    labels: list[dict[str, Any]] = field(default_factory=list)
    held: list[pl.DataFrame] = field(default_factory=list)
    trained: list[pl.DataFrame] = field(default_factory=list)
    attempts: int = 0
    now: datetime = START

    def add(
        self,
        prompt: str,
        *,
        answer: str | None = "an answer",
        verdict: str | None = "accepted",
        exact: str | None = None,
        tags: Sequence[str] = (TAG,),
        days: int = 365,
        **other: Any,
    ) -> str:
        """One sample; `prompt` is its normalised prompt, `exact` its wording (the same unless given)."""
        self.now += timedelta(minutes=1)
        sample_id = f"s{len(self.samples):06d}"
        row = dict.fromkeys(SAMPLES.schema)
        row |= {
            "sample_id": sample_id,
            "source": "app",
            "origin": "captured",
            "identity": sample_id,
            "model": "m",
            "messages": "[]",
            "text_key": key(exact or prompt),
            "prompt_key": key("folded", prompt),
            "answer_key": None if answer is None else key(answer),
            "bytes": 10,
            "created_at": self.now,
            "expires_at": self.now + timedelta(days=days),
        }
        self.samples.append(row | other)
        for tag in tags:
            self.tag(sample_id, tag)
        if verdict:
            self.say(sample_id, verdict)
        return sample_id

    def tag(
        self, sample_id: str, label: str, *, parent: str | None = None, removed: bool = False, value: str | None = None
    ) -> None:
        self.now += timedelta(seconds=1)
        self.labels.append(
            {
                "label_id": f"l{len(self.labels):06d}",
                "sample_id": sample_id,
                "label": label,
                "value": value,
                "parent": parent,
                "removed": removed,
                "created_at": self.now,
            }
        )

    def say(
        self, sample_id: str, verdict: str, *, origin: str | None = None, right: str = "better", score: float = 0.9
    ) -> None:
        self.now += timedelta(seconds=1)
        corrected = verdict in ("edited", "gold")
        self.feedback.append(
            {
                "feedback_id": f"f{len(self.feedback):06d}",
                "sample_id": sample_id,
                "verdict": verdict,
                "origin": origin or ("judge" if verdict == "scored" else "here"),
                "right_answer": right if corrected else None,
                "right_key": key(right) if corrected else None,
                "right_bytes": len(right) if corrected else None,
                "score": score if verdict == "scored" else None,
                "reason": None,
                "created_at": self.now,
            }
        )

    @property
    def scope(self) -> Scope:
        return Scope(own_tag=TAG, seed=self.seed, settings=PipelineSettings.from_json(self.settings))

    @property
    def history(self) -> History:
        return History.of(
            held=pl.concat(self.held) if self.held else History.empty().held,
            trained=pl.concat(self.trained) if self.trained else _nothing_trained(),
        )

    def frames(self) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        return SAMPLES.frame(self.samples), FEEDBACK.frame(self.feedback), LABELS.frame(self.labels)

    def select(self, **options: Any) -> Selection:
        given = {"scope": self.scope, "history": self.history, "now": self.now} | options
        return select(*self.frames(), **given)

    def run(self, *, kept_adapter: bool = True, **options: Any) -> Selection:
        """Selects for the next attempt and lets it happen."""
        selection = self.select(**options)
        self.attempts += 1
        rows = selection.rows.with_columns(pl.lit(self.attempts, pl.Int64).alias("attempt_no"))
        self.held.append(rows.filter(pl.col("reason") == "held_new").select("sample_id", "prompt_key", "attempt_no"))
        if kept_adapter:
            trains = rows.filter(pl.col("role").is_in(["train", "check"]))
            self.trained.append(trains.select("sample_id", "right_key", "prompt_key", "attempt_no"))
        return selection


def _nothing_trained() -> pl.DataFrame:
    return pl.DataFrame(
        schema={"sample_id": pl.String, "right_key": pl.Int64, "prompt_key": pl.Int64, "attempt_no": pl.Int64}
    )


def reason(selection: Selection, sample_id: str) -> str:
    """Why the selection does with a sample what it does."""
    return str(selection.rows.filter(pl.col("sample_id") == sample_id)["reason"].item())


def ids(selection: Selection, *roles: str) -> set[str]:
    return set(selection.rows.filter(pl.col("role").is_in(list(roles)))["sample_id"])
