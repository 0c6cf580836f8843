"""Addresses with names in them: slashes of models' names, what is not built, and a description that holds together."""

from __future__ import annotations


import pytest
from bios._client import ApiError
from running_api import Api

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
