"""Judging the answers to one attempt's questions: four calls a sample, many at once, never one twice.

Belongs here: which calls a sample of a comparison needs, and what counts as failed. Does not belong here: the judge
(`judge.py`), working off the calls, ending early and going on after a kill (`judge_calls.py`), and the bars that turn
judgements into a verdict (`rules/decision.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import polars as pl

from loop_dagster.errors import LoopError
from loop_dagster.models.journal import Journal
from loop_dagster.models.judge import Case, Judge, Message, Preference, Ratings, Side, Usage, score
from loop_dagster.models.judge_calls import CALLS, FORM, Budget, Call, Notes, Progress, Sample, Work, key_of
from loop_dagster.rules.decision import winner
from loop_dagster.tables import JUDGEMENTS
from loop_dagster.tables.base import ATTEMPT_COLUMNS

__all__ = ["JUDGED_SCHEMA", "Budget", "Judged", "judge_answers"]

#: Columns of `judgements` that are filled here; the attempt's own columns are put in front by the caller.
JUDGED_SCHEMA: Final = {
    name: dtype for name, dtype in JUDGEMENTS.schema.items() if name not in {c.name for c in ATTEMPT_COLUMNS}
}


@dataclass(frozen=True, slots=True)
class Judged:
    """What was judged. `frame` has the columns of `judgements` without the attempt's, in the order of the cases.

    `ended` says why the judge could not go on, `stopped` why it went no further by itself (money), both null when all
    was judged; the `not_reached` cases have no row, for they are neither failed nor gone. `usage` is what the judge
    used in this call, `total` in all calls for this attempt.
    """

    frame: pl.DataFrame
    ended: str | None
    stopped: str | None
    not_reached: int
    usage: Usage
    total: Usage


def judge_answers(
    judge: Judge,
    cases: Sequence[Case],
    answers: pl.DataFrame,
    *,
    budget: Budget | None = None,
    used_before: Usage = Usage(),  # noqa: B008 - frozen
    progress: Progress | None = None,
    may_go_on: Callable[[], bool] = lambda: True,
    journal: Path | None = None,
) -> Judged:
    """Judge both sides' answers to `cases`, four calls a sample, blind (rules.md, How it is tested).

    `answers` has at least the columns sample_id, side, answer and finish of the table `answers`, with both sides of
    every case; a side that is not there raises. With a `budget` no sample is begun whose calls could pass its limit;
    `used_before` is what the attempt had used when the journal was begun. `may_go_on` is asked before each sample and
    every second: false ends it, which is how a lost lease does. With a `journal` every call is kept in that file, and a
    second call with the same judge and answers asks none again; the caller deletes it. `progress` gets (samples done,
    samples in all).
    """
    before = judge.usage
    with ExitStack() as leaving:
        notes = Notes(leaving.enter_context(Journal(journal, {"form": FORM})) if journal else None, used_before)
        work = Work(judge, notes, budget)
        samples = [_sample(judge, case, candidate, incumbent) for case, candidate, incumbent in _pairs(cases, answers)]
        work.run(samples, progress, may_go_on)
    rows = [_row_of(sample) for sample in samples if sample.done]
    frame = pl.DataFrame(rows, schema=JUDGED_SCHEMA, strict=True)
    return Judged(frame, work.ended, work.stopped, len(cases) - len(rows), judge.usage - before, notes.total)


# --- samples ---------------------------------------------------------------------------------------------------------


def _sample(judge: Judge, case: Case, candidate: Message | None, incumbent: Message | None) -> Sample:
    key = key_of(judge, case, candidate, incumbent)
    error_code = None
    calls: tuple[Call, ...] = CALLS
    if candidate is None:  # a loss whatever the judge says; it rates what the other one answered
        calls = ("rate incumbent",) if incumbent is not None else ()
    elif incumbent is None:
        calls, error_code = (), "INCUMBENT_UNANSWERED"
    # A judge that remembers must not learn from the order of calls which answer is whose.
    shuffled = random.Random(key).sample(calls, len(calls))  # noqa: S311 - the same one each time
    return Sample(case, candidate, incumbent, key, tuple(shuffled), error_code=error_code)


def _pairs(cases: Sequence[Case], answers: pl.DataFrame) -> Iterator[tuple[Case, Message | None, Message | None]]:
    """Each case with both answers, null where a side gave none; finish `length` is judged as it stands."""
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
    for case in cases:
        yield case, given[case.sample_id, "candidate"], given[case.sample_id, "incumbent"]


def _row_of(sample: Sample) -> dict[str, Any]:
    """One row of `judgements`."""
    row = {**dict.fromkeys(JUDGED_SCHEMA), "sample_id": sample.case.sample_id, "unanswered": False}
    if sample.error_code is not None:
        return {**row, "status": "failed", "error_code": sample.error_code}
    mine, theirs = sample.said.get("rate candidate"), sample.said.get("rate incumbent")
    row |= {
        "status": "scored",
        "candidate_score": score(mine) if mine else 0.0,
        "incumbent_score": score(theirs) if theirs else 0.0,
        "candidate_ratings": _ratings_text(mine),
        "incumbent_ratings": _ratings_text(theirs),
    }
    if sample.candidate is None:
        return {**row, "winner": "incumbent", "unanswered": True}
    first = _side_of(sample.said["candidate first"], ("candidate", "incumbent"))
    second = _side_of(sample.said["incumbent first"], ("incumbent", "candidate"))
    return {**row, "candidate_first": first, "incumbent_first": second, "winner": winner(first, second)}


def _side_of(preference: Preference, order: tuple[Side, Side]) -> Side | Literal["tie"]:
    return "tie" if preference == "tie" else order[preference == "second"]


def _ratings_text(ratings: Ratings | None) -> str | None:
    return json.dumps(dict(ratings), sort_keys=True, separators=(",", ":")) if ratings else None
