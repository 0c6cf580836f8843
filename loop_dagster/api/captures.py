"""Captures, several at a time: whatever came while the last ones were written is written in one transaction.

Belongs here: the queue, its thread, and handing each caller its own end. Does not belong here: what a capture is
(routers/samples.py), the transaction (store/inbox.py). Nothing is acknowledged before its transaction is on the disk; a
commit costs about a millisecond there, however many captures it holds.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from loop_dagster.errors import BadRequest, LoopError
from loop_dagster.store.inbox import NewSample, Put
from loop_dagster.store.open import Store
from loop_dagster.store.pages import put_prompt_keys
from loop_dagster.store.sources import Source

#: Captures of one transaction.
TOGETHER: Final = 64
#: So many in one transaction, and the next one waits a moment for others on their way: each transaction costs as much
#: as the reading of ten captures, which would have to wait for it anyway. Who captures alone never waits.
SIBLINGS: Final = 4
GATHER_S: Final = 0.002
#: How long the end of the process waits for what is under way.
LAST_S: Final = 10.0
Answer = dict[str, Any]
#: Where a caller waits for its end: a thread in the first, an event loop in the second.
_Waits = Future[Answer] | asyncio.Future[Answer]


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
        self._queue: queue.SimpleQueue[tuple[Asked, _Waits] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, asked: Asked) -> Future[Answer]:
        """For a thread: its answer once it is stored, or what was refused or failed."""
        future: Future[Answer] = Future()
        self._add(asked, future)
        return future

    async def stored(self, asked: Asked) -> Answer:
        """For the event loop, which is woken once for all that were stored together. Raises what `put` would."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._add(asked, future)
        return await future

    def _add(self, asked: Asked, waits: _Waits) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="captures", daemon=True)
                    self._thread.start()
        self._queue.put((asked, waits))

    def close(self) -> None:
        """End once everything that came is answered."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(LAST_S)

    def _work(self) -> None:
        together = 1
        while (first := self._queue.get()) is not None:
            if together >= SIBLINGS:
                time.sleep(GATHER_S)
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
            together = len(batch)
            self._answer([(asked, waits) for asked, waits in batch if _is_wanted(waits)])
            if end:
                return

    def _answer(self, batch: Sequence[tuple[Asked, _Waits]]) -> None:
        by_store: dict[int, list[tuple[Asked, _Waits]]] = {}
        for asked, waits in batch:
            by_store.setdefault(id(asked.store), []).append((asked, waits))
        for group in by_store.values():
            try:
                ends = _store([asked for asked, _waits in group])
            except Exception as error:  # the thread goes on, and every caller hears of it
                ends = [error] * len(group)
            _tell([(waits, end) for (_asked, waits), end in zip(group, ends, strict=True)])


def _is_wanted(waits: _Waits) -> bool:
    """Whether somebody still waits; a thread cannot go from here on."""
    return not waits.cancelled() if isinstance(waits, asyncio.Future) else waits.set_running_or_notify_cancel()


def _tell(ends: Sequence[tuple[_Waits, Answer | Exception]]) -> None:
    """Give every caller its end: each thread its own, and each event loop all of its own at once."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[_Waits, Answer | Exception]]] = {}
    for waits, end in ends:
        if isinstance(waits, asyncio.Future):
            loops.setdefault(waits.get_loop(), []).append((waits, end))
        else:
            _finish([(waits, end)])
    for loop, theirs in loops.items():
        with suppress(RuntimeError):  # a loop that is closed has nobody left who waits
            loop.call_soon_threadsafe(_finish, theirs)


def _finish(ends: Sequence[tuple[_Waits, Answer | Exception]]) -> None:
    for waits, end in ends:
        if waits.cancelled():
            continue
        if isinstance(end, Exception):
            waits.set_exception(end)
        else:
            waits.set_result(end)


def _store(group: Sequence[Asked]) -> list[Answer | Exception]:
    """Store the captures of one workspace; the end of each. Raises what keeps all of them from being stored."""
    store = group[0].store
    sources = store.sources.get_many({asked.source for asked in group})
    ends: dict[int, Answer | Exception] = {}
    plans: dict[int, Planned] = {}
    for at, asked in enumerate(group):
        try:
            plan = asked.plan(sources[asked.source])
        except Exception as error:  # one that is refused takes no other with it
            ends[at] = error
            continue
        if isinstance(plan, Planned):
            plans[at] = plan
        else:
            ends[at] = plan
    if plans:
        _set_keys([plan for plan in plans.values() if not plan.keyed])
        ends |= zip(plans, _put_each(store, list(plans.values())), strict=True)
    return [ends[at] for at in range(len(group))]


def _put_each(store: Store, plans: Sequence[Planned]) -> list[Answer | Exception]:
    try:
        return [_answered(put) for put in _put(store, plans)]
    except BadRequest as error:
        if len(plans) == 1:
            return [error]
    ends: list[Answer | Exception] = []
    for plan in plans:
        try:
            ends.append(_answered(*_put(store, [plan])))
        except LoopError as error:
            ends.append(error)
    return ends


def _set_keys(plans: Sequence[Planned]) -> None:
    if plans:
        put_prompt_keys([plan.sample.row for plan in plans])  # type: ignore[misc]  # rows of plans are dicts


def _put(store: Store, plans: Sequence[Planned]) -> list[Put]:
    unheard = {str(plan.sample.row["identity"]) for plan in plans if not plan.again}
    now = datetime.now(UTC)
    return store.inbox.put_samples(
        [plan.sample for plan in plans],
        in_lake=lambda identities: store.samples.find_identities(identities, now),
        unheard=unheard,
        now=now,
    )


def _answered(put: Put) -> Answer:
    return {"captured": True, "trace_id": put.sample_id, "already_present": not put.stored}
