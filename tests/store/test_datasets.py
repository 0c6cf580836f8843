"""Datasets in the registry: names, revisions, and what a deletion takes them off."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from loop_dagster.errors import BadRequest, NotFound, Refused, RevisionMismatch
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.store.datasets import Dataset, Datasets, frozen_conditions, using
from loop_dagster.store.pipelines import Pipelines
from loop_dagster.store.registry import Registry

NOW = datetime(2026, 12, 1, tzinfo=UTC)
BILLING = DatasetConditions(tags=("billing",), feedback=("good",), from_=NOW)


def test_saved_found_and_frozen(registry: Registry) -> None:
    datasets = Datasets(registry)
    made = datasets.create("  Billing   answers ", conditions=BILLING, created_by="key:k", now=NOW)
    assert (made.name, made.revision, made.created_by, made.conditions) == ("Billing answers", 1, "key:k", BILLING)
    assert datasets.get(made.dataset_id) == datasets.get("BILLING answers") == made
    assert datasets.get_many(["ds_gone", made.dataset_id]) == (made,)
    assert made.frozen()["revision"] == 1
    assert frozen_conditions(made.frozen()) == BILLING
    elsewhere = Registry(registry.url, "elsewhere")
    with pytest.raises(NotFound):
        Datasets(elsewhere).get(made.dataset_id)
    Datasets(elsewhere).create("Billing answers")
    elsewhere.dispose()


def test_an_edit_is_a_revision_and_only_when_it_changes_something(registry: Registry) -> None:
    datasets = Datasets(registry)
    made = datasets.create("One", conditions=BILLING, now=NOW)
    later = NOW + timedelta(hours=1)
    assert datasets.edit(made.dataset_id, conditions={"tags": ["billing"]}, name="One", now=later) == made
    edited = datasets.edit(made.dataset_id, conditions={"from": None, "tags": ["x"]}, expected_revision=1, now=later)
    assert (edited.revision, edited.updated_at, edited.created_at) == (2, later, NOW)
    assert (edited.conditions.tags, edited.conditions.from_, edited.conditions.feedback) == (("x",), None, ("good",))
    with pytest.raises(RevisionMismatch, match="at revision 2"):
        datasets.edit(made.dataset_id, expected_revision=1, name="Late")
    with pytest.raises(BadRequest):
        datasets.edit(made.dataset_id, conditions={"match": "most"})
    other = datasets.create("Two", now=NOW)
    assert [one.name for one in datasets.list()] == ["One", "Two"]
    for call in (lambda: datasets.create("oNE"), lambda: datasets.edit(other.dataset_id, name="ONE")):
        with pytest.raises(Refused) as taken:
            call()
        assert taken.value.code == "DATASET_NAME_TAKEN"
    assert datasets.get(made.dataset_id) == edited
    for name in ("", " ", "x" * 81):
        with pytest.raises(BadRequest):
            datasets.create(name)


def test_of_many_who_take_a_name_at_once_one_gets_it(registry: Registry) -> None:
    datasets = Datasets(registry)

    def make(number: int) -> Dataset | str:
        try:
            return datasets.create("Wanted" if number % 2 else "WANTED")
        except Refused as refused:
            return refused.code

    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(make, range(6)))
    assert made.count("DATASET_NAME_TAKEN") == 5
    assert len(datasets.list()) == 1


def test_a_deletion_takes_it_off_its_pipelines(registry: Registry) -> None:
    datasets, pipelines = Datasets(registry), Pipelines(registry)
    one, two = datasets.create("One"), datasets.create("Two")
    both = PipelineSettings(datasets=(one.dataset_id, two.dataset_id))
    uses = pipelines.create("Uses both", model_id="m", settings=both)
    other = pipelines.create("Uses two", model_id="m", settings=PipelineSettings(datasets=(two.dataset_id,)))
    gone = pipelines.create("Deleted", model_id="m", settings=both)
    pipelines.delete(gone.pipeline_id)
    assert using(pipelines.list(), one.dataset_id) == [uses]

    deleted = datasets.delete(one.dataset_id)
    assert [(left.pipeline_id, left.revision) for left in deleted.removed_from] == [(uses.pipeline_id, 2)]
    assert pipelines.get(uses.pipeline_id).settings.datasets == (two.dataset_id,)
    assert pipelines.revision(uses.pipeline_id, 1) == both
    assert pipelines.get(other.pipeline_id) == other
    with pytest.raises(NotFound):
        datasets.get(one.dataset_id)
    assert datasets.create("One").dataset_id != one.dataset_id  # its name is free again


def test_a_pipeline_takes_none_that_is_not_there(registry: Registry) -> None:
    datasets, pipelines = Datasets(registry), Pipelines(registry)
    missing = PipelineSettings(datasets=("ds_0",))
    with pytest.raises(NotFound, match="ds_0"):
        pipelines.create("New", model_id="m", settings=missing)
    made = pipelines.create("Old", model_id="m")
    with pytest.raises(NotFound, match="ds_0"):
        pipelines.edit(made.pipeline_id, settings={"datasets": ["ds_0"]})
    assert pipelines.list() == (made,)
    with pytest.raises(NotFound):
        datasets.delete("ds_0")


def test_deleted_while_it_is_given_to_pipelines_it_is_on_none_in_the_end(registry: Registry) -> None:
    datasets, pipelines = Datasets(registry), Pipelines(registry)
    made = datasets.create("Contested")
    names = [pipelines.create(f"Pipeline {number}", model_id="m").pipeline_id for number in range(6)]

    def give(pipeline_id: str) -> bool:
        try:
            pipelines.edit(pipeline_id, settings={"datasets": [made.dataset_id]})
        except NotFound:
            return False
        return True

    with ThreadPoolExecutor(7) as threads:
        given = [threads.submit(give, name) for name in names[:3]]
        deletion = threads.submit(datasets.delete, made.dataset_id)
        given += [threads.submit(give, name) for name in names[3:]]
        taken_off = {one.pipeline_id for one in deletion.result().removed_from}
    assert {name for name, gave in zip(names, given, strict=True) if gave.result()} == taken_off
    assert using(pipelines.list(), made.dataset_id) == []
