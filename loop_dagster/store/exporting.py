"""Samples as lines of JSONL that an import takes back: texts read part by part, whatever the number of samples.

Belongs here: what a sample becomes as a row of a file, and reading them in parts. Does not belong here: which samples
(rules/matching.py), what an import makes of a row (rules/shapes.py).

What was said twice about one sample is told once: its line carries the verdict that decides, and the tags and
attributes that it has now. When a sample was recorded, under which source and by which model is not part of a row; an
import says those for all of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, Final

import orjson
import polars as pl

from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.matching import chosen, narrowed, read
from loop_dagster.store.giving import carried
from loop_dagster.store.open import Store
from loop_dagster.store.samples import KeyFrames, among

#: Samples whose keys are in memory at once, beside the ids of all.
WINDOW: Final = 10_000
#: Samples whose texts are.
PART: Final = 2_000
#: Lines of one block that is handed on.
_LINES: Final = 200


def exported(
    store: Store,
    conditions: DatasetConditions,
    *,
    now: datetime,
    limit: int | None = None,
    window: int = WINDOW,
    part: int = PART,
) -> Iterator[bytes]:
    """Blocks of whole lines, one line a sample that meets `conditions`, the oldest first, at most `limit`.

    All are looked up as they stand now; a sample that is deleted before its line is written is left out. What cannot be
    read is raised by the call where it concerns the first block, else by the iterator.
    """
    keys = store.samples.keys()
    samples = keys.samples.filter(*narrowed(conditions), pl.col("expires_at") > now)
    order = read(samples.select("created_at", "sample_id")).sort("created_at", "sample_id")["sample_id"]
    blocks = _blocks(store, _chosen(keys, order, conditions, now, window), limit, part)
    return chain([next(blocks, b"")], blocks)


def _chosen(
    keys: KeyFrames, order: pl.Series, conditions: DatasetConditions, now: datetime, window: int
) -> Iterator[pl.DataFrame]:
    """What meets the conditions, in order and a window at a time, with the verdict that decides about each."""
    for start in range(0, order.len(), window):
        ids = order.slice(start, window)
        here = among(ids)
        rows = chosen(
            keys.samples.filter(here),
            keys.feedback.filter(here),
            keys.labels.filter(here),
            groups=[conditions],
            now=now,
        )
        wanted = rows.select("sample_id", "teaches", "reviewed", "right_key")
        yield ids.to_frame().join(wanted, on="sample_id", how="inner", maintain_order="left")


def _blocks(store: Store, windows: Iterator[pl.DataFrame], limit: int | None, part: int) -> Iterator[bytes]:
    left = limit
    for wanted in windows:
        taken = wanted if left is None else wanted.head(left)
        for start in range(0, taken.height, part):
            rows = _rows(store.samples.whole(), taken.slice(start, part))
            for at in range(0, len(rows), _LINES):
                yield b"".join(line(row) for row in rows[at : at + _LINES])
        if left is not None:
            left -= taken.height
            if not left:
                return


def _rows(frames: KeyFrames, wanted: pl.DataFrame) -> Sequence[Mapping[str, Any]]:
    """Texts, corrections and labels of a part, in its order."""
    here = among(wanted["sample_id"])
    texts = frames.samples.filter(here).select("sample_id", "messages", "answer", "tools").collect()
    corrections = (
        frames.feedback.filter(here & pl.col("right_answer").is_not_null())
        .select("sample_id", "right_key", "right_answer")
        .unique(subset=["sample_id", "right_key"])
        .collect()
    )
    labels: dict[str, list[Mapping[str, Any]]] = {}
    for row in frames.labels.filter(here).sort("created_at", "label_id").collect().iter_rows(named=True):
        labels.setdefault(row["sample_id"], []).append(row)
    joined = wanted.join(texts, on="sample_id", how="inner", maintain_order="left").join(
        corrections, on=["sample_id", "right_key"], how="left", maintain_order="left"
    )
    return [{**row, "labels": carried(labels.get(row["sample_id"], ()))} for row in joined.iter_rows(named=True)]


def line(row: Mapping[str, Any]) -> bytes:
    """One sample as a line, from stored text as it is spelled: `messages`, `answer`, `tools`, the deciding verdict
    (`teaches`, `reviewed`, `right_answer`) and what it carries (`labels`).

    One that nobody answered is its question, under `prompt`; a verdict on it that is about no answer is left out, since
    there is nothing that it could be about.
    """
    messages, answer = row["messages"], row["answer"]
    parts = [f'{{"prompt":{messages}' if answer is None else f'{{"messages":{messages[:-1]},{answer}]']
    if row["tools"] is not None:
        parts.append(f'"tools":{row["tools"]}')
    verdict = row["teaches"] if row["reviewed"] else None
    if verdict in ("edited", "gold") and row["right_answer"] is not None:
        parts.append(f'"{_RIGHT[verdict]}":{_right(row["right_answer"])}')
    elif verdict in ("accepted", "rejected") and answer is not None:
        parts.append('"label":true' if verdict == "accepted" else '"label":false')
    if row["labels"]:
        shown = [_label(label) for label in row["labels"].values()]
        parts.append(f'"labels":{orjson.dumps(shown).decode()}')
    return (",".join(parts) + "}\n").encode()


_RIGHT: Final = {"edited": "correction", "gold": "ground_truth"}


def _right(stored: str) -> str:
    """A right answer as a text, or as a message where it calls tools."""
    message = orjson.loads(stored)
    return stored if message.get("tool_calls") else orjson.dumps(message["content"]).decode()


def _label(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["value"] is None:
        return {"key": "", "label": row["label"], "parent": row["parent"]}
    return {"key": row["label"], "label": row["value"], "parent": None}
