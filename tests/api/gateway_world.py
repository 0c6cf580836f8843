"""What the gateway's tests stand in: an upstream, an installation that names it, and a running server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anthropic import Anthropic
from openai import OpenAI
from running_api import Api, serving
from stub_upstream import KEY, Upstream, upstream

from loop_dagster.settings import Settings
from loop_dagster.settings import Upstream as Named
from loop_dagster.store.open import Store, open_store

QUESTION = [{"role": "user", "content": "Refunds?"}]
#: Long enough that a busy machine still gives every id out.
PATIENT_MS = 5_000.0


@dataclass
class World:
    """`api` passes on to `up`; the pipelines `Support` and `Sales` are there."""

    api: Api
    up: Upstream

    @property
    def store(self) -> Store:
        return self.api.store

    def openai(self, **options: Any) -> OpenAI:
        url = f"{self.api.url}/v1"
        return OpenAI(base_url=url, **{"api_key": self.api.key, "max_retries": 0, "timeout": 30, **options})

    def anthropic(self, **options: Any) -> Anthropic:
        return Anthropic(base_url=self.api.url, **{"api_key": self.api.key, "max_retries": 0, "timeout": 30, **options})

    def trace(self, sample_id: str | None, *, within: float = 20) -> dict[str, Any]:
        """The sample as soon as it is recorded."""
        assert sample_id is not None, "no sample id was given out"
        found = until(lambda: self.store.samples.get(sample_id), within=within)
        assert found
        whole: dict[str, Any] = self.api.client.loop.get_trace(sample_id)
        return whole

    def missed(self) -> dict[tuple[str, str], int]:
        """Calls that were not recorded, by tag and reason."""
        return {(one.tag, one.reason): one.calls for one in self.store.capturing.misses(datetime.now(UTC))}

    def missed_soon(self, tag: str, reason: str, calls: int = 1) -> None:
        until(lambda: self.missed().get((tag, reason), 0) >= calls)
        assert self.missed()[tag, reason] == calls

    def settle(self) -> None:
        """Wait until the recorder has nothing left to do."""
        until(lambda: not self.api.app.state.gateway.recorder.waiting)

    def samples(self) -> int:
        self.settle()
        return int(self.store.samples.keys().samples.collect().height)


def until(true: Callable[[], Any], *, within: float = 20) -> Any:
    end = time.monotonic() + within
    while not (found := true()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
    return found


def installation(home: Path, url: str, **more: Any) -> Store:
    """Stores whose settings name the upstream for gpt-* in OpenAI's way, for claude-* in Anthropic's."""
    named = {
        "gpt-exact": Named(url=url, api_key=KEY),
        "gpt-*": Named(url=url, api_key=KEY),
        "claude-*": Named(url=url, api_key=KEY, kind="anthropic"),
        "down-*": Named(url="http://127.0.0.1:9/v1", api_key=KEY),
    }
    store = open_store(Settings(home=home, upstreams=named, **{"gateway_wait_ms": PATIENT_MS, **more}))
    for name in ("Support", "Sales"):
        if name not in {one.name for one in store.pipelines.list()}:
            store.pipelines.create(name, model_id="base", model_digest="d" * 64, now=datetime.now(UTC))
    return store


@contextlib.contextmanager
def gateway(home: Path, **more: Any) -> Iterator[World]:
    with upstream() as up, serving(installation(home, up.url, **more)) as api:
        yield World(api, up)
