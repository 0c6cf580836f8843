"""Hostile bodies: whatever is sent, the answer is a refusal in the envelope, never a 500, and nothing is stored."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import httpx
import pytest
from report_world import compared, questions
from running_api import Api

SECRET = "sk-live-51H8xyzTHISisNOTtoBEshown"
DEEP = 100_000


def objects(depth: int) -> bytes:
    return b'{"conditions":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


HOSTILE: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 400),
    "blank": (b"  \r\n", 400),
    "a list": (b"[]", 400),
    "a text": (b'"name"', 400),
    "null": (b"null", 400),
    "half": (b'{"name": "x"', 400),
    "two documents": (b'{"name": "x"}{"name": "y"}', 400),
    "not utf-8": (b'{"name": "\xff\xfe"}', 400),
    "utf-16": ('{"name": "x"}'.encode("utf-16"), 400),
    "deep lists": (b'{"tags":' + b"[" * DEEP + b"]" * DEEP + b"}", 400),
    "deep objects": (objects(DEEP), 400),
    "rather deep": (objects(200), 400),
    "deep and open": (b'{"tags":' + b"[" * DEEP, 400),
    "a lone surrogate": (b'{"name": "\\ud800"}', 400),
    "a lone surrogate as a name": (b'{"\\udfff": 1}', 400),
    "nan": (b'{"max_versions": NaN}', 400),
    "infinity": (b'{"training": {"learning_rate": -Infinity}}', 400),
    "beyond floats": (b'{"training": {"learning_rate": 1e999}}', 400),
    "a huge integer": (b'{"max_versions": ' + b"9" * 5_000 + b"}", 400),
    "beyond 64 bits": (b'{"max_versions": 18446744073709551616}', 400),
    "a 64-bit integer": (b'{"max_versions": 9223372036854775807}', 400),
    "a float for an integer": (b'{"max_versions": 1.0}', 400),
    "true for an integer": (b'{"max_versions": true}', 400),
    "a text for a boolean": (b'{"enabled": "true"}', 400),
    "a name twice": (b'{"name": "x", "name": "y"}', 400),
    "a name twice inside": (b'{"name": "x", "training": {"epochs": 1, "epochs": 2}}', 400),
    "a null character": (b'{"name": "a\\u0000b"}', 400),
    "a long text": (b'{"name": "' + b"x" * 900_000 + b'"}', 400),
    "10 MB": (b'{"name": "' + b"x" * 10_000_000 + b'"}', 413),
    "many unknown fields": (json.dumps({f"field {n}": n for n in range(20_000)}).encode(), 400),
    "the wrong kinds": (
        json.dumps({"name": [], "model": 3, "tags": {}, "training": [], "promotion": "x"}).encode(),
        400,
    ),
    "objects for texts": (json.dumps({"name": {"$ne": None}, "use_case": {"a": 1}}).encode(), 400),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused(api: Api, name: str, model: dict[str, str]) -> None:
    raw, status = HOSTILE[name]
    before = api.store.pipelines.list()
    for method, path in (("POST", "/api/loop/pipelines"), ("PUT", "/api/loop/pipelines/{}")):
        if method == "PUT" and name in ("nothing", "blank"):
            continue  # an edit of nothing changes nothing
        target = api.store.pipelines.create("Target", model_id=model["id"]) if not before else before[0]
        before = before or (target,)
        answered = api.call(
            method, path.format(target.pipeline_id), content=raw, headers={"Content-Type": "application/json"}
        )
        assert answered.status_code == status, answered.text[:500]
        assert answered.json()["error"]["code"] == {400: "BAD_REQUEST", 413: "PAYLOAD_TOO_LARGE"}[status]
        assert len(answered.content) < 4_000
    assert api.store.pipelines.list() == before


@pytest.mark.parametrize("name", HOSTILE)
def test_decisions_take_no_hostile_body_either(api: Api, name: str) -> None:
    raw, status = HOSTILE[name]
    known = [one for one in api.store.attempts.list() if one.state == "awaiting_review"]
    attempt = known[0] if known else compared(api.store, questions(3), name="Decided", state="awaiting_review")
    for action in ("promote", "reject", "cancel", "rollback"):
        if name in ("nothing", "blank"):
            continue
        answered = api.call("POST", f"/api/loop/training-runs/{attempt.run_id}/{action}", content=raw)
        assert answered.status_code == status, (action, answered.text[:500])
    assert api.store.attempts.get(attempt.run_id).state == "awaiting_review"


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/xml", "x"],
)
def test_another_content_type_is_refused(api: Api, kind: str) -> None:
    answered = api.call("POST", "/api/loop/pipelines", content=b'{"name": "x"}', headers={"Content-Type": kind})
    assert (answered.status_code, answered.json()["field"]) == (400, "Content-Type")


def test_a_body_that_never_ends_is_cut_off_while_it_streams(api: Api) -> None:
    sent = 0

    def parts() -> Any:
        nonlocal sent
        for _ in range(400):
            sent += 1
            yield b"x" * 65_536

    with httpx.Client(base_url=api.url, timeout=30, trust_env=False) as client:
        answered = client.post("/api/loop/pipelines", content=parts(), headers={"X-API-Key": api.key})
    assert answered.status_code == 413


def test_a_length_that_is_too_long_is_refused_before_anything_is_read(api: Api) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    head = (
        f"POST /api/loop/pipelines HTTP/1.1\r\nHost: x\r\nX-API-Key: {api.key}\r\nContent-Length: 999999999999\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(4_096)


def test_no_value_of_a_request_shows_in_errors_or_logs(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    bodies: list[dict[str, Any]] = [
        {"name": SECRET * 10},
        {"name": "x", "model": SECRET},
        {"name": "x", "tags": [SECRET]},
        {"name": "x", "model": {"id": "a/b"}, "train_when": {"schedule": SECRET}},
        {"name": "x", "conditions": {"from": SECRET}, "model": {"id": "a/b"}},
        {"name": "x", "max_versions": SECRET},
    ]
    with caplog.at_level(logging.DEBUG):
        for body in bodies:
            answered = api.call("POST", "/api/loop/pipelines", json=body)
            assert answered.status_code in (400, 422), answered.text
            assert SECRET not in answered.text
        answered = api.call("GET", f"/api/loop/pipelines?status={SECRET}")
        assert SECRET not in answered.text
        api.http.get("/api/loop/stats", headers={"X-API-Key": SECRET})
    said = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert SECRET not in "\n".join(said)


def test_what_nobody_expected_is_answered_and_logged_without_its_message(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError(SECRET)

    app = api.app
    app.add_api_route("/broken", broken, include_in_schema=False)
    with caplog.at_level(logging.DEBUG):
        answered = api.http.get("/broken")
    assert (answered.status_code, answered.json()["error"]["code"]) == (500, "INTERNAL_ERROR")
    logged = "\n".join(record.getMessage() + str(record.exc_info or "") for record in caplog.records)
    assert "RuntimeError" in logged
    assert "test_api_bodies.py" in logged
    assert SECRET not in answered.text + logged


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("pipelines", {"tags": [f"t{n}" for n in range(40)]}, "tags must have at most 31 entries."),
        ("pipelines", {"name": 3}, "name must be a text."),
        ("pipelines", {"max_versions": 500}, "max_versions must be 100 or less."),
        ("pipelines", {"auto_scoring": {"enabled": "yes"}}, "auto_scoring.enabled must be true or false."),
        ("datasets", {"tags": [f"t{n}" for n in range(40)]}, "tags must have at most 32 entries."),
        ("datasets", {"match": "most"}, "match must be 'any' or 'all'."),
        ("traces", {"deployment_id": "x", "messages": [], "model": ""}, "model must not be empty."),
        ("import", {"source": "x", "rows": [], "import_id": "ü"}, "import_id has a character that cannot be in it."),
    ],
)
def test_a_refusal_is_in_the_projects_words(
    api: Api, model: dict[str, str], path: str, body: dict[str, Any], told: str
) -> None:
    whole = {"name": "Words", **body} if path == "datasets" else {"name": "W", "model": model, **body}
    answered = api.call("POST", f"/api/loop/{path}", json=whole if path in ("pipelines", "datasets") else body)
    assert answered.status_code == 400
    assert told in answered.json()["error"]["message"]


def test_a_parameter_is_refused_in_the_projects_words_too(api: Api) -> None:
    answered = api.call("GET", "/api/loop/traces?limit=1000&offset=x&signal=great")
    assert answered.json()["error"]["message"] == (
        "signal must be 'good', 'bad' or 'corrected'. limit must be 200 or less. offset must be a whole number."
    )
