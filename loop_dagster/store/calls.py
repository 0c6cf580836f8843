"""Writes that may be sent again: the first one's answer is kept for a day under the caller's Idempotency-Key.

Belongs here: whose turn a call is, what was answered, and forgetting it. Does not belong here: reading requests (api/).
A call that was killed before it had answered leaves its turn, which nobody beats any more; after TURN a repeat takes it
over and does the write itself, so a write that comes with a key must be safe to do twice, or refuse the second time.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from uuid_utils import uuid4

from loop_dagster.errors import CallUnderWay, Conflict, LoopError
from loop_dagster.store.registry import Registry, insert_new
from loop_dagster.store.schema import idempotent_calls as calls

#: How long a key stands for its first call (http-api.md).
KEPT: Final = timedelta(hours=24)
#: Without a beat for this long, a repeat counts the first call as lost: less than it waits before it is sent away.
TURN: Final = timedelta(seconds=10)
_BEAT_S: Final = 2.5
#: Most rows that one call forgets in passing.
_FORGOTTEN: Final = 100


@dataclass(frozen=True, slots=True)
class Answered:
    """What the first call was answered."""

    status: int
    answer: Any


@dataclass(frozen=True, slots=True)
class Turn:
    """The right to do the write; `settle` or `release` ends it."""

    call_key: str
    token: str


class Calls:
    """Calls with an Idempotency-Key of one workspace."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._open: dict[str, Turn] = {}
        self._beats = False
        self._guard = threading.Lock()

    def begin(self, owner: str, name: str, fingerprint: str, *, now: datetime | None = None) -> Turn | Answered:
        """Take the turn for the Idempotency-Key `name` of the API key `owner`, or learn what was answered.

        `fingerprint` stands for method, address and body. Raises Conflict when the key came with another one within the
        last 24 hours, CallUnderWay while the first call is not answered.
        """
        now = now or datetime.now(UTC)
        call_key = _key(owner, name)
        token = str(uuid4())
        row = {
            "workspace": self.registry.workspace,
            "call_key": call_key,
            "fingerprint": fingerprint,
            "token": token,
            "created_at": now,
        }
        with self.registry.write() as connection:
            self._forget(connection, now)
            found = None
            while found is None:  # a call that is refused may give its turn back between the two statements
                if insert_new(connection, calls, row):
                    return Turn(call_key, token)
                query = sa.select(calls).where(self._is(call_key)).with_for_update()
                found = connection.execute(query).mappings().one_or_none()
            if found["created_at"] <= now - KEPT:
                connection.execute(sa.update(calls).where(self._is(call_key)).values(**row, status=None, answer=None))
                return Turn(call_key, token)
            if found["fingerprint"] != fingerprint:
                raise Conflict(
                    "This Idempotency-Key was used for another call within the last 24 hours. Use a new one, or send "
                    "exactly what was sent with it."
                )
            if found["status"] is not None:
                return Answered(found["status"], found["answer"])
            if found["created_at"] > now - TURN:
                raise CallUnderWay
            connection.execute(sa.update(calls).where(self._is(call_key)).values(token=token, created_at=now))
            return Turn(call_key, token)

    def is_under_way(self, owner: str, name: str, *, now: datetime | None = None) -> bool:
        """Whether `begin` would raise CallUnderWay for the same call; nothing is written."""
        now = now or datetime.now(UTC)
        waits = sa.and_(self._is(_key(owner, name)), calls.c.status.is_(None), calls.c.created_at > now - TURN)
        with self.registry.read() as connection:
            return connection.execute(sa.select(calls.c.call_key).where(waits)).first() is not None

    @contextlib.contextmanager
    def under_way(self, turn: Turn) -> Iterator[None]:
        """Keep the turn for as long as the block lasts, in this process's own thread for that."""
        with self._guard:
            self._open[turn.token] = turn
            if not self._beats:
                self._beats = True
                threading.Thread(target=self._beat, name="turns", daemon=True).start()
        try:
            yield
        finally:
            with self._guard:
                del self._open[turn.token]

    def settle(self, turn: Turn, status: int, answer: Any) -> None:
        """Keep the answer for everybody who sends the call again; nothing when the turn was taken over."""
        with self.registry.write() as connection:
            self._settle(connection, turn, status, answer)

    def settle_in(self, connection: sa.Connection, turn: Turn, status: int, answer: Any) -> None:
        """`settle` inside the transaction of the write itself. Raises CallUnderWay when the turn was taken over."""
        if not self._settle(connection, turn, status, answer):
            raise CallUnderWay

    def _settle(self, connection: sa.Connection, turn: Turn, status: int, answer: Any) -> bool:
        mine = sa.and_(self._is(turn.call_key), calls.c.token == turn.token)
        return connection.execute(sa.update(calls).where(mine).values(status=status, answer=answer)).rowcount == 1

    def release(self, turn: Turn) -> None:
        """Give the turn back: nothing was written, and the same key may come again with anything."""
        with self.registry.write() as connection:
            connection.execute(sa.delete(calls).where(self._is(turn.call_key), calls.c.token == turn.token))

    def _beat(self) -> None:
        """Beat what is under way for long; ends with the last call, and most are over before the first beat."""
        before: set[str] = set()
        while True:
            time.sleep(_BEAT_S)
            with self._guard:
                now = set(self._open)
                if not now:
                    self._beats = False
                    return
            for token in before & now:
                # A registry that is away for longer than a turn ends it; the write is safe to do twice.
                with contextlib.suppress(LoopError):
                    self._beat_one(token)
            before = now

    def _beat_one(self, token: str) -> None:
        mine = sa.and_(calls.c.workspace == self.registry.workspace, calls.c.token == token, calls.c.status.is_(None))
        with self.registry.write() as connection:
            connection.execute(sa.update(calls).where(mine).values(created_at=datetime.now(UTC)))

    def _forget(self, connection: sa.Connection, now: datetime) -> None:
        """Delete some rows that are over a day old, so that the table stays small without a round of its own."""
        mine = calls.c.workspace == self.registry.workspace
        old = sa.select(calls.c.call_key).where(mine, calls.c.created_at <= now - KEPT).limit(_FORGOTTEN)
        connection.execute(sa.delete(calls).where(mine, calls.c.call_key.in_(old)))

    def _is(self, call_key: str) -> sa.ColumnElement[bool]:
        return sa.and_(calls.c.workspace == self.registry.workspace, calls.c.call_key == call_key)


def _key(owner: str, name: str) -> str:
    return hashlib.sha256(f"{owner}\0{name}".encode("utf-8", "replace")).hexdigest()
