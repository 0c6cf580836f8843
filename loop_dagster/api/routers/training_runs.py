"""Attempts of every pipeline: listed, read with timeline and bars, their curve, and what a person decides about one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from loop_dagster import deciding
from loop_dagster.api.bodies import Body, Revision, Sent, reader, schema_of
from loop_dagster.api.calls import Caller, Reader, Unread, Writer, now
from loop_dagster.api.errors import CurveUnavailable, NotBuilt
from loop_dagster.api.routers.pipelines import is_result
from loop_dagster.api.rows.attempts import attempt_of, run, run_answer, run_summary
from loop_dagster.api.rows.pipelines import find
from loop_dagster.errors import LakeUnreadable, RevisionMismatch
from loop_dagster.report_data import training_of
from loop_dagster.report_wire import curve_row
from loop_dagster.rules.states import Outcome, TrainingRunState
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt

router = APIRouter(prefix="/api/loop/training-runs", tags=["training runs"])


class Promote(Body):
    """`force` lets an inconclusive one go live; `expected_revision` refuses when the pipeline was saved meanwhile."""

    expected_revision: Revision | None = None
    force: bool | None = None


class Because(Body):
    """Why; it is checked and not kept, since a timeline holds no words of a person."""

    reason: Annotated[str, Field(max_length=2_000)] | None = None


Reasoned = Annotated[tuple[Sent, Because], Depends(reader(Because))]


@router.get("")
def list_training_runs(
    caller: Reader,
    rule_id: str | None = None,
    state: TrainingRunState | None = None,
    result: Outcome | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> dict[str, Any]:
    """Every pipeline's attempts, the newest first, a page at a time; `total` follows the filters."""
    store = caller.store
    chosen = store.pipelines.list() if rule_id is None else [find(store, rule_id).pipeline]
    known = {one.pipeline_id: one for one in chosen}
    wanted = [one for one in store.attempts.list() if one.pipeline_id in known and state in (None, one.state)]
    rows = [run_summary(store, attempt, known[attempt.pipeline_id]) for attempt in reversed(wanted)]
    rows = [row for row in rows if is_result(row["attempt"]["outcome"], result)]
    return {"runs": rows[offset : offset + limit], "total": len(rows)}


@router.get("/{run_id}")
def get_training_run(caller: Reader, run_id: str) -> dict[str, Any]:
    """One attempt with its timeline, its bars, and what the caller may do with it now."""
    return run_answer(caller, *attempt_of(caller.store, run_id))


@router.get("/{run_id}/training-curve")
def get_training_curve(caller: Reader, run_id: str) -> dict[str, Any]:
    """Losses step by step, every check among them, and the step that was kept."""
    attempt, _pipeline = attempt_of(caller.store, run_id)
    try:
        return curve_row(attempt.run_id, training_of(caller.store, attempt))
    except LakeUnreadable:
        raise CurveUnavailable(attempt.key) from None


@router.post("/{run_id}/promote", openapi_extra=schema_of(Promote, needed=False))
def promote(
    caller: Writer, run_id: str, body: Annotated[tuple[Sent, Promote], Depends(reader(Promote))]
) -> JSONResponse:
    """Approve an attempt that waits for a decision; it goes live once the daemon has loaded it."""
    sent, wanted = body

    def decide(attempt: Attempt, pipeline: Pipeline) -> Attempt:
        if wanted.expected_revision not in (None, pipeline.revision):
            raise RevisionMismatch(pipeline.pipeline_id, wanted.expected_revision or 0, pipeline.revision)
        return deciding.approve(caller.store, attempt, force=wanted.force is True, now=now(), actor=caller.actor)

    return _act(caller, run_id, sent, decide)


@router.post("/{run_id}/reject", openapi_extra=schema_of(Because, needed=False))
def reject(caller: Writer, run_id: str, body: Reasoned) -> JSONResponse:
    """Close an attempt that waits for a decision; what is live stays."""

    def decide(attempt: Attempt, _pipeline: Pipeline) -> Attempt:
        return deciding.reject(caller.store, attempt, now=now(), actor=caller.actor)

    return _act(caller, run_id, body[0], decide)


@router.post("/{run_id}/cancel", openapi_extra=schema_of(Because, needed=False))
def cancel(caller: Writer, run_id: str, body: Reasoned) -> JSONResponse:
    """Stop an attempt that is under way; its samples go to the next one."""

    def decide(attempt: Attempt, _pipeline: Pipeline) -> Attempt:
        said = "Cancelled through the API."
        return caller.store.attempts.request_cancel(attempt.run_id, now=now(), sentence=said, actor=caller.actor)

    return _act(caller, run_id, body[0], decide)


@router.post("/{run_id}/retest", status_code=202)
def retest(caller: Writer, run_id: str, sent: Unread) -> JSONResponse:
    """Compare an attempt that trained and was never tested once more, with what is live now."""

    def decide(attempt: Attempt, _pipeline: Pipeline) -> Attempt:
        return deciding.test_again(caller.store, attempt, now=now(), actor=caller.actor)

    return _act(caller, run_id, sent, decide, status=202)


@router.post("/{run_id}/rollback", include_in_schema=False)  # described once it is built
def rollback(caller: Writer, run_id: str, _body: Reasoned) -> JSONResponse:
    """Undo a promotion; not built in this version."""
    attempt_of(caller.store, run_id)
    raise NotBuilt("Rollback")


def _act(
    caller: Caller, run_id: str, sent: Sent, decide: Callable[[Attempt, Pipeline], Attempt], *, status: int = 200
) -> JSONResponse:
    """Do what a person decided, once, and answer the attempt as it is then (`TrainingRunActionResponse`)."""

    def write() -> dict[str, Any]:
        attempt, pipeline = attempt_of(caller.store, run_id)
        return {"run": run(caller.store, decide(attempt, pipeline), pipeline), "serving": None}

    return caller.once(sent, write, status=status)
