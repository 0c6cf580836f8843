"""Real processes, killed with SIGKILL at seeded random moments, and what must hold afterwards.

Belongs here: one round of each kind of kill. `make chaos` makes 50 rounds of each, the tests a few. A round raises
AssertionError with its seed; the same seed kills at the same moment, though not at the same instruction.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import dagster as dg
import polars as pl
from homes import Home, Homes, kill

from loop_dagster.errors import MoveNotAllowed
from loop_dagster.rules.states import FLOW, TrainingRunState, reached, step_of
from loop_dagster.store.open import Store
from loop_dagster.tables import ADAPTERS, FEEDBACK, HOLDOUTS, LABELS, REPORTS, SAMPLES, TRAINING_SETS

Target = Literal["daemon", "worker", "child"]
#: What tells each kind of process apart in its command line.
MARKS: dict[Target, str] = {
    "daemon": "dagster._daemon",
    "worker": "multiprocessing.spawn",  # how a code server starts a run
    "child": "loop_dagster.models.",
}
_ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
OPEN = [status for status in dg.DagsterRunStatus if status not in _ENDED]
#: A whole attempt of the tiny model takes about this long on a machine that does nothing else.
ATTEMPT_S = 30.0
#: A step is given up for lost after a minute; this is ample for one lost step and the rest.
PATIENCE_S = 600.0
#: How long the child of a cancelled attempt may go on.
CANCEL_S = 15.0


def kill_in_an_attempt(homes: Homes, template: Home, target: Target, seed: int) -> str:
    """One attempt in which a daemon, run worker or child is killed once; returns what was killed when.

    Afterwards, without anybody's help but a daemon that is there: exactly one attempt and at most one version, every
    sample once, and every table of the attempt written by one try.
    """
    home = homes.copy(template, f"{target}-{seed}")
    done = kill_in(home, target, seed)
    homes.drop(home)
    return done


def kill_in(home: Home, target: Target, seed: int) -> str:
    """`kill_in_an_attempt` in a home of the caller's."""
    rng = random.Random(f"{target}-{seed}")
    before = _stored(home.store)
    running = home.start("run", "--until-idle", "--json")
    try:
        done = _kill_one(home, target, rng)
        _go_on(home, running)
    finally:
        home.end()
    store = home.store
    _one_attempt_and_no_more(store, f"{target} {seed} ({done})")
    assert _stored(store) == before, f"{target} {seed}: samples changed"
    return done


def cut_the_power(homes: Homes, template: Home, seed: int) -> str:
    """Everything of a home is killed at once: as `kill_in_an_attempt`, and no run without a process stays in the books.

    One that stayed would keep the machine from every later attempt.
    """
    rng = random.Random(f"power-{seed}")
    home = homes.copy(template, f"power-{seed}")
    before = _stored(home.store)
    running = home.start("run", "--until-idle", "--json")
    try:
        began = time.monotonic()
        _wait_for_a_moment(home, rng)
        wait = time.monotonic() - began
        [state] = [attempt.state for attempt in home.store.attempts.list()] or ["nothing"]
        home.end()
        running.wait()
        _go_on(home, running)
        home.start("run")
        deadline = time.monotonic() + PATIENCE_S
        while (left := _open_runs(home)) and time.monotonic() < deadline:
            time.sleep(1.0)
        assert not left, f"power {seed} (in {state}): {left} stay"
    finally:
        home.end()
    _one_attempt_and_no_more(home.store, f"power {seed} (in {state})")
    assert _stored(home.store) == before, f"power {seed}: samples changed"
    homes.drop(home)
    return f"all killed after {wait:.1f} s in {state}"


def _go_on(home: Home, *running: subprocess.Popen[str]) -> None:
    """Wait for the end of the attempt; where all daemons ended, one is started again, as a supervisor would."""
    deadline = time.monotonic() + PATIENCE_S
    while not _settled(home) and time.monotonic() < deadline:
        if all(one.poll() is not None for one in running):
            running = (home.start("run", "--until-idle", "--json"),)
        time.sleep(1.0)
    for one in running:
        one.wait(max(1.0, deadline - time.monotonic()))


def _open_runs(home: Home) -> list[str]:
    """Jobs of the runs that Dagster counts as not ended."""
    with dg.DagsterInstance.from_config(str(home.root / "dagster")) as instance:
        return [run.job_name for run in instance.get_runs(dg.RunsFilter(statuses=OPEN))]


def two_daemons(homes: Homes, template: Home, seed: int) -> str:
    """Two installations' worth of daemons on one home, one of them killed on the way: one attempt, one version."""
    rng = random.Random(f"two-{seed}")
    home = homes.copy(template, f"two-{seed}")
    before = _stored(home.store)
    both = [home.start("run", "--until-idle", "--json") for _ in range(2)]
    try:
        began = time.monotonic()
        while len(home.processes(MARKS["daemon"])) < 2 and time.monotonic() - began < ATTEMPT_S * 2:
            time.sleep(0.2)
        _wait_for_a_moment(home, rng, last="candidate_running")  # both end soon after the attempt
        daemons = home.processes(MARKS["daemon"])
        assert daemons, f"two daemons {seed}: both were gone before one could be killed"
        kill(rng.choice(daemons).pid)
        _go_on(home, *both)
    finally:
        home.end()
    _one_attempt_and_no_more(home.store, f"two daemons {seed}")
    assert _stored(home.store) == before, f"two daemons {seed}: samples changed"
    homes.drop(home)
    return f"{len(daemons)} daemons at once, one killed"


def cancel_in_an_attempt(homes: Homes, template: Home, seed: int) -> str:
    """An attempt that is cancelled in one of its states: it has ended at once, and so has its child within seconds."""
    rng = random.Random(f"cancel-{seed}")
    state = FLOW[seed % FLOW.index("promoted")]  # each in turn
    home = homes.copy(template, f"cancel-{seed}")
    running = home.start("run", "--until-idle", "--json")
    try:
        attempt, store = None, home.store
        give_up = time.monotonic() + PATIENCE_S
        while attempt is None and time.monotonic() < give_up:
            attempt = next((one for one in store.attempts.list() if FLOW.index(one.state) >= FLOW.index(state)), None)
            time.sleep(0.05)
        assert attempt is not None, f"cancel {seed}: {state} was never reached"
        time.sleep(rng.uniform(0.0, 2.0) if state in ("training", "candidate_running") else 0.0)
        try:
            store.attempts.request_cancel(attempt.run_id, now=datetime.now(UTC))
        except MoveNotAllowed:
            return f"{state}: the attempt was over before it could be cancelled"
        began = time.monotonic()
        while home.processes(MARKS["child"]) and time.monotonic() - began < CANCEL_S:
            time.sleep(0.1)
        took = time.monotonic() - began
        assert not home.processes(MARKS["child"]), f"cancel {seed} ({state}): its child runs {CANCEL_S:.0f} s later"
        running.wait(PATIENCE_S)
    finally:
        home.end()
    [after] = store.attempts.list()
    was = store.attempts.timeline(after.run_id)[-1].from_state
    assert after.state == "cancelled", f"cancel {seed} ({state}): {after.state}, {after.reason}"
    assert not store.versions.list(), f"cancel {seed} ({state}): a version went live"
    homes.drop(home)
    return f"cancelled in {was}; its child was gone {took:.1f} s later"


def kill_an_import(homes: Homes, seed: int, *, rows: int = 3_000) -> str:
    """An import that is killed and run again until it ends: every row once, with its label and its verdict."""
    rng = random.Random(f"import-{seed}")
    home = homes.new(f"import-{seed}")
    store = home.store
    store.pipelines.create("Kills", model_id="any")
    file = homes.folder / f"import-{seed}.jsonl"
    with file.open("w") as out:
        for number in range(rows):
            out.write(json.dumps({"prompt": f"Where is parcel {number}?", "completion": "On its way.", "label": True}))
            out.write("\n")
    # A new table's first page always lies before the end: so that no round goes by without a kill.
    span = 0.02 * rows / 250
    kills = 0
    while True:
        process = home.python("-c", _IMPORT, str(file), out=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n", f"import {seed} did not begin"
        try:
            process.wait(rng.uniform(0.0, span) + 0.3 * kills)  # longer each time: a slow machine ends it too
            break
        except subprocess.TimeoutExpired:
            kill(process.pid)
            process.wait()
            kills += 1
            store.leases.revoke("lake/default")  # as half a minute without a heartbeat would
    assert process.returncode == 0, f"import {seed} ended with {process.returncode}"
    assert kills, f"import {seed} was over before it could be killed"
    ids = store.lake.scan(SAMPLES).collect()
    assert (ids.height, ids["identity"].n_unique(), ids["position"].n_unique()) == (rows, rows, rows), seed
    for table in (LABELS, FEEDBACK):
        about = store.lake.scan(table).collect()["sample_id"]
        assert sorted(about) == sorted(ids["sample_id"]), f"import {seed}: {table.name}"
    file.unlink()
    homes.drop(home)
    return f"killed {kills} times"


#: Small pages, so that a kill can fall between many commits.
_IMPORT = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from loop_dagster.store.importing import import_file
from loop_dagster.store.intake import lake_lease
from loop_dagster.store.open import open_store
store = open_store()
hold = lambda: lake_lease(store, "chaos")
print("begins", flush=True)
result = import_file(
    Path(sys.argv[1]), store.lake, source="kills", labels=["kills"], now=datetime.now(UTC), hold=hold, page_rows=250
)
sys.exit(0 if result.complete else 1)
"""


def kill_a_drain(homes: Homes, seed: int, *, rows: int = 400) -> str:
    """Samples are written to the inbox while drains are killed: what was acknowledged is stored, once."""
    rng = random.Random(f"drain-{seed}")
    home = homes.new(f"drain-{seed}")
    store = home.store
    writer = home.python("-c", _WRITE, str(rows), str(seed), out=subprocess.PIPE)
    kills = 0
    while writer.poll() is None or store.inbox.pending().rows or store.inbox.unfinished() is not None:
        drainer = home.python("-c", _DRAIN)
        try:
            drainer.wait(rng.uniform(0.3, 2.0) + 0.5 * kills)
        except subprocess.TimeoutExpired:
            kill(drainer.pid)
            drainer.wait()
            kills += 1
            store.leases.revoke("lake/default")
    assert kills, f"drain {seed}: no drain was under way when it should be killed"
    assert writer.stdout is not None
    acknowledged = writer.stdout.read().split()
    stored = store.lake.scan(SAMPLES).collect()["sample_id"].to_list()
    assert sorted(stored) == sorted(acknowledged), (
        f"drain {seed}: {len(acknowledged)} acknowledged, {len(stored)} stored"
    )
    assert len(stored) == rows
    homes.drop(home)
    return f"killed {kills} times"


_WRITE = """
import random, sys, time
from datetime import UTC, datetime, timedelta
from loop_dagster.store.open import open_store
from loop_dagster.store.pages import sample_row
store, rng = open_store(), random.Random(sys.argv[2])
for number in range(int(sys.argv[1])):
    now = datetime.now(UTC)
    row, _ = sample_row(
        source="kills", identity=f"request-{number}", messages=[{"role": "user", "content": f"Question {number}?"}],
        answer={"role": "assistant", "content": "Yes."}, tools=None, flag=None, now=now, expires_at=now + timedelta(30),
    )
    print(store.inbox.put_sample(row, now=now).sample_id, flush=True)
    time.sleep(rng.uniform(0, 0.01))
"""
_DRAIN = """
from loop_dagster.store.intake import drain
from loop_dagster.store.open import open_store
drain(open_store(), holder="chaos")
"""


def template_home(homes: Homes, model: Path, conversations: Path) -> Home:
    """A home with a pipeline on `model` and 1,100 imported conversations, to be copied for every round."""
    home = homes.new("template")
    create = ("pipelines", "create", "--name", "Facts", "--model", str(model), "--epochs", "1", "--json")
    assert home.loop(*create) == 0
    assert home.loop("import", str(conversations), "--pipeline", "facts", "--default-feedback", "good", "--json") == 0
    return home


def _kill_one(home: Home, target: Target, rng: random.Random) -> str:
    """Wait for a random moment, then kill the first process of that kind that shows up."""
    began = time.monotonic()
    _wait_for_a_moment(home, rng, last="candidate_running" if target == "child" else "promoting")
    give_up = time.monotonic() + ATTEMPT_S * 4
    while time.monotonic() < give_up:
        for process in home.processes(MARKS[target]):
            state = ", ".join(attempt.state for attempt in home.store.attempts.active()) or "nothing"
            kill(process.pid)
            return f"{target} killed after {time.monotonic() - began:.1f} s in {state}"
        if _settled(home):
            return f"{target} was gone before it could be killed"
        time.sleep(0.2)
    return f"no {target} showed up"


def _wait_for_a_moment(home: Home, rng: random.Random, *, last: TrainingRunState = "promoting") -> None:
    """Half of the moments are told by the clock, half by a state up to `last`: the clock would miss the short ones."""
    if rng.random() < 0.5:
        time.sleep(rng.uniform(3.0, ATTEMPT_S))
        return
    goal = rng.choice(FLOW[: FLOW.index(last) + 1])
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up and not _settled(home):
        if any(reached(attempt.state, goal) for attempt in home.store.attempts.active()):
            break
        time.sleep(0.1)
    time.sleep(rng.uniform(0.0, 2.0))


def _settled(home: Home) -> bool:
    attempts = home.store.attempts.list()
    return bool(attempts) and all(step_of(attempt.state) is None for attempt in attempts)


def _stored(store: Store) -> list[tuple[Any, ...]]:
    """Every sample with how many labels and verdicts it has."""
    counts = [store.lake.scan(table).group_by("sample_id").len(table.name).collect() for table in (LABELS, FEEDBACK)]
    rows = store.lake.scan(SAMPLES).select("sample_id", "identity").collect()
    for count in counts:
        rows = rows.join(count, on="sample_id", how="left")
    return sorted(rows.rows())


def _one_attempt_and_no_more(store: Store, what: str) -> None:
    [attempt] = store.attempts.list()
    assert attempt.state in ("promoted", "rejected", "awaiting_review"), f"{what}: {attempt.state}, {attempt.reason}"
    assert attempt.reason, f"{what}: no sentence"
    assert (attempt.train_rows, attempt.holdout_rows) == (1000, 100), what
    versions = store.versions.list()
    assert len(versions) == (attempt.state == "promoted"), what
    mine = pl.col("attempt") == attempt.key
    written = {
        table.name: store.lake.scan(table).filter(mine).collect().height
        for table in (TRAINING_SETS, HOLDOUTS, ADAPTERS, REPORTS)
    }
    assert written == {"training_sets": 1000, "holdouts": 100, "adapters": 1, "reports": 1}, f"{what}: {written}"
    assert attempt.adapter_digest is not None
    store.artifacts.open(attempt.adapter_digest, verify=True)


Round = Callable[[int], str]
