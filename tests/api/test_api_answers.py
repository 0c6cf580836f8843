"""Every route that exists, called through the public client, each answer held against the client's own types."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bios._client import ApiError
from report_world import NOW, Question, compared, questions
from running_api import Api
from wire_types import check

from loop_dagster.rules.money import NANOCENTS
from loop_dagster.store.records import Attempt


@pytest.fixture(scope="module")
def waiting(api: Api) -> Attempt:
    """An attempt that was compared and waits for a person, with a call to a tool among its answers."""
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    asked = [*questions(100), Question(calls=[call]), Question(candidate=None), Question(status="failed")]
    asked.append(Question(prompt="Nobody knows the number 4711.", right=None, teaches="scored"))
    return compared(api.store, asked, name="Waiting", state="awaiting_review")


def test_introspection_says_what_the_key_may(api: Api) -> None:
    found = api.client.introspect()
    check(found, "ApiKeyIntrospection")
    assert found["workspace"] == {"id": "default", "name": "default"}
    assert set(found["scopes"]) == {"loop:read", "loop:write", "serverless", "deployments:read"}
    assert api.client._http.resolve_workspace_id() == "default"


def test_models_and_floors(api: Api, tiny_model: Path) -> None:
    store = api.store
    store.settings.models_dir.mkdir(exist_ok=True)
    link = store.settings.models_dir / "tiny"
    if not link.exists():
        link.symlink_to(tiny_model)
    (store.settings.models_dir / "half").mkdir(exist_ok=True)
    found = api.client.loop.list_models()
    check(found, "LoopModelsResponse")
    tiny = next(one for one in found["models"] if one["name"] == "tiny")
    assert tiny["family"] == "llama"
    assert 0 < tiny["params_b"] < 0.01
    assert [one["name"] for one in found["unavailable"]] == ["half"]
    assert found["floors"] == {
        "first_version_samples": 1_100,
        "new_samples": 1_000,
        "held_back": {"min_rows": 100, "default_percent": 5, "max_percent": 20, "scored_rows": 1_500},
    }


def test_a_pipeline_from_its_making_to_its_end(api: Api, model: dict[str, str]) -> None:
    loop = api.client.loop
    made = loop.create_pipeline(
        name="Refund replies",
        model=model,
        use_case="Answers to questions about refunds",
        tags=["billing"],
        train_when={"schedule": {"every": "week", "weekday": 0, "hour_utc": 3}},
        promotion={"policy": "manual"},
        holdout={"percent": 10},
        max_versions=3,
        training={"epochs": 4},
        conditions={"feedback": ["good"], "origin": "imported"},
        auto_scoring={"enabled": False},
    )["pipeline"]
    check(made, "Pipeline")
    assert (made["own_tag"], made["tags"]) == ("refund-replies", ["refund-replies", "billing"])
    assert made["minimums"]["needed"] == 1_112
    assert made["status"] == "waiting"

    # absent keeps, null clears, a value replaces
    edited = loop.update_pipeline(
        made["rule_id"], expected_revision=1, max_versions=None, training={"lora_rank": 8}, conditions=None
    )["pipeline"]
    check(edited, "Pipeline")
    assert edited["max_versions"] is None
    assert edited["training"]["epochs"] == 4
    assert edited["training"]["lora_rank"] == 8
    assert edited["conditions"]["feedback"] == []
    assert edited["use_case"] == made["use_case"]
    assert edited["revision"] == 2
    paused = loop.update_pipeline(made["rule_id"], enabled=False)["pipeline"]
    assert (paused["status"], paused["enabled"], paused["revision"]) == ("paused", False, 2)

    with pytest.raises(ApiError) as refused:
        loop.update_pipeline(made["rule_id"], expected_revision=1, name="Late")
    assert (refused.value.status, refused.value.code) == (409, "REVISION_MISMATCH")
    check(loop.get_pipeline(made["rule_id"]), "Pipeline")
    gone = loop.delete_pipeline(made["rule_id"])
    check(gone, "TrainingRuleDeleteResponse")
    assert gone["retained_name"] == "Refund replies"
    with pytest.raises(ApiError) as missing:
        loop.get_pipeline(made["rule_id"])
    assert (missing.value.status, missing.value.code) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("body", "status", "code", "named"),
    [
        ({"surprise": 1}, 400, "BAD_REQUEST", "surprise"),
        ({"name": None}, 400, "BAD_REQUEST", "name"),
        ({"holdout": None}, 400, "BAD_REQUEST", "holdout"),
        ({"holdout": {"percent": 4}}, 400, "BAD_REQUEST", "holdout.percent"),
        ({"holdout": {"percent": 10, "rows": 3}}, 400, "BAD_REQUEST", "holdout.rows"),
        ({"train_when": {"min_samples": 5}}, 400, "BAD_REQUEST", "train_when.min_samples"),
        ({"model": {"id": "a/b", "revision": "c"}}, 400, "BAD_REQUEST", "model.revision"),
        ({"auto_scoring": {"enabled": "yes"}}, 400, "BAD_REQUEST", "auto_scoring.enabled"),
        ({"conditions": {"feedback": ["bad"]}}, 400, "BAD_REQUEST", "conditions.feedback"),
        ({"max_versions": 101}, 400, "BAD_REQUEST", "max_versions"),
        ({"tags": ["no spaces"]}, 400, "BAD_REQUEST", "tags"),
        ({"training": {"epochs": 16}}, 422, "TRAINING_SETTING_OUT_OF_RANGE", "training.epochs"),
        ({"promotion": {"policy": "all"}}, 422, "PROMOTION_POLICY_NEEDS_BENCHMARK", "promotion.policy"),
        ({"promotion": {"policy": "luck"}}, 422, "PROMOTION_POLICY_UNKNOWN", "promotion.policy"),
        ({"model": {"id": "/no/such/place"}}, 422, "MODEL_NOT_TRAINABLE", "/no/such/place"),
        ({"model": {"id": "../sideways"}}, 422, "MODEL_NOT_TRAINABLE", "../sideways"),
        ({"workspace_id": "elsewhere"}, 404, "NOT_FOUND", "elsewhere"),
        ({"challenger_model": {"id": "a/b"}}, 501, "NOT_BUILT", "challenger_model"),
        ({"datasets": ["one"]}, 404, "NOT_FOUND", "dataset"),
    ],
)
def test_what_a_body_may_not_say_is_refused_by_name(
    api: Api, model: dict[str, str], body: dict[str, Any], status: int, code: str, named: str
) -> None:
    before = len(api.store.pipelines.list())
    answered = api.call("POST", "/api/loop/pipelines", json={"name": "Refused", "model": model, **body})
    assert (answered.status_code, answered.json()["error"]["code"]) == (status, code)
    assert named in answered.json()["error"]["message"]
    assert len(api.store.pipelines.list()) == before


def test_lists_are_paged_filtered_and_searched(api: Api, waiting: Attempt, model: dict[str, str]) -> None:
    loop = api.client.loop
    for number in range(3):
        loop.create_pipeline(name=f"Page {number}", model=model)
    page = loop.list_pipelines(limit=2, q="page")
    check(page, "PipelineListResponse")
    assert [one["rule_name"] for one in page["pipelines"]] == ["Page 2", "Page 1"]
    assert (page["total"], page["truncated"]) == (3, True)
    rest = loop.list_pipelines(limit=2, offset=2, q="PAGE")
    assert ([one["rule_name"] for one in rest["pipelines"]], rest["truncated"]) == (["Page 0"], False)
    [needing] = loop.list_pipelines(status="needs_you")["pipelines"]
    check(needing, "Pipeline")
    assert (needing["status"], needing["active_run"]["run_id"]) == ("needs_review", waiting.run_id)
    counted = loop.stats()["pipelines"]
    assert (counted["needs_you"], counted["training"], counted["serving"]) == (1, 0, 0)


def test_an_attempt_in_every_shape(api: Api, waiting: Attempt) -> None:
    loop = api.client.loop
    attempts = loop.list_pipeline_attempts(waiting.pipeline_id)
    check(attempts, "PipelineAttemptListResponse")
    assert [one["outcome"] for one in attempts["attempts"]] == ["waiting_for_review"]
    assert loop.list_pipeline_attempts(waiting.pipeline_id, result="running")["total"] == 1
    assert loop.list_pipeline_attempts(waiting.pipeline_id, model="second")["total"] == 0

    runs = loop.list_training_runs(rule_id=waiting.pipeline_id, state="awaiting_review", result="waiting_for_review")
    check(runs, "TrainingRunListResponse")
    assert [one["id"] for one in runs["runs"]] == [waiting.run_id]
    assert loop.list_training_runs(state="failed")["total"] == 0

    found = loop.get_training_run(waiting.run_id)
    check(found, "TrainingRunResponse")
    assert found["available_actions"] == {
        "promote": True, "reject": True, "rollback": False, "cancel": True, "retest": False,
    }  # fmt: skip
    assert [check["key"] for check in found["verdict_checks"]][:2] == ["rows_scored", "failures"]
    assert found["timeline"][0]["from_state"] is None
    assert found["run"]["trigger"] == "rows"
    assert found["run"]["checkpoint_step"] == 30

    curve = loop.get_training_curve(waiting.run_id)
    check(curve, "TrainingCurve")
    assert len(curve["points"]) == 40


def test_a_comparison_and_its_samples(api: Api, waiting: Attempt) -> None:
    loop = api.client.loop
    report = loop.get_evaluation(waiting.run_id)
    check(report, "Evaluation")
    everything = loop.list_evaluation_items(waiting.run_id, limit=200)
    check(everything, "EvaluationItemsResponse")
    assert (everything["total"], everything["searched"]) == (104, None)

    def total(**filters: Any) -> int:
        found = loop.list_evaluation_items(waiting.run_id, **filters)
        check(found, "EvaluationItemsResponse")
        return int(found["total"])

    assert total(winner="candidate") + total(winner="serving") + total(winner="tie") == report["rows_scored"]
    assert total(candidate_passed=True) == report["candidate_passed"]
    assert total(incumbent_passed=True) == report["incumbent_passed"]
    assert total(status="failed") == report["rows_failed"] == 1
    assert total(has_reference=False) == 1
    assert total(orders="disagreed") == 12
    assert total(q="4711") == 1
    searched = loop.list_evaluation_items(waiting.run_id, q="parcel 99", winner="candidate")
    assert (searched["total"], searched["searched"]) == (1, total(winner="candidate"))
    changes = [
        item["candidate"]["score"] - item["incumbent"]["score"]
        for item in loop.list_evaluation_items(waiting.run_id, sort="score_change", status="scored", limit=200)["items"]
    ]
    assert changes == sorted(changes, reverse=True)
    with pytest.raises(ApiError) as refused:
        loop.list_evaluation_items(waiting.run_id, orders="sideways")
    assert (refused.value.status, refused.value.code) == (400, "BAD_REQUEST")


def test_a_judge_that_cost_something_is_counted_once_everywhere(api: Api) -> None:
    attempt = compared(api.store, questions(3), name="Costly", state="awaiting_review")
    api.store.attempts.note(attempt.run_id, counts={**attempt.counts, "judge_nanocents": 7 * NANOCENTS + 5})
    loop = api.client.loop
    pipeline = loop.get_pipeline(attempt.pipeline_id)
    check(pipeline, "Pipeline")
    assert pipeline["totals"]["spent_cents"] == sum(pipeline["totals"]["spent_parts"].values()) == 7
    cost = loop.get_training_run(attempt.run_id)["cost"]
    assert cost["total_cents"] == cost["scoring_cents"] == pipeline["attempts"][0]["cost_cents"] == 7
    loop.delete_pipeline(attempt.pipeline_id)


def test_what_a_person_decides(api: Api) -> None:
    loop = api.client.loop
    better = compared(api.store, questions(100), name="Approved", state="awaiting_review")
    with pytest.raises(ApiError) as moved:
        loop.promote_training_run(better.run_id, expected_revision=7)
    assert moved.value.code == "REVISION_MISMATCH"
    promoted = loop.promote_training_run(better.run_id, expected_revision=1)
    check(promoted, "TrainingRunActionResponse")
    assert (promoted["run"]["state"], promoted["run"]["decision"]) == ("promoting", "promoted")
    assert promoted["run"]["decided_by"] == f"key:{api.client.introspect()['key_id']}"

    version = api.store.versions.promote(
        better.run_id, base_digest="b" * 64, adapters=["a" * 64], expect_live=None, now=NOW + timedelta(days=1),
        decision="promoted",
    )  # fmt: skip
    served = loop.get_pipeline(better.pipeline_id)
    check(served, "Pipeline")
    assert (served["live_version"], [one["version"] for one in served["versions"]]) == (version.version_no, [1])
    check(loop.list_pipelines(status="serving"), "PipelineListResponse")
    check(loop.get_training_run(better.run_id), "TrainingRunResponse")
    with pytest.raises(ApiError) as ended:
        loop.cancel_training_run(better.run_id)
    assert (ended.value.status, ended.value.code) == (409, "CONFLICT")
    with pytest.raises(ApiError) as not_built:
        loop.rollback_training_run(better.run_id)
    assert (not_built.value.status, not_built.value.code) == (501, "NOT_BUILT")

    unclear = compared(api.store, questions(20), name="Unclear", state="awaiting_review")
    with pytest.raises(ApiError) as unforced:
        loop.promote_training_run(unclear.run_id)
    assert (unforced.value.status, unforced.value.code) == (409, "INCONCLUSIVE_REQUIRES_FORCE")
    with pytest.raises(ApiError) as tested:
        loop.retest_training_run(unclear.run_id)
    assert (tested.value.status, tested.value.code) == (409, "CANNOT_TEST_AGAIN")
    rejected = loop.reject_training_run(unclear.run_id, reason="Not good enough")
    check(rejected, "TrainingRunActionResponse")
    assert rejected["run"]["decision"] == "rejected"

    going = compared(api.store, questions(2), name="Going")
    cancelled = loop.cancel_training_run(going.run_id)
    check(cancelled, "TrainingRunActionResponse")
    assert cancelled["run"]["state"] == "cancelled"
    assert loop.cancel_training_run(going.run_id)["run"]["state"] == "cancelled"


def test_train_now_says_what_is_missing(api: Api, model: dict[str, str]) -> None:
    loop = api.client.loop
    made = loop.create_pipeline(name="Too early", model=model)["pipeline"]
    with pytest.raises(ApiError) as short:
        loop.run_pipeline(made["rule_id"])
    assert (short.value.status, short.value.code) == (422, "NOT_ENOUGH_SAMPLES")
    assert (short.value.body["have"], short.value.body["need"]) == (0, 1_100)
    loop.update_pipeline(made["rule_id"], enabled=False)
    with pytest.raises(ApiError) as paused:
        loop.run_pipeline(made["rule_id"])
    assert (paused.value.status, paused.value.code) == (409, "RULE_PAUSED")


def test_an_attempt_of_a_deleted_pipeline_is_gone_with_it(api: Api) -> None:
    attempt = compared(api.store, questions(2), name="Going away", state="awaiting_review")
    api.client.loop.delete_pipeline(attempt.pipeline_id)
    for path in (
        f"training-runs/{attempt.run_id}",
        f"evaluations/{attempt.run_id}",
        f"pipelines/{attempt.pipeline_id}",
    ):
        assert api.call("GET", f"/api/loop/{path}").status_code == 404
    assert attempt.run_id not in [run["id"] for run in api.client.loop.list_training_runs(limit=200)["runs"]]
