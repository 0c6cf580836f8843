"""Many clients at the API while a worker of it and the daemon are killed: what was acknowledged is there, once.

Belongs here: one round of load. A client sends a sample and, once it is acknowledged, a verdict on it, and sends again
what was cut off, as the public client does. Afterwards the lake is compared with what was acknowledged.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from homes import Home, Homes, kill

from loop_dagster.store.intake import drain
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES

#: How a server's worker and a daemon are told apart from other processes of a home.
WORKER = "multiprocessing.spawn"
DAEMON = "dagster._daemon"
#: A client gives up on a call that nobody has taken for this long; a worker is back within seconds.
PATIENCE_S = 60.0


@dataclass
class Said:
    """What the server acknowledged to all clients: sample ids by request and verdicts by sample."""

    samples: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    cut_off: int = 0
    wrong: list[str] = field(default_factory=list)


def kill_under_load(homes: Homes, seed: int, *, clients: int = 32, seconds: float = 60.0, daemon: bool = True) -> str:
    """One minute of load with a killed worker and a killed daemon; returns how much was sent and cut off."""
    rng = random.Random(f"load-{seed}")
    home = homes.new(f"load-{seed}")
    store = home.store
    store.pipelines.create("Load", model_id="any")
    key = store.keys.create(name="load").text
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    said = Said()
    stop = threading.Event()
    server = home.start("serve", "--port", str(port), "--workers", "2")
    running = home.start("run") if daemon else None
    try:
        _wait_for(lambda: _answers(url), 120, "the server")
        threads = [threading.Thread(target=_client, args=(url, key, number, said, stop)) for number in range(clients)]
        for thread in threads:
            thread.start()
        kills = _kill_on_the_way(home, rng, seconds, daemon=daemon)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S * 2)
    finally:
        for process in (server, running):
            if process is not None:
                process.terminate()
        for process in (server, running):
            if process is not None:
                process.wait(60)
        home.end()
    assert not said.wrong, f"load {seed}: {sorted(set(said.wrong))[:5]}"
    assert said.samples, f"load {seed}: nothing was acknowledged"
    _compare(home, said, seed)
    homes.drop(home)
    return f"{len(said.samples)} samples, {len(said.verdicts)} verdicts, {said.cut_off} calls cut off, killed: {kills}"


def _client(url: str, key: str, number: int, said: Said, stop: threading.Event) -> None:
    """Send samples and verdicts, one after the other, until told to stop; every call until it is acknowledged."""
    with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=30, trust_env=False) as http:
        count = 0
        while not stop.is_set():
            request = f"{number}-{count}"
            count += 1
            body = {
                "deployment_id": "load",
                "request_id": request,
                "messages": [{"role": "user", "content": f"Where is parcel {request}?"}],
                "model": "small",
                "completion": "On its way.",
            }
            sample = _until_taken(http, said, "/api/loop/traces", body, request)
            if sample is None:
                continue
            trace = str(sample["trace_id"])
            said.samples[request] = trace
            verdict = {"source": "human", "verdict": "accepted"}
            found = _until_taken(http, said, f"/api/loop/traces/{trace}/signals", verdict, f"verdict-{request}")
            if found is not None:
                said.verdicts[trace] = request


def _until_taken(http: httpx.Client, said: Said, path: str, body: object, key: str) -> dict[str, object] | None:
    """Post until the server acknowledges; None when it never does, which nobody promised to keep."""
    give_up = time.monotonic() + PATIENCE_S
    last = "no answer"
    while time.monotonic() < give_up:
        try:
            answer = http.post(path, json=body, headers={"Idempotency-Key": key})
        except httpx.TransportError:
            said.cut_off += 1
            last = "no answer"
            time.sleep(0.1)
            continue
        if answer.is_success:
            taken: dict[str, object] = answer.json()
            return taken
        if answer.status_code not in (409, 429, 503):
            said.wrong.append(f"{answer.status_code} {answer.text[:200]}")
            return None
        last = answer.text
        time.sleep(float(answer.headers.get("Retry-After", "0.2")))
    said.wrong.append(f"{path.rsplit('/', 1)[-1]} not taken for {PATIENCE_S:.0f} s: {last}")
    return None


def _kill_on_the_way(home: Home, rng: random.Random, seconds: float, *, daemon: bool) -> list[str]:
    """Let the time pass; in its middle somewhere a worker is killed, and the daemon, which is started again."""
    ends = time.monotonic() + seconds
    marks = sorted((rng.uniform(0.2, 0.8) * seconds, mark) for mark in ([WORKER, DAEMON] if daemon else [WORKER]))
    kills = []
    for at, mark in marks:
        time.sleep(max(0.0, ends - seconds + at - time.monotonic()))
        found = [process for process in home.processes(mark) if mark != WORKER or "serve" in _ancestors(process)]
        if found:
            kill(rng.choice(found).pid)
            kills.append("daemon" if mark == DAEMON else "worker")
        if mark == DAEMON:
            home.start("run")  # as a supervisor would; ended with the home
    time.sleep(max(0.0, ends - time.monotonic()))
    assert "worker" in kills, "no worker of the server was found"
    return kills


def _ancestors(process: object) -> str:
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        return " ".join(word for parent in process.parents() for word in parent.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _compare(home: Home, said: Said, seed: int) -> None:
    """Everything acknowledged is in the lake once, and nothing is there twice."""
    store = home.store
    store.leases.revoke("lake/default")  # of the daemon that was just ended
    while store.inbox.pending().rows or store.inbox.unfinished() is not None:
        drain(store, holder="chaos")
    stored = store.lake.scan(SAMPLES).collect()
    assert stored["identity"].n_unique() == stored.height, f"load {seed}: a request was stored twice"
    assert stored["sample_id"].n_unique() == stored.height, f"load {seed}: a sample is there twice"
    lost = set(said.samples.values()) - set(stored["sample_id"])
    assert not lost, f"load {seed}: {len(lost)} acknowledged samples are gone"
    # A call that was cut off may have been stored before: sent again it found its sample, so nothing unknown is there
    # but what a client had not finished when it was told to stop.
    assert stored.height <= len(said.samples) + 64, f"load {seed}: {stored.height} stored, {len(said.samples)} known"
    verdicts = store.lake.scan(FEEDBACK).collect()
    assert verdicts["sample_id"].n_unique() == verdicts.height, f"load {seed}: a verdict was stored twice"
    lost = set(said.verdicts) - set(verdicts["sample_id"])
    assert not lost, f"load {seed}: {len(lost)} acknowledged verdicts are gone"
    labels = store.lake.scan(LABELS).collect()
    assert sorted(labels["sample_id"]) == sorted(stored["sample_id"]), f"load {seed}: tags"


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _wait_for(true: Callable[[], bool], seconds: float, what: str) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, f"{what} did not come up in {seconds:.0f} s"
        time.sleep(0.2)
