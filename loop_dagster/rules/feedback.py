"""Which verdict decides about a sample.

Belongs here: the order of precedence between people, imports and the judge, over a whole feedback frame at once. Does
not belong here: what a pipeline makes of the verdict (`selection.py`), reading or writing feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import polars as pl

from loop_dagster.rules.conditions import FeedbackWord

#: The judge picks a sample from this score on (rules.md, What a sample teaches).
PICK_SCORE: Final = 0.8


def id_key() -> pl.Expr:
    """A 128-bit hash of `sample_id` for joins in memory, never stored: a join on ids' text costs three times as much.

    Two of a million ids share one with a probability below 1e-26, less than that of a wrong bit in memory.
    """
    high, low = pl.col("sample_id").hash(1), pl.col("sample_id").hash(2)
    return (high.cast(pl.Int128) * 2**64 + low.cast(pl.Int128)).alias("id_key")


Teaches = Literal["accepted", "rejected", "edited", "gold", "scored"]

#: How a person's verdict reads in conditions and lists; a sample without one is `unreviewed`.
WORDS: Final[dict[str, FeedbackWord]] = {
    "accepted": "good",
    "edited": "corrected",
    "gold": "corrected",
    "rejected": "bad",
}

#: Columns of `feedback` that deciding needs; none of them is text.
COLUMNS: Final = ("feedback_id", "sample_id", "verdict", "origin", "right_key", "score", "created_at")

#: Feedback given here by a person overrules an import's, whichever is newer; any person's overrules the judge.
_PRECEDENCE: Final = {"judge": 0, "import": 1, "here": 2}


def deciding(feedback: pl.DataFrame) -> pl.DataFrame:
    """One row per sample that has any feedback: the verdict that decides (rules.md, What a sample teaches).

    `feedback` needs `COLUMNS`, with `id_key` in place of sample_id if it has one. Of the strongest origin the newest
    counts, the higher feedback_id at the same moment. Gives `id_key` of the sample, `teaches` (null: the judge's newest
    score is below 0.8), `reviewed` (a person decided), `right_key` and, where feedback has it, `right_bytes` (the
    correction's; null where the sample's own answer is meant), and `score` (the judge's, null once a person decided).
    """
    rows = feedback if "id_key" in feedback.columns else feedback.with_columns(id_key())
    decides: pl.Expr | pl.Series = pl.lit(True)
    # Nearly every sample has one row; only the others are worth sorting.
    ids = rows["id_key"].sort()
    repeated = ids.filter(ids == ids.shift()).unique()
    if len(repeated):
        several = rows["id_key"].is_in(repeated.implode())
        numbers = several.arg_true()
        contested = rows.select("id_key", "origin", "created_at", "feedback_id")[numbers].with_columns(
            pl.col("origin").replace_strict(_PRECEDENCE, return_dtype=pl.Int8), numbers.alias("_row")
        )
        newest = contested.sort("origin", "created_at", "feedback_id", descending=True).unique(
            "id_key", keep="first", maintain_order=True
        )
        wins = np.zeros(rows.height, dtype=np.bool_)
        wins[newest["_row"].to_numpy()] = True
        decides = ~several | pl.Series(wins)
    by_judge = pl.col("origin") == "judge"
    decided = (
        rows.lazy()
        .filter(decides)
        .select(
            "id_key",
            pl.when(~by_judge | (pl.col("score").round(9) >= PICK_SCORE)).then("verdict").alias("teaches"),
            (~by_judge).alias("reviewed"),
            *(
                pl.when(~by_judge).then(name).alias(name)
                for name in ("right_key", "right_bytes")
                if name in rows.columns
            ),
            pl.when(by_judge).then("score").alias("score"),
        )
    )
    return decided.collect()


def word(teaches: str | None) -> FeedbackWord:
    """The word of lists and conditions for a deciding verdict; the judge's picks are `unreviewed` like no feedback."""
    return WORDS.get(teaches or "", "unreviewed")


@dataclass(frozen=True, slots=True)
class Agreement:
    """On how many of `compared` samples the judge's newest score says what the newest feedback given here says."""

    agreed: int
    compared: int


def agreement(feedback: pl.DataFrame) -> Agreement:
    """How often the judge agrees with people, over samples that both have spoken about.

    Only feedback given here counts, never an import's. At 0.8 or more the judge says good; a person says good with good
    and the opposite with wrong, with or without a right answer. A gold answer says nothing about the model's answer.
    """
    rows = feedback.sort("created_at", "feedback_id", descending=True)
    person = rows.filter(pl.col("origin") == "here").unique("sample_id", keep="first", maintain_order=True)
    judge = rows.filter(pl.col("origin") == "judge").unique("sample_id", keep="first", maintain_order=True)
    both = person.filter(pl.col("verdict") != "gold").join(
        judge.select("sample_id", "score"), on="sample_id", suffix="_judge"
    )
    agrees = (pl.col("verdict") == "accepted") == (pl.col("score_judge").round(9) >= PICK_SCORE)
    return Agreement(agreed=int(both.select(agrees.sum()).item() or 0), compared=both.height)
