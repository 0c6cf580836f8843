"""Comparisons: the report of an attempt, and its held-back samples one by one, filtered and searched."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from loop_dagster.api.calls import Reader
from loop_dagster.api.gaps import unknown
from loop_dagster.api.rows.attempts import attempt_of
from loop_dagster.errors import NoReport, NotFound
from loop_dagster.report_data import report_of
from loop_dagster.report_records import Item, Report
from loop_dagster.report_wire import evaluation_row, item_row
from loop_dagster.store.open import Store

router = APIRouter(prefix="/api/loop/evaluations", tags=["evaluations"])

Winner = Literal["candidate", "serving", "tie"]
_OUTCOMES = {"candidate": "won", "serving": "lost", "tie": "tie"}
_SCORED = ("won", "lost", "tie")


@router.get("/{evaluation_id}")
def get_evaluation(caller: Reader, evaluation_id: str) -> dict[str, Any]:
    """The comparison behind a verdict."""
    used = {"prompt_tokens": 0, "completion_tokens": 0, "spent_cents": 0}  # by a judge that is no model
    return {**unknown("Evaluation"), **used, **evaluation_row(_report(caller.store, evaluation_id))}


@router.get("/{evaluation_id}/items")
def list_items(
    caller: Reader,
    evaluation_id: str,
    winner: Winner | None = None,
    candidate_passed: bool | None = None,
    incumbent_passed: bool | None = None,
    orders: Literal["agreed", "disagreed"] | None = None,
    has_reference: bool | None = None,
    status: Literal["scored", "failed"] | None = None,
    sort: Literal["score_change"] | None = None,
    q: Annotated[str | None, Query(min_length=2, max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> dict[str, Any]:
    """The held-back samples of a comparison; filters add up, `total` follows them."""
    report = _report(caller.store, evaluation_id)
    found = [
        item
        for item in report.items
        if (winner is None or item.outcome == _OUTCOMES[winner])
        and candidate_passed in (None, item.candidate.passed)
        and incumbent_passed in (None, item.incumbent.passed)
        and (orders is None or item.agreed is (orders == "agreed"))
        and (has_reference is None or (item.right_answer is not None) is has_reference)
        and (status is None or (item.outcome == "failed" if status == "failed" else item.outcome in _SCORED))
    ]
    searched = len(found) if q is not None else None
    if q is not None:
        found = [item for item in found if q.casefold() in _text(item)]
    if sort is not None:
        found.sort(key=_change, reverse=True)
    page = found[offset : offset + limit]
    return {"items": [_row(report, item) for item in page], "total": len(found), "searched": searched}


def _report(store: Store, evaluation_id: str) -> Report:
    """The report of the attempt that the evaluation is of. Raises NotFound, also while there is none."""
    try:
        return report_of(store, attempt_of(store, evaluation_id)[0])
    except (NoReport, NotFound):
        raise NotFound("evaluation", evaluation_id) from None


def _row(report: Report, item: Item) -> dict[str, Any]:
    """One sample; a message without text has no `content` on the wire rather than null."""
    row = item_row(report, item)
    row["prompt"] = [{name: value for name, value in turn.items() if value is not None} for turn in row["prompt"]]
    return row


def _change(item: Item) -> tuple[bool, float]:
    """By how much the candidate scored higher; those without both scores come last."""
    ours, theirs = item.candidate.score, item.incumbent.score
    return (False, 0.0) if ours is None or theirs is None else (True, ours - theirs)


def _text(item: Item) -> str:
    """Everything of a sample that a search looks through, folded."""
    parts = [*item.messages, item.right_answer, item.candidate.answer, item.incumbent.answer]
    words = [str(part.get("content") or "") for part in parts if part is not None]
    words += [json.dumps(part["tool_calls"], ensure_ascii=False) for part in parts if part and part.get("tool_calls")]
    return "\n".join([*words, item.reason or ""]).casefold()
