"""The drain and the intake folder: every acknowledged row reaches the lake once, whatever is killed when."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from uuid_utils import uuid7

from loop_dagster.settings import Settings
from loop_dagster.store.intake import drain, drain_is_due, take_files, waiting_files
from loop_dagster.store.open import Store, open_store
from loop_dagster.tables import FEEDBACK, SAMPLES

NOW = datetime(2026, 2, 28, 23, 59, 30, tzinfo=UTC)


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


def sample(number: int) -> dict[str, object]:
    return {
        "sample_id": str(uuid7()),
        "source": "support",
        "origin": "captured",
        "identity": f"{number:032x}",
        "import_id": None,
        "position": None,
        "conversation_id": None,
        "model": None,
        "messages": '[{"content":"Hello","role":"user"}]',
        "answer": '{"content":"Hi","role":"assistant"}',
        "tools": None,
        "text_key": number,
        "prompt_key": number,
        "answer_key": 1,
        "bytes": 60,
        "flag": None,
        "created_at": NOW,
        "expires_at": NOW + timedelta(days=30),
    }


def good(sample_id: object) -> dict[str, object]:
    empty = dict.fromkeys(("right_answer", "right_key", "right_bytes", "score", "reason"))
    known = {"feedback_id": str(uuid7()), "sample_id": sample_id, "verdict": "accepted", "origin": "here"}
    return {**empty, **known, "created_at": NOW}


def stored(store: Store) -> list[str]:
    return store.lake.scan(SAMPLES).select("identity").collect()["identity"].to_list()


def test_a_row_is_read_once_before_during_and_after_its_way_to_the_lake(store: Store) -> None:
    row = sample(1)
    store.inbox.put_sample(row, feedback=[good(row["sample_id"])])
    assert store.samples.count() == 1
    batch = store.inbox.open_batch()
    assert batch is not None
    store.lake.append(SAMPLES, store.inbox.rows_of(batch)[SAMPLES.name], transaction=("inbox", batch))
    assert store.samples.count() == 1  # in the lake and in the inbox at once
    assert drain(store, holder="test").batches == 1
    assert store.samples.count() == 1
    assert stored(store) == [f"{1:032x}"]
    assert store.lake.row_count(FEEDBACK) == 1
    assert drain(store, holder="test").batches == 0


def test_a_drain_is_due_by_age_by_number_and_after_a_kill(store: Store) -> None:
    assert not drain_is_due(store, NOW)
    store.inbox.put_sample(sample(1), now=NOW)
    assert not drain_is_due(store, NOW + timedelta(seconds=59))
    assert drain_is_due(store, NOW + timedelta(seconds=60))
    many = store.settings.model_copy(update={"drain_rows": 1})
    assert drain_is_due(open_store(many), NOW)
    store.inbox.open_batch()
    assert drain_is_due(store, NOW)


def test_a_registry_put_back_from_a_copy_loses_no_row(store: Store) -> None:
    store.inbox.put_sample(sample(1))
    for number in range(2, 5):
        drain(store, holder="test")
        store.inbox.put_sample(sample(number))
    drain(store, holder="test")
    with store.registry.write() as connection:  # the copy is from before the first drain
        connection.exec_driver_sql("DELETE FROM batches")
    store.inbox.put_sample(sample(9))
    drain(store, holder="test")
    assert sorted(stored(store)) == [f"{number:032x}" for number in (1, 2, 3, 4, 9)]


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_drain_is_finished_by_the_next_one(store: Store, home: Path, seed: int) -> None:
    rng = random.Random(seed)
    numbers = list(range(200))
    for number in numbers:
        row = sample(number)
        store.inbox.put_sample(row, feedback=[good(row["sample_id"])])
    for _ in range(3):
        child = os.fork()
        if child == 0:  # a process of its own, with stores of its own
            drain(open_store(Settings(home=home)), holder="killed")
            os._exit(0)
        time.sleep(rng.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with store.registry.write() as connection:  # as 30 s later, when the dead process's lease has ended
            connection.exec_driver_sql("DELETE FROM leases")
    drain(store, holder="test")
    assert sorted(stored(store)) == [f"{number:032x}" for number in numbers]
    assert store.lake.row_count(FEEDBACK) == len(numbers)
    assert store.inbox.pending().rows == 0


def test_a_file_in_the_intake_folder_is_imported_once_and_put_away(store: Store, home: Path) -> None:
    store.pipelines.create("Support", model_id="any")
    folder = home / "intake" / "support" / "good"
    folder.mkdir(parents=True)
    line = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
    path = folder / "first.jsonl"
    path.write_text(json.dumps(line) + "\n")
    later = datetime.now(UTC) + timedelta(seconds=10)
    assert waiting_files(store, datetime.now(UTC)) == []  # it may still be on its way into the folder
    assert waiting_files(store, later) == [path]
    (result,) = take_files(store, holder="test", now=later)
    assert (result["outcome"], result["imported"], result["reviewed"]) == ("done", 1, 1)
    assert waiting_files(store, later) == []
    kept = list((home / "intake" / "done" / "support").iterdir())
    assert [path.suffix for path in kept] == [".result"]  # what became of it, and nothing of its text
    assert "Hello" not in kept[0].read_text()
    assert store.samples.keys().feedback.select(pl.len()).collect().item() == 1


def test_a_file_for_no_pipeline_is_refused_with_a_sentence(store: Store, home: Path) -> None:
    folder = home / "intake" / "nobody"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text("{}\n")
    (result,) = take_files(store, holder="test", now=datetime.now(UTC) + timedelta(seconds=10))
    assert result["outcome"] == "refused"
    (note,) = (home / "intake" / "refused" / "nobody").glob("*.result")
    assert "nobody" in json.loads(note.read_text())["error"]["message"]
