"""What the loop itself costs: a sensor tick without news, and an attempt's time beside train, answer and judge.

Run: `python -m bench.loop_speed`. The attempt is a real one, with the daemon and the tests' tiny model, in a home of
its own; its timeline says how long it was in which state. The tick is the sensor `attempts` on that home, which looks
at the Delta versions and the registry, with the cursor of the tick before.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg

from bench.table import Line, record
from loop_dagster.definitions import build_defs
from resources import StoreResource
from sensors.attempts import attempts

TESTS = Path(__file__).resolve().parent.parent / "tests" / "models"
#: States in which a child trains or answers, or the judge is asked; everything else is the loop's own time.
WORK = ("training", "candidate_running", "evaluating")
TICKS = 50


def conversations(path: Path) -> None:
    """1,100 conversations that teach the tiny model something."""
    import tiny

    with path.open("w", encoding="utf-8") as file:
        for fact in tiny.facts(220, seed=1):
            for form in range(len(tiny.FORMS)):
                messages, answer = tiny.conversation(fact, form)
                file.write(json.dumps({"messages": [*messages, answer]}) + "\n")


def loop(home: Path, *arguments: str) -> Any:
    """One command of the command line, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "loop_dagster.cli", *arguments, "--json"],
        env={**os.environ, "LOOP_HOME": str(home), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def own_time(timeline: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds from opened to live, and those of them outside of train, answer and judge."""
    moments = [(datetime.fromisoformat(event["at"]), event["state"]) for event in timeline]
    spans = [(state, (after - at).total_seconds()) for (at, state), (after, _) in pairwise(moments)]
    whole = sum(seconds for _, seconds in spans)
    return whole, whole - sum(seconds for state, seconds in spans if state in WORK)


def tick_time(home: Path) -> float:
    """Median milliseconds of a tick without news."""
    resources = {"store": StoreResource(home=str(home))}
    definitions = build_defs()
    with dg.instance_for_test() as instance:
        cursor: str | None = None
        times = []
        for _ in range(TICKS):
            context = dg.build_sensor_context(
                instance=instance, cursor=cursor, resources=resources, definitions=definitions
            )
            began = time.perf_counter()
            found: Any = attempts(context)
            times.append(1000 * (time.perf_counter() - began))
            cursor = found.cursor
    return statistics.median(times[1:])


def main() -> None:
    """Run one attempt, then measure the tick on its home."""
    sys.path.insert(0, str(TESTS))
    import tiny

    with tempfile.TemporaryDirectory(prefix="loop-bench-") as folder:
        home, file = Path(folder) / "home", Path(folder) / "facts.jsonl"
        model = tiny.tiny_model(Path(folder) / "model")
        conversations(file)
        settings = ("--name", "Facts", "--model", str(model), "--epochs", "8", "--learning-rate", "0.005")
        loop(home, "pipelines", "create", *settings)
        loop(home, "import", str(file), "--pipeline", "facts", "--default-feedback", "good")
        ended = loop(home, "run", "--until-idle")["attempts"][0]
        shown = loop(home, "attempts", "show", ended["run_id"])
        whole, own = own_time(shown["timeline"])
        tick = tick_time(home)
    detail = f"opened to {ended['state']} in {whole:.0f} s"
    lines = [
        Line(what="attempt beside train, answer and judge", got=own, aim=30, unit="s", better="lower", detail=detail),
        Line(what="sensor tick without new data", got=tick, aim=50, unit="ms", better="lower", detail=f"{TICKS} ticks"),
    ]
    for line in lines:
        print(f"{line.what}: {line.got:.1f} {line.unit} (aim under {line.aim:g}); {line.detail}")
        record(line)


if __name__ == "__main__":
    main()
