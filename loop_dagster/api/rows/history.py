"""How the loop moved over time: `LoopMetricsHistory`.

Belongs here: attempts as points, feedback and samples by day (UTC). Does not belong here: figures of one attempt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from typing import Any

import polars as pl

from loop_dagster.api.gaps import unknown
from loop_dagster.api.rows.attempts import TRIGGERS, cents_of
from loop_dagster.api.rows.pipelines import Found
from loop_dagster.rules.conditions import FEEDBACK_WORDS, DatasetConditions
from loop_dagster.rules.decision import BIG_CHANGE, WIN_RATE
from loop_dagster.rules.feedback import id_key
from loop_dagster.rules.matching import WORD, chosen
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt
from loop_dagster.store.selecting import scope_of
from loop_dagster.tables import ADAPTERS
from loop_dagster.wire import costs, timestamp

_FIGURES = ("rows_scored", "rows_failed", "wins", "losses", "ties", "win_rate", "incumbent_mean", "candidate_mean")


def history(
    store: Store, found: Sequence[Found], pipeline: Found | None, now: datetime, *, limit: int, days: int
) -> dict[str, Any]:
    """The newest `limit` attempts of `found`, oldest first; feedback and samples of the last `days` days with any.

    `pipeline` narrows the samples to what it selects; feedback is the workspace's.
    """
    named = {one.pipeline.pipeline_id: one for one in found}
    attempts = [attempt for one in found for attempt in one.attempts]
    attempts.sort(key=lambda attempt: (attempt.created_at, attempt.run_id))
    shown = attempts[-limit:]
    kept = _trainings(store, shown)
    since = datetime.combine(now.date() - timedelta(days=days - 1), time(), UTC)
    return {
        "runs": [_point(attempt, named[attempt.pipeline_id], kept.get(attempt.key)) for attempt in shown],
        "signals": _signals(store, since),
        "samples": _samples(store, pipeline, since, now),
        "truncated": len(attempts) > len(shown),
    }


def _trainings(store: Store, attempts: Sequence[Attempt]) -> dict[str, Mapping[str, Any]]:
    """Kept step and its loss by attempt, of those that kept an adapter."""
    keys = [attempt.key for attempt in attempts if attempt.adapter_digest is not None]
    if not keys:
        return {}
    rows = store.lake.scan(ADAPTERS).filter(pl.col("attempt").is_in(keys)).select("attempt", "kept_step", "curve")
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows.collect().iter_rows(named=True):
        losses = [one.get("check_loss") for one in json.loads(row["curve"]) if one["step"] == row["kept_step"]]
        loss = next((loss for loss in losses if loss is not None and math.isfinite(loss)), None)
        found[row["attempt"]] = {"step": row["kept_step"], "loss": loss}
    return found


def _point(attempt: Attempt, found: Found, training: Mapping[str, Any] | None) -> dict[str, Any]:
    report = attempt.report
    figures = report or {}
    needed = next((bar["needed"] for bar in figures.get("bars", ()) if bar["key"] == "mean_change"), None)
    return {
        **unknown("LoopMetricPoint"),
        "run_id": attempt.run_id,
        "seq": attempt.attempt_no,
        "rule_id": attempt.pipeline_id,
        "rule_name": found.pipeline.name,
        "state": attempt.state,
        "verdict": attempt.verdict,
        "decision": attempt.decision,
        "created_at": timestamp(attempt.created_at),
        "finished_at": timestamp(attempt.finished_at),
        "train_rows": attempt.train_rows,
        "holdout_rows": attempt.holdout_rows,
        "spent_eval_cents": costs(attempt)["scoring_cents"],
        "sample_scoring_cents": costs(attempt)["sample_scoring_cents"],
        "evaluation_id": attempt.run_id if report else None,
        **{name: figures.get(name) for name in _FIGURES},
        "mean_delta": figures.get("mean_change"),
        "judge_incumbent_mean": figures.get("incumbent_mean"),
        "judge_candidate_mean": figures.get("candidate_mean"),
        "trainer_eval_loss": training["loss"] if training else None,
        "promote_margin": BIG_CHANGE if report else None,
        "promote_min_win_rate": WIN_RATE if report else None,
        "mean_change_needed": (BIG_CHANGE if needed is None else needed) if report else None,
        "checkpoint_id": attempt.adapter_digest,
        "checkpoint_step": training["step"] if training else None,
        "attempt_no": attempt.attempt_no,
        "version_no": attempt.version_no,
        "base_model_id": attempt.frozen.get("model_id"),
        "model_family": attempt.frozen.get("model_family"),
        "base_model_revision": attempt.frozen.get("base_digest"),
        "train_type": "lora",
        "trigger": TRIGGERS.get(attempt.trigger, attempt.trigger),
        "cost_cents": cents_of(attempt),
    }


def _signals(store: Store, since: datetime) -> list[dict[str, Any]]:
    """Feedback of each day by stored verdict, of samples that are still there."""
    keys = store.samples.keys()
    given = keys.feedback.filter(pl.col("created_at") >= since).select(id_key(), "created_at", "verdict").collect()
    there = keys.samples.select(id_key()).collect()["id_key"]
    rows = (
        given.filter(pl.col("id_key").is_in(there.implode()))
        .group_by(pl.col("created_at").dt.date().alias("day"), "verdict")
        .len()
        .sort("day", "verdict")
    )
    days: dict[str, dict[str, int]] = {}
    for day, verdict, number in rows.iter_rows():
        days.setdefault(day.isoformat(), {})[verdict] = number
    return [{"day": day, "total": sum(said.values()), "by_verdict": said} for day, said in days.items()]


def _samples(store: Store, pipeline: Found | None, since: datetime, now: datetime) -> list[dict[str, Any]]:
    """Samples recorded each day by their feedback today: what the pipeline selects, or all that have not expired."""
    keys = store.samples.keys()
    samples = keys.samples.filter(pl.col("created_at") >= since)
    scope = None if pipeline is None else scope_of(store, pipeline.pipeline)
    if scope is None:
        rows = chosen(samples, keys.feedback, keys.labels, groups=[DatasetConditions()], now=now)
    else:
        narrow = scope.settings.conditions
        rows = chosen(samples, keys.feedback, keys.labels, groups=scope.groups, narrow=narrow, now=now)
    counted = rows.group_by(pl.col("created_at").dt.date().alias("day"), WORD.alias("word")).len().sort("day")
    days: dict[str, dict[str, int]] = {}
    for day, word, number in counted.iter_rows():
        days.setdefault(day.isoformat(), {})[word] = number
    return [{"day": day, **{word: words.get(word, 0) for word in FEEDBACK_WORDS}} for day, words in days.items()]
