"""What recording adds to a call through the gateway: the same calls with and without it, interleaved in one run.

Run: `python -m bench.gateway_overhead [--calls 600] [--delay-ms 20] [--repeat 3] [--at-once 1]`. The upstream is a stub
in another process, the gateway a real `loop serve` in a third, both over real HTTP on loopback, with SQLite under a new
home. A round goes back and forth between ten calls that are recorded (`X-Loop-Pipeline`) and ten that are not
(`X-Loop-Capture: off`), whole answers and streams in turn; ten, since the recording of one call may hold up the next.
The time of a whole answer is until its last byte, of a stream until its first event. A recorded call that comes without
its sample id is counted, and every one must be in the store at the end. The figures are the differences of the medians
and of the 99th percentiles, the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench import stub_server
from bench.table import Line, record
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store

AIM_P50_MS, AIM_P99_MS = 1.0, 5.0
TEXT = "Order 7 left on Monday; page 4 follows it. " * 10
ANSWER = {"role": "assistant", "content": TEXT}
_ANSWERED = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "stub",
        "choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 200, "completion_tokens": 100, "total_tokens": 300},
    }
).encode()
#: Calls of one kind in a row.
TOGETHER = 10
ON, OFF = {"X-Loop-Pipeline": "bench"}, {"X-Loop-Capture": "off"}


def events() -> list[bytes]:
    """A streamed answer of 100 pieces."""
    pieces = [TEXT[at : at + 5] for at in range(0, 500, 5)]
    chunks = [{"index": 0, "delta": {"content": piece}, "finish_reason": None} for piece in pieces]
    chunks.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    lines = [
        b"data: "
        + json.dumps({"object": "chat.completion.chunk", "model": "stub", "choices": [one]}).encode()
        + b"\n\n"
        for one in chunks
    ]
    return [*lines, b"data: [DONE]\n\n"]


WHOLE, STREAM = stub_server.whole(_ANSWERED), stub_server.streamed(events())


def reply(body: bytes) -> bytes:
    """What the stub says to one request."""
    return STREAM if b'"stream":true' in body.replace(b" ", b"") else WHOLE


@dataclass
class Times:
    """Milliseconds of calls, by whether they were recorded and streamed."""

    of: dict[tuple[bool, bool], list[float]] = field(default_factory=dict)
    ids: int = 0

    def add(self, recorded: bool, streamed: bool, took_s: float) -> None:
        self.of.setdefault((recorded, streamed), []).append(took_s * 1_000)

    def gap(self, streamed: bool, percent: int) -> float:
        """How much more a recorded call takes, at a percentile."""
        on, off = (statistics.quantiles(self.of[recorded, streamed], n=100)[percent - 1] for recorded in (True, False))
        return on - off


def body(number: int, streamed: bool) -> bytes:
    system = "You answer for a shop. " + "Be brief, be right, name the page. " * 20
    asked = [{"role": "system", "content": system}, {"role": "user", "content": f"Where is order {number}?"}]
    return json.dumps({"model": "stub", "messages": asked, "stream": streamed}).encode()


def call(client: httpx.Client, number: int, recorded: bool, streamed: bool, times: Times) -> None:
    began = time.perf_counter()
    with client.stream(
        "POST", "/v1/chat/completions", content=body(number, streamed), headers=ON if recorded else OFF
    ) as answered:
        assert answered.status_code == 200, answered.read()
        if streamed:
            pieces = answered.iter_raw()
            next(pieces)
            took = time.perf_counter() - began
            for _ in pieces:
                pass
        else:
            answered.read()
            took = time.perf_counter() - began
    has_id = "x-loop-sample-id" in answered.headers
    assert has_id <= recorded
    times.ids += has_id
    times.add(recorded, streamed, took)


def one_round(url: str, key: str, calls: int, at_once: int) -> Times:
    times = Times()

    def caller(place: int) -> None:
        with httpx.Client(base_url=url, headers={"X-API-Key": key}, trust_env=False, timeout=60) as client:
            for number in range(2 * calls // at_once):
                recorded = bool((number // TOGETHER + place) % 2)
                call(client, number, recorded, bool(number % 2), times)

    threads = [threading.Thread(target=caller, args=(place,)) for place in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


@contextmanager
def gateway(home: Path, upstream: str) -> Iterator[str]:
    """A `loop serve` on a home; gives its URL as soon as it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {**os.environ, "LOOP_HOME": str(home), "LOOP_UPSTREAMS": json.dumps({"stub": {"url": upstream}})}
    command = [sys.executable, "-m", "loop_dagster.cli", "serve", "--port", str(port)]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    try:
        wait_for(url := f"http://127.0.0.1:{port}")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def wait_for(url: str) -> None:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit("the gateway did not start")


def measure(options: argparse.Namespace, home: Path) -> list[Times]:
    store = open_store(Settings(home=home))
    store.pipelines.create("Bench", model_id="m", model_digest="d" * 64)
    key = store.keys.create().text
    with stub_server.started("bench.gateway_overhead", options.delay_ms) as upstream, gateway(home, upstream) as url:
        warm = one_round(url, key, 40, 1)  # imports, connections
        rounds = [one_round(url, key, options.calls, options.at_once) for _ in range(options.repeat)]
    stored = store.inbox.pending().rows // 2  # each with its tag
    asked = sum(len(times.of[True, streamed]) for times in (warm, *rounds) for streamed in (True, False))
    assert stored == asked, f"{asked} calls were to be recorded, {stored} were"
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=600)
    parser.add_argument("--delay-ms", type=float, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(stub_server.serve(reply, options.delay_ms / 1_000))
        return
    with tempfile.TemporaryDirectory(prefix="loop-gateway-") as folder:
        rounds = measure(options, Path(folder))
    for times in rounds:
        for streamed in (False, True):
            for recorded in (False, True):
                taken = times.of[recorded, streamed]
                spread = statistics.quantiles(taken, n=100)
                what = f"{'stream' if streamed else 'whole':<7} {'recorded' if recorded else 'passed':<9}"
                print(f"{what} {len(taken):>5} calls  p50 {spread[49]:7.2f} ms  p99 {spread[98]:7.2f} ms")
    recorded = sum(len(times.of[True, streamed]) for times in rounds for streamed in (True, False))
    told = sum(times.ids for times in rounds)
    print(f"all {recorded} recorded calls were stored; {told} came with their sample id")
    for streamed, what in ((False, "whole answers"), (True, "streams, to the first event")):
        for percent, aim in ((50, AIM_P50_MS), (99, AIM_P99_MS)):
            got = statistics.median(times.gap(streamed, percent) for times in rounds)
            print(f"recording adds {got:+.2f} ms at p{percent} ({what})")
            record(
                Line(
                    what=f"recording a call, {what}, p{percent}",
                    got=got,
                    aim=aim,
                    unit="ms",
                    better="lower",
                    detail=f"{recorded} calls, {options.at_once} at once, {told / recorded:.1%} with their id",
                )
            )


if __name__ == "__main__":
    main()
