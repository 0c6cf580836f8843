"""Deletion for good: after a purge no file of the installation holds the text, whatever was killed on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from loop_dagster.rules.states import FLOW
from loop_dagster.settings import Settings
from loop_dagster.store.giving import label_rows
from loop_dagster.store.intake import drain, import_for_pipeline
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.pages import sample_row
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.purging import drop_expired, erase_pipelines, purge_deleted, trim_selections
from loop_dagster.store.records import Attempt
from loop_dagster.store.work import run_folder, run_lease_name
from loop_dagster.tables import (
    ANSWERS,
    FEEDBACK,
    HOLDOUTS,
    JUDGEMENTS,
    LABELS,
    QUESTIONS,
    SAMPLES,
    SELECTIONS,
    TRAINING_SETS,
    Table,
)
from loop_dagster.tables.attempts import shown_id

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SECRET, RIGHT, KEPT = "the walrus wears galoshes", "no walrus owns shoes", "an otter floats by"


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


@pytest.fixture
def pipeline(store: Store) -> Pipeline:
    return store.pipelines.create("Zoo", model_id="any")


def imported(store: Store, pipeline: Pipeline, folder: Path, *questions: str, now: datetime = NOW) -> list[str]:
    """Ids of samples of these questions, each corrected."""
    path = folder / "rows.jsonl"
    rows = [{"prompt": one, "completion": f"Perhaps {one}", "correction": f"{RIGHT} {one}"} for one in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = import_for_pipeline(store, path, pipeline, holder="test", now=now)
    path.unlink()
    return list(found.trace_ids)


def texts(home: Path) -> Iterator[tuple[str, str]]:
    """Every file of an installation with what can be read in it: tables by their columns, all else as it lies there."""
    for path in home.rglob("*"):
        if path.suffix == ".parquet" and "checkpoint" not in path.name:
            frame = pl.read_parquet(path).select(pl.col(pl.String))
            yield path.name, "\n".join(str(value) for column in frame.iter_columns() for value in column)
        if path.is_file():
            yield path.name, path.read_bytes().decode("utf-8", "replace")


def holding(home: Path, text: str) -> set[str]:
    return {name for name, held in texts(home) if text in held}


def rows_of(table: Table, attempt: Attempt, rows: list[dict[str, Any]]) -> pl.DataFrame:
    own = {"attempt": attempt.key, "pipeline_id": attempt.pipeline_id, "attempt_no": attempt.attempt_no}
    blank: dict[str, Any] = {"id": "x", "key": 1, "text": "[]", "int": 1, "float": 1.0, "bool": False, "time": NOW}
    filled = [
        {
            column.name: (column.words or ("w",))[0] if column.kind == "word" else blank[column.kind]
            for column in table.columns
        }
        | own
        | row
        for row in rows
    ]
    return pl.DataFrame(filled, schema=table.schema)


def attempt_about(store: Store, pipeline: Pipeline, learned: str, held: str, *, state: str = "rejected") -> Attempt:
    """An attempt in `state` with copies of both samples, as its steps leave them."""
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    messages = store.lake.scan(SAMPLES).filter(pl.col("sample_id") == held).select("messages").collect().item()
    for table, rows in (
        (TRAINING_SETS, [{"sample_id": learned, "messages": SECRET, "right_answer": RIGHT}]),
        (HOLDOUTS, [{"sample_id": held}]),
        (QUESTIONS, [{"sample_id": held, "ordinal": 0, "messages": messages}, {"sample_id": "other", "ordinal": 1}]),
        (ANSWERS, [{"sample_id": held, "side": side} for side in ("candidate", "incumbent")]),
        (JUDGEMENTS, [{"sample_id": held}]),
    ):
        store.lake.replace_attempt(table, attempt.key, rows_of(table, attempt, rows))
    ordinary = FLOW[1 : FLOW.index("reported") + 1]
    for step in ordinary:
        attempt = store.attempts.move(attempt.run_id, step, "On.", now=NOW)
        if step == state:
            return attempt
    return store.attempts.move(attempt.run_id, state, "Ended.", now=NOW)  # type: ignore[arg-type]


def ids_in(store: Store, table: Table) -> set[str | None]:
    return set(store.lake.scan(table).select("sample_id").collect()["sample_id"])


def test_nothing_of_a_deleted_sample_is_left_in_any_file(store: Store, pipeline: Pipeline, home: Path, tmp_path: Path):
    gone, other = imported(store, pipeline, tmp_path, SECRET, KEPT)
    row, _ = sample_row(
        source="zoo",
        identity="i",
        messages=[{"role": "user", "content": f"and {SECRET} again"}],
        answer={"role": "assistant", "content": SECRET},
        tools=None,
        flag=None,
        now=NOW,
        expires_at=NOW + timedelta(days=30),
    )
    waiting = str(row["sample_id"])
    store.inbox.put_sample(row, now=NOW)
    assert holding(home, SECRET)
    store.inbox.add_tombstones([gone, waiting], now=NOW)
    assert {*store.samples.whole().samples.collect()["sample_id"]} == {other}  # at once, for every reader

    purged = purge_deleted(store, holder="test")

    assert (purged.samples, purged.waiting) == (2, 0)
    assert holding(home, SECRET) == set()
    assert store.inbox.tombstones() == ()
    for table in (SAMPLES, FEEDBACK, LABELS):
        assert ids_in(store, table) == {other}
    assert holding(home, KEPT)
    assert purge_deleted(store, holder="test").samples == 0


def test_names_that_came_with_a_deleted_sample_are_in_no_file_either(store: Store, home: Path):
    """The log keeps minima and maxima of its commits for good, so no column that holds such a name may have them."""
    names = {"source": "zoo-of-otto", "model": "otto/small", "conversation_id": "walrus-otto"}
    row, _ = sample_row(
        identity="i",
        messages=[{"role": "user", "content": "Hello?"}],
        answer={"role": "assistant", "content": "Yes."},
        tools=None,
        flag=None,
        now=NOW,
        expires_at=NOW + timedelta(days=30),
        **names,
    )
    gone = str(row["sample_id"])
    store.inbox.put_sample(row, labels=label_rows(gone, now=NOW, labels=["tag-otto"], parent="otto-group"), now=NOW)
    drain(store, holder="test")
    every = (*names.values(), "tag-otto", "otto-group")
    assert all(holding(home, name) for name in every)
    store.inbox.add_tombstones([gone], now=NOW)
    purge_deleted(store, holder="test")
    left = {name: holding(home, name) for name in every}
    assert not any(left.values()), left


def test_training_sets_lose_it_and_a_finished_report_keeps_a_copy_that_names_nobody(
    store: Store, pipeline: Pipeline, home: Path, tmp_path: Path
) -> None:
    learned, held = imported(store, pipeline, tmp_path, SECRET, KEPT)
    attempt = attempt_about(store, pipeline, learned, held)
    store.inbox.add_tombstones([learned, held], now=NOW)
    purge_deleted(store, holder="test")
    assert holding(home, SECRET) == set()
    assert ids_in(store, TRAINING_SETS) == set()
    assert ids_in(store, HOLDOUTS) == {None}
    questions = store.lake.scan(QUESTIONS).filter(pl.col("attempt") == attempt.key).sort("ordinal").collect()
    assert KEPT in questions["messages"][0]
    assert [shown_id(one) for one in questions["sample_id"]] == [None, "other"]
    # The copies still belong together, so that the report can be read and its decision derived again.
    assert ids_in(store, ANSWERS) == ids_in(store, JUDGEMENTS) == {questions["sample_id"][0]}


@pytest.mark.parametrize("state", ["training", "candidate_running", "reported"])
def test_a_step_under_way_keeps_its_questions_until_it_has_ended(
    store: Store, pipeline: Pipeline, home: Path, tmp_path: Path, state: str
) -> None:
    learned, held = imported(store, pipeline, tmp_path, SECRET, KEPT)
    attempt = attempt_about(store, pipeline, learned, held, state=state)
    store.inbox.add_tombstones([learned, held], now=NOW)
    purged = purge_deleted(store, holder="test")
    assert (purged.samples, purged.waiting) == (1, 1)
    assert store.inbox.tombstones() == (held,)
    assert holding(home, SECRET) == set()
    assert held in ids_in(store, QUESTIONS)
    store.attempts.request_cancel(attempt.run_id, now=NOW)
    assert purge_deleted(store, holder="test").samples == 1
    assert held not in ids_in(store, QUESTIONS)
    assert store.inbox.tombstones() == ()


def test_what_a_step_has_in_its_private_folder_goes_when_the_step_has_ended(
    store: Store, pipeline: Pipeline, home: Path, tmp_path: Path
) -> None:
    learned, held = imported(store, pipeline, tmp_path, SECRET, KEPT)
    attempt = attempt_about(store, pipeline, learned, held, state="training")
    store.lake.replace_attempt(
        SELECTIONS, attempt.key, rows_of(SELECTIONS, attempt, [{"sample_id": learned, "role": "train"}])
    )
    folder = store.settings.work / attempt.run_id / "train"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text(SECRET)
    store.inbox.add_tombstones([learned], now=NOW)
    purged = purge_deleted(store, holder="test")
    assert (purged.samples, purged.waiting) == (0, 1)
    store.attempts.request_cancel(attempt.run_id, now=NOW)
    assert purge_deleted(store, holder="test").samples == 1
    assert holding(home, SECRET) == set()


def test_a_run_that_counts_keeps_its_folder_only_while_its_process_lives(
    store: Store, pipeline: Pipeline, home: Path, tmp_path: Path
) -> None:
    [gone] = imported(store, pipeline, tmp_path, SECRET)
    folder = run_folder(store, "some-run") / "zoo"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text(SECRET)
    store.inbox.add_tombstones([gone], now=NOW)
    with store.leases.hold(run_lease_name("some-run")):
        assert purge_deleted(store, holder="test").waiting == 1
        assert holding(home, SECRET) == {"rows.jsonl"}
    assert purge_deleted(store, holder="test").samples == 1
    assert holding(home, SECRET) == set()


def test_expired_samples_go_with_what_was_said_about_them_and_copies_stay(
    store: Store, pipeline: Pipeline, home: Path, tmp_path: Path
) -> None:
    old = datetime(2027, 2, 28, 23, 59, tzinfo=UTC)
    [expired] = imported(store, pipeline, tmp_path, SECRET, now=old)
    [young] = imported(store, pipeline, tmp_path, KEPT, now=old + timedelta(minutes=2))
    over = old + timedelta(days=365)  # through the leap day of 2028
    assert drop_expired(store, over - timedelta(microseconds=1), holder="test") == 0
    attempt_about(store, pipeline, expired, expired)
    assert drop_expired(store, over, holder="test") == 1
    for table in (SAMPLES, FEEDBACK, LABELS):
        assert ids_in(store, table) == {young}
    assert ids_in(store, TRAINING_SETS) == {expired}  # copies already made keep it
    assert drop_expired(store, over, holder="test") == 0


def test_a_deleted_pipeline_leaves_no_rows_of_its_attempts_but_its_samples(
    store: Store, pipeline: Pipeline, tmp_path: Path
) -> None:
    other = store.pipelines.create("Farm", model_id="any")
    learned, held = imported(store, pipeline, tmp_path, SECRET, KEPT)
    attempt_about(store, pipeline, learned, held)
    kept = attempt_about(store, other, learned, held)
    store.pipelines.delete(pipeline.tag)
    rows = erase_pipelines(store, holder="test")
    assert rows["training_sets"] == rows["judgements"] == 1
    for table in (TRAINING_SETS, HOLDOUTS, QUESTIONS, ANSWERS, JUDGEMENTS):
        assert set(store.lake.scan(table).collect()["attempt"]) == {kept.key}
    assert ids_in(store, SAMPLES) == {learned, held}
    assert erase_pipelines(store, holder="test") == {}


def _purge_and_drain(home: str) -> None:
    store = open_store(Settings(home=Path(home)))
    purge_deleted(store, holder="test")
    drain(store, holder="test")


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_purge_is_finished_by_the_next_and_takes_nothing_else(
    store: Store, pipeline: Pipeline, home: Path, tmp_path: Path, processes: ForkServerContext, seed: int
) -> None:
    rng = random.Random(seed)
    learned, held, other = imported(store, pipeline, tmp_path, SECRET, KEPT, "a third one")
    attempt_about(store, pipeline, learned, held)
    store.inbox.add_tombstones([learned, held], now=NOW)
    child = processes.Process(target=_purge_and_drain, args=(str(home),))
    child.start()
    time.sleep(rng.uniform(0.05, 0.6))
    if child.pid is not None and child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert {*store.samples.whole().samples.collect()["sample_id"]} == {other}
    store.leases.revoke("lake/default")  # as its time running out would
    for lease in store.leases.expired():
        store.leases.revoke(lease.name)
    store.leases.revoke(f"attempt/{store.attempts.list()[0].run_id}")
    purge_deleted(store, holder="test")
    assert holding(home, SECRET) == set()
    assert store.inbox.tombstones() == ()
    for table in (SAMPLES, FEEDBACK, LABELS):
        assert ids_in(store, table) == {other}
    renamed = store.lake.scan(QUESTIONS).sort("ordinal").collect()["sample_id"]
    assert [shown_id(one) for one in renamed] == [None, "other"]
    assert ids_in(store, ANSWERS) == ids_in(store, JUDGEMENTS) == {renamed[0]}


def test_older_attempts_keep_what_they_took_and_only_numbers_of_the_rest(store: Store, pipeline: Pipeline) -> None:
    keys = []
    for _ in range(5):
        attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
        assert attempt is not None
        rows = [{"sample_id": role, "role": role} for role in ("train", "holdout", "left_out")]
        store.lake.replace_attempt(SELECTIONS, attempt.key, rows_of(SELECTIONS, attempt, rows))
        store.attempts.fail(attempt.run_id, code="X", sentence="Ended.", now=NOW)
        keys.append(attempt.key)
    assert trim_selections(store, holder="test") == 2
    left = store.lake.scan(SELECTIONS).filter(pl.col("role") == "left_out").collect()
    assert sorted(left["attempt"]) == keys[2:]
    assert store.lake.scan(SELECTIONS).filter(pl.col("role") == "train").collect().height == 5
    assert trim_selections(store, holder="test") == 0
