"""Rounds of upkeep on real stores and a real instance, with a clock that the test holds."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from loop_dagster import deciding
from loop_dagster.definitions import build_defs
from loop_dagster.errors import Conflict, Refused
from loop_dagster.rules.progress import MOST_TRIES, first_try, tries_of
from loop_dagster.rules.states import FLOW, TrainingRunState
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.records import Attempt
from loop_dagster.upkeep import due, end_reviews, sweep
from resources import StoreResource
from sensors.lost_runs import under_way
from sensors.upkeep import upkeep as upkeep_sensor

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


def adapter(store: Store, name: str) -> str:
    """Digest of a kept artifact that is older than the grace of an hour."""
    folder = store.artifacts.private(name)
    (folder / "adapter.txt").write_text(name)
    digest = store.artifacts.keep(folder, still_mine=lambda: None)
    hours_ago = time.time() - 7_200
    os.utime(store.artifacts.root / digest, (hours_ago, hours_ago))
    return digest


def attempt_in(store: Store, name: str, state: TrainingRunState, *, at: datetime = NOW, **fields: Any) -> Attempt:
    """The first attempt of a new pipeline, moved along to `state`."""
    pipeline = store.pipelines.create(name, model_id="any")
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=at)
    assert attempt is not None
    for step in FLOW[1 : FLOW.index("reported") + 1]:
        facts = fields if step == "checkpoint_ready" else {}
        attempt = store.attempts.move(attempt.run_id, step, "On.", now=at, **facts)
        if step == state:
            return attempt
    return store.attempts.move(attempt.run_id, state, "There.", now=at)


def test_adapters_go_a_day_after_the_end_and_not_before(store: Store) -> None:
    old, review = adapter(store, "old"), adapter(store, "review")
    stray = adapter(store, "stray")
    attempt_in(store, "Old", "rejected", adapter_digest=old)
    attempt_in(store, "Review", "awaiting_review", adapter_digest=review)
    day = NOW + timedelta(days=1)
    assert sweep(store, day - timedelta(seconds=1)) == (stray,)
    assert due(store, day - timedelta(seconds=1)) == []
    assert due(store, day) == ["adapters that nothing needs"]
    assert sweep(store, day) == (old,)
    assert store.artifacts.list() == (review,)


def test_the_adapters_of_another_workspace_stay(store: Store, home: Path) -> None:
    other = open_store(Settings(home=home, workspace="other"))
    kept = adapter(store, "kept")
    attempt_in(other, "Theirs", "awaiting_review", adapter_digest=kept)
    assert sweep(store, NOW + timedelta(days=400)) == ()


def test_a_review_ends_after_fourteen_days_and_frees_the_pipeline(store: Store) -> None:
    attempt = attempt_in(store, "Review", "awaiting_review")
    store.attempts.note(attempt.run_id, review_until=NOW + timedelta(days=14), verdict="better")
    before, after = NOW + timedelta(days=14, seconds=-1), NOW + timedelta(days=14)
    assert end_reviews(store, before) == []
    [ended] = end_reviews(store, after)
    assert (ended.state, ended.decision, ended.decided_at) == ("expired", "expired", after)
    assert end_reviews(store, after) == []
    with pytest.raises(Conflict):
        deciding.approve(store, ended, force=True, now=after)
    pipeline = store.pipelines.get("review")
    assert store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=after) is not None


@pytest.mark.parametrize("state", ["awaiting_review", "failed", "expired", "budget_stopped"])
def test_an_untested_attempt_is_tested_again_while_its_adapter_is_kept(store: Store, state: TrainingRunState) -> None:
    digest = adapter(store, "a")
    attempt = attempt_in(store, "Again", state, adapter_digest=digest)
    again = deciding.test_again(store, attempt, now=NOW)
    assert (again.state, again.finished_at, again.verdict, again.report) == ("checkpoint_ready", None, None, None)
    assert deciding.test_again(store, again, now=NOW) == again  # safe to repeat
    with pytest.raises(Refused, match="cannot be tested again") as refused:
        deciding.test_again(store, attempt_in(store, "Bare", state), now=NOW)
    assert refused.value.code == "CANNOT_TEST_AGAIN"


def test_what_was_tested_or_closed_by_a_person_is_not_tested_again(store: Store) -> None:
    digest = adapter(store, "a")
    tested = attempt_in(store, "Tested", "awaiting_review", adapter_digest=digest)
    store.attempts.note(tested.run_id, report={"rows_scored": 100})
    cancelled = attempt_in(store, "Cancelled", "cancelled", adapter_digest=digest)
    gone = attempt_in(store, "Gone", "failed", adapter_digest="0" * 64)
    for attempt in (store.attempts.get(tested.run_id), cancelled, gone):
        with pytest.raises(Refused) as refused:
            deciding.test_again(store, attempt, now=NOW)
        assert refused.value.code == "CANNOT_TEST_AGAIN"


@pytest.mark.parametrize("state", ["failed", "expired", "budget_stopped", "awaiting_review"])
def test_a_day_after_its_end_it_is_not_tested_again_also_before_upkeep(store: Store, state: TrainingRunState) -> None:
    attempt = attempt_in(store, "Late", state, adapter_digest=adapter(store, "a"))
    if state == "awaiting_review":  # as if upkeep had ended it when its review was over
        attempt = store.attempts.note(attempt.run_id, review_until=NOW)
    day = NOW + timedelta(days=1)
    for late in (day, day + timedelta(days=16)):
        with pytest.raises(Refused, match="its adapter was kept until 2026-11-30 12:00 UTC") as refused:
            deciding.test_again(store, attempt, now=late)
        assert refused.value.code == "CANNOT_TEST_AGAIN"
    assert deciding.test_again(store, attempt, now=day - timedelta(seconds=1)).state == "checkpoint_ready"


def test_an_ended_attempt_is_not_revived_beside_a_newer_one(store: Store) -> None:
    attempt = attempt_in(store, "Again", "failed", adapter_digest=adapter(store, "a"))
    assert store.attempts.open_attempt(attempt.pipeline_id, trigger="data", frozen={}, now=NOW) is not None
    with pytest.raises(Refused) as refused:
        deciding.test_again(store, attempt, now=NOW)
    assert refused.value.code == "RUN_ACTIVE"


def test_a_test_that_is_repeated_has_tries_of_its_own(store: Store) -> None:
    attempt = attempt_in(store, "Again", "checkpoint_ready", adapter_digest=adapter(store, "a"))
    for number in range(1, MOST_TRIES + 1):
        assert store.attempts.claim_step(attempt.run_id, "comparison", number, f"r{number}", now=NOW)
        attempt = store.attempts.next_try(attempt.run_id, expect_try=number, now=NOW)
    store.attempts.fail(attempt.run_id, code="STEP_LOST", sentence="Lost.", now=NOW)
    again = deciding.test_again(store, store.attempts.get(attempt.run_id), now=NOW)
    assert (again.try_no, tries_of(again.try_no)) == (101, 1)
    assert store.attempts.claim_step(again.run_id, "comparison", again.try_no, "r9", now=NOW)


def test_tries_of_a_round() -> None:
    assert [first_try(newest) for newest in (None, 1, 3, 100, 101, 203)] == [1, 101, 101, 101, 201, 301]
    assert [tries_of(try_no) for try_no in (1, 3, 101, 103, 201)] == [1, 3, 1, 3, 1]


def sensor_says(store: Store, instance: dg.DagsterInstance, cursor: str | None) -> tuple[bool, str | None]:
    context = dg.build_sensor_context(
        instance=instance, cursor=cursor, resources={"store": StoreResource(home=str(store.settings.root))}
    )
    found: Any = upkeep_sensor(context)
    if isinstance(found, dg.SkipReason):
        return False, context.cursor
    return True, found.cursor


def skip_reason(store: Store, instance: dg.DagsterInstance, cursor: str) -> str | None:
    """What the sensor says when it asks for nothing."""
    resources = {"store": StoreResource(home=str(store.settings.root))}
    found: Any = upkeep_sensor(dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources))
    assert isinstance(found, dg.SkipReason)
    return found.skip_message


def test_the_sensor_asks_once_a_day_and_soon_after_a_deletion(store: Store) -> None:
    with dg.instance_for_test() as instance:
        asked, cursor = sensor_says(store, instance, None)
        assert not asked
        assert cursor is not None
        assert not sensor_says(store, instance, cursor)[0]
        yesterday = (datetime.now(UTC) - timedelta(days=1)).isoformat()
        assert sensor_says(store, instance, yesterday)[0]
        store.inbox.add_tombstones(["any"])
        assert not sensor_says(store, instance, cursor)[0]  # a round was asked for a moment ago
        for minutes, left in ((0.1, 10), (6.5, 4), (9.9, 1)):
            asked_at = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()
            assert skip_reason(store, instance, asked_at) == (
                f"The next round is due in {left} min: samples were deleted."
            )
        earlier = (datetime.now(UTC) - timedelta(minutes=11)).isoformat()
        assert sensor_says(store, instance, earlier)[0]


def test_the_job_does_every_round_and_prunes_old_runs(store: Store) -> None:
    store.inbox.add_tombstones(["any"])
    job = build_defs({"store": StoreResource(home=str(store.settings.root))}).resolve_job_def("upkeep")
    with dg.instance_for_test() as instance:
        ended = job.execute_in_process(instance=instance)
        assert ended.success
        order = [event.step_key for event in ended.all_events if event.is_step_success]
        assert order == [
            "end_reviews",
            "purge_deleted",
            "drop_expired",
            "erase_pipelines",
            "trim_selections",
            "sweep_artifacts",
            "keep_tables",
            "prune_runs",
        ]
    assert store.inbox.tombstones() == ()


@pytest.mark.parametrize(
    ("status", "patience"),
    [
        (dg.DagsterRunStatus.STARTED, "YOUNG"),
        (dg.DagsterRunStatus.CANCELING, "YOUNG"),
        (dg.DagsterRunStatus.STARTING, "START"),  # its launcher was killed between asking for a process and its start
        (dg.DagsterRunStatus.NOT_STARTED, "START"),
    ],
)
def test_a_run_whose_process_is_gone_does_not_hold_its_job_for_ever(
    store: Store, monkeypatch: pytest.MonkeyPatch, status: dg.DagsterRunStatus, patience: str
) -> None:
    defs = build_defs({"store": StoreResource(home=str(store.settings.root))})
    job = defs.resolve_job_def("upkeep")
    monkeypatch.setattr("sensors.lost_runs.LOOK_AGAIN_AFTER_S", 0.0)
    with dg.instance_for_test() as instance:
        run = instance.create_run_for_job(job, status=status)
        context = dg.build_sensor_context(instance=instance)
        assert under_way(context, store, "upkeep")  # too young to be called lost
        monkeypatch.setattr(f"sensors.lost_runs.{patience}", timedelta(0))
        with store.leases.hold(f"run/{run.run_id}"):
            assert under_way(context, store, "upkeep")
        assert not under_way(context, store, "upkeep")
        fresh = instance.get_run_by_id(run.run_id)
        assert fresh is not None
        assert fresh.status == dg.DagsterRunStatus.FAILURE
