"""The judge: what it says cannot be read, or it cannot be asked."""

from __future__ import annotations

from typing import Literal

from loop_dagster.errors.base import EXIT_UNAVAILABLE, LoopError


class JudgeUnreadable(LoopError):
    """The judge answered in a form that holds no rating or preference; it is asked once more."""

    code = "JUDGE_UNREADABLE"

    def __init__(self, judge: str, asked: Literal["ratings", "preference"], found: str) -> None:
        super().__init__(
            f"The judge {judge} was asked for {'ratings' if asked == 'ratings' else 'a preference'} and {found}. "
            "It is asked once more; then the sample counts as failed.",
            judge=judge,
            asked=asked,
        )


class JudgeRejected(LoopError):
    """The judge's server takes no such request (mostly: too long for it); this one sample cannot be judged."""

    code = "JUDGE_REJECTED"

    def __init__(self, judge: str, where: str, status: int) -> None:
        super().__init__(
            f"The judge {judge} at {where} rejected a request with status {status}; the sample counts as failed. "
            "If all are rejected, check LOOP_JUDGE_MODEL and whether its context is long enough for two answers.",
            judge=judge,
            status=status,
        )


class JudgeUnavailable(LoopError):
    """The judge could not be reached, or answered with server errors until the retries were used up."""

    code = "JUDGE_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, judge: str, where: str, found: str, tries: int) -> None:
        super().__init__(
            f"The judge {judge} at {where} gave no answer after {tries} tries (last: {found}). "
            "Check that the server runs and that LOOP_JUDGE_URL leads to it.",
            judge=judge,
        )


class AgentCouldNotStart(LoopError):
    """Train now opened nothing, since the judge did not answer just now; `why` is the judge's failure."""

    code = "AGENT_COULD_NOT_START"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, why: str) -> None:
        super().__init__(f"No attempt was opened, since the judge did not answer just now. {why}")


class JudgeRefused(LoopError):
    """The judge's key was refused or its model is gone: no further call can succeed, the comparison ends at once."""

    code = "JUDGE_REFUSED"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, judge: str, where: str, status: int, reason: Literal["key", "model", "credit"]) -> None:
        what = {
            "key": "refused the key (LOOP_JUDGE_API_KEY)",
            "model": "does not know the model or the address (LOOP_JUDGE_MODEL, LOOP_JUDGE_URL)",
            "credit": "has no credit left for the key",
        }[reason]
        super().__init__(
            f"The judge {judge} at {where} answered {status}: it {what}. Mend it; an attempt of which it scored "
            "nothing can then be tested again.",
            judge=judge,
            status=status,
            reason=reason,
        )
