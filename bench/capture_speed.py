"""Captures of 32 clients against a bare FastAPI route that inserts one row, in the same run.

Ours: POST /api/loop/traces of `loop serve`, with key, consent, redaction, keys and the inbox. The peer: the same body
through a Pydantic model into one SQLite table by one INSERT, in WAL mode with synchronous=FULL, so that both have
written an exchange through to the disk when they acknowledge it. Both are a uvicorn of one worker in a process of its
own; the clients are a third process. Rounds alternate, the median counts.

    python -m bench.capture_speed [--seconds 8] [--rounds 3] [--clients 32]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bench.table import Line, record

SPAWN = multiprocessing.get_context("spawn")
WORDS = (  # noqa: SIM905
    "order parcel refund invoice the a is was were where when please could would have been waiting since yesterday "
    "warehouse address delivery customer account change cancel confirm number shipping payment returned support"
).split()
AIM = 0.7
SOURCE = "support-replies"


@dataclass(frozen=True)
class Measured:
    """One round of one side."""

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


class Trace(BaseModel):
    """What the peer reads a body as."""

    deployment_id: str
    model: str
    messages: list[dict[str, Any]]
    completion: str | None = None
    conversation_id: str | None = None


def exchange(dice: random.Random) -> dict[str, Any]:
    """One chat of about 700 bytes; one in ten holds an e-mail address."""
    said = " ".join(dice.choices(WORDS, k=45))
    if dice.random() < 0.1:
        said += " pat@example.org"
    return {
        "deployment_id": SOURCE,
        "model": "a-model",
        "messages": [{"role": "system", "content": "You answer questions."}, {"role": "user", "content": said}],
        "completion": " ".join(dice.choices(WORDS, k=40)),
        "conversation_id": f"c{dice.randrange(10**9)}",
    }


def serve_ours(home: str, port: int) -> None:
    os.environ["LOOP_HOME"] = home
    from loop_dagster.api.serving import serve

    serve("127.0.0.1", port)


def serve_bare(home: str, port: int) -> None:
    import uvicorn
    from fastapi import FastAPI

    path = Path(home) / "bare.db"
    with sqlite3.connect(path) as made:
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("CREATE TABLE traces (id TEXT PRIMARY KEY, body TEXT NOT NULL)")
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    db.execute("PRAGMA synchronous = FULL")

    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    # On the loop, without a thread: the quickest that a plain route does, since SQLite takes one writer anyway.
    @app.post("/api/loop/traces")
    async def put(trace: Trace) -> dict[str, Any]:
        trace_id = os.urandom(16).hex()
        db.execute("INSERT INTO traces VALUES (?, ?)", (trace_id, trace.model_dump_json()))
        return {"captured": True, "trace_id": trace_id}

    uvicorn.run(app, host="127.0.0.1", port=port, access_log=False, log_level="warning")


@contextmanager
def running(side: str, home: str) -> Iterator[tuple[int, int]]:
    """Port and process of a server that answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = SPAWN.Process(target=serve_ours if side == "ours" else serve_bare, args=(home, port))
    process.start()
    try:
        give_up = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > give_up or not process.is_alive():
                raise SystemExit(f"the server of {side} did not start")
            time.sleep(0.05)
        yield port, int(process.pid or 0)
    finally:
        process.terminate()
        process.join(40)


async def one_client(port: int, head: bytes, bodies: list[bytes], until: float, took: list[float]) -> None:
    """Sends over one connection that stays open; raises for any answer but 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    number = 0
    while time.perf_counter() < until:
        body = bodies[number % len(bodies)]
        number += 1
        began = time.perf_counter()
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"answered {answer[:60]!r}")
        size = int(answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        await reader.readexactly(size)
        took.append(time.perf_counter() - began)
    writer.close()


def load(port: int, key: str, clients: int, seconds: float, sent: Any) -> None:
    """All clients in one process; puts the times of all calls into `sent`."""
    head = (
        f"POST /api/loop/traces HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: {key}\r\ncontent-type: application/json\r\n"
    ).encode()
    dice = random.Random(3)
    bodies = [[json.dumps(exchange(dice)).encode() for _ in range(200)] for _ in range(clients)]
    took: list[float] = []

    async def all_clients() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(one_client(port, head, one, until, took) for one in bodies))

    asyncio.run(all_clients())
    sent.put(took)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(port: int, pid: int, key: str, clients: int, seconds: float) -> Measured:
    sent = SPAWN.Queue()
    process = SPAWN.Process(target=load, args=(port, key, clients, seconds, sent))
    before = cpu_seconds(pid)
    process.start()
    took = sorted(sent.get(timeout=seconds + 120))
    process.join()
    cpu = cpu_seconds(pid) - before
    at = [took[int(len(took) * share)] * 1000 for share in (0.5, 0.99)]
    return Measured(len(took) / seconds, at[0], at[1], cpu / len(took) * 1e6)


def prepare(home: str) -> str:
    """An installation with a source that records; gives a key."""
    from datetime import UTC, datetime

    from loop_dagster.settings import Settings
    from loop_dagster.store.open import open_store

    store = open_store(Settings(home=Path(home)))
    store.sources.put(SOURCE, enabled=True, now=datetime.now(UTC))
    key = store.keys.create(name="bench").text
    store.registry.dispose()
    return key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=32)
    options = parser.parse_args()
    rounds: dict[str, list[Measured]] = {"ours": [], "bare": []}
    with tempfile.TemporaryDirectory(prefix="loop-capture-") as folder:
        key = prepare(folder)
        with running("ours", folder) as ours, running("bare", folder) as bare:
            servers = {"ours": ours, "bare": bare}
            for turn in range(options.rounds):
                for side in ("ours", "bare") if turn % 2 == 0 else ("bare", "ours"):
                    measure(*servers[side], key, options.clients, 1)  # a second to warm up
                    found = measure(*servers[side], key, options.clients, options.seconds)
                    rounds[side].append(found)
                    print(
                        f"{side:5} {found.per_second:8.0f} captures/s   p50 {found.p50_ms:6.1f} ms   "
                        f"p99 {found.p99_ms:6.1f} ms   {found.cpu_us:6.0f} µs of processor each",
                        flush=True,
                    )
    middle = {side: statistics.median(one.per_second for one in found) for side, found in rounds.items()}
    tail = {side: statistics.median(one.p99_ms for one in found) for side, found in rounds.items()}
    cpu = {side: statistics.median(one.cpu_us for one in found) for side, found in rounds.items()}
    ratio, slower = middle["ours"] / middle["bare"], tail["ours"] / tail["bare"]
    print(f"\ncaptures/s {ratio:.2f} × the bare route's (aim {AIM}); p99 {slower:.2f} × (aim {1 / AIM:.2f})")
    detail = f"{middle['ours']:.0f}/s against {middle['bare']:.0f}/s; {cpu['ours']:.0f} against {cpu['bare']:.0f} µs"
    record(Line(what="captures beside a bare insert", got=ratio, aim=AIM, unit="×", better="higher", detail=detail))
    detail = f"{tail['ours']:.1f} ms against {tail['bare']:.1f} ms"
    record(Line(what="p99 of captures beside it", got=slower, aim=1 / AIM, unit="×", better="lower", detail=detail))


if __name__ == "__main__":
    main()
