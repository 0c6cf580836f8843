"""States of an attempt: which may follow which, which job a state needs, and what became of an attempt.

Belongs here: the closed set of states (the API's `TrainingRunState`), the one table of moves, the job behind each
state, outcomes and triggers. Does not belong here: who moves an attempt (the registry does, one transaction with its
timeline), and what is decided about it (`promotion.py`).
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from loop_dagster.errors import MoveNotAllowed

TrainingRunState = Literal[
    "built",
    "registering",
    "dataset_validating",
    "preflighting",
    "job_creating",
    "training",
    "checkpoint_ready",
    "candidate_booking",
    "candidate_running",
    "evaluating",
    "reported",
    "awaiting_review",
    "promoting",
    "waiting_funds",
    "waiting_gpus",
    "promoted",
    "rejected",
    "expired",
    "failed",
    "budget_stopped",
    "cancelled",
    "superseded",
    "rolled_back",
]
Step = Literal["training", "comparison", "promotion"]
Outcome = Literal[
    "became_version", "not_better", "inconclusive", "not_tested", "stopped", "failed", "running", "waiting_for_review"
]
Verdict = Literal["better", "not_better", "inconclusive", "not_evaluated"]
Decision = Literal["auto_promoted", "promoted", "rejected", "auto_rejected", "expired", "rolled_back"]
Trigger = Literal["data", "schedule", "manual", "challenger", "rebuild"]

STATES: Final[tuple[TrainingRunState, ...]] = get_args(TrainingRunState)
TRIGGERS: Final[tuple[Trigger, ...]] = get_args(Trigger)

#: States that no later step of an attempt leaves. `promoted` alone may still become `rolled_back`, which is as ended.
TERMINAL: Final[tuple[TrainingRunState, ...]] = (
    "promoted",
    "rejected",
    "expired",
    "failed",
    "budget_stopped",
    "cancelled",
    "superseded",
    "rolled_back",
)

#: Where an attempt that trained and was never tested can be tested again from, while its adapter is kept. This is the
#: one way back from an end, and only a person opens it: no late step of the attempt finds it.
TESTABLE: Final[tuple[TrainingRunState, ...]] = ("awaiting_review", "failed", "expired", "budget_stopped")

#: How an attempt goes when nothing waits and nothing fails.
FLOW: Final[tuple[TrainingRunState, ...]] = (
    "built",
    "registering",
    "dataset_validating",
    "preflighting",
    "job_creating",
    "training",
    "checkpoint_ready",
    "candidate_booking",
    "candidate_running",
    "evaluating",
    "reported",
    "promoting",
    "promoted",
)

#: An attempt that has not ended can always end in one of these.
_ENDS: Final[tuple[TrainingRunState, ...]] = ("expired", "failed", "budget_stopped", "cancelled", "superseded")

#: Which states may follow a state, beside the ends above. The only table of moves.
#: Back to `checkpoint_ready` means compared again: what is live changed since, or the test is repeated.
_FOLLOWERS: Final[dict[TrainingRunState, tuple[TrainingRunState, ...]]] = {
    "built": ("registering", "waiting_funds"),
    "registering": ("dataset_validating", "waiting_funds"),
    "dataset_validating": ("preflighting",),
    "preflighting": ("job_creating",),
    "job_creating": ("training", "waiting_funds"),
    "training": ("checkpoint_ready",),
    "checkpoint_ready": ("candidate_booking", "waiting_gpus", "waiting_funds"),
    "candidate_booking": ("candidate_running", "waiting_gpus", "waiting_funds"),
    "candidate_running": ("evaluating", "waiting_gpus", "waiting_funds"),
    "evaluating": ("reported", "waiting_funds"),
    "reported": ("promoting", "awaiting_review", "rejected", "checkpoint_ready"),
    "awaiting_review": ("promoting", "rejected", "checkpoint_ready"),
    "promoting": ("promoted", "awaiting_review", "rejected", "checkpoint_ready"),
    "waiting_funds": ("built", "registering", "job_creating", "checkpoint_ready", "evaluating"),
    "waiting_gpus": ("checkpoint_ready", "candidate_booking"),
    "promoted": ("rolled_back",),
    "rejected": (),
    "expired": (),
    "failed": (),
    "budget_stopped": (),
    "cancelled": (),
    "superseded": (),
    "rolled_back": (),
}

_STEPS: Final[dict[TrainingRunState, Step]] = {
    "built": "training",
    "registering": "training",
    "dataset_validating": "training",
    "preflighting": "training",
    "job_creating": "training",
    "training": "training",
    "checkpoint_ready": "comparison",
    "candidate_booking": "comparison",
    "candidate_running": "comparison",
    "evaluating": "comparison",
    "reported": "promotion",
    "promoting": "promotion",
}


def is_terminal(state: TrainingRunState) -> bool:
    """Whether the attempt has ended; any other state holds the pipeline's next one (rules.md)."""
    return state in TERMINAL


def followers(state: TrainingRunState) -> tuple[TrainingRunState, ...]:
    """Every state that may come directly after `state`, in a fixed order."""
    return _FOLLOWERS[state] if is_terminal(state) else _FOLLOWERS[state] + _ENDS


def check_move(old: TrainingRunState, new: TrainingRunState) -> None:
    """Raise `MoveNotAllowed`, which lists what is allowed, unless `new` may directly follow `old`.

    A state does not follow itself: a repeated step asks `reached` first.
    """
    allowed = followers(old)
    if new not in allowed:
        raise MoveNotAllowed(old, new, allowed)


def reached(state: TrainingRunState, milestone: TrainingRunState) -> bool:
    """Whether an attempt in `state` is at `milestone` or past it on its ordinary way.

    A second try of a job walks over the same milestones; this keeps it from moving the attempt backwards. A waiting or
    ended state has reached nothing, since the way to it differs.
    """
    return state in FLOW and milestone in FLOW and FLOW.index(state) >= FLOW.index(milestone)


def step_of(state: TrainingRunState) -> Step | None:
    """The job that an attempt in `state` needs; None while it waits for a person, funds or GPUs, and once it ended."""
    return _STEPS.get(state)


def outcome_of(
    state: TrainingRunState,
    *,
    verdict: Verdict | None = None,
    decision: Decision | None = None,
    trained: bool,
    tested: bool,
) -> Outcome:
    """What became of an attempt, in the API's words (rules.md, Going live, Outcomes).

    `trained`: it kept an adapter. `tested`: at least one held-back sample was scored. The wire has a word of its own
    for an attempt that broke before it had trained, `failed`; one that trained and ended before a test is `not_tested`.
    """
    if state in ("promoted", "rolled_back"):
        return "became_version"
    if state not in TERMINAL:
        return "waiting_for_review" if state == "awaiting_review" else "running"
    if state == "cancelled" or decision == "rejected":
        return "stopped"
    if state == "failed" and (tested or not trained):
        return "failed"
    if not tested:
        return "not_tested"
    return _outcome_of_a_tested_end(state, verdict)


def _outcome_of_a_tested_end(state: TrainingRunState, verdict: Verdict | None) -> Outcome:
    if state == "rejected":
        return "not_better"  # the rule's own no; a member's came before
    if state == "expired" and verdict != "better":
        return "not_better" if verdict == "not_better" else "inconclusive"
    return "stopped"
