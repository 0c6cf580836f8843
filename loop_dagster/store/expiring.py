"""Which data files of the lake hold samples whose time is over, so that most readings need not look for any.

Belongs here: the earliest end of each file, in memory; data files never change. Does not belong here: what an expired
sample means (samples.py), removing it (purging.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import polars as pl

from loop_dagster.store.lake import Lake
from loop_dagster.tables import SAMPLES

_EARLIEST: Final = pl.col("expires_at").min()


class Expiring:
    """The ends of the samples in one workspace's lake; nothing is read before the first question."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._known: dict[str, datetime | None] = {}
        self._lock = threading.Lock()

    def files(self, files: Sequence[tuple[str, int]], now: datetime) -> list[str]:
        """Those of a snapshot's files that hold a sample which has expired at `now`."""
        known = self._read([name for name, _size in files])
        return [name for name, earliest in known.items() if earliest is not None and earliest <= now]

    def _read(self, names: Sequence[str]) -> dict[str, datetime | None]:
        known = self._known
        if known.keys() != set(names):
            with self._lock:
                new = [name for name in names if name not in self._known]
                looks = [self._lake.scan_files(SAMPLES, [name]).select(_EARLIEST) for name in new]
                found = dict(zip(new, (frame.item() for frame in pl.collect_all(looks)), strict=True))
                known = {name: self._known[name] if name in self._known else found[name] for name in names}
                self._known = known
        return known
