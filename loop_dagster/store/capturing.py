"""What the gateway asks the registry: who is recorded, which ids were given out, and what was not recorded.

Belongs here: one look for a call's consent, ids that any server of the installation knows as its own, counters by day.
Does not belong here: storing samples (inbox.py), HTTP and when to ask (api/gateway/).

An id carries a mark that only an installation's own servers make, so that giving one out writes nothing, and every
worker and replica can tell it from a made-up one. A row is written only for what the id cannot say by itself: that a
call which takes longer than WAY is still under way, or that its request id had come before.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final, Literal, get_args

import sqlalchemy as sa

from loop_dagster.store.owner import registry_id
from loop_dagster.store.registry import Registry, put_row
from loop_dagster.store.schema import capture_misses, inbox, issued_ids, pipelines, sources, tombstones
from loop_dagster.store.sources import Source, source_of
from loop_dagster.tables import SAMPLES

Reason = Literal["no_pipeline", "too_large", "incomplete"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
#: How long an id that was given out counts as on its way after its call was last seen (http-api.md).
WAY: Final = timedelta(seconds=60)
#: Days of counters that are shown.
SHOWN_DAYS: Final = 7
#: Days that counters and the ids of repeated calls are kept.
KEPT: Final = timedelta(days=30)
#: Different tags that are counted on one day; whatever calls make up beyond that is counted under "".
MOST_TAGS: Final = 1_000
#: Clocks of two servers may differ by this much.
_SKEW: Final = timedelta(seconds=5)
_NOISE_BITS: Final = 34
_MARK_BITS: Final = 40


@dataclass(frozen=True, slots=True)
class Look:
    """What the registry says of a call: its source, which of its tags a pipeline has, and the waiting first sample."""

    source: Source
    known: frozenset[str]
    first_id: str | None


@dataclass(frozen=True, slots=True)
class Miss:
    """Calls under one tag that were not recorded for one reason."""

    tag: str
    reason: Reason
    calls: int
    last_at: datetime


class Capturing:
    """The gateway's part of one workspace's registry."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._key: bytes | None = None

    def look(self, source: str, tags: Sequence[str], identity: str | None, now: datetime) -> Look:
        """One read of everything that consent depends on; `identity` of a request id that may have come before.

        A first sample that has expired is none.
        """
        workspace = self.registry.workspace
        with self.registry.read() as connection:
            row = (
                connection.execute(
                    sa.select(sources).where(sources.c.workspace == workspace, sources.c.source == source)
                )
                .mappings()
                .one_or_none()
            )
            known: set[str] = set()
            if tags:
                alive = sa.and_(pipelines.c.workspace == workspace, pipelines.c.deleted_at.is_(None))
                own = sa.select(pipelines.c.tag).where(alive, pipelines.c.tag.in_(tags))
                known = set(connection.execute(own).scalars())
                if not known.issuperset(tags):  # a pipeline may select by further tags
                    for settings in connection.execute(sa.select(pipelines.c.settings).where(alive)).scalars():
                        known.update(tag for tag in settings.get("tags", ()) if tag in tags)
            first = None
            if identity is not None:
                waiting = connection.execute(
                    sa.select(inbox.c.sample_id, inbox.c.payload).where(
                        inbox.c.workspace == workspace,
                        inbox.c.table_name == SAMPLES.name,
                        inbox.c.row_key == identity,
                    )
                ).one_or_none()
                if waiting is not None and datetime.fromisoformat(str(waiting.payload["expires_at"])) > now:
                    first = waiting.sample_id
        return Look(Source(source) if row is None else source_of(row), frozenset(known), first)

    # ids

    def new_id(self, now: datetime) -> str:
        """A new sample id, a UUIDv7, that `on_its_way` knows on every server of this registry."""
        moment, noise = int(now.timestamp() * 1000), secrets.randbits(_NOISE_BITS)
        high, low = noise >> 22, noise & 0x3FFFFF
        number = moment << 80 | 7 << 76 | high << 64 | 2 << 62 | low << _MARK_BITS | self._mark(moment, noise)
        return str(uuid.UUID(int=number))

    def on_its_way(self, sample_id: str, now: datetime) -> bool:
        """Whether this id was given out and its call ended, or was last seen, within WAY; not for a deleted sample."""
        issued = self._issued_at(sample_id)
        if issued is None or issued > now + _SKEW:
            return False
        with self.registry.read() as connection:
            mine = sa.and_(issued_ids.c.workspace == self.registry.workspace, issued_ids.c.sample_id == sample_id)
            seen = connection.execute(sa.select(issued_ids.c.seen_at).where(mine)).scalar()
            dead = connection.execute(
                sa.select(tombstones.c.sample_id).where(
                    tombstones.c.workspace == self.registry.workspace, tombstones.c.sample_id == sample_id
                )
            ).scalar()
        return dead is None and now - max(issued, seen or issued) <= WAY

    def first_of(self, sample_id: str) -> str | None:
        """The sample that an id means whose request id had come before; None for any other id."""
        mine = sa.and_(issued_ids.c.workspace == self.registry.workspace, issued_ids.c.sample_id == sample_id)
        with self.registry.read() as connection:
            return connection.execute(sa.select(issued_ids.c.first_id).where(mine)).scalar()

    def seen(self, sample_ids: Collection[str], now: datetime) -> None:
        """Note that the calls of these ids are still under way; forget ids that no longer matter."""
        with self.registry.write() as connection:
            for sample_id in sample_ids:
                self._put_id(connection, sample_id, now, None)
            old = sa.and_(
                issued_ids.c.workspace == self.registry.workspace,
                sa.or_(
                    issued_ids.c.seen_at < now - KEPT,
                    sa.and_(issued_ids.c.first_id.is_(None), issued_ids.c.seen_at < now - 2 * WAY),
                ),
            )
            connection.execute(sa.delete(issued_ids).where(old))

    def mean_first(self, firsts: Mapping[str, str], now: datetime) -> None:
        """Let ids stand for the first samples of their request ids."""
        with self.registry.write() as connection:
            for sample_id, first_id in firsts.items():
                self._put_id(connection, sample_id, now, first_id)

    def _put_id(self, connection: sa.Connection, sample_id: str, now: datetime, first_id: str | None) -> None:
        row = {
            "workspace": self.registry.workspace,
            "sample_id": sample_id,
            "seen_at": now,
            "first_id": first_id,
        }
        put_row(connection, issued_ids, row)

    def _issued_at(self, sample_id: str) -> datetime | None:
        """When this registry's servers gave the id out; None for an id of anybody else."""
        try:
            number = uuid.UUID(sample_id).int
        except ValueError:
            return None
        moment = number >> 80
        noise = ((number >> 64) & 0xFFF) << 22 | (number >> _MARK_BITS) & 0x3FFFFF
        if (number >> 76) & 0xF != 7 or number & (2**_MARK_BITS - 1) != self._mark(moment, noise):
            return None
        try:
            return datetime.fromtimestamp(moment / 1000, UTC)
        except (ValueError, OverflowError, OSError):
            return None

    def _mark(self, moment: int, noise: int) -> int:
        if self._key is None:
            mine = registry_id(self.registry, make=True) or ""
            self._key = hashlib.blake2b(f"{mine}\0{self.registry.workspace}".encode(), digest_size=32).digest()
        data = (moment << _NOISE_BITS | noise).to_bytes(16, "big")
        digest = hashlib.blake2b(data, key=self._key, digest_size=_MARK_BITS // 8, person=b"loop issued").digest()
        return int.from_bytes(digest, "big")

    # what was not recorded

    def count(self, missed: Mapping[tuple[str, Reason], int], now: datetime) -> None:
        """Add to today's counters, by tag and reason."""
        workspace, day = self.registry.workspace, now.astimezone(UTC).date()
        today = sa.and_(capture_misses.c.workspace == workspace, capture_misses.c.day == day)
        with self.registry.write() as connection:
            self.registry.lock(connection, f"misses/{workspace}")
            connection.execute(
                sa.delete(capture_misses).where(
                    capture_misses.c.workspace == workspace, capture_misses.c.day < day - KEPT
                )
            )
            rows = connection.execute(sa.select(capture_misses).where(today)).mappings().all()
            calls = {(row["tag"], row["reason"]): row["calls"] for row in rows}
            tags = {row["tag"] for row in rows}
            for (name, reason), number in missed.items():
                tag = name if name in tags or len(tags) < MOST_TAGS else ""
                tags.add(tag)
                calls[tag, reason] = calls.get((tag, reason), 0) + number
                row = {"workspace": workspace, "day": day, "tag": tag, "reason": reason, "calls": calls[tag, reason]}
                put_row(connection, capture_misses, {**row, "last_at": now})

    def misses(self, now: datetime) -> list[Miss]:
        """What was not recorded in the last SHOWN_DAYS days, most calls first."""
        since: date = (now.astimezone(UTC) - timedelta(days=SHOWN_DAYS - 1)).date()
        calls, last = sa.func.sum(capture_misses.c.calls), sa.func.max(capture_misses.c.last_at)
        query = (
            sa.select(capture_misses.c.tag, capture_misses.c.reason, calls, last)
            .where(capture_misses.c.workspace == self.registry.workspace, capture_misses.c.day >= since)
            .group_by(capture_misses.c.tag, capture_misses.c.reason)
        )
        with self.registry.read() as connection:
            found = [Miss(*row) for row in connection.execute(query)]
        return sorted(found, key=lambda miss: (-miss.calls, miss.tag, miss.reason))
