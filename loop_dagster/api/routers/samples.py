"""Samples: captured, listed with filters, read, deleted, and which pipelines select one.

Belongs here: filters and the body of a capture. Does not belong here: rows (rows/samples.py), feedback and tags
(routers/feedback.py), what a pipeline selects (opening.py).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import polars as pl
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from uuid_utils import uuid7

from loop_dagster.api.bodies import MEDIUM, Body, Sent, check_content_type, checked, parsed, read, schema_of, twice
from loop_dagster.api.calls import WHOLE_READS, Caller, Reader, Unread, Writer, now, writer
from loop_dagster.api.captures import Asked, Captures, Planned
from loop_dagster.api.finding import Filters, find
from loop_dagster.api.routers.feedback import verdict_of
from loop_dagster.api.rows.samples import read_issued, read_sample, trace_in_full, traces
from loop_dagster.errors import BadRequest
from loop_dagster.opening import states_of
from loop_dagster.rules import canonical
from loop_dagster.rules.recording import is_kept, opening
from loop_dagster.rules.retention import captured_until
from loop_dagster.rules.selection import selected
from loop_dagster.rules.shapes import flag
from loop_dagster.store.giving import feedback_row, label_rows
from loop_dagster.store.inbox import NewSample
from loop_dagster.store.pages import sample_row
from loop_dagster.store.selecting import live_that_learned, scope_of
from loop_dagster.store.sources import Source, source_name
from loop_dagster.wire import rebuilds

router = APIRouter(prefix="/api/loop/traces", tags=["samples"])

NOTE: Final = (
    "Being selected is not being trained on: duplicates, long conversations and answers that teach nothing are left "
    "out, and some are held back to judge by."
)
Word = Annotated[str, Field(min_length=1, max_length=200)]


class CaptureFeedback(Body):
    """A verdict that rides along."""

    verdict: str
    correction: str | None = None
    reason: Annotated[str, Field(max_length=10_000)] | None = None


class Capture(Body):
    """One exchange. Its messages, tools and calls are read apart, so that their numbers stay as spelled."""

    deployment_id: str
    model: Word
    messages: list[Any]
    completion: str | None = None
    tool_calls: list[Any] | None = None
    tools: list[Any] | None = None
    model_version: Word | None = None
    conversation_id: Word | None = None
    request_id: Word | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    latency_ms: float | int | None = None
    metadata: dict[str, Any] | None = None
    labels: list[str] | None = None
    feedback: CaptureFeedback | None = None


_APART: Final = ("messages", "tool_calls", "tools")
#: Bytes of a body that is read at once: a thread for it would take longer.
_SHORT: Final = 50_000
#: Bytes of a body from which on a capture is redacted and keyed in a thread of its own call.
_LONG: Final = 500_000


async def _capture_body(request: Request) -> tuple[Sent, Capture]:
    sent = await read(request, MEDIUM)
    check_content_type(request.headers.get("content-type"))
    return sent, _read(sent.raw) if len(sent.raw) <= _SHORT else await run_in_threadpool(_read, sent.raw)


def _read(raw: bytes) -> Capture:
    try:
        whole = canonical.loads(raw, once=True)
    except canonical.UnreadableJsonError as error:
        if error.code == "name_twice":
            raise twice(error.name) from None
        raise BadRequest(f"The body cannot be read: {error.sentence}") from None
    if not isinstance(whole, dict):
        raise BadRequest("The body must be a JSON object.")
    apart = {name: whole.pop(name) for name in _APART if whole.get(name) is not None}
    if type(whole.get("completion")) is str:  # text of a sample may hold what names may not; a Number is a kind of text
        apart["completion"] = whole.pop("completion")
    wrong = next((name for name in _APART if not isinstance(apart.get(name, []), list)), None)
    if wrong is not None or "messages" not in apart:
        field = wrong or "messages"
        raise BadRequest(f"{field} must be a list.", field=field)
    wanted = checked(Capture, {**parsed(canonical.dump_bytes(whole)), "messages": []})
    return wanted.model_copy(update=apart)


@router.post("", openapi_extra=schema_of(Capture))
async def capture(request: Request) -> JSONResponse:
    """Record one exchange of a source that is switched on; of any other it says why it did not."""
    # Asked for by hand: as dependencies they would take a tenth of what a capture takes.
    caller = await writer(request)
    sent, given = await _capture_body(request)
    captures: Captures = request.app.state.captures
    asked = Asked(caller.store, source_name(given.deployment_id), lambda source: _plan(caller, sent, given, source))
    is_long = len(sent.raw) > _LONG
    if "idempotency-key" in request.headers:
        return await run_in_threadpool(
            lambda: caller.once(sent, lambda: captures.put(asked.planned() if is_long else asked).result())
        )
    return JSONResponse(await captures.stored(await run_in_threadpool(asked.planned) if is_long else asked))


def _plan(caller: Caller, sent: Sent, given: Capture, source: Source) -> Planned | dict[str, Any]:
    """What is to be stored of an exchange whose source is set up like this, or the answer that says why nothing is."""
    moment = now()
    try:
        messages = [canonical.message(one) for one in given.messages]
        content = given.completion or (None if given.tool_calls else "")
        answer = canonical.answer({"content": content, "tool_calls": given.tool_calls})
        tools = canonical.tools(given.tools)
    except (canonical.BadMessageError, canonical.UnreadableJsonError) as error:
        raise BadRequest(f"{error.sentence} Nothing was stored.", field="messages") from None
    if not messages or not ((given.completion or "").strip() or given.tool_calls):
        raise BadRequest("messages, and completion or tool_calls, are needed. Nothing was stored.", field="messages")
    said = given.feedback
    verdict = None if said is None else verdict_of(said.verdict, said.correction)
    words = [*source.tags, *(given.labels or ())]
    sample_id = str(uuid7())
    labels = label_rows(sample_id, now=moment, labels=words) if words else []
    if (why := _why_not(caller.request, source, given.conversation_id or opening(messages))) is not None:
        return {"captured": False, "reason": why}
    # A repeat of a call that was killed after its write finds the first one's sample.
    again = (given.request_id,) if given.request_id is not None else caller.repeated_as(sent)
    row, _secrets = sample_row(
        source=source.name,
        identity=canonical.identity("request", source.name, *(again or ("", sample_id))),
        messages=messages,
        answer=answer,
        tools=tools,
        flag=flag(messages, answer),
        now=moment,
        expires_at=captured_until(moment, source.retention_days),
        model=given.model,
        conversation_id=given.conversation_id,
        keyed=False,
    )
    feedback = []
    if said is not None and verdict is not None:
        feedback.append(feedback_row(sample_id, verdict, said.correction, said.reason, moment))
    return Planned(NewSample({**row, "sample_id": sample_id}, feedback, labels), again=again is not None)


def _why_not(request: Request, source: Source, conversation: str) -> str | None:
    """Why an exchange of a conversation is not recorded; None when it is."""
    if request.headers.get("x-loop-capture", "").strip().lower() == "off":
        return "The call said X-Loop-Capture: off."
    if not source.enabled:
        return "Recording is switched off for this source; PUT /api/loop/configs/{source} switches it on."
    if not is_kept(source.name, conversation, source.sample_rate):
        return "The conversation is not in the share that this source records."
    return None


@router.get("")
def list_traces(
    caller: Reader,
    deployment_id: str | None = None,
    conversation_id: str | None = None,
    from_: Annotated[datetime | None, Query(alias="from")] = None,
    to: datetime | None = None,
    signalled: bool = False,
    unsignalled: bool = False,
    signal: Literal["good", "bad", "corrected"] | None = None,
    model: str | None = None,
    origin: Literal["captured", "imported"] | None = None,
    label: Annotated[str | None, Query(min_length=1)] = None,
    attr: Annotated[list[str] | None, Query(max_length=32)] = None,
    unlabelled: bool = False,
    pipeline: str | None = None,
    dataset: str | None = None,
    attempt: str | None = None,
    split: Literal["train", "held_back"] | None = None,
    judge: Literal["picked", "below_bar", "unscored"] | None = None,
    q: Annotated[str | None, Query(min_length=2, max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> dict[str, Any]:
    """Samples, the newest first, a page at a time; filters add up. With `pipeline`, each with its state there."""
    if dataset is not None and pipeline is not None:
        raise BadRequest("dataset cannot be combined with pipeline.", field="dataset")
    if split is not None and attempt is None:
        raise BadRequest("split needs attempt: it says which samples of an attempt.", field="split")
    filters = Filters(
        source=deployment_id,
        conversation_id=conversation_id,
        since=_moment("from", from_),
        until=_moment("to", to),
        signalled=signalled,
        unsignalled=unsignalled,
        signal=signal,
        model=model,
        origin=origin,
        label=label,
        attributes=tuple(_attribute(pair) for pair in attr or ()),
        unlabelled=unlabelled,
        pipeline=pipeline,
        attempt=attempt,
        split=split,
        judge=judge,
        dataset=None if dataset is None else caller.store.datasets.get(dataset).conditions,
        text=q,
    )
    with WHOLE_READS:
        found = find(caller.store, filters, now(), limit=limit, offset=offset)
    return {"traces": traces(found.rows, found.states), "total": found.total, "limit": limit, "offset": offset}


@router.get("/{trace_id}")
def get_trace(caller: Reader, trace_id: str) -> dict[str, Any]:
    """One sample with every verdict and tag on it."""
    return {"trace": trace_in_full(read_sample(caller.store, trace_id, now()))}


@router.get("/{trace_id}/pipelines")
def list_pipelines_of(caller: Reader, trace_id: str) -> dict[str, Any]:
    """The pipelines that select a sample, each with what becomes of it there and why."""
    store, moment = caller.store, now()
    sample_id = read_sample(store, trace_id, moment)["sample_id"]
    keys = store.samples.keys()
    mine = [frame.filter(pl.col("sample_id") == sample_id) for frame in (keys.samples, keys.feedback, keys.labels)]
    sample, feedback, labels = (frame.lazy() for frame in pl.collect_all(mine))
    found = []
    for pipeline in store.pipelines.list():
        # What becomes of one depends on all that a pipeline selects; whether it is among them, on itself alone.
        if selected(sample, feedback, labels, scope=scope_of(store, pipeline), now=moment).is_empty():
            continue
        rows = states_of(store, pipeline, moment).filter(pl.col("sample_id") == sample_id).to_dicts()
        for row in rows[:1]:
            state = {name: row[name] for name in ("state", "attempt_no", "version_no", "reason")}
            found.append({"rule_id": pipeline.pipeline_id, "name": pipeline.name, "enabled": pipeline.enabled, **state})
    return {"pipelines": found, "note": NOTE}


@router.delete("/{trace_id}")
def delete_trace(caller: Writer, trace_id: str, sent: Unread) -> JSONResponse:
    """Delete a sample with its feedback: nobody reads it any more, and the upkeep job takes it out of every file."""

    def write() -> dict[str, Any]:
        # One whose call is still under way would be stored afterwards, so it is to be deleted when it is there.
        sample_id = str(read_issued(caller.store, trace_id, now())["sample_id"])
        learned = live_that_learned(caller.store, sample_id)
        caller.store.inbox.add_tombstones([sample_id, trace_id], now=now())
        return {"deleted": True, "trace_id": trace_id, "rebuilds": rebuilds(learned)}

    return caller.once(sent, write)


def _moment(name: str, given: datetime | None) -> datetime | None:
    """A time of a filter in UTC. Raises BadRequest for one without a zone, or so far away that no sample can be."""
    if given is None:
        return None
    if given.tzinfo is None or not 1970 <= given.year < 2200:
        raise BadRequest(f"{name} must be a time with its zone, as in 2026-01-31T00:00:00Z.", field=name)
    return given.astimezone(UTC)


def _attribute(pair: str) -> tuple[str, str]:
    key, colon, value = pair.partition(":")
    if not (key.strip() and colon and value.strip()):
        raise BadRequest("attr must be key:value.", field="attr")
    return key.strip().lower(), value.strip()
