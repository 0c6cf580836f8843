"""What answers do not have yet, by the public client's names: the one list that fills them and that the docs show.

Belongs here: fields that are null until something computes them, optional ones that are left out, and figures that
stand for something which cannot have happened yet. Nothing here is made up: where the wire's type has no null, the
figure is what is true while the part that it counts does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Null for now → what will fill it.
NULL_FOR_NOW: Final[Mapping[str, Mapping[str, str]]] = {
    "Pipeline": {
        "challenger_model": "second models",
        "live_deployment": "a check of the serving engine",
        "chain": "building on the live version",
        "serving_taken_over_by": "nothing: a tag belongs to one pipeline for ever",
        "scoring_capped_until": "nothing: a judge's own server caps its key and does not say until when",
        "second_model": "second models",
    },
    "PipelineVersion": {
        "benchmark_score": "benchmarks",
        "benchmark_rows": "benchmarks",
        "benchmark_rows_total": "benchmarks",
        "benchmark_status": "benchmarks",
    },
    "TrainingRun": {
        "recipe_note": "nothing: no attempt varies a recipe",
        "recipe_of_version": "nothing: no attempt varies a recipe",
        "next_poll_at": "waits for machines",
        "train_dataset_id": "nothing: training sets are rows of the lake",
        "holdout_dataset_id": "nothing: held-back sets are rows of the lake",
        "training_job_id": "the machine catalogue",
        "job_status": "the machine catalogue",
        "queue_deadline_at": "the machine catalogue",
        "training_summary": "the recipe's sentence, once it is kept",
        "candidate_deployment_id": "the machine catalogue",
        "candidate_name": "the machine catalogue",
        "candidate_status": "the machine catalogue",
        "candidate_deadline_at": "the machine catalogue",
        "candidate_cleanup_at": "the machine catalogue",
        "benchmark_run_id": "benchmarks",
        "serving_before": "rollback",
        "rollback_available_until": "rollback",
        "auto_promote_at": "nothing: promotion waits for no time of its own",
    },
    "TrainingRunSummary": {
        "recipe_note": "nothing: no attempt varies a recipe",
        "recipe_of_version": "nothing: no attempt varies a recipe",
        "training_job_id": "the machine catalogue",
        "candidate_deployment_id": "the machine catalogue",
        "auto_promote_at": "nothing: promotion waits for no time of its own",
    },
    "TrainingRunResponse": {
        "benchmark": "benchmarks",
        "verdict_checks_withheld": "nothing: no report was decided under an earlier rule",
    },
    "TrainingRunLinks": {
        "training_job_url": "pages of Dagster's UI by address",
        "candidate_url": "the machine catalogue",
        "evaluation_url": "pages of Dagster's UI by address",
        "benchmark_url": "benchmarks",
    },
    "TrainingRunPromotion": {
        "policy": "the policy that decided, once it is kept",
        "k": "benchmarks",
        "weighted_delta": "benchmarks",
    },
    "Evaluation": {
        "judge_id": "nothing: judges are settings of the installation",
        "judge_instructions": "the judge's instructions, once they are kept",
    },
    "EvaluationItem": {
        "trace_url": "pages of Dagster's UI by address",
        "human_verdict": "feedback on answers of a report",
    },
    "EvaluationItemJudge": {"reason": "the judge's reasons, once they are kept"},
    "EvaluationPairwiseOrder": {"reason": "the judge's reasons, once they are kept"},
    "ApiKeyIntrospection": {"expires_at": "keys that expire"},
    "LoopMetricPoint": {
        "recipe_note": "nothing: no attempt varies a recipe",
        "recipe_of_version": "nothing: no attempt varies a recipe",
    },
    "PromotionPolicyState": {
        "updated_at": "who saved which revision, once it is kept",
        "updated_by": "who saved which revision, once it is kept",
    },
    "VersionScores": {"promotion": "decisions measurement by measurement, once they are kept"},
}

#: Figures without a null on the wire → what they are until then, and why that is true.
FIXED: Final[Mapping[str, Mapping[str, tuple[Any, str]]]] = {
    "LoopDataset": {"in_benchmarks": (0, "there are no benchmarks yet")},
    "AttemptCompareResponse": {"benchmarks": ([], "there are no benchmarks yet")},
    "VersionCompareResponse": {
        "benchmarks": ([], "there are no benchmarks yet"),
        "differences": ([], "there are no benchmarks yet"),
    },
    "VersionScores": {"benchmarks": ([], "there are no benchmarks yet")},
    "LoopMetricPoint": {
        "billed_training_cents": (0, "machines have no price yet"),
        "billed_candidate_cents": (0, "machines have no price yet"),
        "benchmark_spent_cents": (0, "there are no benchmarks yet"),
        "cost_up_to": (False, "machines have no price yet"),
    },
    "LoopDatasetPreview": {"in_benchmarks": (0, "there are no benchmarks yet")},
    "PipelineVersion": {
        "benchmark_comparable": (False, "there are no benchmarks yet"),
        "cost_includes_candidate_ceiling": (False, "machines have no price yet"),
        "cost_up_to": (False, "machines have no price yet"),
    },
    "PipelineAttempt": {
        "cost_up_to": (False, "machines have no price yet"),
        "comparison_returned_cents": (0, "machines have no price yet"),
    },
    "TrainingRun": {
        "billed_training_cents": (0, "machines have no price yet"),
        "billed_candidate_cents": (0, "machines have no price yet"),
        "billed_candidate_up_to": (False, "machines have no price yet"),
        "comparison_returned_cents": (0, "machines have no price yet"),
        "benchmark_spent_cents": (0, "there are no benchmarks yet"),
        "candidate_seq": (0, "there are no machines to book yet"),
    },
    "TrainingRunSummary": {
        "billed_training_cents": (0, "machines have no price yet"),
        "billed_candidate_cents": (0, "machines have no price yet"),
        "billed_candidate_up_to": (False, "machines have no price yet"),
        "comparison_returned_cents": (0, "machines have no price yet"),
        "benchmark_spent_cents": (0, "there are no benchmarks yet"),
    },
    "TrainingRunResponse": {
        "benchmark_runs": ([], "there are no benchmarks yet"),
    },
    "TrainingRunPromotion": {"measurements": ([], "decisions are not kept measurement by measurement yet")},
}

#: Fields that the client's types leave optional and that are not sent yet → what will fill them.
LEFT_OUT: Final[Mapping[str, Mapping[str, str]]] = {
    "ApiKeyIntrospection": {
        "org": "nothing: an installation has workspaces and no organisations",
        "user": "nothing: keys belong to no person",
        "scope_preset": "nothing: keys have scopes and no presets",
        "scope_details": "nothing: docs/api.md says what each scope opens",
        "allowed_mcp_tools": "nothing: there are no such tools here",
        "allowed_sdk_methods": "nothing: docs/api.md says what each scope opens",
        "rate_limit": "nothing: calls are not limited in number",
    },
}

#: Parts of a body that are checked and not kept yet → what will keep them.
NOT_KEPT: Final[Mapping[str, Mapping[str, str]]] = {
    "POST /api/loop/traces": {
        "model_version": "nothing: a sample is a conversation and the model that answered",
        "prompt_tokens": "nothing: tokens are counted with the tokenizer that trains",
        "completion_tokens": "nothing: tokens are counted with the tokenizer that trains",
        "latency_ms": "nothing: a sample is a conversation and the model that answered",
        "metadata": "nothing: tags and attributes describe a sample",
    },
    "POST /api/loop/traces/{id}/signals": {"author": "who gave feedback", "metadata": "who gave feedback"},
    "POST /api/loop/training-runs/{id}/reject, cancel": {"reason": "nothing: a timeline holds no words of a person"},
}


def unknown(kind: str) -> dict[str, Any]:
    """The fields of `kind` that nothing computes yet, as they are answered."""
    fixed = {name: value for name, (value, _why) in FIXED.get(kind, {}).items()}
    return {**dict.fromkeys(NULL_FOR_NOW.get(kind, {})), **fixed}
