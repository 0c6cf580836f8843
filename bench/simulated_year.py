"""A busy pipeline's year in some minutes: what grows with it, and what stays bounded.

Run: `python -m bench.simulated_year [--samples 1000000] [--attempts 50]`. Every week of the year brings its share of
samples through the bulk lane, an intake run, an attempt through the real jobs and a round of upkeep, under a clock that
the script holds. Real are store, rules, assets, jobs, the reference judge and Dagster's instance; the child processes
that touch weights are stand-ins that answer at once. Written down are, for the first, middle and last attempt: seconds
of a sensor tick that counts everything and of one without news, disk by part, runs kept, memory of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg

import assets.adapter
import assets.comparison
import assets.decisions
import assets.intake
import assets.lengths
import assets.training_set
import assets.upkeep
import assets.version
import sensors.upkeep
from bench.table import Line, record
from loop_dagster.definitions import build_defs
from loop_dagster.models.base import resolve
from loop_dagster.models.child import write_atomic
from loop_dagster.opening import Opened, fingerprint, look
from loop_dagster.settings import Settings
from loop_dagster.store.importing import import_rows
from loop_dagster.store.intake import lake_lease
from loop_dagster.store.open import Store, open_store
from loop_dagster.tables import SAMPLES
from resources import StoreResource

YEAR = timedelta(days=365)
CLOCKED = (
    assets.adapter,
    assets.comparison,
    assets.decisions,
    assets.intake,
    assets.lengths,
    assets.training_set,
    assets.upkeep,
    assets.version,
    sensors.upkeep,
)
TESTS = Path(__file__).resolve().parent.parent / "tests" / "models"


class Clock:
    """The time of the simulation."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


class StandIns(dg.PipesSubprocessClient):
    """Leaves what a child would leave: an adapter of some bytes, right answers from the candidate, none counted."""

    def run(self, *, context: Any, command: Any, env: Any = None, **_: Any) -> Any:  # type: ignore[override]
        job = json.loads(Path(command[-1]).read_text())
        module = next(word for word in command if word.startswith("loop_dagster.models.")).rpartition(".")[2]
        write_atomic(Path(job["work_dir"]) / "result.json", getattr(self, module)(job))

    def train(self, job: dict[str, Any]) -> dict[str, Any]:
        out = Path(job["out_dir"])
        out.mkdir(parents=True, exist_ok=True)
        (out / "adapter_model.safetensors").write_bytes(os.urandom(1 << 16))
        (out / "adapter_config.json").write_text("{}")
        rows = Path(job["rows_path"]).read_text().count("\n")
        curve = [{"step": step, "train_loss": 1 / step, "check_loss": 1 / step} for step in range(1, 201)]
        return {
            "adapter_dir": str(out),
            "planned_steps": 200,
            "trained_steps": 200,
            "kept_step": 200,
            "early_stopped": False,
            "dtype": "float32",
            "precision": "stand-in",
            "packed": False,
            "train_rows": rows,
            "check_rows": 0,
            "tokens": rows,
            "seconds": 1.0,
            "train_loss": 0.1,
            "check_loss": 0.1,
            "curve": curve,
            "left_out": [],
            "peak_rss": 0,
        }

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        rng = random.Random(job["seed"])
        count = 0
        with Path(job["out"]).open("w") as out:
            for line in Path(job["questions"]).read_text().splitlines():
                row = json.loads(line)
                asked = json.loads(row["messages"])[-1]["content"]
                right = asked.replace("Where is parcel ", "Parcel ").replace("?", " is on its way.")
                for side, share in (("candidate", 0.8), ("incumbent", 0.5)):
                    said = json.dumps({"role": "assistant", "content": right if rng.random() < share else "No idea."})
                    answer = {"sample_id": row["sample_id"], "side": side, "answer": said, "finish": "stop"}
                    out.write(json.dumps({**answer, "prompt_tokens": 9, "answer_tokens": 9}) + "\n")
                    count += 1
        return {
            "rows": count,
            "kept": 0,
            "finishes": {},
            "answer_tokens": count,
            "seconds": 1.0,
            "dtype": "float32",
            "device": "cpu",
        }


@dataclass(frozen=True)
class Week:
    """What was measured after one attempt."""

    attempt: int
    samples: int
    tick_s: float
    idle_ms: float
    disk_mb: dict[str, float]
    runs: int
    memory_mb: float
    attempt_s: float


def conversations(start: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(start, start + count):
        yield {"prompt": f"Where is parcel {number}?", "completion": f"Parcel {number} is on its way.", "label": True}


def bring(store: Store, tag: str, start: int, count: int, now: datetime) -> None:
    found = import_rows(
        store.lake,
        list(conversations(start, count)),
        source=tag,
        now=now,
        labels=[tag],
        import_id=f"week-{start}",
        hold=lambda: lake_lease(store, "simulation"),
    )
    assert found.complete
    assert found.imported == count


def run_job(defs: dg.Definitions, instance: dg.DagsterInstance, name: str, key: str | None = None) -> None:
    done = defs.resolve_job_def(name).execute_in_process(instance=instance, partition_key=key)
    assert done.success, name


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def simulate(home: Path, model: Path, samples: int, attempts: int) -> list[Week]:
    store = open_store(Settings(home=home))
    start = datetime.now(UTC) - YEAR
    clock = Clock(start)
    for module in CLOCKED:
        module.utc_now = clock  # type: ignore[attr-defined]
    defs = build_defs({"store": StoreResource(home=str(home)), "children": StandIns()})
    digest = resolve(str(model), store.settings.models_dir).digest
    pipeline = store.pipelines.create("Busy", model_id=str(model), model_digest=digest, now=start)
    weeks = []
    share = samples // attempts
    dagster_home = home / "dagster"
    dagster_home.mkdir(parents=True)
    with dg.DagsterInstance.local_temp(str(dagster_home)) as instance:
        for number in range(attempts):
            clock.now = start + YEAR * number / attempts
            bring(store, pipeline.tag, number * share, share, clock.now)
            run_job(defs, instance, "intake")
            began = time.perf_counter()
            opened = look(store, store.pipelines.get(pipeline.tag), clock.now)
            tick = time.perf_counter() - began
            assert isinstance(opened, Opened), opened
            key = opened.attempt.key
            instance.add_dynamic_partitions("attempts", [key])
            began = time.perf_counter()
            for name in ("training", "comparison", "promotion"):
                run_job(defs, instance, name, key)
            seconds = time.perf_counter() - began
            run_job(defs, instance, "upkeep")
            began = time.perf_counter()
            for _ in range(20):
                list(fingerprint(store, clock.now))
            idle = (time.perf_counter() - began) / 20
            parts = ("lake", "artifacts", "dagster", "work")
            week = Week(
                attempt=number + 1,
                samples=store.lake.row_count(SAMPLES),
                tick_s=tick,
                idle_ms=idle * 1000,
                disk_mb={part: megabytes(home / part) for part in parts} | {"registry": _registry_mb(home)},
                runs=instance.get_runs_count(),
                memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                attempt_s=seconds,
            )
            weeks.append(week)
            print(line_of(week, store.attempts.get(key).state), flush=True)
    return weeks


def _registry_mb(home: Path) -> float:
    return sum(path.stat().st_size for path in home.glob("registry.db*")) / 1e6


def line_of(week: Week, state: str) -> str:
    disk = ", ".join(f"{part} {size:.0f}" for part, size in week.disk_mb.items())
    return (
        f"attempt {week.attempt:>3} {state:<9} {week.samples:>9,} samples  count {week.tick_s:5.2f} s  idle "
        f"{week.idle_ms:5.1f} ms  MB: {disk}  runs {week.runs}  peak {week.memory_mb:.0f} MB  "
        f"jobs {week.attempt_s:.1f} s"
    )


def main() -> None:
    """Simulate and hand in what must stay bounded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--attempts", type=int, default=50)
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    import tiny

    folder = Path(tempfile.mkdtemp(prefix="loop-year-"))
    try:
        model = tiny.tiny_model(folder / "model")
        weeks = simulate(folder / "home", model, options.samples, options.attempts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    last = weeks[-1]
    what = f"after {options.attempts} attempts on {options.samples:,} samples"
    disk = sum(last.disk_mb.values()) / 1e3
    parts = ", ".join(f"{part} {size:.0f} MB" for part, size in last.disk_mb.items())
    for line in (
        Line(what=f"count {what}", got=last.tick_s, aim=5, unit="s", better="lower", detail="the sensor's budget"),
        Line(what=f"tick without news {what}", got=last.idle_ms, aim=50, unit="ms", better="lower"),
        Line(what=f"disk {what}", got=disk, aim=5, unit="GB", better="lower", detail=parts),
        Line(what=f"runs kept {what}", got=last.runs, aim=4 * options.attempts, unit="runs", better="lower"),
        Line(what=f"memory {what}", got=last.memory_mb / 1e3, aim=4, unit="GB", better="lower", detail="peak"),
    ):
        record(line)


if __name__ == "__main__":
    main()
