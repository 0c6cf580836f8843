"""What a key is and may do: `GET /api/api-keys/introspect`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from loop_dagster.api.calls import AnyKey
from loop_dagster.api.gaps import unknown
from loop_dagster.wire import timestamp

router = APIRouter(prefix="/api/api-keys", tags=["keys"])


@router.get("/introspect")
def introspect(caller: AnyKey) -> dict[str, Any]:
    """The key's workspace and scopes. A key of several workspaces lists them all and names the one of the call."""
    key = caller.key
    found = {
        **unknown("ApiKeyIntrospection"),
        "auth_type": "api_key",
        "key_id": key.key_id,
        "key_name": key.name or None,
        "key_prefix": key.prefix,
        "status": "active",
        "scopes": list(key.scopes),
        "workspaces": [{"id": one, "name": one} for one in key.workspaces],
        "created_at": timestamp(key.created_at),
        "last_used_at": timestamp(key.last_used_at),
    }
    if caller.workspace is not None:
        found["workspace"] = {"id": caller.workspace, "name": caller.workspace}
    return found
