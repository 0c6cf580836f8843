"""Samples on the wire: traces with their signals and labels.

Belongs here: conversions, reading one sample. Does not belong here: filters (routers/samples.py), any rule.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

import polars as pl

from loop_dagster.api.errors import SampleNotYetRecorded
from loop_dagster.errors import NotFound
from loop_dagster.rules.feedback import PICK_SCORE, WORDS, deciding, id_key
from loop_dagster.rules.tags import Name
from loop_dagster.store.giving import carried
from loop_dagster.store.open import Store
from loop_dagster.wire import timestamp

#: Seconds that feedback waits for its sample before it is told to come again.
ON_ITS_WAY_S: Final = 0.3
_LOOK_EVERY_S: Final = 0.02
_SAMPLE_ID: Final = re.compile(r"[0-9a-f-]{36}")
#: Who gave feedback, in the wire's words.
SOURCES: Final[Mapping[str, str]] = {"here": "human", "import": "human", "judge": "judge"}
Row = Mapping[str, Any]


def read_sample(store: Store, sample_id: str, now: datetime) -> dict[str, Any]:
    """A sample with its text, its feedback and its labels, the oldest first. Raises NotFound, also for one that has
    expired at `now`.

    An id that the gateway gave for a request id which had come before means that one's first sample.
    """
    fits = _SAMPLE_ID.fullmatch(sample_id) is not None
    found = store.samples.get(sample_id, now) if fits else None
    if found is None and fits and (first := store.capturing.first_of(sample_id)) is not None:
        found = store.samples.get(first, now)
    if found is None:
        raise NotFound("sample", sample_id)
    return found


def read_issued(store: Store, sample_id: str, now: datetime) -> dict[str, Any]:
    """`read_sample`, for an id that the gateway may have given out a moment ago. Raises SampleNotYetRecorded too.

    A sample whose answer has just come to its end is milliseconds away, so that is waited for.
    """
    patience = time.monotonic() + ON_ITS_WAY_S
    while True:
        try:
            return read_sample(store, sample_id, now)
        except NotFound:
            if not store.capturing.on_its_way(sample_id, now):
                raise
        if time.monotonic() > patience:
            raise SampleNotYetRecorded(sample_id)
        time.sleep(_LOOK_EVERY_S)


def feedback_of(row: Row) -> Sequence[Row]:
    return cast("Sequence[Row]", row["feedback"])


def labels_of(row: Row) -> dict[Name, Row]:
    """What the sample carries now, by name."""
    return carried(cast("Sequence[Row]", row["labels"]))


def trace(row: Row) -> dict[str, Any]:
    """One sample as a list has it; `row` has its feedback and its labels."""
    return traces([row])[0]


def traces(rows: Sequence[Row], states: Mapping[str, Row] | None = None) -> list[dict[str, Any]]:
    """Samples of a list, each with its state in a pipeline where `states` has one by its id."""
    decided = _decided([one for row in rows for one in feedback_of(row)])
    return [_trace(row, decided.get(row["sample_id"]), (states or {}).get(row["sample_id"])) for row in rows]


def _trace(row: Row, decided: Row | None, state: Row | None) -> dict[str, Any]:
    answer = json.loads(row["answer"]) if row["answer"] else {}
    found = {
        "id": row["sample_id"],
        "trace_id": row["sample_id"],
        "deployment_id": row["source"],
        "conversation_id": row["conversation_id"],
        "model": row["model"],
        "origin": row["origin"],
        "messages": json.loads(row["messages"]),
        "completion": answer.get("content") or "",
        "tool_calls": answer.get("tool_calls"),
        "tools": json.loads(row["tools"]) if row["tools"] else None,
        "feedback": WORDS.get(decided["teaches"] or "") if decided is not None and decided["reviewed"] else None,
        "labels": [label_row(one) for one in labels_of(row).values()],
        "created_at": timestamp(row["created_at"]),
        "expires_at": timestamp(row["expires_at"]),
    }
    if decided is not None and decided["score"] is not None:
        found["judge"] = {"score": decided["score"], "picked": round(decided["score"], 9) >= PICK_SCORE}
    if state is not None:
        found["state"] = {name: state[name] for name in ("state", "attempt_no", "version_no", "reason")}
    return found


def trace_in_full(row: Row) -> dict[str, Any]:
    """One sample with every verdict on it."""
    return {**trace(row), "signals": [signal(one) for one in feedback_of(row)]}


def signal(row: Row) -> dict[str, Any]:
    """One feedback."""
    right = json.loads(row["right_answer"]) if row["right_answer"] else None
    return {
        "id": row["feedback_id"],
        "trace_id": row["sample_id"],
        "verdict": row["verdict"],
        "source": SOURCES[row["origin"]],
        "imported": row["origin"] == "import",
        "correction": right.get("content") if right else None,
        "correction_tool_calls": right.get("tool_calls") if right else None,
        "score": row["score"],
        "reason": row["reason"],
        "created_at": timestamp(row["created_at"]),
    }


def label_row(row: Row) -> dict[str, Any]:
    """A tag (its key is empty) or an attribute, whose value is the label of its key."""
    if row["value"] is None:
        return {"key": "", "label": row["label"], "parent": row["parent"]}
    return {"key": row["label"], "label": row["value"], "parent": None}


def _decided(feedback: Sequence[Row]) -> dict[str, Row]:
    """The verdict that decides about each sample that has any, as rules/feedback.py gives it, by sample id."""
    if not feedback:
        return {}
    columns = ("feedback_id", "sample_id", "verdict", "origin", "right_key", "score", "created_at")
    frame = pl.DataFrame(
        [{name: row[name] for name in columns} for row in feedback],
        schema_overrides={"right_key": pl.Int64, "score": pl.Float64},
        infer_schema_length=None,
    ).with_columns(id_key())
    ids = frame.select("id_key", "sample_id").unique()
    return {row["sample_id"]: row for row in deciding(frame).join(ids, on="id_key").iter_rows(named=True)}
