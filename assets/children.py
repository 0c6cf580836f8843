"""Starts the child processes that touch weights, through Dagster Pipes, and reads what they left."""

import contextlib
from typing import Any, Literal, TypeVar

import dagster as dg
from dagster import DagsterPipesExecutionError

from assets.steps import StepRun
from loop_dagster.models.child import LeaseRef, child_env, command, read_result, write_job
from loop_dagster.processes import environment

R = TypeVar("R")


def lease_ref(step: StepRun) -> LeaseRef:
    """What a child needs to beat the step's lease and to notice that it is lost."""
    settings = step.store.settings
    return LeaseRef(
        registry_url=settings.registry, workspace=settings.workspace, name=step.lease.name, token=step.lease.token
    )


def run_child(
    context: dg.AssetExecutionContext,
    children: dg.PipesSubprocessClient,
    step: StepRun,
    *,
    module: Literal["train", "answer", "lengths"],
    job: Any,
    result: type[R],
) -> R:
    """Run one child to its end and return its result.

    Raises LeaseLost when the step was cancelled or taken over meanwhile, ChildFailed with the child's own sentence when
    it failed, or ChildFailed CHILD_ENDED when it was killed.
    """
    path = write_job(step.work_folder(module) / "job.json", job)
    # Its exit status says less than the result or error file that it leaves, which is read below in any case.
    with contextlib.suppress(DagsterPipesExecutionError):
        children.run(
            context=context,
            command=command(module, path),
            env={**environment(step.store.settings), **child_env()},
        )
    step.lease.check()
    return read_result(result, job.work_dir)
