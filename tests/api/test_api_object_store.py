"""The API's data plane with the lake on an S3 server and the registry on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_api import serving

from loop_dagster.settings import Settings
from loop_dagster.store.intake import drain
from loop_dagster.store.open import open_store

pytestmark = pytest.mark.postgres


def test_samples_come_in_are_found_and_go_out(tmp_path: Path, postgres_url: str, bucket: str) -> None:
    store = open_store(Settings(home=tmp_path, registry_url=postgres_url, lake_url=bucket))
    with serving(store) as api:
        loop = api.client.loop
        loop.set_config("shop", True, tags=["shop"])
        for number in range(5):
            asked = [{"role": "user", "content": f"Where is parcel {number}?"}]
            kept = loop.capture("shop", "small", asked, "On its way.", request_id=f"r{number}")
            loop.signal(kept["trace_id"], "good", labels=["late"] if number % 2 else [])
            if number == 2:
                drain(store, holder="a test")  # the rest waits in the inbox
        rows = [{"prompt": "Opening hours?", "completion": "9 to 5.", "label": True}]
        assert loop.import_rows("shop", rows, labels=["shop"])["imported"] == 1
        assert [loop.list_traces(**by)["total"] for by in ({}, {"label": "late"}, {"q": "PARCEL 3"})] == [6, 2, 1]
        made = loop.create_dataset("Late ones", tags=["late"], feedback=["good"])
        assert loop.preview_dataset(tags=["late"])["samples"] == 2
        lines = loop.export_dataset(made["id"])["lines"]
        assert len(lines) == 2
        assert loop.import_rows("again", lines)["imported"] == 2
        drain(store, holder="a test")
        [gone] = loop.list_traces(q="parcel 3", deployment_id="shop")["traces"]
        loop.delete_trace(gone["id"])
        assert loop.list_traces(label="late")["total"] == 3
        assert loop.stats()["traces"] == 7
    store.registry.dispose()
