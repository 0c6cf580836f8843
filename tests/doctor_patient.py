"""A whole installation for the doctor's tests: real stores, a live version, and the command line in front of it.

Belongs here: making it healthy, planting through its parts, following what a finding says. Does not belong here: the
mistakes (test_doctor*.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from loop_dagster.cli import main
from loop_dagster.models.base import resolve
from loop_dagster.processes import render_home
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.states import FLOW
from loop_dagster.settings import Settings
from loop_dagster.store.importing import import_rows
from loop_dagster.store.intake import lake_lease
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.records import Attempt
from loop_dagster.tables import TABLES

#: Stands in settings and files where a secret would, and must never be printed.
SECRET = "hunter2-not-a-real-secret"
CHATS = [
    {"prompt": f"Where is parcel {number}?", "completion": f"Parcel {number} is on its way.", "label": True}
    for number in range(8)
]


@dataclass
class Found:
    """What one `loop doctor --json` said."""

    status: int
    findings: list[dict[str, Any]]
    text: str

    def but_fine(self) -> dict[str, dict[str, Any]]:
        """Everything that is not fine, by code."""
        return {one["code"]: one for one in self.findings if one["level"] != "fine"}

    def of(self, what: str) -> dict[str, Any]:
        [found] = [one for one in self.findings if one["what"] == what]
        return found


@dataclass
class Patient:
    """A healthy installation in `home` with one pipeline, on its own copy of a model, whose v1 is live."""

    home: Path
    model: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    ends: list[Any] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        return Settings()

    def open(self) -> Store:
        store = open_store(self.settings)
        self.ends.append(store.registry.dispose)
        return store

    def env(self, name: str, value: str | None) -> None:
        if value is None:
            self.monkeypatch.delenv(name, raising=False)
        else:
            self.monkeypatch.setenv(name, value)

    def loop(self, *arguments: str) -> tuple[int, str, str]:
        """`loop …` in this process: exit status, what it printed, what it said of errors."""
        self.monkeypatch.setattr(sys, "argv", ["loop", *arguments])
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            signal.signal(signal.SIGTERM, before)
        captured = self.capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    def doctor(self, *options: str) -> Found:
        status, text, errors = self.loop("doctor", "--json", *options)
        assert errors == ""
        assert SECRET not in text
        data = json.loads(text)
        assert data["ok"] == (status == 0)
        assert data["ok"] == all(one["ok"] for one in data["findings"])
        for one in data["findings"]:
            assert one["what"]
            assert one["found"]
            assert bool(one["mend"]) == (one["level"] != "fine"), one
            assert one["ok"] == (one["level"] != "mistake")
        return Found(status, data["findings"], text)

    def follow(self, mend: str) -> None:
        """Do what the first command of a mend says, as a person in a shell would."""
        command = re.search(r"`([^`]+)`", mend)
        assert command is not None, mend
        words = shlex.split(command[1])
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.env(name, value)
        elif words[0] == "unset":
            self.env(words[1], None)
        elif words[0] == "loop":
            status, _, errors = self.loop(*words[1:])
            assert status == 0, errors
        else:
            if words[0] == "sqlite3" and shutil.which("sqlite3") is None:
                pytest.skip("this machine has no sqlite3 to follow the mend with")
            done = subprocess.run(["bash", "-c", command[1]], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr

    def attempt(self, store: Store, until: str, **fields: Any) -> Attempt:
        """The next attempt of the pipeline, moved along to a state."""
        pipeline = store.pipelines.get("support")
        base = resolve(str(self.model), store.settings.models_dir)
        now = datetime.now(UTC) - timedelta(minutes=1)
        frozen = {"model_id": str(self.model), "base_digest": base.digest}
        found = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen=frozen, now=now)
        assert found is not None
        store.attempts.note(found.run_id, train_rows=7, holdout_rows=1)
        for state in FLOW[1 : FLOW.index("promoting") + 1] if until not in FLOW else FLOW[1 : FLOW.index(until) + 1]:
            if found.state == until or (until == "awaiting_review" and state == "promoting"):
                break
            more = fields if state == "checkpoint_ready" else {}
            found = store.attempts.move(found.run_id, state, "On.", now=now, **more)
        return found

    def adapter(self, store: Store, name: str) -> str:
        """A kept artifact with files of its own."""
        folder = store.artifacts.private(name)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(name.encode() * 500)
        return store.artifacts.keep(folder, still_mine=lambda: None)

    def tree(self) -> dict[str, str]:
        """Every file of the installation with the digest of its bytes; SQLite's shared memory apart, which is none."""
        folders = (self.home, self.model.parent)
        files = (path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if not path.name.endswith("-shm")
        }


def healthy(patient: Patient) -> None:
    """Set everything up as `loop init`, `loop pipelines create`, `loop import` and a first attempt do."""
    store = open_store(patient.settings)
    render_home(store.settings)
    store.settings.intake.mkdir(parents=True)
    base = resolve(str(patient.model), store.settings.models_dir)
    pipeline = store.pipelines.create(
        "Support", model_id=str(patient.model), model_digest=base.digest, settings=PipelineSettings()
    )
    now = datetime.now(UTC) - timedelta(minutes=2)
    with lake_lease(store, "import"):
        import_rows(store.lake, CHATS[:5], source="support", labels=["support"], now=now)
        import_rows(store.lake, CHATS[5:], source="support", labels=["support"], now=now)
    adapter = patient.adapter(store, "first")
    attempt = patient.attempt(store, "promoting", adapter_digest=adapter, base_digest=base.digest)
    for table in TABLES:
        if table.by_attempt:  # each step writes its table, also without a row
            store.lake.replace_attempt(table, attempt.key, table.empty())
    store.versions.promote(
        attempt.run_id, base_digest=base.digest, adapters=[adapter], expect_live=None, now=datetime.now(UTC)
    )
    assert store.versions.live(pipeline.tag) is not None
    store.registry.dispose()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Something mounted on a folder for the length of the block; skips where this machine allows none."""
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this user may mount nothing here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def admitted(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Patient]:
    """A healthy installation for one test, behind the fixture `patient`."""
    for name in [name for name in os.environ if name.upper().startswith("LOOP_") or name == "DAGSTER_HOME"]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    model = tmp_path / "models" / "tiny"
    shutil.copytree(tiny_model, model)
    monkeypatch.setenv("LOOP_HOME", str(home))
    monkeypatch.setenv("LOOP_WEBSERVER_PORT", str(free_port()))
    monkeypatch.setenv("LOOP_SERVE_PORT", str(free_port()))
    monkeypatch.setenv("LOOP_API_PORT", str(free_port()))
    made = Patient(home, model, monkeypatch, capsys)
    healthy(made)
    yield made
    for end in made.ends:
        end()
