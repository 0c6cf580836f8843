"""What a report is made of, as frozen records.

Belongs here: the records, and what follows from one of them alone. Does not belong here: reading them from the stores
(`report_data.py`), how they look (`report_page.py`, `report_charts.py`) and the names of the wire (`report_wire.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from loop_dagster.report_words import (
    JudgeKind,
    Outcome,
    ReferenceKind,
    failure_sentence,
    judge_kind,
    judge_sentence,
)
from loop_dagster.rules.decision import PASS_SCORE, Bar, ComparedVerdict
from loop_dagster.rules.money import in_dollars
from loop_dagster.rules.numbers import rounded
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt, Event

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    """One model's answer to one held-back sample.

    `answer` is the assistant message, None when it gave none or was not asked; `finish` how it ended. `score` is 0 to
    1, `ratings` 0 to 10 by dimension; `passed` is None without a score.
    """

    answer: Message | None
    finish: str | None
    score: float | None
    ratings: Mapping[str, float] | None

    @property
    def passed(self) -> bool | None:
        return None if self.score is None else rounded(self.score) >= PASS_SCORE


@dataclass(frozen=True, slots=True)
class Item:
    """One held-back sample of the comparison, in the order in which it was asked; `number` counts from 1.

    `sample_id` is None once the sample was deleted: a report keeps its copy. `outcome` is the candidate's.
    `unanswered`: a missing answer of the candidate decided it. `candidate_first` and `incumbent_first` say who was
    preferred in each order of reading. `reason` is the sentence of a failure, with its `error_code`.
    """

    number: int
    sample_id: str | None
    messages: Sequence[Message]
    tools: Sequence[Any] | None
    right_answer: Message | None
    reference: ReferenceKind | None
    candidate: Side
    incumbent: Side
    outcome: Outcome
    unanswered: bool
    candidate_first: str | None
    incumbent_first: str | None
    error_code: str | None

    @property
    def agreed(self) -> bool | None:
        """Whether both orders name the same side; None where the judge was not asked twice."""
        if self.candidate_first is None or self.incumbent_first is None:
            return None
        return self.candidate_first == self.incumbent_first

    @property
    def reason(self) -> str | None:
        return failure_sentence(self.error_code) if self.outcome == "failed" else None


@dataclass(frozen=True, slots=True)
class Dimension:
    """Mean rating of one dimension over the samples on which both answers were rated, 0 to 10."""

    name: str
    candidate: float
    incumbent: float

    @property
    def change(self) -> float:
        return self.candidate - self.incumbent


@dataclass(frozen=True, slots=True)
class Point:
    """One optimiser step of the training: losses in nats per answer token, None where it was not measured."""

    step: int
    train_loss: float | None
    check_loss: float | None


@dataclass(frozen=True, slots=True)
class Training:
    """How the adapter was trained. `recipe` as the trainer resolved it; `seconds` of the training loop."""

    points: tuple[Point, ...]
    kept_step: int
    trained_steps: int
    planned_steps: int
    tokens: int
    seconds: float
    dtype: str
    recipe: Mapping[str, Any]

    @property
    def kept_check_loss(self) -> float | None:
        """Check loss of the step whose weights were kept."""
        return next((point.check_loss for point in self.points if point.step == self.kept_step), None)


@dataclass(frozen=True, slots=True)
class Selected:
    """What the attempt took, in counts. `taken` and `left_out` pair a sentence of the selection with its samples.

    `taught_by` counts the trained rows by deciding verdict (accepted, edited, gold, scored).
    """

    train: int
    check: int
    held_back: int
    new: int
    taught_by: Mapping[str, int]
    taken: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """Who judged: `name` as the judge gave it, `setting` as the attempt froze it, and a sentence that says what it is.

    `ended` says why it could not go on to the last sample, `stopped` why it went no further though it could (money);
    None when it did not. The `not_reached` samples have no judgement. `calls`, `prompt_tokens` and `answer_tokens` are
    what it used, `nanocents` what that cost, in 1e-9 US cents; None where nothing was counted.
    """

    name: str
    setting: str
    model: str | None
    ended: str | None
    stopped: str | None
    not_reached: int
    calls: int | None
    prompt_tokens: int | None
    answer_tokens: int | None
    nanocents: int | None

    @property
    def kind(self) -> JudgeKind:
        return judge_kind(self.setting)

    @property
    def sentence(self) -> str:
        return judge_sentence(self.kind, self.name)


@dataclass(frozen=True, slots=True)
class Caution:
    """A warning of the report: its code and its sentence."""

    code: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Result:
    """The stored verdict with its figures, as `rules/decision.py` wrote them; `sentence` is what it said then.

    Means and shares are None with nothing scored, `win_rate` with nothing decided.
    """

    verdict: ComparedVerdict
    sentence: str
    bars: tuple[Bar, ...]
    rows_scored: int
    rows_failed: int
    rows_gone: int
    wins: int
    losses: int
    ties: int
    win_rate: float | None
    candidate_mean: float | None
    incumbent_mean: float | None
    mean_change: float | None
    standard_error: float | None
    candidate_pass_rate: float | None
    incumbent_pass_rate: float | None

    @property
    def missed(self) -> tuple[Bar, ...]:
        """Every bar that was missed, in order; the first one is the reason."""
        return tuple(bar for bar in self.bars if not bar.met)


@dataclass(frozen=True, slots=True)
class Report:
    """One attempt's comparison. `result` is the stored verdict with its figures; nothing is decided anew here.

    `explanation` has what became of the attempt (headline, detail, next). `answers_are_newer`: the attempt was being
    compared again, so that answers and judgements below are not those that the verdict was made of. `answer_limit`:
    tokens that both models could answer with.
    """

    workspace: str
    attempt: Attempt
    pipeline: Pipeline
    created_at: datetime
    result: Result
    judged: Judged
    warnings: tuple[Caution, ...]
    explanation: Mapping[str, str | None]
    items: tuple[Item, ...]
    dimensions: tuple[Dimension, ...]
    training: Training | None
    selected: Selected
    timeline: tuple[Event, ...]
    answers_are_newer: bool
    answer_limit: int

    @property
    def sample_scoring(self) -> str | None:
        """What scoring unreviewed samples did for the attempt before it opened; None where it did nothing."""
        done = self.attempt.frozen.get("sample_scoring")
        if not done:
            return None
        return f"{done['scored']:,} scored, {done['picked']:,} of them picked, {in_dollars(done['nanocents'])}"

    @property
    def incumbent_name(self) -> str:
        """What it was compared with: `the base model` or `v3`."""
        version = self.attempt.compared_with_version
        return "the base model" if version is None else f"v{version}"

    @property
    def candidate_passed(self) -> int:
        return sum(item.candidate.passed is True for item in self.items)

    @property
    def incumbent_passed(self) -> int:
        return sum(item.incumbent.passed is True for item in self.items)

    def count(self, outcome: Outcome) -> int:
        """Samples with this outcome."""
        return sum(item.outcome == outcome for item in self.items)
