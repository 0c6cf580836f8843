"""What happens to one sample in one pipeline, always with the sentence that says why.

Belongs here: the five states and their sentences. Does not belong here: finding the sample, its reason (`selection.py`
gives it, in a selection of the whole pipeline) or the attempts that trained on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from loop_dagster.rules.selection import LEFT_OUT, Reason

State = Literal["held_back", "learned", "trained", "waiting", "left_out"]


@dataclass(frozen=True, slots=True)
class SampleState:
    """`attempt_no`: the attempt that learned, trained on or held it back; `version_no`: the version that learned it."""

    state: State
    attempt_no: int | None
    version_no: int | None
    reason: str

    def as_dict(self) -> dict[str, str | int | None]:
        return {
            "state": self.state,
            "attempt_no": self.attempt_no,
            "version_no": self.version_no,
            "reason": self.reason,
        }


def sample_state(
    *,
    reason: Reason | None,
    held_by: int | None,
    trained_by: Sequence[int],
    trained_before_correction: bool = False,
    versions: Mapping[int, int],
) -> SampleState:
    """The state of a sample (rules.md, What a sample teaches).

    `reason`: of the row that `select` gives for it now; None when the pipeline does not select it (no tag of it,
    outside the conditions, expired). `held_by`: the attempt that held it back. `trained_by`: attempts with an adapter
    that trained on the sample with the right answer that it has now, or with any when it has none now;
    `trained_before_correction`: one trained on it with another right answer. `versions`: version of each attempt that
    went live and was not rolled back.
    """
    if held_by is not None and reason == "held_before":
        said = f"Attempt {held_by} was the first to hold it back; it judges attempts and is never trained on."
        return SampleState("held_back", held_by, None, said)
    if held_by is not None:
        said = (
            f"{_why_out(reason)} It was held back by attempt {held_by}, so it is never trained on, and it is not asked."
        )
        return SampleState("left_out", held_by, None, said)
    if trained_by:
        return _trained(reason, trained_by, versions)
    if reason in ("new", "again"):
        said = "It waits for the next attempt, which trains on it."
        if trained_before_correction:
            said = "Its right answer changed since it was trained on; the next attempt trains on the new one."
        return SampleState("waiting", None, None, said)
    if reason == "held_new":
        return SampleState("waiting", None, None, "It waits for the next attempt, which holds it back to judge by it.")
    return SampleState("left_out", None, None, _why_out(reason))


def _trained(reason: Reason | None, trained_by: Sequence[int], versions: Mapping[int, int]) -> SampleState:
    live = [attempt for attempt in trained_by if attempt in versions]
    still = "" if reason in ("new", "again") else f" It is not trained on again: {_lowered(_why_out(reason))}"
    if live:
        attempt = max(live, key=lambda number: versions[number])
        said = f"Version v{versions[attempt]} learned it (attempt {attempt}).{still}"
        return SampleState("learned", attempt, versions[attempt], said)
    attempt = max(trained_by)
    again = "; the next one trains on it again." if reason in ("new", "again") else f".{still}"
    return SampleState("trained", attempt, None, f"Attempt {attempt} trained on it and did not go live{again}")


def _why_out(reason: Reason | None) -> str:
    if reason is None:
        return "The pipeline does not select it: it carries no tag of it, lies outside its conditions, or has expired."
    return LEFT_OUT.get(reason, "The pipeline does not train on it.")


def _lowered(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
