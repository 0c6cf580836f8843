"""`datasets`: what the saved sets of conditions select at this moment, for people who look at the lineage.

A snapshot of revision and count: a dataset is a live selection, the registry holds its conditions, and an attempt
freezes for itself what it took.
"""

import dagster as dg

from assets.intake import GROUP
from assets.metadata import records_table
from assets.steps import sign_of_life, utc_now
from loop_dagster.rules.matching import counts
from resources import StoreResource


@dg.asset(
    deps=[dg.AssetKey("samples"), dg.AssetKey("feedback"), dg.AssetKey("labels")],
    group_name=GROUP,
    description="Saved sets of conditions, each with its revision and how many samples it selects now.",
)
def datasets(context: dg.AssetExecutionContext, store: StoreResource) -> dg.MaterializeResult[None]:
    """Count every dataset by one look at the keys."""
    stores = store.open()
    saved = stores.datasets.list()
    with sign_of_life(stores, context.run.run_id):
        keys = stores.samples.keys()
        groups = [one.conditions for one in saved]
        found = counts(keys.samples, keys.feedback, keys.labels, groups=groups, now=utc_now())
    rows = [
        {"dataset": one.name, "id": one.dataset_id, "revision": one.revision, "samples": sum(words.values()), **words}
        for one, words in zip(saved, found, strict=True)
    ]
    return dg.MaterializeResult(metadata={"dagster/row_count": len(saved), "selected": records_table(rows)})
