"""The gateway in trouble: a registry that is locked, slow or gone, too many calls, servers that are ended or killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from bios import RunBiOS
from gateway_world import QUESTION, World, gateway, installation, until
from stub_upstream import KEY, Reply, Upstream, chunks, completion, upstream

from loop_dagster.api.gateway import recorder
from loop_dagster.api.gateway.upstreams import Target
from loop_dagster.store.capturing import WAY
from loop_dagster.store.open import Store

TAGGED = {"X-Loop-Pipeline": "support"}
SECRET = "anna.schmidt@example.com"
#: What an answer may wait for the registry in these tests, and what a call may take on a busy machine.
WAIT_MS, QUICK_S = 50.0, 3.0


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A gateway that gives an id out at once or not at all."""
    with gateway(tmp_path_factory.mktemp("hasty"), gateway_wait_ms=WAIT_MS) as running:
        yield running


def ask(world: World, text: str = "Refunds?", **headers: str) -> tuple[str | None, float]:
    """The sample id of a call that must be answered, and the seconds it took."""
    began = time.monotonic()
    body = {"model": "gpt-a", "messages": [{"role": "user", "content": text}]}
    answered = world.api.call("POST", "/v1/chat/completions", json=body, headers={**TAGGED, **headers})
    assert answered.status_code == 200, answered.text
    assert answered.json()["choices"][0]["message"]["content"] == "Within 30 days."
    return answered.headers.get("x-loop-sample-id"), time.monotonic() - began


@contextlib.contextmanager
def locked(store: Store) -> Iterator[None]:
    """Another process's write that does not end."""
    assert store.registry.path is not None
    with contextlib.closing(sqlite3.connect(store.registry.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")


@contextlib.contextmanager
def unreachable(store: Store) -> Iterator[None]:
    """A registry that does not even let anybody read."""
    store.registry.dispose()
    assert store.registry.path is not None
    with contextlib.closing(sqlite3.connect(store.registry.path, isolation_level=None, timeout=20)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_a_registry_that_takes_no_writes_costs_the_id_and_nothing_else(hasty: World) -> None:
    before = hasty.samples()
    time.sleep(recorder.RECENT_S + 0.1)
    with locked(hasty.store):
        for _ in range(3):
            sample, took = ask(hasty)
            assert sample is None
            assert took < QUICK_S
    # What passed meanwhile was not lost: nobody had been promised anything, and it is recorded all the same.
    assert until(lambda: hasty.samples() == before + 3)
    assert until(lambda: ask(hasty)[0])


def test_what_was_promised_before_is_written_after(hasty: World) -> None:
    assert until(lambda: ask(hasty)[0])  # a write just now: the registry is taken to be well
    hasty.settle()
    with locked(hasty.store):
        promised = [sample for sample, _ in (ask(hasty, f"Question {number}") for number in range(5)) if sample]
        said = hasty.api.call("GET", f"/api/loop/traces/{(promised or ['-'])[0]}/signals")
        assert said.status_code == (409 if promised else 404)
        time.sleep(recorder.SLOW_S + 0.2)
        late, _ = ask(hasty)
        assert late is None  # the first write has not come back
    for sample in promised:
        hasty.trace(sample)


def test_a_registry_that_cannot_be_read_stops_no_call(hasty: World) -> None:
    ask(hasty)
    before = hasty.samples()
    with unreachable(hasty.store):
        times = []
        for _ in range(12):
            sample, took = ask(hasty)
            assert sample is None
            times.append(took)
        assert max(times) < QUICK_S
    assert until(lambda: hasty.samples() == before + 12)  # nobody was promised anything, and none is lost
    assert until(lambda: ask(hasty)[0])


def test_a_damaged_registry_stops_no_call(tmp_path: Path) -> None:
    with gateway(tmp_path / "home", gateway_wait_ms=WAIT_MS) as world:
        ask(world)
        world.settle()
        path = world.store.registry.path
        assert path is not None
        world.store.registry.dispose()
        for file in path.parent.glob("registry.db-*"):
            file.unlink()
        path.write_bytes(b"no database any more" * 1_000)
        sample, took = ask(world)
        assert sample is None
        assert took < QUICK_S


def test_calls_beyond_what_the_recorder_holds_are_answered(hasty: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty.settle()
    before = hasty.samples()
    monkeypatch.setattr(recorder, "MOST_CALLS", 0)
    assert ask(hasty)[0] is None
    monkeypatch.setattr(recorder, "MOST_CALLS", 10)
    monkeypatch.setattr(recorder, "MOST_BYTES", 10)
    assert ask(hasty)[0] is None
    assert hasty.samples() == before


def test_many_at_once_are_all_recorded(world: World) -> None:
    world.up.reply = lambda sent: Reply(events=chunks("A", "B")) if b'"stream": true' in sent.body else completion()
    ids: list[str] = []

    def call(number: int) -> None:
        inference = RunBiOS(api_key=world.api.key, base_url=world.api.url).inference
        for turn in range(5):
            asked = [{"role": "user", "content": f"{number} {turn}"}]
            if number % 2:
                ids.append(
                    inference.chat_completions(asked, model="gpt-a", loop={"pipeline": "support"}).loop_sample_id
                )
            else:
                loop = {"pipeline": "support", "on_sample_id": ids.append}
                list(inference.stream_chat_completions(asked, model="gpt-a", loop=loop))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    world.settle()
    assert len(set(ids)) == 40
    for sample in ids:
        assert world.store.samples.get(sample) is not None


def test_a_call_that_takes_long_is_said_to_be_under_way(hasty: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "NOTED_EVERY_S", 0.2)
    until(lambda: ask(hasty)[0])  # from here on the recorder looks more often
    hasty.up.reply = lambda _: Reply(events=chunks(*["word "] * 20), pause_s=0.1)
    body = {"model": "gpt-a", "messages": QUESTION, "stream": True}
    headers = {"X-API-Key": hasty.api.key, **TAGGED}
    with hasty.api.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answered:
        sample, begun = answered.headers["x-loop-sample-id"], datetime.now(UTC)
        list(answered.iter_raw())
    hasty.up.reply = lambda _: completion()
    assert hasty.store.capturing.on_its_way(sample, begun + WAY + timedelta(seconds=0.3))
    assert not hasty.store.capturing.on_its_way(sample, begun + WAY + timedelta(seconds=30))
    hasty.trace(sample)


def test_an_upstream_that_stays_silent_is_given_up(tmp_path: Path) -> None:
    with gateway(tmp_path / "home", gateway_timeout_s=1.0) as world:
        body = {"model": "gpt-a", "messages": QUESTION}
        world.up.reply = lambda _: Reply(body=completion().body, delay_s=2.5)
        answered = world.api.call("POST", "/v1/chat/completions", json=body, headers=TAGGED)
        assert (answered.status_code, answered.json()["error"]["code"]) == (504, "UPSTREAM_TIMED_OUT")
        world.up.reply = lambda _: Reply(events=chunks("One", "two"), pause_s=2.5)
        with pytest.raises(httpx.RemoteProtocolError):  # no regular end
            world.api.call("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=TAGGED)
        world.missed_soon("support", "incomplete")


def test_an_upstream_that_closes_between_calls_is_asked_anew(hasty: World) -> None:
    hasty.up.reply = lambda _: Reply(body=completion().body, headers={"Connection": "close"})
    for _ in range(3):
        ask(hasty)
    hasty.up.reply = lambda _: completion()


def test_servers_elsewhere_are_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.internal:3128")
    monkeypatch.setenv("no_proxy", "vllm.internal,.local")
    reached = {
        url: Target(url, None, "openai", "x").proxy
        for url in (
            "https://api.openai.com/v1",
            "https://vllm.internal/v1",
            "https://127.0.0.1/v1",
            "http://a.example/v1",
        )
    }
    assert list(reached.values()) == ["http://proxy.internal:3128", None, None, None]


@pytest.mark.postgres
def test_a_postgres_that_is_held_up_stops_no_call(tmp_path: Path, postgres_url: str) -> None:
    with gateway(tmp_path / "home", gateway_wait_ms=WAIT_MS, registry_url=postgres_url) as world:
        assert until(lambda: ask(world)[0])
        promised = until(lambda: ask(world, "With \u0000 and \U0001f4a1")[0])
        assert world.api.client.loop.upvote(promised)["verdict"] == "accepted"
        assert "\U0001f4a1" in world.trace(promised)["messages"][0]["content"]
        before = world.samples()
        other = sa.create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg2://"))
        with other.begin() as connection:
            connection.execute(sa.text("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE"))
            asked = [ask(world) for _ in range(8)]
            time.sleep(recorder.SLOW_S + 0.2)
            assert ask(world)[0] is None  # the first write has not come back
        other.dispose()
        assert max(took for _, took in asked) < QUICK_S
        assert until(lambda: world.samples() == before + 9)  # none is lost
        for sample, _took in asked:
            assert sample is None or world.store.samples.get(sample) is not None
        assert until(lambda: ask(world)[0])


# --- servers as processes --------------------------------------------------------------------------------------------


@dataclass
class Servers:
    """Two workers of one installation, and their upstream."""

    url: str
    store: Store
    up: Upstream
    process: subprocess.Popen[bytes]
    log: Path
    key: str = field(default="")

    def client(self) -> Any:
        return RunBiOS(api_key=self.key, base_url=self.url)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home, log = tmp_path / "home", tmp_path / "serve.log"
    with upstream() as up:
        store = installation(home, up.url)
        named = {"gpt-*": {"url": up.url, "api_key": KEY}}
        environ = {**os.environ, "LOOP_HOME": str(home), "LOOP_UPSTREAMS": json.dumps(named)}
        command = [sys.executable, "-m", "loop_dagster.cli", "serve", "--port", str(port), "--workers", "2"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env={**environ, "LOOP_GATEWAY_WAIT_MS": "5000"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
            return False

        try:
            until(answers, within=60)
            yield Servers(url, store, up, process, log, store.keys.create().text)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def say_no_secret(servers: Servers) -> None:
    """Calls that fail in every way that may be logged."""
    answers = iter(
        [Reply(body=b"<html>" + SECRET.encode()), Reply(events=chunks("x", finish=None, done=False), cut=True)]
    )
    servers.up.reply = lambda _: next(answers)
    body = {"model": "gpt-a", "messages": [{"role": "user", "content": SECRET}, {"role": "odd", "content": SECRET}]}
    headers = {"X-API-Key": servers.key, **TAGGED}
    with httpx.Client(base_url=servers.url, headers=headers, trust_env=False, timeout=30) as http:
        http.post("/v1/chat/completions", json=body)
        with contextlib.suppress(httpx.RemoteProtocolError):
            http.post("/v1/chat/completions", json={**body, "messages": QUESTION})
        refused = [
            http.post("/v1/chat/completions", json={**body, "model": f"loop-{SECRET}"}),
            http.post("/v1/chat/completions", content=b'{"model":"gpt-a", ' + SECRET.encode()),
            http.post("/v1/chat/completions?x=" + SECRET, json={"messages": [SECRET]}),
        ]
    assert [one.status_code for one in refused] == [404, 400, 400]
    assert SECRET not in refused[1].text + refused[2].text
    servers.up.reply = lambda _: completion()


def test_a_polite_end_records_what_has_passed_and_no_log_has_a_secret(servers: Servers) -> None:
    say_no_secret(servers)
    client = servers.client()
    ids = []
    with locked(servers.store):
        for number in range(6):
            asked = [{"role": "user", "content": f"Number {number}? {SECRET}"}]
            answer = client.inference.chat_completions(asked, model="gpt-a", loop={"pipeline": "support"})
            ids.append(answer.loop_sample_id)
        client._http._session.close()
        client.inference._session.close()
        servers.process.send_signal(signal.SIGTERM)
        time.sleep(1)
    assert servers.process.wait(60) == 0, servers.log.read_text()
    kept = servers.store.samples.keys().samples.collect().height
    assert kept == 6
    assert all(servers.store.samples.get(sample) is not None for sample in ids if sample)
    said = servers.log.read_text()
    assert not any(secret in said for secret in (SECRET, KEY, servers.key, "Number 3"))
    assert "Traceback" not in said


def test_feedback_lands_on_whichever_server_it_meets_and_a_kill_loses_none_of_it(servers: Servers) -> None:
    acknowledged: list[str] = []
    stop = threading.Event()

    def work(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            client = servers.client()  # a new connection each time, so either worker may get it
            with contextlib.suppress(Exception):  # the servers are killed in the middle of it
                asked = [{"role": "user", "content": f"{number} {turn}?"}]
                reply = client.loop.chat("support", asked, model="gpt-a")
                client.loop.upvote(reply.sample_id)
                acknowledged.append(reply.sample_id)

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for worker in workers:
        worker.start()
    until(lambda: len(acknowledged) >= 6, within=60)
    os.killpg(servers.process.pid, signal.SIGKILL)
    stop.set()
    servers.process.wait()
    for worker in workers:
        worker.join(60)
    for sample in acknowledged:
        found = servers.store.samples.get(sample)
        assert found is not None
        assert len(found["feedback"]) == 1
