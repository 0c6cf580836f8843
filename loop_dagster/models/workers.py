"""Threads for calls that wait for somebody else, which can be left behind.

Belongs here: handing jobs to threads and taking back what came of them. Does not belong here: what the jobs are.

An executor of the standard library waits for its threads when the interpreter ends. A call to a server that hangs would
hold a cancelled step for as long as its time-out; these threads hold nothing.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

Tag = TypeVar("Tag")
T = TypeVar("T")


class Workers(Generic[Tag, T]):
    """Up to `count` jobs at once. With one, a job runs in the caller's own thread when its outcome is asked for.

    `busy` is how many jobs were handed in and not yet taken back.
    """

    def __init__(self, count: int, *, name: str) -> None:
        self._count, self._name = count, name
        self._jobs: queue.SimpleQueue[tuple[Tag, Callable[[], T]] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Tag, T | Exception]] = queue.SimpleQueue()
        self._own: deque[tuple[Tag, Callable[[], T]]] = deque()
        self._threads = 0
        self.busy = 0

    def hand_in(self, tag: Tag, job: Callable[[], T]) -> None:
        """Have `job` run; `tag` comes back with its outcome."""
        self.busy += 1
        if self._count == 1:
            self._own.append((tag, job))
            return
        if self._threads < min(self._count, self.busy):
            self._threads += 1
            threading.Thread(target=self._run, name=f"{self._name} {self._threads}", daemon=True).start()
        self._jobs.put((tag, job))

    def take(self, timeout_s: float) -> tuple[Tag, T | Exception] | None:
        """The tag of the next job that has ended, and what it returned or raised; None when none ends in time."""
        if self._own:
            tag, job = self._own.popleft()
            ended = tag, _outcome(job)
        else:
            try:
                ended = self._ended.get(timeout=timeout_s)
            except queue.Empty:
                return None
        self.busy -= 1
        return ended

    def _run(self) -> None:
        while (handed := self._jobs.get()) is not None:
            tag, job = handed
            self._ended.put((tag, _outcome(job)))

    def __enter__(self) -> Workers[Tag, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)


def _outcome(job: Callable[[], T]) -> T | Exception:
    try:
        return job()
    except Exception as error:  # it is the caller's to judge
        return error
