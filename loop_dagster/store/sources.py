"""Sources in the registry: whether what comes from one is recorded, for how long, which share, under which tags.

Belongs here: the rows. Does not belong here: recording (inbox.py), the source that a pipeline switches on itself
(pipelines.py), how long days may be (rules/retention.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import sqlalchemy as sa

from loop_dagster.errors import BadRequest
from loop_dagster.rules.retention import CAPTURED_DAYS, retention_days
from loop_dagster.rules.tags import labels
from loop_dagster.store.registry import Registry, put_row
from loop_dagster.store.schema import sources

#: Characters of a source's name.
MAX_SOURCE: Final = 200
#: Made once: captures ask it.
_MANY: Final = sa.select(sources).where(
    sources.c.workspace == sa.bindparam("workspace"), sources.c.source.in_(sa.bindparam("names", expanding=True))
)


@dataclass(frozen=True, slots=True)
class Source:
    """How one source is recorded; `updated_at` is None for one that nobody has set up, which is not recorded."""

    name: str
    enabled: bool = False
    retention_days: int = CAPTURED_DAYS
    sample_rate: float = 1.0
    tags: tuple[str, ...] = ()
    updated_at: datetime | None = None


class Sources:
    """The sources of one workspace."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def list(self) -> tuple[Source, ...]:
        """Every source that was set up, by name."""
        query = sa.select(sources).where(sources.c.workspace == self.registry.workspace).order_by(sources.c.source)
        with self.registry.read() as connection:
            return tuple(source_of(row) for row in connection.execute(query).mappings())

    def get(self, name: str) -> Source:
        """One source; one that nobody set up is switched off. Raises BadRequest for what cannot be a source."""
        name = source_name(name)
        with self.registry.read() as connection:
            row = connection.execute(sa.select(sources).where(self._is(name))).mappings().one_or_none()
        return Source(name) if row is None else source_of(row)

    def get_many(self, names: Collection[str]) -> dict[str, Source]:
        """Sources by name, as `get`; the names are clean."""
        wanted = {"workspace": self.registry.workspace, "names": list(names)}
        with self.registry.read() as connection:
            rows = connection.execute(_MANY, wanted).mappings().all()
        return {name: Source(name) for name in names} | {row["source"]: source_of(row) for row in rows}

    def put(
        self,
        name: str,
        *,
        enabled: bool | None = None,
        days: int | None = None,
        sample_rate: float | None = None,
        tags: Sequence[str] | None = None,
        now: datetime,
    ) -> Source:
        """Set a source up; what is None stays as it is. Raises BadRequest or a subclass, with nothing saved."""
        name = source_name(name)
        if days is not None:
            retention_days(days)
        if sample_rate is not None and not 0 <= sample_rate <= 1:
            raise BadRequest("sample_rate must be a number from 0 to 1. Nothing was saved.", field="sample_rate")
        clean = None if tags is None else labels(tags).tags
        with self.registry.write() as connection:
            query = sa.select(sources).where(self._is(name)).with_for_update()
            row = connection.execute(query).mappings().one_or_none()
            old = Source(name) if row is None else source_of(row)
            new = {
                "workspace": self.registry.workspace,
                "source": name,
                "enabled": old.enabled if enabled is None else enabled,
                "retention_days": old.retention_days if days is None else days,
                "sample_rate": old.sample_rate if sample_rate is None else float(sample_rate),
                "tags": list(old.tags if clean is None else clean),
                "updated_at": now,
            }
            put_row(connection, sources, new)
            return source_of(connection.execute(sa.select(sources).where(self._is(name))).mappings().one())

    def _is(self, name: str) -> sa.ColumnElement[bool]:
        return sa.and_(sources.c.workspace == self.registry.workspace, sources.c.source == name)


def source_name(name: str) -> str:
    """A source's name, trimmed. Raises BadRequest."""
    clean = name.strip()
    if not 1 <= len(clean) <= MAX_SOURCE or not clean.isprintable():
        raise BadRequest(f"A source is called by 1 to {MAX_SOURCE} printable characters.", field="source")
    return clean


def source_of(row: sa.RowMapping) -> Source:
    """A row of the table."""
    return Source(
        name=row["source"],
        enabled=row["enabled"],
        retention_days=row["retention_days"] or CAPTURED_DAYS,
        sample_rate=1.0 if row["sample_rate"] is None else row["sample_rate"],
        tags=tuple(row["tags"]),
        updated_at=row["updated_at"],
    )
