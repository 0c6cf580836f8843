"""Whether a judge's server knows structured output, where it does not say so but only fails.

Belongs here: which try of a call asks for structured output, and what the ends of many calls say of the server. Does
not belong here: objections in words, and sending (`judge_server.py`).

A server that refuses a part of a request without a word (500, 503, a closed connection, a reply without text) looks
like one that is down. What tells them apart is the order of things: without structured output it answers, with it right
after that it fails, and without it it answers again. A server that was only away for a moment answers the middle one
too, and one that ever answered with structured output knows it: it is asked for it for good.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Final

#: After so many calls without structured output the server is asked for it once more, then after twice as many, and so
#: on: evidence may mislead (a proxy before two servers of which one is down), and a server may be mended.
LOOK_AGAIN_AFTER: Final = 64


class Structured:
    """What is known of one server. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works = False
        self._left_out = False
        self._plain_at = math.inf
        self._look_again_after = LOOK_AGAIN_AFTER
        self._calls_left = 0
        self._failed: dict[int, float] = {}

    @property
    def works(self) -> bool:
        """Whether any call with structured output has succeeded."""
        return self._works

    @property
    def left_out(self) -> bool:
        """Whether calls begin without it."""
        return self._left_out

    def call(self, key: int) -> StructuredCall:
        """A call to come. `key` stands for the question: asked again after a reply without text, it goes without."""
        if self._works:
            return StructuredCall(self, key, None, plain=False)
        with self._lock:
            failed_at = self._failed.pop(key, None)
            plain = failed_at is not None
            if self._left_out and not plain:
                self._calls_left -= 1
                plain = self._calls_left > 0
                if not plain:
                    self._look_again_after *= 2
                    self._calls_left = self._look_again_after
            return StructuredCall(self, key, failed_at, plain=plain)

    def succeeded(self, failed_at: float | None, *, plain: bool) -> None:
        """A call came to a reply with text; `failed_at` is when a try with structured output began that failed."""
        if self._works:
            return
        with self._lock:
            if not plain:
                self._works, self._left_out = True, False
                self._failed.clear()
            elif failed_at is not None and not self._left_out:
                if failed_at > self._plain_at:
                    self._left_out, self._calls_left = True, self._look_again_after
                else:
                    self._plain_at = min(self._plain_at, time.monotonic())

    def keep(self, key: int, failed_at: float) -> None:
        """A call with structured output ended without text: the next one of the same question goes without."""
        with self._lock:
            if not self._works:
                self._failed[key] = failed_at


class StructuredCall:
    """The tries of one call. `plain`: the next one goes without structured output."""

    def __init__(self, known: Structured, key: int, failed_at: float | None, *, plain: bool) -> None:
        self._known, self._key, self._failed_at = known, key, failed_at
        self._begun = 0.0
        self._owed = False
        self.plain = plain

    @property
    def owed(self) -> bool:
        """Whether a try without structured output is still due: all that were made may have failed for it alone."""
        return self._owed and not self._known.works

    def begin(self) -> None:
        """A try begins."""
        self.plain = self.plain and not self._known.works
        self._owed = self._owed and not self.plain
        self._begun = time.monotonic()

    def failed(self, *, at_once: bool = True) -> None:
        """A try failed without a word of what the server objects to: the next one goes the other way.

        Unknown, the two ways take turns, so that a server that comes back can show that it knows it; where it is
        known to fail, it is tried once. `at_once` is false for a time-out, after which nobody is owed another try.
        """
        if not self.plain:
            self._owed = at_once and self._failed_at is None
            self._failed_at, self.plain = self._begun, True
        else:
            self.plain = self._known.left_out and self._failed_at is not None

    def succeeded(self) -> None:
        """A try came to a reply with text."""
        self._known.succeeded(self._failed_at, plain=self.plain)

    def empty(self) -> None:
        """A try came to a reply without text."""
        if not self.plain:
            self._known.keep(self._key, self._begun)
