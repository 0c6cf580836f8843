"""Attempts and versions on the wire: `PipelineAttempt`, `TrainingRun`, `TrainingRunSummary`, `PipelineVersion`.

Belongs here: conversions, and finding the attempt that an id names. Does not belong here: decisions about an attempt
(deciding.py), its report (routers/evaluations.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import polars as pl

from loop_dagster.api.calls import Caller, now
from loop_dagster.api.gaps import unknown
from loop_dagster.deciding import waits_for_decision, why_not_again
from loop_dagster.errors import NotFound
from loop_dagster.report_data import training_of
from loop_dagster.report_records import Training
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.recipe import defaults
from loop_dagster.rules.states import step_of
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import LOOP, Attempt, Event
from loop_dagster.store.versions import Version
from loop_dagster.tables import REPORTS
from loop_dagster.wire import attempt_row, costs, lineage, sample_scoring, timestamp, version_row

_RUN_ID: Final = re.compile(r"[0-9a-f-]{36}")
#: Why an attempt opened, in the words of runs.
TRIGGERS: Final[Mapping[str, str]] = {"data": "rows", "schedule": "cadence"}
#: Where a comparison begins on a timeline.
_COMPARED: Final = ("candidate_booking", "candidate_running", "evaluating")


def attempt_of(store: Store, run_id: str) -> tuple[Attempt, Pipeline]:
    """The attempt with this id and its pipeline. Raises NotFound, also once the pipeline was deleted."""
    if _RUN_ID.fullmatch(run_id) is None:
        raise NotFound("training run", run_id)
    try:
        attempt = store.attempts.get(run_id)
    except NotFound:
        raise NotFound("training run", run_id) from None
    for pipeline in store.pipelines.list():
        if pipeline.pipeline_id == attempt.pipeline_id:
            return attempt, pipeline
    raise NotFound("training run", run_id)


def cents_of(attempt: Attempt) -> int:
    """What the attempt cost, in whole cents."""
    return sum(costs(attempt).values())


def pipeline_attempt(attempt: Attempt, pipeline: Pipeline) -> dict[str, Any]:
    """One attempt as `PipelineAttempt`."""
    return {**unknown("PipelineAttempt"), **attempt_row(attempt, pipeline)}


def active_run(attempt: Attempt, *, will_be: int) -> dict[str, Any]:
    """An attempt that has not ended as `PipelineActiveRun`."""
    return {
        "run_id": attempt.run_id,
        "attempt": attempt.attempt_no,
        "trigger": attempt.trigger,
        "base_model_id": attempt.frozen.get("model_id"),
        "model_family": attempt.frozen.get("model_family"),
        "state": attempt.state,
        "since": timestamp(attempt.since),
        "started_at": timestamp(attempt.created_at),
        "gpu_seconds": attempt.gpu_seconds,
        "cost_cents": cents_of(attempt),
        "cost_up_to": False,
        "comparison_returned_cents": 0,
        "will_be_version": will_be,
        "version_no": None,
        "last_reason": attempt.reason,
        "last_error": None,
        "train_rows": attempt.train_rows,
        "holdout_rows": attempt.holdout_rows,
        "lineage": lineage(attempt),
        "competed": _tested(attempt),
        "train_rows_by_judge": attempt.counts.get("picked"),
        **sample_scoring(attempt),
    }


def pipeline_version(store: Store, version: Version, *, live: bool) -> dict[str, Any]:
    """One version as `PipelineVersion`."""
    attempt = store.attempts.get(version.run_id)
    compared = [event.at for event in store.attempts.timeline(version.run_id) if event.to_state in _COMPARED]
    return {
        **unknown("PipelineVersion"),
        **version_row(version, attempt, live=live),
        "seq": attempt.attempt_no,
        "cost_cents": cents_of(attempt),
        "gpu_seconds": attempt.gpu_seconds,
        "compared_at": timestamp(compared[0]) if compared else None,
        "train_rows_by_judge": attempt.counts.get("picked"),
        **sample_scoring(attempt),
    }


def run_summary(store: Store, attempt: Attempt, pipeline: Pipeline) -> dict[str, Any]:
    """One attempt as `TrainingRunSummary`."""
    row = pipeline_attempt(attempt, pipeline)
    return {**unknown("TrainingRunSummary"), **_common(store, attempt, pipeline, row), "attempt": row}


def run(store: Store, attempt: Attempt, pipeline: Pipeline) -> dict[str, Any]:
    """One attempt as `TrainingRun`."""
    row = pipeline_attempt(attempt, pipeline)
    timeline = store.attempts.timeline(attempt.run_id)
    training = training_of(store, attempt)
    version = store.versions.of_attempt(attempt.run_id)
    return {
        **unknown("TrainingRun"),
        **_common(store, attempt, pipeline, row, training),
        "rule_revision": attempt.revision,
        "fired_reason": timeline[0].sentence,
        "attempts": attempt.try_no,
        "last_error": attempt.reason if attempt.error_code else None,
        "lineage": row["lineage"],
        "tested": row["tested"],
        "checkpoint_id": attempt.adapter_digest,
        "checkpoint_step": training.kept_step if training else None,
        "gpu_seconds": attempt.gpu_seconds,
        "training_eval_loss": training.kept_check_loss if training else None,
        "trained_steps": training.trained_steps if training else None,
        "alias_name": pipeline.live_name if version else None,
        "alias_written_at": timestamp(version.promoted_at) if version else None,
        "decided_by": _decided_by(attempt, timeline),
        "decided_at": timestamp(attempt.decided_at),
        "updated_at": timestamp(timeline[-1].at),
        "model_role": "main",
        "trained_on": row["trained_on"],
    }


def run_answer(caller: Caller, attempt: Attempt, pipeline: Pipeline) -> dict[str, Any]:
    """One attempt in full as `TrainingRunResponse`."""
    store = caller.store
    row = pipeline_attempt(attempt, pipeline)
    same = ("explanation", "model_role", "builds_on_version", "compared_with_version", "compared_with", "missed_bar")
    return {
        **unknown("TrainingRunResponse"),
        "run": run(store, attempt, pipeline),
        "timeline": [event_row(event) for event in store.attempts.timeline(attempt.run_id)],
        "links": unknown("TrainingRunLinks"),
        "available_actions": actions(caller, attempt, pipeline),
        "promotion": {
            **unknown("TrainingRunPromotion"),
            "outcome": row["outcome"],
            "decision": attempt.decision,
            "verdict": attempt.verdict,
            "reason": attempt.reason if attempt.decision else None,
        },
        "verdict_checks": _bars(store, attempt),
        "traces_filter_attempt": True,
        "cost": {
            **costs(attempt),
            "total_cents": cents_of(attempt),
            "up_to": False,
            "comparison_returned_cents": 0,
        },
        **{name: row[name] for name in same},
    }


def event_row(event: Event) -> dict[str, Any]:
    """One line of a timeline as `TrainingRunEvent`."""
    return {
        "seq": event.seq,
        "ts": timestamp(event.at),
        "from_state": event.from_state,
        "to_state": event.to_state,
        "reason": event.sentence,
        "error_code": event.error_code,
        "detail": {},
        "actor": event.actor,
    }


def actions(caller: Caller, attempt: Attempt, pipeline: Pipeline) -> dict[str, bool]:
    """What the caller may do with the attempt right now, as `TrainingRunActions`."""
    if not caller.may("loop:write"):
        return dict.fromkeys(("promote", "reject", "rollback", "cancel", "retest"), False)
    store = caller.store
    moment = now()
    waits = waits_for_decision(attempt, moment)
    newest = store.attempts.list(pipeline.pipeline_id)[-1]
    free = newest.ended or newest.run_id == attempt.run_id
    under_way = step_of(attempt.state) is not None
    return {
        "promote": waits and _tested(attempt),
        "reject": waits,
        "rollback": False,
        "cancel": not attempt.ended,
        "retest": not under_way and free and pipeline.enabled and why_not_again(store, attempt, moment) is None,
    }


def _common(
    store: Store, attempt: Attempt, pipeline: Pipeline, row: Mapping[str, Any], training: Training | None = None
) -> dict[str, Any]:
    """The fields that a run and its summary share."""
    return {
        "id": attempt.run_id,
        "rule_id": pipeline.pipeline_id,
        "rule_name": pipeline.name,
        "workspace_id": store.registry.workspace,
        "seq": attempt.attempt_no,
        "trigger": TRIGGERS.get(attempt.trigger, attempt.trigger),
        "recipe": _recipe(attempt, training),
        "state": attempt.state,
        "state_entered_at": timestamp(attempt.since),
        "last_reason": attempt.reason,
        "error_code": attempt.error_code,
        "error_next_step": row["explanation"]["next"] if attempt.error_code else None,
        "attempt_no": attempt.attempt_no,
        "version_no": attempt.version_no,
        "base_model_id": row["base_model_id"],
        "model_family": row["model_family"],
        "verdict": attempt.verdict,
        "decision": attempt.decision,
        "train_rows": attempt.train_rows,
        "holdout_rows": attempt.holdout_rows,
        "spent_eval_cents": costs(attempt)["scoring_cents"],
        "sample_scoring_cents": costs(attempt)["sample_scoring_cents"],
        "evaluation_id": row["evaluation_id"],
        "review_deadline_at": timestamp(attempt.review_until),
        "created_at": timestamp(attempt.created_at),
        "finished_at": timestamp(attempt.finished_at),
    }


def _recipe(attempt: Attempt, training: Training | None) -> dict[str, Any]:
    """What it trains with as `TrainingRecipe`; automatic passes are known once its rows are counted."""
    wanted = PipelineSettings.from_json(attempt.frozen["settings"]).training
    auto = defaults(attempt.frozen.get("model_family") or "")
    used = training.recipe if training else {}
    return {
        "learning_rate": used.get("learning_rate", wanted.learning_rate or auto.learning_rate),
        "num_train_epochs": used.get("epochs", wanted.epochs),
        "lora_rank": used.get("lora_rank", wanted.lora_rank or auto.lora_rank),
        "lora_alpha": used.get("lora_alpha", wanted.lora_alpha or auto.lora_alpha),
        "custom": any(value is not None for _name, value in wanted),
    }


def _bars(store: Store, attempt: Attempt) -> list[dict[str, Any]] | None:
    """The bars of its report as `VerdictCheck`; None while there is none."""
    if attempt.report is None:
        return None
    found = store.lake.scan(REPORTS).filter(pl.col("attempt") == attempt.key).select("bars").collect()
    if not found.height:
        return None
    bars = json.loads(found.item())
    return [
        {"key": bar["key"], "label": bar["what"], "needed": bar["needed"], "got": bar["got"], "met": bar["met"]}
        for bar in bars
    ]


def _decided_by(attempt: Attempt, timeline: Sequence[Event]) -> str | None:
    """Who approved or rejected it; None when nobody did, and where no key was named."""
    if attempt.decision not in ("promoted", "rejected"):
        return None
    by = [event.actor for event in timeline if event.at == attempt.decided_at or event.to_state == "promoting"]
    return next((actor for actor in reversed(by) if actor != LOOP), None)


def _tested(attempt: Attempt) -> bool:
    return bool((attempt.report or {}).get("rows_scored"))
