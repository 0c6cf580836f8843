"""What most commands open first."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from loop_dagster import scoring
from loop_dagster.opening import Counted, counted
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.wire import dataset_refs, pipeline_row

_left_open = ExitStack()


def opened() -> Store:
    """The stores of this installation; `close` ends their connections."""
    store = open_store()
    _left_open.callback(store.registry.dispose)
    return store


def close() -> None:
    """Close what this command opened, so that SQLite's log is folded in now and not whenever memory is tidied."""
    _left_open.close()


def now() -> datetime:
    return datetime.now(UTC)


def _minimums(found: Counted) -> dict[str, Any]:
    """How far the data is from the next attempt (`PipelineMinimums`)."""
    minimum = found.selection.minimum
    return {
        "basis": minimum.basis,
        "needed": minimum.needed,
        "have": minimum.have,
        "short": minimum.short,
        "picked_by_judge": minimum.picked,
        "message": f"{minimum.message} {found.problem}" if found.problem else minimum.message,
    }


def described(store: Store, pipeline: Pipeline, *, measured: bool = False) -> dict[str, Any]:
    """One pipeline for JSON; with `measured`, its minimums and its scoring counted now."""
    found = counted(store, pipeline, now()) if measured else None
    live = store.versions.live(pipeline.tag)
    row = pipeline_row(
        pipeline,
        attempts=len(store.attempts.list(pipeline.pipeline_id)),
        versions=len(store.versions.list(pipeline.pipeline_id)),
        live=live.version_no if live else None,
        minimums=_minimums(found) if found else None,
    )
    if found is not None:
        row["auto_scoring"] = scoring.described(store, pipeline, found.selection, now())
    return {**row, "datasets": dataset_refs(store.datasets.get_many(pipeline.settings.datasets))}
