"""What a person decides about an attempt that waits for one: approve it or reject it.

Belongs here: the decision as it is recorded, for the command line and later the API. Does not belong here: whether it
may be approved (rules/promotion.py), and making it live: the promotion job does that, from evidence derived anew.
"""

from __future__ import annotations

from datetime import datetime

from loop_dagster.errors import Conflict
from loop_dagster.rules.decision import ComparedVerdict
from loop_dagster.rules.promotion import check_approval
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt


def approve(store: Store, attempt: Attempt, *, force: bool, now: datetime) -> Attempt:
    """Record a person's approval; the promotion job then makes it live, or compares it again if what is live changed.

    Raises Refused with NOT_TESTED or INCONCLUSIVE_REQUIRES_FORCE, Conflict when it does not wait for a decision.
    """
    _check_waits(attempt)
    tested = bool((attempt.report or {}).get("rows_scored"))
    verdict: ComparedVerdict = attempt.verdict if attempt.verdict in ("better", "not_better") else "inconclusive"
    check_approval(verdict=verdict, tested=tested, force=force)
    sentence = "A person approved it; it goes live once it is loaded."
    return store.attempts.move(
        attempt.run_id,
        "promoting",
        sentence,
        now=now,
        expect="awaiting_review",
        decision="promoted",
        decided_at=now,
        review_until=None,
    )


def reject(store: Store, attempt: Attempt, *, now: datetime) -> Attempt:
    """Record a person's no: it is closed, and what is live stays. Raises Conflict when it does not wait for one."""
    _check_waits(attempt)
    return store.attempts.move(
        attempt.run_id,
        "rejected",
        "A person decided against it.",
        now=now,
        expect="awaiting_review",
        decision="rejected",
        decided_at=now,
    )


def _check_waits(attempt: Attempt) -> None:
    if attempt.state != "awaiting_review":
        raise Conflict(
            f"Attempt {attempt.key} is {attempt.state} and waits for no decision; only one in awaiting_review does.",
            run_id=attempt.run_id,
            state=attempt.state,
        )
