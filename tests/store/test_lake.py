"""The lake on a real disk: transactions, racing writers, killed writers, torn logs, statistics."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loop_dagster.errors import LakeNotWritable, LakeSchemaMismatch, LakeUnreadable
from loop_dagster.store.lake import MOST_SMALL_FILES, Lake, quoted
from loop_dagster.tables import FEEDBACK, HOLDOUTS, LABELS, SAMPLES, TABLES

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SPAWN = multiprocessing.get_context("spawn")


def labels(ids: list[str], label: str = "shop", value: str | None = None) -> pl.DataFrame:
    return LABELS.frame(
        [
            {
                "label_id": f"label-{name}",
                "sample_id": name,
                "label": label,
                "value": value,
                "parent": None,
                "removed": False,
                "created_at": NOW,
            }
            for name in ids
        ]
    )


def holdouts(attempt: str, keys: list[int]) -> pl.DataFrame:
    pipeline, _, number = attempt.rpartition("/")
    return HOLDOUTS.frame(
        [
            {
                "attempt": attempt,
                "pipeline_id": pipeline,
                "attempt_no": int(number),
                "sample_id": f"s{key}",
                "prompt_key": key,
                "rank": -key,
                "reviewed": True,
            }
            for key in keys
        ]
    )


def ids(lake: Lake) -> list[str]:
    return sorted(lake.scan(LABELS).select("sample_id").collect()["sample_id"])


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_declared_table_can_be_created_and_scanned(lake: Lake, table: object) -> None:
    from loop_dagster.tables.base import Table

    assert isinstance(table, Table)
    assert lake.version(table) is None
    assert lake.scan(table).collect().schema == table.schema
    assert lake.files(table) == []
    assert lake.row_count(table) == 0
    assert lake.delete(table, "true") == 0
    assert lake.maintain(table) is None
    assert lake.append(table, table.empty()) == 0
    assert lake.scan(table).collect().schema == table.schema


def test_columns_come_back_in_declared_order_and_filters_reach_the_files(lake: Lake) -> None:
    frame = labels(["a", "b"]).select(reversed(LABELS.schema))
    assert lake.append(LABELS, frame) == 1
    assert lake.append(LABELS, labels(["c"])) == 2
    assert lake.scan(LABELS).collect().columns == list(LABELS.schema)
    query = lake.scan(LABELS).filter(pl.col("sample_id") == "b").select("label")
    plan = query.explain()
    assert "SELECTION" in plan
    assert f"/{len(LABELS.schema)} COLUMNS" in plan
    assert query.collect().to_dicts() == [{"label": "shop"}]
    assert ids(lake) == ["a", "b", "c"]
    assert lake.row_count(LABELS) == 3
    assert len(lake.files(LABELS)) == 2
    assert sorted(lake.scan(LABELS, version=1).collect()["sample_id"]) == ["a", "b"]


def test_workspaces_do_not_meet(tmp_path: Path) -> None:
    one, two = Lake(str(tmp_path), "one"), Lake(str(tmp_path), "two")
    one.append(LABELS, labels(["a"]))
    assert ids(two) == []
    assert (tmp_path / "one" / "labels" / "_delta_log").is_dir()


def test_a_transaction_is_applied_once_also_after_newer_ones(lake: Lake) -> None:
    assert lake.append(LABELS, labels(["a"]), transaction=("drain", 1)) is not None
    assert lake.append(LABELS, labels(["a"]), transaction=("drain", 1)) is None
    assert lake.append(LABELS, labels(["b"]), transaction=("drain", 2), sync=True) is not None
    assert lake.append(LABELS, labels(["a"]), transaction=("drain", 1)) is None
    assert lake.append(LABELS, labels(["c"]), transaction=("other", 1)) is not None
    assert ids(lake) == ["a", "b", "c"]
    assert lake.transaction(LABELS, "drain") == 2
    assert lake.transaction(LABELS, "nobody") is None
    assert lake.transaction(HOLDOUTS, "drain") is None


def test_a_transaction_without_rows_counts_as_applied(lake: Lake) -> None:
    lake.append(LABELS, LABELS.empty(), transaction=("drain", 1))
    assert lake.append(LABELS, labels(["a"]), transaction=("drain", 1)) is None


def test_transactions_survive_housekeeping(lake: Lake) -> None:
    for number in range(1, 6):
        lake.append(LABELS, labels([f"s{number}"]), transaction=("drain", number))
    done = lake.maintain(LABELS)
    assert done is not None
    assert (done.files_before, done.files_after) == (5, 1)
    assert lake.append(LABELS, labels(["s5"]), transaction=("drain", 5)) is None
    assert ids(lake) == [f"s{number}" for number in range(1, 6)]


@pytest.mark.parametrize("keys", [[], [7], [7, 8]])
def test_replacing_an_attempt_touches_no_other_and_can_be_repeated(lake: Lake, keys: list[int]) -> None:
    one, two = "shop-00ff/0001", "shop-00ff/0002"
    lake.replace_attempt(HOLDOUTS, one, holdouts(one, [1, 2, 3]))
    lake.replace_attempt(HOLDOUTS, two, holdouts(two, [4]))
    lake.maintain(HOLDOUTS)  # both attempts in one file
    for _ in range(2):
        lake.replace_attempt(HOLDOUTS, one, holdouts(one, keys))
        stored = lake.scan(HOLDOUTS).select("attempt", "prompt_key").collect().sort("attempt", "prompt_key").rows()
        assert stored == [(one, key) for key in keys] + [(two, 4)]


def test_replacing_an_attempt_refuses_rows_of_another(lake: Lake) -> None:
    with pytest.raises(LakeSchemaMismatch, match="1 of another attempt"):
        lake.replace_attempt(HOLDOUTS, "shop-00ff/0001", holdouts("shop-00ff/0002", [1]))
    with pytest.raises(LakeSchemaMismatch, match="has none"):
        lake.replace_attempt(LABELS, "shop-00ff/0001", labels(["a"]))


def test_a_wrong_frame_is_refused_with_every_fault_named(lake: Lake) -> None:
    frame = labels(["a", "b"]).with_columns(
        pl.lit(1).alias("label"),
        pl.when(pl.col("sample_id") == "a").then("sample_id").alias("sample_id"),
        pl.lit(1).alias("more"),
    )
    with pytest.raises(LakeSchemaMismatch) as caught:
        lake.append(LABELS, frame.drop("removed"))
    message = caught.value.message
    assert "column label: needed String, found Int32" in message
    assert "column sample_id: needed a value in every row, found 1 null" in message
    assert "column removed: needed Boolean, found nothing" in message
    assert "column more: not declared" in message
    assert lake.version(LABELS) is None


def test_delete_counts_rows_and_quotes_values(lake: Lake) -> None:
    lake.append(LABELS, labels(["it's", "b", "c"]))
    assert lake.delete(LABELS, f"sample_id = {quoted(chr(39).join(['it', 's']))}") == 1
    assert lake.delete(LABELS, f"sample_id = {quoted('nobody')}") == 0
    assert ids(lake) == ["b", "c"]


def test_deleted_text_is_gone_from_every_file_after_housekeeping(lake: Lake, tmp_path: Path) -> None:
    lake.append(LABELS, labels(["a", "b"], value="a sentence of a person"))
    lake.append(LABELS, labels(["c"], value="another sentence"))

    def found(text: str) -> bool:
        return any(text.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    assert found("a sentence of a person")
    lake.delete(LABELS, "sample_id in ('a', 'b')")
    orphan = Path(lake.path(LABELS)) / "part-of-a-killed-writer.parquet"
    orphan.write_bytes(b"a sentence of a person")
    lake.maintain(LABELS)
    assert not found("a sentence of a person")
    assert not orphan.exists()
    assert found("another sentence")


def test_text_columns_leave_no_statistics_in_the_log(lake: Lake) -> None:
    lake.append(LABELS, labels(["a"], value="private words"))
    lake.maintain(LABELS)
    log = Path(lake.path(LABELS)) / "_delta_log"
    assert all(b"private words" not in path.read_bytes() for path in log.iterdir())
    actions = [json.loads(line) for path in log.glob("*.json") for line in path.read_text().splitlines()]
    statistics = [json.loads(action["add"]["stats"]) for action in actions if "add" in action]
    assert statistics
    for kept in statistics:
        assert "value" not in kept["minValues"]
        assert kept["minValues"]["sample_id"] == "a"


@pytest.mark.parametrize("table", [SAMPLES, FEEDBACK, LABELS], ids=lambda table: table.name)
def test_no_text_column_is_declared_with_statistics(table: object) -> None:
    from loop_dagster.tables.base import Table

    assert isinstance(table, Table)
    assert not {column.name for column in table.columns if column.kind == "text"} & set(table.statistics_columns)


def _tear(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "half": content[: len(content) // 2], "zeros": b"\0" * len(content)}[how])


@pytest.mark.parametrize("how", ["empty", "half", "zeros"])
def test_a_torn_log_is_an_error_that_names_table_and_relative_path(lake: Lake, tmp_path: Path, how: str) -> None:
    for number in range(3):
        lake.append(LABELS, labels([f"s{number}"], value="private words"))
    _tear(Path(lake.path(LABELS)) / "_delta_log" / f"{3:020d}.json", how)
    calls: list[Callable[[], object]] = [
        lambda: lake.scan(LABELS),
        lambda: lake.version(LABELS),
        lambda: lake.append(LABELS, labels(["x"])),
        lambda: lake.delete(LABELS, "true"),
        lambda: lake.maintain(LABELS),
    ]
    for call in calls:
        with pytest.raises(LakeUnreadable) as caught:
            call()
        assert "'labels'" in caught.value.message
        assert "'default/labels'" in caught.value.message
        assert str(tmp_path) not in caught.value.message
        assert "private words" not in caught.value.message


def test_data_without_a_log_is_not_read_as_an_empty_table(lake: Lake) -> None:
    lake.append(LABELS, labels(["a"]))
    for path in (Path(lake.path(LABELS)) / "_delta_log").iterdir():
        path.unlink()
    with pytest.raises(LakeUnreadable, match="without any log"):
        lake.scan(LABELS)


def test_a_place_that_takes_no_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("a file where the folder should be")
    lake = Lake(str(tmp_path / "lake"))
    with pytest.raises(LakeNotWritable) as caught:
        lake.append(LABELS, labels(["a"]))
    assert "Appending on the lake's table 'labels' at 'default/labels'" in caught.value.message
    assert str(tmp_path) not in caught.value.message


def _append_many(root: str, who: str, count: int) -> None:
    lake = Lake(root)
    for number in range(count):
        lake.append(LABELS, labels([f"{who}-{number:03d}"]))


def _append_shared(root: str, count: int) -> None:
    lake = Lake(root)
    for number in range(1, count + 1):
        lake.append(LABELS, labels([f"s{number:03d}"]), transaction=("shared", number))


def test_two_processes_append_and_nothing_is_lost(tmp_path: Path) -> None:
    root = str(tmp_path)
    writers = [SPAWN.Process(target=_append_many, args=(root, who, 25)) for who in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    assert ids(Lake(root)) == [f"{who}-{number:03d}" for who in ("a", "b") for number in range(25)]


def test_two_processes_with_the_same_transactions_apply_each_once(tmp_path: Path) -> None:
    root = str(tmp_path)
    writers = [SPAWN.Process(target=_append_shared, args=(root, 20)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    assert ids(Lake(root)) == [f"s{number:03d}" for number in range(1, 21)]


def _append_acknowledged(root: str, acknowledged: str) -> None:
    lake = Lake(root)
    with Path(acknowledged).open("a", encoding="utf-8") as file:
        for number in range(1, 10_000):
            lake.append(LABELS, labels([f"s{number:05d}"] * 3), transaction=("killed", number))
            file.write(f"s{number:05d}\n")
            file.flush()


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_writer_leaves_every_acknowledged_row_once(tmp_path: Path, seed: int) -> None:
    root, acknowledged = str(tmp_path / "lake"), tmp_path / "acknowledged"
    writer = SPAWN.Process(target=_append_acknowledged, args=(root, str(acknowledged)))
    writer.start()
    deadline = time.monotonic() + 60
    while not (acknowledged.exists() and acknowledged.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(random.Random(seed).uniform(0, 0.3))
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    told = acknowledged.read_text().split()
    assert told
    lake = Lake(root)
    stored = lake.scan(LABELS).collect()["sample_id"].value_counts().sort("sample_id").rows()
    names = [name for name, _ in stored]
    assert names[: len(told)] == told
    assert len(names) <= len(told) + 1  # at most the one commit that was not told of
    assert {count for _, count in stored} == {3}
    lake.maintain(LABELS)
    assert lake.row_count(LABELS) == 3 * len(names)
    assert len(list(Path(lake.path(LABELS)).glob("*.parquet"))) == len(lake.files(LABELS))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_any_text_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    lake = Lake(str(tmp_path_factory.mktemp("lake")))
    frame = labels([f"s{index}" for index in range(len(texts))]).with_columns(pl.Series("value", texts))
    lake.append(LABELS, frame)
    assert lake.scan(LABELS).collect()["value"].to_list() == texts


def test_many_small_commits_do_not_make_a_table_of_many_files(lake: Lake) -> None:
    def read(version: int | None = None) -> list[str]:
        return lake.scan(LABELS, version=version).collect()["label_id"].sort().to_list()

    for n in range(MOST_SMALL_FILES):
        lake.append(LABELS, labels([f"{n:03d}"]), transaction=("drain", n))
    old, before = lake.version(LABELS), read()
    for n in range(MOST_SMALL_FILES, MOST_SMALL_FILES + 5):
        version = lake.append(LABELS, labels([f"{n:03d}"]), transaction=("drain", n))
        assert version == lake.version(LABELS)
    assert len(lake.files(LABELS)) < 10
    assert len(read()) == len(set(read())) == MOST_SMALL_FILES + 5
    assert lake.transaction(LABELS, "drain") == MOST_SMALL_FILES + 4
    # A reader that began before goes on: nothing was removed from storage.
    assert read(old) == before
