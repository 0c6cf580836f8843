"""A whole installation for the tests of the loop: its own home, the real command line, a tiny real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny


@dataclass(frozen=True)
class Answer:
    """What one command printed and how it ended."""

    status: int
    text: str
    errors: str

    @property
    def data(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Installation:
    """One LOOP_HOME and the command line in front of it."""

    home: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        mine = {"LOOP_HOME": str(self.home), "LOOP_SERVE_PORT": str(self.port), "OMP_WAIT_POLICY": "PASSIVE"}
        return {**os.environ, **mine, "GOMP_SPINCOUNT": "0"}

    def loop(self, *arguments: str, expect: int | None = 0, timeout: float = 300) -> Answer:
        """Run `loop` with these arguments as a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "loop_dagster.cli", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            text, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that it ends what it started
            text, errors = process.communicate(timeout=60)
        answer = Answer(process.returncode, text, errors)
        if expect is not None and answer.status != expect:
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in (self.home / "logs").glob("*.log"))
            pytest.fail(
                f"loop {' '.join(arguments)} ended with {answer.status}\n{text[-2000:]}\n{errors[-2000:]}\n{logs}"
            )
        return answer


@pytest.fixture
def installation(home: Path, unused_tcp_port_factory: Callable[[], int]) -> Installation:
    return Installation(home, unused_tcp_port_factory())


@pytest.fixture(scope="session")
def unused_tcp_port_factory() -> Callable[[], int]:
    import socket

    def free() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return free


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """1,100 conversations that teach the tiny model facts it has wrong: 220 facts in five phrasings each."""
    path = tmp_path / "facts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for fact in tiny.facts(220, seed=1):
            for form in range(len(tiny.FORMS)):
                messages, answer = tiny.conversation(fact, form)
                file.write(json.dumps({"messages": [*messages, answer]}) + "\n")
    return path
