"""Two attempts side by side, over the held-back samples that both were scored on.

Belongs here: which way each sample went, and the figures over all of them. Does not belong here: reading scores, and
the comparison that decides about one attempt (decision.py).
"""

from __future__ import annotations

from typing import Final, Literal

import polars as pl

from loop_dagster.rules.decision import PASS_SCORE
from loop_dagster.rules.numbers import mean, rounded

#: Closer than this on one sample is about the same (rules.md, Benchmarks).
TIE_BAND: Final = 0.02

Direction = Literal["higher", "lower", "same"]
SCORES: Final = {"sample_id": pl.String, "number": pl.Int64, "score": pl.Float64, "right_key": pl.UInt64}


def passes(score: float) -> bool:
    """Whether a score passes, 0.70 or more."""
    return rounded(score) >= PASS_SCORE


def shared(a: pl.DataFrame, b: pl.DataFrame) -> pl.DataFrame:
    """The samples that both were scored on, in a's order.

    Both have `SCORES`; b's are beside a's as `number_b` and so on. `changed` says that the right answer is another one,
    `direction` (`Direction`) which way b's score went against a's, null where it changed.
    """
    change = (pl.col("score_b") - pl.col("score")).round(9)
    went = (
        pl.when("changed")
        .then(None)
        .when(change >= TIE_BAND)
        .then(pl.lit("higher"))
        .when(change <= -TIE_BAND)
        .then(pl.lit("lower"))
        .otherwise(pl.lit("same"))
    )
    return (
        a.join(b, on="sample_id", how="inner", suffix="_b")
        .sort("number")
        .with_columns(pl.col("right_key").ne_missing(pl.col("right_key_b")).alias("changed"))
        .with_columns(went.alias("direction"))
    )


def figures(scores: pl.Series) -> dict[str, float | int] | None:
    """Rows, mean, and how many and which share passed; None of nothing."""
    values = scores.to_list()
    average = mean(values)
    if average is None:
        return None
    passed = sum(passes(score) for score in values)
    return {"rows": len(values), "mean": average, "passed": passed, "pass_rate": passed / len(values)}
