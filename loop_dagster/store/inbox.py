"""The inbox: small writes, durable when acknowledged, readable at once, on their way to the lake.

Belongs here: rows of `samples`, `feedback` and `labels` that the lake does not have yet, the frozen batches in which a
drain moves them, and tombstones of deleted samples. Does not belong here: writing to the lake (intake.py), reading lake
and inbox together (samples.py), what a row means (rules/).

A drain asks for `open_batch`, writes what `rows_of` gives with the batch number as application transaction, and calls
`finish`. A batch that was opened and not finished comes back first, with the same rows but for those deleted meanwhile.

On PostgreSQL puts hold a shared lock, and what freezes, finishes or deletes an exclusive one: so no row slips into, or
past, a batch or a tombstone. On SQLite writing transactions follow each other anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import polars as pl
import sqlalchemy as sa

from loop_dagster.errors import BadRequest, LabelsMoved, NotFound
from loop_dagster.store.registry import Registry, insert_many_new, insert_new
from loop_dagster.store.schema import batches, inbox, tombstones
from loop_dagster.store.waiting import TABLES, Waiting, frame_of
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES, Column, Table

Row = Mapping[str, object]

#: Column that names a row in the inbox: the identity of a sample, the id of everything else.
ROW_KEYS: Final[Mapping[str, str]] = {"samples": "identity", "feedback": "feedback_id", "labels": "label_id"}
#: Most rows of one batch, so that a long outage of the lake does not end in one huge commit.
BATCH_ROWS: Final = 20_000
#: Finished batches that are remembered; the newest number must stay, since the lake has it as transaction.
BATCHES_KEPT: Final = 1_000

_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "id": str,
    "text": str,
    "word": str,
    "key": int,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "time": datetime,
}

# Made once, since every capture asks them: putting one together takes longer than its answer.
_IDS: Final = sa.select(inbox.c.row_key, inbox.c.sample_id).where(
    inbox.c.workspace == sa.bindparam("workspace"),
    inbox.c.table_name == SAMPLES.name,
    inbox.c.row_key.in_(sa.bindparam("identities", expanding=True)),
)
_LAST_FINISHED: Final = sa.select(sa.func.max(batches.c.batch)).where(
    batches.c.workspace == sa.bindparam("workspace"), batches.c.done_at.is_not(None)
)


class Put(NamedTuple):
    """`stored` is False for a repeat, and `sample_id` is then the first one's."""

    sample_id: str
    stored: bool


class NewSample(NamedTuple):
    """A sample on its way in, with what rides along."""

    row: Row
    feedback: Sequence[Row] = ()
    labels: Sequence[Row] = ()


class LabelsSeen(NamedTuple):
    """What a writer knew of a sample's labels: ids of all their rows, and the last batch that had reached the lake."""

    sample_id: str
    label_ids: frozenset[str]
    drained: int | None


class Pending(NamedTuple):
    """Rows that have not left the inbox, and when the oldest of them came (None when there is none)."""

    rows: int
    oldest_at: datetime | None


class Inbox:
    """The inbox of one workspace. Rows have exactly the columns of tables/*.py, times with their zone."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._waiting = Waiting(registry)

    # writing

    def put_sample(
        self,
        row: Row,
        *,
        feedback: Sequence[Row] = (),
        labels: Sequence[Row] = (),
        in_lake: Callable[[str], str | None] | None = None,
        now: datetime | None = None,
    ) -> Put:
        """Store a sample once per identity, with what rides along, in one transaction.

        A repeat stores nothing, neither sample nor what rides along, and answers with the first one's id; also when the
        first has reached the lake, which `in_lake` (identity → sample id) looks up outside of any transaction. Leave
        `in_lake` out only for an identity that nobody can have sent before. Raises BadRequest for a row that the table
        does not take; the message never holds a value.
        """
        entries = [self._entry(SAMPLES, row, now), *self._entries(feedback, labels, now)]
        identity, sample_id = entries[0]["row_key"], entries[0]["sample_id"]
        if any(entry["sample_id"] != sample_id for entry in entries):
            raise BadRequest("Feedback and labels that ride along with a sample must be about that sample.")
        while True:
            with self.registry.read() as connection:
                first, drained = self._waiting_id(connection, identity), self._last_finished(connection)
            if first is not None:
                return Put(first, False)
            found = in_lake(identity) if in_lake is not None else None
            with self.registry.write() as connection:
                self._lock(connection, shared=True)
                if found is not None and found not in self._dead(connection, [found]):
                    return Put(found, False)
                if in_lake is not None and self._last_finished(connection) != drained:
                    continue  # the first one may have moved from the inbox to the lake between our two looks
                if not insert_new(connection, inbox, entries[0]):
                    first = self._waiting_id(connection, identity)
                    if first is None:
                        continue
                    return Put(first, False)
                insert_many_new(connection, inbox, entries[1:])
                return Put(sample_id, True)

    def put_samples(
        self,
        samples: Sequence[NewSample],
        *,
        in_lake: Callable[[Collection[str]], Mapping[str, str]],
        unheard: Collection[str] = (),
        now: datetime | None = None,
    ) -> list[Put]:
        """`put_sample` for several at once, in one transaction; `in_lake` gives those of the identities that it has.

        Two with one identity are the first and its repeat. With `now`, a sample that has expired and waits here makes
        room for the one that comes with its identity; `in_lake` leaves expired ones out itself. Identities in `unheard`
        are made of a sample id that nobody has been given yet: nothing is looked up for these.
        """
        wanted = [
            [self._entry(SAMPLES, one.row, now), *self._entries(one.feedback, one.labels, now)] for one in samples
        ]
        all_keys = dict.fromkeys(entries[0]["row_key"] for entries in wanted)
        keys = [key for key in all_keys if key not in unheard]
        while True:
            found: Mapping[str, str] = {}
            drained = None
            if keys:
                with self.registry.read() as connection:
                    waiting, drained = self._ids(connection, keys), self._last_finished(connection)
                    over = self._expired(connection, waiting, now)
                if over:
                    self._make_room(over)
                    continue
                found = in_lake([key for key in keys if key not in waiting])
            with self.registry.write() as connection:
                self._lock(connection, shared=True)
                if keys and self._last_finished(connection) != drained:
                    continue  # as in put_sample
                dead = self._dead(connection, found.values())
                known = {key: sample_id for key, sample_id in found.items() if sample_id not in dead}
                new = [entries for entries in wanted if entries[0]["row_key"] not in known]
                # In one order everywhere: two that insert the same keys the other way round would lock each other out.
                new.sort(key=lambda entries: str(entries[0]["row_key"]))
                insert_many_new(connection, inbox, [entries[0] for entries in new])
                ids = known | self._ids(connection, [key for key in all_keys if key not in known])
                mine = [entries for entries in new if ids.get(entries[0]["row_key"]) == entries[0]["sample_id"]]
                insert_many_new(connection, inbox, [entry for entries in mine for entry in entries[1:]])
            if len(ids) == len(all_keys):
                pairs = [(ids[entries[0]["row_key"]], entries[0]["sample_id"]) for entries in wanted]
                return [Put(first, first == sample_id) for first, sample_id in pairs]

    def put(
        self,
        *,
        feedback: Sequence[Row] = (),
        labels: Sequence[Row] = (),
        now: datetime | None = None,
        then: Callable[[sa.Connection], None] | None = None,
        seen: LabelsSeen | None = None,
    ) -> None:
        """Store feedback and labels together or not at all. An id that is there already is not stored twice.

        `then` writes what belongs to it, in the same transaction. With `seen`, LabelsMoved is raised and nothing stored
        when the sample got a label that the writer did not know: so what was decided from its labels still holds.
        Raises NotFound when one is about a sample that was deleted, BadRequest as in put_sample.
        """
        entries = self._entries(feedback, labels, now)
        with self.registry.write() as connection:
            if seen is not None:
                self.registry.lock(connection, f"labels/{self.registry.workspace}/{seen.sample_id}")
            self._lock(connection, shared=True)
            if seen is not None and self._labels_moved(connection, seen):
                raise LabelsMoved(seen.sample_id)
            dead = self._dead(connection, {entry["sample_id"] for entry in entries})
            if dead:
                raise NotFound("sample", min(dead))
            insert_many_new(connection, inbox, entries)
            if then is not None:
                then(connection)

    def put_feedback_in(
        self, connection: sa.Connection, rows: Sequence[Row], *, now: datetime | None = None
    ) -> set[str]:
        """Store feedback inside the caller's transaction, and none on a deleted sample; returns the ids of these."""
        entries = self._entries(rows, (), now)
        self._lock(connection, shared=True)
        dead = self._dead(connection, {entry["sample_id"] for entry in entries})
        insert_many_new(connection, inbox, [entry for entry in entries if entry["sample_id"] not in dead])
        return dead

    # reading

    def pending(self) -> Pending:
        """How much has not reached the lake, unfinished batches included."""
        query = sa.select(sa.func.count(), sa.func.min(inbox.c.created_at)).where(self._mine())
        with self.registry.read() as connection:
            rows, oldest = connection.execute(query).one()
        return Pending(rows, oldest)

    def waiting_frames(self) -> dict[str, pl.DataFrame]:
        """Every row that has not left the inbox, by table name, in the declared columns and in the order they came."""
        return self._waiting.frames()

    def of_sample(self, sample_id: str) -> tuple[bool, dict[str, pl.DataFrame]]:
        """Whether a sample is deleted, and every row of it that has not left the inbox, as `waiting_frames`."""
        with self.registry.read() as connection:
            dead = bool(self._dead(connection, [sample_id]))
            return dead, self._read(connection, sa.and_(self._mine(), inbox.c.sample_id == sample_id))

    def identities(self, identities: Collection[str]) -> dict[str, str]:
        """Those of the identities whose sample waits here, with the sample's id."""
        with self.registry.read() as connection:
            return self._ids(connection, list(identities))

    def drained(self) -> int | None:
        """The last batch that reached the lake; None before any did."""
        with self.registry.read() as connection:
            return self._last_finished(connection)

    # draining

    def unfinished(self) -> int | None:
        """Number of the batch that was opened and not finished; None when there is none."""
        with self.registry.read() as connection:
            return self._unfinished(connection)

    def open_batch(self, *, floor: int = 0, limit: int = BATCH_ROWS, now: datetime | None = None) -> int | None:
        """Freeze what waits, at most `limit` rows, as a batch and return its number; None when nothing waits.

        An unfinished batch is returned again before a new one opens. Numbers grow; a new one is above `floor`, the
        newest that the lake knows (it matters only when a registry was put back from a copy).
        """
        with self.registry.write() as connection:
            self._lock(connection)
            open_ = self._unfinished(connection)
            if open_ is not None:
                return open_
            ids = sa.select(inbox.c.id).where(self._mine(), inbox.c.batch.is_(None)).order_by(inbox.c.id).limit(limit)
            newest = connection.execute(sa.select(sa.func.max(batches.c.batch)).where(self._my_batches())).scalar()
            number = max(int(newest or 0), floor) + 1
            frozen = sa.update(inbox).where(self._mine(), inbox.c.id.in_(ids)).values(batch=number)
            rows = connection.execute(frozen).rowcount
            if not rows:
                return None
            connection.execute(
                sa.insert(batches).values(
                    workspace=self.registry.workspace, batch=number, rows=rows, opened_at=now or datetime.now(UTC)
                )
            )
            return number

    def rows_of(self, batch: int) -> dict[str, pl.DataFrame]:
        """Rows of a batch by table name, in the declared columns; the same rows each time, but for deleted samples."""
        return self._frames(sa.and_(self._mine(), inbox.c.batch == batch))

    def finish(self, batch: int, *, now: datetime | None = None) -> None:
        """Delete a batch that is in the lake. Doing it again changes nothing. Raises NotFound for an unknown one."""
        with self.registry.write() as connection:
            self._lock(connection)
            known = sa.select(batches.c.batch).where(self._my_batches(), batches.c.batch == batch)
            if connection.execute(known).scalar() is None:
                raise NotFound("batch", str(batch))
            connection.execute(sa.delete(inbox).where(self._mine(), inbox.c.batch == batch))
            connection.execute(
                sa.update(batches)
                .where(self._my_batches(), batches.c.batch == batch, batches.c.done_at.is_(None))
                .values(done_at=now or datetime.now(UTC))
            )
            old = sa.and_(batches.c.done_at.is_not(None), batches.c.batch < batch - BATCHES_KEPT)
            connection.execute(sa.delete(batches).where(self._my_batches(), old))

    # deleting

    def add_tombstones(self, sample_ids: Collection[str], *, now: datetime | None = None) -> int:
        """Mark samples as deleted and take all their rows out of the inbox, in one transaction; returns rows taken out.

        From here on every reader leaves them out; the purge of the lake clears the tombstones.
        """
        gone = 0
        marks = [
            {"workspace": self.registry.workspace, "sample_id": sample_id, "created_at": now or datetime.now(UTC)}
            for sample_id in dict.fromkeys(sample_ids)
        ]
        with self.registry.write() as connection:
            self._lock(connection)
            insert_many_new(connection, tombstones, marks)
            for mark in marks:
                theirs = sa.and_(self._mine(), inbox.c.sample_id == mark["sample_id"])
                gone += connection.execute(sa.delete(inbox).where(theirs)).rowcount
        return gone

    def tombstones(self) -> tuple[str, ...]:
        """Ids of samples that are deleted and not purged from the lake yet, oldest deletion first."""
        query = (
            sa.select(tombstones.c.sample_id)
            .where(tombstones.c.workspace == self.registry.workspace)
            .order_by(tombstones.c.created_at, tombstones.c.sample_id)
        )
        with self.registry.read() as connection:
            return tuple(connection.execute(query).scalars())

    def clear_tombstones(self, sample_ids: Collection[str]) -> None:
        """Forget tombstones of samples that are purged from the lake."""
        with self.registry.write() as connection:
            for sample_id in sample_ids:
                connection.execute(
                    sa.delete(tombstones).where(
                        tombstones.c.workspace == self.registry.workspace, tombstones.c.sample_id == sample_id
                    )
                )

    # inside one transaction

    def _mine(self) -> sa.ColumnElement[bool]:
        return inbox.c.workspace == self.registry.workspace

    def _my_batches(self) -> sa.ColumnElement[bool]:
        return batches.c.workspace == self.registry.workspace

    def _lock(self, connection: sa.Connection, *, shared: bool = False) -> None:
        self.registry.lock(connection, f"inbox/{self.registry.workspace}", shared=shared)

    def _waiting_id(self, connection: sa.Connection, identity: str) -> str | None:
        query = sa.select(inbox.c.sample_id).where(
            self._mine(), inbox.c.table_name == SAMPLES.name, inbox.c.row_key == identity
        )
        return connection.execute(query).scalar()

    def _ids(self, connection: sa.Connection, identities: Sequence[str]) -> dict[str, str]:
        """Those of the identities whose sample waits here, with the sample's id."""
        found: dict[str, str] = {}
        for start in range(0, len(identities), 500):
            these = {"workspace": self.registry.workspace, "identities": identities[start : start + 500]}
            found |= dict(connection.execute(_IDS, these).all())
        return found

    def _expired(self, connection: sa.Connection, waiting: Mapping[str, str], now: datetime | None) -> list[str]:
        """Ids of those of the samples, by identity, whose time is over."""
        if now is None or not waiting:
            return []
        frames = self._read(
            connection,
            sa.and_(self._mine(), inbox.c.table_name == SAMPLES.name, inbox.c.row_key.in_(list(waiting))),
        )
        return frames[SAMPLES.name].filter(pl.col("expires_at") <= now).get_column("sample_id").to_list()

    def _make_room(self, expired: Sequence[str]) -> None:
        """Take expired samples out of the inbox; upkeep removes one that a drain has read meanwhile."""
        with self.registry.write() as connection:
            self._lock(connection)
            connection.execute(sa.delete(inbox).where(self._mine(), inbox.c.sample_id.in_(list(expired))))

    def _labels_moved(self, connection: sa.Connection, seen: LabelsSeen) -> bool:
        """Whether there may be a row about the sample's labels that is not among the seen ones.

        A batch that left meanwhile may have taken one with it that came after the look.
        """
        query = sa.select(inbox.c.row_key).where(
            self._mine(), inbox.c.table_name == LABELS.name, inbox.c.sample_id == seen.sample_id
        )
        here = set(connection.execute(query).scalars())
        return not here <= seen.label_ids or self._last_finished(connection) != seen.drained

    def _last_finished(self, connection: sa.Connection) -> int | None:
        return connection.execute(_LAST_FINISHED, {"workspace": self.registry.workspace}).scalar()

    def _unfinished(self, connection: sa.Connection) -> int | None:
        waiting = sa.select(sa.func.min(batches.c.batch)).where(self._my_batches(), batches.c.done_at.is_(None))
        return connection.execute(waiting).scalar()

    def _dead(self, connection: sa.Connection, sample_ids: Iterable[str]) -> set[str]:
        wanted = list(sample_ids)
        found: set[str] = set()
        for start in range(0, len(wanted), 500):
            query = sa.select(tombstones.c.sample_id).where(
                tombstones.c.workspace == self.registry.workspace,
                tombstones.c.sample_id.in_(wanted[start : start + 500]),
            )
            found |= set(connection.execute(query).scalars())
        return found

    def _frames(self, where: sa.ColumnElement[bool]) -> dict[str, pl.DataFrame]:
        with self.registry.read() as connection:
            return self._read(connection, where)

    def _read(self, connection: sa.Connection, where: sa.ColumnElement[bool]) -> dict[str, pl.DataFrame]:
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        query = sa.select(inbox.c.table_name, inbox.c.payload).where(where).order_by(inbox.c.id)
        for table_name, payload in connection.execute(query):
            rows[table_name].append(payload)
        return {name: frame_of(TABLES[name], payloads) for name, payloads in rows.items()}

    def _entries(self, feedback: Sequence[Row], labels: Sequence[Row], now: datetime | None) -> list[dict[str, Any]]:
        pairs = ((FEEDBACK, feedback), (LABELS, labels))
        return [self._entry(table, row, now) for table, rows in pairs for row in rows]

    def _entry(self, table: Table, row: Row, now: datetime | None) -> dict[str, Any]:
        payload = _encoded(table, row)
        return {
            "workspace": self.registry.workspace,
            "table_name": table.name,
            "row_key": payload[ROW_KEYS[table.name]],
            "sample_id": payload["sample_id"],
            "payload": payload,
            "created_at": now or datetime.now(UTC),
        }


def _encoded(table: Table, row: Row) -> dict[str, Any]:
    """The row as JSON has it: exactly the declared columns, times as ISO text in UTC. Raises BadRequest."""
    names = {column.name for column in table.columns}
    if set(row) != names:
        missing, foreign = sorted(names - set(row)), sorted(set(row) - names)
        raise BadRequest(f"A row of {table.name} lacks {missing or 'nothing'} and has unknown {foreign or 'nothing'}.")
    return {column.name: _value(table, column, row[column.name]) for column in table.columns}


def _value(table: Table, column: Column, value: object) -> object:
    problem = _problem(column, value)
    if problem:
        raise BadRequest(f"{table.name}.{column.name} {problem}. (The value is not shown: it may be a person's text.)")
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds")
    return float(value) if column.kind == "float" and isinstance(value, (int, float)) else value


def _problem(column: Column, value: object) -> str | None:
    """What is wrong with a value, None if nothing is."""
    if value is None:
        return None if column.nullable else "must not be null"
    if not isinstance(value, _TYPES[column.kind]) or (isinstance(value, bool) and column.kind != "bool"):
        return f"must be of kind {column.kind}, got {type(value).__name__}"
    problem = None
    if isinstance(value, datetime):
        problem = None if value.tzinfo else "needs a time zone"
    elif isinstance(value, str) and column.kind == "id":
        most = 36 if column.name == "sample_id" else 80
        fits = value.isascii() and value.isprintable() and 1 <= len(value) <= most
        problem = None if fits else f"must be 1 to {most} visible ASCII characters"
    elif isinstance(value, str) and column.words is not None:
        problem = None if value in column.words else f"must be one of {', '.join(column.words)}"
    elif isinstance(value, str):
        problem = None if _encodes(value) else "holds half a surrogate pair, which UTF-8 has no form for"
    elif isinstance(value, float):
        problem = None if math.isfinite(value) else "must be finite"
    elif isinstance(value, int):
        problem = None if -(2**63) <= value < 2**63 else "must fit in 64 bits"
    return problem


def _encodes(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
