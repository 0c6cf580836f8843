"""Judging: what a judge is, the rubric, and how the answers to one attempt's questions are judged.

Belongs here: the protocol (free of HTTP and of any model), the four calls per sample, what counts as failed, and
which judge the settings name. Does not belong here: the judges themselves (`reference_judge.py`, `judge_openai.py`)
and the bars that turn judgements into a verdict (`rules/decision.py`).
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import polars as pl

from loop_dagster.errors import BadRequest, JudgeRefused, JudgeRejected, JudgeUnavailable, JudgeUnreadable, LoopError
from loop_dagster.models.journal import Journal
from loop_dagster.tables import JUDGEMENTS
from loop_dagster.tables.base import ATTEMPT_COLUMNS

if TYPE_CHECKING:
    from loop_dagster.settings import Settings

Message = Mapping[str, Any]
Ratings = Mapping[str, float]
Preference = Literal["first", "second", "tie"]
Side = Literal["candidate", "incumbent"]
Progress = Callable[[int, int], None]
T = TypeVar("T")

#: Columns of `judgements` that `judge_answers` fills; the attempt's own columns are put in front by its caller.
JUDGED_SCHEMA = {
    name: dtype for name, dtype in JUDGEMENTS.schema.items() if name not in {c.name for c in ATTEMPT_COLUMNS}
}

#: So many samples in a row without a reachable judge end the comparison: the server is down, and every further sample
#: would only wait out its retries (ours).
GIVE_UP_AFTER = 32


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
    """One question that answers are judged on. Without `right_answer` they are rated on the rubric alone."""

    sample_id: str
    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    right_answer: Message | None = None

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
    """What a judge has used so far, for the money of an attempt."""

    calls: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0


@runtime_checkable
class Judge(Protocol):
    """Rates an answer and prefers one of two. Never told which answer is live, nor which sample was asked before.

    `rate` gives every dimension of `DIMENSIONS` a number from 0 to 10. Both calls raise `JudgeUnreadable` when the
    judge said something else, `JudgeUnavailable` or `JudgeRejected` when this sample cannot be judged, and
    `JudgeRefused` when no further one can. They are called from `concurrency` threads at once.
    """

    @property
    def name(self) -> str: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def usage(self) -> Usage: ...

    def rate(self, case: Case, answer: Message) -> Ratings: ...

    def prefer(self, case: Case, first: Message, second: Message) -> Preference: ...


@dataclass(frozen=True, slots=True)
class Judged:
    """What was judged. `frame` has the columns of `judgements` without the attempt's, in the order of the cases.

    `ended` says why it stopped before the last case, null when it did not; the `not_reached` cases have no row, for
    they are neither failed nor gone. `usage` is what the judge used in this call.
    """

    frame: pl.DataFrame
    ended: str | None
    not_reached: int
    usage: Usage


def score(ratings: Ratings) -> float:
    """Sum of the ratings over ten times the dimensions: 0 to 1 (rules.md, How it is tested)."""
    return math.fsum(ratings.values()) / (10 * len(ratings))


def rate(judge: Judge, case: Case, answer: Message) -> Ratings:
    """The judge's ratings, checked; asked once more when unreadable, then `JudgeUnreadable` goes on to the caller."""
    return _asked_twice(lambda: _checked_ratings(judge, judge.rate(case, answer)))


def prefer(judge: Judge, case: Case, first: Message, second: Message) -> Preference:
    """The judge's preference, checked; asked once more when unreadable, then `JudgeUnreadable` goes on."""
    return _asked_twice(lambda: _checked_preference(judge, judge.prefer(case, first, second)))


def judge_answers(
    judge: Judge,
    cases: Sequence[Case],
    answers: pl.DataFrame,
    *,
    progress: Progress | None = None,
    may_go_on: Callable[[], bool] = lambda: True,
    journal: Path | None = None,
) -> Judged:
    """Judge both sides' answers to `cases`, four calls a sample, blind (rules.md, How it is tested).

    `answers` has at least the columns sample_id, side, answer and finish of the table `answers`, with both sides of
    every case; a side that is not there raises. `may_go_on` is asked before each sample: false ends it, which is how
    the money of an attempt or a lost lease does. With a `journal` what was judged is kept in that file, and a second
    call with the same judge asks nothing again; the caller deletes it. `progress` gets (samples done, samples in all).
    """
    sides = _sides(cases, answers)
    before = judge.usage
    with Journal(journal, {"judge": judge.name, "rubric": list(DIMENSIONS)}) if journal else nullcontext() as opened:
        asked = {case.sample_id for case in cases}
        kept = {row["sample_id"]: row for row in opened.rows if row["sample_id"] in asked} if opened else {}
        todo = [case for case in cases if case.sample_id not in kept]

        def keep(row: dict[str, Any]) -> None:
            kept[row["sample_id"]] = row
            if opened and row["error_code"] != JudgeUnavailable.code:  # a judge that is back is asked again
                opened.append(row)
            if progress:
                progress(len(kept), len(cases))

        ended = _judge_all(judge, todo, sides, may_go_on, keep)
    rows = [kept[case.sample_id] for case in cases if case.sample_id in kept]
    frame = pl.DataFrame(rows, schema=JUDGED_SCHEMA, strict=True)
    return Judged(frame, ended, len(cases) - len(rows), _minus(judge.usage, before))


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


# --- one sample ------------------------------------------------------------------------------------------------------


def _asked_twice(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except JudgeUnreadable:
        return ask()


def _checked_ratings(judge: Judge, ratings: Ratings) -> Ratings:
    missing = [name for name in DIMENSIONS if name not in ratings]
    if missing:
        raise JudgeUnreadable(judge.name, "ratings", f"left out {', '.join(missing)}")
    numbers = {name: float(ratings[name]) for name in DIMENSIONS}
    if not all(0 <= number <= 10 for number in numbers.values()):  # false for NaN too
        raise JudgeUnreadable(judge.name, "ratings", "gave a number outside 0 to 10")
    return numbers


def _checked_preference(judge: Judge, preference: Preference) -> Preference:
    if preference not in ("first", "second", "tie"):
        raise JudgeUnreadable(judge.name, "preference", "named neither first, second nor tie")
    return preference


def _judge_case(judge: Judge, case: Case, candidate: Message | None, incumbent: Message | None) -> dict[str, Any]:
    """One row of `judgements`. `JudgeRefused` goes on to the caller; what concerns this sample alone fails it."""
    try:
        if candidate is None:
            return _unanswered(judge, case, incumbent)
        if incumbent is None:
            return _failed(case, "INCUMBENT_UNANSWERED")
        mine, theirs = rate(judge, case, candidate), rate(judge, case, incumbent)
        candidate_first = _side_of(prefer(judge, case, candidate, incumbent), ("candidate", "incumbent"))
        incumbent_first = _side_of(prefer(judge, case, incumbent, candidate), ("incumbent", "candidate"))
    except (JudgeUnreadable, JudgeUnavailable, JudgeRejected) as error:
        return _failed(case, error.code)
    return {
        **_row(case, "scored"),
        "candidate_score": score(mine),
        "incumbent_score": score(theirs),
        "candidate_ratings": _ratings_text(mine),
        "incumbent_ratings": _ratings_text(theirs),
        "candidate_first": candidate_first,
        "incumbent_first": incumbent_first,
        "winner": candidate_first if candidate_first == incumbent_first else "tie",
    }


def _unanswered(judge: Judge, case: Case, incumbent: Message | None) -> dict[str, Any]:
    """The candidate gave nothing: a loss with 0, the incumbent rated as usual, or at 0 where it gave nothing either."""
    theirs = rate(judge, case, incumbent) if incumbent is not None else None
    return {
        **_row(case, "scored"),
        "candidate_score": 0.0,
        "incumbent_score": score(theirs) if theirs else 0.0,
        "incumbent_ratings": _ratings_text(theirs) if theirs else None,
        "winner": "incumbent",
        "unanswered": True,
    }


def _row(case: Case, status: Literal["scored", "failed"]) -> dict[str, Any]:
    return {**dict.fromkeys(JUDGED_SCHEMA), "sample_id": case.sample_id, "status": status, "unanswered": False}


def _failed(case: Case, code: str) -> dict[str, Any]:
    return {**_row(case, "failed"), "error_code": code}


def _side_of(preference: Preference, order: tuple[Side, Side]) -> Side | Literal["tie"]:
    return "tie" if preference == "tie" else order[preference == "second"]


def _ratings_text(ratings: Ratings) -> str:
    return json.dumps(dict(ratings), sort_keys=True, separators=(",", ":"))


# --- all samples -----------------------------------------------------------------------------------------------------


def _sides(cases: Sequence[Case], answers: pl.DataFrame) -> dict[tuple[str, Side], Message | None]:
    """The answer of each (sample, side), null where it gave none; finish `length` is judged as it stands."""
    given: dict[tuple[str, Side], Message | None] = {}
    for row in answers.select("sample_id", "side", "answer", "finish").iter_rows(named=True):
        answered = row["answer"] is not None and row["finish"] in ("stop", "length")
        given[row["sample_id"], row["side"]] = json.loads(row["answer"]) if answered else None
    wanted = [(case.sample_id, side) for case in cases for side in ("candidate", "incumbent")]
    missing = sum(key not in given for key in wanted)
    if missing:
        raise LoopError(
            f"{missing} of {len(wanted)} answers are not in `answers`: the step that answers has not finished. "
            "Run it again before judging; an answer that a model could not give has a row too.",
        )
    return given


def _judge_all(
    judge: Judge,
    cases: Sequence[Case],
    sides: Mapping[tuple[str, Side], Message | None],
    may_go_on: Callable[[], bool],
    keep: Callable[[dict[str, Any]], None],
) -> str | None:
    """Hand each row to `keep` as it is judged; why it ended before the last case, null when it did not."""
    waiting = iter(cases)
    running: set[Future[dict[str, Any]]] = set()
    ended: str | None = None
    unreachable = 0
    with ThreadPoolExecutor(max_workers=judge.concurrency, thread_name_prefix="judge") as pool:
        while True:
            # Only as many are handed out as can run, so that an end waits for no queue.
            while not ended and len(running) < judge.concurrency and (case := next(waiting, None)):
                if not may_go_on():
                    ended = "It was ended before all samples were judged: money, time or the lease ran out."
                    break
                both = sides[case.sample_id, "candidate"], sides[case.sample_id, "incumbent"]
                running.add(pool.submit(_judge_case, judge, case, *both))
            if not running:
                return ended
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                try:
                    row = future.result()
                except JudgeRefused as error:
                    ended = error.message
                    continue
                unreachable = unreachable + 1 if row["error_code"] == JudgeUnavailable.code else 0
                keep(row)
            if unreachable >= GIVE_UP_AFTER and not ended:
                ended = (
                    f"The judge {judge.name} could not be reached for {unreachable} samples in a row; it was given up."
                )


def _minus(now: Usage, before: Usage) -> Usage:
    return Usage(
        now.calls - before.calls,
        now.prompt_tokens - before.prompt_tokens,
        now.answer_tokens - before.answer_tokens,
    )
