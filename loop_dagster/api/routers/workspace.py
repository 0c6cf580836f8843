"""The workspace as a whole: what there is, and which models can be trained."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from loop_dagster.api.calls import Reader, now
from loop_dagster.api.rows import models as model_rows
from loop_dagster.api.rows import stats as stats_rows

router = APIRouter(prefix="/api/loop", tags=["workspace"])


@router.get("/stats")
def stats(caller: Reader) -> dict[str, Any]:
    """How many samples there are, what people said of them, and what the pipelines are doing."""
    return {"stats": stats_rows.stats(caller.store, now())}


@router.get("/models")
def models(caller: Reader) -> dict[str, Any]:
    """Base models that a pipeline can train here, those that are known and cannot be used, and the fixed minimums."""
    usable, unusable = model_rows.offered(caller.store)
    return {"models": usable, "unavailable": unusable, "floors": model_rows.floors()}
