"""This machine's clock: schedules, waits, leases and retention all go by it.

Belongs here: comparing it with the database server's, and with what was written before. Does not belong here: setting
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from loop_dagster.doctor.findings import Finding, fine, mistake
from loop_dagster.doctor.installation import Installation
from loop_dagster.store.schema import attempt_events, attempts, inbox, leases, pipelines, versions

#: Leases end after 30 s: clocks that differ by more let two processes disagree about who holds one.
MOST_APART: Final = timedelta(seconds=20)
#: What was written this far in the future was written by another clock.
MOST_AHEAD: Final = timedelta(minutes=10)
_MEND: Final = "`date -u` shows this clock and `timedatectl set-ntp true` sets it"


def clock(installation: Installation) -> Iterator[Finding]:
    """The clock against the database server's and against the newest rows and files."""
    apart = timedelta(0)
    if installation.registry.backend == "postgresql":
        with installation.registry.read() as connection:
            apart = datetime.now(UTC) - installation.registry.now(connection)
        if abs(apart) > MOST_APART:
            direction = "ahead of" if apart > timedelta(0) else "behind"
            yield mistake(
                "clock_apart",
                "clock",
                where=installation.registry.where,
                found=f"this machine's clock is {words(abs(apart))} {direction} the database server's",
                mend=f"Set both by the same time server: {_MEND}.",
            )
    newest = max(_written(installation), default=None)
    if newest is not None and newest[0] - installation.now > MOST_AHEAD:
        moment, what = newest
        yield mistake(
            "clock_behind",
            "clock",
            where=what,
            found=f"it was written at {moment:%Y-%m-%d %H:%M} UTC, {words(moment - installation.now)} from now by this "
            "clock",
            mend=f"{_MEND}. If this clock is right, that was written by a clock that was wrong: leases and waits from "
            f"then end only after {moment:%Y-%m-%d %H:%M} UTC.",
        )
    elif abs(apart) <= MOST_APART:
        yield fine("clock", "clock", found=f"{installation.now:%Y-%m-%d %H:%M:%S} UTC, after all that was written")


def words(length: timedelta) -> str:
    """A length of time as people say it."""
    seconds = round(length.total_seconds())
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:,} {unit}"
    return f"{seconds:,} s"


def _written(installation: Installation) -> Iterator[tuple[datetime, str]]:
    """When things were last written, and what: rows of the registry, files of the home, the lake and the program."""
    columns = (
        attempts.c.created_at,
        attempts.c.since,
        attempt_events.c.at,
        inbox.c.created_at,
        leases.c.heartbeat_at,
        pipelines.c.updated_at,
        versions.c.promoted_at,
    )
    with installation.registry.read() as connection:
        for column in columns:
            mine = column.table.c.workspace == installation.known.workspace
            moment = connection.execute(sa.select(sa.func.max(column)).where(mine)).scalar()
            if moment is not None:
                yield moment, f"registry, newest {column.name} of {column.table.name}"
    root = installation.root
    files = [*root.glob("*"), *root.glob("logs/*"), *root.glob("dagster/*"), Path(__file__)]
    lake = installation.known.lake
    if "://" not in lake:
        files += Path(lake).glob(f"{installation.known.workspace}/*/_delta_log")
    for path in files:
        yield datetime.fromtimestamp(path.lstat().st_mtime, UTC), str(path)
