"""Attempts and versions side by side, and the loop over time, from what comparisons kept; held against the types."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from bios._client import ApiError
from report_world import NOW, Question, compared, questions
from running_api import Api
from wire_types import check

from loop_dagster.rules.money import NANOCENTS
from loop_dagster.store.records import Attempt


def end(api: Api, attempt: Attempt) -> Attempt:
    return api.store.attempts.move(attempt.run_id, "rejected", "Ended.", now=NOW + timedelta(hours=2))


@pytest.fixture(scope="module")
def pair(api: Api) -> tuple[Attempt, Attempt]:
    """Two attempts of one pipeline on the same samples: one higher, one lower, one corrected since, one not scored."""
    asked = questions(8)
    first = end(api, compared(api.store, asked, name="Pair", state="awaiting_review"))
    again = [
        replace(asked[0], rated=(8.8, 2.0)),  # exactly 0.02 lower
        replace(asked[1], rated=(9.1, 2.0)),  # 0.01 higher: about the same
        replace(asked[2], rated=(10.0, 2.0)),
        replace(asked[3], right="Parcel 3 is lost."),
        replace(asked[4], status="failed"),
        *asked[5:],
        Question(prompt="Asked of the second alone"),
    ]
    second = compared(api.store, again, name="Pair", state="awaiting_review")
    return first, second


def test_two_attempts_side_by_side(api: Api, pair: tuple[Attempt, Attempt]) -> None:
    first, second = pair
    loop = api.client.loop
    found = loop.compare_attempts(first.pipeline_id, first.run_id, second.run_id)
    check(found, "AttemptCompareResponse")
    assert (found["a"]["attempt"], found["b"]["attempt"], found["tie_band"]) == (1, 2, 0.02)
    shared = found["shared_sample"]
    assert (shared["rows"], shared["answer_changed"], shared["comparable"], shared["why"]) == (7, 1, True, None)
    assert (shared["higher"], shared["lower"], shared["same"]) == (1, 1, 4)
    assert shared["rows"] == shared["higher"] + shared["lower"] + shared["same"] + shared["answer_changed"]
    went = {item["trace_id"]: item["direction"] for item in found["items"]}
    assert [went[f"sample-000{number}"] for number in (0, 1, 2, 3, 5)] == ["lower", "same", "higher", None, "same"]
    assert "sample-0004" not in went
    # Six with the same right answer: 0.9, 0.9, 0.9, 0.3, 0.9, 0.6 against 0.88, 0.91, 1.0 and the rest.
    assert shared["a"] == {"rows": 6, "mean": pytest.approx(0.75), "passed": 4, "pass_rate": pytest.approx(4 / 6)}
    assert shared["b"]["mean"] == pytest.approx((0.88 + 0.91 + 1.0 + 0.3 + 0.9 + 0.6) / 6)
    assert found["b"]["holdout"]["rows_scored"] == 8
    assert found["a"]["holdout"]["evaluation_id"] == first.run_id

    items = {item["id"]: item for item in loop.list_evaluation_items(second.run_id, limit=200)["items"]}
    for item in found["items"]:
        assert items[item["b"]["evaluation_item_id"]]["trace_id"] == item["trace_id"]
    lower = loop.compare_attempts(first.pipeline_id, first.run_id, second.run_id, filter="lower")
    assert (lower["total"], [item["trace_id"] for item in lower["items"]]) == (1, ["sample-0000"])
    page = loop.compare_attempts(first.pipeline_id, first.run_id, second.run_id, limit=2, offset=1)
    assert (page["items"], page["total"]) == (found["items"][1:3], 7)
    back = loop.compare_attempts(first.pipeline_id, second.run_id, first.run_id)["shared_sample"]
    assert (back["higher"], back["lower"], back["a"]) == (1, 1, shared["b"])


def test_attempts_that_were_rated_differently_have_no_direction(api: Api) -> None:
    loop = api.client.loop
    first = end(api, compared(api.store, questions(3), name="Judges", state="awaiting_review"))
    options: dict[str, Any] = {"judge": "big-model", "judge_setting": "openai"}
    second = end(api, compared(api.store, questions(3), name="Judges", state="awaiting_review", **options))
    found = loop.compare_attempts(first.pipeline_id, first.run_id, second.run_id)
    check(found, "AttemptCompareResponse")
    shared = found["shared_sample"]
    assert (shared["rows"], shared["comparable"], shared["higher"], shared["a"]) == (3, False, None, None)
    assert "big-model" in shared["why"]
    assert {(item["direction"], item["why"]) for item in found["items"]} == {(None, shared["why"])}
    with pytest.raises(ApiError) as refused:
        loop.compare_attempts(first.pipeline_id, first.run_id, second.run_id, filter="higher")
    assert (refused.value.status, refused.value.code) == (400, "BAD_REQUEST")

    open_ = api.store.attempts.open_attempt(first.pipeline_id, trigger="data", frozen=first.frozen, now=NOW)
    assert open_ is not None
    untested = loop.compare_attempts(first.pipeline_id, first.run_id, open_.run_id)
    check(untested, "AttemptCompareResponse")
    assert (untested["shared_sample"]["rows"], untested["items"]) == (0, [])
    assert "Attempt 3 has no finished comparison" in untested["shared_sample"]["why"]
    assert set(untested["b"]["holdout"].values()) == {None}


def test_what_is_not_there_is_not_compared(api: Api, pair: tuple[Attempt, Attempt]) -> None:
    first, second = pair
    other = compared(api.store, questions(1), name="Another one")
    path = f"/api/loop/pipelines/{first.pipeline_id}"
    for query, status in (
        (f"a={first.run_id}&b={other.run_id}", 404),
        (f"a={first.run_id}&b=x", 404),
        (f"a={first.run_id}", 400),
        (f"a={first.run_id}&b={second.run_id}&filter=sideways", 400),
        (f"a={first.run_id}&b={second.run_id}&limit=201", 400),
    ):
        assert api.call("GET", f"{path}/attempts/compare?{query}").status_code == status, query
    assert api.call("GET", f"{path}/versions/compare?a=1&b=9").status_code == 404
    assert api.call("GET", f"{path}/versions/compare?a=0").status_code == 400
    assert api.call("GET", "/api/loop/pipelines/none/versions/compare").status_code == 404


def test_versions_on_the_questions_that_all_can_be_measured_on(api: Api) -> None:
    loop, store = api.client.loop, api.store
    asked = questions(8)
    first = compared(store, asked, name="Versions", state="promoting")
    empty = loop.compare_versions(first.pipeline_id)
    check(empty, "VersionCompareResponse")
    assert (empty["versions"], empty["common_set"]) == ([], {"rows": 0, "from": None})
    at = NOW + timedelta(hours=3)
    store.versions.promote(first.run_id, base_digest="b" * 64, adapters=["a" * 64], expect_live=None, now=at)
    later = [
        replace(asked[0], rated=(2.0, 2.0)),
        replace(asked[1], right="Something else now."),
        *asked[2:],
        Question(prompt="New since"),
    ]
    second = compared(store, later, name="Versions", state="promoting", live_version=1)
    store.versions.promote(second.run_id, base_digest="b" * 64, adapters=["a" * 64], expect_live=1, now=at)

    found = loop.compare_versions(first.pipeline_id, a=1, b=2)
    check(found, "VersionCompareResponse")
    assert found["common_set"] == {"rows": 8, "from": "samples held back before v1"}
    one, two = found["versions"]
    assert [(one["version"], one["is_live"]), (two["version"], two["is_live"])] == [(1, False), (2, True)]
    assert (two["compared_with"], two["compared_with_version"], one["compared_with"]) == ("version", 1, "original")
    assert (one["holdout"]["common_rows"], two["holdout"]["common_rows"]) == (8, 7)
    assert one["holdout"]["common_pass_rate"] == pytest.approx(6 / 8)
    assert two["holdout"]["common_pass_rate"] == pytest.approx(4 / 7)
    assert two["holdout"]["rows_scored"] == 9
    assert (found["a"], found["b"], found["differences"], found["benchmarks"]) == (1, 2, [], [])


def test_the_loop_over_time(api: Api, pair: tuple[Attempt, Attempt]) -> None:
    loop, store = api.client.loop, api.store
    first, second = pair
    store.attempts.note(second.run_id, counts={**second.counts, "judge_nanocents": 3 * NANOCENTS})
    brought = loop.import_rows(
        "app",
        [{"prompt": f"Day {n}", "completion": "A", **({"label": n > 1} if n else {})} for n in range(4)],
        labels=["pair"],
    )
    loop.import_rows("app", [{"prompt": "Of nobody", "completion": "A", "label": True}])
    loop.correct(brought["trace_ids"][0], "Better")
    found = loop.get_metrics_history(rule_id=first.pipeline_id)
    check(found, "LoopMetricsHistory")
    assert [point["run_id"] for point in found["runs"]] == [first.run_id, second.run_id]
    assert found["truncated"] is False
    point = found["runs"][1]
    assert (point["cost_cents"], point["rows_scored"], point["checkpoint_step"]) == (3, 8, 30)
    assert point["trainer_eval_loss"] == pytest.approx(0.1)
    assert point["mean_change_needed"] is not None
    [day] = found["samples"]
    assert (day["good"], day["bad"], day["corrected"], day["unreviewed"]) == (2, 1, 1, 0)
    [said] = found["signals"]
    assert (said["total"], said["by_verdict"]) == (5, {"accepted": 3, "edited": 1, "rejected": 1})
    everything = loop.get_metrics_history(limit=1, days=1)
    check(everything, "LoopMetricsHistory")
    assert (len(everything["runs"]), everything["truncated"]) == (1, True)
    assert everything["samples"][0]["good"] == 3
    for query in ("limit=501", "days=366", "days=0", "limit=x"):
        assert api.call("GET", f"/api/loop/metrics/history?{query}").status_code == 400
    assert api.call("GET", "/api/loop/metrics/history?rule_id=none").status_code == 404
