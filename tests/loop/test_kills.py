"""A few rounds of every kind of kill; `make chaos` makes 50 of each."""

from __future__ import annotations

from pathlib import Path

import kills
import load
import pytest
from homes import Homes


@pytest.mark.parametrize("seed", range(2))
def test_an_import_that_is_killed_stores_every_row_once(tmp_path: Path, seed: int) -> None:
    kills.kill_an_import(Homes(tmp_path), seed, rows=1_500)


@pytest.mark.parametrize("seed", range(2))
def test_what_was_acknowledged_is_stored_once_whatever_happens_to_drains(tmp_path: Path, seed: int) -> None:
    kills.kill_a_drain(Homes(tmp_path), seed, rows=200)


def test_what_clients_were_told_is_there_once_though_a_worker_is_killed(tmp_path: Path) -> None:
    load.kill_under_load(Homes(tmp_path), seed=1, clients=8, seconds=6.0, daemon=False)
