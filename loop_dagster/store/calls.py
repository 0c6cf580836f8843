"""Writes that may be sent again: the first one's answer is kept for a day under the caller's Idempotency-Key.

Belongs here: whose turn a call is, what was answered, and forgetting it. Does not belong here: reading requests (api/).
A call that was killed before it had answered leaves its turn; after TURN a repeat takes it over and does the write
itself, so a write that comes with a key must be safe to do twice, or refuse the second time.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from uuid_utils import uuid4

from loop_dagster.errors import CallUnderWay, Conflict
from loop_dagster.store.registry import Registry, insert_new
from loop_dagster.store.schema import idempotent_calls as calls

#: How long a key stands for its first call (http-api.md).
KEPT: Final = timedelta(hours=24)
#: How long the first call may take before a repeat counts it as lost.
TURN: Final = timedelta(minutes=2)
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

    def begin(self, owner: str, name: str, fingerprint: str, *, now: datetime | None = None) -> Turn | Answered:
        """Take the turn for the Idempotency-Key `name` of the API key `owner`, or learn what was answered.

        `fingerprint` stands for method, address and body. Raises Conflict when the key came with another one within the
        last 24 hours, CallUnderWay while the first call is not answered.
        """
        now = now or datetime.now(UTC)
        call_key = hashlib.sha256(f"{owner}\0{name}".encode("utf-8", "replace")).hexdigest()
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
            if insert_new(connection, calls, row):
                return Turn(call_key, token)
            found = connection.execute(sa.select(calls).where(self._is(call_key)).with_for_update()).mappings().one()
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

    def settle(self, turn: Turn, status: int, answer: Any) -> None:
        """Keep the answer for everybody who sends the call again; nothing when the turn was taken over."""
        with self.registry.write() as connection:
            connection.execute(
                sa.update(calls)
                .where(self._is(turn.call_key), calls.c.token == turn.token)
                .values(status=status, answer=answer)
            )

    def release(self, turn: Turn) -> None:
        """Give the turn back: nothing was written, and the same key may come again with anything."""
        with self.registry.write() as connection:
            connection.execute(sa.delete(calls).where(self._is(turn.call_key), calls.c.token == turn.token))

    def _forget(self, connection: sa.Connection, now: datetime) -> None:
        """Delete some rows that are over a day old, so that the table stays small without a round of its own."""
        mine = calls.c.workspace == self.registry.workspace
        old = sa.select(calls.c.call_key).where(mine, calls.c.created_at <= now - KEPT).limit(_FORGOTTEN)
        connection.execute(sa.delete(calls).where(mine, calls.c.call_key.in_(old)))

    def _is(self, call_key: str) -> sa.ColumnElement[bool]:
        return sa.and_(calls.c.workspace == self.registry.workspace, calls.c.call_key == call_key)
