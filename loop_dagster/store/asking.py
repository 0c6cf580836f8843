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


def questions_left(store: Store, pipeline: Pipeline, attempt: str, now: datetime) -> tuple[pl.DataFrame, int]:
    """The attempt's questions that can be asked at `now`, in order, and how many are gone.

    Gone is what was deleted, expired, marked wrong or is no longer selected since the set was frozen: it is neither
    asked nor counted, and nothing takes its place (rules.md, Held back).
    """
    frozen = store.lake.scan(QUESTIONS).filter(pl.col("attempt") == attempt).sort("ordinal").collect()
    keys = store.samples.keys()
    asked = frozen.get_column("sample_id")
    mine = keys.samples.filter(pl.col("sample_id").is_in(asked.implode()))
    now_selected = selected(mine, keys.feedback, keys.labels, scope=scope_of(pipeline), now=now)
    fit = now_selected.filter(pl.col("teaches").is_null() | (pl.col("teaches") != "rejected"))
    left = frozen.join(fit.select("sample_id"), on="sample_id", how="semi", maintain_order="left")
    return left, frozen.height - left.height
