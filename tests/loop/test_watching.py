"""Staying with the daemon: whoever watches hears of its end, whatever is being watched."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from loop_dagster.cli.watching import until_idle
from loop_dagster.processes import DaemonEnded, Process, running
from loop_dagster.rules.states import FLOW
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store


@pytest.mark.parametrize("quiet", [True, False])
def test_a_daemon_that_dies_while_a_training_is_followed_is_missed_at_once(home: Path, quiet: bool) -> None:
    store = open_store(Settings(home=home))
    pipeline = store.pipelines.create("Support", model_id="any")
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=datetime.now(UTC))
    assert attempt is not None
    for state in FLOW[1 : FLOW.index("training") + 1]:
        store.attempts.move(attempt.run_id, state, "On.", now=datetime.now(UTC))
    child = store.settings.work / attempt.run_id / "train"
    child.mkdir(parents=True)
    (child / "progress.json").write_text(json.dumps({"done": 1, "total": 62}))
    dies = [sys.executable, "-S", "-c", "import time; time.sleep(2); raise SystemExit(9)"]
    with running(daemon := Process("daemon", dies, store.settings)), pytest.raises(DaemonEnded, match="status 9"):
        until_idle(store, daemon, quiet=quiet)
