"""The registry's database: there, whole, of this version's revision, keeping what it acknowledges.

Belongs here: the database as a whole. Does not belong here: what its rows say (work.py, clock.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import sqlalchemy as sa

from loop_dagster.doctor.findings import Finding, fine, mistake, told, warning
from loop_dagster.doctor.installation import Installation
from loop_dagster.doctor.rows import broken_row
from loop_dagster.errors import LoopError, RegistryDamaged
from loop_dagster.store import migrations
from loop_dagster.store.lake import Lake
from loop_dagster.store.schema import batches, inbox, installations, pipelines
from loop_dagster.tables import SAMPLES

_WHAT: Final = "registry"


def registry(installation: Installation) -> Iterator[Finding]:
    """Whether it answers and is whole; everything that stands on it is looked at only then."""
    found = installation.registry
    if found.path is not None and not found.path.exists():
        yield mistake(
            "registry_missing",
            _WHAT,
            where=found.where,
            found="there is no such file",
            mend="Put the file back from a copy, or name the right one with LOOP_REGISTRY_URL; `loop init` would begin "
            "with an empty one.",
        )
        return
    health = installation.health
    if health.revision is not None and health.revision not in migrations.REVISIONS:
        yield mistake(
            "registry_too_new",
            _WHAT,
            where=health.where,
            found=f"its tables are at revision {health.revision}, and this version knows up to {migrations.HEAD}",
            mend="Install the version of the project that upgraded it (`git pull && make venv`), or put back a copy of "
            "the registry from before.",
        )
        return
    try:
        revision = found.revision()
    except LoopError as error:
        code = "registry_damaged" if isinstance(error, RegistryDamaged) else "registry_unreachable"
        yield told(code, _WHAT, error.message, where=health.where)
        return
    if revision is None:
        yield from _empty(installation)
        return
    if revision != migrations.HEAD:
        yield warning(
            "registry_old",
            _WHAT,
            where=health.where,
            found=f"its tables are at revision {revision}, this version works with {migrations.HEAD}",
            mend="`loop init` upgrades it and keeps what is there; every other command does it too.",
        )
        return
    damage = installation.damage
    if damage:
        yield told("registry_damaged", _WHAT, RegistryDamaged(health.where, damage).message, where=health.where)
    for row in installation.broken_rows if damage is None else ():
        yield broken_row(found, row)
    for problem in health.problems:
        yield mistake(
            "registry_setting",
            _WHAT,
            where=health.where,
            found=problem.partition(":")[0].rstrip("."),
            mend=problem.rpartition(": ")[2] if ": " in problem else "Turn it on in postgresql.conf and reload it.",
        )
    if not damage and not health.problems and not installation.broken_rows:
        yield fine("registry", _WHAT, where=health.where, found=f"{health.server}, revision {revision}")


def workspace(installation: Installation) -> Iterator[Finding]:
    """Whether the workspace that is named holds anything, where others of the registry do."""
    mine = installation.known.workspace
    found = _workspaces(installation)
    others = sorted(found - {mine})
    if mine in found or not others or installation.store.lake.version(SAMPLES) is not None:
        yield fine("workspace", "workspace", found=mine)
        return
    yield warning(
        "no_workspace",
        "workspace",
        where=f"LOOP_WORKSPACE, {mine}",
        found=f"nothing is in this workspace, and this registry has {', '.join(others[:5])}"
        + (f" and {len(others) - 5} more" if len(others) > 5 else ""),
        mend=f"If one of those is meant, `export LOOP_WORKSPACE={others[0]}`; if not, `loop pipelines create` begins "
        f"the workspace {mine}.",
    )


def _workspaces(installation: Installation) -> set[str]:
    """Names under which the registry has anything of pipelines or samples, deleted pipelines included."""
    tables = (pipelines, inbox, batches)
    query = sa.union(*(sa.select(table.c.workspace) for table in tables))
    with installation.registry.read() as connection:
        found = set(connection.execute(query).scalars())
        # A lake that was written to: of a workspace that was only ever imported into, and has no pipeline.
        written = set(connection.execute(sa.select(installations.c.workspace)).scalars())
    return found | (written - {installation.known.workspace})


def _empty(installation: Installation) -> Iterator[Finding]:
    """A database without tables: new, or in place of one that was lost."""
    health = installation.health
    settings = installation.known
    lake = Lake(settings.lake, settings.workspace)
    try:
        rows = lake.row_count(SAMPLES)
    except LoopError:
        rows = 0
    if rows:
        yield mistake(
            "registry_lost",
            _WHAT,
            where=health.where,
            found=f"it is empty, while the lake holds {rows:,} samples: their pipelines and attempts are gone",
            mend="Put back a copy of the registry before anything else runs, or name the right one with "
            "LOOP_REGISTRY_URL.",
        )
        return
    yield warning(
        "registry_empty",
        _WHAT,
        where=health.where,
        found="it has no tables yet",
        mend="`loop init` makes them; every other command does it too.",
    )
