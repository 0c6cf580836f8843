"""The scoring of unreviewed samples on the wire: where it stands, what it cost, and the switch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from running_api import Api, serving
from wire_types import check

from loop_dagster.rules.money import NANOCENTS
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store
from loop_dagster.store.scorings import Chunk


@pytest.fixture
def judged_api(tmp_path: Path) -> Iterator[Api]:
    """A server of an installation whose judge is a model (which nobody asks in these tests)."""
    judge: dict[str, Any] = {"judge": "openai", "judge_url": "http://127.0.0.1:9/v1", "judge_model": "judge-1"}
    with serving(open_store(Settings(home=tmp_path / "home", **judge))) as api:
        yield api


def pipeline_of(api: Api, model: Path, **more: Any) -> dict[str, Any]:
    made = api.client.loop.create_pipeline(name="Parcels", model={"id": str(model)}, **more)["pipeline"]
    check(made, "Pipeline")
    return dict(made)


def record(api: Api, pipeline: dict[str, Any], count: int) -> list[str]:
    rows = [{"prompt": f"Where is parcel {n}?", "completion": "On its way."} for n in range(count)]
    api.client.loop.import_into_pipeline(pipeline["rule_id"], rows, import_id="rows")
    listed = api.client.loop.list_traces(pipeline=pipeline["rule_id"])
    return [row["id"] for row in listed["traces"]]


def scored(api: Api, pipeline: dict[str, Any], scores: dict[str, float], *, cost: int = 0, name: str = "c") -> None:
    chunk = Chunk(chunk_id=name, judge_key="k" * 32, scores=scores, failed=(), nanocents=cost)
    api.store.scorings.keep(pipeline["rule_id"], chunk, now=datetime.now(UTC))


def test_where_it_stands_and_how_its_samples_divide(judged_api: Api, tiny_model: Path) -> None:
    pipeline = pipeline_of(judged_api, tiny_model)
    ids = record(judged_api, pipeline, 6)
    scored(judged_api, pipeline, {ids[0]: 0.8, ids[1]: 0.79, ids[2]: 1.0})
    judged_api.client.loop.signal(ids[3], "accepted")
    found = judged_api.client.loop.get_pipeline(pipeline["rule_id"])
    check(found, "Pipeline")
    auto = found["auto_scoring"]
    assert (auto["enabled"], auto["status"], auto["threshold"]) == (True, "scoring", 0.8)
    assert (auto["picked"], auto["below_bar"], auto["unscored"]) == (2, 1, 2)
    assert "the newest first" in auto["message"]
    assert found["minimums"]["picked_by_judge"] == 2
    for word, count in (("picked", 2), ("below_bar", 1), ("unscored", 2)):
        assert judged_api.client.loop.list_traces(pipeline=pipeline["rule_id"], judge=word)["total"] == count
    listed = judged_api.client.loop.list_pipelines()["pipelines"][0]
    check(listed, "Pipeline")
    assert listed["auto_scoring"] == auto


def test_the_switch(judged_api: Api, tiny_model: Path) -> None:
    pipeline = pipeline_of(judged_api, tiny_model, auto_scoring={"enabled": False})
    assert pipeline["auto_scoring"]["status"] == "off"
    on = judged_api.client.loop.update_pipeline(pipeline["rule_id"], auto_scoring={"enabled": True})["pipeline"]
    assert (on["auto_scoring"]["enabled"], on["auto_scoring"]["status"]) == (True, "idle")
    off = judged_api.client.loop.update_pipeline(pipeline["rule_id"], enabled=False)["pipeline"]
    assert off["auto_scoring"]["status"] == "waiting"


def test_the_embedded_judge_says_that_it_cannot(api: Api, tiny_model: Path) -> None:
    pipeline = pipeline_of(api, tiny_model)
    record(api, pipeline, 3)
    auto = api.client.loop.get_pipeline(pipeline["rule_id"])["auto_scoring"]
    assert (auto["status"], auto["unscored"], auto["held_until"]) == ("held", 3, None)
    assert "cannot score any" in auto["message"]


def test_its_cost_shows_on_the_attempt_and_every_part_adds_up(judged_api: Api, tiny_model: Path) -> None:
    pipeline = pipeline_of(judged_api, tiny_model)
    ids = record(judged_api, pipeline, 3)
    scored(judged_api, pipeline, {ids[0]: 0.9, ids[1]: 0.1}, cost=3 * NANOCENTS + NANOCENTS // 2)
    loop = judged_api.client.loop
    before = loop.get_pipeline(pipeline["rule_id"])["totals"]
    assert (before["spent_cents"], before["scoring_not_yet_in_a_training_cents"]) == (3, 3)
    assert before["spent_so_far"] is True
    store = judged_api.store
    attempt = store.attempts.open_attempt(
        pipeline["rule_id"],
        trigger="data",
        frozen={"settings": store.pipelines.get(pipeline["rule_id"]).settings.to_json(), "tags": pipeline["tags"]},
        now=datetime.now(UTC),
    )
    assert attempt is not None
    store.attempts.note(attempt.run_id, counts={"judge_nanocents": 7 * NANOCENTS + 1})
    scored(judged_api, pipeline, {ids[2]: 0.9}, cost=NANOCENTS // 2, name="d")
    found = loop.get_pipeline(pipeline["rule_id"])
    check(found, "Pipeline")
    for row in (found["attempts"][0], found["active_run"]):
        assert (row["cost_cents"], row["sample_scoring_cents"], row["sample_scored"], row["sample_picked"]) == (
            *(10, 3),
            *(2, 1),
        )
    totals = found["totals"]
    assert totals["scoring_not_yet_in_a_training_cents"] == 1  # both halves of a cent
    assert totals["spent_cents"] == sum(totals["spent_parts"].values()) == 11
    assert (totals["spent_parts"]["sample_scoring_cents"], totals["spent_parts"]["grading_cents"]) == (4, 7)
    answer = loop.get_training_run(attempt.run_id)
    check(answer, "TrainingRunResponse")
    cost = answer["cost"]
    parts = ("training_cents", "comparison_cents", "scoring_cents", "benchmark_cents", "sample_scoring_cents")
    assert cost["total_cents"] == sum(cost[part] for part in parts) == 10
    assert (answer["run"]["sample_scoring_cents"], answer["run"]["spent_eval_cents"]) == (3, 7)
    assert found["auto_scoring"]["status"] == "waiting"
