"""What waits in the inbox as frames, kept in this process for as long as it is what waits.

Belongs here: reading payloads into frames once, however many readers ask. Does not belong here: writing the inbox
(inbox.py), reading lake and inbox together (samples.py).

Rows of the inbox never change; they come and go. So what was read is still all that waits, or a beginning of it, when
as many rows are there up to the newest that was read, with the same sum of ids, and that newest one is the same row: on
SQLite an id may come again, but only from the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import polars as pl
import sqlalchemy as sa

from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import inbox
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES, Table

TABLES: Final[Mapping[str, Table]] = {table.name: table for table in (SAMPLES, FEEDBACK, LABELS)}
#: Frames over this size are read anew each time: while the lake is out of reach, the inbox may hold gigabytes.
KEPT_BYTES: Final = 64 * 2**20
#: Pieces of a frame before they are put into one.
_PIECES: Final = 32


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows up to id `newest`: how many, the sum of their ids, the newest one, and their frames by table."""

    newest: int
    rows: int
    total: int
    top: tuple[object, ...]
    frames: Mapping[str, pl.DataFrame]


_EMPTY: Final = {name: table.empty() for name, table in TABLES.items()}
_NOTHING: Final = _Read(0, 0, 0, (), _EMPTY)


class Waiting:
    """The rows that wait in one workspace's inbox. Threads may share one; at worst two of them read the same rows."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known = _NOTHING

    def frames(self) -> dict[str, pl.DataFrame]:
        """Every row that has not left the inbox, by table name, in the declared columns and in the order they came."""
        known = self._known
        with self._registry.read() as connection:
            if not self._is_there(connection, known):
                known = _NOTHING
            newer = sa.select(inbox.c.id, inbox.c.table_name, inbox.c.payload, *_TOP).where(
                self._mine(), inbox.c.id > known.newest
            )
            rows = connection.execute(newer.order_by(inbox.c.id)).all()
        if rows:
            payloads: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
            for row in rows:
                payloads[row.table_name].append(row.payload)
            known = _Read(
                newest=rows[-1].id,
                rows=known.rows + len(rows),
                total=known.total + sum(row.id for row in rows),
                top=tuple(rows[-1][3:]),
                frames={name: _joined(known.frames[name], frame_of(TABLES[name], payloads[name])) for name in TABLES},
            )
        small = sum(frame.estimated_size() for frame in known.frames.values()) <= KEPT_BYTES
        self._known = known if small else _NOTHING
        return dict(known.frames)

    def _is_there(self, connection: sa.Connection, known: _Read) -> bool:
        """Whether exactly the rows that were read wait, up to the newest of them."""
        until = sa.and_(self._mine(), inbox.c.id <= known.newest)
        counted = connection.execute(sa.select(sa.func.count(), sa.func.sum(inbox.c.id)).where(until)).one()
        if (counted[0], int(counted[1] or 0)) != (known.rows, known.total):
            return False
        top = connection.execute(sa.select(*_TOP).where(self._mine(), inbox.c.id == known.newest)).one_or_none()
        return tuple(top or ()) == known.top

    def _mine(self) -> sa.ColumnElement[bool]:
        return inbox.c.workspace == self._registry.workspace


_TOP: Final = (inbox.c.row_key, inbox.c.sample_id, inbox.c.created_at)


def frame_of(table: Table, payloads: list[dict[str, Any]]) -> pl.DataFrame:
    """Rows as the inbox keeps them, as a frame of the table; the times in `payloads` are put in place."""
    if not payloads:
        return _EMPTY[table.name]
    times = [column.name for column in table.columns if column.kind == "time"]
    for payload in payloads:
        for name in times:
            moment = payload[name]
            payload[name] = None if moment is None else datetime.fromisoformat(str(moment))
    return table.frame(payloads)


def _joined(first: pl.DataFrame, then: pl.DataFrame) -> pl.DataFrame:
    if first.is_empty() or then.is_empty():
        return then if first.is_empty() else first
    joined = pl.concat([first, then], rechunk=False)
    return joined.rechunk() if joined.n_chunks() > _PIECES else joined
