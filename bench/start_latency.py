"""From the 1,100th sample to a run that has started, with a real daemon, at 1 and at 50 pipelines.

Run: `python -m bench.start_latency [--pipelines 1 50]`. Every pipeline has 1,099 good samples in the lake. The last one
of one pipeline is written to the inbox with its tag and verdict, as the API does; measured is from that write to the
moment at which the run of attempt 1 makes its first act, the claim. The attempt is cancelled then. Median of `--repeat`
such writes, each to another pipeline where there are several.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from uuid_utils import uuid7

from bench.table import Line, record
from loop_dagster.models.base import resolve
from loop_dagster.settings import Settings
from loop_dagster.store.intake import import_for_pipeline
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.pages import sample_row
from loop_dagster.store.pipelines import Pipeline

TESTS = Path(__file__).resolve().parent.parent / "tests" / "models"
AIM_S = 10.0


def fill(store: Store, model: Path, count: int, folder: Path) -> list[Pipeline]:
    """Pipelines with 1,099 good samples each."""
    digest = resolve(str(model), store.settings.models_dir).digest
    pipelines = []
    for number in range(count):
        pipeline = store.pipelines.create(f"Desk {number}", model_id=str(model), model_digest=digest)
        path = folder / f"{number}.jsonl"
        rows = ({"prompt": f"{number}: where is {n}?", "completion": f"{n} is on its way."} for n in range(1099))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        now = datetime.now(UTC)
        import_for_pipeline(store, path, pipeline, holder="bench", now=now, default_feedback="good")
        pipelines.append(pipeline)
    return pipelines


def write_last(store: Store, pipeline: Pipeline) -> float:
    """Write the 1,100th sample with its tag and a good verdict; returns when that was acknowledged."""
    now = datetime.now(UTC)
    row, _ = sample_row(
        source=pipeline.tag,
        identity=str(uuid7()),
        messages=[{"role": "user", "content": "And where is the last one?"}],
        answer={"role": "assistant", "content": "It is on its way as well."},
        tools=None,
        flag=None,
        now=now,
        expires_at=now + timedelta(days=30),
    )
    about = {"sample_id": row["sample_id"], "created_at": now}
    label = {"label_id": str(uuid7()), "label": pipeline.tag, "value": None, "parent": None, "removed": False}
    verdict = {"feedback_id": str(uuid7()), "verdict": "accepted", "origin": "here"}
    nothing = dict.fromkeys(("right_answer", "right_key", "right_bytes", "score", "reason"))
    store.inbox.put_sample(row, labels=[about | label], feedback=[about | verdict | nothing], now=now)
    return time.monotonic()


def started(store: Store, pipeline: Pipeline, patience_s: float = 120.0) -> float:
    """When the run of the pipeline's first attempt claimed it."""
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        for attempt in store.attempts.list(pipeline.pipeline_id):
            if store.attempts.claim(attempt.run_id, "training", 1) is not None:
                at = time.monotonic()
                store.attempts.request_cancel(attempt.run_id, now=datetime.now(UTC))
                return at
        time.sleep(0.02)
    raise SystemExit(f"no run of {pipeline.tag} started within {patience_s:.0f} s")


def measure(model: Path, pipelines: int, repeat: int) -> list[float]:
    """Seconds of up to `repeat` writes, each to another pipeline of one home."""
    folder = Path(tempfile.mkdtemp(prefix="loop-latency-"))
    store = open_store(Settings(home=folder / "home"))
    made = fill(store, model, max(pipelines, 1), folder)
    environment = {**os.environ, "LOOP_HOME": str(folder / "home"), "OMP_WAIT_POLICY": "PASSIVE"}
    daemon = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "loop_dagster.cli", "run", "--json"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(45.0)  # the daemon is up and has looked at everything once
        seconds = []
        for pipeline in made[:: max(1, len(made) // repeat)][:repeat]:
            seconds.append(started_after(store, pipeline))
            print(f"  {pipelines} pipelines: {seconds[-1]:.1f} s", flush=True)
            time.sleep(7.0)
        return seconds
    finally:
        daemon.terminate()
        daemon.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def started_after(store: Store, pipeline: Pipeline) -> float:
    written = write_last(store, pipeline)
    return started(store, pipeline) - written


def main() -> None:
    """Measure at each number of pipelines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, nargs="+", default=[1, 50])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    import tiny

    with tempfile.TemporaryDirectory() as name:
        model = tiny.tiny_model(Path(name) / "model")
        for pipelines in options.pipelines:
            seconds: list[float] = []
            while len(seconds) < options.repeat:  # with few pipelines in several homes
                seconds += measure(model, pipelines, options.repeat - len(seconds))
            got = statistics.median(seconds)
            what = f"1,100th sample to a started run, {pipelines} pipelines"
            print(f"{what}: {got:.1f} s (aim {AIM_S:.0f} s)")
            record(Line(what=what, got=got, aim=AIM_S, unit="s", better="lower", detail=f"median of {len(seconds)}"))


if __name__ == "__main__":
    main()
