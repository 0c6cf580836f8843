from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import psutil
import pytest

from loop_dagster.errors import ChildFailed
from loop_dagster.models import child
from loop_dagster.models.child import LeaseRef
from loop_dagster.store.leases import Leases
from loop_dagster.store.registry import Registry

#: A child as they all are, with nothing to compute. It says what it is told to say, or works until it is ended.
PROGRAM = """
import sys, time
from dataclasses import dataclass
from loop_dagster.errors import BadRequest
from loop_dagster.models import child

@dataclass(frozen=True, kw_only=True)
class Job:
    work_dir: str
    how: str = "well"
    seed: int = 0
    lease: child.LeaseRef | None = None

@dataclass(frozen=True)
class Result:
    steps: int

def work(job, reporter):
    if job.how == "refused":
        raise BadRequest("No such thing; name another.")
    if job.how == "broken":
        raise ValueError("secret-77 of a sample")
    if job.how == "full":
        raise OSError(28, "No space left on device")
    for step in range(3 if job.how == "well" else 10_000):
        if job.how != "deaf":
            reporter.check()
        reporter.report(step, 3, loss=0.5, force=True)
        time.sleep(0.02)
    return Result(3)

sys.exit(child.run(Job, work))
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    work_dir: str
    how: str = "well"
    seed: int = 0
    lease: LeaseRef | None = None


@dataclass(frozen=True)
class Result:
    steps: int


def start(tmp_path: Path, how: str = "well", lease: LeaseRef | None = None) -> subprocess.Popen[str]:
    path = child.write_job(tmp_path / "job.json", Job(work_dir=str(tmp_path / "w"), how=how, lease=lease))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)],
        env={**os.environ, **child.child_env()},
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_progress(tmp_path: Path) -> None:
    deadline = time.monotonic() + 30
    while not (tmp_path / "w" / "progress.json").exists():
        assert time.monotonic() < deadline, "the child never began"
        time.sleep(0.02)


def test_a_child_leaves_its_result_and_its_progress(tmp_path: Path) -> None:
    process = start(tmp_path)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 0
    assert child.read_result(Result, tmp_path / "w") == Result(3)
    progress = json.loads((tmp_path / "w" / "progress.json").read_text())
    assert (progress["done"], progress["total"], progress["loss"]) == (2, 3, 0.5)
    assert "step 2 of 3: loss 0.5" in said


@pytest.mark.parametrize(
    ("how", "status", "code", "said"),
    [
        ("refused", 2, "BAD_REQUEST", "No such thing; name another."),
        ("broken", 1, "CHILD_FAILED", "ValueError at"),
        ("full", 1, "CHILD_FAILED", "No space left"),
    ],
)
def test_a_failure_is_told_by_code_and_sentence_without_any_text_of_a_sample(
    tmp_path: Path, how: str, status: int, code: str, said: str
) -> None:
    process = start(tmp_path, how)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == status
    with pytest.raises(ChildFailed, match=said) as failure:
        child.read_result(Result, tmp_path / "w")
    assert failure.value.code == code
    assert "secret-77" not in err + str(failure.value)


def test_a_killed_child_is_told_apart(tmp_path: Path) -> None:
    process = start(tmp_path, "long")
    wait_for_progress(tmp_path)
    process.kill()
    process.communicate(timeout=30)
    with pytest.raises(ChildFailed) as failure:
        child.read_result(Result, tmp_path / "w")
    assert failure.value.code == "CHILD_ENDED"


@pytest.mark.parametrize(("how", "sign"), [("long", signal.SIGTERM), ("long", signal.SIGINT), ("deaf", signal.SIGTERM)])
def test_a_signal_ends_it_within_seconds_also_when_the_work_never_looks(
    tmp_path: Path, sign: signal.Signals, how: str
) -> None:
    process = start(tmp_path, how)
    wait_for_progress(tmp_path)
    process.send_signal(sign)
    asked = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - asked < 10
    assert process.returncode == child.EXIT_STOPPED
    with pytest.raises(ChildFailed) as failure:
        child.read_result(Result, tmp_path / "w")
    assert failure.value.code == "STOPPED"


def lease_in(tmp_path: Path) -> tuple[Leases, LeaseRef]:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    registry = Registry(url, "default")
    registry.migrate()
    leases = Leases(registry)
    held = leases.take("attempt/a1")
    return leases, LeaseRef(registry_url=url, workspace="default", name=held.name, token=held.token)


def test_a_child_beats_its_lease(tmp_path: Path) -> None:
    leases, ref = lease_in(tmp_path)
    before = leases.find(ref.name)
    process = start(tmp_path, lease=ref)
    process.communicate(timeout=30)
    after = leases.find(ref.name)
    assert process.returncode == 0
    assert before is not None
    assert after is not None
    assert after.heartbeat_at > before.heartbeat_at


@pytest.mark.parametrize("how", ["long", "deaf"])
def test_a_child_that_lost_its_lease_ends_at_once(tmp_path: Path, how: str) -> None:
    leases, ref = lease_in(tmp_path)
    process = start(tmp_path, how, ref)
    wait_for_progress(tmp_path)
    leases.revoke(ref.name)
    lost = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - lost < 5
    assert process.returncode == child.EXIT_LEASE_LOST
    with pytest.raises(ChildFailed) as failure:
        child.read_result(Result, tmp_path / "w")
    assert failure.value.code == "LEASE_LOST"


def test_a_child_without_its_lease_never_begins(tmp_path: Path) -> None:
    leases, ref = lease_in(tmp_path)
    leases.revoke(ref.name)
    process = start(tmp_path, "long", ref)
    process.communicate(timeout=30)
    assert process.returncode == child.EXIT_LEASE_LOST
    assert not (tmp_path / "w" / "progress.json").exists()


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    path = child.write_job(tmp_path / "job.json", Job(work_dir=str(tmp_path / "w"), how="deaf"))
    between = (
        "import os, subprocess, sys, time; from loop_dagster.models.child import child_env;"
        "p = subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]], env={**os.environ, **child_env()});"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", between, PROGRAM, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for_progress(tmp_path)
    parent.kill()
    parent.communicate()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=10)
    assert not psutil.pid_exists(pid)


def test_a_child_whose_parent_was_gone_before_it_began_ends_and_one_of_another_machine_works_on(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(30)
    path = child.write_job(tmp_path / "job.json", Job(work_dir=str(tmp_path / "w"), how="deaf"))
    command, env = [sys.executable, "-c", PROGRAM, str(path)], {**os.environ, **child.child_env()}
    here = subprocess.run(command, env={**env, "LOOP_PARENT": f"{socket.gethostname()}:{gone.pid}"}, check=False)
    assert here.returncode == child.EXIT_STOPPED
    child.write_job(path, Job(work_dir=str(tmp_path / "w")))
    there = subprocess.run(command, env={**env, "LOOP_PARENT": f"a-pod:{gone.pid}"}, check=False)
    assert there.returncode == 0


def test_a_child_of_dagster_speaks_through_its_pipes(tmp_path: Path) -> None:
    path = child.write_job(tmp_path / "job.json", Job(work_dir=str(tmp_path / "w")))

    @dg.asset(required_resource_keys={"pipes"})
    def adapter(context):  # type: ignore[no-untyped-def]  # string annotations break Dagster's context
        context.resources.pipes.run(
            context=context, command=[sys.executable, "-c", PROGRAM, str(path)], env=child.child_env()
        )
        return dg.MaterializeResult(metadata={"steps": child.read_result(Result, tmp_path / "w").steps})

    with dg.DagsterInstance.ephemeral() as instance:
        run = dg.materialize([adapter], resources={"pipes": dg.PipesSubprocessClient()}, instance=instance)
        assert run.success
        said = [entry.user_message for entry in instance.all_logs(run.run_id)]
    assert any("step 2 of 3: loss 0.5" in line for line in said)


def test_a_job_survives_the_trip_through_json(tmp_path: Path) -> None:
    job = Job(work_dir="w", lease=LeaseRef(registry_url="sqlite:///x", workspace="d", name="n", token="t"))
    data = json.loads(child.write_job(tmp_path / "job.json", job).read_text())
    assert child.from_json(Job, data) == job
    with pytest.raises(TypeError, match="no field colour"):
        child.from_json(Job, {**data, "colour": 1})
