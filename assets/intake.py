"""`samples`, `feedback`, `labels`: what came in, drained from the inbox and the intake folder into Delta tables."""

from collections.abc import Iterator

import dagster as dg
import polars as pl

from assets.metadata import definition_metadata, last_shown, written
from assets.soundness import validate
from assets.steps import sign_of_life, utc_now
from loop_dagster.store.intake import LAKE_TABLES, drain, take_files
from loop_dagster.store.lake import Lake
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES, Table
from resources import StoreResource

GROUP = "intake"
#: Ids are UUIDv7: this many leading characters hold milliseconds since 1970 in hex, with one dash.
_ID_TIME = 13
#: Writers' clocks and transactions overlap by less than this; rows as old as this are validated again.
_OVERLAP_MS = 600_000


@dg.multi_asset(
    specs=[
        dg.AssetSpec(
            table.name,
            deps=[dg.AssetKey("scores")] if table is FEEDBACK else [],
            group_name=GROUP,
            description=table.meaning,
            metadata=definition_metadata(table),
            kinds={"deltalake"},
        )
        for table in (SAMPLES, FEEDBACK, LABELS)
    ],
    check_specs=[
        dg.AssetCheckSpec("sound", asset=table.name, description="Great Expectations on keys and words of changed rows")
        for table in (SAMPLES, FEEDBACK, LABELS)
    ],
    name="drain",
)
def intake(
    context: dg.AssetExecutionContext, store: StoreResource
) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
    """Import what lies in the intake folder, drain the inbox, validate what changed since the last time."""
    stores = store.open()
    holder = f"run {context.run.run_id}"
    with sign_of_life(stores, context.run.run_id):
        files = take_files(stores, holder=holder, now=utc_now())
        drained = drain(stores, holder=holder)
    for table in LAKE_TABLES:
        version, rows = stores.lake.version(table), stores.lake.row_count(table)
        since = last_shown(context.instance, table.name, "newest_id") or None
        changed, newest = _changed(stores.lake, table, since)
        passed, findings = validate(table, changed)
        yield dg.MaterializeResult(
            asset_key=table.name,
            metadata={
                **written(table, rows=rows, version=version),
                "rows_from_inbox": drained.rows[table.name],
                "files_imported": len(files),
                "newest_id": newest or since or "",
            },
        )
        yield dg.AssetCheckResult(asset_key=table.name, check_name="sound", passed=passed, metadata=findings)


def _changed(lake: Lake, table: Table, since: str | None) -> tuple[pl.DataFrame, str | None]:
    """Key columns of the rows whose ids are newer than `since`, less an overlap, and the newest id of all."""
    frame = lake.scan(table).select([column.name for column in table.columns if column.kind != "text"])
    key = table.key[0]
    if since:
        start = f"{max(int(since[:_ID_TIME].replace('-', ''), 16) - _OVERLAP_MS, 0):012x}"
        frame = frame.filter(pl.col(key) >= f"{start[:8]}-{start[8:]}")
    rows = frame.collect()
    return rows, rows.get_column(key).max() if rows.height else None  # type: ignore[return-value]  # a string column
