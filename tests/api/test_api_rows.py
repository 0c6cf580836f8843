"""Rows of an import that cannot be read are refused alone; a body that is no JSON is refused as a whole."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from running_api import Api

from loop_dagster.api.apart import cut

GOOD = '{"prompt":"Where is it, {\\"x\\": [1]}?","completion":"Here: [, ]"}'
UNREADABLE = {
    "lone_surrogate": '{"prompt":"\\ud83d","completion":"x"}',
    "not_finite": '{"prompt":"Q","completion":"x","metadata":[NaN]}',
    "too_deep": '{"prompt":"Q","completion":"x","metadata":' + "[" * 120 + "]" * 120 + "}",
    "name_twice": '{"prompt":"Q","prompt":"Other","completion":"x"}',
}
DOUBLED = '{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"x","content":"y"}]}'


def send(api: Api, rows: str, *, path: str = "/api/loop/import", more: str = "") -> httpx.Response:
    body = f'{{"source":"apart",{more}"rows":[{rows}]}}'
    return api.call("POST", path, content=body.encode())


@pytest.mark.parametrize("code", UNREADABLE)
def test_a_row_that_cannot_be_read_is_refused_alone(api: Api, code: str, model: dict[str, str]) -> None:
    rows = ",\n ".join((GOOD, UNREADABLE[code], GOOD))
    made = api.store.pipelines.create(f"Rows {code}", model_id=model["id"])
    for path in ("/api/loop/import", f"/api/loop/pipelines/{made.pipeline_id}/import"):
        done = send(api, rows, path=path).json()
        assert (done["imported"], done["refused"]) == (2, 1), done
        [refused] = done["refused_rows"]
        assert (refused["row"], refused["code"]) == (2, code)
        assert done["refused_reasons"] == [{"code": code, "count": 1, "sentence": refused["sentence"]}]


def test_rows_are_the_same_whether_or_not_another_was_refused(api: Api) -> None:
    numbered = '{"prompt":"Pay","completion":"x","label":1,"metadata":{"sum":1e2}}'
    first = send(api, f"{GOOD},0,{numbered}", more='"import_id":"same",').json()
    assert (first["imported"], first["refused"]) == (2, 1)
    again = send(api, f"{GOOD},{UNREADABLE['not_finite']},{numbered}", more='"import_id":"same",').json()
    assert (again["imported"], again["already_present"], again["refused"]) == (0, 2, 1)


def test_a_name_twice_within_a_message_is_refused_as_well(api: Api) -> None:
    done = send(api, f"{DOUBLED},{GOOD}").json()
    assert (done["imported"], done["refused_rows"][0]["code"]) == (1, "name_twice")


def test_a_very_deep_row_is_refused_alone_too(api: Api) -> None:
    done = send(api, f"{GOOD},{'[' * 50_000 + ']' * 50_000}").json()
    assert (done["imported"], done["refused_why"]) == (1, ["too_deep"])


@pytest.mark.parametrize(
    "rows", ["NaN,,0", "NaN,", ",NaN", "NaN 1", "NaN,{]", "NaN,{'a':1}", 'NaN,"', "NaN}", "NaN,[1", "NaN],[1", "nan"]
)
def test_a_body_that_is_no_json_is_refused_as_a_whole(api: Api, rows: str) -> None:
    before = api.store.samples.count()
    answered = send(api, f"{GOOD},{rows}")
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "BAD_REQUEST"), answered.text
    assert api.store.samples.count() == before


@pytest.mark.parametrize(
    ("more", "named"),
    [('"source":"other",', "source"), ('"rows":[1],', "rows"), ('"row_offset":NaN,', "NaN"), ('"colour":1,', "colour")],
)
def test_what_is_wrong_outside_of_the_rows_is_refused_as_a_whole(api: Api, more: str, named: str) -> None:
    answered = send(api, f"{GOOD},{UNREADABLE['lone_surrogate']}", more=more)
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "BAD_REQUEST")
    assert named in answered.json()["error"]["message"]


def test_too_many_rows_are_not_read_at_all(api: Api) -> None:
    answered = send(api, ",".join(["NaN"] * 5_001))
    assert (answered.status_code, answered.json()["field"]) == (400, "rows")


@pytest.mark.parametrize(
    ("body", "elements"),
    [
        ('{"rows":[]}', []),
        ('{ "rows" : [ 1 , "a,]" ] , "b": [2] }', ["1", '"a,]"']),
        ('{"b":{"rows":[9]},"\\u0072ows":[{"a":[1,2]},[3,[4]]],"c":"rows"}', ['{"a":[1,2]}', "[3,[4]]"]),
        ('{"c":"rows","d":[5],"rows":["\\"[", {}]}', ['"\\"["', "{}"]),
    ],
)
def test_cut_finds_the_elements_of_one_list(body: str, elements: list[str]) -> None:
    rest, found = cut(body.encode(), "rows", most=10)
    assert [one.decode() for one in found] == elements
    whole: dict[str, Any] = json.loads(body)
    assert json.loads(rest) == {**whole, "rows": [0] * len(elements)}
    assert len(cut(body.encode(), "rows", most=0)[1]) == min(len(elements), 1)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("verdict", '"messages":[],"feedback":{"verdict":"good","verdict":"bad"}'),
        ("completion", '"messages":[{"role":"user","content":"Q"}],"completion":"a","completion":"b"'),
        ("content", '"messages":[{"role":"user","content":"Q","content":"R"}],"completion":"a"'),
        ("x", '"messages":[],"metadata":{"x":1,"x":1}'),
    ],
)
def test_a_capture_with_a_name_twice_is_refused_and_says_which(api: Api, name: str, part: str) -> None:
    api.client.loop.set_config("twice", True)
    body = f'{{"deployment_id":"twice","model":"m",{part}}}'
    answered = api.call("POST", "/api/loop/traces", content=body.encode())
    assert (answered.status_code, answered.json()["field"]) == (400, name)
    assert repr(name) in answered.json()["error"]["message"]
    assert api.client.loop.list_traces(deployment_id="twice")["total"] == 0
