"""The workspace as a whole: what there is, and which models can be trained."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from loop_dagster.api.calls import WHOLE_READS, Reader, now
from loop_dagster.api.rows import history as history_rows
from loop_dagster.api.rows import models as model_rows
from loop_dagster.api.rows import stats as stats_rows
from loop_dagster.api.rows.pipelines import find, find_all

router = APIRouter(prefix="/api/loop", tags=["workspace"])


@router.get("/stats")
def stats(caller: Reader) -> dict[str, Any]:
    """How many samples there are, what people said of them, and what the pipelines are doing."""
    with WHOLE_READS:
        return {"stats": stats_rows.stats(caller.store, now())}


@router.get("/metrics/history")
def metrics_history(
    caller: Reader,
    rule_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 200,
    days: Annotated[int, Query(ge=1, le=365)] = 90,
) -> dict[str, Any]:
    """Every attempt as a point, the oldest first, and each day's feedback and samples."""
    store = caller.store
    one = None if rule_id is None else find(store, rule_id)
    return history_rows.history(store, [one] if one else find_all(store), one, now(), limit=limit, days=days)


@router.get("/models")
def models(caller: Reader) -> dict[str, Any]:
    """Base models that a pipeline can train here, those that are known and cannot be used, and the fixed minimums."""
    usable, unusable = model_rows.offered(caller.store)
    return {"models": usable, "unavailable": unusable, "floors": model_rows.floors()}
