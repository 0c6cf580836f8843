"""Datasets over a registry on PostgreSQL, through two servers on one database."""

from __future__ import annotations

from pathlib import Path

import pytest
from bios._client import ApiError
from running_api import serving
from wire_types import check

from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store

pytestmark = pytest.mark.postgres


def test_what_one_server_saved_the_other_selects_by(postgres_url: str, tmp_path: Path, tiny_model: Path) -> None:
    stores = [open_store(Settings(home=tmp_path, registry_url=postgres_url)) for _ in range(2)]
    with serving(stores[0]) as one, serving(stores[1]) as other:
        first, second = one.client.loop, other.client.loop
        second.set_config("live", enabled=True, tags=["live"])
        said = [{"role": "user", "content": "A \0 in the middle?"}]
        first.capture("live", "m", said, "Yes.", feedback={"verdict": "corrected", "correction": "No."})
        made = first.create_dataset("Live", tags=["live"], from_time="2020-01-01T00:00:00Z")
        check(second.get_dataset(made["id"]), "LoopDataset")
        assert second.get_dataset(made["id"])["feedback_counts"]["corrected"] == 1
        [line] = second.export_dataset(made["id"])["lines"]
        assert (line["messages"][0]["content"], line["correction"]) == (said[0]["content"], "No.")
        back = first.import_rows("back", [line])
        assert (back["imported"], second.get_dataset(made["id"])["samples"]) == (1, 2)

        model = {"id": str(tiny_model)}
        uses = second.create_pipeline(name="Uses it", model=model, datasets=[made["id"]])["pipeline"]
        assert (uses["samples_total"], first.list_traces(dataset=made["id"])["total"]) == (2, 2)
        second.update_dataset(made["id"], expected_revision=1, model="m")
        with pytest.raises(ApiError) as late:
            first.update_dataset(made["id"], expected_revision=1, model="n")
        assert late.value.code == "REVISION_MISMATCH"
        assert first.get_pipeline(uses["rule_id"])["samples_total"] == 1
        with pytest.raises(ApiError) as taken:
            first.create_dataset("LIVE")
        assert taken.value.code == "DATASET_NAME_TAKEN"
        assert [one["rule_id"] for one in first.delete_dataset(made["id"])["removed_from"]] == [uses["rule_id"]]
        assert second.get_pipeline(uses["rule_id"])["datasets"] == []
    for store in stores:
        store.registry.dispose()
