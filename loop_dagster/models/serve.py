"""The serving engine: a process that answers for live versions, `python -m loop_dagster.models.serve`, and its callers.

Belongs here: the OpenAI-compatible wire on loopback, the note that says where the process listens, and `ask`,
`ask_both` and `prepare`, which find it by that note. Does not belong here: what is loaded when (`live.py`), keys and
recording (the gateway in `api/`), which stands in front of this for anybody who is not on this machine.
Reports are shown here as pages too (`report_route.py`), since this process is there wherever people look at assets.

Answers are greedy unless a call asks for a temperature, as in the tests that a version passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from loop_dagster.errors import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    BadRequest,
    LiveUnavailable,
    LoopError,
    NotFound,
)
from loop_dagster.models.child import child_env, write_atomic
from loop_dagster.models.engine import Answer, Request, open_engine
from loop_dagster.models.live import LiveModels, base_path
from loop_dagster.models.template import Template
from loop_dagster.models.wire_text import Cutter, request_of
from loop_dagster.report_route import report_route
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.versions import Version

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

log = logging.getLogger(__name__)

PREFIX = "loop-"
#: Largest body of a call, in bytes.
MOST_BYTES = 8 * 2**20
#: Seconds that `prepare` waits for a base and its adapters to be loaded, and `ask` for an answer.
PREPARE_S, ASK_S = 900.0, 600.0
_STATUS = {
    "BAD_REQUEST": 400,
    "NOT_FOUND": 404,
    "PAYLOAD_TOO_LARGE": 413,
    "LIVE_UNAVAILABLE": 503,
    "REGISTRY_UNAVAILABLE": 503,
}


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """What a live version said. `served_by` tells in words which process answered."""

    text: str
    version_no: int
    served_by: str


# --- callers ---------------------------------------------------------------------------------------------------------


def ask(tag: str, question: str, settings: Settings) -> LiveAnswer:
    """The live version's answer to one question of a user.

    From the serving process where one runs, else from a model loaded here for it. Raises NotFound while nothing is
    live, LiveUnavailable when the version cannot be loaded.
    """
    messages = [{"role": "user", "content": question}]
    address = _serving(settings)
    if address is None:
        store = open_store(settings)
        version = store.versions.live(tag)
        if version is None:
            raise NotFound("live version", PREFIX + tag)
        [answer] = _answered_here(store, version, [question], adapters=version.adapters)
        return LiveAnswer(answer, version.version_no, "loaded here for this question; `loop dev` keeps it loaded")
    reply = _call(address, "/v1/chat/completions", {"model": PREFIX + tag, "messages": messages}, ASK_S)
    version_no = int(str(reply["system_fingerprint"]).removeprefix("v"))
    return LiveAnswer(_said(reply["choices"][0]["message"]), version_no, f"served by the process at {address}")


def ask_both(tag: str, questions: Sequence[str], settings: Settings) -> list[tuple[str, str]]:
    """(the base model's answer, the live version's) to each question, from one model loaded here.

    The second is empty while nothing is live. Raises NotFound for an unknown tag.
    """
    store = open_store(settings)
    version = store.versions.live(tag)
    if version is None:
        digest = store.pipelines.get(tag).model_digest
        if digest is None:
            raise NotFound("base model of the pipeline", tag)
        return [(text, "") for text in _answered_here(store, digest, questions)]
    both = _answered_here(
        store, version, [*questions, *questions], adapters=version.adapters, first_without=len(questions)
    )
    return list(zip(both[: len(questions)], both[len(questions) :], strict=True))


def prepare(settings: Settings, *, base_digest: str, adapters: Sequence[str]) -> bool:
    """Let the running serving process load a version before the pointer moves to it; false when none runs.

    Raises LiveUnavailable with the reason when it cannot be loaded, and then nothing must be made live.
    """
    address = _serving(settings)
    if address is None:
        return False
    _call(address, "/internal/prepare", {"base_digest": base_digest, "adapters": [*adapters]}, PREPARE_S)
    return True


def _answered_here(
    store: Store, what: Version | str, questions: Sequence[str], *, adapters: Sequence[str] = (), first_without: int = 0
) -> list[str]:
    """Answers of a version (or of a base, by digest); the first so many without any adapter."""
    for name, value in child_env().items():
        os.environ.setdefault(name, value)
    digest = what if isinstance(what, str) else what.base_digest
    engine = open_engine(base=base_path(store, digest), base_digest=digest)
    try:
        for adapter in adapters:
            engine.load_adapter(adapter, store.artifacts.open(adapter, verify=True), base_digest=digest)
        most = store.settings.max_answer_tokens
        requests = [
            Request(key=str(at), messages=[{"role": "user", "content": question}], max_new_tokens=most)
            for at, question in enumerate(questions)
        ]
        answers = engine.answer(requests[:first_without])
        answers += engine.answer(requests[first_without:], adapters=adapters)
        return [_said(answer.message) for answer in answers]
    finally:
        engine.close()


def _said(message: Mapping[str, Any] | None) -> str:
    if message is None:
        return ""
    calls = message.get("tool_calls")
    return str(message.get("content") or "") + (json.dumps(calls, ensure_ascii=False) if calls else "")


def _note(settings: Settings) -> Path:
    return settings.root / "run" / "serving.json"


def _serving(settings: Settings) -> str | None:
    """`host:port` of this installation's serving process; none when it is gone or something else listens there."""
    import httpx

    with contextlib.suppress(OSError, ValueError, KeyError, httpx.HTTPError):
        note = json.loads(_note(settings).read_text(encoding="utf-8"))
        address = str(note["address"])
        health = httpx.get(f"http://{address}/healthz", timeout=5.0, trust_env=False)
        if health.status_code == 200 and health.json()["pid"] == note["pid"]:
            return address
    return None


def _call(address: str, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    import httpx

    try:
        reply = httpx.post(f"http://{address}{path}", json=body, timeout=timeout_s, trust_env=False)
        data: dict[str, Any] = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise LiveUnavailable(
            f"the serving process at {address} broke off ({type(error).__name__})", "Try again"
        ) from None
    if reply.status_code == 200:
        return data
    code, message = data["error"]["code"], data["error"]["message"]
    raise _Told(code, message)


class _Told(LoopError):
    """An error that the serving process answered with."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # as it was told
        exits = {400: EXIT_USAGE, 404: EXIT_NOT_FOUND, 503: EXIT_UNAVAILABLE}
        self.exit_code = exits.get(_STATUS.get(code, 500), EXIT_FAILED)  # type: ignore[misc]  # as `code`


# --- the process -----------------------------------------------------------------------------------------------------


def build_app(store: Store, models: LiveModels) -> Starlette:
    """The ASGI app over loaded models."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    server = _Server(store, models)
    return Starlette(
        routes=[
            Route("/healthz", server.health),
            Route("/v1/models", server.models),
            Route("/v1/chat/completions", server.complete, methods=["POST"]),
            Route("/internal/prepare", server.prepare, methods=["POST"]),
            report_route(store),
        ],
        exception_handlers={LoopError: _refused},
    )


async def _refused(_: HttpRequest, error: Exception) -> Response:
    from starlette.responses import JSONResponse

    assert isinstance(error, LoopError)
    status = _STATUS.get(error.code, 500)
    headers = {"Retry-After": "5"} if status == 503 else None
    return JSONResponse(error.as_dict(), status_code=status, headers=headers)


class _Server:
    def __init__(self, store: Store, models: LiveModels) -> None:
        self._store, self._models = store, models
        self._templates: dict[str, Template] = {}

    async def health(self, _: HttpRequest) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"status": "ok", "pid": os.getpid(), "loaded": self._models.loaded()})

    async def models(self, _: HttpRequest) -> Response:
        from starlette.responses import JSONResponse

        live = await asyncio.to_thread(self._models.versions)
        data = [
            {
                "id": PREFIX + tag,
                "object": "model",
                "created": int(version.promoted_at.timestamp()),
                "owned_by": "loop",
            }
            for tag, version in sorted(live.items())
        ]
        return JSONResponse({"object": "list", "data": data})

    async def prepare(self, request: HttpRequest) -> Response:
        from starlette.responses import JSONResponse

        if request.client is None or not ipaddress.ip_address(request.client.host).is_loopback:
            raise NotFound("route", "/internal/prepare")
        body = await _body(request)
        digest, adapters = body.get("base_digest"), body.get("adapters")
        if not isinstance(digest, str) or not isinstance(adapters, list):
            raise BadRequest("prepare needs base_digest (text) and adapters (a list of digests).")
        await asyncio.to_thread(self._models.prepare, digest, [str(adapter) for adapter in adapters])
        return JSONResponse({"loaded": True})

    async def complete(self, request: HttpRequest) -> Response:
        """Answer a chat completion, at once or as server-sent events."""
        from starlette.responses import JSONResponse, StreamingResponse

        body = await _body(request)
        model = body.get("model")
        if not isinstance(model, str) or not model.startswith(PREFIX):
            raise NotFound("live version", str(model))
        asked, stops = request_of(body, most_tokens=self._store.settings.max_answer_tokens)
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(token: int | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(tokens.put_nowait, token)

        stream = bool(body.get("stream"))
        version, future = await asyncio.to_thread(
            self._models.ask, model.removeprefix(PREFIX), asked, tell if stream else None
        )
        reply = _Reply(model, version, stops)
        headers = {"X-Loop-Version": f"v{version.version_no}"}
        if not stream:
            answer = await asyncio.wrap_future(future)
            return JSONResponse(reply.whole(answer), headers=headers)
        future.add_done_callback(lambda _: tell(None))
        first = await tokens.get()
        if first is None:
            _check(future.result())  # a refusal is a status of its own, not the inside of a stream
        template = await asyncio.to_thread(self._template, version.base_digest)
        options = body.get("stream_options") or {}
        events = reply.events(template, first, tokens, future, usage=bool(options.get("include_usage")))
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    def _template(self, base_digest: str) -> Template:
        if base_digest not in self._templates:
            self._templates[base_digest] = Template.load(base_path(self._store, base_digest))
        return self._templates[base_digest]


async def _body(request: HttpRequest) -> dict[str, Any]:
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise BadRequest("The body must be JSON with Content-Type: application/json.")
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MOST_BYTES:
            raise BadRequest(f"The body is over {MOST_BYTES:,} bytes.")
    try:
        body = json.loads(raw)
    except ValueError:
        raise BadRequest("The body is no JSON.") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("The body holds half of a surrogate pair, which is no character. Send whole ones.") from None
    return body


def _check(answer: Answer) -> None:
    """Raise what an answer that was not given means to its caller."""
    if answer.finish == "too_long":
        raise BadRequest(f"The conversation has {answer.prompt_tokens:,} tokens, more than the model's context holds.")
    if answer.finish == "error":
        if answer.prompt_tokens:
            raise LiveUnavailable("the machine's memory does not hold this conversation", "Shorten it")
        raise BadRequest("The model's chat template does not take this order of messages.")


class _Reply:
    """One answer on the wire."""

    def __init__(self, model: str, version: Version, stops: Sequence[str]) -> None:
        self._stops = stops
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"v{version.version_no}",
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        """A `chat.completion`."""
        _check(answer)
        message, finish = self._ended(answer)
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}

    async def events(
        self,
        template: Template,
        first: int | None,
        tokens: asyncio.Queue[int | None],
        future: Future[Answer],
        *,
        usage: bool,
    ) -> AsyncIterator[str]:
        """`chat.completion.chunk` events: the role, text as it becomes certain, tool calls at the end, the finish."""
        yield self._chunk({"role": "assistant", "content": ""})
        cutter = Cutter(template, self._stops)
        token = first
        while token is not None:
            if text := cutter.push(token):
                yield self._chunk({"content": text})
            token = await tokens.get()
        try:
            answer = future.result()
        except LoopError as error:  # the status is sent already
            yield f"data: {json.dumps(error.as_dict())}\n\n"
            return
        message, finish = self._ended(answer)
        if rest := cutter.rest(message["content"] or ""):
            yield self._chunk({"content": rest})
        if calls := message.get("tool_calls"):
            yield self._chunk({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
        yield self._chunk({}, finish)
        if usage:
            event = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answer)}
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    def _ended(self, answer: Answer) -> tuple[dict[str, Any], str]:
        message = dict(answer.message or {"role": "assistant", "content": ""})
        text = message["content"] or ""
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            message["content"] = text[: min(ends)]
            return message, "stop"
        if answer.finish == "length":
            return message, "length"
        return message, "tool_calls" if message.get("tool_calls") else "stop"

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        event = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.answer_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.answer_tokens,
        "total_tokens": total,
    }


@contextlib.contextmanager
def _noted(settings: Settings, listening: socket.socket) -> Iterator[None]:
    """Say where this process listens while it does; another one's note is left alone."""
    host, port = listening.getsockname()[:2]
    note = {"pid": os.getpid(), "address": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}
    write_atomic(_note(settings), note)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(_note(settings).read_text(encoding="utf-8")) == note:
                _note(settings).unlink()


def main() -> int:
    """Serve until SIGINT or SIGTERM; calls under way are answered first."""
    import uvicorn

    for name, value in child_env().items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    settings = Settings()
    store = open_store(settings)
    models = LiveModels(store)
    config = uvicorn.Config(
        build_app(store, models),
        host=settings.serve_host,
        port=settings.serve_port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=30,
    )
    # uvicorn raises the signal that ended it once more when it is done; the end below is orderly instead.
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: None)
    listening = config.bind_socket()
    with _noted(settings, listening):
        models.start()
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            models.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
