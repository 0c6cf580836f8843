"""Attempts and versions: a move that is not allowed, or that comes too early or too late."""

from __future__ import annotations

from collections.abc import Sequence

from loop_dagster.errors.base import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNAVAILABLE, Conflict, LoopError


class MoveNotAllowed(Conflict):
    """An attempt cannot go from its state to another one (rules/states.py)."""

    def __init__(self, old: str, new: str, allowed: Sequence[str]) -> None:
        way = f"only {', '.join(allowed)} may follow" if allowed else "it has ended and nothing follows"
        super().__init__(
            f"An attempt in state {old} cannot become {new}: {way}. Read its state again before moving it.",
            state=old,
            wanted=new,
            allowed=list(allowed),
        )


class NotEnoughSamples(LoopError):
    """Fewer samples than the next attempt needs (rules.md, When an attempt starts)."""

    code = "NOT_ENOUGH_SAMPLES"
    exit_code = EXIT_REFUSED

    def __init__(self, pipeline: str, have: int, need: int, sentence: str) -> None:
        super().__init__(f"Pipeline {pipeline} cannot train yet. {sentence}", have=have, need=need)


class NoReport(LoopError):
    """An attempt that was not compared yet, or that ended before it was: there is no report to show."""

    code = "NOT_FOUND"
    exit_code = EXIT_NOT_FOUND

    def __init__(self, attempt: str, state: str, reason: str | None, *, ended: bool) -> None:
        if ended:
            said = f"Attempt {attempt} has no report: it ended as {state} before it was compared. {reason or ''}"
        else:
            said = (
                f"Attempt {attempt} has no report yet: it is {state}. The report is written when both models have "
                "answered and the judge has rated; `loop run --until-idle` goes on until then."
            )
        super().__init__(said.strip(), kind="report", name=attempt, state=state)


class LiveMoved(Conflict):
    """What is live is not what the attempt was compared with."""

    code = "LIVE_MOVED"

    def __init__(self, tag: str, expected: int | None, found: int | None) -> None:
        said = {number: "nothing" if number is None else f"v{number}" for number in (expected, found)}
        super().__init__(
            f"loop-{tag} answers with {said[found]} by now, and the attempt was compared with {said[expected]}. "
            "Nothing went live: compare it again with what is live now.",
            tag=tag,
            expected=expected,
            found=found,
        )


class LiveUnavailable(LoopError):
    """Something is live under the name and cannot answer at the moment: 503, never 404 (http-api.md, The gateway)."""

    code = "LIVE_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, why: str, next_step: str) -> None:
        super().__init__(f"The live version cannot answer: {why.rstrip('.')}. {next_step}.")
