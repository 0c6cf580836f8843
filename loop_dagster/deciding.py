"""What a person decides about an attempt: approve it, reject it, have it tested again.

Belongs here: the decision as it is recorded, for the command line and later the API. Does not belong here: whether it
may be approved (rules/promotion.py), and making it live: the promotion job does that, from evidence derived anew.
"""

from __future__ import annotations

from datetime import datetime

from loop_dagster.errors import Conflict, Refused
from loop_dagster.rules.decision import ComparedVerdict
from loop_dagster.rules.promotion import check_approval
from loop_dagster.rules.states import TESTABLE, step_of
from loop_dagster.rules.upkeep import ADAPTER_TIME, Weights, adapter_is_kept, review_is_over
from loop_dagster.store.open import Store
from loop_dagster.store.records import LOOP, Attempt


def approve(store: Store, attempt: Attempt, *, force: bool, now: datetime, actor: str = LOOP) -> Attempt:
    """Record a person's approval; the promotion job then makes it live, or compares it again if what is live changed.

    The job checks the approval again on the verdict that it derives then; `force` is kept for that. Raises Refused with
    NOT_TESTED or INCONCLUSIVE_REQUIRES_FORCE, Conflict when it does not wait for a decision or its review is over.
    """
    _check_waits(attempt, now)
    tested = bool((attempt.report or {}).get("rows_scored"))
    verdict: ComparedVerdict = attempt.verdict if attempt.verdict in ("better", "not_better") else "inconclusive"
    check_approval(verdict=verdict, tested=tested, force=force)
    sentence = f"A person approved it{' with force' if force else ''}; it goes live once it is loaded."
    return store.attempts.move(
        attempt.run_id,
        "promoting",
        sentence,
        now=now,
        expect="awaiting_review",
        actor=actor,
        decision="promoted",
        decided_at=now,
        forced=force,
        review_until=None,
    )


def reject(store: Store, attempt: Attempt, *, now: datetime, actor: str = LOOP) -> Attempt:
    """Record a person's no: it is closed, and what is live stays.

    Raises Conflict when it does not wait for a decision or its review is over.
    """
    _check_waits(attempt, now)
    return store.attempts.move(
        attempt.run_id,
        "rejected",
        "A person decided against it.",
        now=now,
        expect="awaiting_review",
        actor=actor,
        decision="rejected",
        decided_at=now,
    )


def test_again(store: Store, attempt: Attempt, *, now: datetime, actor: str = LOOP) -> Attempt:
    """Compare an attempt that trained and was never tested once more, with what is live now, on the same questions.

    It goes back to checkpoint_ready (rules.md, Going live); while that test is under way a second call answers the
    same. Raises Refused with CANNOT_TEST_AGAIN, RULE_PAUSED or RUN_ACTIVE.
    """
    if step_of(attempt.state) in ("comparison", "promotion"):
        return attempt
    why = why_not_again(store, attempt, now)
    if why is not None:
        raise Refused("CANNOT_TEST_AGAIN", f"Attempt {attempt.key} cannot be tested again: {why}.")
    pipeline = store.pipelines.get(attempt.pipeline_id)
    if not pipeline.enabled:
        raise Refused("RULE_PAUSED", f"Pipeline {pipeline.tag} is paused. Switch it back on first.")
    sentence = "A person asked for its test to be repeated."
    return store.attempts.test_again(attempt.run_id, sentence, now=now, actor=actor)


def why_not_again(store: Store, attempt: Attempt, now: datetime) -> str | None:
    """What is about the attempt itself that it cannot be tested again at `now`; None when nothing is.

    A time that is over counts as over also while no round of upkeep has come by: an adapter is kept until a day after
    the attempt ended, and a review without a decision ended it.
    """
    if (attempt.report or {}).get("rows_scored"):
        return "it was tested: its report says what came of it"
    if attempt.state not in TESTABLE:
        return f"it is {attempt.state}, and only one in {', '.join(TESTABLE)} can be"
    if attempt.adapter_digest is None:
        return "it kept no adapter"
    ended = attempt.finished_at or (attempt.review_until if review_is_over(attempt.review_until, now) else None)
    weights = Weights(attempt.adapter_digest, ended, is_version=False, pipeline_deleted=False)
    if ended is not None and not adapter_is_kept(weights, now):
        return (
            f"its adapter was kept until {ended + ADAPTER_TIME:%Y-%m-%d %H:%M} UTC, a day after the attempt ended; "
            "its samples go to the next attempt"
        )
    if not store.artifacts.has(attempt.adapter_digest):
        return "its adapter was deleted, a day after the attempt ended"
    return None


def waits_for_decision(attempt: Attempt, now: datetime) -> bool:
    """Whether a person may decide about it at `now`: it is in review, and the time for that is not over."""
    return attempt.state == "awaiting_review" and not review_is_over(attempt.review_until, now)


def _check_waits(attempt: Attempt, now: datetime) -> None:
    if attempt.state != "awaiting_review":
        raise Conflict(
            f"Attempt {attempt.key} is {attempt.state} and waits for no decision; only one in awaiting_review does.",
            run_id=attempt.run_id,
            state=attempt.state,
        )
    if attempt.review_until is not None and not waits_for_decision(attempt, now):
        raise Conflict(
            f"Attempt {attempt.key} waited for a decision until {attempt.review_until:%Y-%m-%d %H:%M} UTC, and it is "
            f"{now:%Y-%m-%d %H:%M} UTC: its review is over. The next round of upkeep closes it as expired; what is "
            "live stays, and its samples go to the next attempt.",
            run_id=attempt.run_id,
            state=attempt.state,
        )
