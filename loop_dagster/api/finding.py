"""Finds samples by filters over their keys; text is read for a page, and for a search.

Belongs here: filters as frames. Does not belong here: what is a valid filter (routers/samples.py), rows of answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import orjson
import polars as pl

from loop_dagster.api.rows.attempts import attempt_of
from loop_dagster.api.rows.pipelines import find as find_pipeline
from loop_dagster.opening import states_of
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.feedback import COLUMNS, PICK_SCORE, WORDS, deciding, id_key
from loop_dagster.rules.matching import chosen
from loop_dagster.store.open import Store
from loop_dagster.store.samples import KeyFrames
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
    """The samples that match. Raises NotFound for a pipeline or an attempt that is not there."""
    states = None
    if filters.pipeline is not None:
        states = states_of(store, find_pipeline(store, filters.pipeline).pipeline, now)
    keys = store.samples.keys()
    samples = _by_columns(keys.samples, filters)
    if states is not None:
        samples = samples.join(states.lazy().select("sample_id"), on="sample_id", how="semi")
    if filters.attempt is not None:
        samples = samples.join(_taken(store, filters.attempt, filters.split), on="sample_id", how="semi")
    if filters.dataset is not None:
        mine = chosen(samples, keys.feedback, keys.labels, groups=[filters.dataset], now=now)
        samples = samples.join(mine.lazy().select("sample_id"), on="sample_id", how="semi")
    samples = _by_feedback(samples, keys, filters)
    samples = _by_labels(samples, keys, filters)
    ids = samples.select("sample_id", "created_at").sort("created_at", "sample_id", descending=True).collect()
    matching = ids["sample_id"]
    if filters.text is not None:
        matching = _searched(store, matching, filters.text)
    page = matching.slice(offset, limit)
    shown = {} if states is None else _by_id(states.filter(pl.col("sample_id").is_in(page.implode())))
    return Found(_whole(store, page), matching.len(), shown)


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


def _by_feedback(samples: pl.LazyFrame, keys: KeyFrames, filters: Filters) -> pl.LazyFrame:
    if not (filters.signalled or filters.unsignalled or filters.signal or filters.judge):
        return samples
    decided = deciding(keys.feedback.select(*COLUMNS).collect().with_columns(id_key()))
    joined = samples.with_columns(id_key()).join(
        decided.lazy().select("id_key", "teaches", "reviewed", "score"), on="id_key", how="left"
    )
    by_person = pl.col("reviewed").fill_null(False)
    score = pl.col("score").round(9)
    if filters.signalled:
        joined = joined.filter(by_person)
    if filters.unsignalled or filters.judge:
        joined = joined.filter(~by_person)
    if filters.signal:
        stored = [verdict for verdict, word in WORDS.items() if word == filters.signal]
        joined = joined.filter(by_person & pl.col("teaches").is_in(stored))
    if filters.judge:
        bar = {"picked": score >= PICK_SCORE, "below_bar": score < PICK_SCORE, "unscored": score.is_null()}
        joined = joined.filter(bar[filters.judge])
    return joined


def _by_labels(samples: pl.LazyFrame, keys: KeyFrames, filters: Filters) -> pl.LazyFrame:
    if not (filters.label or filters.attributes or filters.unlabelled):
        return samples
    carried = (
        keys.labels.sort("created_at", "label_id")
        .group_by("sample_id", "label", maintain_order=True)
        .last()
        .filter(~pl.col("removed"))
    )
    if filters.label:
        wanted = filters.label.strip().lower()
        named = pl.col("value").is_null() & ((pl.col("label") == wanted) | (pl.col("parent") == wanted))
        samples = samples.join(carried.filter(named), on="sample_id", how="semi")
    for key, value in filters.attributes:
        has = (pl.col("label") == key) & (pl.col("value") == value)
        samples = samples.join(carried.filter(has), on="sample_id", how="semi")
    if filters.unlabelled:
        samples = samples.join(carried, on="sample_id", how="anti")
    return samples


def _taken(store: Store, run_id: str, split: str | None) -> pl.LazyFrame:
    attempt, _pipeline = attempt_of(store, run_id)
    mine = (pl.col("attempt") == attempt.key) & pl.col("role").is_in(SPLITS[split])
    return store.lake.scan(SELECTIONS).filter(mine).select("sample_id")


def _searched(store: Store, ids: pl.Series, text: str) -> pl.Series:
    """Those of the ids whose messages, answer or tool calls hold the text, whatever its case."""
    wanted = text.lower()
    written = orjson.dumps(wanted).decode()[1:-1]  # as it stands inside JSON
    holds = pl.any_horizontal(
        pl.col(name).fill_null("").str.to_lowercase().str.contains(written, literal=True)
        for name in ("messages", "answer")
    )
    near = (
        store.samples.whole()
        .samples.select("sample_id", "messages", "answer")
        .filter(pl.col("sample_id").is_in(ids.implode()) & holds)
        .collect()
    )
    # JSON has words of its own, such as "role": only what people and models wrote counts.
    hits = {row["sample_id"] for row in near.iter_rows(named=True) if wanted in _text(row)}
    return ids.filter(ids.is_in(list(hits)))


def _text(row: Mapping[str, Any]) -> str:
    turns = [*json.loads(row["messages"]), *([json.loads(row["answer"])] if row["answer"] else [])]
    parts = [str(turn.get("content") or "") for turn in turns]
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            parts += [call["function"]["name"], call["function"]["arguments"]]
    return "\n".join(parts).lower()


def _whole(store: Store, ids: pl.Series) -> list[dict[str, Any]]:
    """Samples with text, feedback and labels, in the order of `ids`; one that was deleted meanwhile is left out."""
    if ids.is_empty():
        return []
    frames = store.samples.whole()
    here = pl.col("sample_id").is_in(ids.implode())
    rows = {row["sample_id"]: {**row, "feedback": [], "labels": []} for row in _rows(frames.samples.filter(here))}
    for name, frame, key in (("feedback", frames.feedback, "feedback_id"), ("labels", frames.labels, "label_id")):
        for row in _rows(frame.filter(here).sort("created_at", key)):
            if row["sample_id"] in rows:
                rows[row["sample_id"]][name].append(row)
    return [rows[sample_id] for sample_id in ids if sample_id in rows]


def _rows(frame: pl.LazyFrame) -> list[dict[str, Any]]:
    return frame.collect().to_dicts()


def _by_id(states: pl.DataFrame) -> dict[str, dict[str, Any]]:
    return {row["sample_id"]: row for row in states.to_dicts()}
