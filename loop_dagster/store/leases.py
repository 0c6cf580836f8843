"""Leases: at most one live holder of a name, with a heartbeat, over processes and machines.

Belongs here: taking, beating, losing and revoking. Does not belong here: what a name protects. The names in use are
`lake/<workspace>` (one writer of the lake at a time) and `attempt/<run id>` (one process works on an attempt's step).

A lease protects by co-operation: whoever holds one asks `check` before every act that another's act could spoil, and
stops when that raises. Each take makes a new token, so a holder that slept past its time finds another token, or none.

Clocks: moments are the database server's, so machines whose clocks differ agree; on SQLite all processes share one
machine and its clock. A clock that jumps by more than a lease's `ttl_s` can end it early or keep a dead holder's alive
that much longer, never give it to two. A holder also watches its own monotonic clock: `ttl_s` after the last heartbeat
that got through it counts as lost, whatever the database says later.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import sqlalchemy as sa
from uuid_utils import uuid4

from loop_dagster.errors import LeaseBusy, LeaseLost, RegistryUnavailable
from loop_dagster.store.registry import Registry, insert_new
from loop_dagster.store.schema import leases

Why = Literal["taken", "expired", "revoked"]

TTL_S: Final = 30.0
#: Between two heartbeats a holder only looks, this often, so that what was cancelled stops within seconds.
LOOK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as it was when it was read. A child process beats it with (registry URL, workspace, name, token)."""

    name: str
    token: str
    holder: str
    taken_at: datetime
    heartbeat_at: datetime
    ttl_s: float

    @property
    def expires_at(self) -> datetime:
        """When it ends unless it is beaten again."""
        return self.heartbeat_at + timedelta(seconds=self.ttl_s)


class Leases:
    """The leases of one workspace. `clock` replaces the database's, for tests."""

    def __init__(self, registry: Registry, *, clock: Callable[[], datetime] | None = None) -> None:
        self.registry = registry
        self._clock = clock

    def take(self, name: str, *, holder: str | None = None, ttl_s: float = TTL_S) -> Lease:
        """Take a lease that is free, revoked or expired. `holder` says who, for people; host and process by default.

        Raises LeaseBusy while somebody else holds it. An expired one changes hands in one transaction.
        """
        holder = holder or this_process()
        with self.registry.write() as connection:
            now = self._now(connection)
            row = self._row(connection, name)
            fresh = {
                "workspace": self.registry.workspace,
                "name": name,
                "token": str(uuid4()),
                "holder": holder[:200],
                "taken_at": now,
                "heartbeat_at": now,
                "ttl_s": ttl_s,
            }
            if row is None and insert_new(connection, leases, fresh):
                return _lease(fresh)
            if row is None:  # another one inserted it between the two statements, and has committed
                row = self._row(connection, name)
            if row is not None and row["token"] is not None and now < _lease(row).expires_at:
                left = (_lease(row).expires_at - now).total_seconds()
                raise LeaseBusy(name, row["holder"], left)
            if row is None:  # and gave it back at once; nobody has it, and the caller may simply try again
                raise LeaseBusy(name, "another process", 0.0)
            connection.execute(sa.update(leases).where(self._is(name)).values(**fresh))
            return _lease(fresh)

    def beat(self, name: str, token: str) -> None:
        """Keep the lease for another `ttl_s`. Raises LeaseLost (taken, expired or revoked)."""
        with self.registry.write() as connection:
            now = self._verify(connection, name, token)
            ours = sa.update(leases).where(self._is(name), leases.c.token == token)
            if connection.execute(ours.values(heartbeat_at=now)).rowcount != 1:
                self._verify(connection, name, token)  # lost between the two statements; this says how

    def check(self, name: str, token: str) -> None:
        """Raise LeaseLost unless this token holds the lease now. Writes nothing."""
        with self.registry.read() as connection:
            self._verify(connection, name, token)

    def release(self, name: str, token: str) -> bool:
        """Give the lease back; False when this token did not hold it any more."""
        with self.registry.write() as connection:
            return connection.execute(sa.delete(leases).where(self._is(name), leases.c.token == token)).rowcount == 1

    def revoke(self, name: str, *, token: str | None = None) -> bool:
        """Take the lease away from its holder (only from `token`, if given): its next beat or check raises LeaseLost.

        False when nobody held it. The lease is free at once; the old holder may still act until it looks.
        """
        with self.registry.write() as connection:
            held = sa.update(leases).where(self._is(name), leases.c.token.is_not(None))
            if token is not None:
                held = held.where(leases.c.token == token)
            return connection.execute(held.values(token=None)).rowcount == 1

    def find(self, name: str) -> Lease | None:
        """Who holds the lease; None when nobody does. An expired one is returned: its holder may not know yet."""
        with self.registry.read() as connection:
            row = self._row(connection, name, lock=False)
        return None if row is None or row["token"] is None else _lease(row)

    def expired(self) -> list[Lease]:
        """Leases whose holder stopped beating and that nobody took since, oldest heartbeat first."""
        with self.registry.read() as connection:
            now = self._now(connection)
            rows = connection.execute(
                sa.select(leases)
                .where(leases.c.workspace == self.registry.workspace, leases.c.token.is_not(None))
                .order_by(leases.c.heartbeat_at)
            ).mappings()
            return [lease for lease in map(_lease, rows) if lease.expires_at <= now]

    @contextlib.contextmanager
    def hold(
        self, name: str, *, holder: str | None = None, ttl_s: float = TTL_S, wait_s: float = 0.0
    ) -> Iterator[HeldLease]:
        """Hold the lease for the length of the block, beaten by a thread three times per `ttl_s`, looked at in between.

        Waits up to `wait_s` seconds for it, then raises LeaseBusy. Inside, `check()` and `verify()` raise LeaseLost
        once it is lost; leaving a block that ended well raises LeaseLost too if it was lost meanwhile.
        """
        held = self._wait(name, holder, ttl_s, wait_s)
        held.start()
        try:
            yield held
            held.check()
        finally:
            held.stop()

    def _wait(self, name: str, holder: str | None, ttl_s: float, wait_s: float) -> HeldLease:
        give_up = time.monotonic() + wait_s
        while True:
            asked = time.monotonic()
            try:
                return HeldLease(self, self.take(name, holder=holder, ttl_s=ttl_s), good_until=asked + ttl_s)
            except LeaseBusy:
                left = give_up - time.monotonic()
                if left <= 0:
                    raise
                time.sleep(min(left, random.uniform(0.05, 0.25)))  # noqa: S311 - spreads waiters, guards nothing

    def _is(self, name: str) -> sa.ColumnElement[bool]:
        return sa.and_(leases.c.workspace == self.registry.workspace, leases.c.name == name)

    def _row(self, connection: sa.Connection, name: str, *, lock: bool = True) -> sa.RowMapping | None:
        query = sa.select(leases).where(self._is(name))
        return connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()

    def _now(self, connection: sa.Connection) -> datetime:
        return self._clock() if self._clock else self.registry.now(connection)

    def _verify(self, connection: sa.Connection, name: str, token: str) -> datetime:
        row = self._row(connection, name, lock=False)
        now = self._now(connection)
        if row is None or row["token"] is None:
            raise LeaseLost(name, "revoked")
        if row["token"] != token:
            raise LeaseLost(name, "taken")
        if now >= _lease(row).expires_at:
            raise LeaseLost(name, "expired")
        return now


class HeldLease:
    """A lease that a thread of this process keeps alive. Made by `Leases.hold`."""

    def __init__(self, leases_: Leases, lease: Lease, *, good_until: float) -> None:
        self.lease = lease
        self._leases = leases_
        self._lost: Why | None = None
        self._good_until = good_until  # on this process's monotonic clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease {lease.name}", daemon=True)

    @property
    def name(self) -> str:
        return self.lease.name

    @property
    def token(self) -> str:
        return self.lease.token

    def check(self) -> None:
        """Raise LeaseLost if the heartbeat found it lost, or has not got through for `ttl_s`. Costs nothing."""
        if self._lost is None and time.monotonic() >= self._good_until:
            self._lost = "expired"
        if self._lost is not None:
            raise LeaseLost(self.name, self._lost)

    def verify(self) -> None:
        """Raise LeaseLost unless the registry says that it is held right now: ask before what cannot be taken back."""
        self.check()
        self._leases.check(self.name, self.token)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the heartbeat and give the lease back."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(RegistryUnavailable):  # it then ends by itself
            self._leases.release(self.name, self.token)

    def _beat(self) -> None:
        every = self.lease.ttl_s / 3
        due = time.monotonic() + every
        while not self._ended.wait(min(every, LOOK_S)):
            asked = time.monotonic()
            try:
                if asked < due:
                    self._leases.check(self.name, self.token)
                    continue
                self._leases.beat(self.name, self.token)
            except LeaseLost as lost:
                self._lost = lost.details["why"]
                return
            except RegistryUnavailable:
                continue  # `check` says lost once this has gone on for ttl_s
            self._good_until = asked + self.lease.ttl_s
            due = asked + every


def this_process() -> str:
    """Host and process id: who holds a lease, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _lease(row: Any) -> Lease:
    return Lease(row["name"], row["token"], row["holder"], row["taken_at"], row["heartbeat_at"], row["ttl_s"])
