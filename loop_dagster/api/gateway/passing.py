"""Passes one call on and its answer back: the same bytes in both directions, chunk by chunk, while the caller is there.

Belongs here: the order of things in one call, cuts on either side. Does not belong here: which server (upstreams.py),
what is made of the answer (answers.py, recorder.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loop_dagster.api import problems
from loop_dagster.api.errors import UpstreamTimedOut, UpstreamUnavailable
from loop_dagster.api.gateway.answers import reader_for
from loop_dagster.api.gateway.calls import Call
from loop_dagster.api.gateway.gateway import Gateway, Recording
from loop_dagster.api.gateway.upstreams import PATHS, Target, to_caller, to_upstream
from loop_dagster.errors import LiveUnavailable, LoopError

SAMPLE_ID = b"x-loop-sample-id"


class Passing(Response):
    """The answer of a call that is passed on while it is sent.

    A caller that goes away ends the call to the upstream. An upstream that breaks off ends the answer without its
    regular end, so that the caller learns that something is missing.
    """

    def __init__(self, gateway: Gateway, call: Call, target: Target) -> None:
        super().__init__()
        self._gateway, self._call, self._target = gateway, call, target

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._work(scope, receive, send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, leaving):
                if not task.done():
                    task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
        with contextlib.suppress(asyncio.CancelledError):
            await working

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        recording = self._gateway.recording(self._call)
        try:
            response = await self._send(scope)
        except LoopError as error:
            if recording is not None:
                recording.forget()
            await problems.answer(error, path=scope["path"])(scope, receive, send)
            return
        except BaseException:
            # The caller left before there was an answer.
            if recording is not None:
                recording.ended(reader_for(self._call.shape, "", ""))
            raise
        try:
            if self._target.kind == "live" and response.status_code != 200:
                if recording is not None:
                    recording.forget()
                await (await _live_problem(response, scope["path"]))(scope, receive, send)
                return
            await self._pass(response, recording, send)
        finally:
            if recording is not None:
                recording.forget()  # nothing but what was not handed over
            await asyncio.shield(response.aclose())

    async def _send(self, scope: Scope) -> httpx.Response:
        """The upstream's answer, its body still to come. Raises UpstreamUnavailable, UpstreamTimedOut."""
        call, target = self._call, self._target
        client = self._gateway.client(target)
        request = client.build_request(
            "POST",
            target.url(PATHS[call.shape], scope["query_string"].decode("latin-1")),
            content=call.raw,
        )
        request.headers = httpx.Headers(
            [
                (b"host", request.headers["host"].encode()),
                *to_upstream(scope["headers"], target, call.shape),
                (b"content-length", str(len(call.raw)).encode()),
            ]
        )
        try:
            return await client.send(request, stream=True)
        except httpx.ConnectTimeout:
            raise _unavailable(target, "no connection within 10 seconds") from None
        except httpx.TimeoutException:
            raise UpstreamTimedOut(target.name) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _unavailable(target, type(error).__name__) from None

    async def _pass(self, response: httpx.Response, recording: Recording | None, send: Send) -> None:
        headers = to_caller(response.headers.raw, live=self._target.kind == "live")
        reader = reader_for(
            self._call.shape,
            response.headers.get("content-type", ""),
            response.headers.get("content-encoding", "").strip().lower(),
        )
        if recording is not None and not response.is_success:
            recording.forget()
            recording = None
        try:
            if recording is not None and (sample_id := await recording.sample_id()) is not None:
                headers.append((SAMPLE_ID, sample_id.encode()))
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            try:
                async for chunk in response.aiter_raw():
                    if recording is not None:  # first, since a caller may leave with the last event in its hands
                        reader.feed(chunk)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except httpx.HTTPError:
                reader.cut()
                return  # without the last event the server closes the connection: the caller sees the cut
            reader.end()
            if recording is not None:
                recording.ended(reader)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if recording is not None:
                recording.ended(reader)


async def _gone(receive: Receive) -> None:
    """Wait until the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _unavailable(target: Target, why: str) -> LoopError:
    if target.kind == "live":
        return LiveUnavailable(f"{target.name} does not run ({why})", "Start it with `loop dev`, then call again")
    return UpstreamUnavailable(target.name, why)


async def _live_problem(response: httpx.Response, path: str) -> Response:
    """A refusal of the serving engine, in the form of every other one."""
    try:
        body = (await response.aread()).decode("utf-8", "replace")
        told = httpx.Response(response.status_code, text=body).json()
        code, message = str(told["error"]["code"]), str(told["error"]["message"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        unknown = LiveUnavailable("what answers on its port is not the serving engine", "Look at LOOP_SERVE_PORT")
        return problems.answer(unknown, path=path)
    return problems.told(response.status_code, code, message, path=path, headers=_retry(response.headers))


def _retry(headers: Mapping[str, str]) -> dict[str, str]:
    return {"Retry-After": headers["retry-after"]} if "retry-after" in headers else {}
