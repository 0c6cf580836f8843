"""Starts the child processes that touch weights, through Dagster Pipes, and reads what they left."""

import contextlib
from pathlib import Path
from typing import Any, Literal, TypeVar

import dagster as dg
from dagster._core.errors import DagsterPipesExecutionError  # not exported at the top

from assets.steps import StepRun
from loop_dagster.models.child import LeaseRef, child_env, command, read_result, write_job
from loop_dagster.processes import environment
from loop_dagster.settings import Settings

R = TypeVar("R")


def lease_ref(step: StepRun) -> LeaseRef:
    """What a child needs to beat the step's lease and to notice that it is lost."""
    settings = step.store.settings
    # No URL: it may hold a password, and the job is a file. The child has the installation's settings.
    return LeaseRef(registry_url="", workspace=settings.workspace, name=step.lease.name, token=step.lease.token)


def run_child(
    context: dg.AssetExecutionContext,
    children: dg.PipesSubprocessClient,
    settings: Settings,
    *,
    module: Literal["train", "answer", "lengths"],
    job: Any,
    result: type[R],
) -> R:
    """Run one child to its end and return its result.

    Raises ChildFailed with the child's own sentence when it failed, or CHILD_ENDED when it was killed. Whoever holds a
    lease looks at it next: a child that lost it ends as failed too.
    """
    path = write_job(Path(job.work_dir) / "job.json", job)
    # Its exit status says less than the result or error file that it leaves, which is read below in any case.
    with contextlib.suppress(DagsterPipesExecutionError):
        children.run(context=context, command=command(module, path), env={**environment(settings), **child_env()})
    return read_result(result, job.work_dir)


def run_step_child(
    context: dg.AssetExecutionContext,
    children: dg.PipesSubprocessClient,
    step: StepRun,
    *,
    module: Literal["train", "answer", "lengths"],
    job: Any,
    result: type[R],
) -> R:
    """`run_child` under the step's lease; raises LeaseLost when the step was cancelled or taken over meanwhile."""
    try:
        return run_child(context, children, step.store.settings, module=module, job=job, result=result)
    finally:
        step.lease.check()
