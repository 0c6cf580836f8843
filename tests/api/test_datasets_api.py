"""Datasets through the public client: saved, counted, listed by, edited, deleted; each answer held against its type."""

from __future__ import annotations

from typing import Any

import pytest
from bios._client import ApiError
from running_api import Api
from wire_types import check

WORDS = {"good": 2, "corrected": 2, "bad": 1, "unreviewed": 3}


@pytest.fixture(scope="module", autouse=True)
def eight_samples(api: Api) -> None:
    """Eight samples of two models: two in a group, one by capture; feedback of every word."""
    loop = api.client.loop
    rows: list[dict[str, Any]] = [
        {"prompt": "One", "completion": "A", "label": True},
        {"prompt": "Two", "completion": "B", "label": True},
        {"prompt": "Three", "completion": "C", "label": False},
        {"prompt": "Four", "completion": "D", "correction": "Better"},
        {"prompt": "Five", "completion": "E", "ground_truth": "Right"},
        {"prompt": "Six", "completion": "F"},
        {"prompt": "Seven"},
    ]
    first = loop.import_rows("app", rows[:4], model="small", labels=["billing", "vip"])
    loop.import_rows("app", rows[4:], model="large", labels=["shipping"])
    loop.label(first["trace_ids"][0], labels=["invoices"], parent="money")
    loop.unlabel(first["trace_ids"][1], "vip")
    loop.set_config("live", enabled=True)
    loop.capture(deployment_id="live", model="small", messages=[{"role": "user", "content": "Eight"}], completion="H")


def refused(status: int, code: str, call: Any, *args: Any, **options: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as error:
        call(*args, **options)
    assert (error.value.status, error.value.code) == (status, code)
    return dict(error.value.body or {})


def test_without_conditions_it_is_every_sample(api: Api) -> None:
    loop = api.client.loop
    made = loop.create_dataset("Everything")
    check(made, "LoopDataset")
    assert (made["samples"], made["feedback_counts"], made["match"]) == (8, WORDS, "any")
    assert made["created_by"] == {"id": api.client.introspect()["key_id"], "name": "tests"}
    assert loop.get_dataset(made["id"]) == made
    assert loop.list_traces(dataset=made["id"])["total"] == 8


@pytest.mark.parametrize(
    ("conditions", "samples"),
    [
        ({"tags": ["billing", "shipping"]}, 7),
        ({"tags": ["BILLING", "vip"], "match": "all"}, 3),
        ({"tags": ["money"]}, 1),
        ({"tags": ["money", "vip"], "match": "all"}, 1),
        ({"tags": [], "match": "all"}, 8),
        ({"tags": ["nobody-has-it"]}, 0),
        ({"feedback": ["unreviewed"]}, 3),
        ({"feedback": ["bad", "corrected"]}, 3),
        ({"feedback": ["good"], "tags": ["vip"]}, 1),
        ({"origin": "captured"}, 1),
        ({"model": "small"}, 5),
        ({"model": "large", "feedback": ["corrected"]}, 1),
        ({"from_time": "2020-01-01T00:00:00+02:00", "to_time": "2020-01-02T00:00:00Z"}, 0),
        ({"from_time": "2020-01-01T00:00:00Z", "origin": "imported"}, 7),
    ],
)
def test_every_condition_holds_and_the_list_has_as_many(api: Api, conditions: dict[str, Any], samples: int) -> None:
    loop = api.client.loop
    counted = loop.preview_dataset(**conditions)
    check(counted, "LoopDatasetPreview")
    assert counted["samples"] == sum(counted["feedback_counts"].values()) == samples
    made = loop.create_dataset(f"Case {conditions}"[:80], **conditions)
    check(made, "LoopDataset")
    assert (made["samples"], made["feedback_counts"]) == (samples, counted["feedback_counts"])
    listed = loop.list_traces(dataset=made["id"])
    assert (listed["total"], len(listed["traces"])) == (samples, samples)
    assert loop.delete_dataset(made["id"]) == {"deleted": True, "removed_from": []}
    refused(404, "NOT_FOUND", loop.get_dataset, made["id"])
    refused(404, "NOT_FOUND", loop.list_traces, dataset=made["id"])


def test_a_preview_names_models_and_adds_datasets_as_a_pipeline_does(api: Api) -> None:
    loop = api.client.loop
    assert loop.preview_dataset()["models"] == [{"model": "small", "samples": 5}, {"model": "large", "samples": 3}]
    shipping = loop.create_dataset("Shipping only", tags=["shipping"])
    both = loop.preview_dataset(tags=["money"], datasets=[shipping["id"]])
    assert (both["samples"], both["models"][0]) == (4, {"model": "large", "samples": 3})
    alone = loop.preview_dataset(datasets=[shipping["id"]], feedback=["corrected"])
    assert (alone["samples"], alone["feedback_counts"]["corrected"]) == (1, 1)
    refused(404, "NOT_FOUND", loop.preview_dataset, datasets=["ds_0"])
    loop.delete_dataset(shipping["id"])


def test_an_edit_changes_what_is_sent_and_null_clears(api: Api) -> None:
    loop = api.client.loop
    made = loop.create_dataset("Edited", tags=["billing"], feedback=["good"], model="small", origin="imported")
    edited = loop.update_dataset(made["id"], expected_revision=1, model=None, feedback=[], name="Edited again")
    check(edited, "LoopDataset")
    assert (edited["tags"], edited["feedback"], edited["model"]) == (["billing"], [], None)
    assert (edited["origin"], edited["name"], edited["revision"], edited["samples"]) == (
        "imported", "Edited again", 2, 4,
    )  # fmt: skip
    assert loop.update_dataset(made["id"])["revision"] == 2
    refused(409, "REVISION_MISMATCH", loop.update_dataset, made["id"], expected_revision=1, name="Late")
    taken = refused(409, "DATASET_NAME_TAKEN", loop.create_dataset, "eDITED  again")
    assert "Edited" not in taken["error"]["code"]
    other = loop.create_dataset("Another")
    refused(409, "DATASET_NAME_TAKEN", loop.update_dataset, other["id"], name="EDITED AGAIN")
    page = loop.list_datasets(limit=1, q="edited")
    check(page, "LoopDatasetListResponse")
    assert ([one["id"] for one in page["datasets"]], page["total"]) == ([made["id"]], 1)
    everything = loop.list_datasets()["datasets"]
    assert [one["id"] for one in everything][:2] == [other["id"], made["id"]]
    assert everything[1] == loop.get_dataset(made["id"])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x" * 81}, "80"),
        ({"name": None}, "name"),
        ({"name": "n", "surprise": 1}, "surprise"),
        ({"name": "n", "tags": ["no spaces"]}, "tags"),
        ({"name": "n", "tags": None}, "tags"),
        ({"name": "n", "tags": [f"t{number}" for number in range(33)]}, "tags"),
        ({"name": "n", "match": "some"}, "match"),
        ({"name": "n", "feedback": ["great"]}, "feedback"),
        ({"name": "n", "origin": "dreamt"}, "origin"),
        ({"name": "n", "model": ""}, "model"),
        ({"name": "n", "from": "yesterday"}, "from"),
        ({"name": "n", "from": "2026-01-02T00:00:00"}, "from"),
        ({"name": "n", "from": "0001-01-01T00:00:00+14:00"}, "from"),
        ({"name": "n", "from": "2026-01-02T00:00:00Z", "to": "2026-01-01T00:00:00Z"}, "from"),
    ],
)
def test_what_a_body_may_not_say_is_refused_by_name(api: Api, body: dict[str, Any], named: str) -> None:
    before = len(api.store.datasets.list())
    answered = api.call("POST", "/api/loop/datasets", json=body)
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "BAD_REQUEST")
    assert named in answered.json()["error"]["message"]
    assert len(api.store.datasets.list()) == before


def test_unknown_filters_and_other_workspaces(api: Api) -> None:
    loop = api.client.loop
    made = loop.create_dataset("Mine alone")
    assert api.call("GET", f"/api/loop/traces?dataset={made['id']}&pipeline=x").status_code == 400
    assert api.call("GET", f"/api/loop/datasets/{made['id']}/export?format=csv").status_code == 400
    elsewhere = api.new_key(workspaces=("elsewhere",))
    for method, path in (("GET", ""), ("PUT", ""), ("DELETE", ""), ("GET", "/export")):
        answered = api.call(method, f"/api/loop/datasets/{made['id']}{path}", key=elsewhere)
        assert (answered.status_code, answered.json()["error"]["code"]) == (404, "NOT_FOUND")
    assert api.call("GET", f"/api/loop/traces?dataset={made['id']}", key=elsewhere).status_code == 404
    reader = api.new_key("loop:read")
    assert api.call("POST", "/api/loop/datasets", key=reader, json={"name": "No"}).status_code == 403
    assert api.call("POST", "/api/loop/datasets/preview", key=reader, json={}).status_code == 200
