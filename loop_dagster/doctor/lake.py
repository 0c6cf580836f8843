"""The lake: every table whole and readable, written by this registry alone, holding what the registry counts on.

Belongs here: looking through `store`. Does not belong here: finding the damaged file of a table (store/torn.py), and
telling that a table which is not there once was (lost_tables.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loop_dagster.doctor.findings import Finding, fine, mistake, told, warning
from loop_dagster.doctor.installation import Installation
from loop_dagster.doctor.lost_tables import lost_tables
from loop_dagster.errors import LakeSchemaMismatch, LakeUnreadable
from loop_dagster.store import torn
from loop_dagster.store.lake import Lake
from loop_dagster.store.owner import owner_of
from loop_dagster.tables import TABLES, Table


def tables(installation: Installation) -> Iterator[Finding]:
    """Every table: its log, its data files, its columns; and whether one that was written to is there at all."""
    lake = installation.store.lake
    rows: dict[str, int] = {}
    for table in TABLES:
        found = list(_table(lake, table, rows, thorough=installation.thorough))
        yield from found
    yield from lost_tables(installation, rows)


def _table(lake: Lake, table: Table, rows: dict[str, int], *, thorough: bool) -> Iterator[Finding]:
    what = f"table {table.name}"
    if "://" not in lake.root:
        damaged = torn.look(lake, table, thorough=thorough)
        for one in damaged:
            yield mistake("lake_torn", what, where=one.path, found=one.found, mend=one.mend)
        if damaged:
            return
    try:
        rows[table.name] = lake.row_count(table)
        lake.scan(table)
    except LakeSchemaMismatch as error:
        yield mistake(
            "lake_columns",
            what,
            where=lake.path(table),
            found=f"its columns are not this version's: {'; '.join(error.details['problems'][:3])}",
            mend="Run the version of the project that wrote it, or put the folder back from a copy of this version's.",
        )
        return
    except LakeUnreadable as error:
        yield told("lake_unreadable", what, error.message, where=lake.path(table))
        return
    if rows[table.name]:
        yield fine("lake", what, found=f"{rows[table.name]:,} rows at Delta version {lake.version(table)}")


def owner(installation: Installation) -> Iterator[Finding]:
    """Whose the lake is by its mark."""
    lake = installation.store.lake
    mine = owner_of(installation.registry, installation.root, make=False)
    try:
        found = lake.mark.read()
    except OSError as error:
        said = f"{error.strerror}. See to the rights of that file."
        yield told("owner_unreadable", "owner of the lake", said, where=lake.mark.path)
        return
    if found is None:
        if "://" not in lake.root and Path(lake.mark.path).exists():
            yield warning(
                "owner_unreadable",
                "owner of the lake",
                where=lake.mark.path,
                found="it does not say whose the lake is",
                mend="End whatever runs on another registry with this lake; the next write from here writes it anew.",
            )
        return
    if lake.mark.standing(found, mine) == "other":
        yield mistake(
            "two_homes_on_one_lake",
            "owner of the lake",
            where=lake.mark.path,
            found=f"this lake is written by {found.words}, and this is {mine.words}",
            mend="Give this installation a lake of its own (`export LOOP_LAKE_URL=…` or another LOOP_WORKSPACE). If it "
            f"is the same installation, name its registry with LOOP_REGISTRY_URL; if the other is gone for good, "
            f"`rm {lake.mark.path}`.",
        )
        return
    yield fine("owner", "owner of the lake", found="this registry")
