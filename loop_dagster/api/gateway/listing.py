"""The models that can be asked: live versions, names in the settings, and what upstreams list.

Belongs here: the list in the form that OpenAI's and Anthropic's clients both read. Does not belong here: asking them.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from typing import Any, Final

import httpx
from starlette.concurrency import run_in_threadpool

from loop_dagster.api.calls import Caller
from loop_dagster.api.errors import Forbidden
from loop_dagster.api.gateway.gateway import Gateway
from loop_dagster.api.gateway.upstreams import LIVE, Target
from loop_dagster.errors import NotFound
from loop_dagster.wire import timestamp

#: Seconds that an upstream may take for its list; one that takes longer is left out.
LIST_S: Final = 5.0


async def list_models(gateway: Gateway, caller: Caller) -> dict[str, Any]:
    """Every model that the caller may ask. An upstream that does not answer is named, and left out."""
    if not (caller.may("serverless") or caller.may("deployments:read")):
        raise Forbidden("The key lacks the scopes serverless and deployments:read. `loop keys create` makes one.")
    rows: dict[str, dict[str, Any]] = {}
    silent: list[str] = []
    if caller.may("deployments:read"):
        live = await run_in_threadpool(caller.store.versions.all_live)
        for tag, version in sorted(live.items()):
            rows[LIVE + tag] = _row(LIVE + tag, int(version.promoted_at.timestamp()), "loop")
    if caller.may("serverless"):
        servers = gateway.upstreams.servers()
        for target, listed in zip(servers, await asyncio.gather(*(_of(gateway, one) for one in servers)), strict=True):
            if listed is None:
                silent.append(target.name)
            for row in listed or ():
                mine = gateway.upstreams.of(row["id"])
                if mine is not None and mine.server == target.server:
                    rows.setdefault(row["id"], row)
        for name in gateway.upstreams.names():
            rows.setdefault(name, _row(name, 0, "upstream"))
    data = list(rows.values())
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    unreachable = [{"source": name, "message": "It did not list its models."} for name in silent]
    return {"object": "list", "data": data, "has_more": False, **ends, "usf_unreachable_sources": unreachable}


async def one_model(gateway: Gateway, caller: Caller, name: str) -> dict[str, Any]:
    """One of them. Raises NotFound."""
    for row in (await list_models(gateway, caller))["data"]:
        if row["id"] == name:
            found: dict[str, Any] = row
            return found
    raise NotFound("model", name)


async def _of(gateway: Gateway, target: Target) -> list[dict[str, Any]] | None:
    """What one upstream lists; None when it does not say."""
    headers = target.authorization("anthropic" if target.kind == "anthropic" else "openai")
    if target.kind == "anthropic":
        headers = [*headers, (b"anthropic-version", b"2023-06-01")]
    query = "limit=1000" if target.kind == "anthropic" else ""
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, LookupError, AttributeError):
        answered = await gateway.client(target).get(target.url("/models", query), headers=headers, timeout=LIST_S)
        if answered.is_success:
            return [_row(one["id"], _moment(one), one.get("owned_by") or "upstream") for one in answered.json()["data"]]
    return None


def _moment(row: dict[str, Any]) -> int:
    created = row.get("created")
    if isinstance(created, int):
        return created
    return int(datetime.fromisoformat(row["created_at"]).timestamp()) if isinstance(row.get("created_at"), str) else 0


def _row(name: str, created: int, owner: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": owner,
        "type": "model",
        "display_name": name,
        "created_at": timestamp(datetime.fromtimestamp(created, UTC)),
    }
