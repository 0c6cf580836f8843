"""Calls to a judge, worked off: as many at once as it takes, kept as they come, ended when it is gone or too dear.

Belongs here: the calls of a sample, what a killed process leaves of them, when the work ends before the last sample
(the judge is gone, the money is used up, somebody else took over). Does not belong here: which calls a sample needs and
what their outcomes mean (`judge_answers.py` for comparisons, `judge_unreviewed.py` for what nobody reviewed).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from loop_dagster.errors import JudgeRefused, JudgeRejected, JudgeUnavailable, JudgeUnreadable
from loop_dagster.models.journal import Journal
from loop_dagster.models.judge import (
    Case,
    Judge,
    Measured,
    Message,
    Preference,
    Ratings,
    Stoppable,
    Usage,
    prefer,
    rate,
)
from loop_dagster.models.workers import Workers
from loop_dagster.rules.money import Prices, in_dollars

Progress = Callable[[int, int], None]
#: The calls of a sample: rating each side, and preferring one, named after the side that is read first.
Call = Literal["rate candidate", "rate incumbent", "candidate first", "incumbent first"]
CALLS: Final[tuple[Call, ...]] = get_args(Call)

#: So many calls in a row without a reachable judge end the comparison: the server is down, and every further one would
#: only wait out its tries (ours).
GIVE_UP_AFTER: Final = 32
#: Seconds between two looks whether the step is still ours, and how long an end waits for calls under way.
LOOK_S, GRACE_S = 1.0, 5.0
#: Counts up when calls or their reading change, so that a journal of before is not gone on with.
FORM: Final = 2
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


@dataclass(slots=True)
class Sample:
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


def key_of(judge: Judge, case: Case, candidate: Message | None, incumbent: Message | None = None) -> str:
    """What stands in a journal for all that the judge is shown of a sample: a hash, no text."""
    shown = [judge.name, case.sample_id, case.messages, case.tools, case.right_answer, candidate, incumbent]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:32]


def _asked(judge: Judge, sample: Sample, call: Call) -> Ratings | Preference:
    answers = sample.answers(call)
    return rate(judge, sample.case, *answers) if len(answers) == 1 else prefer(judge, sample.case, *answers)


# --- what is kept ----------------------------------------------------------------------------------------------------


class Notes:
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

    def recall(self, sample: Sample) -> None:
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

    def begin(self, sample: Sample, call: Call) -> None:
        if call in sample.most:
            tokens = sample.most[call].prompt_tokens // _LOST_BYTES_PER_TOKEN
            guess = Usage(1, tokens, _LOST_ANSWER_TOKENS, estimated=1)
            self._write({"key": sample.key, "call": call, "begun": guess.as_row()})

    def end(self, sample: Sample, call: Call, used: Usage, **outcome: Any) -> None:
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

_Handed = tuple[Sample, Call, float]  # and when, on the monotonic clock
_Calls = Workers[_Handed, Ratings | Preference]


class Work:
    """The calls of all samples, as many at once as the judge takes.

    `ended` says why the judge could not go on, `gone` the code of its error where it was the judge, `stopped` why it
    went no further by itself (money).
    """

    def __init__(self, judge: Judge, notes: Notes, budget: Budget | None) -> None:
        self._judge, self._notes = judge, notes
        self._budget = budget if budget is not None and budget.cost(Usage(1, 1, 1)) else None
        self._seen = judge.usage
        self._reserved: dict[str, int] = {}
        self._unreachable, self._reached_at = 0, -math.inf
        self._leave_at = math.inf
        self._todo: deque[Sample] = deque()
        self._waiting: deque[tuple[Sample, Call]] = deque()
        self.ended: str | None = None
        self.gone: str | None = None
        self.stopped: str | None = None

    def run(self, samples: Sequence[Sample], progress: Progress | None, may_go_on: Callable[[], bool]) -> None:
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

    def _may_begin(self, sample: Sample, may_go_on: Callable[[], bool]) -> bool:
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

    def _take(self, sample: Sample, call: Call, outcome: Ratings | Preference | Exception, handed_in: float) -> None:
        """Note what came of a call."""
        sample.under_way -= 1
        used = self._newly_used()
        if not isinstance(outcome, JudgeUnavailable):
            self._unreachable, self._reached_at = 0, time.monotonic()
        elif self._reached_at < handed_in:  # one that fails beside others that do not says nothing of the server
            self._unreachable += 1
        if isinstance(outcome, JudgeRefused):
            self._notes.end(sample, call, used, refused=outcome.code)
            self.gone = outcome.code
            self._end(outcome.message, at_once=True)
        elif isinstance(outcome, JudgeUnreadable | JudgeUnavailable | JudgeRejected):
            self._notes.end(sample, call, used, failed=outcome.code)
            sample.error_code = sample.error_code or outcome.code
            if self._unreachable >= GIVE_UP_AFTER:
                self.gone = outcome.code
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
