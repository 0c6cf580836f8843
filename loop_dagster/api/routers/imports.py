"""Imports through the API: `POST /api/loop/import` and `POST /api/loop/pipelines/{id}/import`.

Belongs here: the body, in which a number of a row keeps its spelling and a row that cannot be read is refused alone.
Does not belong here: cutting rows out of a body (apart.py), what a row becomes (rules/shapes.py) and storing it
(store/importing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from loop_dagster.api.apart import cut
from loop_dagster.api.apart import read as read_elements
from loop_dagster.api.bodies import LARGE, Body, Sent, check_content_type, checked, parsed, read, schema_of
from loop_dagster.api.calls import Caller, Writer, now
from loop_dagster.api.errors import ImportIncomplete
from loop_dagster.api.rows.pipelines import find
from loop_dagster.errors import BadRequest
from loop_dagster.rules import canonical
from loop_dagster.store.importing import import_rows
from loop_dagster.store.intake import lake_lease
from loop_dagster.store.leases import this_process
from loop_dagster.store.sources import source_name

router = APIRouter(prefix="/api/loop", tags=["imports"])

#: Rows of one call (rules.md, Import).
MAX_ROWS: Final = 5_000
#: Seconds that a call waits for the lake, while somebody else writes to it.
WAIT_S: Final = 20.0


class PipelineImport(Body):
    """An import into a pipeline. `rows` are read apart from the rest, so that their numbers keep their spelling."""

    rows: list[Any]
    source: str | None = None
    model: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    labels: list[str] | None = None
    attributes: dict[str, str] | None = None
    import_id: Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[\x21-\x7e]+$")] | None = None
    row_offset: Annotated[int, Field(ge=0, le=2**53)] | None = None
    row_ids: list[str] | None = None
    default_feedback: str | None = None


class Import(PipelineImport):
    """An import under a source of its own."""

    source: str


async def _pipeline_body(request: Request) -> tuple[Sent, PipelineImport]:
    return await _body(request, PipelineImport)


async def _source_body(request: Request) -> tuple[Sent, PipelineImport]:
    return await _body(request, Import)


async def _body(request: Request, model: type[PipelineImport]) -> tuple[Sent, PipelineImport]:
    sent = await read(request, LARGE)
    check_content_type(request.headers.get("content-type"))
    return sent, await run_in_threadpool(_read, sent.raw, model)


def _read(raw: bytes, model: type[PipelineImport]) -> PipelineImport:
    """The body with rows as `canonical.loads` gives them, or the Refusal of one that cannot be kept. Raises BadRequest.

    Most bodies are read at once; only one with something in it that cannot be kept is cut into its rows.
    """
    try:
        whole = canonical.loads(raw, once=True)
        if not isinstance(whole, dict):
            raise BadRequest("The body must be a JSON object.")
        rows = _checked_rows(whole.pop("rows", None))
        rest = parsed(canonical.dump_bytes(whole))
    except canonical.UnreadableJsonError as error:
        rest, rows = _read_apart(raw, error)
    return checked(model, {**rest, "rows": []}).model_copy(update={"rows": rows})


def _read_apart(raw: bytes, why: canonical.UnreadableJsonError) -> tuple[dict[str, Any], list[Any]]:
    """The rest of the body and its rows, each by itself. Raises BadRequest for what is wrong outside of the rows."""
    try:
        if why.code in canonical.NO_JSON:
            raise why
        without, elements = cut(raw, "rows", most=MAX_ROWS)
        if len(elements) > MAX_ROWS:
            raise _too_many()
        rest = parsed(without)
        _checked_rows(rest.pop("rows", None))
        return rest, read_elements(elements)
    except canonical.UnreadableJsonError:
        raise BadRequest("The body is not JSON in UTF-8. Nothing was stored.") from None


def _checked_rows(rows: object) -> list[Any]:
    if not isinstance(rows, list):
        raise BadRequest("rows is needed: a list of objects, one a conversation.", field="rows")
    if len(rows) > MAX_ROWS:
        raise _too_many()
    return rows


def _too_many() -> BadRequest:
    return BadRequest(f"rows holds at most {MAX_ROWS:,} rows a call. Nothing was stored.", field="rows")


@router.post("/import", openapi_extra=schema_of(Import))
def import_under_source(
    caller: Writer, body: Annotated[tuple[Sent, PipelineImport], Depends(_source_body)]
) -> JSONResponse:
    """Bring conversations in; what each row is decides what becomes of it."""
    sent, wanted = body
    return caller.once(sent, lambda: _import(caller, wanted, source=wanted.source or "", own=()))


@router.post("/pipelines/{pipeline_id}/import", openapi_extra=schema_of(PipelineImport))
def import_into_pipeline(
    caller: Writer, pipeline_id: str, body: Annotated[tuple[Sent, PipelineImport], Depends(_pipeline_body)]
) -> JSONResponse:
    """Bring conversations in with the pipeline's own tag on each; its source is that tag unless said otherwise."""
    sent, wanted = body

    def write() -> dict[str, Any]:
        tag = find(caller.store, pipeline_id).pipeline.tag
        return _import(caller, wanted, source=wanted.source or tag, own=(tag,))

    return caller.once(sent, write)


def _import(caller: Caller, wanted: PipelineImport, *, source: str, own: Sequence[str]) -> dict[str, Any]:
    """Import and answer with every count. Raises ImportIncomplete, which carries the same, when a write failed."""
    store = caller.store
    holder = f"an import through the API ({this_process()})"
    result = import_rows(
        store.lake,
        wanted.rows,
        source=source_name(source),
        now=now(),
        labels=(*own, *(wanted.labels or ())),
        attributes=wanted.attributes,
        import_id=wanted.import_id,
        row_offset=wanted.row_offset or 0,
        row_ids=wanted.row_ids,
        default_feedback=wanted.default_feedback,
        model=wanted.model,
        hold=lambda: lake_lease(store, holder, wait_s=WAIT_S),
        waiting=store.inbox.identities,
    )
    if not result.complete:
        raise ImportIncomplete(result.as_dict())
    return result.as_dict()
