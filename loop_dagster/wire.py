"""How attempts, versions and pipelines look on the wire: the public client's field names, from the stores' records.

Belongs here: pure conversions, shared by the command line and later the HTTP API. A field that nothing computes yet is
left out, never made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from loop_dagster.rules.explain import explain
from loop_dagster.rules.money import NANOCENTS
from loop_dagster.rules.states import outcome_of
from loop_dagster.store.datasets import Dataset
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt
from loop_dagster.store.selecting import trained_on
from loop_dagster.store.sources import Source
from loop_dagster.store.versions import Version


def timestamp(moment: datetime | None) -> str | None:
    """RFC 3339 in UTC, with Z."""
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


def lineage(attempt: Attempt) -> dict[str, Any]:
    """What the attempt was trained on top of, and on which samples (`Lineage`)."""
    built = attempt.train_rows is not None  # before its set is frozen nothing is known of it
    return {
        "trained_from": "base",
        "built_on": [],
        "served_as": "adapter",
        "new_samples": attempt.train_rows,  # an attempt from the base trains on everything that it can
        "carried_samples": 0 if built else None,
        "carried_from_attempts": [],
        "replayed_samples": 0 if built else None,
        "learned_before": 0 if built else None,
        "rebuild": False,
        "learned_deleted_conversation": False,
        "from_base_reason": attempt.frozen.get("from_base_reason"),
    }


def pipeline_ref(pipeline: Pipeline) -> dict[str, str]:
    """A pipeline as `LoopDatasetPipelineRef`."""
    return {"rule_id": pipeline.pipeline_id, "name": pipeline.name}


def rebuilds(learned: Sequence[Pipeline]) -> list[dict[str, str]]:
    """What a deletion says of the pipelines whose live version learned what was deleted."""
    return [{"pipeline_id": one.pipeline_id, "pipeline_name": one.name} for one in learned]


def dataset_refs(datasets: Sequence[Dataset]) -> list[dict[str, str]]:
    """A pipeline's datasets as `PipelineDatasetRef`."""
    return [{"id": one.dataset_id, "name": one.name} for one in datasets]


def dataset_row(dataset: Dataset, samples: Mapping[str, int], used_by: Sequence[Pipeline]) -> dict[str, Any]:
    """One dataset with the field names of `LoopDataset`; `samples` counts what it selects now, by feedback."""
    return {
        "id": dataset.dataset_id,
        "name": dataset.name,
        **dataset.conditions.to_json(),
        "revision": dataset.revision,
        "samples": sum(samples.values()),
        "feedback_counts": dict(samples),
        "used_by": [pipeline_ref(one) for one in used_by],
        "created_at": timestamp(dataset.created_at),
        "updated_at": timestamp(dataset.updated_at),
    }


def source_row(source: Source) -> dict[str, Any]:
    """How one source is recorded, with the field names of the public client's configs."""
    return {
        "deployment_id": source.name,
        "enabled": source.enabled,
        "retention_days": source.retention_days,
        "sample_rate": source.sample_rate,
        "tags": list(source.tags),
        "updated_at": timestamp(source.updated_at),
    }


def costs(attempt: Attempt) -> dict[str, int]:
    """What the attempt cost, in whole cents; the parts add up to its `cost_cents`. Machines have no price yet."""
    return {
        "training_cents": 0,
        "comparison_cents": 0,
        "scoring_cents": int(attempt.counts.get("judge_nanocents") or 0) // NANOCENTS,
        "benchmark_cents": 0,
        "sample_scoring_cents": sample_scoring(attempt)["sample_scoring_cents"],
    }


def sample_scoring(attempt: Attempt) -> dict[str, int]:
    """What scoring unreviewed samples did for the attempt before it opened (`_AttemptSampleScoring`)."""
    done = attempt.frozen.get("sample_scoring", {})
    return {
        "sample_scoring_cents": done.get("nanocents", 0) // NANOCENTS,
        "sample_scored": done.get("scored", 0),
        "sample_picked": done.get("picked", 0),
    }


def attempt_row(attempt: Attempt, pipeline: Pipeline) -> dict[str, Any]:
    """One attempt as `PipelineAttempt`, with the pipeline's id and tag beside it."""
    report = attempt.report or {}
    outcome = outcome_of(
        attempt.state,
        verdict=attempt.verdict,
        decision=attempt.decision,
        trained=attempt.adapter_digest is not None,
        tested=bool(report.get("rows_scored")),
    )
    return {
        "pipeline_id": attempt.pipeline_id,
        "tag": pipeline.tag,
        "attempt": attempt.attempt_no,
        "run_id": attempt.run_id,
        "state": attempt.state,
        "trigger": attempt.trigger,
        "model_role": "main",
        "base_model_id": attempt.frozen.get("model_id"),
        "model_family": attempt.frozen.get("model_family"),
        "outcome": outcome,
        "decision": attempt.decision,
        "train_rows": attempt.train_rows,
        "holdout_rows": attempt.holdout_rows,
        "train_rows_by_judge": attempt.counts.get("picked"),
        "cost_cents": sum(costs(attempt).values()),
        **sample_scoring(attempt),
        "lineage": lineage(attempt),
        "builds_on_version": None,
        "trained_on": trained_on(attempt),
        "version": attempt.version_no,
        "created_at": timestamp(attempt.created_at),
        "finished_at": timestamp(attempt.finished_at),
        "gpu_seconds": attempt.gpu_seconds,
        "verdict": attempt.verdict,
        "win_rate": report.get("win_rate"),
        "candidate_pass_rate": report.get("candidate_pass_rate"),
        "incumbent_pass_rate": report.get("incumbent_pass_rate"),
        "evaluation_id": attempt.run_id if report else None,
        "compared_with": attempt.compared_with,
        "compared_with_version": attempt.compared_with_version,
        "missed_bar": report.get("missed_bar"),
        "reason": attempt.reason,
        "explanation": explain(
            state=attempt.state,
            outcome=outcome,
            verdict=attempt.verdict,
            decision=attempt.decision,
            version_no=attempt.version_no,
            error_code=attempt.error_code,
            reason=attempt.reason,
        ).as_dict(),
        "tested": bool(report.get("rows_scored")),
    }


def version_row(version: Version, attempt: Attempt, *, live: bool) -> dict[str, Any]:
    """One version with the field names of `PipelineVersion`, as far as they exist."""
    report = attempt.report or {}
    return {
        "version": version.version_no,
        "run_id": version.run_id,
        "pipeline_id": version.pipeline_id,
        "attempt": attempt.attempt_no,
        "base_model_id": attempt.frozen.get("model_id"),
        "model_family": attempt.frozen.get("model_family"),
        "state": attempt.state,
        "verdict": attempt.verdict,
        "decision": attempt.decision,
        "decided_at": timestamp(attempt.decided_at),
        "is_live": live,
        "promoted_at": timestamp(version.promoted_at),
        "checkpoint_id": version.adapters[-1] if version.adapters else None,
        "train_rows": attempt.train_rows,
        "holdout_rows": attempt.holdout_rows,
        "lineage": lineage(attempt),
        "tested": bool(report.get("rows_scored")),
        "rows_scored": report.get("rows_scored"),
        "win_rate": report.get("win_rate"),
        "mean_delta": report.get("mean_change"),
        "candidate_pass_rate": report.get("candidate_pass_rate"),
        "incumbent_pass_rate": report.get("incumbent_pass_rate"),
        "trigger": attempt.trigger,
        "created_at": timestamp(attempt.created_at),
        "finished_at": timestamp(attempt.finished_at),
    }


def pipeline_row(
    pipeline: Pipeline, *, attempts: int, versions: int, live: int | None, minimums: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One pipeline with the field names of `Pipeline`, as far as they exist; `tags` begin with its own."""
    settings = pipeline.settings.to_json()
    row = {
        "rule_id": pipeline.pipeline_id,
        "rule_name": pipeline.name,
        "own_tag": pipeline.tag,
        "serving_name": f"loop-{pipeline.tag}",
        "base_model_id": pipeline.model_id,
        "base_model_revision": pipeline.model_digest,
        "enabled": pipeline.enabled,
        "paused_reason": pipeline.paused_reason,
        "revision": pipeline.revision,
        **settings,
        "tags": [pipeline.tag, *settings["tags"]],
        "auto_scoring": {"enabled": settings["auto_scoring"]},
        "live_version": live,
        "attempts_total": attempts,
        "versions_total": versions,
        "versions_made": versions,
        "next_reason": pipeline.look_said,
        "last_checked_at": timestamp(pipeline.looked_at),
        "next_due_at": timestamp(pipeline.next_due_at),
        "created_at": timestamp(pipeline.created_at),
        "updated_at": timestamp(pipeline.updated_at),
    }
    return row if minimums is None else {**row, "minimums": minimums}
