"""Who may do what: keys, scopes, workspaces sealed from each other, and errors of one shape."""

from __future__ import annotations

import re
from typing import Any

import pytest
from report_world import compared, questions
from running_api import Api

from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store

READS = (
    "/api/loop/pipelines/{pipeline}",
    "/api/loop/pipelines/{pipeline}/attempts",
    "/api/loop/training-runs/{run}",
    "/api/loop/training-runs/{run}/training-curve",
    "/api/loop/training-runs?rule_id={pipeline}",
    "/api/loop/evaluations/{run}",
    "/api/loop/evaluations/{run}/items",
)
WRITES = (
    ("PUT", "/api/loop/pipelines/{pipeline}", {"name": "Mine now"}),
    ("DELETE", "/api/loop/pipelines/{pipeline}", None),
    ("POST", "/api/loop/pipelines/{pipeline}/run", None),
    ("POST", "/api/loop/training-runs/{run}/promote", {"force": True}),
    ("POST", "/api/loop/training-runs/{run}/reject", {}),
    ("POST", "/api/loop/training-runs/{run}/cancel", {}),
    ("POST", "/api/loop/training-runs/{run}/retest", None),
    ("POST", "/api/loop/training-runs/{run}/rollback", {}),
)


@pytest.fixture(scope="module")
def theirs(api: Api) -> tuple[Store, dict[str, str]]:
    """Another workspace on the same registry and lake, with a compared attempt that waits."""
    settings = Settings(home=api.store.settings.home, workspace="theirs")
    store = open_store(settings)
    attempt = compared(store, questions(3), name="Theirs", state="awaiting_review")
    return store, {"pipeline": attempt.pipeline_id, "run": attempt.run_id}


def envelope(answered: Any, status: int, code: str) -> dict[str, Any]:
    assert answered.status_code == status, answered.text
    body = answered.json()
    assert body["error"]["code"] == code
    # At the gateway also what the models' public clients read.
    assert set(body["error"]) - ({"type", "param"} if "type" in body else set()) == {"code", "message"}
    assert body["error"]["message"].strip()
    return dict(body)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-API-Key": ""},
        {"X-API-Key": "loop_wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic {key}"},
        {"Authorization": "{key}"},
        {"X-API-Key": "nope", "Authorization": "Bearer {key}"},
    ],
)
def test_without_a_good_key_nothing_is_said(api: Api, headers: dict[str, str]) -> None:
    sent = {name: value.format(key=api.key) for name, value in headers.items()}
    for path in ("/api/loop/stats", "/api/loop/pipelines/nothing", "/api/loop/datasets", "/v1/models"):
        answered = api.http.get(path, headers=sent)
        envelope(answered, 401, "UNAUTHORIZED")
        assert answered.headers["WWW-Authenticate"] == "Bearer"
        assert api.key not in answered.text


def test_both_headers_carry_a_key(api: Api) -> None:
    assert api.http.get("/api/loop/stats", headers={"X-API-Key": api.key}).status_code == 200
    assert api.http.get("/api/loop/stats", headers={"Authorization": f"bearer {api.key}"}).status_code == 200


def test_a_revoked_key_is_refused_at_once(api: Api) -> None:
    made = api.store.keys.create()
    assert api.call("GET", "/api/loop/stats", key=made.text).status_code == 200
    api.store.keys.revoke(made.key.key_id)
    envelope(api.call("GET", "/api/loop/stats", key=made.text), 401, "UNAUTHORIZED")


def test_a_scope_that_is_missing_is_named(api: Api, model: dict[str, str]) -> None:
    reads, serves = api.new_key("loop:read"), api.new_key("serverless")
    assert api.call("GET", "/api/loop/pipelines", key=reads).status_code == 200
    said = envelope(api.call("POST", "/api/loop/pipelines", key=reads, json={"name": "No"}), 403, "FORBIDDEN")
    assert "loop:write" in said["error"]["message"]
    envelope(api.call("GET", "/api/loop/pipelines", key=serves), 403, "FORBIDDEN")
    assert api.call("GET", "/api/api-keys/introspect", key=serves).json()["scopes"] == ["serverless"]
    attempt = compared(api.store, questions(3), name="Only read", state="awaiting_review")
    seen = api.call("GET", f"/api/loop/training-runs/{attempt.run_id}", key=reads).json()
    assert not any(seen["available_actions"].values())


def test_another_workspaces_ids_are_ids_that_do_not_exist(api: Api, theirs: tuple[Store, dict[str, str]]) -> None:
    store, ids = theirs
    unknown = {"pipeline": "theirs-0000", "run": "01900000-0000-7000-8000-000000000000"}

    def told(answered: Any) -> tuple[int, str]:
        text = answered.text
        for name in (*ids.values(), *unknown.values()):
            text = text.replace(name, "ID")
        return answered.status_code, text

    for path in READS:
        mine = [told(api.call("GET", path.format(**known))) for known in (ids, unknown)]
        assert mine[0] == mine[1]
        assert mine[0][0] == 404
    for method, path, body in WRITES:
        mine = [told(api.call(method, path.format(**known), json=body)) for known in (ids, unknown)]
        assert mine[0] == mine[1]
        assert mine[0][0] == 404
    assert store.attempts.get(ids["run"]).state == "awaiting_review"
    assert store.pipelines.get(ids["pipeline"]).name == "Theirs"
    assert ids["pipeline"] not in api.call("GET", "/api/loop/pipelines").text
    assert ids["run"] not in api.call("GET", "/api/loop/training-runs").text


def test_a_key_of_several_workspaces_names_the_one_it_means(api: Api, theirs: tuple[Store, dict[str, str]]) -> None:
    _store, ids = theirs
    both = api.new_key(workspaces=("default", "theirs"))
    path = f"/api/loop/pipelines/{ids['pipeline']}"
    said = envelope(api.call("GET", path, key=both), 400, "BAD_REQUEST")
    assert said["field"] == "X-Workspace-ID"
    assert api.call("GET", path, key=both, headers={"X-Workspace-ID": "theirs"}).status_code == 200
    assert api.call("GET", path, key=both, headers={"X-Workspace-ID": "default"}).status_code == 404
    envelope(api.call("GET", path, key=both, headers={"X-Workspace-ID": "third"}), 403, "FORBIDDEN")
    envelope(api.call("GET", path, headers={"X-Workspace-ID": "theirs"}), 403, "FORBIDDEN")
    told = api.call("GET", "/api/api-keys/introspect", key=both).json()
    assert [one["id"] for one in told["workspaces"]] == ["default", "theirs"]
    assert "workspace" not in told


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "NOT_FOUND"),
        ("GET", "/api/loop/pipelines/", 404, "NOT_FOUND"),
        ("GET", "/api/loop/pipelines/%00", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/pipelines/%ff%fe", 404, "NOT_FOUND"),
        ("PATCH", "/api/loop/pipelines", 405, "METHOD_NOT_ALLOWED"),
        ("DELETE", "/api/loop/stats", 405, "METHOD_NOT_ALLOWED"),
        ("GET", "/api/loop/pipelines?limit=0", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/pipelines?limit=1e3", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/pipelines?offset=99999999999999999999", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/pipelines?status=sleeping", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/pipelines?statuss=paused", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/pipelines?q=%00", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/training-runs?state=tired", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/training-runs?result=won", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/traces?label=", 400, "BAD_REQUEST"),
        ("GET", "/api/loop/training-runs/12", 404, "NOT_FOUND"),
        ("GET", "/api/loop/training-runs/x-0000%2F99999999999999999999999", 404, "NOT_FOUND"),
        ("GET", "/api/loop/benchmarks", 501, "NOT_BUILT"),
        ("POST", "/v1/chat/completions", 400, "BAD_REQUEST"),
        ("GET", "/v1/nothing", 404, "NOT_FOUND"),
        ("GET", "/v1/messages", 405, "METHOD_NOT_ALLOWED"),
    ],
)
def test_every_error_has_the_one_shape(api: Api, method: str, path: str, status: int, code: str) -> None:
    answered = api.call(method, path)
    body = envelope(answered, status, code)
    if "?" in path and status == 400:
        assert re.search(r"limit|offset|status|state|result|label|parameter", body["error"]["message"])
    if status == 405:
        assert answered.headers["Allow"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/api/loop/traces", "GET, POST"),
        ("/api/loop/traces/x", "DELETE, GET"),
        ("/api/loop/configs/x", "GET, PUT"),
        ("/api/loop/datasets/x", "DELETE, GET, PUT"),
        ("/api/loop/benchmarks", "GET, POST"),
        ("/health", "GET"),
    ],
)
def test_an_address_names_all_its_methods(api: Api, path: str, methods: str) -> None:
    answered = api.call("PATCH", path)
    envelope(answered, 405, "METHOD_NOT_ALLOWED")
    assert answered.headers["Allow"] == methods


def test_the_description_and_the_docs_are_open(api: Api) -> None:
    described = api.http.get("/openapi.json").json()
    assert "/api/loop/pipelines/{pipeline_id}" in described["paths"]
    assert set(described["components"]["securitySchemes"]) == {"key", "bearer"}
    assert api.http.get("/docs").status_code == 200
    assert api.http.get("/health").json() == {"status": "ok"}
