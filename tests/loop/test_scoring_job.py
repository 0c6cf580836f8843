"""Scoring as Dagster sees it: the sensor, the job, the place of the scores in the lineage."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from scoring_world import PRICES, fill, judged, likes, made, now, number_of, run, status

from loop_dagster import scoring
from loop_dagster.definitions import build_defs
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.work import scoring_folder, sweep_work
from resources import StoreResource
from sensors.scoring import scoring as scoring_sensor


def tick(instance: dg.DagsterInstance, store: Store, cursor: str | None = None) -> Any:
    context = dg.build_sensor_context(
        instance=instance,
        cursor=cursor,
        resources={"store": StoreResource(home=str(store.settings.root))},
        definitions=build_defs(),
    )
    return scoring_sensor(context)


def test_the_sensor_asks_for_a_run_and_looks_again_only_when_something_changed(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda _: 1)) as (store, _stub), dg.instance_for_test() as instance:
        idle = made(store, tiny_model, "Idle")
        pipeline = made(store, tiny_model)
        fill(store, idle, 0, 1)
        run(store, idle)
        first = tick(instance, store)
        assert first.run_requests == []
        fill(store, pipeline, 10, 30)
        second = tick(instance, store, first.cursor)
        (request,) = second.run_requests
        assert request.tags == {"loop/pipeline": pipeline.pipeline_id}
        third = tick(instance, store, second.cursor)
        assert third.run_requests == []  # its run may be on its way; it is asked for again after ten minutes
        run(store, pipeline)
        fourth = tick(instance, store, third.cursor)
        assert fourth.run_requests == []
        assert "No unreviewed sample is left" in str(fourth.skip_reason.skip_message)
        fifth = tick(instance, store, fourth.cursor)
        assert "Nothing changed" in str(fifth.skip_reason.skip_message)
        late = json.loads(fifth.cursor)
        late["again"] = dict.fromkeys(late["again"], (now() - timedelta(seconds=1)).isoformat())
        assert "No unreviewed" in str(tick(instance, store, json.dumps(late)).skip_reason.skip_message)


def test_the_sensor_reads_nothing_for_a_judge_that_cannot_score(home: Path, tiny_model: Path) -> None:
    store = open_store(Settings(home=home))
    fill(store, made(store, tiny_model), 0, 5)
    with dg.instance_for_test() as instance:
        found = tick(instance, store)
    assert isinstance(found, dg.SkipReason)
    assert "compares with a right answer" in str(found.skip_message)


def test_the_job_scores_counts_what_is_long_and_says_what_it_did(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda _: 9), **PRICES) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 5)
        fill(store, pipeline, 5, 6, text="word " * 200)  # fits, which only counting tells
        fill(store, pipeline, 6, 7, text="Supercalifragilistic " * 4_000)  # does not
        defs = build_defs({"store": StoreResource(home=str(home))})
        with dg.instance_for_test() as instance:
            result = defs.resolve_job_def("scoring").execute_in_process(
                instance=instance, tags={"loop/pipeline": pipeline.pipeline_id}
            )
            assert result.success
            (event,) = result.asset_materializations_for_node("scores")
            metadata = {name: value.value for name, value in event.metadata.items()}
            again = defs.resolve_job_def("scoring").execute_in_process(instance=instance)
        assert metadata["dagster/row_count"] == len(stub.seen) == 6
        assert metadata["cost"] == "$0.07"
        assert metadata["now"] == "No unreviewed sample is left whose score could count."
        assert again.success
        assert not again.asset_materializations_for_node("scores")
        assert not [one for one in store.settings.work.iterdir() if one.name.startswith("run-")]
        assert sorted(number_of(shown) for shown in stub.seen) == list(range(6))


def test_a_run_that_breaks_says_so_and_is_not_repeated_at_once(
    home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with judged(home, likes(lambda _: 9)) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 1, text="word " * 200)

        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("the words of a sample")

        monkeypatch.setattr("assets.scores.count_pairs", broken)
        job = build_defs({"store": StoreResource(home=str(home))}).resolve_job_def("scoring")
        with dg.instance_for_test() as instance:
            result = job.execute_in_process(
                instance=instance, tags={"loop/pipeline": pipeline.pipeline_id}, raise_on_error=False
            )
        assert not result.success
        kind, message = status(store, pipeline)
        assert kind == "held"
        assert "RuntimeError" in message
        assert "words of a sample" not in message
        assert stub.seen == []


def test_what_scoring_left_of_a_deleted_pipeline_is_swept(home: Path, tiny_model: Path) -> None:
    store = open_store(Settings(home=home))
    gone, kept = made(store, tiny_model, "Gone"), made(store, tiny_model)
    for pipeline in (gone, kept):
        folder = scoring_folder(store, pipeline.pipeline_id)
        folder.mkdir(parents=True)
        (folder / "c.json").write_text("{}")
    store.pipelines.delete(gone.tag)
    sweep_work(store)
    assert scoring.leftovers(store) == {kept.pipeline_id}


def test_scores_stand_before_feedback_in_the_lineage() -> None:
    graph = build_defs().resolve_asset_graph()
    assert dg.AssetKey("scores") in graph.get(dg.AssetKey("feedback")).parent_keys


def test_feedback_of_the_judge_is_sound_for_the_checks_of_the_table(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda number: number % 11)) as (store, _stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 11)
        run(store, pipeline)
        rows = store.inbox.waiting_frames()["feedback"]
        assert rows.select(pl.col("score").is_between(0, 1).all()).item()
        assert rows["feedback_id"].n_unique() == rows.height == 11
