"""A tag and an attribute of the same name on one sample: neither replaces the other, on any way in, for any reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from running_api import Api

from loop_dagster.store.intake import drain

TAG = {"key": "", "label": "desk", "parent": None}
ATTRIBUTE = {"key": "desk", "label": "front", "parent": None}


@pytest.fixture(scope="module")
def pipeline(api: Api, tiny_model: Any) -> str:
    made = api.client.loop.create_pipeline(name="Desk", model={"id": str(tiny_model)})["pipeline"]
    return str(made["rule_id"])


def _labels(api: Api, sample: str) -> None:
    api.client.loop.label(sample, labels=["desk"])
    api.client.loop.set_attributes(sample, {"desk": "front"})


def _labels_the_other_way(api: Api, sample: str) -> None:
    api.client.loop.set_attributes(sample, {"desk": "back"})
    api.client.loop.label(sample, labels=["desk"])
    api.client.loop.set_attributes(sample, {"desk": "front"})


def _in_one_call(api: Api, sample: str) -> None:
    api.client.loop.label(sample, labels=["desk"], attributes={"desk": "front"})


def _signals(api: Api, sample: str) -> None:
    api.client.loop.signal(sample, verdict="accepted", labels=["desk"])
    api.client.loop.signal(sample, verdict="accepted", attributes={"desk": "front"})


def _nothing(api: Api, sample: str) -> None:
    """The rows of the import brought both."""


@pytest.mark.parametrize("way", [_labels, _labels_the_other_way, _in_one_call, _signals, _nothing])
@pytest.mark.parametrize("drained", [False, True])
def test_both_are_there_for_every_reader(
    api: Api, pipeline: str, way: Callable[[Api, str], None], drained: bool
) -> None:
    loop = api.client.loop
    row: dict[str, Any] = {"prompt": f"Q {way.__name__} {drained}", "completion": "A"}
    if way is _nothing:
        row["labels"] = [TAG, ATTRIBUTE]
    [sample] = loop.import_rows("other", [row])["trace_ids"]
    way(api, sample)
    if drained:
        drain(api.store, holder="test")
    shown = sorted(loop.get_trace(sample)["labels"], key=lambda one: str(one["key"]))
    assert shown == [TAG, ATTRIBUTE]
    for found in ({"label": "desk"}, {"attributes": {"desk": "front"}}, {"pipeline": pipeline}):
        listed = loop.list_traces(**found)
        assert listed["total"] == 1, found
        assert len(listed["traces"][0]["labels"]) == 2
    words = {(one["key"], one["label"]): one["traces"] for one in api.call("GET", "/api/loop/labels").json()["labels"]}
    assert (words["", "desk"], words["desk", "front"]) == (1, 1)
    dataset = loop.create_dataset(f"{way.__name__} {drained}", tags=["desk"])
    line = json.loads(api.call("GET", f"/api/loop/datasets/{dataset['id']}/export").text)
    assert sorted(line["labels"], key=lambda one: str(one["key"])) == [TAG, ATTRIBUTE]
    loop.delete_dataset(dataset["id"])
    gone = api.call("DELETE", f"/api/loop/traces/{sample}/labels/front", params={"key": "desk"})
    assert gone.json()["labels"] == [TAG]
    assert loop.list_traces(attributes={"desk": "front"})["total"] == 0
    assert loop.list_traces(pipeline=pipeline)["total"] == 1
    loop.set_attributes(sample, {"desk": "front"})
    assert api.call("DELETE", f"/api/loop/traces/{sample}/labels/desk").json()["labels"] == [ATTRIBUTE]
    assert loop.list_traces(pipeline=pipeline)["total"] == 0
    assert loop.list_traces(attributes={"desk": "front"})["total"] == 1
    loop.delete_trace(sample)


def test_a_call_of_an_import_brings_both(api: Api) -> None:
    rows = [{"prompt": "Whole call", "completion": "A"}]
    [sample] = api.client.loop.import_rows("other", rows, labels=["both"], attributes={"both": "x"})["trace_ids"]
    assert {one["key"] for one in api.client.loop.get_trace(sample)["labels"]} == {"", "both"}
