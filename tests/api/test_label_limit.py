"""However many callers tag one sample at the same moment, it carries at most 32 tags and attributes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bios import RunBiOS
from bios._client import ApiError
from running_api import Api, serving

from loop_dagster.settings import Settings
from loop_dagster.store.intake import drain
from loop_dagster.store.open import open_store

CALLERS = 8


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def running(request: pytest.FixtureRequest, home: Path) -> Iterator[Api]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else None
    settings = Settings(home=home) if url is None else Settings(home=home, registry_url=url)
    with serving(open_store(settings)) as api:
        yield api


@pytest.mark.parametrize("how", ["labels", "signals"])
@pytest.mark.parametrize("draining", [False, True])
def test_at_most_32_whoever_comes_at_once(running: Api, how: str, draining: bool) -> None:
    rows = [{"prompt": "One", "completion": "A"}]
    [sample] = running.client.loop.import_rows("app", rows, labels=["first"])["trace_ids"]
    ready = threading.Barrier(CALLERS + draining)

    def label(caller: int) -> list[bool]:
        loop = RunBiOS(api_key=running.key, base_url=running.url).loop
        ready.wait(20)
        went = []
        for number in range(6):
            tag = f"t-{caller}-{number}"
            try:
                if how == "labels":
                    loop.label(sample, labels=[tag])
                else:
                    loop.signal(sample, verdict="accepted", labels=[tag])
                went.append(True)
            except ApiError as error:
                assert (error.status, error.code) == (400, "BAD_REQUEST")
                went.append(False)
        return went

    def keep_draining() -> list[bool]:
        ready.wait(20)
        for _ in range(3):
            drain(running.store, holder="test")
        return []

    with ThreadPoolExecutor(CALLERS + 1) as threads:
        calls = [threads.submit(label, caller) for caller in range(CALLERS)]
        drains = [threads.submit(keep_draining)] if draining else []
        went = [one for call in [*calls, *drains] for one in call.result()]
    labels = running.client.loop.get_trace(sample)["labels"]
    assert len(labels) == 32
    assert sum(went) == 31  # what was refused is not on it, and what was answered is
