"""Errors as the API answers them: the envelope, the status of every code, and nothing of a request in any of them.

Belongs here: what a failure looks like from outside and in the log. Does not belong here: the failures themselves
(errors/). A log line of an unexpected one has the kind of the error and where it came from, never its message, which
may quote a sample or a key.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loop_dagster.errors import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE, LoopError
from loop_dagster.rules.quoting import answer_without_secrets
from loop_dagster.rules.wording import sentence_of

log = logging.getLogger("loop.api")

#: Statuses of codes that their kind of error does not tell (http-api.md).
STATUSES: Final[Mapping[str, int]] = {
    "UNAUTHORIZED": 401,
    "FORBIDDEN": 403,
    "METHOD_NOT_ALLOWED": 405,
    "PAYLOAD_TOO_LARGE": 413,
    "NOT_ENOUGH_SAMPLES": 422,
    "TRAINING_SETTING_OUT_OF_RANGE": 422,
    "MODEL_NOT_TRAINABLE": 422,
    "MODEL_REVISION_UNAVAILABLE": 422,
    "PROMOTION_POLICY_UNKNOWN": 422,
    "PROMOTION_POLICY_NEEDS_BENCHMARK": 422,
    "BASE_CHANGED": 409,
    "NOT_BUILT": 501,
    "UPSTREAM_UNAVAILABLE": 502,
    "UPSTREAM_TIMED_OUT": 504,
}
_BY_EXIT: Final = {EXIT_USAGE: 400, EXIT_REFUSED: 409, EXIT_NOT_FOUND: 404, EXIT_UNAVAILABLE: 503}
#: Seconds after which something that is unavailable just now is worth another try.
RETRY_AFTER_S: Final = 2
_CODES: Final = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "PAYLOAD_TOO_LARGE"}
_MESSAGES: Final = {
    404: "There is nothing at this address. /docs lists every one.",
    405: "This address takes other methods; the header Allow names them.",
}


def status_of(error: LoopError) -> int:
    """The HTTP status of a failure."""
    return STATUSES.get(error.code) or _BY_EXIT.get(error.exit_code, 500)


def install(app: FastAPI) -> None:
    """Answer every failure of `app` in the envelope."""
    app.add_exception_handler(LoopError, _loop_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_middleware(Unexpected)


#: How the gateway's addresses call a failure beside its code, in the words of the models' public clients.
_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def answer(error: LoopError, *, path: str = "") -> JSONResponse:
    """The envelope of a failure, at an address of the gateway also in the form of the models' public clients."""
    status, headers = status_of(error), {}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if status == HTTPStatus.SERVICE_UNAVAILABLE or error.passes:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED:
        log.warning("%s: %s", error.code, type(error).__name__)
    body = error.as_dict()
    if status == HTTPStatus.BAD_REQUEST:
        body["error"]["code"] = "BAD_REQUEST"  # one code for what no state could accept (http-api.md)
    return JSONResponse(_shaped(body, status, path), status, headers)


def told(status: int, code: str, message: str, *, path: str, headers: Mapping[str, str]) -> JSONResponse:
    """The envelope of a failure that another process of the installation told."""
    return JSONResponse(_shaped(_envelope(code, message), status, path), status, headers)


def _shaped(body: dict[str, Any], status: int, path: str) -> dict[str, Any]:
    """A body of an error as it is answered: without any secret that its request held, whatever quotes it.

    OpenAI's clients read `error.message`, `type`, `param` and `code`; Anthropic's the outer type and `error`.
    """
    body = answer_without_secrets(body)
    if not path.startswith("/v1/"):
        return body
    inner = {**body["error"], "type": _TYPES.get(status, "api_error"), "param": body.get("field")}
    return {**body, "type": "error", "error": inner}


async def _loop_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LoopError)
    return answer(error, path=request.url.path)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = error.status_code
    said = _MESSAGES.get(status) or HTTPStatus(status).phrase + "."
    body = _shaped(_envelope(_CODES.get(status, "BAD_REQUEST"), said), status, request.url.path)
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods_at(request))
    return JSONResponse(body, status, headers)


def _methods_at(request: Request) -> list[str]:
    """Every method of an address; the framework names those of its first route alone, and each of ours has one."""
    fitting = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in fitting for method in getattr(route, "methods", None) or ()})


async def _bad_request(request: Request, error: Exception) -> JSONResponse:
    """A parameter of the address that cannot be what was sent; the value is not repeated."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    names = [str(one["loc"][-1]) for one in found]
    sentences = " ".join(sentence_of({**one, "loc": (name,)}) for name, one in zip(names, found, strict=True))
    body = {**_envelope("BAD_REQUEST", sentences), "field": names[0]}
    return JSONResponse(_shaped(body, 400, request.url.path), 400)


class Unexpected:
    """Answers what nobody expected, and keeps it from the server's own log, which would print its message."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ClientDisconnect:
            return
        except Exception as error:
            answered = _unexpected(error, str(scope.get("path", "")))
            if scope["type"] == "http" and not begun:
                await answered(scope, receive, send)


def _unexpected(error: Exception, path: str) -> JSONResponse:
    if type(error).__module__.startswith("polars"):
        said = "A data file of the lake is damaged. `loop doctor --thorough` names it and the command that mends it."
        log.error("LAKE_UNREADABLE: %s", type(error).__name__)
        body = _shaped(_envelope("LAKE_UNREADABLE", said), 503, path)
        return JSONResponse(body, 503, {"Retry-After": str(RETRY_AFTER_S)})
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-8:]))
    log.error("INTERNAL_ERROR: %s at %s", type(error).__name__, where)
    body = _envelope("INTERNAL_ERROR", "Something went wrong here; the log says where.")
    return JSONResponse(_shaped(body, 500, path), 500)


def _envelope(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}
