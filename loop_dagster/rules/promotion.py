"""What becomes of an attempt once it was compared.

Belongs here: the policies, what a person may approve, and when a verdict is out of date. Does not belong here: the
verdict (`decision.py`), moving the live pointer, keeping or deleting weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from loop_dagster.errors import Refused
from loop_dagster.rules.decision import ComparedVerdict
from loop_dagster.rules.pipelines import Policy
from loop_dagster.rules.states import Decision, TrainingRunState

#: A comparison that waits for a person ends after this long without a decision.
REVIEW_TIME: Final = timedelta(days=14)

Action = Literal["promote", "close", "wait"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens with an attempt: `action`, the `state` it goes to, who decided (None: nobody yet), and why.

    `state` is `promoting` for `promote`: it becomes `promoted` once the new version answers. `review_until` is set for
    `wait`.
    """

    action: Action
    state: TrainingRunState
    decision: Decision | None
    review_until: datetime | None
    sentence: str


def fate(
    policy: Policy,
    *,
    verdict: ComparedVerdict,
    tested: bool,
    approved: bool = False,
    forced: bool = False,
    now: datetime,
) -> Fate:
    """What the policy in force at `now` does with a verdict (rules.md, Going live).

    `tested`: at least one held-back sample was scored. `approved`: a person approved it, `forced` with force. An
    approval is of the verdict that the person saw; where this verdict would not have been approved so, it waits anew.
    """
    if approved:
        return _approved(verdict, tested=tested, forced=forced, now=now)
    if not tested:
        why = "Nothing could be scored, so it cannot go live; it can be tested again while its adapter is kept."
        return _wait(now, why)
    if policy == "manual":
        return _wait(now, f"{_READS[verdict]}. This pipeline goes live only when a person approves.")
    if verdict == "better":
        return Fate("promote", "promoting", "auto_promoted", None, "Better on the held-back samples: it goes live.")
    if verdict == "not_better":
        return Fate("close", "rejected", "auto_rejected", None, "Not better: closed. What is live stays.")
    return _wait(now, "Inconclusive: it never goes live on its own. A person may approve it with force.")


_NOT_HELD: Final = "It was approved, but decided again from the stored evidence the approval does not hold."
_READS: Final[dict[ComparedVerdict, str]] = {
    "better": "Better",
    "not_better": "Not better",
    "inconclusive": "Inconclusive",
}


def _approved(verdict: ComparedVerdict, *, tested: bool, forced: bool, now: datetime) -> Fate:
    try:
        check_approval(verdict=verdict, tested=tested, force=forced)
    except Refused as no:
        return _wait(now, f"{_NOT_HELD} {no.message}")
    return Fate("promote", "promoting", "promoted", None, "Approved: it becomes the next version.")


def _wait(now: datetime, why: str) -> Fate:
    until = now + REVIEW_TIME
    sentence = f"{why} It waits for a decision until {until:%Y-%m-%d %H:%M} UTC."
    return Fate("wait", "awaiting_review", None, until, sentence)


def check_approval(*, verdict: ComparedVerdict, tested: bool, force: bool) -> None:
    """Raise `Refused` when a person must not put this attempt live: NOT_TESTED, or INCONCLUSIVE_REQUIRES_FORCE.

    Force never helps an untested one (rules.md, Going live).
    """
    if not tested:
        raise Refused(
            "NOT_TESTED",
            "This attempt was never tested: no held-back sample was scored, and nothing untested goes live, whatever "
            "force says. Test it again while its adapter is kept, or reject it.",
        )
    if verdict == "inconclusive" and not force:
        raise Refused(
            "INCONCLUSIVE_REQUIRES_FORCE",
            "The comparison was inconclusive: it could not tell whether this attempt is better than what is live. "
            "Approve it with force to put it live all the same, or reject it.",
        )


def must_compare_again(
    *, compared_with: Literal["version", "original"], compared_with_version: int | None, live_version: int | None
) -> bool:
    """Whether what is live changed since the comparison, so that its verdict says nothing about today."""
    return live_version != (compared_with_version if compared_with == "version" else None)
