"""Dagster's databases of a new home: made once, however many start at the same moment."""

from __future__ import annotations

import sqlite3
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from loop_dagster.processes import make_books
from loop_dagster.settings import Settings


def _make(home: str) -> None:
    make_books(Settings(home=Path(home)))


def test_several_that_start_at_once_on_a_new_home_note_one_revision(home: Path, processes: ForkServerContext) -> None:
    several = [processes.Process(target=_make, args=(str(home),)) for _ in range(4)]
    for one in several:
        one.start()
    for one in several:
        one.join(120)
    assert [one.exitcode for one in several] == [0] * 4
    for name in ("history/runs.db", "history/runs/index.db", "schedules/schedules.db"):
        with sqlite3.connect(home / "dagster" / name) as books:
            assert books.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,), name


def test_what_was_cut_off_is_made_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(home=home)
    with monkeypatch.context() as broken:
        broken.setattr("loop_dagster.processes._MAKE", "raise SystemExit(1)")
        make_books(settings)
    assert not (home / "dagster" / "history" / "runs.db").exists()
    make_books(settings)
    assert (home / "dagster" / "history" / "runs.db").exists()
