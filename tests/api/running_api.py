"""A server of the API in a thread of the test's process, and how tests call it.

For tests of the API alone: real stores, real sockets, the public client.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from bios import RunBiOS
from fastapi import FastAPI

from loop_dagster.api.app import create_app
from loop_dagster.api.serving import LOG_CONFIG
from loop_dagster.store.keys import SCOPES
from loop_dagster.store.open import Store


@dataclass
class Api:
    """One server. `client` is the public client with every scope, `http` plain HTTP with the same key."""

    url: str
    store: Store
    key: str
    client: Any
    http: httpx.Client
    app: FastAPI

    def call(self, method: str, path: str, *, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {"X-API-Key": key if key is not None else self.key, **options.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **options)

    def new_key(self, *scopes: str, workspaces: tuple[str, ...] = ()) -> str:
        return self.store.keys.create(scopes=scopes or SCOPES, workspaces=workspaces).text


@contextlib.contextmanager
def serving(store: Store) -> Iterator[Api]:
    """The API over a store, answering over a real socket until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = create_app(store)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, access_log=False, log_config=LOG_CONFIG)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    give_up = time.monotonic() + 20
    while not server.started and time.monotonic() < give_up:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{port}"
    key = store.keys.create(name="tests").text
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        yield Api(url, store, key, RunBiOS(api_key=key, base_url=url), http, app)
    server.should_exit = True
    thread.join(20)
