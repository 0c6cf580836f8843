"""Finds samples by filters over their keys; text is read for a page, and for a search.

Belongs here: filters as frames. Does not belong here: what is a valid filter (routers/samples.py), rows of answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import polars as pl

from loop_dagster.api.rows.attempts import attempt_of
from loop_dagster.api.rows.pipelines import find as find_pipeline
from loop_dagster.api.searching import holds
from loop_dagster.opening import states_of
from loop_dagster.rules.carrying import carried
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.feedback import COLUMNS, PICK_SCORE, WORDS, deciding, id_key
from loop_dagster.rules.matching import chosen, tagged
from loop_dagster.store.open import Store
from loop_dagster.store.samples import KeyFrames, among
from loop_dagster.tables import SELECTIONS

#: How an attempt's split reads on the wire → roles of its selection.
SPLITS: Final = {"train": ["train", "check"], "held_back": ["holdout"], None: ["train", "check", "holdout"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What a list of samples is narrowed by; None, False and () narrow nothing, and all others add up."""

    source: str | None = None
    conversation_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    signalled: bool = False
    unsignalled: bool = False
    signal: str | None = None
    model: str | None = None
    origin: str | None = None
    label: str | None = None
    attributes: tuple[tuple[str, str], ...] = ()
    unlabelled: bool = False
    pipeline: str | None = None
    attempt: str | None = None
    split: str | None = None
    judge: str | None = None
    dataset: DatasetConditions | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A page of samples, the newest first, each with its feedback and labels; `total` of all that match.

    `states` has the state of each in the pipeline of the filter, by sample id; empty without one.
    """

    rows: list[dict[str, Any]]
    total: int
    states: Mapping[str, Mapping[str, Any]]


def find(store: Store, filters: Filters, now: datetime, *, limit: int, offset: int) -> Found:
    """The samples that match. Raises NotFound for a pipeline or an attempt that is not there.

    Without any filter a page costs a look at two columns and the total none. Filters on columns cost those columns,
    `dataset` and those on feedback and labels the keys of these too, `text` all text; `pipeline` counts the pipeline
    anew. Text, feedback and labels of the page itself are read from the stretch of files that its ids lie in.
    """
    states = None
    if filters.pipeline is not None:
        states = states_of(store, find_pipeline(store, filters.pipeline).pipeline, now)
    frames = store.samples.whole(now)
    keep = [
        *([_is_in(states.select(id_key())["id_key"])] if states is not None else []),
        *([_is_in(_taken(store, filters.attempt, filters.split))] if filters.attempt is not None else []),
        *_by_feedback(frames, filters),
        *_by_labels(frames, filters),
    ]
    samples = _by_columns(frames.samples, filters)
    if filters.dataset is not None:
        keep.append(
            _is_in(chosen(samples, frames.feedback, frames.labels, groups=[filters.dataset], now=now)["id_key"])
        )
    if keep:
        samples = samples.with_columns(id_key()).filter(keep)
    if filters.text is not None:
        samples = samples.filter(holds(filters.text))
    matching = samples.select("sample_id", "created_at")
    if filters == Filters():
        total, page = store.samples.count(now), _newest(matching, limit, offset)
    else:
        rows = matching.collect()
        total, page = rows.height, _newest(rows.lazy(), limit, offset)
    shown = {} if states is None else _by_id(states.filter(pl.col("sample_id").is_in(page.implode())))
    return Found(_whole(frames, page), total, shown)


def _newest(samples: pl.LazyFrame, limit: int, offset: int) -> pl.Series:
    """Ids of one page, the newest first; of two from the same moment the higher id."""
    order = ["created_at", "sample_id"]
    first = samples.top_k(offset + limit, by=order).collect()
    return first.sort(order, descending=True)["sample_id"].slice(offset, limit)


def _is_in(keys: pl.Series) -> pl.Expr:
    return pl.col("id_key").is_in(keys.implode())


def _by_columns(samples: pl.LazyFrame, filters: Filters) -> pl.LazyFrame:
    equal = {
        "source": filters.source,
        "conversation_id": filters.conversation_id,
        "model": filters.model,
        "origin": filters.origin,
    }
    for name, value in equal.items():
        if value is not None:
            samples = samples.filter(pl.col(name) == value)
    if filters.since is not None:
        samples = samples.filter(pl.col("created_at") >= filters.since)
    if filters.until is not None:
        samples = samples.filter(pl.col("created_at") <= filters.until)
    return samples


def _by_feedback(frames: KeyFrames, filters: Filters) -> list[pl.Expr]:
    """Conditions on what people and the judge said, over `id_key`."""
    if not (filters.signalled or filters.unsignalled or filters.signal or filters.judge):
        return []
    decided = deciding(frames.feedback.select(*COLUMNS).collect().with_columns(id_key()))
    reviewed = decided.filter("reviewed")
    keep = []
    if filters.signalled:
        keep.append(_is_in(reviewed["id_key"]))
    if filters.unsignalled or filters.judge:
        keep.append(~_is_in(reviewed["id_key"]))
    if filters.signal:
        stored = [verdict for verdict, word in WORDS.items() if word == filters.signal]
        keep.append(_is_in(reviewed.filter(pl.col("teaches").is_in(stored))["id_key"]))
    if filters.judge == "unscored":
        keep.append(~_is_in(decided.drop_nulls("score")["id_key"]))
    elif filters.judge:
        picked = pl.col("score").round(9) >= PICK_SCORE
        keep.append(_is_in(decided.filter(picked if filters.judge == "picked" else ~picked)["id_key"]))
    return keep


def _by_labels(frames: KeyFrames, filters: Filters) -> list[pl.Expr]:
    """Conditions on what samples carry, over `id_key`."""
    keep = []
    if filters.label:
        keep.append(_is_in(tagged(frames.labels, [filters.label.strip().lower()])))
    if filters.attributes:
        keys = [key for key, _value in filters.attributes]
        rows = carried(frames.labels.filter(pl.col("label").is_in(keys)))
        for key, value in filters.attributes:
            keep.append(_is_in(rows.filter((pl.col("label") == key) & (pl.col("value") == value))["id_key"]))
    if filters.unlabelled:
        keep.append(~_is_in(carried(frames.labels)["id_key"]))
    return keep


def _taken(store: Store, run_id: str, split: str | None) -> pl.Series:
    attempt, _pipeline = attempt_of(store, run_id)
    mine = (pl.col("attempt") == attempt.key) & pl.col("role").is_in(SPLITS[split])
    return store.lake.scan(SELECTIONS).filter(mine).select(id_key()).collect()["id_key"]


def _whole(frames: KeyFrames, ids: pl.Series) -> list[dict[str, Any]]:
    """Samples with text, feedback and labels, in the order of `ids`."""
    if ids.is_empty():
        return []
    samples, feedback, labels = pl.collect_all(
        [
            frames.samples.filter(among(ids)),
            frames.feedback.filter(among(ids)).sort("created_at", "feedback_id"),
            frames.labels.filter(among(ids)).sort("created_at", "label_id"),
        ]
    )
    rows = {row["sample_id"]: {**row, "feedback": [], "labels": []} for row in samples.iter_rows(named=True)}
    for name, frame in (("feedback", feedback), ("labels", labels)):
        for row in frame.iter_rows(named=True):
            if row["sample_id"] in rows:
                rows[row["sample_id"]][name].append(row)
    return [rows[sample_id] for sample_id in ids if sample_id in rows]


def _by_id(states: pl.DataFrame) -> dict[str, dict[str, Any]]:
    return {row["sample_id"]: row for row in states.to_dicts()}
