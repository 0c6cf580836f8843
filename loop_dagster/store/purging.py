"""Takes out of the lake for good what was deleted, what has expired, and what deleted pipelines left.

Belongs here: the physical side of deletion, with its order. Does not belong here: who may delete, and readers, which
leave deleted samples out from the moment of the tombstone on (samples.py).

Deleting a sample, so that a kill at any line leaves it deleted and the work to be done again:

    1. a tombstone in the registry, and its rows out of the inbox, in one transaction: from here on nobody reads it
    2. under the lake's lease: its rows go from samples, feedback, labels and stored training sets
    3. reports that are finished keep their copy under an id that names nobody; a step under way keeps the sample's own,
       and what its private folder holds, until it has ended, and the tombstone stays so long
    4. every file that the newest versions do not need is removed from storage
    5. what the registry's own files still held is overwritten, and only then the tombstone goes
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

import polars as pl

from loop_dagster.errors import LeaseBusy
from loop_dagster.rules.states import step_of
from loop_dagster.rules.upkeep import LEFT_OUT_KEPT
from loop_dagster.store.attempts import lease_name
from loop_dagster.store.intake import LAKE_TABLES, lake_lease
from loop_dagster.store.lake import quoted
from loop_dagster.store.open import Store
from loop_dagster.store.work import attempts_at_work, counts_at_work, sweep_work
from loop_dagster.tables import (
    ANSWERS,
    HOLDOUTS,
    JUDGEMENTS,
    QUESTIONS,
    SAMPLES,
    SELECTIONS,
    TABLES,
    TRAINING_SETS,
    Table,
)
from loop_dagster.tables.attempts import deleted_id

#: Tables in which a finished report keeps its copies.
COPIES = (QUESTIONS, ANSWERS, JUDGEMENTS)
#: Ids of one Delta predicate.
IDS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Purged:
    """What one purge did: samples gone for good, those that a step under way still needs, rows deleted by table."""

    samples: int
    waiting: int
    rows: dict[str, int]


def purge_deleted(store: Store, *, holder: str) -> Purged:
    """Remove every sample with a tombstone physically. Killed anywhere and called again, it finishes the same work."""
    dead = store.inbox.tombstones()
    if not dead:
        return Purged(0, 0, {})
    sweep_work(store)
    store.scorings.forget(dead)
    rows: dict[str, int] = {}
    with lake_lease(store, holder):
        for table in (*LAKE_TABLES, TRAINING_SETS):
            rows[table.name] = _delete_samples(store, table, dead)
        waiting = _rename_copies(store, dead, holder) | _at_work(store, dead)
        for table in (*LAKE_TABLES, TRAINING_SETS, HOLDOUTS, *COPIES):
            store.lake.maintain(table)
    if not store.registry.scrub():  # a reader was in the way: the tombstones stay, and the next call goes on
        return Purged(0, len(dead), rows)
    done = [sample_id for sample_id in dead if sample_id not in waiting]
    store.inbox.clear_tombstones(done)
    return Purged(len(done), len(waiting), rows)


def drop_expired(store: Store, now: datetime, *, holder: str) -> int:
    """Remove samples whose time is over, with their feedback and labels; copies already made stay. Returns how many.

    No reader has seen them since the moment they expired (rules.md, Samples).
    """
    over = pl.col("expires_at") <= now
    if not store.lake.scan(SAMPLES).filter(over).select(pl.len()).collect().item():
        return 0
    with lake_lease(store, holder):
        ids = store.lake.scan(SAMPLES).filter(over).select("sample_id").collect()["sample_id"].to_list()
        store.scorings.forget(ids)
        # Samples go last: killed before that, the next round finds the same ids again.
        for table in (*(table for table in LAKE_TABLES if table is not SAMPLES), SAMPLES):
            _delete_samples(store, table, ids)
            store.lake.maintain(table)
    return len(ids)


def erase_pipelines(store: Store, *, holder: str) -> dict[str, int]:
    """Remove what attempts of deleted pipelines left in the lake; rows by table. Their samples stay (rules.md)."""
    deleted = [one.pipeline_id for one in store.pipelines.deleted()]
    if not deleted:
        return {}
    among = pl.col("pipeline_id").is_in(deleted)
    tables = [
        table
        for table in TABLES
        if table.by_attempt and store.lake.scan(table).filter(among).select(pl.len()).collect().item()
    ]
    rows: dict[str, int] = {}
    if tables:
        with lake_lease(store, holder):
            for table in tables:
                names = ", ".join(quoted(pipeline_id) for pipeline_id in deleted)
                rows[table.name] = store.lake.delete(table, f"pipeline_id IN ({names})")
                store.lake.maintain(table)
    return rows


def trim_selections(store: Store, *, holder: str) -> int:
    """Drop the rows of samples that older attempts left out: the attempts keep how many and why; returns rows dropped.

    A million samples of which an attempt trains on the newest 200,000 would otherwise leave 800,000 rows each time.
    """
    newest: dict[str, list[str]] = {}
    for attempt in store.attempts.list():
        newest.setdefault(attempt.pipeline_id, []).append(attempt.key)
    old = [key for keys in newest.values() for key in keys[:-LEFT_OUT_KEPT]]
    left_out = pl.col("attempt").is_in(old) & (pl.col("role") == "left_out")
    scattered = store.lake.scan(SELECTIONS).filter(left_out).select("attempt").unique().collect()["attempt"].sort()
    dropped = 0
    for attempt in scattered:
        with lake_lease(store, holder):
            dropped += store.lake.delete(SELECTIONS, f"attempt = {quoted(attempt)} AND role = 'left_out'")
    return dropped


def _delete_samples(store: Store, table: Table, ids: Collection[str]) -> int:
    return sum(
        store.lake.delete(table, f"sample_id IN ({', '.join(quoted(one) for one in some)})")
        for some in _chunks(sorted(ids))
    )


def _chunks(ids: list[str]) -> Iterator[list[str]]:
    given = iter(ids)
    while some := list(islice(given, IDS_AT_ONCE)):
        yield some


def _at_work(store: Store, dead: Collection[str]) -> set[str]:
    """Ids whose text may stand in the private folder of a step under way, which goes when that step has ended."""
    if counts_at_work(store):
        return set(dead)
    taken = pl.col("attempt").is_in([attempt.key for attempt in attempts_at_work(store)])
    mine = taken & (pl.col("role") != "left_out") & pl.col("sample_id").is_in(list(dead))
    return set(store.lake.scan(SELECTIONS).filter(mine).select("sample_id").collect()["sample_id"])


def _rename_copies(store: Store, dead: Collection[str], holder: str) -> set[str]:
    """Give copies in reports an id that names nobody; returns the ids that a step under way still works with."""
    among = pl.col("sample_id").is_in(list(dead))
    asked = store.lake.scan(QUESTIONS).filter(among).select("attempt", "sample_id", "ordinal").collect()
    waiting: set[str] = set()
    for attempt in asked["attempt"].unique().sort():
        mine = asked.filter(pl.col("attempt") == attempt)
        try:
            _rename_in_report(store, attempt, mine, holder)
        except LeaseBusy:
            waiting |= set(mine["sample_id"])
    held = store.lake.scan(HOLDOUTS).filter(among).select("attempt").unique().collect()
    for attempt in held["attempt"].sort():
        rows = store.lake.scan(HOLDOUTS).filter(pl.col("attempt") == attempt).collect()
        nobody = rows.with_columns(pl.when(~among).then("sample_id").alias("sample_id"))
        store.lake.replace_attempt(HOLDOUTS, attempt, nobody)
    return waiting


def _rename_in_report(store: Store, attempt: str, asked: pl.DataFrame, holder: str) -> None:
    """Rename in one attempt's copies. Raises LeaseBusy while a step of it runs or is about to."""
    found = store.attempts.get(attempt)
    if step_of(found.state) is not None:
        raise LeaseBusy(lease_name(found.run_id), "the attempt's own run", 0.0)
    names = {row["sample_id"]: deleted_id(row["ordinal"]) for row in asked.iter_rows(named=True)}
    with store.leases.hold(lease_name(found.run_id), holder=holder):
        # Questions last: they are what the next call finds, should this one be killed.
        for table in (ANSWERS, JUDGEMENTS, QUESTIONS):
            rows = store.lake.scan(table).filter(pl.col("attempt") == attempt).collect()
            if rows.height:
                store.lake.replace_attempt(table, attempt, rows.with_columns(pl.col("sample_id").replace(names)))
