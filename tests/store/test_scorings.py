"""Scores of unreviewed samples in the registry: stored once, exact money, handed over to one attempt."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loop_dagster.rules.money import NANOCENTS
from loop_dagster.rules.scoring import Asked, Hold
from loop_dagster.store.attempts import Attempts
from loop_dagster.store.inbox import Inbox
from loop_dagster.store.pipelines import Pipeline, Pipelines
from loop_dagster.store.registry import Registry
from loop_dagster.store.scorings import SCORING_LIMIT, Chunk, Scoring, Scorings

NOW = datetime(2026, 12, 1, 8, tzinfo=UTC)
JUDGE = "a" * 32


@pytest.fixture
def inbox(registry: Registry) -> Inbox:
    return Inbox(registry)


@pytest.fixture
def store(registry: Registry, inbox: Inbox) -> Scorings:
    return Scorings(registry, inbox)


@pytest.fixture
def pipeline(registry: Registry) -> Pipeline:
    return Pipelines(registry).create("Support", model_id="base", now=NOW)


def chunk(
    name: str, scores: dict[str, float], *, failed: Sequence[str] = (), cost: int = 0, judge: str = JUDGE
) -> Chunk:
    return Chunk(chunk_id=name, judge_key=judge, scores=scores, failed=failed, nanocents=cost)


def test_a_chunk_is_stored_once_with_its_money(store: Scorings, inbox: Inbox) -> None:
    given = chunk("c1", {"s1": 0.9, "s2": 0.8, "s3": 0.1}, failed=["s4"], cost=7)
    assert store.keep("p", given, now=NOW)
    assert not store.keep("p", given, now=NOW)
    rows = inbox.waiting_frames()["feedback"]
    assert rows.select("sample_id", "verdict", "origin", "score").rows() == [
        ("s1", "scored", "judge", 0.9),
        ("s2", "scored", "judge", 0.8),
        ("s3", "scored", "judge", 0.1),
    ]
    found = store.get("p")
    assert (found.nanocents, found.scored, found.picked) == (7, 3, 2)
    assert store.all() == {"p": found}
    assert store.get("other") == Scoring()


def test_a_deleted_sample_gets_no_score_and_costs_what_it_cost(store: Scorings, inbox: Inbox) -> None:
    inbox.add_tombstones(["s1"])
    store.keep("p", chunk("c1", {"s1": 0.9, "s2": 0.9}, cost=5), now=NOW)
    assert inbox.waiting_frames()["feedback"]["sample_id"].to_list() == ["s2"]
    assert store.get("p").nanocents == 5
    assert store.asked("b" * 32, NOW).by_others == ("s2",)


def test_a_sample_that_failed_is_asked_again_twice_and_then_never(store: Scorings) -> None:
    now = NOW
    for number, wait in enumerate((timedelta(hours=1), timedelta(days=1))):
        store.keep("p", chunk(f"c{number}", {}, failed=["s"]), now=now)
        assert store.asked(JUDGE, now + wait - timedelta(seconds=1)).resting == ("s",)
        now += wait
        assert store.asked(JUDGE, now).resting == ()
    store.keep("p", chunk("last", {}, failed=["s"]), now=now)
    assert store.asked(JUDGE, now + timedelta(days=999)).resting == ("s",)
    assert store.asked("b" * 32, now) == Asked()  # another judge may try


def test_what_another_judge_scored_may_be_asked_about_and_is_forgotten_with_the_sample(store: Scorings) -> None:
    store.keep("p", chunk("c1", {"s1": 0.1, "s2": 0.1}), now=NOW)
    assert store.asked(JUDGE, NOW) == Asked()
    assert sorted(store.asked("b" * 32, NOW).by_others) == ["s1", "s2"]
    store.keep("p", chunk("c2", {"s1": 0.2}, judge="b" * 32), now=NOW)
    assert store.asked("b" * 32, NOW).by_others == ("s2",)
    store.forget(["s2"])
    assert store.asked("b" * 32, NOW) == Asked()


def test_a_hold_is_about_the_settings_it_was_met_under_and_ends_with_a_score(store: Scorings) -> None:
    away = Hold("JUDGE_UNAVAILABLE", "It is away.", NOW + timedelta(minutes=5))
    store.hold("p", away, key="k1", now=NOW)
    store.hold("p", away, key="k1", now=NOW)
    assert store.get("p").held("k1") == away
    assert store.get("p").held("k2") is None
    assert store.get("p").failures == 2
    store.keep("p", chunk("c1", {}, failed=["s"]), now=NOW)
    assert store.get("p").failures == 2
    store.keep("p", chunk("c2", {"s": 0.3}), now=NOW)
    assert (store.get("p").hold, store.get("p").failures) == (None, 0)


def test_an_attempt_takes_whole_cents_and_the_rest_accrues(
    store: Scorings, registry: Registry, pipeline: Pipeline
) -> None:
    attempts = Attempts(registry)
    store.keep(pipeline.pipeline_id, chunk("c1", {"s1": 0.9}, cost=2 * NANOCENTS + 3), now=NOW)
    store.hold(pipeline.pipeline_id, Hold(SCORING_LIMIT, "Spent."), key="k", now=NOW, failed=False)
    attempt = attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={"a": 1}, now=NOW)
    assert attempt is not None
    assert attempt.frozen == {"a": 1, "sample_scoring": {"nanocents": 2 * NANOCENTS, "scored": 1, "picked": 1}}
    left = store.get(pipeline.pipeline_id)
    assert (left.nanocents, left.scored, left.picked, left.hold) == (3, 0, 0, None)
    assert attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW) is None
    assert store.get(pipeline.pipeline_id) == left
    attempts.fail(attempt.run_id, code="X", sentence="Broke.", now=NOW)
    again = attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert again is not None
    assert again.frozen == {}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(costs=st.lists(st.lists(st.integers(0, 3 * NANOCENTS), max_size=4), min_size=1, max_size=6))
def test_no_part_of_a_cent_vanishes_over_attempts(sqlite_registry: Registry, costs: list[list[int]]) -> None:
    store, attempts = Scorings(sqlite_registry, Inbox(sqlite_registry)), Attempts(sqlite_registry)
    name = f"P {len(Pipelines(sqlite_registry).list())}"
    pipeline = Pipelines(sqlite_registry).create(name, model_id="base", now=NOW)
    taken = 0
    for number, of_attempt in enumerate(costs):
        for place, cost in enumerate(of_attempt):
            store.keep(pipeline.pipeline_id, chunk(f"{number}/{place}", {}, cost=cost), now=NOW)
        attempt = attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
        assert attempt is not None
        amount = attempt.frozen.get("sample_scoring", {}).get("nanocents", 0)
        assert amount % NANOCENTS == 0
        taken += amount
        attempts.fail(attempt.run_id, code="X", sentence="Broke.", now=NOW)
    assert taken + store.get(pipeline.pipeline_id).nanocents == sum(map(sum, costs))
    assert store.get(pipeline.pipeline_id).nanocents < NANOCENTS
