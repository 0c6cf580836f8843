"""Which questions of an attempt can still be asked when its comparison starts.

Belongs here: comparing the frozen questions with what is there now. Does not belong here: the bars (rules/decision.py).
"""

from __future__ import annotations

from datetime import datetime

import polars as pl

from loop_dagster.rules.selection import selected
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.selecting import scope_of
from loop_dagster.tables import QUESTIONS

#: An answer may always be this long, and this many times as long as the longest right answer (ours).
SHORTEST_LIMIT = 128
TIMES_THE_LONGEST = 4
#: Fewer bytes than most tokenizers need for a token of running text, so that the limit errs on the long side.
BYTES_PER_TOKEN = 2


def answer_limit(questions: pl.DataFrame, *, most: int) -> int:
    """Tokens that both models may answer with, at most `most`: enough for any answer like the right ones.

    A base model that rambles on would otherwise take most of a comparison's time, and what it says beyond four times
    the longest right answer makes it no better. Where no question has a right answer the limit is `most`.
    """
    longest: int | None = questions.select(pl.col("right_answer").str.len_bytes().max()).item()
    if longest is None:
        return most
    return min(most, max(SHORTEST_LIMIT, TIMES_THE_LONGEST * longest // BYTES_PER_TOKEN))


def questions_left(store: Store, pipeline: Pipeline, attempt: str, now: datetime) -> tuple[pl.DataFrame, int]:
    """The attempt's questions that can be asked at `now`, in order, and how many are gone.

    Gone is what was deleted, expired, marked wrong or is no longer selected since the set was frozen: it is neither
    asked nor counted, and nothing takes its place (rules.md, Held back).
    """
    frozen = store.lake.scan(QUESTIONS).filter(pl.col("attempt") == attempt).sort("ordinal").collect()
    keys = store.samples.keys()
    asked = frozen.get_column("sample_id")
    mine = keys.samples.filter(pl.col("sample_id").is_in(asked.implode()))
    now_selected = selected(mine, keys.feedback, keys.labels, scope=scope_of(store, pipeline), now=now)
    fit = now_selected.filter(pl.col("teaches").is_null() | (pl.col("teaches") != "rejected"))
    left = frozen.join(fit.select("sample_id"), on="sample_id", how="semi", maintain_order="left")
    return left, frozen.height - left.height
