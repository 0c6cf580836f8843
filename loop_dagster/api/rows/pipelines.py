"""Pipelines on the wire: `Pipeline` for lists and in full, and what the workspace's pipelines are doing.

Belongs here: conversions and counts. Does not belong here: saving (routers/pipelines.py), any rule.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, cast, get_args

import polars as pl

from loop_dagster import scoring
from loop_dagster.api.gaps import unknown
from loop_dagster.api.rows.attempts import active_run, pipeline_attempt, pipeline_version
from loop_dagster.errors import ArtifactTorn, NotFound
from loop_dagster.opening import MODEL_ERRORS, base_of, counted
from loop_dagster.rules.minimums import HOLDOUT_MINIMUM, Minimum
from loop_dagster.rules.money import NANOCENTS
from loop_dagster.rules.recipe import defaults
from loop_dagster.rules.selection import Selection
from loop_dagster.rules.states import Outcome
from loop_dagster.store.capturing import SHOWN_DAYS
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt
from loop_dagster.store.samples import KeyFrames
from loop_dagster.store.selecting import measure
from loop_dagster.store.versions import Version
from loop_dagster.wire import costs, dataset_refs, pipeline_row, timestamp

Status = Literal["training", "needs_you", "serving", "paused"]
#: Why a pipeline was paused by itself, in the wire's closed set; what a person paused has no reason.
_PAUSED: Final = (
    "consent_invalid",
    "insufficient_funds",
    "authorizer_not_member",
    "model_not_trainable",
    "platform_capacity",
    "validation_pending",
    "training_not_enabled",
)
#: Attempts and versions that a pipeline of a list brings, and that a pipeline in full brings.
_LISTED: Final = 5
_IN_FULL: Final = 20
#: What counts as recent.
RECENT: Final = timedelta(hours=48)


@dataclass(frozen=True, slots=True)
class Found:
    """A pipeline with its attempts and versions, oldest first, and the version that answers under its name."""

    pipeline: Pipeline
    attempts: Sequence[Attempt] = field(default=())
    versions: Sequence[Version] = field(default=())
    live: Version | None = None

    @property
    def active(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts and not self.attempts[-1].ended else None

    def is_in(self, status: Status) -> bool:
        """Whether a list of pipelines in that state shows it."""
        waits = self.active is not None and self.active.state in ("awaiting_review", "waiting_funds")
        if status == "training":
            return self.active is not None and not waits
        if status == "needs_you":
            return waits
        return self.live is not None if status == "serving" else not self.pipeline.enabled


def find(store: Store, ref: str) -> Found:
    """The pipeline with this id (or tag, or name). Raises NotFound, without any hint to others."""
    try:
        pipeline = store.pipelines.get(ref)
    except NotFound:
        raise NotFound("pipeline", ref) from None
    attempts = store.attempts.list(pipeline.pipeline_id)
    return Found(pipeline, attempts, store.versions.list(pipeline.pipeline_id), store.versions.live(pipeline.tag))


def find_all(store: Store) -> list[Found]:
    """Every pipeline of the workspace, the newest first."""
    attempts: dict[str, list[Attempt]] = {}
    for attempt in store.attempts.list():
        attempts.setdefault(attempt.pipeline_id, []).append(attempt)
    versions: dict[str, list[Version]] = {}
    for version in store.versions.list():
        versions.setdefault(version.pipeline_id, []).append(version)
    live = store.versions.all_live()
    return [
        Found(one, attempts.get(one.pipeline_id, ()), versions.get(one.pipeline_id, ()), live.get(one.tag))
        for one in reversed(store.pipelines.list())
    ]


def counts(found: Sequence[Found]) -> dict[str, int]:
    """`LoopPipelineCounts`."""
    return {
        "total": len(found),
        **{status: sum(one.is_in(status) for one in found) for status in cast("tuple[Status, ...]", get_args(Status))},
    }


def listed(store: Store, found: Found, now: datetime, keys: KeyFrames) -> dict[str, Any]:
    """One pipeline of a list: its samples counted by `keys`, too long ones not yet set aside."""
    selection = measure(store, found.pipeline, None, now, keys=keys).selection
    enough = selection.minimum.ready
    minimums = _minimums(selection.minimum, selection.minimum.message)
    if enough:
        minimums |= {
            "short": None,
            "message": "Enough samples are counted; the pipeline in full says how many of them can be trained on.",
        }
    row = _row(store, found, selection, now, keys, shown=_LISTED)
    shown = [*found.versions[-_LISTED:]]
    if found.live is not None and found.live not in shown:
        shown.insert(0, found.live)
    holdout = {"rows": None, "held_before": None}
    return {
        **row,
        "minimums": minimums,
        "holdout": {**row["holdout"], **holdout},
        "holdout_size": None,
        "versions": _versions(store, found, shown),
    }


def in_full(store: Store, found: Found, now: datetime) -> dict[str, Any]:
    """One pipeline with everything, its next attempt measured as it would be taken now."""
    measured = counted(store, found.pipeline, now)
    minimum = measured.selection.minimum
    said = f"{minimum.message} {measured.problem}" if measured.problem else minimum.message
    row = _row(store, found, measured.selection, now, store.samples.keys(), shown=_IN_FULL)
    return {
        **row,
        "minimums": _minimums(minimum, said),
        "versions": _versions(store, found, found.versions),
        "capture": capture(store, now, {found.pipeline.tag, *found.pipeline.settings.tags}),
    }


def capture(store: Store, now: datetime, tags: Collection[str] | None = None) -> dict[str, Any]:
    """`PipelineCapture`: calls that the gateway did not record, of a pipeline's tags and of tags that no pipeline had.

    Without `tags`, all of them.
    """
    rows = [
        {"tag": miss.tag, "reason": miss.reason, "calls": miss.calls, "last_at": timestamp(miss.last_at)}
        for miss in store.capturing.misses(now)
        if tags is None or miss.tag in tags or miss.reason == "no_pipeline"
    ]
    return {"days": SHOWN_DAYS, "not_recorded": rows}


def _row(
    store: Store, found: Found, selection: Selection, now: datetime, keys: KeyFrames, *, shown: int
) -> dict[str, Any]:
    pipeline = found.pipeline
    settings = pipeline.settings
    row = pipeline_row(
        pipeline,
        attempts=len(found.attempts),
        versions=len(found.versions),
        live=found.live.version_no if found.live else None,
    )
    held_before = selection.rows.filter(pl.col("reason") == "held_before").height
    auto = scoring.described(store, pipeline, selection, now, exact=shown == _IN_FULL)
    waiting = store.scorings.get(pipeline.pipeline_id).nanocents // NANOCENTS
    return {
        **row,
        **unknown("Pipeline"),
        "datasets": dataset_refs(store.datasets.get_many(settings.datasets)),
        "base_model_revision": pipeline.model_digest or "",
        "paused_reason": pipeline.paused_reason if pipeline.paused_reason in _PAUSED else None,
        "promotion": {"policy": settings.promotion.policy, "k": settings.promotion.k},
        "holdout": {
            "percent": settings.holdout.percent,
            "min_rows": HOLDOUT_MINIMUM,
            "rows": selection.held,
            "held_before": held_before,
        },
        "holdout_size": selection.held,
        "capture": None,  # the pipeline in full counts it
        "training_defaults": _defaults(store, found),
        "storage": _storage(store, found),
        "status": _status(found),
        "active_run": active_run(found.active, will_be=_next_version(found)) if found.active else None,
        "attempts": [pipeline_attempt(attempt, pipeline) for attempt in found.attempts[-shown:]],
        "samples_total": selection.rows.height,
        "samples_recent": _recent(selection, now, keys),
        "auto_scoring": auto,
        "totals": _totals(found, waiting=waiting, scores=auto["status"] == "scoring"),
    }


def _minimums(minimum: Minimum, message: str) -> dict[str, Any]:
    return {
        "basis": minimum.basis,
        "needed": minimum.needed,
        "have": minimum.have,
        "short": minimum.short,
        "message": message,
        "picked_by_judge": minimum.picked,
    }


def _status(found: Found) -> str:
    limit = found.pipeline.settings.max_versions
    if found.is_in("needs_you"):
        active = found.active
        return "needs_funds" if active is not None and active.state == "waiting_funds" else "needs_review"
    if found.is_in("training"):
        return "running"
    if not found.pipeline.enabled:
        return "paused"
    return "complete" if limit is not None and len(found.versions) >= limit else "waiting"


def _next_version(found: Found) -> int:
    return max((version.version_no for version in found.versions), default=0) + 1


def _versions(store: Store, found: Found, versions: Sequence[Version]) -> list[dict[str, Any]]:
    return [pipeline_version(store, version, live=version == found.live) for version in versions]


def _defaults(store: Store, found: Found) -> dict[str, Any]:
    """What automatic means for its model; a model that cannot be read now is no Gemma 4 for this."""
    family = found.attempts[-1].frozen.get("model_family") or "" if found.attempts else ""
    if not family:
        with contextlib.suppress(*MODEL_ERRORS):
            family = base_of(store, found.pipeline).family
    auto = defaults(family)
    return {
        "learning_rate": auto.learning_rate,
        "lora_rank": auto.lora_rank,
        "lora_alpha": auto.lora_alpha,
        "replay_percent": auto.replay_percent,
        "min_epochs": auto.min_epochs,
        "max_epochs": auto.max_epochs,
    }


def _storage(store: Store, found: Found) -> dict[str, Any]:
    """The adapters that are kept of its attempts; rows of the lake lie in tables that all pipelines share."""
    sizes = []
    for digest in {attempt.adapter_digest for attempt in found.attempts if attempt.adapter_digest}:
        with contextlib.suppress(NotFound, ArtifactTorn, OSError):
            sizes.append(store.artifacts.size(digest))
    return {"bytes": sum(sizes), "objects": len(sizes), "where": "your_storage", "billed": False}


def _recent(selection: Selection, now: datetime, keys: KeyFrames) -> int:
    if not selection.rows.height:
        return 0
    new = keys.samples.filter(pl.col("created_at") > now - RECENT).select("sample_id")
    return int(selection.rows.lazy().join(new, on="sample_id", how="semi").select(pl.len()).collect().item())


def _totals(found: Found, *, waiting: int, scores: bool) -> dict[str, Any]:
    """`PipelineTotals`: all its attempts, what became of them and what they cost.

    `waiting`: cents of scoring that no attempt has taken over yet. `scores`: the judge scores samples now.
    """
    outcomes = Counter(pipeline_attempt(attempt, found.pipeline)["outcome"] for attempt in found.attempts)
    parts = _spent(found, waiting)
    ended = [attempt for attempt in found.attempts if attempt.ended]
    untested = [one for one in ended if one.adapter_digest and not (one.report or {}).get("rows_scored")]
    return {
        "trainings": len(found.attempts),
        "trainings_finished": len(ended),
        "trainings_untested": len(untested),
        "trainings_by_result": {name: outcomes.get(name, 0) for name in cast("tuple[str, ...]", get_args(Outcome))},
        "trainings_by_model": {"main": len(found.attempts), "second": 0},
        "versions": len(found.versions),
        "spent_cents": sum(parts.values()),
        "spent_up_to": False,
        "spent_so_far": found.active is not None or scores,
        "scoring_not_yet_in_a_training_cents": waiting,
        "spent_parts": parts,
        "gpu_seconds": sum(attempt.gpu_seconds or 0 for attempt in found.attempts),
        "first_training_at": _at(found.attempts[:1]),
        "last_training_at": _at(found.attempts[-1:]),
    }


def _spent(found: Found, waiting: int) -> dict[str, int]:
    """`PipelineSpentParts` over all attempts, with what none of them has taken over yet."""
    names = {
        "training_cents": "training_cents",
        "test_machine_cents": "comparison_cents",
        "grading_cents": "scoring_cents",
        "benchmark_cents": "benchmark_cents",
        "sample_scoring_cents": "sample_scoring_cents",
    }
    of_each = [costs(attempt) for attempt in found.attempts]
    parts = {name: sum(one[part] for one in of_each) for name, part in names.items()}
    return {**parts, "sample_scoring_cents": parts["sample_scoring_cents"] + waiting}


def _at(attempts: Sequence[Attempt]) -> str | None:
    return timestamp(attempts[0].created_at) if attempts else None


def matches(found: Found, text: str) -> bool:
    """Whether a search for `text` finds it by name, tag or model, whatever the case."""
    wanted = text.casefold()
    pipeline = found.pipeline
    return any(wanted in one.casefold() for one in (pipeline.name, pipeline.tag, pipeline.model_id))
