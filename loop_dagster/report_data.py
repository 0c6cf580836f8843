"""Reads one attempt's comparison from the stores into the records of a report.

Belongs here: finding the attempt that a person names, reading its frozen rows, deriving what each held-back sample came
to. Does not belong here: the records (`report_records.py`) and any rule: the verdict and its bars are read as they were
stored. No text of a training row is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import polars as pl

from loop_dagster.errors import BadRequest, NoReport, NotFound
from loop_dagster.models.judge import DIMENSIONS
from loop_dagster.report_records import (
    Caution,
    Dimension,
    Item,
    Judged,
    Point,
    Report,
    Result,
    Selected,
    Side,
    Training,
)
from loop_dagster.report_words import Outcome, ReferenceKind, warning_sentence
from loop_dagster.rules.decision import Bar, ComparedVerdict, winner
from loop_dagster.rules.numbers import mean
from loop_dagster.rules.selection import LEFT_OUT, TAKEN
from loop_dagster.store.asking import answer_limit
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt
from loop_dagster.tables import ADAPTERS, ANSWERS, JUDGEMENTS, QUESTIONS, REPORTS, SELECTIONS
from loop_dagster.tables.attempts import shown_id
from loop_dagster.tables.base import Table
from loop_dagster.wire import attempt_row

#: Attempts are numbered 1, 2, 3 …; a longer number names none, and no database has to be asked for it.
MOST_DIGITS: Final = 9
#: How a deciding verdict reads as the kind of a right answer; what the judge picked has none.
_REFERENCE_KINDS: Final[Mapping[str, ReferenceKind]] = {"accepted": "good", "edited": "correction", "gold": "gold"}
_OUTCOME_OF: Final[Mapping[str, Outcome]] = {"candidate": "won", "incumbent": "lost", "tie": "tie"}
#: An attempt in one of these is compared, for the first time or again.
COMPARING: Final = ("checkpoint_ready", "candidate_booking", "candidate_running", "evaluating", "waiting_gpus")


def find_attempt(store: Store, ref: str, *, pipeline: str | None = None) -> Attempt:
    """The attempt that a person means: its key, its run id, or its number where one pipeline is meant.

    Raises NotFound, also for attempts of a deleted pipeline, which are gone with it (rules.md, Pipelines); BadRequest
    for a plain number among several pipelines, and for an attempt that is not of `pipeline`.
    """
    wanted = store.pipelines.get(pipeline) if pipeline is not None else None
    if ref.isascii() and ref.isdecimal():
        owner = wanted or _only_pipeline(store, ref)
        if len(ref) > MOST_DIGITS:
            raise NotFound("attempt", f"{owner.tag} {ref}")
        return store.attempts.by_number(owner.pipeline_id, int(ref))
    if len(ref.rpartition("/")[2]) > MOST_DIGITS and "/" in ref:
        raise NotFound("attempt", ref)
    attempt = store.attempts.find(ref)
    if attempt.pipeline_id not in {one.pipeline_id for one in store.pipelines.list()}:
        raise NotFound("attempt", ref)
    if wanted is not None and attempt.pipeline_id != wanted.pipeline_id:
        raise BadRequest(
            f"Attempt {attempt.key} is not one of pipeline {wanted.tag}. Leave --pipeline out, or give the number of "
            f"an attempt of {wanted.tag}."
        )
    return attempt


def report_of(store: Store, attempt: Attempt) -> Report:
    """Everything that the report of an attempt shows. Raises NoReport while there is none; NotFound of its pipeline."""
    pipeline = store.pipelines.get(attempt.pipeline_id)
    timeline = store.attempts.timeline(attempt.run_id)
    said = [event.sentence for event in timeline if event.to_state == "reported"]
    stored = _rows(store, REPORTS, attempt).to_dicts()
    if not stored or not said:  # a row that was written and not yet acknowledged may still be replaced
        raise NoReport(attempt.key, attempt.state, attempt.reason, ended=attempt.ended)
    [row] = stored
    result = _result(row, attempt, said[-1])
    questions = _rows(store, QUESTIONS, attempt).sort("ordinal")
    items = _items(store, attempt, questions)
    scored = [item for item in items if item.outcome in ("won", "lost", "tie")]
    judged = (len(scored), sum(item.outcome == "failed" for item in items))
    return Report(
        workspace=store.registry.workspace,
        attempt=attempt,
        pipeline=pipeline,
        created_at=row["created_at"],
        result=result,
        judged=_judged(row["judge"], attempt),
        warnings=tuple(Caution(code, warning_sentence(code)) for code in json.loads(row["warnings"])),
        explanation=attempt_row(attempt, pipeline)["explanation"],
        items=items,
        dimensions=_dimensions(scored),
        training=training_of(store, attempt),
        selected=_selected(_rows(store, SELECTIONS, attempt)),
        timeline=timeline,
        answers_are_newer=attempt.state in COMPARING or judged != (result.rows_scored, result.rows_failed),
        answer_limit=answer_limit(questions, most=attempt.frozen["max_answer_tokens"]),
    )


def _only_pipeline(store: Store, ref: str) -> Pipeline:
    pipelines = store.pipelines.list()
    if not pipelines:
        raise NotFound("attempt", ref)
    if len(pipelines) > 1:
        tags = ", ".join(one.tag for one in pipelines[:8]) + (" …" if len(pipelines) > 8 else "")
        raise BadRequest(
            f"A number alone names no attempt, for there are {len(pipelines)} pipelines ({tags}). Add --pipeline TAG, "
            f"or give the attempt's key, such as {pipelines[0].pipeline_id}/0001."
        )
    return pipelines[0]


def _rows(store: Store, table: Table, attempt: Attempt) -> pl.DataFrame:
    return store.lake.scan(table).filter(pl.col("attempt") == attempt.key).collect()


def _result(row: Mapping[str, Any], attempt: Attempt, sentence: str) -> Result:
    numbers = (
        *("rows_scored", "rows_failed", "rows_gone", "wins", "losses", "ties", "win_rate", "candidate_mean"),
        *("incumbent_mean", "mean_change", "candidate_pass_rate", "incumbent_pass_rate"),
    )
    return Result(
        verdict=cast(ComparedVerdict, row["verdict"]),
        sentence=sentence,
        bars=tuple(Bar(**bar) for bar in json.loads(row["bars"])),
        standard_error=(attempt.report or {}).get("standard_error"),
        **{name: row[name] for name in numbers},
    )


def _judged(name: str, attempt: Attempt) -> Judged:
    counts = attempt.counts
    calls, prompt_tokens, answer_tokens = [*counts.get("judge_used", ()), None, None, None][:3]
    return Judged(
        name=name,
        setting=attempt.frozen["judge"],
        model=attempt.frozen.get("judge_model"),
        ended=counts.get("judge_ended"),
        stopped=counts.get("judge_stopped"),
        not_reached=counts.get("not_reached", 0),
        calls=calls,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        nanocents=counts.get("judge_nanocents"),
    )


# --- held-back samples -----------------------------------------------------------------------------------------------


def _items(store: Store, attempt: Attempt, questions: pl.DataFrame) -> tuple[Item, ...]:
    answers = _rows(store, ANSWERS, attempt)
    given = {(row["sample_id"], row["side"]): row for row in answers.iter_rows(named=True)}
    judged = {row["sample_id"]: row for row in _rows(store, JUDGEMENTS, attempt).iter_rows(named=True)}
    asked = questions.get_column("sample_id")
    teaches: dict[str, str | None] = dict(
        store.lake.scan(SELECTIONS)
        .filter((pl.col("attempt") == attempt.key) & pl.col("sample_id").is_in(asked.implode()))
        .select("sample_id", "teaches")
        .collect()
        .iter_rows()
    )
    dead = set(store.inbox.tombstones())  # deleted, and its copies not yet renamed
    return tuple(
        _item(
            number,
            row,
            judged.get(row["sample_id"]),
            {side: given.get((row["sample_id"], side)) for side in ("candidate", "incumbent")},
            reference=_REFERENCE_KINDS.get(teaches.get(row["sample_id"]) or ""),
            sample_id=None if row["sample_id"] in dead else shown_id(row["sample_id"]),
            compared=answers.height > 0,
        )
        for number, row in enumerate(questions.iter_rows(named=True), start=1)
    )


def _item(
    number: int,
    question: Mapping[str, Any],
    judgement: Mapping[str, Any] | None,
    answers: Mapping[str, Mapping[str, Any] | None],
    *,
    reference: ReferenceKind | None,
    sample_id: str | None,
    compared: bool,
) -> Item:
    right = json.loads(question["right_answer"]) if question["right_answer"] else None
    return Item(
        number=number,
        sample_id=sample_id,
        messages=json.loads(question["messages"]),
        tools=json.loads(question["tools"]) if question["tools"] else None,
        right_answer=right,
        reference=reference if right is not None else None,
        candidate=_side("candidate", answers["candidate"], judgement),
        incumbent=_side("incumbent", answers["incumbent"], judgement),
        outcome=_outcome(judgement, asked=any(answers.values()), compared=compared),
        unanswered=bool(judgement and judgement["unanswered"]),
        candidate_first=judgement["candidate_first"] if judgement else None,
        incumbent_first=judgement["incumbent_first"] if judgement else None,
        error_code=judgement["error_code"] if judgement else None,
    )


def _side(name: str, answer: Mapping[str, Any] | None, judgement: Mapping[str, Any] | None) -> Side:
    ratings = judgement[f"{name}_ratings"] if judgement else None
    return Side(
        answer=json.loads(answer["answer"]) if answer and answer["answer"] else None,
        finish=answer["finish"] if answer else None,
        score=judgement[f"{name}_score"] if judgement else None,
        ratings=dict(sorted(json.loads(ratings).items(), key=lambda rated: _in_rubric(rated[0]))) if ratings else None,
    )


def _outcome(judgement: Mapping[str, Any] | None, *, asked: bool, compared: bool) -> Outcome:
    """What the sample came to; as in the verdict, the winner is derived from both orders, not read."""
    if judgement is None:
        if not compared:
            return "not_asked"
        return "not_reached" if asked else "gone"
    if judgement["status"] == "failed":
        return "failed"
    if judgement["unanswered"]:
        return _OUTCOME_OF[judgement["winner"]]
    return _OUTCOME_OF[winner(judgement["candidate_first"], judgement["incumbent_first"])]


def _dimensions(scored: Sequence[Item]) -> tuple[Dimension, ...]:
    both = [
        (item.candidate.ratings, item.incumbent.ratings)
        for item in scored
        if item.candidate.ratings is not None and item.incumbent.ratings is not None
    ]
    if not both:
        return ()
    found = []
    for name in sorted(both[0][0], key=_in_rubric):
        mine, theirs = mean([new[name] for new, _ in both]), mean([old[name] for _, old in both])
        assert mine is not None
        assert theirs is not None
        found.append(Dimension(name, mine, theirs))
    return tuple(found)


def _in_rubric(name: str) -> tuple[int, str]:
    """Sorts dimensions as the rubric names them, any others behind."""
    return (DIMENSIONS.index(name) if name in DIMENSIONS else len(DIMENSIONS), name)


# --- training --------------------------------------------------------------------------------------------------------


def training_of(store: Store, attempt: Attempt) -> Training | None:
    """How its training went; None while it has kept no adapter. No text of a row is read."""
    rows = _rows(store, ADAPTERS, attempt).to_dicts()
    if not rows:
        return None
    row = rows[0]
    return Training(
        points=tuple(
            Point(point["step"], _finite(point.get("train_loss")), _finite(point.get("check_loss")))
            for point in json.loads(row["curve"])
        ),
        recipe=json.loads(row["recipe"]),
        **{name: row[name] for name in ("kept_step", "trained_steps", "planned_steps", "tokens", "seconds", "dtype")},
    )


def _finite(value: float | None) -> float | None:
    """A loss that can be drawn: a training that diverged has logged NaN."""
    return value if value is not None and math.isfinite(value) else None


def _selected(rows: pl.DataFrame) -> Selected:
    roles: dict[str, int] = dict(rows.group_by("role").len().iter_rows())
    reasons: dict[str, int] = dict(rows.group_by("reason").len().iter_rows())
    taught = rows.filter(pl.col("role").is_in(["train", "check"]))
    return Selected(
        train=roles.get("train", 0),
        check=roles.get("check", 0),
        held_back=roles.get("holdout", 0),
        new=taught.filter("is_new").height,
        taught_by=dict(taught.group_by("teaches").len().sort("teaches").iter_rows()),
        taken=tuple((sentence, reasons[code]) for code, sentence in TAKEN.items() if code in reasons),
        left_out=tuple((sentence, reasons[code]) for code, sentence in LEFT_OUT.items() if code in reasons),
    )
