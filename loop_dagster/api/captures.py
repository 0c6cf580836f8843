"""Captures, several at a time: whatever came while the last ones were written is written in one transaction.

Belongs here: the queue, its thread, and handing each caller its own end. Does not belong here: what a capture is
(routers/samples.py), the transaction (store/inbox.py). Nothing is acknowledged before its transaction is on the disk; a
commit costs about a millisecond there, however many captures it holds.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from loop_dagster.errors import BadRequest, LoopError
from loop_dagster.store.inbox import NewSample, Put
from loop_dagster.store.open import Store
from loop_dagster.store.pages import put_prompt_keys
from loop_dagster.store.sources import Source

log = logging.getLogger("loop.api")

#: Captures of one transaction.
TOGETHER: Final = 64
#: How long the end of the process waits for what is under way.
LAST_S: Final = 10.0
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Planned:
    """A sample to store; `again` when the same one may have come before, `keyed` when its prompt_key is set."""

    sample: NewSample
    again: bool
    keyed: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """One capture: of which source, and what is to be stored, or answered instead, when that is recorded as it is."""

    store: Store
    source: str
    plan: Callable[[Source], Planned | Answer]

    def planned(self) -> Asked:
        """The same, planned now in the caller's thread: so no short capture waits for the reading of a long one."""
        plan = self.plan(self.store.sources.get(self.source))
        if isinstance(plan, Planned):
            _set_keys([plan])
            plan = replace(plan, keyed=True)
        return Asked(self.store, self.source, lambda _source: plan)


class Captures:
    """The captures of one process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Asked, Future[Answer]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, asked: Asked) -> Future[Answer]:
        """Its answer once it is stored, or what was refused or failed."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="captures", daemon=True)
                    self._thread.start()
        future: Future[Answer] = Future()
        self._queue.put((asked, future))
        return future

    def close(self) -> None:
        """End once everything that came is answered."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(LAST_S)

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            end = False
            while len(batch) < TOGETHER and not end:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
                end = item is None
                if item is not None:
                    batch.append(item)
            self._answer([pair for pair in batch if pair[1].set_running_or_notify_cancel()])
            if end:
                return

    def _answer(self, batch: Sequence[tuple[Asked, Future[Answer]]]) -> None:
        by_store: dict[int, list[tuple[Asked, Future[Answer]]]] = {}
        for pair in batch:
            by_store.setdefault(id(pair[0].store), []).append(pair)
        for group in by_store.values():
            try:
                _store(group)
            except Exception as error:  # the thread goes on, and every caller hears of it
                for _asked, future in group:
                    if not future.done():
                        future.set_exception(error)


def _store(group: Sequence[tuple[Asked, Future[Answer]]]) -> None:
    """Store the captures of one workspace and answer them. Raises what keeps all of them from being stored."""
    store = group[0][0].store
    sources = store.sources.get_many({asked.source for asked, _future in group})
    found: list[tuple[Planned, Future[Answer]]] = []
    for asked, future in group:
        try:
            plan = asked.plan(sources[asked.source])
        except Exception as error:  # one that is refused takes no other with it
            future.set_exception(error)
            continue
        if isinstance(plan, Planned):
            found.append((plan, future))
        else:
            future.set_result(plan)
    if not found:
        return
    _set_keys([plan for plan, _future in found if not plan.keyed])
    try:
        puts = _put(store, [plan for plan, _future in found])
    except BadRequest:
        for plan, future in found:
            try:
                future.set_result(_answered(*_put(store, [plan])))
            except LoopError as error:
                future.set_exception(error)
        return
    for (_plan, future), put in zip(found, puts, strict=True):
        future.set_result(_answered(put))


def _set_keys(plans: Sequence[Planned]) -> None:
    if plans:
        put_prompt_keys([plan.sample.row for plan in plans])  # type: ignore[misc]  # rows of plans are dicts


def _put(store: Store, plans: Sequence[Planned]) -> list[Put]:
    again = {str(plan.sample.row["identity"]) for plan in plans if plan.again}

    now = datetime.now(UTC)

    def in_lake(identities: Collection[str]) -> Mapping[str, str]:
        return store.samples.find_identities([one for one in identities if one in again], now)

    return store.inbox.put_samples([plan.sample for plan in plans], in_lake=in_lake, now=now)


def _answered(put: Put) -> Answer:
    return {"captured": True, "trace_id": put.sample_id, "already_present": not put.stored}
