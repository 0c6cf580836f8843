"""An attempt that was compared, as the comparison job leaves it: real stores, rows as the assets write them.

For tests of the report alone; nothing here trains, answers or judges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import polars as pl

from loop_dagster.rules.decision import Decision, decide, winner
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.states import FLOW
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt
from loop_dagster.tables import ADAPTERS, ANSWERS, JUDGEMENTS, QUESTIONS, REPORTS, SELECTIONS
from loop_dagster.tables.base import Table

NOW = datetime(2026, 12, 31, 23, 0, tzinfo=UTC)
JUDGE = "reference (compares with the right answer; not a language model)"
Preferred = Literal["candidate", "incumbent", "tie"]


@dataclass(frozen=True)
class Question:
    """One held-back sample and what came of it; ratings are the same in every dimension."""

    prompt: str = "Where is it?"
    right: str | None = "On its way."
    candidate: str | None = "On its way."
    incumbent: str | None = "I cannot know."
    rated: tuple[float, float] = (9.0, 2.0)
    orders: tuple[Preferred, Preferred] = ("candidate", "candidate")
    status: Literal["scored", "failed", "gone", "not_reached"] = "scored"
    error_code: str | None = None
    teaches: str = "accepted"
    messages: Sequence[dict[str, Any]] = ()
    tools: list[dict[str, Any]] | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)


def questions(count: int = 100) -> list[Question]:
    """So many ordinary samples: three of four won, the others tied, lost, or read differently in each order."""
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {"rated": (9.0, 9.0), "orders": ("tie", "tie")},
        {},
        {},
        {"rated": (3.0, 8.0), "orders": ("incumbent", "incumbent")},
        {},
        {"rated": (6.0, 6.5), "orders": ("candidate", "incumbent")},
    ]
    return [
        Question(prompt=f"Where is parcel {number}?", right=f"Parcel {number} is on its way.", **kinds[number % 8])
        for number in range(count)
    ]


def compared(
    store: Store,
    asked: Sequence[Question],
    *,
    name: str = "Support",
    judge: str = JUDGE,
    judge_setting: str = "reference",
    ended: str | None = None,
    warnings: Sequence[Any] = (),
    live_version: int | None = None,
    state: str = "reported",
) -> Attempt:
    """Open an attempt of a pipeline (made when it is not there), write its rows and bring it to `state`."""
    known = {pipeline.name: pipeline for pipeline in store.pipelines.list()}
    pipeline = known.get(name) or store.pipelines.create(name, model_id="any/model", now=NOW)
    frozen = {
        "settings": PipelineSettings().to_json(),
        "tags": [pipeline.tag],
        "model_id": "any/model",
        "model_family": "llama",
        "base_digest": "b" * 64,
        "max_answer_tokens": 512,
        "judge": judge_setting,
        "judge_model": None if judge_setting == "reference" else judge,
    }
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen=frozen, now=NOW)
    assert attempt is not None
    decision = _write(store, attempt, asked, judge=judge, ended=ended, warnings=warnings, live_version=live_version)
    counts = {
        "judge": judge,
        "judge_ended": ended,
        "judge_used": [400, 52_000, 4_800, 0],
        "gone": decision.rows_gone,
        "not_reached": sum(question.status == "not_reached" for question in asked),
    }
    facts: dict[str, dict[str, Any]] = {
        "checkpoint_ready": {"adapter_digest": "a" * 64, "base_digest": "b" * 64, "train_rows": 20, "holdout_rows": 5},
        "evaluating": {
            "counts": counts,
            "compared_with": "original" if live_version is None else "version",
            "compared_with_version": live_version,
        },
        "reported": {"verdict": decision.verdict, "report": decision.summary()},
    }
    for minute, to in enumerate(FLOW[1 : FLOW.index("reported") + 1], start=1):
        sentence = decision.sentence if to == "reported" else f"It is {to}."
        at = NOW + timedelta(minutes=minute)
        attempt = store.attempts.move(attempt.run_id, to, sentence, now=at, **facts.get(to, {}))
    if state != "reported":
        attempt = store.attempts.move(attempt.run_id, state, "On.", now=NOW + timedelta(hours=1))  # type: ignore[arg-type]
    return attempt


def _write(
    store: Store,
    attempt: Attempt,
    asked: Sequence[Question],
    *,
    judge: str,
    ended: str | None,
    warnings: Sequence[Any],
    live_version: int | None,
) -> Decision:
    rows: dict[str, list[dict[str, Any]]] = {
        table: [] for table in ("questions", "answers", "judgements", "selections")
    }
    for place, question in enumerate(asked):
        sample_id = f"sample-{place:04d}"
        rows["questions"].append(_question(sample_id, place, question))
        rows["selections"].append(_selected(sample_id, "holdout", "held_new", question.teaches))
        if question.status != "gone":
            rows["answers"] += [
                _answer(sample_id, "candidate", question.candidate, question.calls),
                _answer(sample_id, "incumbent", question.incumbent, []),
            ]
        if question.status in ("scored", "failed"):
            rows["judgements"].append(_judgement(sample_id, question))
    rows["selections"] += [
        _selected(f"learned-{place}", "check" if place == 0 else "train", "new", "edited" if place % 4 else "accepted")
        for place in range(20)
    ]
    rows["selections"] += [_selected("left", "left_out", "duplicate", "accepted")]
    _keep(store, attempt, QUESTIONS, rows["questions"])
    _keep(store, attempt, SELECTIONS, rows["selections"])
    _keep(store, attempt, ANSWERS, rows["answers"])
    judgements = _keep(store, attempt, JUDGEMENTS, rows["judgements"])
    _keep(store, attempt, ADAPTERS, [_adapter()])
    gone = sum(question.status == "gone" for question in asked)
    decision = decide(judgements, gone=gone, ended_early=ended, also=list(warnings))
    row = decision.as_row()
    report = {
        **row,
        "bars": json.dumps(row["bars"]),
        "warnings": json.dumps(row["warnings"]),
        "judge": judge,
        "compared_with": "original" if live_version is None else "version",
        "compared_with_version": live_version,
        "created_at": NOW + timedelta(minutes=9),
    }
    _keep(store, attempt, REPORTS, [report])
    return decision


def _keep(store: Store, attempt: Attempt, table: Table, rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    mine = {"attempt": attempt.key, "pipeline_id": attempt.pipeline_id, "attempt_no": attempt.attempt_no}
    nothing = dict.fromkeys(column.name for column in table.columns if column.nullable)
    frame = table.frame([{**nothing, **mine, **row} for row in rows])
    store.lake.replace_attempt(table, attempt.key, frame)
    return frame


def _message(text: str | None, calls: list[dict[str, Any]]) -> str | None:
    if text is None and not calls:
        return None
    return json.dumps({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})


def _question(sample_id: str, place: int, question: Question) -> dict[str, Any]:
    messages = question.messages or [{"role": "user", "content": question.prompt}]
    return {
        "sample_id": sample_id,
        "ordinal": place,
        "messages": json.dumps(list(messages)),
        "tools": json.dumps(question.tools) if question.tools else None,
        "right_answer": _message(question.right, question.calls if question.right is not None else []),
    }


def _answer(sample_id: str, side: str, text: str | None, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "sample_id": sample_id,
        "side": side,
        "answer": _message(text, calls),
        "finish": "empty" if text is None and not calls else "stop",
        "prompt_tokens": 7,
        "answer_tokens": 5,
    }


def _judgement(sample_id: str, question: Question) -> dict[str, Any]:
    row: dict[str, Any] = {"sample_id": sample_id, "status": question.status, "unanswered": False}
    if question.status == "failed":
        return {**row, "error_code": question.error_code}
    mine, theirs = (
        json.dumps({"completeness": rating, "correctness": rating, "style": rating}) for rating in question.rated
    )
    if question.candidate is None:
        scores = {"candidate_score": 0.0, "incumbent_score": question.rated[1] / 10, "incumbent_ratings": theirs}
        return {**row, **scores, "winner": "incumbent", "unanswered": True}
    return {
        **row,
        "candidate_score": question.rated[0] / 10,
        "incumbent_score": question.rated[1] / 10,
        "candidate_ratings": mine,
        "incumbent_ratings": theirs,
        "candidate_first": question.orders[0],
        "incumbent_first": question.orders[1],
        "winner": winner(*question.orders),
    }


def _selected(sample_id: str, role: str, reason: str, teaches: str) -> dict[str, Any]:
    keys = {"right_key": 1, "prompt_key": 2, "rank": 3}
    return {
        "sample_id": sample_id,
        "role": role,
        "reason": reason,
        "teaches": teaches,
        "reviewed": True,
        "is_new": reason == "new",
        **keys,
    }


def _adapter() -> dict[str, Any]:
    curve = [
        {"step": step, "train_loss": 4.0 / step, "check_loss": 3.0 / step if step % 10 == 0 else None}
        for step in range(1, 41)
    ]
    recipe = {"epochs": 3, "learning_rate": 2e-4, "lora_rank": 16, "lora_alpha": 32, "batch_size": 8, "keep": "best"}
    return {
        "adapter_digest": "a" * 64,
        "base_digest": "b" * 64,
        "dtype": "float32",
        "planned_steps": 40,
        "trained_steps": 40,
        "kept_step": 30,
        "tokens": 1234,
        "seconds": 75.0,
        "recipe": json.dumps(recipe),
        "curve": json.dumps(curve),
        "created_at": NOW,
    }
