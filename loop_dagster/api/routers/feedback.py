"""What people say of a sample: verdicts, tags and attributes, and the workspace's tags.

Belongs here: the bodies of signals and labels. Does not belong here: rows (store/giving.py), which verdict decides
(rules/feedback.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, cast

import polars as pl
from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field

from loop_dagster.api.bodies import Body, Sent, reader, schema_of
from loop_dagster.api.calls import WHOLE_READS, Keep, Reader, Unread, Writer, now
from loop_dagster.api.rows.samples import Row, feedback_of, label_row, labels_of, read_issued, read_sample, signal
from loop_dagster.errors import BadRequest, LabelsMoved, NotFound
from loop_dagster.rules.carrying import carried
from loop_dagster.rules.feedback import id_key
from loop_dagster.rules.tags import tag
from loop_dagster.store.giving import feedback_row, label_rows, removal_row
from loop_dagster.store.inbox import LabelsSeen
from loop_dagster.store.open import Store

router = APIRouter(prefix="/api/loop", tags=["feedback"])

#: Words of the wire → stored word.
STORED: Final = {
    "good": "accepted",
    "bad": "rejected",
    "corrected": "edited",
    "accepted": "accepted",
    "rejected": "rejected",
    "edited": "edited",
    "gold": "gold",
}


#: Looks at a sample's labels before a call that meets others each time gives up.
_TRIES: Final = 100


class Signal(Body):
    """A person's verdict, with tags and attributes that land with it or not at all."""

    verdict: str
    source: str = "human"
    correction: str | None = None
    ground_truth: str | None = None
    reason: Annotated[str, Field(max_length=10_000)] | None = None
    score: None = None
    author: Annotated[str, Field(max_length=200)] | None = None
    metadata: dict[str, Any] | None = None
    labels: list[str] | None = None
    attributes: dict[str, str] | None = None
    parent: str | None = None


class LabelBody(Body):
    """Tags and attributes to put on; `parent` null keeps a tag's group and `""` takes it out."""

    labels: list[str] | None = None
    attributes: dict[str, str] | None = None
    parent: str | None = None


def verdict_of(word: str, right: str | None) -> str:
    """The stored word of a person's verdict with or without a right answer. Raises BadRequest."""
    stored = STORED.get(word.strip().lower())
    if stored is None:
        raise BadRequest(f"verdict must be one of {', '.join(STORED)}.", field="verdict")
    needs = stored in ("edited", "gold")
    if needs and not (right or "").strip():
        raise BadRequest(f"{stored} needs correction: the right answer, which is not empty.", field="correction")
    if not needs and right is not None:
        raise BadRequest(f"{stored} takes no correction; say corrected or gold.", field="correction")
    return stored


@router.post("/traces/{trace_id}/signals", status_code=201, openapi_extra=schema_of(Signal))
def give_signal(
    caller: Writer, trace_id: str, body: Annotated[tuple[Sent, Signal], Depends(reader(Signal))]
) -> JSONResponse:
    """Say what an answer was worth; the newest feedback of a person decides what the sample teaches."""
    sent, said = body

    def write(keep: Keep) -> dict[str, Any]:
        if said.source.strip().lower() != "human":
            raise BadRequest("source must be human: feedback given here is a person's.", field="source")
        right = said.correction if said.correction is not None else said.ground_truth
        verdict = verdict_of(said.verdict, right)

        def give(sample: Row, seen: LabelsSeen) -> dict[str, Any]:
            sample_id, moment = seen.sample_id, now()
            row = feedback_row(sample_id, verdict, right, said.reason, moment)
            labels = label_rows(
                sample_id,
                now=moment,
                labels=said.labels or (),
                attributes=said.attributes,
                parent=said.parent,
                already=labels_of(sample),
            )
            done = {"feedback_id": row["feedback_id"]}
            caller.store.inbox.put(
                feedback=[row],
                labels=labels,
                now=moment,
                then=lambda within: keep(within, done),
                seen=seen if labels else None,
            )
            return done

        return _on_labels(caller.store, lambda: read_issued(caller.store, trace_id, now()), give)

    def show(done: Row) -> dict[str, Any]:
        rows = feedback_of(read_sample(caller.store, trace_id, now()))
        return {"signal": next(signal(row) for row in rows if row["feedback_id"] == done["feedback_id"])}

    return caller.once_in(sent, write, status=201, show=show)


@router.get("/traces/{trace_id}/signals")
def list_signals(caller: Reader, trace_id: str) -> dict[str, Any]:
    """Every verdict on one sample, the oldest first."""
    return {"signals": [signal(row) for row in feedback_of(read_issued(caller.store, trace_id, now()))]}


@router.post("/traces/{trace_id}/labels", openapi_extra=schema_of(LabelBody))
def put_labels(
    caller: Writer, trace_id: str, body: Annotated[tuple[Sent, LabelBody], Depends(reader(LabelBody))]
) -> JSONResponse:
    """Put tags and attributes on a sample; an attribute has one value, the newest."""
    sent, said = body

    def write(keep: Keep) -> dict[str, Any]:
        if not said.labels and not said.attributes:
            raise BadRequest("labels or attributes is needed.", field="labels")

        def put(sample: Row, seen: LabelsSeen) -> dict[str, Any]:
            rows = label_rows(
                seen.sample_id,
                now=now(),
                labels=said.labels or (),
                attributes=said.attributes,
                parent=said.parent,
                already=labels_of(sample),
            )
            if rows:
                caller.store.inbox.put(labels=rows, now=now(), then=lambda within: keep(within, {}), seen=seen)
            return {}

        return _on_labels(caller.store, lambda: read_sample(caller.store, trace_id, now()), put)

    return caller.once_in(sent, write, show=lambda _done: _labels(read_sample(caller.store, trace_id, now())))


@router.delete("/traces/{trace_id}/labels/{label:path}")
def delete_label(caller: Writer, trace_id: str, label: str, sent: Unread, key: str | None = None) -> JSONResponse:
    """Take a tag off a sample, or with `key` the attribute that has this value."""

    def write(keep: Keep) -> dict[str, Any]:
        sample = read_sample(caller.store, trace_id, now())
        have = labels_of(sample)
        name = (tag(key or label), bool(key))
        found = have.get(name)
        if found is None or (key and found["value"] != label):
            raise NotFound("label", label)
        row = removal_row(sample["sample_id"], name, now())
        caller.store.inbox.put(labels=[row], now=now(), then=lambda within: keep(within, {}))
        return {}

    def show(_done: Row) -> dict[str, Any]:
        return {"deleted": True, **_labels(read_sample(caller.store, trace_id, now()))}

    return caller.once_in(sent, write, show=show)


@router.get("/labels")
def list_labels(caller: Reader) -> dict[str, Any]:
    """Every tag and attribute of the workspace, with how many samples carry it and under which parents."""
    with WHOLE_READS:
        keys = caller.store.samples.keys(now())
        here = keys.samples.select(id_key()).collect()["id_key"]
        rows = (
            carried(keys.labels)
            .filter(pl.col("id_key").is_in(here.implode()))
            .group_by("label", "value", "parent")
            .len()
            .sort("label", "value", "parent", nulls_last=False)
        )
    found: dict[tuple[str, str | None], dict[str | None, int]] = {}
    for label, value, parent, number in rows.iter_rows():
        found.setdefault((label, value), {})[parent] = number
    return {"labels": [_counted(label, value, parents) for (label, value), parents in found.items()]}


def _counted(label: str, value: str | None, parents: dict[str | None, int]) -> dict[str, Any]:
    """One tag or attribute; `parent` is the group that all of its samples are in."""
    groups = sorted((parent, number) for parent, number in parents.items() if parent is not None)
    one = groups[0][0] if len(groups) == 1 and None not in parents else None
    return {
        "key": label if value is not None else "",
        "label": value if value is not None else label,
        "traces": sum(parents.values()),
        "parent": one,
        "parents": [{"parent": parent, "traces": number} for parent, number in groups],
    }


def _on_labels(
    store: Store, read: Callable[[], Row], write: Callable[[Row, LabelsSeen], dict[str, Any]]
) -> dict[str, Any]:
    """Do a write that is decided from the labels that a sample has; anew when others put some on it meanwhile.

    So two calls at once never leave more than 32 on it. Raises LabelsMoved when that goes on for long.
    """
    tries = 0
    while True:
        drained = store.inbox.drained()  # before the look: what leaves the inbox during it counts as news
        sample = read()
        rows = cast("Sequence[Row]", sample["labels"])
        seen = LabelsSeen(str(sample["sample_id"]), frozenset(str(row["label_id"]) for row in rows), drained)
        try:
            return write(sample, seen)
        except LabelsMoved:
            tries += 1
            if tries == _TRIES:
                raise


def _labels(sample: Row) -> dict[str, Any]:
    return {"labels": [label_row(row) for row in labels_of(sample).values()]}
