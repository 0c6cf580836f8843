"""Pipelines that select by datasets: which looks a new sample costs, what an attempt freezes, what an edit changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from loop_dagster.opening import Opened, Seen, frozen_pipeline, look, plan_pass
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.settings import Settings
from loop_dagster.store.importing import import_rows
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.selecting import measure
from loop_dagster.wire import attempt_row

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


def bring(store: Store, tag: str, count: int = 1, *, now: datetime = NOW) -> None:
    rows = [{"prompt": f"{tag} {number} {now}", "completion": f"{number}", "label": True} for number in range(count)]
    import_rows(store.lake, rows, source="app", now=now, labels=[tag])


def pipeline(store: Store, name: str, tiny_model: Path, *datasets: str) -> Pipeline:
    return store.pipelines.create(name, model_id=str(tiny_model), settings=PipelineSettings(datasets=datasets))


def looked_at(store: Store, seen: Seen) -> tuple[set[str], Seen]:
    """Tags that a pass looks at, and what it has seen then."""
    found = plan_pass(store, NOW, seen)
    marks = {**seen.marks, **{one.pipeline_id: mark for one, mark in found.changed}}
    return {one.tag for one, _mark in found.changed}, Seen(found.data, marks)


def test_a_new_sample_costs_a_look_at_whoever_could_select_it(store: Store, tiny_model: Path) -> None:
    billing = store.datasets.create("Billing", conditions=DatasetConditions(tags=("billing", "money"), match="all"))
    anything = store.datasets.create("Anything", conditions=DatasetConditions(origin="imported"))
    pipeline(store, "Plain", tiny_model)
    pipeline(store, "By tag", tiny_model, billing.dataset_id)
    pipeline(store, "By all", tiny_model, anything.dataset_id)
    everyone = {"plain", "by-tag", "by-all"}

    first, seen = looked_at(store, Seen())
    assert first == everyone
    bring(store, "other")
    # The first pass had no data to tell one pipeline from another by.
    _again, seen = looked_at(store, seen)
    assert looked_at(store, seen)[0] == set()
    for tag, changed in (("billing", {"by-tag", "by-all"}), ("elsewhere", {"by-all"}), ("plain", {"plain", "by-all"})):
        bring(store, tag)
        found, seen = looked_at(store, seen)
        assert found == changed, tag
    store.datasets.edit(billing.dataset_id, conditions={"match": "any"})
    found, seen = looked_at(store, seen)
    assert found == {"by-tag"}
    store.datasets.delete(anything.dataset_id)
    assert looked_at(store, seen)[0] == {"by-all"}


def test_an_attempt_keeps_the_conditions_that_it_opened_with(store: Store, tiny_model: Path) -> None:
    billing = store.datasets.create("Billing", conditions=DatasetConditions(tags=("billing",)))
    made = pipeline(store, "Support", tiny_model, billing.dataset_id)
    bring(store, "billing", 1_100)
    bring(store, "shipping", 3)
    found = look(store, made, NOW + timedelta(seconds=1))
    assert isinstance(found, Opened)
    store.datasets.edit(billing.dataset_id, conditions={"tags": ["shipping"]}, name="Shipping")

    frozen = frozen_pipeline(store.pipelines.get("support"), found.attempt)
    assert measure(store, frozen, None, NOW).selection.selected == 1_100
    assert measure(store, store.pipelines.get("support"), None, NOW).selection.selected == 3
    assert attempt_row(found.attempt, made)["trained_on"]["datasets"] == [billing.frozen()]
    store.datasets.delete(billing.dataset_id)
    assert measure(store, frozen, None, NOW).selection.selected == 1_100
    assert measure(store, store.pipelines.get("support"), None, NOW).selection.selected == 0
