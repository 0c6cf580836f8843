"""Puts the API together: one FastAPI app over the stores of an installation.

Belongs here: the app, its routers in order, its health. Does not belong here: any route with a body, any rule.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool

from loop_dagster.api import problems
from loop_dagster.api.bodies import defined
from loop_dagster.api.calls import Stores
from loop_dagster.api.captures import Captures
from loop_dagster.api.gateway.gateway import Gateway
from loop_dagster.api.routers import (
    comparing,
    configs,
    datasets,
    evaluations,
    feedback,
    gateway,
    imports,
    keys,
    not_built,
    pipelines,
    samples,
    training_runs,
    workspace,
)
from loop_dagster.store.open import Store, open_store

ROUTERS = (
    keys,
    workspace,
    samples,
    feedback,
    configs,
    imports,
    datasets,
    pipelines,
    comparing,
    training_runs,
    evaluations,
    gateway,
)
#: Looked at first: an app calls these with every answer that it gives.
OFTEN = (samples, feedback, gateway)
TITLE = "The loop's API"
#: How long a thread that computes, such as the gateway's recorder, may keep the one that answers from going on.
SWITCH_S: Final = 0.0005


def create_app(store: Store) -> FastAPI:
    """The API over these stores; a key decides in which workspace a call works."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await app.state.gateway.warm_up()
        yield
        await app.state.gateway.close()
        await run_in_threadpool(app.state.captures.close)
        app.state.stores.close()

    app = FastAPI(
        title=TITLE,
        version=version("loop-dagster"),
        lifespan=lifespan,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.state.stores = Stores(store)
    app.state.gateway = Gateway(app.state.stores)
    app.state.captures = Captures()
    problems.install(app)
    # What is not built stands before the rest: its fixed addresses would else read as ids of a built route. As routes
    # of the app itself, since one that is included is looked through twice for every call.
    rest = [one for one in ROUTERS if one not in OFTEN]
    for router in (*(one.router for one in OFTEN), not_built.router, *(one.router for one in rest), _health):
        app.router.routes.extend(router.routes)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]  # the way that FastAPI documents
    return app


def from_environment() -> FastAPI:
    """The API of the installation that the environment names: what each worker process starts with."""
    sys.setswitchinterval(SWITCH_S)
    app = create_app(open_store())
    # What is there from the start stays to the end: a collector that looked through it again and again would hold up
    # every call under way for a quarter of a second.
    gc.collect()
    gc.freeze()
    return app


_health = APIRouter(tags=["health"])


@_health.get("/health")
async def health() -> dict[str, str]:
    """Whether the process answers; it asks for no key and says nothing else."""
    return {"status": "ok"}


def _described(app: FastAPI) -> dict[str, Any]:
    """OpenAPI of the app: keys, and the one envelope of every failure in place of FastAPI's own."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        parts = found.setdefault("components", {})
        parts["securitySchemes"] = {
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "bearer": {"type": "http", "scheme": "bearer"},
        }
        schemas = parts.setdefault("schemas", {})
        schemas["Problem"] = _PROBLEM
        problem = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
        for path, operations in found["paths"].items():
            for operation in operations.values():
                defined(operation, schemas)
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {"description": "A failure", "content": problem}
                operation["security"] = [{"key": []}, {"bearer": []}] if path.startswith(("/api/", "/v1/")) else []
        app.openapi_schema = found
    return app.openapi_schema


_PROBLEM = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}
