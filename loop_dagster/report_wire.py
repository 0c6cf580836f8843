"""How a report looks on the wire: the public client's `Evaluation`, `EvaluationItem` and `TrainingCurve`.

Belongs here: pure conversions of a `Report`, for the command line and later the HTTP API. A field that nothing computes
yet is left out, never made up.

Scores, ratings and means are from 0 to 1 here, ratings too, so that the mean of an answer's dimensions is its score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from loop_dagster.models.judge import RUBRIC
from loop_dagster.report_records import Item, Report, Side, Training
from loop_dagster.rules.decision import BIG_CHANGE, PASS_SCORE, ROWS_AT_LEAST, WIN_RATE
from loop_dagster.rules.money import NANOCENTS
from loop_dagster.wire import attempt_row, timestamp

#: Ratings are from 0 to this (rules.md, How it is tested).
MOST: Final = 10
NOT_TRAINED: Final = "It has kept no adapter, so there is no curve to draw."
#: Codes of failed samples, in the wire's closed set: all but the first are the judge's.
_ERROR_CODES: Final[Mapping[str, str]] = {"INCUMBENT_UNANSWERED": "incumbent_unanswered"}

_WINNERS: Final[Mapping[str, str]] = {"won": "candidate", "lost": "incumbent", "tie": "tie"}
_STATUSES: Final[Mapping[str, str]] = {"won": "done", "lost": "done", "tie": "done", "failed": "failed"}


def report_row(report: Report) -> dict[str, Any]:
    """The whole report: attempt, evaluation, bars, curve, what it trained on, timeline and items."""
    return {
        "attempt": attempt_row(report.attempt, report.pipeline),
        "evaluation": evaluation_row(report),
        "bars": [bar.as_dict() for bar in report.result.bars],
        "training_curve": curve_row(report.attempt.run_id, report.training),
        "samples": {
            "train": report.selected.train,
            "check": report.selected.check,
            "held_back": report.selected.held_back,
            "new": report.selected.new,
            "taught_by": dict(report.selected.taught_by),
            "left_out": [{"reason": sentence, "samples": number} for sentence, number in report.selected.left_out],
        },
        "timeline": [
            {"at": timestamp(event.at), "state": event.to_state, "sentence": event.sentence}
            for event in report.timeline
        ],
        "items": [item_row(report, item) for item in report.items],
        "total": len(report.items),
    }


def evaluation_row(report: Report) -> dict[str, Any]:
    """The comparison as `Evaluation`."""
    result, judged, attempt = report.result, report.judged, report.attempt
    return {
        "id": attempt.run_id,
        "run_id": attempt.run_id,
        "split": "holdout",
        "workspace_id": report.workspace,
        "incumbent_ref": _incumbent(report),
        "candidate_ref": _served(report, attempt.version_no),
        "judge_id": None,
        "judge_name": judged.name,
        "judge_model": judged.model,
        "judge_instructions": None,
        "judge_dimensions": [{"key": one.name, "description": one.question} for one in RUBRIC],
        "decoding": {"temperature": 0.0, "max_tokens": report.answer_limit, "stream": False},
        "rows_selected": len(report.items),
        "rows_scored": result.rows_scored,
        "rows_failed": result.rows_failed,
        "rows_gone": result.rows_gone,
        "rows_not_reached": judged.not_reached,
        "wins": result.wins,
        "losses": result.losses,
        "ties": result.ties,
        "win_rate": result.win_rate,
        "incumbent_mean": result.incumbent_mean,
        "candidate_mean": result.candidate_mean,
        "mean_delta": result.mean_change,
        "judge_incumbent_mean": result.incumbent_mean,
        "judge_candidate_mean": result.candidate_mean,
        "pass_threshold": PASS_SCORE,
        "incumbent_passed": report.incumbent_passed,
        "candidate_passed": report.candidate_passed,
        "incumbent_pass_rate": result.incumbent_pass_rate,
        "candidate_pass_rate": result.candidate_pass_rate,
        "per_dimension": [
            {
                "dimension": one.name,
                "incumbent": one.incumbent / MOST,
                "candidate": one.candidate / MOST,
                "delta": one.change / MOST,
            }
            for one in report.dimensions
        ],
        "trainer_eval_loss": report.training.kept_check_loss if report.training else None,
        "warnings": [{"code": one.code, "message": one.sentence} for one in report.warnings],
        "verdict": result.verdict,
        "verdict_reason": result.sentence,
        "margin_used": _margin(report),
        **_money(report),
        "status": "budget_stopped" if judged.stopped else "done",
        "last_error": judged.ended or judged.stopped,
        "created_at": timestamp(report.created_at),
        "finished_at": timestamp(report.created_at),
    }


def item_row(report: Report, item: Item) -> dict[str, Any]:
    """One held-back sample as `EvaluationItem`."""
    right = item.right_answer
    return {
        "id": item.number,
        "dataset_item_id": item.number,
        "trace_id": item.sample_id,
        "trace_url": None,
        "prompt": list(item.messages),
        "tools": list(item.tools) if item.tools is not None else None,
        "reference": None
        if right is None
        else {"answer": right.get("content") or "", "kind": item.reference, "tool_calls": right.get("tool_calls")},
        "incumbent": _side(item.incumbent, _version(report.attempt.compared_with_version)),
        "candidate": _side(item.candidate, _version(report.attempt.version_no)),
        "pairwise": None
        if item.agreed is None
        else {
            "incumbent_first": {"winner": item.incumbent_first, "reason": None},
            "candidate_first": {"winner": item.candidate_first, "reason": None},
            "winner": _WINNERS[item.outcome],
            "agreed": item.agreed,
        },
        "human_verdict": None,
        "winner": _WINNERS.get(item.outcome),
        "status": _STATUSES.get(item.outcome, "pending"),
        "error": item.reason,
        "error_code": _ERROR_CODES.get(item.error_code or "", "scorer_failed") if item.outcome == "failed" else None,
    }


def curve_row(run_id: str, training: Training | None) -> dict[str, Any]:
    """The training of an attempt as `TrainingCurve`; without one there is nothing to draw, and it says so."""
    return {
        "run_id": run_id,
        "points": [
            {"step": point.step, "train_loss": point.train_loss, "check_loss": point.check_loss}
            for point in (training.points if training else ())
        ],
        "kept_step": training.kept_step if training else None,
        "trained_steps": training.trained_steps if training else None,
        "planned_steps": training.planned_steps if training else None,
        "keeps_last": training is not None and training.recipe.get("keep") == "last",
        "reason": None if training and training.points else "No loss was logged." if training else NOT_TRAINED,
    }


def _incumbent(report: Report) -> dict[str, Any]:
    version = report.attempt.compared_with_version
    if version is not None:
        return _served(report, version)
    model = report.attempt.frozen["model_id"]
    return {"kind": "serverless_slug", "name": model, "deployment_id": None, "model_version": None}


def _served(report: Report, version: int | None) -> dict[str, Any]:
    name = report.pipeline.live_name
    return {"kind": "deployment", "name": name, "deployment_id": None, "model_version": _version(version)}


def _version(number: int | None) -> str | None:
    return None if number is None else f"v{number}"


def _side(side: Side, version: str | None) -> dict[str, Any]:
    rated = side.ratings is not None and side.score is not None
    return {
        "completion": side.answer.get("content") if side.answer else None,
        "tool_calls": side.answer.get("tool_calls") if side.answer else None,
        "judge": {
            "overall": side.score,
            "dimensions": {name: rating / MOST for name, rating in (side.ratings or {}).items()},
            "reason": None,
        }
        if rated
        else None,
        "score": side.score,
        "passed": side.passed,
        "model_version": version,
    }


def _margin(report: Report) -> dict[str, Any]:
    """The thresholds that the verdict was measured against."""
    needed = {bar.key: bar.needed for bar in report.result.bars}
    return {
        "promote_margin": BIG_CHANGE,
        "promote_min_win_rate": WIN_RATE,
        "min_holdout_rows": int(needed.get("rows_scored") or ROWS_AT_LEAST),
        "mean_change_needed": needed.get("mean_change"),
    }


def _money(report: Report) -> dict[str, int]:
    """What the judge used; nothing where nothing was counted."""
    judged = report.judged
    if judged.calls is None:
        return {}
    return {
        "prompt_tokens": judged.prompt_tokens or 0,
        "completion_tokens": judged.answer_tokens or 0,
        "spent_cents": (judged.nanocents or 0) // NANOCENTS,
    }
