"""A person's decision: recorded once, refused where the rules say so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from loop_dagster.deciding import approve, reject
from loop_dagster.errors import Conflict, Refused
from loop_dagster.rules.states import FLOW
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.records import Attempt

NOW = datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC)


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


def waiting(store: Store, verdict: str, rows_scored: int = 100) -> Attempt:
    """An attempt in review, as the promotion job leaves it."""
    pipeline = store.pipelines.create("Support", model_id="any")
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    for state in FLOW[1 : FLOW.index("reported")]:
        attempt = store.attempts.move(attempt.run_id, state, "On.", now=NOW)
    facts = {"verdict": verdict, "report": {"rows_scored": rows_scored}}
    store.attempts.move(attempt.run_id, "reported", "Compared.", now=NOW, **facts)
    return store.attempts.move(attempt.run_id, "awaiting_review", "It waits.", now=NOW)


@pytest.mark.parametrize("verdict", ["better", "not_better"])
def test_an_approved_attempt_is_on_its_way_to_live_once(store: Store, verdict: str) -> None:
    attempt = waiting(store, verdict)
    approved = approve(store, attempt, force=False, now=NOW)
    assert (approved.state, approved.decision, approved.decided_at) == ("promoting", "promoted", NOW)
    with pytest.raises(Conflict):
        approve(store, approved, force=True, now=NOW)
    with pytest.raises(Conflict):
        reject(store, approved, now=NOW)


def test_an_inconclusive_one_needs_force(store: Store) -> None:
    attempt = waiting(store, "inconclusive")
    with pytest.raises(Refused) as refused:
        approve(store, attempt, force=False, now=NOW)
    assert refused.value.code == "INCONCLUSIVE_REQUIRES_FORCE"
    assert approve(store, attempt, force=True, now=NOW).state == "promoting"


def test_an_untested_one_never_goes_live(store: Store) -> None:
    attempt = waiting(store, "inconclusive", rows_scored=0)
    with pytest.raises(Refused) as refused:
        approve(store, attempt, force=True, now=NOW)
    assert refused.value.code == "NOT_TESTED"
    assert store.attempts.get(attempt.run_id).state == "awaiting_review"


@pytest.mark.parametrize("decide", [lambda *args, **at: approve(*args, force=True, **at), reject])
def test_a_review_that_is_over_is_over_before_upkeep_says_so(store: Store, decide: Any) -> None:
    waits = waiting(store, "better")
    until = NOW + timedelta(days=14)
    attempt = store.attempts.note(waits.run_id, review_until=until)
    for late in (until, until + timedelta(days=16)):
        with pytest.raises(Conflict, match=r"until 2027-01-14 23:59 UTC.*its review is over.*expired") as refused:
            decide(store, attempt, now=late)
        assert refused.value.details["state"] == "awaiting_review"
    assert store.attempts.get(attempt.run_id) == attempt
    assert decide(store, attempt, now=until - timedelta(seconds=1)).decided_at == until - timedelta(seconds=1)


@pytest.mark.parametrize(("verdict", "force"), [("better", False), ("better", True), ("inconclusive", True)])
def test_whether_force_was_given_is_kept_and_said(store: Store, verdict: str, force: bool) -> None:
    approved = approve(store, waiting(store, verdict), force=force, now=NOW)
    assert approved.forced is force
    assert ("with force" in store.attempts.timeline(approved.run_id)[-1].sentence) is force


def test_a_rejected_one_is_closed(store: Store) -> None:
    rejected = reject(store, waiting(store, "better"), now=NOW)
    assert (rejected.state, rejected.decision) == ("rejected", "rejected")
    assert store.pipelines.get("support").enabled
