"""Pipelines: listed, read, made, edited, deleted, trained now, and their attempts.

Belongs here: the body of a pipeline, in which absent, null and a value are three things. Does not belong here: what a
setting means and which values it takes (rules/pipelines.py), the row (rows/pipelines.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic.json_schema import SkipJsonSchema

from loop_dagster.api.bodies import Body, Revision, Sent, reader, schema_of
from loop_dagster.api.calls import WHOLE_READS, Caller, Reader, Unread, Writer, now
from loop_dagster.api.errors import NotBuilt
from loop_dagster.api.rows.attempts import pipeline_attempt
from loop_dagster.api.rows.models import usable_model
from loop_dagster.api.rows.pipelines import Status, find, find_all, in_full, listed, matches
from loop_dagster.errors import BadRequest, NotFound
from loop_dagster.opening import train_now
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.states import Outcome

router = APIRouter(prefix="/api/loop/pipelines", tags=["pipelines"])

#: Fields of a body that are settings of the same name.
_SETTINGS: Final = (
    *("use_case", "tags", "datasets", "conditions", "holdout", "training", "train_when", "promotion", "max_versions"),
)
#: Fields that null means nothing for.
_NEVER_NULL: Final = ("name", "model", "enabled", "holdout", "auto_scoring", "workspace_id", "expected_revision")
Limit = Annotated[int, Query(ge=1, le=100)]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]


class ModelRef(Body):
    """The model to train, as GET /api/loop/models names it."""

    id: str


class AutoScoring(Body):
    """Whether the judge may score unreviewed samples."""

    enabled: bool


class PipelineBody(Body):
    """What a pipeline is made of or edited by. Settings are checked one by one when they are applied."""

    name: str | None = None
    use_case: str | None = None
    model: ModelRef | None = None
    challenger_model: Annotated[ModelRef | None, SkipJsonSchema()] = None  # described once it is built
    tags: list[str] | None = None
    train_when: dict[str, Any] | None = None
    promotion: dict[str, Any] | None = None
    holdout: dict[str, Any] | None = None
    max_versions: int | None = None
    enabled: bool | None = None
    training: dict[str, Any] | None = None
    datasets: list[str] | None = None
    conditions: dict[str, Any] | None = None
    auto_scoring: AutoScoring | None = None
    workspace_id: str | None = None

    def check(self, caller: Caller) -> None:
        """Raise BadRequest for a null that means nothing, NotBuilt for what cannot be done yet, NotFound."""
        for name in _NEVER_NULL:
            if name in self.model_fields_set and getattr(self, name) is None:
                raise BadRequest(f"{name} must not be null: leave it out to keep it.", field=name)
        if self.challenger_model is not None:
            raise NotBuilt("A second model (challenger_model)")
        if self.workspace_id is not None and self.workspace_id != caller.store.registry.workspace:
            raise NotFound("workspace", self.workspace_id)

    def settings(self) -> dict[str, Any]:
        """The settings that were sent, in the form that an edit takes."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SETTINGS if name in self.model_fields_set}
        if self.auto_scoring is not None:
            given["auto_scoring"] = self.auto_scoring.enabled
        return given


class PipelineEdit(PipelineBody):
    """An edit: only what is sent changes; `expected_revision` refuses it when somebody else saved meanwhile."""

    expected_revision: Revision | None = None


Created = Annotated[tuple[Sent, PipelineBody], Depends(reader(PipelineBody))]
Edited = Annotated[tuple[Sent, PipelineEdit], Depends(reader(PipelineEdit))]


@router.get("")
def list_pipelines(
    caller: Reader,
    limit: Limit = 100,
    offset: Offset = 0,
    q: Annotated[str | None, Query(max_length=200)] = None,
    status: Status | None = None,
) -> dict[str, Any]:
    """The workspace's pipelines, the newest first, a page at a time."""
    store = caller.store
    found = [one for one in find_all(store) if (not q or matches(one, q)) and (status is None or one.is_in(status))]
    page = found[offset : offset + limit]
    moment = now()
    with WHOLE_READS:
        keys = store.samples.keys().held() if len(page) > 1 else store.samples.keys()
        rows = [listed(store, one, moment, keys) for one in page]
    return {"pipelines": rows, "total": len(found), "truncated": offset + len(page) < len(found)}


@router.post("", status_code=201, openapi_extra=schema_of(PipelineBody))
def create_pipeline(caller: Writer, body: Created) -> JSONResponse:
    """Make a pipeline: its tag, its source, its live name `loop-<tag>`."""
    sent, wanted = body

    def write() -> dict[str, Any]:
        wanted.check(caller)
        if wanted.name is None or wanted.model is None:
            missing = "name" if wanted.name is None else "model"
            raise BadRequest(f"{missing} is needed.", field=missing)
        store = caller.store
        settings = PipelineSettings.from_json(wanted.settings())
        base = usable_model(store, wanted.model.id)
        made = store.pipelines.create(
            wanted.name,
            model_id=base.model_id,
            model_digest=base.digest,
            settings=settings,
            enabled=wanted.enabled is not False,
            now=now(),
        )
        return {"pipeline": in_full(store, find(store, made.pipeline_id), now())}

    return caller.once(sent, write, status=201)


@router.get("/{pipeline_id}")
def get_pipeline(caller: Reader, pipeline_id: str) -> dict[str, Any]:
    """One pipeline with what its next attempt has and needs, counted now."""
    return {"pipeline": in_full(caller.store, find(caller.store, pipeline_id), now())}


@router.put("/{pipeline_id}", openapi_extra=schema_of(PipelineEdit))
def update_pipeline(caller: Writer, pipeline_id: str, body: Edited) -> JSONResponse:
    """Change what is sent and nothing else; every change makes a new revision."""
    sent, wanted = body

    def write() -> dict[str, Any]:
        store = caller.store
        found = find(store, pipeline_id).pipeline
        wanted.check(caller)
        changed = wanted.model is not None and wanted.model.id.casefold() != found.model_id.casefold()
        base = usable_model(store, wanted.model.id) if wanted.model is not None and changed else None
        store.pipelines.edit(
            found.pipeline_id,
            settings=wanted.settings(),
            name=wanted.name,
            model_id=base.model_id if base else None,
            model_digest=base.digest if base else None,
            enabled=wanted.enabled,
            expected_revision=wanted.expected_revision,
            now=now(),
        )
        return {"pipeline": in_full(store, find(store, found.pipeline_id), now())}

    return caller.once(sent, write)


@router.delete("/{pipeline_id}")
def delete_pipeline(caller: Writer, pipeline_id: str, sent: Unread) -> JSONResponse:
    """Delete a pipeline: its attempt is cancelled, its live name stops, its samples stay, its name stays taken."""

    def write() -> dict[str, Any]:
        gone = caller.store.pipelines.delete(find(caller.store, pipeline_id).pipeline.pipeline_id, now=now())
        return {
            "deleted": True,
            "rule_id": gone.pipeline.pipeline_id,
            "retained_name": gone.pipeline.name,
            "cancelled_run_id": gone.cancelled_run_id,
        }

    return caller.once(sent, write)


@router.post("/{pipeline_id}/run")
def run_pipeline(caller: Writer, pipeline_id: str, sent: Unread) -> JSONResponse:
    """Train now: skips the schedule and the wait after a failure, never the minimum."""

    def write() -> dict[str, Any]:
        store = caller.store
        pipeline = find(store, pipeline_id).pipeline
        train_now(store, pipeline, now())
        return {"pipeline": in_full(store, find(store, pipeline.pipeline_id), now())}

    return caller.once(sent, write)


@router.get("/{pipeline_id}/attempts")
def list_attempts(
    caller: Reader,
    pipeline_id: str,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    offset: Offset = 0,
    result: Outcome | None = None,
    model: Literal["main", "second"] | None = None,
) -> dict[str, Any]:
    """A pipeline's attempts, the newest first, a page at a time; `total` follows the filters."""
    found = find(caller.store, pipeline_id)
    rows = [pipeline_attempt(attempt, found.pipeline) for attempt in reversed(found.attempts)]
    rows = [row for row in rows if is_result(row["outcome"], result) and model in (None, row["model_role"])]
    return {"attempts": rows[offset : offset + limit], "total": len(rows)}


def is_result(outcome: str, wanted: str | None) -> bool:
    """Whether a list filtered by a result shows it; what waits for a person is still running."""
    return wanted in (None, outcome) or (wanted == "running" and outcome == "waiting_for_review")
