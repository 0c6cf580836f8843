"""A local model server as the judge: this project's own serving process, with a tiny model that only babbles."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import tiny_adapter
from judge_world import both_of, case_of

from loop_dagster.models import serve
from loop_dagster.models.base import resolve
from loop_dagster.models.judge import open_judge
from loop_dagster.models.judge_answers import judge_answers
from loop_dagster.rules.decision import decide
from loop_dagster.rules.states import FLOW
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store

NOW = datetime(2026, 12, 1, 8, tzinfo=UTC)


@pytest.fixture(scope="module")
def serving(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """An installation whose version of `judge` answers under `loop-judge`, from a model that reads long texts."""
    reads_more = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model, reads_more)
    config = json.loads((reads_more / "config.json").read_text())
    (reads_more / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8_192}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = Settings(home=tmp_path_factory.mktemp("home"), serve_port=port, max_answer_tokens=24)
    store = open_store(settings)
    base = resolve(str(reads_more), settings.models_dir)
    pipeline = store.pipelines.create("Judge", model_id=str(reads_more), model_digest=base.digest, now=NOW)
    adapter = store.artifacts.keep(
        tiny_adapter.adapter(reads_more, tmp_path_factory.mktemp("made"), seed=1), still_mine=lambda: None
    )
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    for state in FLOW[1 : FLOW.index("promoting") + 1]:
        fields = {"adapter_digest": adapter} if state == "checkpoint_ready" else {}
        store.attempts.move(attempt.run_id, state, "On.", now=NOW, **fields)
    store.versions.promote(attempt.run_id, base_digest=base.digest, adapters=[adapter], expect_live=None, now=NOW)
    environment = {**os.environ, "LOOP_HOME": str(settings.root), "LOOP_SERVE_PORT": str(port)}
    environment |= {"LOOP_MAX_ANSWER_TOKENS": "24", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    with (settings.root / "serving.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "loop_dagster.models.serve"], env=environment, stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + 90
        while serve._serving(settings) is None:
            assert child.poll() is None and time.monotonic() < end, (settings.root / "serving.log").read_text()
            time.sleep(0.1)
        yield settings
    finally:
        child.kill()
        child.wait()


@pytest.mark.model
def test_its_babble_makes_failed_rows_and_an_inconclusive_report(serving: Settings, tmp_path: Path) -> None:
    """It knows no structured output and refuses it by name; what it says then holds no verdict."""
    url = f"http://127.0.0.1:{serving.serve_port}/v1"
    asking = Settings(
        home=tmp_path, judge="openai", judge_url=url, judge_model="loop-judge", judge_concurrency=4, judge_max_tokens=64
    )
    cases = [case_of(at) for at in range(3)]
    answers = both_of(cases)
    judge = open_judge(asking)
    judged = judge_answers(judge, cases, answers, journal=tmp_path / "judged.jsonl")
    assert judged.ended is None and judged.not_reached == 0
    assert set(judged.frame["status"]) == {"failed"} and set(judged.frame["error_code"]) == {"JUDGE_UNREADABLE"}
    assert judged.total.calls >= 6 and judged.total.estimated == 0  # it says what each call used
    assert judged.total.prompt_tokens > 100 * judged.total.calls
    decision = decide(judged.frame, gone=0, answers=answers, ended_early=judged.ended)
    assert (decision.verdict, decision.missed_bar, decision.wins) == ("inconclusive", "rows_scored", 0)
    assert decision.warnings == ("holdout_too_small", "many_failures")


@pytest.mark.model
def test_a_model_that_is_not_live_ends_the_comparison_at_once(serving: Settings, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{serving.serve_port}/v1"
    judge = open_judge(Settings(home=tmp_path, judge="openai", judge_url=url, judge_model="loop-unheard-of"))
    cases = [case_of(at) for at in range(3)]
    judged = judge_answers(judge, cases, both_of(cases))
    assert judged.ended is not None and "does not know the model" in judged.ended
    assert judged.not_reached == 3
    decision = decide(judged.frame, gone=0, ended_early=judged.ended, not_reached=judged.not_reached)
    assert decision.verdict == "inconclusive" and "no_judge" in decision.warnings
