"""Addresses with names in them: slashes of models' names, what is not built, and a description that holds together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from bios._client import ApiError
from running_api import Api

from loop_dagster.api.app import create_app

HUGGING_FACE = "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize("name", [HUGGING_FACE, "/srv/models/base", "a//b", "a/b/configs", "50% off/on?"])
def test_a_source_may_have_slashes(api: Api, name: str) -> None:
    loop = api.client.loop
    assert loop.get_config(name)["updated_at"] is None
    saved = loop.set_config(name, True, retention_days=90)
    assert (saved["deployment_id"], saved["enabled"]) == (name, True)
    assert loop.get_config(name)["retention_days"] == 90
    assert name in [one["deployment_id"] for one in loop.list_configs()]
    seen = loop.capture(name, "m", [{"role": "user", "content": f"Hello {name}?"}], "Hi")
    assert seen["captured"] is True


def test_a_source_is_found_whichever_way_its_slash_is_written(api: Api) -> None:
    api.client.loop.set_config("owner/written", True)
    for path in ("owner/written", "owner%2Fwritten", "owner%2fwritten"):
        found = api.call("GET", f"/api/loop/configs/{path}").json()["config"]
        assert (found["deployment_id"], found["enabled"]) == ("owner/written", True)
    nameless = api.call("GET", "/api/loop/configs/")
    assert (nameless.status_code, nameless.json()["field"]) == (400, "source")


def test_an_attribute_may_have_slashes(api: Api) -> None:
    loop = api.client.loop
    loop.set_config("slashes", True)
    trace = loop.capture("slashes", "m", [{"role": "user", "content": "Where to?"}], "There.")["trace_id"]
    loop.label(trace, [], attributes={"path": "a/b"})
    with pytest.raises(ApiError) as other:
        loop.unlabel(trace, "a", key="path")
    assert other.value.status == 404
    assert loop.unlabel(trace, "a/b", key="path")["labels"] == []


def test_what_is_not_built_says_so_whatever_parameters_come(api: Api) -> None:
    asked: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
        ("list_benchmark_questions", ("x",), {"pipeline": "support"}),
        ("list_benchmarks", (), {"status": "active"}),
        ("list_benchmark_items", ("x",), {"limit": 5}),
        ("get_benchmark_history", ("x",), {"pipeline": "support"}),
        ("list_benchmark_run_items", ("x",), {"limit": 5}),
    ]
    for name, arguments, parameters in asked:
        with pytest.raises(ApiError) as told:
            getattr(api.client.loop, name)(*arguments, **parameters)
        assert (told.value.status, told.value.code) == (501, "NOT_BUILT")
    for path in ("/api/loop/benchmarks?status=active", "/api/loop/pipelines/x/live/deployments?limit=1"):
        assert api.call("GET", path).status_code == 501
        assert api.call("GET", path, key="none").status_code == 401
    assert api.call("GET", "/api/loop/stats?limit=1").status_code == 400


def test_every_reference_of_the_description_resolves(api: Api) -> None:
    for described in (api.http.get("/openapi.json").json(), create_app(api.store).openapi()):
        references = set(_references(described))
        assert {"#/components/schemas/CaptureFeedback", "#/components/schemas/ModelRef"} <= references
        for reference in references:
            found = described
            for part in reference.removeprefix("#/").split("/"):
                assert part in found, reference
                found = found[part]
        assert "$defs" not in json.dumps(described)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        yield from (one for inner in value.values() for one in _references(inner))
    elif isinstance(value, list):
        yield from (one for inner in value for one in _references(inner))
