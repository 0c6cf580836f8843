"""Attempts: exactly one at a time over threads, processes and kills; moves with their timeline; claims; cancelling."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from loop_dagster.errors import BadRequest, Conflict, LeaseLost, MoveNotAllowed, NotFound
from loop_dagster.rules.states import FLOW, STATES, TERMINAL, followers
from loop_dagster.store.attempts import Attempt, Attempts
from loop_dagster.store.leases import Leases
from loop_dagster.store.pipelines import Pipeline, Pipelines
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import attempt_events
from loop_dagster.store.schema import attempts as attempts_table

NOW = datetime(2026, 12, 1, 8, tzinfo=UTC)


@pytest.fixture
def pipeline(registry: Registry) -> Pipeline:
    return Pipelines(registry).create("Support replies", model_id="base", now=NOW)


@pytest.fixture
def store(registry: Registry) -> Attempts:
    return Attempts(registry)


def start(store: Attempts, pipeline: Pipeline, **options: Any) -> Attempt:
    attempt = store.open_attempt(pipeline.pipeline_id, trigger="data", frozen={"model": "base"}, now=NOW, **options)
    assert attempt is not None
    return attempt


def walk(store: Attempts, attempt: Attempt, to: str) -> Attempt:
    for state in FLOW[FLOW.index(attempt.state) + 1 : FLOW.index(to) + 1]:  # type: ignore[arg-type]
        attempt = store.move(attempt.run_id, state, f"It is {state}.", now=NOW)
    return attempt


# opening


def test_numbers_key_and_what_is_frozen(store: Attempts, pipeline: Pipeline) -> None:
    first = start(store, pipeline, sentence="1,100 samples are there.", actor="loop")
    assert (first.attempt_no, first.key) == (1, f"{pipeline.pipeline_id}/0001")
    assert (first.state, first.since, first.created_at, first.try_no) == ("built", NOW, NOW, 1)
    assert (first.frozen, first.counts, first.revision) == ({"model": "base"}, {}, 1)
    assert store.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW) is None
    store.fail(first.run_id, code="X", sentence="It broke.", now=NOW)
    second = start(store, pipeline)
    assert (second.attempt_no, second.run_id > first.run_id) == (2, True)
    assert store.get(first.key).run_id == store.get(first.run_id).run_id == first.run_id
    assert store.by_number(pipeline.pipeline_id, 2) == second
    assert [attempt.attempt_no for attempt in store.list(pipeline.pipeline_id)] == [1, 2]
    assert store.active() == (second,)
    assert store.list(states=["failed"])[0].run_id == first.run_id
    assert store.list(limit=1, offset=1) == (second,)
    assert store.newest() == {pipeline.pipeline_id: (2, "built")}
    assert store.counts() == {pipeline.pipeline_id: {"failed": 1, "built": 1}}


def test_a_number_alone_is_enough_while_one_pipeline_has_it(
    registry: Registry, store: Attempts, pipeline: Pipeline
) -> None:
    first = start(store, pipeline)
    assert store.find("1") == store.find("0001") == first
    with pytest.raises(NotFound):
        store.find("2")
    other = Pipelines(registry).create("Returns", model_id="base", now=NOW)
    start(store, other)
    with pytest.raises(NotFound, match=f"{first.key}, {other.pipeline_id}/0001"):
        store.find("1")


def test_every_active_state_holds_the_next_one(store: Attempts) -> None:
    for state in (state for state in STATES if state not in TERMINAL):
        pipeline = Pipelines(store.registry).create(state, model_id="base", now=NOW)
        first = start(store, pipeline)
        with store.registry.write() as connection:
            mine = attempts_table.c.run_id == first.run_id
            connection.execute(sa.update(attempts_table).where(mine).values(state=state))
        assert store.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW) is None, state
        store.move(first.run_id, "superseded", "It is.", now=NOW)
        assert store.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW) is not None, state


def test_a_repeated_reason_opens_no_second_attempt(store: Attempts, pipeline: Pipeline) -> None:
    """A tick that looked before the first attempt ended, and asks after it did."""
    first = start(store, pipeline, after=0)
    store.fail(first.run_id, code="X", sentence="It broke.", now=NOW)
    assert store.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW, after=0) is None
    assert start(store, pipeline, after=1).attempt_no == 2


def test_paused_edited_deleted_unknown(store: Attempts, pipeline: Pipeline) -> None:
    pipelines = Pipelines(store.registry)
    pipelines.pause(pipeline.tag)
    assert store.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW) is None
    pipelines.resume(pipeline.tag)
    pipelines.edit(pipeline.tag, settings={"max_versions": 2})
    assert store.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW, revision=1) is None
    assert start(store, pipeline, revision=2).revision == 2
    for wrong in ("nothing-0000", ""):
        with pytest.raises(NotFound):
            store.open_attempt(wrong, trigger="data", frozen={}, now=NOW)
    with pytest.raises(BadRequest, match="trigger"):
        store.open_attempt(pipeline.pipeline_id, trigger="whim", frozen={}, now=NOW)  # type: ignore[arg-type]


def open_once(url: str, pipeline_id: str, go: str, results: str) -> None:
    store = Attempts(Registry(url))
    with store.registry.read():
        pass
    while not Path(go).exists():
        time.sleep(0.001)
    attempt = store.open_attempt(pipeline_id, trigger="data", frozen={}, now=NOW, after=0)
    if attempt is not None:
        with Path(results).open("a") as out:
            out.write(f"{attempt.run_id}\n")


def test_threads_and_processes_open_exactly_one(
    store: Attempts, pipeline: Pipeline, processes: ForkServerContext, tmp_path: Path
) -> None:
    go, results = tmp_path / "go", tmp_path / "results"
    results.touch()
    work = (store.registry.url, pipeline.pipeline_id, str(go), str(results))
    children = [processes.Process(target=open_once, args=work) for _ in range(4)]
    threads = [threading.Thread(target=open_once, args=work) for _ in range(8)]
    for worker in (*children, *threads):
        worker.start()
    time.sleep(0.3)
    go.touch()
    for worker in (*children, *threads):
        worker.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    opened = results.read_text().split()
    assert len(opened) == 1
    assert [attempt.run_id for attempt in store.list()] == opened
    assert len(store.timeline(opened[0])) == 1


def open_and_end_until_killed(url: str, pipeline_id: str, acknowledged: str, seed: int) -> None:
    store = Attempts(Registry(url))
    out = os.open(acknowledged, os.O_WRONLY | os.O_APPEND)
    rng = random.Random(seed)
    while True:
        attempt = store.open_attempt(pipeline_id, trigger="data", frozen={}, now=NOW)
        if attempt is not None:
            os.write(out, f"opened {attempt.run_id}\n".encode())
        for active in store.active():
            state = rng.choice(followers(active.state))
            try:
                store.move(active.run_id, state, "On.", now=NOW, expect=active.state)
            except MoveNotAllowed:
                continue  # another process was first
            os.write(out, f"moved {active.run_id} {state}\n".encode())


def test_killed_openers_and_movers_leave_it_consistent(
    store: Attempts, pipeline: Pipeline, processes: ForkServerContext, tmp_path: Path
) -> None:
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()
    rng = random.Random(7)
    for seed in range(4):
        work = (store.registry.url, pipeline.pipeline_id, str(acknowledged), seed)
        pair = [processes.Process(target=open_and_end_until_killed, args=(*work[:3], seed + other)) for other in (0, 9)]
        enough = acknowledged.stat().st_size + rng.randrange(500, 2_000)  # 10 to 40 acknowledged writes
        for child in pair:
            child.start()
        give_up = time.monotonic() + 60
        while acknowledged.stat().st_size < enough:
            assert time.monotonic() < give_up
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        for child in pair:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
    stored = store.list()
    lines = [line.split() for line in acknowledged.read_text().splitlines()]
    assert len(lines) > 20
    assert {line[1] for line in lines} <= {attempt.run_id for attempt in stored}
    assert [attempt.attempt_no for attempt in stored] == list(range(1, len(stored) + 1))
    assert sum(not attempt.ended for attempt in stored) <= 1
    for attempt in stored:
        timeline = store.timeline(attempt.run_id)
        assert [event.seq for event in timeline] == list(range(1, len(timeline) + 1))
        assert timeline[-1].to_state == attempt.state
        assert all(e.from_state is None or e.to_state in followers(e.from_state) for e in timeline)
        said = [line[2] for line in lines if line[:2] == ["moved", attempt.run_id]]
        assert set(said) <= {event.to_state for event in timeline}


# moving


def test_a_move_and_its_event_are_one(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    later = NOW + timedelta(minutes=1)
    moved = store.move(attempt.run_id, "registering", "1,000 rows.", now=later, actor="key 1", counts={"train": 1000})
    assert (moved.state, moved.since, moved.reason, moved.counts) == (
        "registering",
        later,
        "1,000 rows.",
        {"train": 1000},
    )
    first, second = store.timeline(attempt.run_id)
    assert (first.seq, first.from_state, first.to_state, first.actor) == (1, None, "built", "loop")
    assert (second.seq, second.from_state, second.to_state) == (2, "built", "registering")
    assert (second.at, second.sentence, second.actor) == (later, "1,000 rows.", "key 1")


def test_moves_that_are_not_allowed_change_nothing(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    with pytest.raises(MoveNotAllowed):
        store.move(attempt.run_id, "promoted", "No.", now=NOW, train_rows=3)
    with pytest.raises(MoveNotAllowed):
        store.move(attempt.run_id, "registering", "No.", now=NOW, expect=("training", "evaluating"))
    with pytest.raises(TypeError, match="no such fields to set: state_of_mind"):
        store.move(attempt.run_id, "registering", "No.", now=NOW, state_of_mind="calm")
    with pytest.raises(NotFound):
        store.move("nobody", "registering", "No.", now=NOW)
    with pytest.raises(NotFound):
        store.timeline("nobody")
    assert store.get(attempt.run_id) == attempt
    assert len(store.timeline(attempt.run_id)) == 1


def test_of_many_movers_one_wins(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    won: list[Attempt] = []
    barrier = threading.Barrier(6)

    def race() -> None:
        barrier.wait()
        with contextlib.suppress(MoveNotAllowed):
            won.append(store.move(attempt.run_id, "registering", "Mine.", now=NOW, expect="built"))

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(store.timeline(attempt.run_id)) == 2


def test_tries_count_per_step(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    assert store.next_try(attempt.run_id, expect_try=1, now=NOW).try_no == 2
    assert store.next_try(attempt.run_id, expect_try=1, now=NOW).try_no == 2  # seen by two, counted once
    attempt = walk(store, attempt, "training")
    assert attempt.try_no == 2
    assert walk(store, attempt, "checkpoint_ready").try_no == 1


def test_failures_in_a_row_count_until_an_adapter_is_kept(store: Attempts, pipeline: Pipeline) -> None:
    def failures() -> int:
        return Pipelines(store.registry).get(pipeline.tag).failures

    for expected in (1, 2):
        store.fail(start(store, pipeline).run_id, code="X", sentence="It broke.", now=NOW)
        assert failures() == expected
    attempt = walk(store, start(store, pipeline), "training")
    store.note(attempt.run_id, adapter_digest="d")
    assert failures() == 2
    store.fail(attempt.run_id, code="X", sentence="It broke.", now=NOW)
    assert failures() == 0


def test_fail_says_once_how_it_ended(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    failed = store.fail(attempt.run_id, code="DISK_FULL", sentence="The disk is full.", now=NOW)
    assert (failed.state, failed.error_code, failed.reason) == ("failed", "DISK_FULL", "The disk is full.")
    assert failed.finished_at == NOW
    assert store.timeline(attempt.run_id)[-1].error_code == "DISK_FULL"
    assert store.fail(attempt.run_id, code="OTHER", sentence="No.", now=NOW) == failed
    assert len(store.timeline(attempt.run_id)) == 2


def test_note(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    noted = store.note(attempt.run_id, report={"wins": 3}, train_rows=1000, verdict="better")
    assert (noted.report, noted.train_rows, noted.verdict, noted.state) == ({"wins": 3}, 1000, "better", "built")
    assert store.note(attempt.run_id) == noted
    store.request_cancel(attempt.run_id, now=NOW)
    with pytest.raises(Conflict, match="has ended: its train_rows cannot"):
        store.note(attempt.run_id, train_rows=1)
    assert store.note(attempt.run_id, gpu_seconds=12).gpu_seconds == 12


# claims


def test_one_claim_per_try(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    assert store.claim(attempt.run_id, "training", 1) is None
    assert store.claim_step(attempt.run_id, "training", 1, "run-a", now=NOW)
    assert not store.claim_step(attempt.run_id, "training", 1, "run-b", now=NOW)
    assert store.claim_step(attempt.run_id, "training", 1, "run-a", now=NOW)  # the same run asks again
    assert not store.claim_step(attempt.run_id, "comparison", 1, "run-a", now=NOW)  # it needs another step
    assert not store.claim_step(attempt.run_id, "training", 2, "run-a", now=NOW)  # and another try
    claim = store.claim(attempt.run_id, "training", 1)
    assert claim is not None
    assert (claim.dagster_run_id, claim.claimed_at, claim.ended_at) == ("run-a", NOW, None)
    assert store.end_step(attempt.run_id, "training", 1, "failed", now=NOW)
    assert not store.end_step(attempt.run_id, "training", 1, "done", now=NOW)
    assert not store.claim_step(attempt.run_id, "training", 1, "run-a", now=NOW)
    ended = store.claim(attempt.run_id, "training", 1)
    assert ended is not None
    assert (ended.outcome, ended.ended_at) == ("failed", NOW)


def test_a_late_run_of_an_old_try_claims_nothing(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    store.next_try(attempt.run_id, expect_try=1, now=NOW)
    assert not store.claim_step(attempt.run_id, "training", 1, "late", now=NOW)
    assert store.claim_step(attempt.run_id, "training", 2, "new", now=NOW)


def test_a_lost_try_ends_as_lost_and_loses_its_lease(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    leases = Leases(store.registry)
    store.claim_step(attempt.run_id, "training", 1, "run-a", now=NOW)
    lease = leases.take(f"attempt/{attempt.run_id}")
    store.next_try(attempt.run_id, expect_try=1, now=NOW)
    claim = store.claim(attempt.run_id, "training", 1)
    assert claim is not None
    assert claim.outcome == "lost"
    with pytest.raises(LeaseLost, match="revoked"):
        leases.beat(lease.name, lease.token)


def test_many_runs_claim_once(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    won: list[int] = []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        barrier.wait()
        if store.claim_step(attempt.run_id, "training", 1, f"run-{number}", now=NOW):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


# cancelling


def test_cancel_ends_it_and_stops_its_process(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    store.claim_step(attempt.run_id, "training", 1, "run-a", now=NOW)
    leases = Leases(store.registry)
    lease = leases.take(f"attempt/{attempt.run_id}")
    cancelled = store.request_cancel(attempt.run_id, now=NOW, sentence="Not needed.", actor="key 1")
    assert (cancelled.state, cancelled.cancel_requested, cancelled.reason) == ("cancelled", True, "Not needed.")
    assert store.timeline(attempt.run_id)[-1].actor == "key 1"
    with pytest.raises(LeaseLost, match="revoked"):
        leases.beat(lease.name, lease.token)
    with pytest.raises(MoveNotAllowed):
        store.move(attempt.run_id, "registering", "Late.", now=NOW)
    assert store.request_cancel(attempt.run_id, now=NOW) == cancelled
    assert start(store, pipeline).attempt_no == 2
    store.fail(store.active()[0].run_id, code="X", sentence="It broke.", now=NOW)
    with pytest.raises(Conflict, match="nothing to cancel"):
        store.request_cancel(store.by_number(pipeline.pipeline_id, 2).run_id, now=NOW)


def test_recent_has_the_newest_and_all_active(store: Attempts, pipeline: Pipeline) -> None:
    other = Pipelines(store.registry).create("Sales", model_id="base", now=NOW)
    old = start(store, other)
    for minute in range(1, 4):
        later = NOW + timedelta(minutes=minute)
        attempt = store.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=later)
        assert attempt is not None
        store.fail(attempt.run_id, code="X", sentence="It broke.", now=later)
    assert [attempt.key for attempt in store.recent(1)] == [old.key, f"{pipeline.pipeline_id}/0003"]
    assert len(store.recent()) == 4


def test_events_belong_to_one_workspace(store: Attempts, pipeline: Pipeline) -> None:
    attempt = start(store, pipeline)
    other = Attempts(Registry(store.registry.url, "other"))
    for call in (lambda: other.get(attempt.run_id), lambda: other.timeline(attempt.run_id)):
        with pytest.raises(NotFound):
            call()
    assert other.active() == ()
    with store.registry.read() as connection:
        assert connection.execute(sa.select(attempt_events.c.workspace)).scalars().all() == ["default"]
