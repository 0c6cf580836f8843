"""Datasets on the wire: `LoopDataset`, what each selects now, and who trains or trained on it.

Belongs here: conversions and counts. Does not belong here: saving (routers/datasets.py), what a condition means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from loop_dagster.api.gaps import unknown
from loop_dagster.rules.conditions import FEEDBACK_WORDS, DatasetConditions, Narrowing
from loop_dagster.rules.matching import EVERYTHING, WORD, chosen, counts
from loop_dagster.store.datasets import Dataset, using
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt
from loop_dagster.wire import dataset_row

#: Trainings that a dataset names.
_LEARNED_BY: Final = 50
#: Models that a preview names.
_MODELS: Final = 20


@dataclass(frozen=True, slots=True)
class Around:
    """What datasets are shown with, read once for all of a page: pipelines, attempts, and the names of keys."""

    pipelines: Sequence[Pipeline]
    attempts: Sequence[Attempt]
    keys: dict[str, str]

    @classmethod
    def read(cls, store: Store) -> Around:
        """Everything of the workspace, the newest attempt first."""
        return cls(
            store.pipelines.list(),
            store.attempts.list()[::-1],
            {f"key:{key.key_id}": key.name for key in store.keys.list()},
        )


def dataset_rows(store: Store, datasets: Sequence[Dataset], now: datetime) -> list[dict[str, Any]]:
    """Datasets as `LoopDataset`, their samples counted by one look at the keys."""
    keys = store.samples.keys()
    counted = counts(keys.samples, keys.feedback, keys.labels, groups=[one.conditions for one in datasets], now=now)
    around = Around.read(store)
    return [_dataset(one, found, around) for one, found in zip(datasets, counted, strict=True)]


def _dataset(dataset: Dataset, found: dict[str, int], around: Around) -> dict[str, Any]:
    learned = _learned_by(dataset, around)
    return {
        **unknown("LoopDataset"),
        **dataset_row(dataset, found, using(around.pipelines, dataset.dataset_id)),
        "created_by": _creator(dataset.created_by, around),
        "learned_by": learned[:_LEARNED_BY],
        "learned_by_total": len(learned),
    }


def _creator(created_by: str | None, around: Around) -> dict[str, Any] | None:
    if created_by is None:
        return None
    return {"id": created_by.removeprefix("key:"), "name": around.keys.get(created_by) or None}


def _learned_by(dataset: Dataset, around: Around) -> list[dict[str, Any]]:
    """Attempts whose own set took it and that kept an adapter or have not ended, the newest first."""
    named = {one.pipeline_id: one.name for one in around.pipelines}
    return [
        {
            "pipeline_id": attempt.pipeline_id,
            "pipeline_name": named[attempt.pipeline_id],
            "run_id": attempt.run_id,
            "attempt": attempt.attempt_no,
            "version": attempt.version_no,
        }
        for attempt in around.attempts
        if attempt.pipeline_id in named
        and (attempt.adapter_digest is not None or not attempt.ended)
        and any(one["id"] == dataset.dataset_id for one in attempt.frozen.get("datasets", ()))
    ]


def preview(
    store: Store,
    conditions: DatasetConditions,
    datasets: Sequence[Dataset] | None,
    now: datetime,
) -> dict[str, Any]:
    """What conditions select as `LoopDatasetPreview`; `datasets` add their samples, and the conditions narrow all."""
    groups: list[DatasetConditions] = [conditions]
    narrow: Narrowing = EVERYTHING
    if datasets:
        tagged = DatasetConditions(tags=conditions.tags, match=conditions.match)
        groups = [*([tagged] if conditions.tags else []), *(one.conditions for one in datasets)]
        narrow = Narrowing.model_validate(
            {name: getattr(conditions, name) for name in Narrowing.model_fields}, by_name=True
        )
    keys = store.samples.keys()
    rows = chosen(keys.samples, keys.feedback, keys.labels, groups=groups, narrow=narrow, now=now, columns=["model"])
    words: dict[str, int] = dict(rows.group_by(WORD.alias("word")).len().iter_rows())
    models = rows.drop_nulls("model").group_by("model").len().sort("len", "model", descending=[True, False])
    return {
        **unknown("LoopDatasetPreview"),
        "samples": rows.height,
        "feedback_counts": {word: words.get(word, 0) for word in FEEDBACK_WORDS},
        "models": [{"model": model, "samples": number} for model, number in models.head(_MODELS).iter_rows()],
    }
