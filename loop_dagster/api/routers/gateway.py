"""The gateway's addresses: `POST /v1/chat/completions`, `POST /v1/messages`, `GET /v1/models`.

Belongs here: who may ask for which model. Does not belong here: passing calls on and recording them (api/gateway/).
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from loop_dagster.api.calls import Caller
from loop_dagster.api.errors import UnknownModel
from loop_dagster.api.gateway.calls import Call, read_call
from loop_dagster.api.gateway.gateway import Gateway
from loop_dagster.api.gateway.listing import list_models, one_model
from loop_dagster.api.gateway.passing import Passing
from loop_dagster.api.gateway.upstreams import LIVE, Shape, Target
from loop_dagster.errors import BadRequest, LiveUnavailable, NotFound, RegistryUnavailable

router = APIRouter(prefix="/v1", tags=["gateway"])

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}}}
            }
        },
    }
}


@router.post("/chat/completions", openapi_extra=_BODY, response_model=None)
async def chat_completions(request: Request) -> Response:
    """Ask a model in OpenAI's form, whole or as a stream; `loop-<tag>` asks a pipeline's live version."""
    return await _passed(request, "openai")


@router.post("/messages", openapi_extra=_BODY, response_model=None)
async def messages(request: Request) -> Response:
    """Ask a model in Anthropic's form, whole or as a stream."""
    return await _passed(request, "anthropic")


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """Every model that this key can ask: live versions, and what the upstreams say they have."""
    gateway = _gateway(request)
    return await list_models(gateway, await gateway.caller(request))


@router.get("/models/{model:path}")
async def model(request: Request, model: str) -> dict[str, Any]:
    """One model that this key can ask."""
    gateway = _gateway(request)
    return await one_model(gateway, await gateway.caller(request), model)


async def _passed(request: Request, shape: Shape) -> Response:
    gateway = _gateway(request)
    caller = await gateway.caller(request)
    call = await read_call(request, caller, shape)
    return Passing(gateway, call, await _target(gateway, call))


async def _target(gateway: Gateway, call: Call) -> Target:
    """The server that answers a call. Raises Forbidden, UnknownModel, NotFound, BadRequest, LiveUnavailable."""
    caller = call.caller
    if not call.model.startswith(LIVE):
        caller.must("serverless")
        target = gateway.upstreams.of(call.model)
        if target is None:
            raise UnknownModel(call.model)
        return target
    if call.shape == "anthropic":
        raise BadRequest(
            f"{LIVE} names answer at /v1/chat/completions alone; send the call there, in OpenAI's form.", field="model"
        )
    caller.must("deployments:read")
    await run_in_threadpool(_check_live, gateway, caller, call.model.removeprefix(LIVE))
    return gateway.upstreams.live


def _check_live(gateway: Gateway, caller: Caller, tag: str) -> None:
    try:
        if caller.store.versions.live(tag) is None:
            raise NotFound("live version", LIVE + tag)
    except RegistryUnavailable:
        pass  # the serving engine knows what was live last
    served = gateway.stores.home.settings.workspace
    if caller.workspace != served:
        raise LiveUnavailable(
            "the serving engine of this installation answers for another workspace",
            "Run one with LOOP_WORKSPACE set to this one",
        )


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway
