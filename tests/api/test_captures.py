"""Captures that come together: each caller gets its own end, and what was acknowledged is stored once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from running_api import Api
from uuid_utils import uuid7

from loop_dagster.api.captures import SIBLINGS, Asked, Captures, Planned
from loop_dagster.errors import BadRequest, RegistryNotReady
from loop_dagster.rules import canonical
from loop_dagster.settings import Settings
from loop_dagster.store.inbox import NewSample
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.pages import sample_row
from loop_dagster.store.sources import Source

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    store = open_store(Settings(home=home))
    yield store
    store.registry.dispose()


@pytest.fixture
def captures() -> Iterator[Captures]:
    captures = Captures()
    yield captures
    captures.close()


def planned(text: str, *, request: str | None = None, **columns: Any) -> Planned:
    sample_id = str(uuid7())
    row, _secrets = sample_row(
        source="shop",
        identity=canonical.identity("request", "shop", request or sample_id),
        messages=[canonical.message({"role": "user", "content": text})],
        answer=canonical.answer("Yes."),
        tools=None,
        flag=None,
        now=NOW,
        expires_at=datetime(2126, 6, 1, tzinfo=UTC),
        keyed=False,
    )
    return Planned(NewSample({**row, "sample_id": sample_id, **columns}), again=request is not None)


def asked(store: Store, plan: Planned) -> Asked:
    return Asked(store, "shop", lambda _source: plan)


def held(store: Store, captures: Captures) -> threading.Event:
    """Lets the thread of `captures` wait until the event is set."""
    go, there = threading.Event(), threading.Event()

    def wait(_source: Source) -> dict[str, Any]:
        there.set()
        assert go.wait(20)
        return {"captured": False}

    captures.put(Asked(store, "shop", wait))
    assert there.wait(20)
    return go


def test_those_that_come_together_are_one_transaction_and_keyed_alike(store: Store, captures: Captures) -> None:
    go = held(store, captures)
    commits: list[int] = []
    sa.event.listen(store.registry.engine, "commit", lambda _connection: commits.append(1))
    plans = [planned(f"Where is parcel {number}?") for number in range(40)]
    futures = [captures.put(asked(store, plan)) for plan in plans]
    go.set()
    answers = [future.result(20) for future in futures]
    assert [answer["trace_id"] for answer in answers] == [plan.sample.row["sample_id"] for plan in plans]
    assert all(answer["captured"] and not answer["already_present"] for answer in answers)
    assert store.samples.count() == 40
    assert len(commits) < 10, "reading sources and identities, and one write, however many"
    stored = {row["sample_id"]: row for row in store.inbox.waiting_frames()["samples"].to_dicts()}
    for number, answer in enumerate(answers):
        said = [canonical.message({"role": "user", "content": f"Where is parcel {number}?"})]
        assert stored[answer["trace_id"]]["prompt_key"] == canonical.prompt_key(said)


def test_a_long_one_is_planned_in_its_own_thread_and_is_the_same_sample(store: Store, captures: Captures) -> None:
    threads: list[str] = []

    def plan(source: Source) -> Planned:
        threads.append(threading.current_thread().name)
        assert source.name == "shop"
        return planned("Where is it?")

    long, short = captures.put(Asked(store, "shop", plan).planned()), captures.put(Asked(store, "shop", plan))
    assert {long.result(20)["captured"], short.result(20)["captured"]} == {True}
    assert threads == [threading.current_thread().name, "captures"]
    assert store.inbox.waiting_frames()["samples"]["prompt_key"].n_unique() == 1


def test_one_that_is_refused_takes_no_other_with_it(store: Store, captures: Captures) -> None:
    def refuse(_source: Source) -> Planned:
        raise BadRequest("No.")

    go = held(store, captures)
    good = [captures.put(asked(store, planned("One."))), captures.put(asked(store, planned("Two.")))]
    bad = [
        captures.put(Asked(store, "shop", refuse)),
        captures.put(asked(store, planned("Three.", origin="nowhere"))),  # the inbox refuses it, after the plan did not
    ]
    go.set()
    assert all(future.result(20)["captured"] for future in good)
    for future in bad:
        with pytest.raises(BadRequest):
            future.result(20)
    assert store.samples.count() == 2


def test_on_an_event_loop_each_has_its_own_end_and_who_has_gone_is_not_stored(store: Store, captures: Captures) -> None:
    def refuse(_source: Source) -> Planned:
        raise BadRequest("No.")

    async def three() -> list[Any]:
        go = held(store, captures)
        plans = [asked(store, planned("One.")), Asked(store, "shop", refuse), asked(store, planned("Gone."))]
        tasks = [asyncio.create_task(captures.stored(plan)) for plan in plans]
        await asyncio.sleep(0.1)
        tasks[2].cancel()
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    stored, refused, gone = asyncio.run(three())
    assert stored["captured"] and not stored["already_present"]
    assert isinstance(refused, BadRequest) and isinstance(gone, asyncio.CancelledError)
    assert store.samples.count() == 1


def test_a_loop_that_was_closed_meanwhile_takes_no_other_end_with_it(store: Store, captures: Captures) -> None:
    go = held(store, captures)
    loop = asyncio.new_event_loop()
    task = loop.create_task(captures.stored(asked(store, planned("For nobody."))))
    loop.run_until_complete(asyncio.sleep(0))
    loop.stop()
    loop.close()
    kept = captures.put(asked(store, planned("Kept.")))
    go.set()
    assert kept.result(20)["captured"]
    assert captures.put(asked(store, planned("Later."))).result(20)["captured"]
    assert not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # as it is meant here


def test_one_alone_never_waits_for_others(store: Store, captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("loop_dagster.api.captures.time", SimpleNamespace(sleep=waited.append))
    for number in range(SIBLINGS):
        assert captures.put(asked(store, planned(f"Alone {number}"))).result(20)["captured"]
    assert waited == []


def test_the_same_request_together_is_stored_once(store: Store, captures: Captures) -> None:
    go = held(store, captures)
    futures = [captures.put(asked(store, planned("Again?", request="r1"))) for _ in range(10)]
    go.set()
    answers = [future.result(20) for future in futures]
    assert len({answer["trace_id"] for answer in answers}) == 1
    assert Counter(answer["already_present"] for answer in answers) == {False: 1, True: 9}
    store.inbox.add_tombstones([answers[0]["trace_id"]])
    anew = captures.put(asked(store, planned("Again?", request="r1"))).result(20)
    assert not anew["already_present"]
    assert store.samples.count() == 1


def test_a_registry_that_fails_is_told_to_every_caller_and_the_next_are_stored(
    store: Store, captures: Captures, tmp_path: Path
) -> None:
    broken = open_store(Settings(home=tmp_path / "other"))
    with broken.registry.write() as connection:
        connection.exec_driver_sql("DROP TABLE inbox")
    go = held(store, captures)
    lost: list[Future[dict[str, Any]]] = [captures.put(asked(broken, planned("Lost?"))) for _ in range(3)]
    kept = captures.put(asked(store, planned("Kept.")))
    go.set()
    for future in lost:
        with pytest.raises(RegistryNotReady):
            future.result(20)
    assert kept.result(20)["captured"]
    assert captures.put(asked(store, planned("Later."))).result(20)["captured"]
    broken.registry.dispose()


def test_the_end_answers_what_came_before_it(store: Store) -> None:
    captures = Captures()
    go = held(store, captures)
    futures = [captures.put(asked(store, planned(f"Number {number}"))) for number in range(100)]
    threading.Timer(0.2, go.set).start()
    captures.close()
    assert all(future.done() and future.result()["captured"] for future in futures)
    assert store.samples.count() == 100


def test_a_revoked_key_is_out_from_the_next_call_on_also_among_others(api: Api) -> None:
    api.client.loop.set_config("shop", enabled=True)
    key = api.new_key()
    body = {"deployment_id": "shop", "model": "m", "messages": [{"role": "user", "content": "Hi"}], "completion": "Yes"}

    def capture(number: int) -> int:
        mine = key if number % 2 else api.key
        with httpx.Client(base_url=api.url, timeout=30, trust_env=False) as http:
            return http.post("/api/loop/traces", json=body, headers={"X-API-Key": mine}).status_code

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(capture, range(24))) == {200}
        found = api.store.keys.find(key)
        assert found is not None
        api.store.keys.revoke(found.key_id)
        assert list(threads.map(capture, range(24))) == [200, 401] * 12


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_two_workers_store_what_they_acknowledge_once_also_at_the_end(
    home: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgres_url") if backend == "postgres" else None
    store = open_store(Settings(home=home, registry_url=url))
    store.sources.put("shop", enabled=True, now=NOW)
    key = store.keys.create().text
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = home / "serve.log"
    environment = {**os.environ, "LOOP_HOME": str(home), **({"LOOP_REGISTRY_URL": url} if url else {})}
    command = [sys.executable, "-m", "loop_dagster.cli", "serve", "--port", str(port), "--workers", "2"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        acknowledged = _captured_until_its_end(process, port, key, log)
    finally:
        process.kill()
        process.wait()
    stored = store.inbox.waiting_frames()["samples"]
    assert len(acknowledged) >= 60
    assert {sample_id for _request, sample_id in acknowledged} <= set(stored["sample_id"])
    by_request: dict[str, set[str]] = {}
    for name, sample_id in acknowledged:
        by_request.setdefault(name, set()).add(sample_id)
    assert all(len(ids) == 1 for ids in by_request.values()), "the same request is the same sample on both workers"
    assert stored["identity"].n_unique() == stored.height
    assert "Traceback" not in log.read_text()
    store.registry.dispose()


def _captured_until_its_end(process: subprocess.Popen[bytes], port: int, key: str, log: Path) -> list[tuple[str, str]]:
    """Captures of eight clients, every request sent by two of them, until the server is politely ended meanwhile."""
    acknowledged: list[tuple[str, str]] = []

    def send(number: int) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            for turn in range(2_000):
                name = f"r{number // 2}-{turn}"
                body = {
                    "deployment_id": "shop",
                    "model": "m",
                    "messages": [{"role": "user", "content": f"Is {name} there?"}],
                    "completion": "Yes.",
                    "request_id": name,
                }
                try:
                    answered = http.post("/api/loop/traces", json=body, headers={"X-API-Key": key})
                except httpx.TransportError:
                    return
                assert answered.status_code == 200, answered.text
                acknowledged.append((name, answered.json()["trace_id"]))

    give_up = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=2, trust_env=False)
            break
        except httpx.TransportError:
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.1)
    clients = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for client in clients:
        client.start()
    while len(acknowledged) < 60 and time.monotonic() < give_up:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    for client in clients:
        client.join(60)
    return acknowledged


def test_captures_over_http_short_and_long_with_a_key_to_send_them_again(api: Api) -> None:
    api.client.loop.set_config("shop", enabled=True)
    ids = set()
    for number, size in enumerate((10, 100_000, 2_000_000)):
        body = {
            "deployment_id": "shop",
            "model": "m",
            "messages": [{"role": "user", "content": f"{number} " + "word " * (size // 5)}],
            "completion": "Yes, pat@example.org.",
        }
        for headers in ({}, {"Idempotency-Key": f"long-{number}"}, {"Idempotency-Key": f"long-{number}"}):
            answered = api.call("POST", "/api/loop/traces", json=body, headers=headers)
            assert answered.status_code == 200, answered.text
            ids.add(answered.json()["trace_id"])
        found = api.client.loop.get_trace(answered.json()["trace_id"])
        assert found["messages"] == body["messages"]
        assert found["completion"] == "Yes, [redacted:email]."
    assert len(ids) == 6
