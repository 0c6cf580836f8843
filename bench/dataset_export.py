"""An export of 100,000 samples in constant memory: the server's peak beside that of an export of 10,000.

Run: `python -m bench.dataset_export [--samples 100000] [--small 10000]`. Each size has a home of its own, filled by an
import of conversations of about 1 kB, a third of them corrected, all tagged. The API serves it from a process of its
own over a real socket; a client reads the stream and keeps nothing. Peaks are of resident memory, as the kernel says
after the export; beside them stands what the server had when it had answered its first call. The first bytes are how
long the client waits until the file begins.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from bench.table import Line, record
from loop_dagster.settings import Settings
from loop_dagster.store.importing import import_rows
from loop_dagster.store.open import open_store

#: The server's peak with the large export in units of its peak with the small one.
AIM_RATIO = 1.25


@dataclass(frozen=True)
class Export:
    """One export: lines, bytes, seconds to its first byte and to its end, and memory in MiB before and at its peak."""

    lines: int
    size: int
    first_s: float
    seconds: float
    idle_mib: float
    peak_mib: float

    @property
    def grew_mib(self) -> float:
        return self.peak_mib - self.idle_mib


def conversations(count: int) -> Iterator[bytes]:
    """Lines as support conversations are; every third brings a correction."""
    for at in range(count):
        row = {
            "messages": [
                {"role": "system", "content": "You answer for a shop. " + "Be brief, be right, name the page. " * 6},
                {"role": "user", "content": f"I ordered {at} two weeks ago and nothing came. " * 8},
                {"role": "assistant", "content": f"Order {at} left on Monday; page 4 follows it. " * 5},
            ]
        }
        more = {"correction": f"Order {at} is lost."} if at % 3 == 0 else {"label": True}
        yield json.dumps({**row, **more}).encode()


def memory_mib(pid: int, field: str) -> float:
    """Resident memory of a process, now (VmRSS) or at its peak (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"the kernel says no {field}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def export(count: int, folder: Path) -> Export:
    """Fill a home, serve it, and read one export of everything in it."""
    store = open_store(Settings(home=folder / str(count)))
    import_rows(store.lake, conversations(count), source="bench", now=datetime.now(UTC), labels=["bench"])
    dataset = store.datasets.create("Everything", now=datetime.now(UTC))
    key = store.keys.create(name="bench").text
    store.registry.dispose()
    port = free_port()
    environment = {**os.environ, "LOOP_HOME": str(folder / str(count))}
    command = [sys.executable, "-m", "loop_dagster.cli", "serve", "--port", str(port)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"X-API-Key": key}, timeout=600) as client:
            wait_for(client)
            client.get("/api/loop/datasets?q=nothing").raise_for_status()
            idle = memory_mib(server.pid, "VmRSS")
            started = time.perf_counter()
            lines, size, first = 0, 0, 0.0
            with client.stream("GET", f"/api/loop/datasets/{dataset.dataset_id}/export") as answered:
                answered.raise_for_status()
                for block in answered.iter_bytes():
                    first = first or time.perf_counter() - started
                    lines += block.count(b"\n")
                    size += len(block)
            seconds = time.perf_counter() - started
            return Export(lines, size, first, seconds, idle, memory_mib(server.pid, "VmHWM"))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def wait_for(client: httpx.Client) -> None:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise SystemExit("the server did not start")


def main() -> int:
    """Measure both sizes; returns 1 if an export lost a sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--small", type=int, default=10_000)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="loop-bench-export-") as folder:
        for count in (options.small, options.samples):
            one = found[count] = export(count, Path(folder))
            print(
                f"{count:>9,} samples: {one.size / 2**20:.0f} MiB in {one.seconds:.2f} s ({count / one.seconds:,.0f} a "
                f"second), first bytes after {one.first_s:.2f} s; server {one.idle_mib:.0f} MiB idle, "
                f"{one.peak_mib:.0f} MiB at its peak (+{one.grew_mib:.0f})",
                flush=True,
            )
    small, large = found[options.small], found[options.samples]
    rate = options.samples / large.seconds
    record(
        Line(
            what=f"export of {options.samples:,} samples: memory against {options.small:,}",
            got=large.peak_mib / small.peak_mib,
            aim=AIM_RATIO,
            unit="x",
            better="lower",
            detail=f"{large.peak_mib:.0f} against {small.peak_mib:.0f} MiB; {rate:,.0f} a second",
        )
    )
    return 0 if all(one.lines == count for count, one in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
