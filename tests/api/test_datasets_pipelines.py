"""Pipelines that train on datasets, through the public client: given, counted, listed, learned from, taken off."""

from __future__ import annotations

import polars as pl
import pytest
from bios._client import ApiError
from report_world import NOW, compared, questions
from running_api import Api
from wire_types import check

from loop_dagster.store.attempts import attempts as table
from loop_dagster.store.open import Store
from loop_dagster.tables import SELECTIONS


def test_a_pipeline_selects_by_tags_or_datasets_narrowed_by_its_conditions(api: Api, model: dict[str, str]) -> None:
    loop = api.client.loop
    rows = [{"prompt": f"Question {number}", "completion": "Answer", "label": True} for number in range(4)]
    loop.import_rows("app", rows[:3], labels=["billing"], model="small")
    [other] = loop.import_rows("app", rows[3:], labels=["billing"], model="large")["trace_ids"]
    billing = loop.create_dataset("Billing", tags=["billing"])
    made = loop.create_pipeline(name="Refunds", model=model, datasets=[billing["id"]])["pipeline"]
    check(made, "Pipeline")
    assert made["datasets"] == [{"id": billing["id"], "name": "Billing"}]
    assert (made["samples_total"], made["minimums"]["have"], made["revision"]) == (4, 4, 1)
    assert loop.get_dataset(billing["id"])["used_by"] == [{"rule_id": made["rule_id"], "name": "Refunds"}]
    assert loop.list_pipelines()["pipelines"][0]["datasets"] == made["datasets"]

    narrowed = loop.update_pipeline(made["rule_id"], conditions={"model": "small"})["pipeline"]
    assert narrowed["samples_total"] == loop.list_traces(pipeline=made["rule_id"])["total"] == 3
    assert loop.get_trace_pipelines(other)["pipelines"] == []
    loop.update_pipeline(made["rule_id"], conditions=None)
    [selecting] = loop.get_trace_pipelines(other)["pipelines"]
    assert (selecting["rule_id"], selecting["state"]) == (made["rule_id"], "waiting")
    loop.import_rows("app", [{"prompt": "One more", "completion": "A", "label": True}], labels=["billing"])
    assert loop.get_pipeline(made["rule_id"])["samples_total"] == loop.get_dataset(billing["id"])["samples"] == 5

    with pytest.raises(ApiError) as missing:
        loop.update_pipeline(made["rule_id"], datasets=[billing["id"], "ds_0"])
    assert (missing.value.status, missing.value.code) == (404, "NOT_FOUND")
    with pytest.raises(ApiError) as many:
        loop.update_pipeline(made["rule_id"], datasets=[f"ds_{number}" for number in range(33)])
    assert (many.value.status, many.value.code) == (400, "BAD_REQUEST")
    gone = loop.delete_dataset(billing["id"])
    check(gone, "LoopDatasetDeleteResponse")
    assert gone["removed_from"] == [{"rule_id": made["rule_id"], "name": "Refunds"}]
    after = loop.get_pipeline(made["rule_id"])
    assert (after["datasets"], after["samples_total"], after["revision"]) == ([], 0, 4)
    assert loop.list_traces()["total"] == 5


def freeze(store: Store, run_id: str, frozen: dict[str, object]) -> None:
    """What an attempt of the fixture would have frozen, had its pipeline trained on a dataset."""
    attempt = store.attempts.get(run_id)
    with store.registry.write() as connection:
        connection.execute(
            table.update().where(table.c.run_id == run_id).values(frozen={**attempt.frozen, "datasets": [frozen]})
        )


def test_a_dataset_names_the_trainings_that_learned_from_it(api: Api) -> None:
    loop, store = api.client.loop, api.store
    made = loop.create_dataset("Learned from", tags=["anything"])
    frozen = store.datasets.get(made["id"]).frozen()
    first = compared(store, questions(3), name="Learner", state="awaiting_review")
    freeze(store, first.run_id, frozen)
    store.attempts.request_cancel(first.run_id, now=NOW)
    again = {**first.frozen, "datasets": [frozen]}
    second = store.attempts.open_attempt(first.pipeline_id, trigger="data", frozen=again, now=NOW)
    assert second is not None
    loop.update_dataset(made["id"], tags=[], name="Renamed since")

    found = loop.get_dataset(made["id"])
    check(found, "LoopDataset")
    assert [(one["run_id"], one["attempt"], one["version"]) for one in found["learned_by"]] == [
        (second.run_id, 2, None),
        (first.run_id, 1, None),
    ]
    assert found["learned_by_total"] == 2
    run = loop.get_training_run(first.run_id)
    check(run, "TrainingRunResponse")
    [trained_on] = run["run"]["trained_on"]["datasets"]
    assert (trained_on["name"], trained_on["revision"], trained_on["tags"]) == ("Learned from", 1, ["anything"])
    store.attempts.request_cancel(second.run_id, now=NOW)  # it ends without having learned anything
    assert [one["attempt"] for one in loop.get_dataset(made["id"])["learned_by"]] == [1]


def test_a_deletion_names_the_pipelines_whose_live_version_learned_the_sample(api: Api) -> None:
    loop, store = api.client.loop, api.store
    learned, asked = loop.import_rows("app", [{"prompt": f"{n}", "completion": "A"} for n in range(2)])["trace_ids"]
    went_live = compared(store, questions(3), name="Live one", state="promoting")
    tested = compared(store, questions(3), name="Tested one", state="awaiting_review")
    for attempt in (went_live, tested):
        rows = store.lake.scan(SELECTIONS).filter(pl.col("attempt") == attempt.key).collect()
        named = {"learned-3": learned, "sample-0001": asked}
        renamed = rows.with_columns(pl.col("sample_id").replace(named))
        store.lake.replace_attempt(SELECTIONS, attempt.key, renamed)
    store.versions.promote(went_live.run_id, base_digest="b" * 64, adapters=["a" * 64], expect_live=None, now=NOW)
    gone = loop.delete_trace(learned)
    check(gone, "LoopTraceDeleteResponse")
    assert gone["rebuilds"] == [{"pipeline_id": went_live.pipeline_id, "pipeline_name": "Live one"}]
    assert loop.delete_trace(asked)["rebuilds"] == []
