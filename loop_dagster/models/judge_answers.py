"""Judging the answers to one attempt's questions: four calls a sample, many at once, never one twice.

Belongs here: which calls a sample needs, what counts as failed, when it ends before the last sample (the judge is gone,
the money is used up, the step is lost), and going on after a kill. Does not belong here: the judge (`judge.py`) and
the bars that turn judgements into a verdict (`rules/decision.py`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import polars as pl

from loop_dagster.errors import JudgeRefused, JudgeRejected, JudgeUnavailable, JudgeUnreadable, LoopError
from loop_dagster.models.journal import Journal
from loop_dagster.models.judge import (
    Case,
    Judge,
    Measured,
    Message,
    Preference,
    Ratings,
    Side,
    Stoppable,
    Usage,
    prefer,
    rate,
    score,
)
from loop_dagster.models.workers import Workers
from loop_dagster.rules.decision import winner
from loop_dagster.rules.money import Prices, in_dollars
from loop_dagster.tables import JUDGEMENTS
from loop_dagster.tables.base import ATTEMPT_COLUMNS

Progress = Callable[[int, int], None]
#: The calls of a sample: rating each side, and preferring one, named after the side that is read first.
Call = Literal["rate candidate", "rate incumbent", "candidate first", "incumbent first"]
CALLS: Final[tuple[Call, ...]] = get_args(Call)

#: Columns of `judgements` that are filled here; the attempt's own columns are put in front by the caller.
JUDGED_SCHEMA: Final = {
    name: dtype for name, dtype in JUDGEMENTS.schema.items() if name not in {c.name for c in ATTEMPT_COLUMNS}
}
#: So many calls in a row without a reachable judge end the comparison: the server is down, and every further one would
#: only wait out its tries (ours).
GIVE_UP_AFTER: Final = 32
#: Seconds between two looks whether the step is still ours, and how long an end waits for calls under way.
LOOK_S, GRACE_S = 1.0, 5.0
#: Counts up when calls or their reading change, so that a journal of before is not gone on with.
_FORM: Final = 2
_TAKEN_AWAY: Final = "It was ended before all samples were judged: the step was cancelled or taken over."
#: What is counted for a call that a killed process had under way: a part of the most that it can use.
_LOST_BYTES_PER_TOKEN, _LOST_ANSWER_TOKENS = 3, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What judging may cost: the judge's prices and a limit in nanocents over everything that the attempt used."""

    prices: Prices
    limit: int

    def cost(self, usage: Usage) -> int:
        """Nanocents."""
        return self.prices.cost(input_tokens=usage.prompt_tokens, output_tokens=usage.answer_tokens)


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
        notes = _Notes(leaving.enter_context(Journal(journal, {"form": _FORM})) if journal else None, used_before)
        work = _Work(judge, notes, budget)
        samples = [_sample(judge, case, candidate, incumbent) for case, candidate, incumbent in _pairs(cases, answers)]
        work.run(samples, progress, may_go_on)
    rows = [_row_of(sample) for sample in samples if sample.done]
    frame = pl.DataFrame(rows, schema=JUDGED_SCHEMA, strict=True)
    return Judged(frame, work.ended, work.stopped, len(cases) - len(rows), judge.usage - before, notes.total)


# --- samples ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sample:
    """One case, both answers, and what is known of its calls so far. `key` stands for all that the judge is shown."""

    case: Case
    candidate: Message | None = field(repr=False)
    incumbent: Message | None = field(repr=False)
    key: str
    calls: tuple[Call, ...]
    said: dict[Call, Any] = field(default_factory=dict)
    error_code: str | None = None
    most: dict[Call, Usage] = field(default_factory=dict)
    under_way: int = 0

    @property
    def done(self) -> bool:
        return self.error_code is not None or len(self.said) == len(self.calls)

    def answers(self, call: Call) -> tuple[Message, ...]:
        """What a call shows, in order."""
        shown = {
            "rate candidate": (self.candidate,),
            "rate incumbent": (self.incumbent,),
            "candidate first": (self.candidate, self.incumbent),
            "incumbent first": (self.incumbent, self.candidate),
        }[call]
        return tuple(answer for answer in shown if answer is not None)


def _sample(judge: Judge, case: Case, candidate: Message | None, incumbent: Message | None) -> _Sample:
    shown = [judge.name, case.sample_id, case.messages, case.tools, case.right_answer, candidate, incumbent]
    key = hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:32]
    error_code = None
    calls: tuple[Call, ...] = CALLS
    if candidate is None:  # a loss whatever the judge says; it rates what the other one answered
        calls = ("rate incumbent",) if incumbent is not None else ()
    elif incumbent is None:
        calls, error_code = (), "INCUMBENT_UNANSWERED"
    # A judge that remembers must not learn from the order of calls which answer is whose.
    shuffled = random.Random(key).sample(calls, len(calls))  # noqa: S311 - the same one each time
    return _Sample(case, candidate, incumbent, key, tuple(shuffled), error_code=error_code)


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


def _asked(judge: Judge, sample: _Sample, call: Call) -> Ratings | Preference:
    answers = sample.answers(call)
    return rate(judge, sample.case, *answers) if len(answers) == 1 else prefer(judge, sample.case, *answers)


def _row_of(sample: _Sample) -> dict[str, Any]:
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


# --- what is kept ----------------------------------------------------------------------------------------------------


class _Notes:
    """The journal, if there is one: what each call said, what was used, and which calls were under way at a kill."""

    def __init__(self, journal: Journal | None, used_before: Usage) -> None:
        self._journal = journal
        self._known: dict[tuple[str, str], dict[str, Any]] = {}
        self.total = used_before
        if journal is None:
            return
        begun = next((row["used_before"] for row in journal.rows if "used_before" in row), None)
        if begun is None:
            journal.append({"used_before": used_before.as_row()})
        else:
            self.total = Usage(*begun)
        under_way: dict[tuple[str, str], Usage] = {}
        for row in journal.rows:
            if "used_before" in row:
                continue
            key = (row["key"], row["call"])
            if "begun" in row:
                under_way[key] = Usage(*row["begun"])
                continue
            under_way.pop(key, None)
            self.total += Usage(*row["used"])
            self._known[key] = row
        # What a killed process had asked was answered and billed, though nobody heard it.
        for key, used in under_way.items():
            self._write({"key": key[0], "call": key[1], "lost": True, "used": used.as_row()})
            self.total += used

    def recall(self, sample: _Sample) -> None:
        """Put what is known of a sample into it."""
        for call in sample.calls:
            row = self._known.get((sample.key, call), {})
            if "said" in row:
                sample.said[call] = row["said"]
            elif "failed" in row and row["failed"] != JudgeUnavailable.code:  # a judge that is back is asked again
                sample.error_code = row["failed"]

    @property
    def kept(self) -> bool:
        return self._journal is not None

    def begin(self, sample: _Sample, call: Call) -> None:
        if call in sample.most:
            tokens = sample.most[call].prompt_tokens // _LOST_BYTES_PER_TOKEN
            guess = Usage(1, tokens, _LOST_ANSWER_TOKENS, estimated=1)
            self._write({"key": sample.key, "call": call, "begun": guess.as_row()})

    def end(self, sample: _Sample, call: Call, used: Usage, **outcome: Any) -> None:
        self.total += used
        self._write({"key": sample.key, "call": call, "used": used.as_row(), **outcome})

    def end_of_work(self, used: Usage) -> None:
        """What calls used that nobody waited for."""
        if used != Usage():
            self.total += used
            self._write({"key": "", "call": "", "used": used.as_row()})

    def _write(self, row: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append(row)


# --- all samples -----------------------------------------------------------------------------------------------------

_Handed = tuple[_Sample, Call, float]  # and when, on the monotonic clock
_Calls = Workers[_Handed, Ratings | Preference]


class _Work:
    """The calls of all samples, as many at once as the judge takes."""

    def __init__(self, judge: Judge, notes: _Notes, budget: Budget | None) -> None:
        self._judge, self._notes = judge, notes
        self._budget = budget if budget is not None and budget.cost(Usage(1, 1, 1)) else None
        self._seen = judge.usage
        self._reserved: dict[str, int] = {}
        self._unreachable, self._reached_at = 0, -math.inf
        self._leave_at = math.inf
        self._todo: deque[_Sample] = deque()
        self._waiting: deque[tuple[_Sample, Call]] = deque()
        self.ended: str | None = None
        self.stopped: str | None = None

    def run(self, samples: Sequence[_Sample], progress: Progress | None, may_go_on: Callable[[], bool]) -> None:
        """Ask until every sample is done, or until it ended or stopped."""
        for sample in samples:
            self._notes.recall(sample)
        self._todo.extend(sample for sample in samples if not sample.done)
        done = len(samples) - len(self._todo)
        with _Calls(self._judge.concurrency, name="judge") as calls:
            try:
                while True:
                    self._hand_in(calls, may_go_on)
                    if not calls.busy or time.monotonic() >= self._leave_at:
                        return
                    taken = calls.take(LOOK_S)
                    if taken is None:
                        if self.ended is None and not may_go_on():
                            self._end(_TAKEN_AWAY)
                        continue
                    (sample, call, handed_in), outcome = taken
                    was_done = sample.done
                    self._take(sample, call, outcome, handed_in)
                    if sample.done and not was_done:
                        done += 1
                        if progress:
                            progress(done, len(samples))
            finally:
                if calls.busy and isinstance(self._judge, Stoppable):
                    self._judge.stop()
                self._notes.end_of_work(self._newly_used())

    def _hand_in(self, calls: _Calls, may_go_on: Callable[[], bool]) -> None:
        """Keep the judge busy: calls of samples that were begun come first."""
        while calls.busy < self._judge.concurrency:
            if self._waiting:
                sample, call = self._waiting.popleft()
                if sample.error_code is None:
                    sample.under_way += 1
                    self._notes.begin(sample, call)
                    job = functools.partial(_asked, self._judge, sample, call)
                    calls.hand_in((sample, call, time.monotonic()), job)
            elif self._todo and self._may_begin(self._todo[0], may_go_on):
                sample = self._todo.popleft()
                self._waiting.extend((sample, call) for call in sample.calls if call not in sample.said)
            else:
                return

    def _may_begin(self, sample: _Sample, may_go_on: Callable[[], bool]) -> bool:
        if not may_go_on():
            self._todo.clear()  # what was begun may end, if it does so soon
            self._end(_TAKEN_AWAY)
            return False
        if not sample.most and isinstance(self._judge, Measured) and (self._budget or self._notes.kept):
            sample.most = {call: self._judge.most(sample.case, *sample.answers(call)) for call in sample.calls}
        if self._budget is None:
            return True
        # Each call may be asked once more.
        needed = self._budget.cost(sum((most * 2 for most in sample.most.values()), Usage()))
        spent = self._budget.cost(self._notes.total)
        if spent + sum(self._reserved.values()) + needed <= self._budget.limit:
            self._reserved[sample.key] = needed
            return True
        if not self._reserved:
            self._todo.clear()
            self.stopped = (
                f"Scoring an attempt may cost {in_dollars(self._budget.limit)}; {in_dollars(spent)} are spent, and the "
                "calls for one more sample could have passed the limit."
            )
        return False

    def _take(self, sample: _Sample, call: Call, outcome: Ratings | Preference | Exception, handed_in: float) -> None:
        """Note what came of a call."""
        sample.under_way -= 1
        used = self._newly_used()
        if not isinstance(outcome, JudgeUnavailable):
            self._unreachable, self._reached_at = 0, time.monotonic()
        elif self._reached_at < handed_in:  # one that fails beside others that do not says nothing of the server
            self._unreachable += 1
        if isinstance(outcome, JudgeRefused):
            self._notes.end(sample, call, used, refused=outcome.code)
            self._end(outcome.message, at_once=True)
        elif isinstance(outcome, JudgeUnreadable | JudgeUnavailable | JudgeRejected):
            self._notes.end(sample, call, used, failed=outcome.code)
            sample.error_code = sample.error_code or outcome.code
            if self._unreachable >= GIVE_UP_AFTER:
                gone = f"The judge {self._judge.name} could not be reached in {self._unreachable} calls in a row"
                self._end(f"{gone}; it was given up.", at_once=True)
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            self._notes.end(sample, call, used, said=outcome)
            sample.said[call] = outcome
        if sample.done and not sample.under_way:
            self._reserved.pop(sample.key, None)

    def _end(self, why: str, *, at_once: bool = False) -> None:
        if at_once:
            self._todo.clear()
            self._waiting.clear()
        if self.ended is None:
            self.ended = why
            self._leave_at = time.monotonic() + GRACE_S

    def _newly_used(self) -> Usage:
        """What calls have used since this was asked last; all of it is counted, whichever call it was of."""
        now = self._judge.usage
        used, self._seen = now - self._seen, now
        return used
