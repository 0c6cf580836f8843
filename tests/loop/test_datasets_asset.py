"""The snapshot of datasets that Dagster's UI shows."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import dagster as dg

from assets.datasets import datasets
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.settings import Settings
from loop_dagster.store.importing import import_rows
from loop_dagster.store.open import open_store
from resources import StoreResource


def test_every_dataset_is_shown_with_what_it_selects_now(home: Path) -> None:
    store = open_store(Settings(home=home))
    rows = [{"prompt": f"Where is parcel {n}?", "completion": "On its way.", "label": n < 3} for n in range(5)]
    import_rows(store.lake, rows, source="shop", labels=["shop"], now=datetime.now(UTC))
    with dg.instance_for_test() as instance:
        assert _shown(instance, home) == (0, [])
        store.datasets.create("Good ones", conditions=DatasetConditions(tags=["shop"], feedback=["good"]))
        store.datasets.create("Everything", conditions=DatasetConditions())
        shown = _shown(instance, home)
    numbers = {row["dataset"]: (row["revision"], row["samples"], row["good"], row["bad"]) for row in shown[1]}
    assert shown[0] == 2
    assert numbers == {"Good ones": (1, 3, 3, 0), "Everything": (1, 5, 3, 2)}


def _shown(instance: dg.DagsterInstance, home: Path) -> tuple[int, list[dict[str, object]]]:
    done = dg.materialize([datasets], instance=instance, resources={"store": StoreResource(home=str(home))})
    [event] = done.asset_materializations_for_node("datasets")
    count, table = event.metadata["dagster/row_count"].value, event.metadata["selected"]
    assert isinstance(count, int)
    assert isinstance(table, dg.TableMetadataValue)
    return count, [dict(record.data) for record in table.records]
