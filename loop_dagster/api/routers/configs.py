"""Sources and how they are recorded: `GET /api/loop/configs`, `GET` and `PUT /api/loop/configs/{source}`.

A source may have slashes, as names of models do: the whole rest of the address is its name.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from loop_dagster.api.bodies import Body, Sent, reader, schema_of
from loop_dagster.api.calls import Reader, Writer, now
from loop_dagster.wire import source_row

router = APIRouter(prefix="/api/loop/configs", tags=["sources"])


class Config(Body):
    """How a source is recorded. `tags` null keeps them and `[]` clears them; so does null for the others: it keeps."""

    enabled: bool
    retention_days: int | None = None
    sample_rate: float | None = None
    tags: list[str] | None = None


@router.get("")
def list_configs(caller: Reader) -> dict[str, Any]:
    """Every source that was set up."""
    return {"configs": [source_row(source) for source in caller.store.sources.list()]}


@router.get("/{source:path}")
def get_config(caller: Reader, source: str) -> dict[str, Any]:
    """One source; one that nobody set up is switched off."""
    return {"config": source_row(caller.store.sources.get(source))}


@router.put("/{source:path}", openapi_extra=schema_of(Config))
def put_config(
    caller: Writer, source: str, body: Annotated[tuple[Sent, Config], Depends(reader(Config))]
) -> JSONResponse:
    """Switch recording of a source on or off; what is left out stays as it is."""
    sent, wanted = body

    def write() -> dict[str, Any]:
        saved = caller.store.sources.put(
            source,
            enabled=wanted.enabled,
            days=wanted.retention_days,
            sample_rate=wanted.sample_rate,
            tags=wanted.tags,
            now=now(),
        )
        return {"config": source_row(saved)}

    return caller.once(sent, write)
