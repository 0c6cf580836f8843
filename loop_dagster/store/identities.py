"""Which identities the lake has, answered for each recorded call without reading a column of all samples.

Belongs here: a hash of each identity in memory, eight bytes a sample, by data file. Does not belong here: what an
identity is (rules/canonical.py), the inbox's own (inbox.py). Data files never change, so a commit costs reading the
files that it added.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from datetime import datetime
from typing import Any, Final

import numpy as np
import polars as pl

from loop_dagster.store.lake import Lake
from loop_dagster.tables import SAMPLES

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
_SEED: Final = 7


class Identities:
    """The identities in one workspace's lake; nothing is read before the first question."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._known: dict[str, Hashes] = {}
        self._lock = threading.Lock()

    def find(self, identities: Collection[str], now: datetime | None = None) -> dict[str, str]:
        """Those of the identities that the newest version has, with the ids of their samples.

        With `now`, those of expired samples are not among them.
        """
        snapshot = self._lake.snapshot(SAMPLES) if identities else None
        if snapshot is None:
            return {}
        known = self._read([name for name, _size in snapshot.files])
        asked = pl.Series("identity", list(identities), dtype=pl.String)
        hashes = asked.hash(_SEED).to_numpy()
        maybe = [name for name, there in known.items() if _any_in(there, hashes)]
        if not maybe:
            return {}
        among = pl.col("identity").is_in(asked.implode())
        if now is not None:
            among &= pl.col("expires_at") > now
        rows = self._lake.scan_files(SAMPLES, maybe).filter(among).select("identity", "sample_id").collect()
        return dict(rows.iter_rows())

    def _read(self, names: list[str]) -> dict[str, Hashes]:
        """Sorted hashes by data file; one thread reads what is new and the others wait for it."""
        known = self._known
        if known.keys() != set(names):
            with self._lock:
                known = {name: self._known[name] if name in self._known else self._hashes(name) for name in names}
                self._known = known
        return known

    def _hashes(self, name: str) -> Hashes:
        column = self._lake.scan_files(SAMPLES, [name]).select(pl.col("identity").hash(_SEED).sort()).collect()
        return column["identity"].to_numpy()


def _any_in(there: Hashes, wanted: Hashes) -> bool:
    places = np.searchsorted(there, wanted)
    return bool((there[np.minimum(places, there.size - 1)] == wanted).any()) if there.size else False
