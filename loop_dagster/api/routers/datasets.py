"""Datasets: listed, read, saved, edited, deleted, counted before they are saved, and exported.

Belongs here: the bodies, in which absent, null and a value are three things. Does not belong here: what a condition
means and which values it takes (rules/conditions.py), rows (rows/datasets.py), lines of a file (store/exporting.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field

from loop_dagster.api.bodies import Body, Revision, Sent, reader, schema_of
from loop_dagster.api.calls import WHOLE_READS, Reader, Unread, Writer, now
from loop_dagster.api.rows.datasets import dataset_rows, preview
from loop_dagster.errors import BadRequest, NotFound
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.pipelines import MAX_DATASETS
from loop_dagster.store.datasets import Dataset
from loop_dagster.store.exporting import exported
from loop_dagster.store.open import Store
from loop_dagster.wire import pipeline_ref

router = APIRouter(prefix="/api/loop/datasets", tags=["datasets"])

#: Fields of a body that null means nothing for; null takes each of the others out.
_NEVER_NULL: Final = ("name", "tags", "match", "feedback", "datasets", "expected_revision")
Limit = Annotated[int, Query(ge=1, le=200)]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]


class Conditions(Body):
    """What samples have to be; values are checked one by one when they are applied."""

    tags: list[str] | None = None
    match: str | None = None
    feedback: list[str] | None = None
    origin: str | None = None
    model: str | None = None
    from_: Annotated[str | None, Field(alias="from")] = None
    to: str | None = None

    def sent(self) -> dict[str, Any]:
        """The conditions that were sent. Raises BadRequest for a null that means nothing."""
        for name in _NEVER_NULL:
            if name in self.model_fields_set and getattr(self, name) is None:
                raise BadRequest(f"{name} must not be null: leave it out to keep it.", field=name)
        fields = Conditions.model_fields
        return {fields[name].alias or name: getattr(self, name) for name in fields if name in self.model_fields_set}


class DatasetBody(Conditions):
    """A name and its conditions, all of which hold together."""

    name: str | None = None


class DatasetEdit(DatasetBody):
    """An edit: only what is sent changes; `expected_revision` refuses it when somebody else saved meanwhile."""

    expected_revision: Revision | None = None


class Preview(Conditions):
    """Conditions to count; `datasets` adds the samples of saved ones, as a pipeline adds them."""

    datasets: Annotated[list[str] | None, Field(max_length=MAX_DATASETS)] = None


@router.get("")
def list_datasets(
    caller: Reader, limit: Limit = 50, offset: Offset = 0, q: Annotated[str | None, Query(max_length=200)] = None
) -> dict[str, Any]:
    """The workspace's datasets, the most recently changed first, a page at a time."""
    store = caller.store
    found = [one for one in store.datasets.list() if not q or q.casefold() in one.name.casefold()]
    with WHOLE_READS:
        rows = dataset_rows(store, found[offset : offset + limit], now())
    return {"datasets": rows, "total": len(found), "limit": limit, "offset": offset}


@router.post("", status_code=201, openapi_extra=schema_of(DatasetBody))
def create_dataset(
    caller: Writer, body: Annotated[tuple[Sent, DatasetBody], Depends(reader(DatasetBody))]
) -> JSONResponse:
    """Save a set of conditions under a name; nothing trains on it until a pipeline takes it."""
    sent, wanted = body

    def write() -> dict[str, Any]:
        given = wanted.sent()
        if wanted.name is None:
            raise BadRequest("name is needed.", field="name")
        conditions = DatasetConditions.from_json(given)
        made = caller.store.datasets.create(wanted.name, conditions=conditions, created_by=caller.actor, now=now())
        return _shown(caller.store, made)

    return caller.once(sent, write, status=201)


@router.post("/preview", openapi_extra=schema_of(Preview))
def preview_dataset(caller: Reader, body: Annotated[tuple[Sent, Preview], Depends(reader(Preview))]) -> dict[str, Any]:
    """Count what conditions select, before anything is saved."""
    _sent, wanted = body
    conditions = DatasetConditions.from_json(wanted.sent())
    ids = list(dict.fromkeys(wanted.datasets or ()))
    found = caller.store.datasets.get_many(ids)
    there = {one.dataset_id for one in found}
    missing = next((one for one in ids if one not in there), None)
    if missing is not None:
        raise NotFound("dataset", missing)
    with WHOLE_READS:
        return preview(caller.store, conditions, found, now())


@router.get("/{dataset_id}")
def get_dataset(caller: Reader, dataset_id: str) -> dict[str, Any]:
    """One dataset, its samples counted now."""
    return _shown(caller.store, caller.store.datasets.get(dataset_id))


@router.put("/{dataset_id}", openapi_extra=schema_of(DatasetEdit))
def update_dataset(
    caller: Writer, dataset_id: str, body: Annotated[tuple[Sent, DatasetEdit], Depends(reader(DatasetEdit))]
) -> JSONResponse:
    """Change what is sent and nothing else; pipelines train on the new selection from their next attempt."""
    sent, wanted = body

    def write() -> dict[str, Any]:
        changed = caller.store.datasets.edit(
            dataset_id,
            conditions=wanted.sent(),
            name=wanted.name,
            expected_revision=wanted.expected_revision,
            now=now(),
        )
        return _shown(caller.store, changed)

    return caller.once(sent, write)


@router.delete("/{dataset_id}")
def delete_dataset(caller: Writer, dataset_id: str, sent: Unread) -> JSONResponse:
    """Delete a dataset and take it off every pipeline; its samples stay."""

    def write() -> dict[str, Any]:
        gone = caller.store.datasets.delete(dataset_id, now=now())
        return {"deleted": True, "removed_from": [pipeline_ref(one) for one in gone.removed_from]}

    return caller.once(sent, write)


@router.get("/{dataset_id}/export", response_class=StreamingResponse)
def export_dataset(
    caller: Reader,
    dataset_id: str,
    format_: Annotated[Literal["jsonl"], Query(alias="format")] = "jsonl",
    limit: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
) -> StreamingResponse:
    """Its samples as a file, one line each, the oldest first, in the rows that an import takes back as they are."""
    store = caller.store
    dataset = store.datasets.get(dataset_id)
    lines = exported(store, dataset.conditions, now=now(), limit=limit)
    headers = {
        "X-Loop-Stored-Elsewhere": "0",  # every text is in this installation's lake
        "Content-Disposition": f'attachment; filename="{dataset.dataset_id}.{format_}"',
    }
    return StreamingResponse(lines, media_type="application/x-ndjson; charset=utf-8", headers=headers)


def _shown(store: Store, dataset: Dataset) -> dict[str, Any]:
    return dataset_rows(store, [dataset], now())[0]
