"""Who calls the gateway, for which model, and what the call says about recording.

Belongs here: the key (also while the registry cannot be asked), the body's model, the X-Loop headers. Does not belong
here: whether it is recorded (planning.py), keys themselves (store/keys.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

import orjson
from fastapi import Request

from loop_dagster.api.bodies import read
from loop_dagster.api.calls import Caller, Stores, caller_of, check_address, key_text
from loop_dagster.api.errors import Unauthorized
from loop_dagster.api.gateway.upstreams import Shape
from loop_dagster.errors import BadRequest, LoopError
from loop_dagster.store.keys import ApiKey
from loop_dagster.store.open import Store

#: Bytes of a call's body: a long conversation with some pictures.
MOST_BODY: Final = 32_000_000
#: Longest name of a model, of a request id and of a conversation: what a sample's columns take.
MOST_WORD: Final = 200
#: For how long a key that was found counts while the registry does not answer.
TRUSTED_S: Final = 600.0
#: Keys that are remembered for that.
MOST_KEYS: Final = 1_000
#: Look-ups that may wait for the registry before remembered keys count without one.
MOST_LOOKING: Final = 64
#: Tags of one call that are looked at; a sample carries no more.
MOST_TAGS: Final = 32


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it came in; `store` is that of the caller's workspace."""

    caller: Caller
    store: Store
    shape: Shape
    model: str
    raw: bytes
    tags: tuple[str, ...]
    off: bool
    request_id: str | None
    conversation: str | None

    def __repr__(self) -> str:
        return f"Call({self.shape}, {len(self.raw)} bytes)"


class Known:
    """Finds callers by their keys, and remembers them for the time that the registry does not answer."""

    def __init__(self, stores: Stores, threads: Executor, wait_s: float) -> None:
        self._stores, self._threads, self._wait_s = stores, threads, wait_s
        self._found: OrderedDict[bytes, tuple[ApiKey, float]] = OrderedDict()
        self._looking = 0

    async def caller(self, request: Request) -> Caller:
        """The caller. Raises Unauthorized, Forbidden, BadRequest, or RegistryUnavailable for a key never seen here.

        A revoked key is refused from the next call on, unless the registry cannot be asked.
        """
        check_address(request)
        text = key_text(request)
        if text is None:
            raise Unauthorized
        mark = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        remembered = self._found.get(mark)
        fresh = remembered is not None and time.monotonic() - remembered[1] < TRUSTED_S
        if remembered is not None and fresh and self._looking > MOST_LOOKING:
            return caller_of(request, self._stores, remembered[0])
        loop = asyncio.get_running_loop()
        self._looking += 1
        looking = loop.run_in_executor(self._threads, self._stores.home.keys.find, text)
        looking.add_done_callback(self._looked)
        try:
            key = await asyncio.wait_for(asyncio.shield(looking), self._wait_s if fresh else None)
        except (LoopError, TimeoutError):
            if remembered is None or not fresh:
                raise
            key = remembered[0]
        else:
            self._remember(mark, key)
        if key is None:
            raise Unauthorized
        return caller_of(request, self._stores, key)

    def _looked(self, looking: asyncio.Future[Any]) -> None:
        self._looking -= 1
        taken_notice(looking)

    def _remember(self, mark: bytes, key: ApiKey | None) -> None:
        if key is None:
            self._found.pop(mark, None)
            return
        self._found[mark] = key, time.monotonic()
        self._found.move_to_end(mark)
        while len(self._found) > MOST_KEYS:
            self._found.popitem(last=False)


async def read_call(request: Request, caller: Caller, shape: Shape) -> Call:
    """The call in a request; nothing of the body is in any message.

    Raises BadRequest, also for a key of several workspaces that names none, and PayloadTooLarge.
    """
    raw = (await read(request, MOST_BODY)).raw
    body = _object(raw) if len(raw) < 100_000 else await asyncio.to_thread(_object, raw)
    model = body.get("model")
    if not isinstance(model, str) or not model.strip():
        raise BadRequest("model is needed: the name of the model to ask. GET /v1/models lists them.", field="model")
    if len(model) > MOST_WORD or not model.isprintable() or model != model.strip():
        raise BadRequest(f"model must be 1 to {MOST_WORD} printable characters.", field="model")
    headers = request.headers
    words = ",".join(headers.getlist("x-loop-pipeline")).split(",")
    tags = dict.fromkeys(word.strip().lower() for word in words if word.strip())
    return Call(
        caller=caller,
        store=caller.store,
        shape=shape,
        model=model,
        raw=raw,
        tags=tuple(tags)[:MOST_TAGS],
        off=headers.get("x-loop-capture", "").strip().lower() == "off",
        request_id=_word(headers.get("x-request-id")),
        conversation=_word(headers.get("x-loop-conversation")),
    )


def _object(raw: bytes) -> Mapping[str, Any]:
    try:
        body = orjson.loads(raw)
    except ValueError:
        body = _leniently(raw)
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


def _leniently(raw: bytes) -> Any:
    """What the quicker reader refuses and an upstream may take: half an emoji, a byte order mark, a long number."""
    try:
        return json.loads(raw, parse_int=str)
    except RecursionError:
        raise BadRequest("The body nests arrays and objects too deep to be read.") from None
    except ValueError:
        raise BadRequest("The body is not JSON.") from None


def _word(given: str | None) -> str | None:
    """An id in a header; what no column could keep counts as not given."""
    text = (given or "").strip()
    return text if 0 < len(text) <= MOST_WORD and text.isprintable() else None


def taken_notice(future: asyncio.Future[Any]) -> None:
    """Look at a failure that nobody may wait for any more, so that it is not logged as one that nobody saw."""
    if not future.cancelled():
        future.exception()
