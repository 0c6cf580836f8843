"""Runs of attempts whose process is gone, on a real instance and real stores: they end, and no living one does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster import DagsterEvent, DagsterEventType
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.storage.runs.sql_run_storage import SqlRunStorage
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

from assets import steps
from loop_dagster.jobs import MACHINE_TAG, STEP_JOBS
from loop_dagster.rules.states import FLOW, TrainingRunState, step_of
from loop_dagster.settings import Settings
from loop_dagster.store.attempts import lease_name
from loop_dagster.store.leases import Leases
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.records import Attempt
from resources import StoreResource
from sensors.intake import intake as intake_sensor
from sensors.progress import progress as progress_sensor
from sensors.scoring import scoring as scoring_sensor

STARTED, STARTING = DagsterEventType.PIPELINE_START, DagsterEventType.PIPELINE_STARTING
CANCELING = DagsterEventType.PIPELINE_CANCELING
#: What Dagster wants to know of a run that waits in its queue: where its code is.
CODE = RemoteRepositoryOrigin(
    code_location_origin=ManagedGrpcPythonEnvCodeLocationOrigin(
        loadable_target_origin=LoadableTargetOrigin(module_name="loop_dagster.definitions"), location_name="loop"
    ),
    repository_name="__repository__",
)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """An instance with the queue that an installation has."""
    queue = yaml.safe_load((Path(__file__).parents[2] / "dagster.yaml").read_text())["run_coordinator"]
    with dg.instance_for_test(overrides={"run_coordinator": queue}) as instance:
        yield instance


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


def attempt_in(store: Store, name: str, state: TrainingRunState, *, since: datetime) -> Attempt:
    """The first attempt of a new pipeline; it reached `state` at `since`."""
    pipeline = store.pipelines.create(name, model_id="any")
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=since)
    assert attempt is not None
    for step in FLOW[1 : FLOW.index(state) + 1]:
        attempt = store.attempts.move(attempt.run_id, step, "On.", now=since)
    return attempt


class Books:
    """What Dagster has recorded about runs of attempts."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance

    def run(
        self, attempt: Attempt, job: str, event: DagsterEventType | None, at: datetime, *, by_hand: bool = False
    ) -> str:
        """A run that read so since `at`; without an event it waits in the queue."""
        tags = {"dagster/partition": attempt.key, **(MACHINE_TAG if job in ("training", "comparison") else {})}
        if not by_hand:
            tags |= {steps.ATTEMPT_TAG: attempt.key, steps.STEP_TAG: job, steps.TRY_TAG: str(attempt.try_no)}
        queued = dg.DagsterRun(
            job_name=job, tags=tags, status=dg.DagsterRunStatus.QUEUED, remote_job_origin=RemoteJobOrigin(CODE, job)
        )
        run = self.instance.add_run(queued)
        if event is not None:
            self.instance.run_storage.handle_run_event(run.run_id, DagsterEvent(event.value, job), at)
        return run.run_id

    def status(self, run_id: str) -> dg.DagsterRunStatus:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status

    def ended(self, run_id: str) -> bool:
        return self.status(run_id) == dg.DagsterRunStatus.FAILURE

    def rewrite(self, columns: str) -> None:
        """Change what is recorded of every run."""
        storage = self.instance.run_storage
        assert isinstance(storage, SqlRunStorage)
        with storage.connect() as connection:
            connection.exec_driver_sql(f"UPDATE runs SET {columns}")

    def next_in_queue(self) -> list[str]:
        """What the daemon would start now."""
        queue, limits = QueuedRunCoordinatorDaemon(interval_seconds=1), self.instance.get_concurrency_config()
        return [run.run_id for run in queue._get_runs_to_dequeue(self.instance, limits, None)]


@pytest.fixture
def books(instance: dg.DagsterInstance) -> Books:
    return Books(instance)


def tick(store: Store, books: Books) -> dg.SensorResult:
    context = dg.build_sensor_context(
        instance=books.instance, resources={"store": StoreResource(home=str(store.settings.root))}
    )
    found = progress_sensor(context)
    assert isinstance(found, dg.SensorResult)
    return found


def beaten(store: Store, attempt: Attempt, run_id: str, at: datetime) -> None:
    """The attempt's lease as a run left it that was last heard of at `at`."""
    Leases(store.registry, clock=lambda: at).take(lease_name(attempt.run_id), holder=f"run {run_id}")


def ago(**of: float) -> datetime:
    return datetime.now(UTC) - timedelta(**of)


def killed_comparison(store: Store, books: Books, name: str = "Support") -> tuple[Attempt, str]:
    """A comparison whose process was killed at the moment at which its attempt read `reported`, an hour ago."""
    attempt = attempt_in(store, name, "checkpoint_ready", since=ago(hours=3))
    run_id = books.run(attempt, "comparison", STARTED, ago(hours=2))
    assert store.attempts.claim_step(attempt.run_id, "comparison", attempt.try_no, run_id, now=ago(hours=2))
    beaten(store, attempt, run_id, ago(hours=1))
    for state in FLOW[FLOW.index("checkpoint_ready") + 1 : FLOW.index("reported") + 1]:
        attempt = store.attempts.move(attempt.run_id, state, "On.", now=ago(hours=1))
    return attempt, run_id


def test_a_run_killed_after_its_attempt_moved_on_ends_and_the_next_in_the_queue_starts(
    store: Store, books: Books
) -> None:
    attempt, dead = killed_comparison(store, books)
    other = attempt_in(store, "Other", "built", since=ago(hours=1))
    waiting = books.run(other, "training", None, ago(hours=1))
    assert books.next_in_queue() == []  # one machine, and the dead run counts as at work on it
    found = tick(store, books)
    assert books.ended(dead)
    assert books.next_in_queue() == [waiting]
    assert [one.run_key for one in found.run_requests or []] == [f"{attempt.key}:promotion:1"]
    assert [tick(store, books) and books.status(waiting) for _ in range(2)] == [dg.DagsterRunStatus.QUEUED] * 2


@pytest.mark.parametrize("event", [STARTED, STARTING, CANCELING])
def test_an_attempt_cancelled_while_everything_was_down_leaves_no_run(
    store: Store, books: Books, event: DagsterEventType
) -> None:
    attempt = attempt_in(store, "Support", "training", since=ago(hours=2))
    dead = books.run(attempt, "training", event, ago(hours=2))
    store.attempts.claim_step(attempt.run_id, "training", 1, dead, now=ago(hours=2))
    beaten(store, attempt, dead, ago(hours=1))
    store.attempts.request_cancel(attempt.run_id, now=ago(minutes=5))
    said = tick(store, books).skip_reason
    assert books.ended(dead)
    assert isinstance(said, dg.SkipReason)
    assert str(said.skip_message) == f"Run {dead[:8]} (training): its process is gone, so it was ended."
    last = books.instance.all_logs(dead)[-1]
    assert last.dagster_event is not None
    assert "Its process is gone" in str(last.dagster_event.message)


def test_a_cancelled_run_has_a_moment_to_stop(store: Store, books: Books) -> None:
    attempt = attempt_in(store, "Support", "training", since=ago(hours=2))
    stopping = books.run(attempt, "training", STARTED, ago(hours=2))
    store.attempts.claim_step(attempt.run_id, "training", 1, stopping, now=ago(hours=2))
    store.attempts.request_cancel(attempt.run_id, now=ago(seconds=20))
    tick(store, books)
    assert not books.ended(stopping)


def test_a_live_run_of_a_step_that_was_left_is_not_ended(store: Store, books: Books) -> None:
    attempt = attempt_in(store, "Support", "reported", since=ago(hours=1))
    alive = books.run(attempt, "comparison", STARTED, ago(hours=2))
    lease = steps._lease_of(alive, store, attempt)
    try:
        tick(store, books)
        assert not books.ended(alive)
    finally:
        steps._release(alive)
    assert lease.lease.holder == f"run {alive}"
    tick(store, books)
    assert books.ended(alive)


def test_the_lease_of_the_next_step_keeps_no_dead_run(store: Store, books: Books) -> None:
    attempt, dead = killed_comparison(store, books)
    alive = books.run(attempt, "promotion", STARTED, ago(minutes=10))
    store.attempts.claim_step(attempt.run_id, "promotion", attempt.try_no, alive, now=ago(minutes=10))
    lease = steps._lease_of(alive, store, attempt)
    try:
        tick(store, books)
        lease.verify()
    finally:
        steps._release(alive)
    assert (books.ended(dead), books.ended(alive)) == (True, False)


def test_a_run_that_has_just_closed_its_step_may_come_to_its_end(store: Store, books: Books) -> None:
    attempt = attempt_in(store, "Support", "reported", since=ago(hours=1))
    run_id = books.run(attempt, "promotion", STARTED, ago(hours=1))
    store.attempts.claim_step(attempt.run_id, "promotion", attempt.try_no, run_id, now=ago(hours=1))
    store.attempts.move(attempt.run_id, "rejected", "No.", now=ago(hours=1))
    store.attempts.end_step(attempt.run_id, "promotion", attempt.try_no, "done", now=ago(seconds=20))
    tick(store, books)
    assert not books.ended(run_id)
    with store.registry.write() as connection:
        connection.exec_driver_sql("UPDATE attempt_steps SET ended_at = datetime(ended_at, '-2 minutes')")
    tick(store, books)
    assert books.ended(run_id)


@pytest.mark.parametrize(("event", "age"), [(STARTED, 60), (CANCELING, 60), (STARTING, 150), (None, 7200)], ids=str)
def test_a_young_run_and_a_queued_one_are_left_alone(
    store: Store, books: Books, event: DagsterEventType | None, age: int
) -> None:
    attempt = attempt_in(store, "Support", "reported", since=ago(hours=3))
    store.attempts.request_cancel(attempt.run_id, now=ago(hours=2))
    young = books.run(attempt, "comparison", event, ago(seconds=age))
    before = books.status(young)
    tick(store, books)
    assert books.status(young) == before


@pytest.mark.parametrize("job", ["training", "comparison", "promotion", "approve", "reject", "test_again"])
def test_a_run_that_a_person_started_ends_too(store: Store, books: Books, job: str) -> None:
    attempt = attempt_in(store, "Support", "reported", since=ago(hours=3))
    store.attempts.move(attempt.run_id, "awaiting_review", "Waits.", now=ago(hours=2))
    dead = books.run(attempt, job, STARTED, ago(hours=1), by_hand=True)
    tick(store, books)
    assert books.ended(dead)


def test_runs_of_another_workspace_in_the_same_books_are_not_touched(store: Store, books: Books, home: Path) -> None:
    theirs = open_store(Settings(home=home, workspace="other"))
    _attempt, run_id = killed_comparison(theirs, books)
    tick(store, books)
    assert not books.ended(run_id)


def test_a_run_that_waited_long_in_the_queue_is_not_lost_when_it_starts(store: Store, books: Books) -> None:
    attempt = attempt_in(store, "Support", "checkpoint_ready", since=ago(hours=3))
    starting = books.run(attempt, "comparison", STARTING, ago(seconds=10))
    books.rewrite("create_timestamp = datetime(create_timestamp, '-2 hours')")
    assert not tick(store, books).run_requests
    assert not books.ended(starting)
    assert store.attempts.get(attempt.run_id).try_no == attempt.try_no


def test_a_run_that_nobody_put_into_the_queue_is_tried_again(store: Store, books: Books) -> None:
    attempt = attempt_in(store, "Support", "checkpoint_ready", since=ago(hours=3))
    stuck = books.run(attempt, "comparison", None, ago(hours=1))
    books.rewrite("status = 'NOT_STARTED', update_timestamp = datetime(update_timestamp, '-6 minutes')")
    [again] = tick(store, books).run_requests or []
    assert again.run_key == f"{attempt.key}:comparison:{attempt.try_no + 1}"
    assert books.ended(stuck)


def test_a_tick_without_news_is_quick_however_many_runs_ended(store: Store, books: Books) -> None:
    attempt = attempt_in(store, "Support", "reported", since=ago(hours=3))
    store.attempts.request_cancel(attempt.run_id, now=ago(hours=2))
    for _ in range(30):
        run_id = books.run(attempt, "comparison", STARTED, ago(hours=2))
        books.instance.run_storage.handle_run_event(
            run_id, DagsterEvent("PIPELINE_SUCCESS", "comparison"), ago(hours=1)
        )
    tick(store, books)
    began = time.perf_counter()
    for _ in range(10):
        tick(store, books)
    assert (time.perf_counter() - began) / 10 < 0.5  # 10 times the goal, for a machine that does other things too


def test_every_step_has_a_job_that_is_looked_at() -> None:
    assert {step_of(state) for state in FLOW} - {None} == set(STEP_JOBS)


@pytest.mark.parametrize(("sensor", "job"), [(intake_sensor, "intake"), (scoring_sensor, "scoring")])
def test_a_dead_run_of_a_job_that_has_nothing_to_do_ends_too(
    store: Store, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, sensor: dg.SensorDefinition, job: str
) -> None:
    monkeypatch.setattr("sensors.lost_runs.LOOK_AGAIN_AFTER_S", 0.0)
    dead = instance.add_run(dg.DagsterRun(job_name=job, status=dg.DagsterRunStatus.STARTED))
    instance.run_storage.handle_run_event(dead.run_id, DagsterEvent(STARTED.value, job), ago(minutes=10))
    context = dg.build_sensor_context(
        instance=instance, resources={"store": StoreResource(home=str(store.settings.root))}
    )
    assert isinstance(sensor(context), dg.SkipReason)
    ended = instance.get_run_by_id(dead.run_id)
    assert ended is not None
    assert ended.status == dg.DagsterRunStatus.FAILURE
