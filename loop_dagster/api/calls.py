"""Who calls, what they may do, and answering a write once however often it is sent.

Belongs here: keys and workspaces of a request, and the Idempotency-Key. Does not belong here: keys in the registry
(store/keys.py), bodies (bodies.py). Every store that a route sees is that of the caller's workspace, so an id of
another workspace is an id that is not there.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any, Final, TypeVar

import sqlalchemy as sa
from fastapi import Depends, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from loop_dagster.api.bodies import Sent, read
from loop_dagster.api.errors import Forbidden, Unauthorized
from loop_dagster.errors import BadRequest, CallUnderWay
from loop_dagster.store.calls import Answered, Turn
from loop_dagster.store.keys import ApiKey, Scope
from loop_dagster.store.open import Store, store_over
from loop_dagster.store.registry import Registry

#: Characters of an Idempotency-Key.
MAX_IDEMPOTENCY_KEY: Final = 255
_READS: Final = ("GET", "HEAD", "OPTIONS")
#: Seconds that a call waits for the answer of the same one under way; then it is told to come again.
WAIT_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.05
#: Who waits on the event loop looks less and less often, down to this.
_LOOK_LAST_S: Final = 0.5
#: Readings of all samples at once in one process: each takes some hundred MB at a million, and the others wait.
WHOLE_READS: Final = threading.BoundedSemaphore(4)
_T = TypeVar("_T")
#: Keeps what a write gives as the answer of its Idempotency-Key, inside the transaction of the write.
Keep = Callable[[sa.Connection, Any], None]


class Stores:
    """The stores of every workspace that this process has been asked for, each made once."""

    def __init__(self, store: Store) -> None:
        self.home = store
        self._known = {store.registry.workspace: store}
        self._lock = threading.Lock()
        self._keys = ThreadPoolExecutor(1, "keys")  # its own: slow reads may hold every thread of the others
        self._notes = ThreadPoolExecutor(1, "notes")  # a write, which may have to wait: nobody waits for it
        self._asked: dict[str, list[asyncio.Future[ApiKey | None]]] = {}
        self._looking: asyncio.Task[None] | None = None

    def of(self, workspace: str) -> Store:
        """The stores of a workspace that a key is bound to."""
        with self._lock:
            if workspace not in self._known:
                settings = self.home.settings.model_copy(update={"workspace": workspace})
                self._known[workspace] = store_over(settings, Registry(settings.registry, workspace))
            return self._known[workspace]

    async def key(self, text: str) -> ApiKey | None:
        """The key that `text` is, None for none: asked of the registry after this call began, so a revoked one is out.

        Calls that come while others are looked up are looked up together next.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[ApiKey | None] = loop.create_future()
        self._asked.setdefault(text, []).append(found)
        if self._looking is None:
            self._looking = loop.create_task(self._look_up())
        return await found

    def _find(self, texts: Sequence[str]) -> list[ApiKey | None]:
        found = [self.home.keys.find(text) for text in texts]
        for key in found:
            if key is not None and self.home.keys.is_worth_noting(key):
                self._notes.submit(self.home.keys.note, key)
        return found

    async def _look_up(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, {}
            try:
                keys = await asyncio.get_running_loop().run_in_executor(self._keys, self._find, list(asked))
            except Exception as error:  # every caller hears of it
                for future in _still_waiting(chain.from_iterable(asked.values())):
                    future.set_exception(error)
            else:
                for futures, key in zip(asked.values(), keys, strict=True):
                    for future in _still_waiting(futures):
                        future.set_result(key)
        self._looking = None

    def close(self) -> None:
        self._keys.shutdown()
        self._notes.shutdown(wait=False, cancel_futures=True)
        for store in self._known.values():
            store.registry.dispose()


def _still_waiting(futures: Iterable[asyncio.Future[_T]]) -> Iterator[asyncio.Future[_T]]:
    """Those whose caller has not gone."""
    return (future for future in futures if not future.done())


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: a key, the workspace meant (None when the key is bound to several and none was named), its stores."""

    key: ApiKey
    stores: Stores
    workspace: str | None
    request: Request

    @property
    def store(self) -> Store:
        if self.workspace is None:
            raise BadRequest(
                "This key is bound to several workspaces: name one of them in the header X-Workspace-ID.",
                field="X-Workspace-ID",
            )
        return self.stores.of(self.workspace)

    @property
    def actor(self) -> str:
        """How timelines name the caller."""
        return f"key:{self.key.key_id}"

    def repeated_as(self, sent: Sent) -> tuple[str, ...] | None:
        """What a call and its repeats have in common: the caller's Idempotency-Key and what was sent; None without one.

        What was sent, since the key is free for something else once its day is over.
        """
        name = self.request.headers.get("idempotency-key")
        return None if name is None else (self.key.key_id, name, self._fingerprint(sent))

    def may(self, scope: Scope) -> bool:
        return scope in self.key.scopes

    def must(self, scope: Scope) -> None:
        """Raise Forbidden when the key lacks `scope`."""
        if not self.may(scope):
            raise Forbidden(f"The key lacks the scope {scope}. `loop keys create --scope {scope}` makes one with it.")

    def once(
        self, sent: Sent, write: Callable[[], Any], *, status: int = 200, show: Callable[[Any], Any] | None = None
    ) -> JSONResponse:
        """Do a write and answer what it gives; sent again with the same Idempotency-Key, answer without doing it.

        Only what was done is kept: a refusal wrote nothing, so sending it again asks anew. With `show`, what `write`
        gives is kept and `show` makes the answer of it each time: so no text of a sample is kept beside the sample.
        A process killed between the write and the answer leaves a write that a repeat does again: it must be safe to
        do twice or refuse the second time. Where neither holds, `once_in`.
        """
        return self.once_in(sent, lambda _keep: write(), status=status, show=show)

    def once_in(
        self, sent: Sent, write: Callable[[Keep], Any], *, status: int = 200, show: Callable[[Any], Any] | None = None
    ) -> JSONResponse:
        """`once` for a write that calls `keep` with what it gives in its own transaction: both are there, or none."""
        shown = show or (lambda done: done)
        name = self.request.headers.get("idempotency-key")
        if name is None:
            return JSONResponse(shown(write(lambda _connection, _done: None)), status)
        if not (1 <= len(name) <= MAX_IDEMPOTENCY_KEY and name.isascii() and name.isprintable()):
            raise BadRequest(
                f"An Idempotency-Key has 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII characters.",
                field="Idempotency-Key",
            )
        calls = self.store.calls
        turn = self._turn(name, self._fingerprint(sent))
        if isinstance(turn, Answered):
            return JSONResponse(shown(turn.answer), turn.status, {"Idempotent-Replayed": "true"})
        kept = False

        def keep(connection: sa.Connection, done: Any) -> None:
            nonlocal kept
            calls.settle_in(connection, turn, status, done)
            kept = True

        try:
            with calls.under_way(turn):
                done = write(keep)
        except BaseException:
            calls.release(turn)
            raise
        if not kept:
            calls.settle(turn, status, done)
        return JSONResponse(shown(done), status)

    async def first_one(self) -> None:
        """Wait for the same call under way, if there is one. Raises CallUnderWay where that takes too long.

        Here and not in `once`, which holds one of the few threads that answer all the others.
        """
        name = self.request.headers.get("idempotency-key")
        if name is None or self.workspace is None:
            return
        calls, give_up, pause = self.store.calls, time.monotonic() + WAIT_S, _LOOK_EVERY_S
        while await run_in_threadpool(calls.is_under_way, self.key.key_id, name):
            if time.monotonic() > give_up:
                raise CallUnderWay
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LOOK_LAST_S)

    def _turn(self, name: str, fingerprint: str) -> Turn | Answered:
        """The turn, or the first call's answer, for which one that comes at the very same moment waits here."""
        give_up = time.monotonic() + WAIT_S
        while True:
            try:
                return self.store.calls.begin(self.key.key_id, name, fingerprint)
            except CallUnderWay:
                if time.monotonic() > give_up:
                    raise
                time.sleep(_LOOK_EVERY_S)

    def _fingerprint(self, sent: Sent) -> str:
        url = self.request.url
        whole = hashlib.sha256(f"{self.request.method}\0{url.path}\0{url.query}\0".encode("utf-8", "replace"))
        whole.update(sent.raw)
        return whole.hexdigest()


def now() -> datetime:
    return datetime.now(UTC)


def needs(scope: Scope | None, *, any_parameters: bool = False) -> Callable[[Request], Coroutine[Any, Any, Caller]]:
    """A dependency: the caller, if the key has `scope` (None: any). Raises Unauthorized, Forbidden, BadRequest.

    With `any_parameters` the route does not say which parameters it takes, so none is refused.
    """

    async def caller(request: Request) -> Caller:
        check_address(request)
        if not any_parameters and request.scope["path"].startswith("/api/"):
            _check_parameters(request)
        stores: Stores = request.app.state.stores
        text = key_text(request)
        key = await stores.key(text) if text else None
        if key is None:
            raise Unauthorized
        found = caller_of(request, stores, key)
        if scope is not None:
            found.must(scope)
        if request.method not in _READS:
            await found.first_one()
        return found

    return caller


def caller_of(request: Request, stores: Stores, key: ApiKey) -> Caller:
    """The caller that shows `key`. Raises Forbidden for a workspace that the key is not bound to."""
    workspace = request.headers.get("x-workspace-id") or (key.workspaces[0] if len(key.workspaces) == 1 else None)
    if workspace is not None and workspace not in key.workspaces:
        raise Forbidden("The key is not bound to the workspace in X-Workspace-ID.")
    return Caller(key, stores, workspace, request)


Reader = Annotated[Caller, Depends(needs("loop:read"))]
writer = needs("loop:write")
Writer = Annotated[Caller, Depends(writer)]
AnyKey = Annotated[Caller, Depends(needs(None))]
#: The body of a write that has no fields: what was sent counts for its Idempotency-Key alone.
Unread = Annotated[Sent, Depends(read)]


def key_text(request: Request) -> str | None:
    """The key that a request shows; None when it shows none."""
    text = request.headers.get("x-api-key")
    if text is None:
        kind, _, rest = request.headers.get("authorization", "").partition(" ")
        text = rest if kind.lower() == "bearer" else ""
    return text.strip() or None


def check_address(request: Request) -> None:
    """Raise BadRequest for what no database takes as a text."""
    if request.scope["query_string"] and any(
        "\0" in one for pair in request.query_params.multi_items() for one in pair
    ):
        raise BadRequest("A parameter of the address holds the character U+0000.")
    if any("\0" in str(value) for value in request.path_params.values()):
        raise BadRequest("The address holds the character U+0000.")


def _check_parameters(request: Request) -> None:
    """Raise BadRequest for a parameter that the route does not have: misspelt, it would be passed over in silence."""
    if not request.scope["query_string"] or not isinstance(route := request.scope.get("route"), APIRoute):
        return
    known = {field.alias for field in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            said = f" (known: {', '.join(sorted(known))})" if known else ""
            raise BadRequest(f"{name!r} is no parameter of this address{said}.", field=name)
