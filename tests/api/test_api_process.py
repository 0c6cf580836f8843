"""`loop keys` and `loop serve` as processes: a key for scripts, a server that ends without losing a call."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loop_dagster.cli import main
from loop_dagster.cli.keys import first_key
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store


@pytest.fixture
def loop(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `loop … --json` in this process and gives what it printed."""

    def run(*arguments: str) -> Any:
        monkeypatch.setenv("LOOP_HOME", str(home))
        monkeypatch.setattr(sys, "argv", ["loop", *arguments, "--json"])
        with pytest.raises(SystemExit):
            main()
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def server(home: Path) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """A server with two workers; its address, its process and its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = home / "serve.log"
    command = [sys.executable, "-m", "loop_dagster.cli", "serve", "--port", str(port), "--workers", "2"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, "LOOP_HOME": str(home)}, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            try:
                httpx.get(f"{url}/health", timeout=2, trust_env=False)
                break
            except httpx.TransportError:
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
        yield url, process, log
    finally:
        process.kill()
        process.wait()


def test_keys_are_made_listed_and_revoked_by_commands(loop: Callable[..., Any]) -> None:
    made = loop("keys", "create")
    assert set(made) == {"key", "id", "scopes", "workspace"}
    assert made["workspace"] == "default"
    assert made["scopes"] == ["loop:read", "loop:write", "serverless", "deployments:read"]
    narrow = loop("keys", "create", "--scope", "loop:read", "--workspace", "one", "--workspace", "two")
    assert (narrow["scopes"], narrow["workspaces"]) == (["loop:read"], ["one", "two"])
    listed = loop("keys", "list")
    assert [one["id"] for one in listed["keys"]] == [made["id"], narrow["id"]]
    assert made["key"] not in json.dumps(listed)
    assert loop("keys", "revoke", made["id"])["revoked"] is True
    assert loop("keys", "revoke", "nothing")["error"]["code"] == "NOT_FOUND"
    assert loop("keys", "create", "--scope", "all")["error"]["code"] == "BAD_REQUEST"


def test_a_first_key_is_made_once_and_for_this_machine_alone(home: Path) -> None:
    open_to_all = open_store(Settings(home=home, api_host="0.0.0.0"))
    assert first_key(open_to_all) is None
    store = open_store(Settings(home=home))
    made = first_key(store)
    assert made is not None
    assert store.keys.find(made.text) is not None
    assert first_key(store) is None


def test_a_polite_end_answers_every_call_that_it_took(
    home: Path, server: tuple[str, subprocess.Popen[bytes], Path], tiny_model: Path
) -> None:
    url, process, log = server
    store = open_store(Settings(home=home))
    key = store.keys.create().text
    acknowledged: list[str] = []
    lost: list[str] = []
    stop = threading.Event()

    def write(number: int) -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False, headers={"X-API-Key": key}) as client:
            for turn in range(1_000):
                if stop.is_set():
                    return
                name = f"Pipeline {number} {turn}"
                try:
                    body = {"name": name, "model": {"id": str(tiny_model)}}
                    answered = client.post("/api/loop/pipelines", json=body)
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    lost.append(name)
                    return
                assert answered.status_code == 201, answered.text
                acknowledged.append(answered.json()["pipeline"]["rule_name"])

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    give_up = time.monotonic() + 30
    while len(acknowledged) < 8 and time.monotonic() < give_up:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    stop.set()
    for writer in writers:
        writer.join(60)
    kept = {pipeline.name for pipeline in store.pipelines.list()}
    assert len(acknowledged) >= 8
    assert set(acknowledged) <= kept
    # What was not acknowledged was not taken: nothing was done behind a caller's back.
    assert kept == set(acknowledged)
    said = log.read_text()
    assert key not in said
    assert "Traceback" not in said
