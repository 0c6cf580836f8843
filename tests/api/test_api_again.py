"""Writes that are sent again with an Idempotency-Key, one after the other and at the same moment."""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from report_world import compared, questions
from running_api import Api, serving

from loop_dagster.settings import Settings
from loop_dagster.store.intake import drain
from loop_dagster.store.open import open_store
from loop_dagster.store.schema import idempotent_calls


def make(api: Api, name: str, model: dict[str, str], *, once: str, **more: Any) -> httpx.Response:
    return api.call(
        "POST", "/api/loop/pipelines", json={"name": name, "model": model, **more}, headers={"Idempotency-Key": once}
    )


def test_the_same_call_is_answered_the_same_and_done_once(api: Api, model: dict[str, str]) -> None:
    first = make(api, "Once", model, once="a")
    again = make(api, "Once", model, once="a")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Idempotent-Replayed" not in first.headers
    without = api.call("POST", "/api/loop/pipelines", json={"name": "Once", "model": model})
    assert (without.status_code, without.json()["error"]["code"]) == (409, "PIPELINE_NAME_TAKEN")


def test_another_body_address_or_method_with_the_same_key_is_409(api: Api, model: dict[str, str]) -> None:
    made = make(api, "Twice", model, once="b").json()["pipeline"]
    path = f"/api/loop/pipelines/{made['rule_id']}"
    for answered in (
        make(api, "Twice", model, once="b", use_case="changed"),
        api.call("DELETE", path, headers={"Idempotency-Key": "b"}),
        api.call("PUT", path, json={"name": "Twice", "model": model}, headers={"Idempotency-Key": "b"}),
    ):
        assert (answered.status_code, answered.json()["error"]["code"]) == (409, "CONFLICT")
    assert api.store.pipelines.get(made["rule_id"]).settings.use_case == ""


def test_a_key_stands_for_one_api_keys_calls(api: Api, model: dict[str, str]) -> None:
    assert make(api, "Mine", model, once="c").status_code == 201
    body = {"name": "Yours", "model": model}
    other = api.call("POST", "/api/loop/pipelines", key=api.new_key(), json=body, headers={"Idempotency-Key": "c"})
    assert other.status_code == 201


def test_a_refusal_is_asked_anew(api: Api, model: dict[str, str]) -> None:
    refused = make(api, "Later", model, once="d", max_versions=500)
    assert refused.status_code == 400
    assert make(api, "Later", model, once="d").status_code == 201


@pytest.mark.parametrize("name", ["", "x" * 256, "t\tb", "ü"])
def test_a_key_that_is_none_is_refused(api: Api, name: str) -> None:
    raw = [(b"X-API-Key", api.key.encode()), (b"Idempotency-Key", name.encode())]
    answered = api.http.request("POST", "/api/loop/pipelines", headers=raw, json={"name": "x"})
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "BAD_REQUEST")


def test_a_delete_and_a_decision_are_done_once_too(api: Api, model: dict[str, str]) -> None:
    made = make(api, "Deleted", model, once="e").json()["pipeline"]
    path = f"/api/loop/pipelines/{made['rule_id']}"
    gone = [api.call("DELETE", path, headers={"Idempotency-Key": "f"}) for _ in range(2)]
    assert gone[0].json() == gone[1].json()
    assert [one.status_code for one in gone] == [200, 200]
    assert api.call("DELETE", path).status_code == 404

    attempt = compared(api.store, questions(3), name="Decided once", state="awaiting_review")
    path = f"/api/loop/training-runs/{attempt.run_id}/reject"
    told = [api.call("POST", path, json={}, headers={"Idempotency-Key": "g"}) for _ in range(2)]
    assert told[0].json() == told[1].json()
    assert sum(event.to_state == "rejected" for event in api.store.attempts.timeline(attempt.run_id)) == 1


def at_once(api: Api, model: dict[str, str], number: int) -> list[httpx.Response]:
    answers: list[httpx.Response] = []
    gate = threading.Barrier(number)

    def send() -> None:
        with httpx.Client(base_url=api.url, timeout=60, trust_env=False) as client:
            gate.wait()
            headers = {"X-API-Key": api.key, "Idempotency-Key": "together"}
            body = {"name": "Together", "model": model}
            answers.append(client.post("/api/loop/pipelines", json=body, headers=headers))

    threads = [threading.Thread(target=send) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_two_at_the_same_moment_do_it_once(api: Api, model: dict[str, str]) -> None:
    check_together(api, model)


@pytest.mark.postgres
def test_two_at_the_same_moment_do_it_once_on_postgres(
    tmp_path_factory: pytest.TempPathFactory, postgres_url: str, model: dict[str, str]
) -> None:
    store = open_store(Settings(home=tmp_path_factory.mktemp("pg"), registry_url=postgres_url))
    with serving(store) as api:
        check_together(api, model)
        assert api.client.loop.list_pipelines()["total"] == 1
        assert api.client.loop.stats()["pipelines"]["total"] == 1
    store.registry.dispose()


def check_together(api: Api, model: dict[str, str]) -> None:
    """One of them does it; the others wait for its answer and get it."""
    answers = at_once(api, model, 6)
    assert [one.status_code for one in answers] == [201] * 6
    assert len({one.text for one in answers}) == 1
    assert sum("Idempotent-Replayed" not in one.headers for one in answers) == 1
    assert [pipeline.name for pipeline in api.store.pipelines.list()].count("Together") == 1
    last = make(api, "Together", model, once="together")
    assert (last.status_code, last.json()) == (201, answers[0].json())


@pytest.mark.postgres
def test_refused_calls_at_the_same_moment_are_all_refused_on_postgres(
    tmp_path_factory: pytest.TempPathFactory, postgres_url: str
) -> None:
    store = open_store(Settings(home=tmp_path_factory.mktemp("pg"), registry_url=postgres_url))
    with serving(store) as api:
        for number in range(5):
            sent = {"headers": {"Idempotency-Key": f"refused {number}"}, "json": {"verdict": "good"}}
            with ThreadPoolExecutor(8) as threads:
                calls = [threads.submit(api.call, "POST", "/api/loop/traces/none/signals", **sent) for _ in range(8)]
            assert {call.result().status_code for call in calls} == {404}
    store.registry.dispose()


def test_a_call_whose_first_one_never_ends_is_told_to_come_again(
    api: Api, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loop_dagster.api.calls.WAIT_S", 0.1)
    key = next(one for one in api.store.keys.list() if one.name == "tests")
    sent = api.http.build_request("POST", "/api/loop/pipelines", json={"name": "Stuck", "model": model})
    whole = hashlib.sha256(b"POST\0/api/loop/pipelines\0\0" + sent.content).hexdigest()
    api.store.calls.begin(key.key_id, "stuck", whole)
    answered = make(api, "Stuck", model, once="stuck")
    assert (answered.status_code, answered.json()["error"]["code"]) == (409, "CONFLICT")
    assert answered.headers["Retry-After"]


def test_who_waits_for_a_first_call_holds_no_thread(
    api: Api, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More repeats than there are threads, of calls whose process was killed; lists and health answer meanwhile."""
    monkeypatch.setattr("loop_dagster.api.calls.WAIT_S", 3.0)
    key = next(one for one in api.store.keys.list() if one.name == "tests")
    for number in range(45):
        api.store.calls.begin(key.key_id, f"killed {number}", "whatever was sent")
    with ThreadPoolExecutor(45) as threads:
        waiting = [threads.submit(make, api, f"Name {number}", model, once=f"killed {number}") for number in range(45)]
        time.sleep(0.5)
        assert api.http.get("/health").status_code == 200
        assert api.call("GET", "/api/loop/configs").status_code == 200
        assert not any(one.done() for one in waiting)
        assert {one.result().status_code for one in waiting} == {409}


def test_a_key_is_free_for_something_else_after_its_day(api: Api) -> None:
    api.client.loop.set_config("days", True)

    def capture(text: str) -> dict[str, Any]:
        said = {"deployment_id": "days", "model": "m", "messages": [{"role": "user", "content": text}]}
        sent = {"json": {**said, "completion": "Yes."}, "headers": {"Idempotency-Key": "daily"}}
        found: dict[str, Any] = api.call("POST", "/api/loop/traces", **sent).json()
        return found

    monday = capture("Monday")
    assert capture("Monday")["trace_id"] == monday["trace_id"]
    with api.store.registry.write() as connection:
        connection.execute(sa.update(idempotent_calls).values(created_at=datetime.now(UTC) - timedelta(days=2)))
    wednesday = capture("Wednesday")
    assert (wednesday["captured"], wednesday["already_present"]) == (True, False)
    assert api.client.loop.get_trace(wednesday["trace_id"])["messages"][0]["content"] == "Wednesday"


def test_a_key_whose_use_cannot_be_written_now_holds_up_no_read(api: Api) -> None:
    fresh = api.new_key()
    with api.store.registry.write():
        began = time.monotonic()
        assert api.call("GET", "/api/loop/configs", key=fresh).status_code == 200
        assert time.monotonic() - began < 5, "SQLite's writers wait up to 30 s"


@pytest.mark.parametrize("drained", [False, True])
def test_a_capture_whose_answer_was_lost_is_stored_once(api: Api, drained: bool) -> None:
    """A server killed between the write and its answer leaves a sample, and no answer for who sends the call again."""
    source = f"desk-{drained}"
    api.client.loop.set_config(source, True)
    said = {
        "deployment_id": source,
        "model": "m",
        "messages": [{"role": "user", "content": "Hello?"}],
        "completion": "Hi",
    }

    def capture() -> dict[str, Any]:
        answer = api.call("POST", "/api/loop/traces", json=said, headers={"Idempotency-Key": f"lost {source}"})
        found: dict[str, Any] = answer.json()
        return found

    first = capture()
    with api.store.registry.write() as connection:
        connection.execute(sa.delete(idempotent_calls))
    if drained:
        drain(api.store, holder="a test")
    assert capture()["trace_id"] == first["trace_id"]
    assert api.client.loop.list_traces(deployment_id=source)["total"] == 1
    other = api.call("POST", "/api/loop/traces", json=said, headers={"Idempotency-Key": f"new {source}"}).json()
    assert other["trace_id"] != first["trace_id"]
