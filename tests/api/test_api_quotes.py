"""No error repeats a secret of its request: a secret-like value in every parameter and every field of every route."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from running_api import Api

SECRETS = {
    "email": "john.doe@secretcorp.example",
    "api_key": "sk-proj-Abc123Def456Ghi789Jkl012",
    "aws_key": "AKIAIOSFODNN7EXAMPLE",
    "card": "4111111111111111",
}


def _schema(api: Api, found: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in found:
        place: Any = api.app.openapi()
        for part in found["$ref"].removeprefix("#/").split("/"):
            place = place[part]
        found = place
    return found


def _bodies(api: Api, operation: dict[str, Any], secret: str) -> Iterator[Any]:
    """For each field a body with the secret in it, as a text, in a list, under a name; and as a field's own name."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        yield None
        return
    fields = list(_schema(api, content["schema"]).get("properties", {})) or ["model", "messages"]
    whole = {"deployment_id": "app", "model": "m", "messages": [{"role": "user", "content": "Q"}], "name": "n"}
    known = {name: value for name, value in whole.items() if name in fields}
    yield {**known, secret: 1}
    for name in fields:
        for value in (secret, [secret], {secret: secret}, [{"role": secret, "content": secret}]):
            yield {**known, name: value}


def _calls(api: Api, secret: str) -> Iterator[tuple[str, str, dict[str, str], Any]]:
    for path, methods in api.app.openapi()["paths"].items():
        for method, operation in methods.items():
            parameters = operation.get("parameters", [])
            inside = {one["name"] for one in parameters if one["in"] == "path"}
            address = path
            for name in inside:
                address = address.replace(f"{{{name}}}", quote(secret, safe=""))
            for name in [one["name"] for one in parameters if one["in"] == "query"] or [secret]:
                yield method.upper(), address, {name: secret}, next(_bodies(api, operation, secret))
            for body in _bodies(api, operation, secret):
                yield method.upper(), address, {}, body


@pytest.mark.parametrize("kind", SECRETS)
def test_no_answer_and_no_line_of_the_log_has_it(api: Api, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    secret = SECRETS[kind]
    failed, quoted = set(), 0
    with caplog.at_level(logging.DEBUG, logger="loop"):
        for method, path, query, body in _calls(api, secret):
            answered = api.call(method, path, params=query, json=body)
            if answered.status_code >= 400:
                failed.add((method, path))
                assert secret.lower() not in answered.text.lower(), (method, path, query, body, answered.text)
                quoted += f"[redacted:{kind}]" in answered.text
    assert len(failed) > 40
    assert quoted > 20
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("loop")]
    assert not any(secret.lower() in line.lower() for line in lines)


def test_ordinary_values_stay_readable_and_a_cut_never_leaves_half_a_secret(api: Api) -> None:
    [sample] = api.client.loop.import_rows("app", [{"prompt": "Q", "completion": "A"}])["trace_ids"]
    path = f"/api/loop/traces/{sample}/labels"
    said = api.call("POST", path, json={"labels": ["Not OK!"]}).json()["error"]["message"]
    assert "Tag 'Not OK!' cannot be used" in said
    said = api.call("POST", path, json={"labels": [SECRETS["email"]]}).json()["error"]["message"]
    assert "Tag '[redacted:email]' cannot be used" in said
    for length in range(40, 80):
        word = "x" * (length - 1) + " " + SECRETS["email"]
        assert "john" not in api.call("POST", path, json={"labels": [word]}).text
    unknown = api.call("GET", "/api/loop/pipelines/no-such-thing").json()
    assert "'no-such-thing'" in unknown["error"]["message"]
    assert unknown["name"] == "no-such-thing"
    model = api.call("POST", "/v1/chat/completions", json={"model": SECRETS["api_key"], "messages": []})
    assert "'[redacted:api_key]'" in model.json()["error"]["message"]
