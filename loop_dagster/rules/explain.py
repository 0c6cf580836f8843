"""What became of an attempt, in plain words: what happened, why, and what happens next.

Belongs here: the sentences for every state and outcome. Does not belong here: choosing the outcome (`states.py`) and
sentences of single errors (`errors/`), which come in as `reason`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loop_dagster.rules.states import TERMINAL, Decision, Outcome, TrainingRunState, Verdict

_DOING: Final[dict[TrainingRunState, tuple[str, str]]] = {
    "built": ("Opened", "Next its samples are selected."),
    "registering": ("Selecting samples", "Next the training set is copied and checked."),
    "dataset_validating": ("Checking the training set", "Next the base model and its chat template are checked."),
    "preflighting": ("Checking the model", "Next it is trained."),
    "job_creating": ("Waiting to train", "It trains as soon as a machine is free."),
    "training": ("Training", "Next it is compared with what is live, on the held-back samples."),
    "checkpoint_ready": ("Trained", "Next both models answer the held-back samples."),
    "candidate_booking": ("Preparing the comparison", "Next both models answer the held-back samples."),
    "candidate_running": ("Answering the held-back samples", "Next the judge rates the answers."),
    "evaluating": ("The judge is rating", "Next the bars decide."),
    "reported": ("Compared", "Next the pipeline's policy decides whether it goes live."),
    "promoting": ("Going live", "The model's name moves once the new version answers; until then nothing changes."),
    "waiting_funds": ("Not started: waiting for funds", "It starts by itself once the balance covers its training."),
    "waiting_gpus": ("Waiting for GPUs", "It keeps what it trained and books the comparison again by itself."),
}

_SAME_STAYS: Final = "What answers in your app stays as it is."
_TRIES_AGAIN: Final = (
    "The next attempt starts by itself once it has the samples it needs and the schedule allows; Train now skips the "
    "schedule, never the samples."
)

_ENDED: Final[dict[Outcome, tuple[str, str, str | None]]] = {
    "not_better": ("Not better", f"It was not better than what is live. {_SAME_STAYS}", _TRIES_AGAIN),
    "inconclusive": (
        "Inconclusive",
        f"The comparison could not tell which is better, and nobody put it live in time. {_SAME_STAYS}",
        _TRIES_AGAIN,
    ),
    "not_tested": ("Couldn't be tested", f"It ended before anything was scored. {_SAME_STAYS}", _TRIES_AGAIN),
    "failed": ("Failed", f"It broke off. {_SAME_STAYS}", _TRIES_AGAIN),
    "stopped": ("Stopped", f"It ended without going live. {_SAME_STAYS}", None),
}
_STOPPED: Final[dict[TrainingRunState, str]] = {
    "cancelled": f"Somebody cancelled it. {_SAME_STAYS}",
    "rejected": f"Somebody decided against it. {_SAME_STAYS}",
    "expired": f"It was better, but nobody approved it before the review ended. {_SAME_STAYS}",
    "superseded": f"What it was built on changed meanwhile. {_SAME_STAYS}",
    "budget_stopped": f"It reached its spending limit. {_SAME_STAYS}",
}
_REVIEW: Final[dict[Verdict, str]] = {
    "better": "It is better on the held-back samples, and this pipeline goes live only when somebody approves.",
    "not_better": "It is not better on the held-back samples; this pipeline leaves every decision to a person.",
    "inconclusive": "The comparison could not tell which is better, so it does not go live on its own.",
    "not_evaluated": "It has not been compared.",
}


@dataclass(frozen=True, slots=True)
class AttemptExplanation:
    """`headline` in a few words, `detail` as sentences, `next` what happens now (None: nothing)."""

    headline: str
    detail: str
    next: str | None

    def as_dict(self) -> dict[str, str | None]:
        return {"headline": self.headline, "detail": self.detail, "next": self.next}


def explain(
    *,
    state: TrainingRunState,
    outcome: Outcome,
    verdict: Verdict | None = None,
    decision: Decision | None = None,
    version_no: int | None = None,
    error_code: str | None = None,
    reason: str | None = None,
) -> AttemptExplanation:
    """The three sentences for an attempt, from its state, outcome, verdict and error.

    `reason` is the attempt's own last sentence; it says more than any sentence here could and goes into the detail.
    """
    if state not in TERMINAL and state != "awaiting_review":
        doing, then = _DOING[state]
        return AttemptExplanation(doing, reason or f"{doing}.", then)
    if outcome == "waiting_for_review":
        return AttemptExplanation("Waits for your decision", _REVIEW[verdict or "not_evaluated"], _approve(verdict))
    if outcome == "became_version":
        return _went_live(state, decision=decision, version_no=version_no)
    headline, detail, following = _ENDED[outcome]
    if outcome == "stopped":
        detail = _STOPPED.get(state, detail)
    if outcome == "not_better" and state == "expired":
        detail = f"It was not better, and nobody approved it before the review ended. {_SAME_STAYS}"
    because = f" {reason}" if reason else ""
    code = f" ({error_code})" if error_code and error_code not in because else ""
    return AttemptExplanation(headline, f"{detail}{because}{code}", following)


def _approve(verdict: Verdict | None) -> str:
    if verdict == "inconclusive":
        return "Approve it with force, if it was tested, or reject it; without a decision it expires after 14 days."
    return "Approve or reject it; without a decision it expires after 14 days."


def _went_live(state: TrainingRunState, *, decision: Decision | None, version_no: int | None) -> AttemptExplanation:
    name = f"v{version_no}" if version_no is not None else "a version"
    if state == "rolled_back":
        detail = f"It went live as {name} and was rolled back; the name answers with what was live before it."
        return AttemptExplanation(f"Rolled back {name}", detail, None)
    who = "Somebody approved it" if decision == "promoted" else "It was better on the held-back samples"
    return AttemptExplanation(f"Became {name}", f"{who} and went live as {name}.", None)
