"""The report page over HTTP, for the link on the asset in Dagster's UI: `GET /reports/<pipeline id>/<number>`.

Belongs here: who may read it and with which headers it goes out. Does not belong here: the page (`report_page.py`) and
the process that serves it (`models/serve.py`).

The page holds conversations and the route asks for no key, so it answers this machine alone: the caller's address must
be a loopback one, and so must the name that it was called by. Without the second, a page of somebody else could let its
own name point to 127.0.0.1 and read reports through the browser of whoever looks at it.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import TYPE_CHECKING

from loop_dagster.errors import NotFound
from loop_dagster.report_data import find_attempt, report_of
from loop_dagster.report_page import content_security_policy, render
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

#: Pipeline id and number of the attempt, as in its key.
PATH = "/reports/{pipeline_id}/{number}"
#: Listening on one of these is listening on loopback too.
EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104  # compared with, never bound


def page_url(settings: Settings, attempt_key: str) -> str | None:
    """Where the serving process of this machine shows a report while it runs; None where it listens for others only."""
    host = "127.0.0.1" if settings.serve_host in EVERY_ADDRESS else settings.serve_host
    if not _is_loopback(host):
        return None
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.serve_port}/reports/{attempt_key}"


def report_route(store: Store) -> Route:
    """The route over a store. Raises NotFound to everybody who is not on this machine, as for any unknown address."""
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    async def show(request: Request) -> Response:
        key = f"{request.path_params['pipeline_id']}/{request.path_params['number']}"
        if request.client is None or not (_is_loopback(request.client.host) and _is_loopback(request.url.hostname)):
            raise NotFound("route", "/reports")
        page = await asyncio.to_thread(lambda: render(report_of(store, find_attempt(store, key))))
        return HTMLResponse(page, headers=_headers())

    return Route(PATH, show)


def _headers() -> dict[str, str]:
    return {
        "Content-Security-Policy": f"{content_security_policy()}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def _is_loopback(host: str | None) -> bool:
    """Whether a name or an address stands for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address((host or "").strip("[]")).is_loopback
    except ValueError:
        return False
