"""From the moment that a sample expires no answer has it, before any upkeep, and its request id is free again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from running_api import Api, serving
from uuid_utils import uuid7

from loop_dagster.rules import canonical
from loop_dagster.settings import Settings
from loop_dagster.store.giving import feedback_row, label_rows
from loop_dagster.store.importing import import_rows
from loop_dagster.store.inbox import NewSample
from loop_dagster.store.intake import drain
from loop_dagster.store.open import open_store
from loop_dagster.store.pages import sample_row
from loop_dagster.store.purging import drop_expired
from loop_dagster.store.samples import Samples
from loop_dagster.store.waiting import TABLES

NOW = datetime.now(UTC)


@pytest.fixture(params=["inbox", "lake", "both"])
def running(request: pytest.FixtureRequest, home: Any) -> Iterator[tuple[Api, str]]:
    """An API, and where the samples of `put` lie."""
    with serving(open_store(Settings(home=home))) as api:
        yield api, request.param
        api.store.registry.dispose()


def put(api: Api, request_id: str, *, expires: datetime, place: str) -> str:
    """A sample with feedback, a tag and an attribute."""
    sample_id = str(uuid7())
    row, _secrets = sample_row(
        source="desk",
        identity=canonical.identity("request", "desk", request_id),
        messages=[canonical.message({"role": "user", "content": f"Where is {request_id}?"})],
        answer=canonical.answer("On its way."),
        tools=None,
        flag=None,
        now=NOW - timedelta(days=2),
        expires_at=expires,
    )
    new = NewSample(
        {**row, "sample_id": sample_id},
        [feedback_row(sample_id, "accepted", None, None, NOW - timedelta(days=1))],
        label_rows(sample_id, now=NOW - timedelta(days=1), labels=["vip"], attributes={"plan": request_id}),
    )
    api.store.inbox.put_samples([new], in_lake=lambda _keys: {})
    if place == "lake":
        drain(api.store, holder="test")
    elif place == "both":  # written to the lake, and not yet taken out of the inbox
        number = api.store.inbox.open_batch()
        assert number is not None
        for name, frame in api.store.inbox.rows_of(number).items():
            api.store.lake.append(TABLES[name], frame, transaction=("inbox", number))
    return sample_id


def test_no_reader_has_it(running: tuple[Api, str]) -> None:
    api, place = running
    loop = api.client.loop
    over = put(api, "old", expires=NOW - timedelta(seconds=1), place=place)
    kept = put(api, "new", expires=NOW + timedelta(days=9), place=place)
    for filters in (
        {},
        {"deployment_id": "desk"},
        {"label": "vip"},
        {"q": "where is"},
        {"signalled": True},
        {"origin": "captured"},
    ):
        found = loop.list_traces(**filters)
        assert ([row["trace_id"] for row in found["traces"]], found["total"]) == ([kept], 1), filters
    assert loop.list_traces(attributes={"plan": "old"})["total"] == 0
    labels = {(one["key"], one["label"]): one["traces"] for one in api.call("GET", "/api/loop/labels").json()["labels"]}
    assert labels == {("", "vip"): 1, ("plan", "new"): 1}
    stats = loop.stats()
    assert (stats["traces"], stats["signals"], stats["ready"]["sft"]) == (1, 1, 1)
    path = f"/api/loop/traces/{over}"
    for method, part, body in (
        ("GET", "", None),
        ("GET", "/pipelines", None),
        ("GET", "/signals", None),
        ("POST", "/signals", {"verdict": "accepted"}),
        ("POST", "/labels", {"labels": ["x"]}),
        ("DELETE", "/labels/vip", None),
        ("DELETE", "", None),
    ):
        assert api.call(method, path + part, json=body).status_code == 404, (method, part)
    assert loop.get_trace(kept)["trace_id"] == kept


def test_the_moment_counts(home: Any) -> None:
    with serving(open_store(Settings(home=home))) as api:
        ends = NOW + timedelta(days=1)
        sample = put(api, "old", expires=ends, place="lake")
        samples = Samples(api.store.lake, api.store.inbox)
        before, after = ends - timedelta(microseconds=1), ends
        assert (samples.count(before), samples.count(after), samples.count()) == (1, 0, 1)
        assert [samples.get(sample, moment) is not None for moment in (before, after, None)] == [True, False, True]
        for moment, number in ((before, 1), (after, 0), (None, 1)):
            for frames in (samples.keys(moment), samples.whole(moment)):
                assert frames.samples.collect().height == number


def test_its_request_id_is_free_again_and_upkeep_takes_the_old_one_alone(running: tuple[Api, str]) -> None:
    api, place = running
    loop = api.client.loop
    loop.set_config("desk", True)
    over = put(api, "r1", expires=NOW - timedelta(seconds=1), place=place)
    first = put(api, "r2", expires=NOW + timedelta(days=9), place=place)
    asked = [{"role": "user", "content": "Where is it now?"}]
    assert loop.capture("desk", "m", asked, "There.", request_id="r2")["trace_id"] == first
    anew = loop.capture("desk", "m", asked, "There.", request_id="r1")
    assert (anew["captured"], anew["already_present"]) == (True, False)
    assert anew["trace_id"] not in (over, first)
    for _ in range(2):
        again = loop.capture("desk", "m", asked, "Elsewhere.", request_id="r1")
        assert (again["trace_id"], again["already_present"]) == (anew["trace_id"], True)
        assert loop.list_traces()["total"] == 2
        drain(api.store, holder="test")
    drop_expired(api.store, datetime.now(UTC), holder="test")
    assert {row["trace_id"] for row in loop.list_traces()["traces"]} == {anew["trace_id"], first}
    assert api.store.samples.count() == 2
    assert loop.get_trace(anew["trace_id"])["completion"] == "There."


def test_a_row_of_an_import_that_has_expired_comes_in_again(home: Any) -> None:
    store = open_store(Settings(home=home))
    rows = [{"prompt": "One", "completion": "A", "label": True}]
    for now, stored in ((NOW, 1), (NOW + timedelta(days=364), 0), (NOW + timedelta(days=365), 1)):
        done = import_rows(store.lake, rows, source="app", now=now, import_id="i", labels=["vip"]).as_dict()
        assert (done["imported"], done["already_present"]) == (stored, 1 - stored)
        assert store.samples.count(now) == 1
    store.registry.dispose()
