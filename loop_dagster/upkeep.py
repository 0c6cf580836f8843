"""Keeps an installation small and its promises: what expires, what was deleted, what nothing needs.

Belongs here: the rounds that the upkeep job makes, each safe to repeat and to kill anywhere, and what tells the sensor
that one is due. Does not belong here: how long things are kept (rules/upkeep.py), runs of Dagster (assets/upkeep.py).
"""

from __future__ import annotations

from datetime import datetime

from loop_dagster.rules.upkeep import review_is_over
from loop_dagster.store.artifacts import GRACE_S
from loop_dagster.store.intake import lake_lease
from loop_dagster.store.lake import Maintained
from loop_dagster.store.open import Store
from loop_dagster.store.purging import Purged, drop_expired, erase_pipelines, purge_deleted, trim_selections
from loop_dagster.store.records import Attempt
from loop_dagster.store.weights import needed_adapters
from loop_dagster.store.work import sweep_work
from loop_dagster.tables import TABLES

__all__ = [
    "Purged",
    "drop_expired",
    "due",
    "end_reviews",
    "erase_pipelines",
    "keep_tables",
    "purge_deleted",
    "sweep",
    "trim_selections",
]


def due(store: Store, now: datetime) -> list[str]:
    """What asks for a round at `now`, in words; the daily round is not among them. Reads no table of the lake."""
    reasons = []
    if store.inbox.tombstones():
        reasons.append("samples were deleted")
    if _reviews_over(store, now):
        reasons.append("a review is over")
    if _unneeded(store, now):
        reasons.append("adapters that nothing needs")
    return reasons


def end_reviews(store: Store, now: datetime) -> list[Attempt]:
    """Expire attempts whose review ended without a decision; their samples go to the next attempt (rules.md)."""
    ended = []
    for attempt in _reviews_over(store, now):
        sentence = "Nobody decided within 14 days; it is closed, and what is live stays."
        ended.append(
            store.attempts.move(
                attempt.run_id,
                "expired",
                sentence,
                now=now,
                expect="awaiting_review",
                decision="expired",
                decided_at=now,
                review_until=None,
            )
        )
    return ended


def sweep(store: Store, now: datetime) -> tuple[str, ...]:
    """Delete adapters and private folders that nothing needs; returns the digests that went.

    An artifact of the last hour stays whatever the registry says: its row may be on its way.
    """
    sweep_work(store)
    return store.artifacts.sweep(needed_adapters(store.registry, now))


def keep_tables(store: Store, *, holder: str) -> dict[str, Maintained]:
    """Compact, vacuum and checkpoint every table, one at a time, so that a drain waits for one of them at most."""
    done = {}
    for table in TABLES:
        with lake_lease(store, holder):
            if (kept := store.lake.maintain(table)) is not None:
                done[table.name] = kept
    return done


def _reviews_over(store: Store, now: datetime) -> list[Attempt]:
    waiting = store.attempts.list(states=["awaiting_review"])
    return [attempt for attempt in waiting if review_is_over(attempt.review_until, now)]


def _unneeded(store: Store, now: datetime) -> set[str]:
    return set(store.artifacts.list(untouched_s=GRACE_S)) - needed_adapters(store.registry, now)
