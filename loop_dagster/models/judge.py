"""What a judge is, the rubric, one rating and one preference, and which judge the settings name.

Belongs here: the protocol (free of HTTP and of any model), what is asked once more, what a judge used. Does not belong
here: the judges themselves (`reference_judge.py`, `judge_openai.py`), judging all samples of an attempt
(`judge_answers.py`) and the bars that turn judgements into a verdict (`rules/decision.py`).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from loop_dagster.errors import BadRequest, JudgeUnreadable
from loop_dagster.rules.ratings import read_rating

if TYPE_CHECKING:
    from loop_dagster.settings import Settings

Message = Mapping[str, Any]
Ratings = Mapping[str, float]
Preference = Literal["first", "second", "tie"]
Side = Literal["candidate", "incumbent"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of the rubric, rated 0 to 10."""

    name: str
    question: str


#: rules.md, How it is tested: "Rubric (ours): correctness, completeness, style".
RUBRIC: tuple[Dimension, ...] = (
    Dimension("correctness", "Is everything that the answer says or does right, and nothing of it wrong or made up?"),
    Dimension("completeness", "Does the answer hold everything that was asked for?"),
    Dimension(
        "style", "Is the answer clear, well formed, as long as it should be and in the tone that the task asks for?"
    ),
)
DIMENSIONS: tuple[str, ...] = tuple(dimension.name for dimension in RUBRIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question that answers are judged on. Without `right_answer` they are rated on the rubric alone.

    Its representation shows no text, wherever a traceback prints it.
    """

    sample_id: str
    messages: Sequence[Message] = field(repr=False)
    tools: Sequence[Message] | None = field(default=None, repr=False)
    right_answer: Message | None = field(default=None, repr=False)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Case:
        """A row of the table `questions`, its JSON texts parsed."""
        return cls(
            sample_id=row["sample_id"],
            messages=json.loads(row["messages"]),
            tools=json.loads(row["tools"]) if row["tools"] else None,
            right_answer=json.loads(row["right_answer"]) if row["right_answer"] else None,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a judge has used, for the money of an attempt. Of the `calls`, the tokens of `estimated` are estimates."""

    calls: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    estimated: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(mine + theirs for mine, theirs in zip(self.as_row(), other.as_row(), strict=True)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(mine - theirs for mine, theirs in zip(self.as_row(), other.as_row(), strict=True)))

    def __mul__(self, times: int) -> Usage:
        return Usage(*(times * count for count in self.as_row()))

    def as_row(self) -> tuple[int, ...]:
        """Its counts in the order of its fields; `Usage(*row)` takes them back."""
        return self.calls, self.prompt_tokens, self.answer_tokens, self.estimated


@runtime_checkable
class Judge(Protocol):
    """Rates an answer and prefers one of two. Never told which answer is live, nor which sample was asked before.

    `rate` gives every dimension of `DIMENSIONS` a number from 0 to 10. Both calls raise `JudgeUnreadable` when the
    judge said something else, `JudgeUnavailable` or `JudgeRejected` when this sample cannot be judged, and
    `JudgeRefused` when no further one can. They are called from `concurrency` threads at once, and `usage` is what all
    calls that have ended have used.
    """

    @property
    def name(self) -> str: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def usage(self) -> Usage: ...

    def rate(self, case: Case, answer: Message) -> Ratings: ...

    def prefer(self, case: Case, first: Message, second: Message) -> Preference: ...


@runtime_checkable
class Measured(Protocol):
    """A judge that can say beforehand what a call may use, so that it never passes a limit of money.

    `most` is of one call: one answer to rate, or two to prefer one of.
    """

    def most(self, case: Case, *answers: Message) -> Usage: ...


@runtime_checkable
class Stoppable(Protocol):
    """A judge whose calls wait for somebody; `stop` ends every wait and every further try at once."""

    def stop(self) -> None: ...


@runtime_checkable
class NeedsRightAnswer(Protocol):
    """A judge that says whether it can rate nothing without a right answer; one that does not say so can."""

    needs_right_answer: bool


def score(ratings: Ratings) -> float:
    """Sum of the ratings over ten times the dimensions: 0 to 1 (rules.md, How it is tested)."""
    return math.fsum(ratings.values()) / (10 * len(ratings))


def rate(judge: Judge, case: Case, answer: Message) -> Ratings:
    """The judge's ratings, checked; asked once more when unreadable, then `JudgeUnreadable` goes on to the caller."""
    return _asked_twice(lambda: _checked_ratings(judge, judge.rate(case, answer)))


def prefer(judge: Judge, case: Case, first: Message, second: Message) -> Preference:
    """The judge's preference, checked; asked once more when unreadable, then `JudgeUnreadable` goes on."""
    return _asked_twice(lambda: _checked_preference(judge, judge.prefer(case, first, second)))


def open_judge(settings: Settings) -> Judge:
    """The judge that `settings.judge` names: `reference`, `openai` or `module:factory` (called with the settings)."""
    name = settings.judge
    if name == "reference":
        from loop_dagster.models.reference_judge import ReferenceJudge

        return ReferenceJudge()
    if name == "openai":
        from loop_dagster.models.judge_openai import OpenAIJudge

        return OpenAIJudge.from_settings(settings)
    module_name, colon, factory_name = name.partition(":")
    if not colon or not module_name or not factory_name:
        raise BadRequest(f"LOOP_JUDGE must be `reference`, `openai` or `module:factory`, got {name!r}.")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise BadRequest(
            f"LOOP_JUDGE names {name!r}, which cannot be imported ({error}). The module must be importable by "
            "this installation's Python and hold that factory."
        ) from error
    judge = factory(settings)
    missing = [part for part in ("name", "concurrency", "usage", "rate", "prefer") if not hasattr(judge, part)]
    if missing:
        raise BadRequest(
            f"The judge that {name!r} made lacks {', '.join(missing)}; loop_dagster/models/judge.py, class Judge, "
            "says what a judge has."
        )
    assert isinstance(judge, Judge)
    return judge


def judge_key(settings: Settings) -> str:
    """What stands for the judge of the settings and its rubric: the same one scores no sample twice."""
    rubric = [[dimension.name, dimension.question] for dimension in RUBRIC]
    told = json.dumps([settings.judge, settings.judge_model if settings.judge == "openai" else None, rubric])
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def why_no_scoring(settings: Settings) -> str | None:
    """Why the judge of the settings can score no unreviewed sample, as a sentence; None when it can.

    Opens nothing: a judge that only shows its limits when it is made is met when it is (`cannot_rate_alone`).
    """
    if settings.judge == "reference":
        return (
            "The judge `reference` compares with a right answer, and nobody gave one for an unreviewed sample, so it "
            "cannot score any. Let a model judge (LOOP_JUDGE=openai), or review samples."
        )
    if settings.judge == "openai":
        missing = [name.upper() for name in ("judge_url", "judge_model") if not getattr(settings, name)]
        if missing:
            return f"LOOP_JUDGE is `openai`, which needs {' and '.join(f'LOOP_{name}' for name in missing)}; set them."
    return None


def cannot_rate_alone(judge: Judge) -> bool:
    """Whether the judge can rate nothing without a right answer."""
    return isinstance(judge, NeedsRightAnswer) and judge.needs_right_answer


def _asked_twice(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except JudgeUnreadable:
        return ask()


def _checked_ratings(judge: Judge, ratings: Ratings) -> Ratings:
    missing = [name for name in DIMENSIONS if name not in ratings]
    if missing:
        raise JudgeUnreadable(judge.name, "ratings", f"left out {', '.join(missing)}")
    read = {name: read_rating(ratings[name]) for name in DIMENSIONS}
    numbers = {name: rating for name, rating in read.items() if rating is not None}
    if len(numbers) != len(DIMENSIONS):
        raise JudgeUnreadable(judge.name, "ratings", "gave no number from 0 to 10 for each")
    return numbers


def _checked_preference(judge: Judge, preference: Preference) -> Preference:
    if preference not in ("first", "second", "tie"):
        raise JudgeUnreadable(judge.name, "preference", "named neither first, second nor tie")
    return preference
