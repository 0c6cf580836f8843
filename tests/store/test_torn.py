"""Tables with damaged files: named when they are opened, looked through file by file, mended by what is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

from loop_dagster.errors import LakeUnreadable
from loop_dagster.store import torn
from loop_dagster.store.lake import Lake
from loop_dagster.tables import LABELS, SAMPLES

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def row(number: int) -> pl.DataFrame:
    fields = {"label": "shop", "value": None, "parent": None, "removed": False, "created_at": NOW}
    return LABELS.frame([{"label_id": f"l{number}", "sample_id": f"s{number}", **fields}])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake whose table has 25 commits, the first 19 of them in a checkpoint."""
    folder = tmp_path_factory.mktemp("whole") / "lake"
    lake = Lake(str(folder))
    for number in range(25):
        lake.append(LABELS, row(number))
    return folder


@pytest.fixture
def table(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "lake")
    return tmp_path / "lake" / "default" / "labels"


def lake_of(table: Path) -> Lake:
    return Lake(str(table.parent.parent))


def commit(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020d}.json"


def checkpoint(table: Path) -> Path:
    return next((table / "_delta_log").glob("*.checkpoint.parquet"))


def data(table: Path) -> Path:
    return next(table.glob("*.parquet"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def rows_after(table: Path) -> int:
    return lake_of(table).scan(LABELS).collect().height


#: how it is damaged, what is named, and how many rows are left after following the first command (None: none to follow)
DAMAGE: dict[str, tuple[Callable[[Path], object], str, int | None]] = {
    "empty newest commit": (lambda table: commit(table, 25).write_bytes(b""), "0025.json", 24),
    "cut newest commit": (lambda table: cut(commit(table, 25)), "0025.json", 24),
    "overwritten newest commit": (lambda table: commit(table, 25).write_bytes(os.urandom(300)), "25.json", 24),
    "cut commit in the middle": (lambda table: cut(commit(table, 23)), "0023.json", None),
    "missing commit": (lambda table: commit(table, 23).unlink(), "0023.json", None),
    "cut checkpoint": (lambda table: cut(checkpoint(table)), ".checkpoint.parquet", 25),
    "empty checkpoint": (lambda table: checkpoint(table).write_bytes(b""), ".checkpoint.parquet", 25),
    "missing checkpoint": (lambda table: checkpoint(table).unlink(), "_last_checkpoint", 25),
    "missing log": (lambda table: shutil.rmtree(table / "_delta_log"), "_delta_log", 0),
    "missing data": (lambda table: data(table).unlink(), ".zstd.parquet", 24),
    "cut data": (lambda table: cut(data(table)), ".zstd.parquet", 24),
    "a file for a folder": (lambda table: (shutil.rmtree(table), table.write_text("x")), "labels", 0),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_on_opening_found_by_file_and_mended(table: Path, kind: str) -> None:
    damage, named, left = DAMAGE[kind]
    damage(table)
    with pytest.raises(LakeUnreadable, match="labels"):
        lake_of(table).scan(LABELS)
    [found] = torn.look(lake_of(table), LABELS)
    assert named in found.path
    if left is None:
        assert "back from a copy" in found.mend
        return
    command = found.mend.split("`")[1]
    if "data" in kind and " && " not in command and command.startswith("mv"):
        command += " && " + found.mend.split("`")[3]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torn.look(lake_of(table), LABELS) == []
    assert rows_after(table) == left
    lake_of(table).append(LABELS, row(99))
    assert rows_after(table) == left + 1


@pytest.mark.parametrize("text", ["", "{", '{"size": 1}'])
def test_a_pointer_to_the_checkpoint_that_cannot_be_read_is_no_damage(table: Path, text: str) -> None:
    (table / "_delta_log" / "_last_checkpoint").write_text(text)
    assert torn.look(lake_of(table), LABELS) == []
    assert rows_after(table) == 25


def test_a_checkpoint_without_the_commits_before_it_is_put_back_from_a_copy(table: Path) -> None:
    for version in range(15):
        commit(table, version).unlink()
    assert rows_after(table) == 25
    assert torn.look(lake_of(table), LABELS) == []
    cut(checkpoint(table))
    found = torn.look(lake_of(table), LABELS)
    assert "back from a copy" in found[0].mend


def test_many_damaged_files_are_counted_and_few_named(table: Path) -> None:
    for path in table.glob("*.parquet"):
        path.unlink()
    found = torn.look(lake_of(table), LABELS)
    assert len(found) == 6
    assert found[-1].found.startswith("20 further")


def test_what_is_whole_or_not_there_is_fine(table: Path) -> None:
    assert torn.look(lake_of(table), LABELS, thorough=True) == []
    assert torn.look(lake_of(table), SAMPLES) == []
    lake_of(table).maintain(LABELS)
    assert torn.look(lake_of(table), LABELS, thorough=True) == []


def test_housekeeping_beside_a_reader_is_no_damage(table: Path) -> None:
    lake = lake_of(table)
    ended = threading.Event()
    problems: list[Exception] = []

    def read() -> None:
        while not ended.is_set():
            try:
                lake.scan(LABELS)
            except Exception as error:
                problems.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(30, 45):
        lake.append(LABELS, row(number))
        lake.maintain(LABELS)
    ended.set()
    for reader in readers:
        reader.join()
    assert problems == []
