"""Sensors on a real instance and real stores: exactly one attempt per reason, whatever dies in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from loop_dagster.definitions import build_defs
from loop_dagster.errors import NotEnoughSamples, Refused
from loop_dagster.models.base import resolve
from loop_dagster.opening import NotYet, Opened, anything_due, look, states_of, train_now
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.settings import Settings
from loop_dagster.store.intake import import_for_pipeline
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.pipelines import Pipeline
from resources import StoreResource
from sensors.attempts import attempts as attempts_sensor
from sensors.intake import intake as intake_sensor
from sensors.progress import progress as progress_sensor

KEY = "attempts"


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as instance:
        yield instance


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


@pytest.fixture
def pipeline(store: Store, tiny_model: Path) -> Pipeline:
    digest = resolve(str(tiny_model), store.settings.models_dir).digest
    return store.pipelines.create("Support", model_id=str(tiny_model), model_digest=digest, seed=7)


def fill(store: Store, pipeline: Pipeline, path: Path, start: int, stop: int) -> None:
    """Import good samples numbered from `start` to before `stop`."""
    rows = ({"prompt": f"Where is parcel {n}?", "completion": f"Parcel {n} is on its way."} for n in range(start, stop))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    now = datetime.now(UTC)
    import_for_pipeline(store, path, pipeline, holder="test", now=now, default_feedback="good")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def tick(sensor: Any, instance: dg.DagsterInstance, store: Store, cursor: str | None = None) -> dg.SensorResult:
    """One evaluation as the daemon makes it, up to what it would launch and remember."""
    context = dg.build_sensor_context(
        instance=instance,
        cursor=cursor,
        resources={"store": StoreResource(home=str(store.settings.root))},
        definitions=build_defs(),
    )
    found = sensor(context)
    if isinstance(found, dg.SkipReason):
        return dg.SensorResult(skip_reason=found)
    return found


def said(result: dg.SensorResult) -> str:
    assert isinstance(result.skip_reason, dg.SkipReason)
    return str(result.skip_reason.skip_message)


def test_nothing_opens_one_sample_short_and_one_opens_at_1100(store, pipeline, file, instance):
    fill(store, pipeline, file, 0, 1099)
    short = tick(attempts_sensor, instance, store)
    assert not short.run_requests
    assert "1,099 are there, 1 more to come" in said(short)
    fill(store, pipeline, file, 1099, 1100)
    met = tick(attempts_sensor, instance, store, short.cursor)
    (request,) = met.run_requests
    assert request.job_name == "training"
    assert request.run_key == f"{pipeline.pipeline_id}/0001:training:1"
    assert request.partition_key == f"{pipeline.pipeline_id}/0001"
    assert [list(add.partition_keys) for add in met.dynamic_partitions_requests] == [[request.partition_key]]
    again = tick(attempts_sensor, instance, store, met.cursor)
    assert not again.run_requests
    assert len(store.attempts.list()) == 1


def test_an_unchanged_pipeline_is_not_counted_again(store, pipeline, file, instance):
    fill(store, pipeline, file, 0, 10)
    first = tick(attempts_sensor, instance, store)
    second = tick(attempts_sensor, instance, store, first.cursor)
    assert "Nothing changed" in said(second)
    store.pipelines.edit(pipeline.tag, settings={"holdout": {"percent": 20}})
    third = tick(attempts_sensor, instance, store, second.cursor)
    assert "1,250" in said(third)


def test_two_daemons_and_any_number_of_looks_open_one_attempt(store, pipeline, file, home):
    fill(store, pipeline, file, 0, 1100)
    now = datetime.now(UTC)

    def one(_: int) -> Opened | NotYet:
        mine = open_store(Settings(home=home))
        return look(mine, mine.pipelines.get(pipeline.tag), now)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(16)))
    assert sum(isinstance(one, Opened) for one in found) == 1
    assert len(store.attempts.list()) == 1


def test_a_daemon_that_dies_after_opening_is_made_good_by_progress(store, pipeline, file, instance):
    fill(store, pipeline, file, 0, 1100)
    tick(attempts_sensor, instance, store)  # its answer is lost: no partition, no cursor, no run
    at_once = tick(progress_sensor, instance, store)
    assert not at_once.run_requests  # the sensor that opened it may still be at it
    with store.registry.write() as connection:
        connection.exec_driver_sql("UPDATE attempts SET since = datetime(since, '-60 seconds')")
    later = tick(progress_sensor, instance, store)
    (request,) = later.run_requests
    assert request.run_key == f"{pipeline.pipeline_id}/0001:training:1"
    assert [list(add.partition_keys) for add in later.dynamic_partitions_requests] == [[request.partition_key]]


def test_a_lost_step_gets_a_new_key_and_gives_up_after_three(store, pipeline, file, instance):
    fill(store, pipeline, file, 0, 1100)
    tick(attempts_sensor, instance, store)
    (attempt,) = store.attempts.list()
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    for try_no in (1, 2, 3):
        assert store.attempts.claim_step(attempt.run_id, "training", try_no, f"run-{try_no}", now=long_ago)
        assert not store.attempts.claim_step(attempt.run_id, "training", try_no, "another", now=long_ago)
        seen = tick(progress_sensor, instance, store)
        keys = [request.run_key for request in seen.run_requests or []]
        assert keys == ([f"{attempt.key}:training:{try_no + 1}"] if try_no < 3 else [])
    failed = store.attempts.get(attempt.run_id)
    assert (failed.state, failed.error_code) == ("failed", "STEP_LOST")
    assert store.pipelines.get(pipeline.tag).failures == 1
    waits = look(store, store.pipelines.get(pipeline.tag), datetime.now(UTC))
    assert isinstance(waits, NotYet)
    assert waits.next_look_at == failed.finished_at + timedelta(minutes=30)
    assert not anything_due(store, datetime.now(UTC))
    assert isinstance(look(store, store.pipelines.get(pipeline.tag), waits.next_look_at), Opened)


def test_train_now_skips_the_wait_and_never_the_minimum(store, pipeline, file):
    with pytest.raises(NotEnoughSamples) as short:
        train_now(store, pipeline)
    assert (short.value.details["have"], short.value.details["need"]) == (0, 1100)
    fill(store, pipeline, file, 0, 1100)
    store.pipelines.pause(pipeline.tag)
    with pytest.raises(Refused) as paused:
        train_now(store, store.pipelines.get(pipeline.tag))
    assert paused.value.code == "RULE_PAUSED"
    store.pipelines.resume(pipeline.tag)
    opened = train_now(store, store.pipelines.get(pipeline.tag))
    assert opened.trigger == "manual"
    with pytest.raises(Refused) as active:
        train_now(store, store.pipelines.get(pipeline.tag))
    assert active.value.code == "RUN_ACTIVE"


def test_a_schedule_delays_to_its_slot_and_opens_there(store, pipeline, file):
    fill(store, pipeline, file, 0, 1100)
    slot = {"schedule": {"every": "week", "weekday": 0, "hour_utc": 3}}
    scheduled = store.pipelines.edit(pipeline.tag, settings={"train_when": slot})
    saturday = datetime(2027, 2, 27, 23, 59, 59, tzinfo=UTC)
    waits = look(store, scheduled, saturday)
    assert isinstance(waits, NotYet)
    sunday = datetime(2027, 2, 28, 3, tzinfo=UTC)
    assert waits.next_look_at == sunday
    opened = look(store, store.pipelines.get(pipeline.tag), sunday + timedelta(seconds=4))
    assert isinstance(opened, Opened)
    assert opened.attempt.trigger == "schedule"


@pytest.mark.parametrize("hours", [0.1, 25, 30, 47, 400])
def test_a_slot_missed_by_a_daemon_that_was_down_is_taken_once_and_at_once(store, pipeline, file, hours):
    fill(store, pipeline, file, 0, 1100)
    daily = store.pipelines.edit(pipeline.tag, settings={"train_when": {"schedule": {"every": "day", "hour_utc": 3}}})
    assert isinstance(look(store, daily, datetime(2027, 3, 1, 12, tzinfo=UTC)), NotYet)
    back = datetime(2027, 3, 2, 3, tzinfo=UTC) + timedelta(hours=hours)
    opened = look(store, store.pipelines.get(pipeline.tag), back)
    assert isinstance(opened, Opened)
    assert store.pipelines.get(pipeline.tag).next_due_at is None
    store.attempts.request_cancel(opened.attempt.run_id, now=back)
    again = look(store, store.pipelines.get(pipeline.tag), back + timedelta(minutes=31))
    assert isinstance(again, NotYet)
    assert again.next_look_at is not None and again.next_look_at > back + timedelta(minutes=31)


def test_a_slot_that_passes_while_the_pipeline_is_held_is_not_taken_late(store, pipeline, file):
    fill(store, pipeline, file, 0, 1100)
    daily = store.pipelines.edit(pipeline.tag, settings={"train_when": {"schedule": {"every": "day", "hour_utc": 3}}})
    noon = datetime(2027, 3, 1, 12, tzinfo=UTC)
    assert isinstance(look(store, daily, noon), NotYet)
    store.attempts.open_attempt(pipeline.pipeline_id, trigger="manual", frozen={}, now=noon)
    store.pipelines.set_due(pipeline.tag, datetime(2027, 3, 2, 3, tzinfo=UTC))
    assert isinstance(look(store, store.pipelines.get(pipeline.tag), noon), NotYet)  # an attempt holds it
    assert store.pipelines.get(pipeline.tag).next_due_at is None


def test_an_attempt_keeps_the_settings_it_opened_with(store, pipeline, file):
    fill(store, pipeline, file, 0, 1100)
    opened = look(store, store.pipelines.get(pipeline.tag), datetime.now(UTC))
    assert isinstance(opened, Opened)
    store.pipelines.edit(pipeline.tag, settings={"training": {"epochs": 9}})
    frozen = PipelineSettings.from_json(store.attempts.get(opened.attempt.run_id).frozen["settings"])
    assert frozen.training.epochs is None
    assert opened.attempt.revision == 1


def test_every_selected_sample_has_a_state_with_a_sentence(store, pipeline, file):
    fill(store, pipeline, file, 0, 1100)
    states = states_of(store, pipeline, datetime.now(UTC))
    assert dict(states.group_by("state").len().iter_rows()) == {"waiting": 1100}
    assert states["reason"].null_count() == 0
    assert states["sample_id"].n_unique() == 1100


def test_intake_runs_for_a_bulk_import_and_not_again(store, pipeline, file, instance):
    assert not tick(intake_sensor, instance, store).run_requests
    fill(store, pipeline, file, 0, 5)
    found = tick(intake_sensor, instance, store)
    assert len(found.run_requests) == 1
    job = build_defs({"store": StoreResource(home=str(store.settings.root))}).resolve_job_def("intake")
    ended = job.execute_in_process(instance=instance)
    assert ended.success
    checks = ended.get_asset_check_evaluations()
    assert {check.asset_key.to_user_string(): check.passed for check in checks} == {
        "samples": True,
        "feedback": True,
        "labels": True,
    }
    event = instance.get_latest_materialization_event(dg.AssetKey("samples"))
    assert event is not None
    metadata = event.asset_materialization.metadata
    assert metadata["dagster/row_count"].value == 5
    assert "Where is parcel" not in str(metadata)
    assert not tick(intake_sensor, instance, store, found.cursor).run_requests


def test_no_pipeline_is_left_out_for_good_when_a_tick_has_time_for_one(
    store: Store,
    pipeline: Pipeline,
    file: Path,
    instance: dg.DagsterInstance,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = [
        store.pipelines.create(f"Other {n}", model_id=str(tiny_model), model_digest=pipeline.model_digest, seed=n)
        for n in range(3)
    ]
    monkeypatch.setattr("sensors.attempts.BUDGET_S", 0.0)
    looked, cursor = [], None
    for turn in range(8):
        for one in (pipeline, *more):  # new data for all of them, before every tick
            fill(store, one, file, turn, turn + 1)
        found = tick(attempts_sensor, instance, store, cursor)
        cursor = found.cursor
        looked.append(said(found).partition(":")[0])
    assert sorted(looked[:4]) == sorted(looked[4:]) == sorted(one.tag for one in (pipeline, *more))


def test_new_data_of_one_pipeline_costs_no_look_at_another(
    store: Store, pipeline: Pipeline, file: Path, instance: dg.DagsterInstance, tiny_model: Path
) -> None:
    other = store.pipelines.create("Other", model_id=str(tiny_model), model_digest=pipeline.model_digest, seed=8)
    for one in (pipeline, other):
        fill(store, one, file, 0, 10)
    first = tick(attempts_sensor, instance, store)
    assert pipeline.tag in said(first)
    assert other.tag in said(first)
    assert said(tick(attempts_sensor, instance, store, first.cursor)) == "Nothing changed since the last look."
    fill(store, other, file, 10, 12)
    second = tick(attempts_sensor, instance, store, first.cursor)
    assert said(second).startswith(f"{other.tag}:")
    assert pipeline.tag not in said(second)
    [sample] = (
        store.samples.keys().samples.filter(pl.col("source") == pipeline.tag).select("sample_id").head(1).collect()
    )
    store.inbox.add_tombstones([sample[0]])
    third = tick(attempts_sensor, instance, store, second.cursor)
    assert said(third).startswith(f"{pipeline.tag}:")


def test_what_a_look_said_stays_on_the_pipeline(store, pipeline, file, instance):
    fill(store, pipeline, file, 0, 3)
    tick(attempts_sensor, instance, store)
    seen = store.pipelines.get(pipeline.pipeline_id)
    assert "1,097 more" in (seen.look_said or "")
    assert seen.looked_at is not None
    assert (seen.revision, seen.updated_at) == (pipeline.revision, pipeline.updated_at)
