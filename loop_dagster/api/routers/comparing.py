"""Attempts, and versions, side by side.

Belongs here: parameters. Does not belong here: rows and figures (rows/comparing.py).
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from loop_dagster.api.calls import Reader
from loop_dagster.api.rows.comparing import attempts_compared, versions_compared
from loop_dagster.api.rows.pipelines import find
from loop_dagster.rules.side_by_side import Direction

router = APIRouter(prefix="/api/loop/pipelines/{pipeline_id}", tags=["pipelines"])

Number = Annotated[int | None, Query(ge=1, le=2**31 - 1)]


@router.get("/attempts/compare")
def compare_attempts(
    caller: Reader,
    pipeline_id: str,
    a: Annotated[str, Query(max_length=80)],
    b: Annotated[str, Query(max_length=80)],
    direction: Annotated[Direction | None, Query(alias="filter")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> dict[str, Any]:
    """Two attempts of a pipeline side by side, and the held-back samples that both were scored on."""
    store = caller.store
    return attempts_compared(store, find(store, pipeline_id), a, b, direction=direction, limit=limit, offset=offset)


@router.get("/versions/compare")
def compare_versions(caller: Reader, pipeline_id: str, a: Number = None, b: Number = None) -> dict[str, Any]:
    """Every version's scores side by side, and on the questions that all of them can be measured on."""
    return versions_compared(caller.store, find(caller.store, pipeline_id), a, b)
