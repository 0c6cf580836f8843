"""Live versions kept loaded: one engine per base, shared by every tag on it, following the registry's live pointer.

Belongs here: what is loaded when, and which calls wait for which. Free of HTTP. Does not belong here: the wire
(`serve.py`), how a model answers (`engine.py`), who goes live (`rules/promotion.py`, `store/versions.py`).
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loop_dagster.errors import BaseChanged, LiveUnavailable, LoopError, NotFound, RegistryUnavailable
from loop_dagster.models.base import resolve
from loop_dagster.models.engine import Answer, Engine, Request, open_engine
from loop_dagster.store.open import Store
from loop_dagster.store.versions import Version

log = logging.getLogger(__name__)

#: Seconds between two looks at the pointer; each call looks too.
RECONCILE_S = 1.0
#: Seconds for which an adapter stays loaded after the last call for it was put, whatever the pointer says.
LATELY_S = 3.0
#: Seconds for which something that was prepared stays loaded without being live: a promotion is decided by then.
PREPARED_S = 900.0
#: Most calls that wait for one engine, and most that it answers together.
MOST_WAITING = 256
MOST_TOGETHER = 32

#: A base and its adapters, oldest first, by digest: what a version is.
Line = tuple[str, tuple[str, ...]]


@dataclass(slots=True, eq=False)
class _Call:
    """Something for an engine's thread: an answer when there is a request, else only that the adapters are loaded."""

    adapters: tuple[str, ...]
    request: Request | None
    on_token: Callable[[int], None] | None
    result: Future[Any]


class LiveModels:
    """Answers for live versions. Safe to use from many threads; `start` follows the pointer in the background."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._hosts: dict[str, _Host] = {}
        self._live: dict[str, Version] = {}
        self._prepared: dict[Line, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="live-pointer", daemon=True)

    def start(self) -> None:
        """Load what is live now and follow the pointer from here on."""
        self._thread.start()

    def close(self) -> None:
        """Answer nothing more and give the memory back."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        with self._lock:
            hosts, self._hosts = list(self._hosts.values()), {}
        for host in hosts:
            host.close()

    def versions(self) -> dict[str, Version]:
        """What answers now, by tag. While the registry cannot be reached, what answered last."""
        try:
            self._live = self._store.versions.all_live()
        except RegistryUnavailable as error:
            log.warning("%s", error.message)
        return self._live

    def loaded(self) -> dict[str, list[str]]:
        """Adapters in memory, by base."""
        with self._lock:
            return {digest: sorted(host.loaded) for digest, host in self._hosts.items()}

    def ask(
        self, tag: str, request: Request, on_token: Callable[[int], None] | None = None
    ) -> tuple[Version, Future[Answer]]:
        """Let the version that is live at this moment answer; `on_token` is called from the engine's thread.

        Raises NotFound while nothing is live, LiveUnavailable when too many calls wait. The future raises
        LiveUnavailable when the version cannot be loaded.
        """
        version = self.versions().get(tag)
        if version is None:
            raise NotFound("live version", f"loop-{tag}")
        future: Future[Answer] = Future()
        self._put((version.base_digest, version.adapters), _Call(version.adapters, request, on_token, future))
        return version, future

    def prepare(self, base_digest: str, adapters: Sequence[str]) -> None:
        """Load a version that is not live yet, beside what is, and wait for it. Raises LiveUnavailable."""
        line: Line = (base_digest, tuple(adapters))
        self._prepared[line] = time.monotonic() + PREPARED_S
        future: Future[None] = Future()
        self._put(line, _Call(line[1], None, None, future))
        try:
            future.result()
        except LiveUnavailable:
            self._prepared.pop(line, None)
            raise

    def _put(self, line: Line, call: _Call) -> None:
        while True:
            with self._lock:
                host = self._hosts.get(line[0])
                if host is None:
                    host = self._hosts[line[0]] = _Host(self._store, line[0])
            if host.put(call):
                return
            with self._lock:  # it was let go between the two steps
                if self._hosts.get(line[0]) is host:
                    del self._hosts[line[0]]

    def _follow(self) -> None:
        while True:
            try:
                self._reconcile()
            except Exception:  # the next look may find it mended; calls go on with what is loaded
                log.exception("following the live pointer failed")
            if self._ended.wait(RECONCILE_S):
                return

    def _reconcile(self) -> None:
        """Load what is live, let go of what is neither live nor prepared. What waits for an engine comes first."""
        now = time.monotonic()
        self._prepared = {line: until for line, until in self._prepared.items() if until > now}
        wanted: set[Line] = {(v.base_digest, v.adapters) for v in self.versions().values()} | self._prepared.keys()
        for digest, adapters in wanted:
            with self._lock:
                host = self._hosts.get(digest)
            if host is None or not host.has_tried(adapters):
                self._put((digest, adapters), _Call(adapters, None, None, Future()))
        with self._lock:
            hosts = dict(self._hosts)
        for digest, host in hosts.items():
            keep = {adapter for base, adapters in wanted if base == digest for adapter in adapters}
            if any(base == digest for base, _ in wanted):
                host.keep_only(keep)
            elif host.close(if_idle=True):
                with self._lock:
                    if self._hosts.get(digest) is host:
                        del self._hosts[digest]


class _Host:
    """One engine and the thread that alone touches it. Calls are answered in order, those of one version together."""

    def __init__(self, store: Store, base_digest: str) -> None:
        self._store, self._base_digest = store, base_digest
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._keep: frozenset[str] | None = None
        self._used: dict[str, float] = {}
        self._busy = self._closed = False
        self._engine: Engine | None = None
        self._tried: set[tuple[str, ...]] = set()
        self._thread = threading.Thread(target=self._work, name=f"engine-{base_digest[:8]}", daemon=True)
        self._thread.start()

    @property
    def loaded(self) -> frozenset[str]:
        return self._engine.adapters if self._engine is not None else frozenset()

    def has_tried(self, adapters: tuple[str, ...]) -> bool:
        """Whether these were loaded, or failed to; a call tries again, the background does not."""
        return adapters in self._tried

    def put(self, call: _Call) -> bool:
        """False when this host is closed: ask for another one."""
        with self._changed:
            if self._closed:
                return False
            if len(self._calls) >= MOST_WAITING:
                raise LiveUnavailable(f"{MOST_WAITING} calls wait for this model already", "Try again in a moment")
            self._calls.append(call)
            self._used.update(dict.fromkeys(call.adapters, time.monotonic()))
            self._changed.notify()
            return True

    def keep_only(self, adapters: set[str]) -> None:
        """Unload every other adapter, once no call has asked for it lately."""
        with self._changed:
            self._keep = frozenset(adapters)
            self._tried = {line for line in self._tried if set(line) <= adapters}
            self._changed.notify()

    def close(self, *, if_idle: bool = False) -> bool:
        """Stop the thread and give the memory back; False when it is busy and `if_idle` was asked for."""
        with self._changed:
            if if_idle and (self._calls or self._busy):
                return False
            self._closed = True
            calls, self._calls = list(self._calls), deque()
            self._changed.notify()
        for call in calls:
            call.result.set_exception(
                LiveUnavailable("the serving engine is stopping", "Start it again with `loop dev`")
            )
        self._thread.join(timeout=30)
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                while not (self._calls or self._closed or self._unneeded()):
                    self._changed.wait()
                if self._closed:
                    break
                together = self._take()
                self._busy = True
            if together:
                self._answer(together)
                del together
            for adapter in self._unneeded():
                assert self._engine is not None
                self._engine.unload_adapter(adapter)
                log.info("unloaded adapter %s", adapter[:16])
        if self._engine is not None:
            self._engine.close()

    def _unneeded(self) -> list[str]:
        """What is loaded for nothing: not to be kept, not waited for and not asked for lately.

        What a call asks for may have gone live after `keep_only` was told what to keep.
        """
        with self._changed:
            if self._keep is None:
                return []
            since = time.monotonic() - LATELY_S
            needed = self._keep.union(*(call.adapters for call in self._calls))
            return sorted(name for name in self.loaded - needed if self._used.get(name, 0.0) < since)

    def _take(self) -> list[_Call]:
        """The oldest call and others of the same version, up to MOST_TOGETHER."""
        taken: list[_Call] = []
        left: deque[_Call] = deque()
        for call in self._calls:
            if call.result.cancelled():  # its caller went away
                continue
            same = not taken or (call.adapters == taken[0].adapters and len(taken) < MOST_TOGETHER)
            (taken if same else left).append(call)
        self._calls = left
        # From here on a caller that goes away changes nothing for the others.
        return [call for call in taken if call.result.set_running_or_notify_cancel()]

    def _answer(self, calls: list[_Call]) -> None:
        adapters = calls[0].adapters
        try:
            engine = self._load(adapters)
            asked = {str(place): call for place, call in enumerate(calls) if call.request is not None}

            def on_token(key: str, token: int) -> None:
                if (tell := asked[key].on_token) is not None:
                    tell(token)

            engine.answer(
                [replace(call.request, key=key) for key, call in asked.items() if call.request is not None],
                adapters=adapters,
                on_token=on_token,
                on_answer=lambda answer: asked[answer.key].result.set_result(answer),
            )
            for call in calls:
                if call.request is None:
                    call.result.set_result(None)
        except Exception as error:  # one thread serves everybody: it goes on, and the callers learn why
            told = error if isinstance(error, LoopError) else _unexpected("answering", error)
            for call in calls:
                if not call.result.done():
                    call.result.set_exception(told)

    def _load(self, adapters: tuple[str, ...]) -> Engine:
        """The engine with these adapters loaded. Raises LiveUnavailable with the reason."""
        self._tried.add(adapters)
        try:
            if self._engine is None:
                path = base_path(self._store, self._base_digest)
                self._engine = open_engine(base=path, base_digest=self._base_digest)
                log.info("loaded base %s", self._base_digest[:16])
            for adapter in adapters:
                if adapter not in self._engine.adapters:
                    folder = self._store.artifacts.open(adapter, verify=True)
                    self._engine.load_adapter(adapter, folder, base_digest=self._base_digest)
                    log.info("loaded adapter %s", adapter[:16])
        except LoopError as error:
            log.warning("%s", error.message)
            raise LiveUnavailable(error.message, "The live name stays; it answers once that is mended") from error
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            raise _unexpected("loading it", error) from error
        return self._engine


def base_path(store: Store, digest: str) -> Path:
    """Folder of the base model with this digest: of a pipeline that pins it, or of the attempt behind a live version.

    Raises NotFound, BaseChanged when the folder holds something else by now, or what `base.resolve` raises.
    """
    pinned = [pipeline.model_id for pipeline in store.pipelines.list() if pipeline.model_digest == digest]
    live = [version.run_id for version in store.versions.all_live().values() if version.base_digest == digest]
    frozen = [store.attempts.get(run_id).frozen.get("model_id") for run_id in live]
    found = None
    for model_id in dict.fromkeys([*pinned, *frozen]):
        if model_id is not None:
            found = resolve(model_id, store.settings.models_dir)
            if found.digest == digest:
                return found.path
    if found is not None:
        raise BaseChanged(found.model_id, digest, found.digest)
    raise NotFound("base model with the digest", digest)


def _unexpected(what: str, error: BaseException) -> LiveUnavailable:
    """For the caller the kind of error, for the log also its place; its message may quote a conversation."""
    log.error("%s failed with %s\n%s", what, type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
    return LiveUnavailable(f"{what} failed ({type(error).__name__})", "Look at the log of the serving engine")
