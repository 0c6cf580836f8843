"""Routes of the API that this version does not have: each answers 501 NOT_BUILT to who could use it.

Belongs here: their addresses, until a router of their own has them. docs/coverage.md is made from this list.
"""

from __future__ import annotations

from typing import Annotated, Final, NoReturn

from fastapi import APIRouter, Depends

from loop_dagster.api.calls import Caller, needs
from loop_dagster.api.errors import NotBuilt
from loop_dagster.store.keys import Scope

#: Address → its methods.
ADDRESSES: Final = {
    "/api/loop/pipelines/{pipeline_id}/benchmarks": ("GET", "POST"),
    "/api/loop/pipelines/{pipeline_id}/benchmarks/{benchmark_id}": ("PUT", "DELETE"),
    "/api/loop/pipelines/{pipeline_id}/live/deployments": ("GET",),
    "/api/loop/pipelines/{pipeline_id}/live/deployment": ("POST",),
    "/api/loop/benchmarks": ("GET", "POST"),
    "/api/loop/benchmarks/{benchmark_id}": ("GET",),
    "/api/loop/benchmarks/{benchmark_id}/items": ("GET",),
    "/api/loop/benchmarks/{benchmark_id}/history": ("GET",),
    "/api/loop/benchmarks/{benchmark_id}/questions": ("GET",),
    "/api/loop/benchmarks/{benchmark_id}/retire": ("POST",),
    "/api/loop/benchmark-runs/{benchmark_run_id}": ("GET",),
    "/api/loop/benchmark-runs/{benchmark_run_id}/items": ("GET",),
}

router = APIRouter(include_in_schema=False)


def _add(path: str, method: str) -> None:
    scope: Scope = "loop:read" if method == "GET" else "loop:write"

    allowed = needs(scope, any_parameters=True)  # which ones such a route will take is not told here

    def refuse(_caller: Annotated[Caller, Depends(allowed)]) -> NoReturn:
        raise NotBuilt(f"{method} {path}")

    # The dependency is a local name, which an annotation kept as text cannot find.
    refuse.__annotations__["_caller"] = Annotated[Caller, Depends(allowed)]
    router.add_api_route(path, refuse, methods=[method], response_model=None)


for _path, _methods in ADDRESSES.items():
    for _method in _methods:
        _add(_path, _method)
