from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loop_dagster.errors import Refused
from loop_dagster.rules.decision import ComparedVerdict
from loop_dagster.rules.promotion import check_approval, fate, must_compare_again
from loop_dagster.rules.states import check_move

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("policy", "verdict", "tested", "action", "decision"),
    [
        ("holdout", "better", True, "promote", "auto_promoted"),
        ("holdout", "not_better", True, "close", "auto_rejected"),
        ("holdout", "inconclusive", True, "wait", None),
        ("holdout", "inconclusive", False, "wait", None),
        ("manual", "better", True, "wait", None),
        ("manual", "not_better", True, "wait", None),
        ("manual", "inconclusive", True, "wait", None),
        ("manual", "inconclusive", False, "wait", None),
    ],
)
def test_fates(policy: Any, verdict: Any, tested: bool, action: str, decision: str | None) -> None:
    found = fate(policy, verdict=verdict, tested=tested, now=NOW)
    assert (found.action, found.decision) == (action, decision)
    assert found.review_until == (NOW + timedelta(days=14) if action == "wait" else None)
    check_move("reported", found.state)
    check_move("promoting", "promoted" if found.action == "promote" else found.state)


@pytest.mark.parametrize("policy", ["holdout", "manual"])
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("verdict", ["better", "not_better", "inconclusive"])
def test_what_a_person_approved_goes_live_where_that_approval_holds(
    policy: Any, verdict: ComparedVerdict, forced: bool
) -> None:
    found = fate(policy, verdict=verdict, tested=True, approved=True, forced=forced, now=NOW)
    if verdict == "inconclusive" and not forced:
        assert (found.action, found.state, found.decision) == ("wait", "awaiting_review", None)
        assert found.review_until == NOW + timedelta(days=14)
        assert "the approval does not hold" in found.sentence and "with force" in found.sentence
    else:
        assert (found.action, found.decision) == ("promote", "promoted")
    untested = fate(policy, verdict=verdict, tested=False, approved=True, forced=forced, now=NOW)
    assert (untested.action, untested.review_until) == ("wait", NOW + timedelta(days=14))


def test_approvals() -> None:
    check_approval(verdict="better", tested=True, force=False)
    check_approval(verdict="not_better", tested=True, force=False)
    check_approval(verdict="inconclusive", tested=True, force=True)
    with pytest.raises(Refused) as refused:
        check_approval(verdict="inconclusive", tested=True, force=False)
    assert refused.value.code == "INCONCLUSIVE_REQUIRES_FORCE"
    for force in (False, True):
        with pytest.raises(Refused) as refused:
            check_approval(verdict="inconclusive", tested=False, force=force)
        assert refused.value.code == "NOT_TESTED"


@pytest.mark.parametrize(
    ("compared_with", "version", "live", "again"),
    [
        ("original", None, None, False),
        ("original", None, 1, True),
        ("version", 1, 1, False),
        ("version", 1, 2, True),
        ("version", 1, None, True),
    ],
)
def test_compared_again_when_what_is_live_changed(compared_with: Any, version: Any, live: Any, again: bool) -> None:
    found = must_compare_again(compared_with=compared_with, compared_with_version=version, live_version=live)
    assert found is again
