"""Stores what passed: one thread that takes ended calls and writes samples and counters, several at a time.

Belongs here: the queue and its bounds, whether the registry takes writes, going on after it did not. Does not belong
here: what is recorded (planning.py, answers.py), rows (store/).

A call that was promised a sample id holds a place until its sample is stored, so a promise always finds room. While the
registry takes no writes nothing is promised; what was promised before is written when it does again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeVar

from loop_dagster.api.gateway.answers import Said
from loop_dagster.api.gateway.planning import Plan
from loop_dagster.errors import LoopError
from loop_dagster.rules.retention import captured_until
from loop_dagster.rules.shapes import flag
from loop_dagster.store.capturing import Reason
from loop_dagster.store.giving import label_rows
from loop_dagster.store.inbox import NewSample
from loop_dagster.store.open import Store
from loop_dagster.store.pages import sample_row

log = logging.getLogger("loop.api")

_T = TypeVar("_T")
#: Calls on their way to the registry, and bytes of their bodies, that one process holds.
MOST_CALLS: Final = 1_000
MOST_BYTES: Final = 256_000_000
#: Ended calls that are written in one transaction.
TOGETHER: Final = 64
#: How long the recorder waits after a call ended: its answer goes out first, and what ends together is written so.
GATHER_S: Final = 0.005
#: A write that takes longer than this means that the registry takes none just now.
SLOW_S: Final = 0.5
#: A write that succeeded within this time shows that it does.
RECENT_S: Final = 1.0
#: How long the question may take whether it does.
PROBE_S: Final = 0.05
#: Calls that take longer than this are noted as still under way, and as often.
NOTED_EVERY_S: Final = 20.0
#: Pauses between tries to write while the registry takes none.
PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
#: Tries after a failure that no error of the stores names.
MOST_TRIES: Final = 8
#: How long the end of the process waits for what is not written yet.
LAST_S: Final = 10.0


@dataclass(eq=False, slots=True)
class Place:
    """The place that a call holds; `plan` is None while it is looked up, and when that failed."""

    store: Store
    size: int
    since: float
    plan: Plan | None = None
    promised: bool = False
    noted: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A call that has ended, for the recorder's thread: `plan` gives what is to become of it, and raises
    RegistryUnavailable and its kin; `read` gives what the answer came to."""

    place: Place
    plan: Callable[[], Plan]
    read: Callable[[], Said | Reason]


class Recorder:
    """The recorder of one process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Ended | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._places: set[Place] = set()
        self._bytes = 0
        self._writing_since: float | None = None
        self._failing = False
        self._wrote_at = 0.0
        self._give_up: float | None = None
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._started = False

    # from the calls

    def place(self, store: Store, size: int) -> Place | None:
        """A place for a call; None when there is none, and then the call is not recorded."""
        with self._lock:
            if len(self._places) >= MOST_CALLS or self._bytes + size > MOST_BYTES or self._give_up is not None:
                return None
            place = Place(store, size, time.monotonic())
            self._places.add(place)
            self._bytes += size
            return place

    @property
    def waiting(self) -> int:
        """Calls that hold a place: on their way, or ended and not stored yet."""
        with self._lock:
            return len(self._places)

    def leave(self, place: Place) -> None:
        """Give a place back."""
        with self._lock:
            if place in self._places:
                self._places.discard(place)
                self._bytes -= place.size

    def takes_writes(self, store: Store) -> bool:
        """Whether a sample that is promised now will be stored soon. Called from a thread, while the upstream answers.

        A write that just succeeded is proof; otherwise the registry is asked. What keeps it from taking a write may be
        this recorder's own one, which then is the proof when it has come through.
        """
        now = time.monotonic()
        since = self._writing_since
        if (
            self._failing
            or (self._started and not self._thread.is_alive())
            or (since is not None and now - since > SLOW_S)
        ):
            return False
        if now - self._wrote_at < RECENT_S or store.registry.takes_writes(within_s=PROBE_S):
            return True
        while self._writing_since is not None and time.monotonic() - now < SLOW_S:
            time.sleep(0.002)
        return self._wrote_at > now

    def ended(self, ended: Ended) -> None:
        """Hand over a call that has ended; never waits."""
        self._put_in(ended)

    def _put_in(self, item: Ended | Callable[[], None]) -> None:
        self._queue.put(item)
        if not self._started:
            with self._lock:
                if not self._started:
                    self._started = True
                    self._thread.start()

    def later(self, work: Callable[[], None]) -> None:
        """Do something small that writes, when there is time; never waits."""
        self._put_in(work)

    def close(self) -> None:
        """Write what is left and end; what cannot be written within LAST_S is given up and said in the log."""
        self._give_up = time.monotonic() + LAST_S
        self._queue.put(None)
        if self._started:
            self._thread.join(LAST_S + 1)
        if self._places:
            log.error("RECORDING_GIVEN_UP: %d calls that had passed were not recorded", len(self._places))

    # the thread

    def _work(self) -> None:
        last_look = time.monotonic()
        while True:
            batch: list[Ended] = []
            end = False
            try:
                item = self._queue.get(timeout=NOTED_EVERY_S / 4)
                if isinstance(item, Ended):
                    time.sleep(GATHER_S)
                while True:
                    if item is None:
                        end = True
                    elif isinstance(item, Ended):
                        batch.append(item)
                    else:
                        self._guarded(item)
                    if end or len(batch) >= TOGETHER:
                        break
                    item = self._queue.get_nowait()
            except queue.Empty:
                pass
            if batch:
                self._guarded(lambda batch=batch: self._write(batch))  # type: ignore[misc]
                for ended in batch:
                    self.leave(ended.place)
            if end:
                return
            if time.monotonic() - last_look > NOTED_EVERY_S / 4:
                last_look = time.monotonic()
                self._guarded(self._note_long_calls)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever happens, the thread goes on; a message may quote a conversation, so the kind alone is logged."""
        self._writing_since = time.monotonic()
        try:
            work()
        except Exception as error:
            log.error("RECORDING_FAILED: %s", getattr(error, "code", type(error).__name__))
        finally:
            self._writing_since = None

    def _write(self, batch: Sequence[Ended]) -> None:
        by_store: dict[int, list[Ended]] = {}
        for ended in batch:
            by_store.setdefault(id(ended.place.store), []).append(ended)
        for group in by_store.values():
            self._write_one_store(group[0].place.store, group)

    def _write_one_store(self, store: Store, group: Sequence[Ended]) -> None:
        missed: Counter[tuple[str, Reason]] = Counter()
        rows: list[NewSample] = []
        for ended in group:
            row = None
            try:
                row = _row(ended, self._until_done(ended.plan, writes=False), missed)
            except Exception as error:  # one call that cannot be stored takes no other with it
                log.error("RECORDING_FAILED: %s", getattr(error, "code", type(error).__name__))
            if row is not None:
                rows.append(row)
        now = datetime.now(UTC)
        if rows:
            self._guarded(lambda: self._put(store, rows, now))
        if missed:
            self._until_done(lambda: store.capturing.count(missed, now))

    def _put(self, store: Store, rows: Sequence[NewSample], now: datetime) -> None:
        """Store samples together; one that cannot be stored takes no other with it."""

        def find(identities: Collection[str]) -> Mapping[str, str]:
            return store.samples.find_identities(identities, now)

        try:
            puts = self._until_done(lambda: store.inbox.put_samples(rows, in_lake=find, now=now))
        except Exception:
            if len(rows) == 1 or self._give_up is not None:
                raise
            for row in rows:
                self._guarded(lambda row=row: self._put(store, [row], now))  # type: ignore[misc]
            return
        given = [str(new.row["sample_id"]) for new in rows]
        firsts = {mine: put.sample_id for mine, put in zip(given, puts, strict=True) if put.sample_id != mine}
        if firsts:
            self._until_done(lambda: store.capturing.mean_first(firsts, now))

    def _until_done(self, work: Callable[[], _T], *, writes: bool = True) -> _T:
        """Read or write, again and again while the registry does not answer.

        Raises what a second try does not change; and anything once the process is to end, or after MOST_TRIES tries
        for what has no name here.
        """
        tries = 0
        while True:
            self._writing_since = time.monotonic()
            try:
                done = work()
            except Exception as error:
                code = error.code if isinstance(error, LoopError) else type(error).__name__
                over = self._give_up is not None and time.monotonic() > self._give_up
                odd = not isinstance(error, LoopError) and tries >= MOST_TRIES
                if code in _FOR_GOOD or over or odd:
                    self._failing = False
                    raise
                if not self._failing:
                    log.warning("RECORDING_WAITS: %s", code)
                self._failing = True
                time.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
                tries += 1
            else:
                self._failing = False
                if writes:
                    self._wrote_at = time.monotonic()
                return done
            finally:
                self._writing_since = None

    def _note_long_calls(self) -> None:
        """Say of calls that take long that their samples are still on their way."""
        now = time.monotonic()
        with self._lock:
            due = [
                place
                for place in self._places
                if place.promised and now - max(place.since, place.noted) > NOTED_EVERY_S
            ]
        by_store: dict[int, list[Place]] = {}
        for place in due:
            place.noted = now
            by_store.setdefault(id(place.store), []).append(place)
        for places in by_store.values():
            ids = [place.plan.sample_id for place in places if place.plan is not None and place.plan.sample_id]
            places[0].store.capturing.seen(ids, datetime.now(UTC))


def warm_up(store: Store, recorder: Recorder) -> None:
    """Read and compute what the first call needs, and store nothing. Raises RegistryUnavailable and its kin."""
    now = datetime.now(UTC)
    look = store.capturing.look("", [], "", now)
    store.capturing.new_id(now)
    recorder.takes_writes(store)
    turn = {"role": "user", "content": "a@b.example"}
    sample_row(
        source="",
        identity="",
        messages=[turn],
        answer=None,
        tools=None,
        flag=flag([turn], None),
        now=now,
        expires_at=captured_until(now, look.source.retention_days),
    )
    store.samples.find_identities([""])


#: Refusals that a second try does not change.
_FOR_GOOD: Final = frozenset({"BAD_REQUEST", "NOT_FOUND", "REGISTRY_DAMAGED"})


def _row(ended: Ended, planned: Plan, missed: Counter[tuple[str, Reason]]) -> NewSample | None:
    """What is to be stored of a call; None, with what was missed counted, when nothing is."""
    for word in planned.unknown:
        missed[word, "no_pipeline"] += 1
    if planned.sample_id is None and planned.refused is None:
        return None
    said = planned.refused or ended.read()
    asked = planned.asked
    if isinstance(said, str) or asked is None or planned.sample_id is None:
        for word in planned.counted:
            missed[word, said if isinstance(said, str) else "incomplete"] += 1
        return None
    now = planned.at
    row, _secrets = sample_row(
        source=planned.source.name,
        identity=planned.identity,
        messages=asked.messages,
        answer=said.message,
        tools=asked.tools,
        flag=flag(asked.messages, said.message),
        now=now,
        expires_at=captured_until(now, planned.source.retention_days),
        model=said.model or planned.source.name,
        conversation_id=planned.conversation,
    )
    labels = label_rows(planned.sample_id, now=now, labels=planned.labels) if planned.labels else []
    return NewSample({**row, "sample_id": planned.sample_id}, labels=labels)
