"""Sensor `intake`: drains the inbox when it is due, imports waiting files, refreshes the assets after a bulk import."""

import hashlib
import json
from datetime import UTC, datetime

import dagster as dg

from assets.metadata import last_shown
from loop_dagster.jobs import intake_job
from loop_dagster.store.intake import LAKE_TABLES, drain_is_due, waiting_files
from loop_dagster.store.open import Store
from resources import StoreResource
from sensors.lost_runs import under_way

RETRY_AFTER_S = 60.0


@dg.sensor(
    job=intake_job,
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Runs intake when the inbox is due, a file waits, or a bulk import has written to the lake.",
)
def intake(context: dg.SensorEvaluationContext, store: StoreResource) -> dg.SensorResult | dg.SkipReason:
    """The cursor holds the Delta versions that the assets have been told of."""
    stores = store.open()
    # Asked even when nothing waits: a run whose process is gone ends here, and would read as at work until it did.
    if under_way(context, stores, intake_job.name):
        return dg.SkipReason("An intake run is under way.")
    now = datetime.now(UTC)
    versions = {table.name: stores.lake.version(table) for table in LAKE_TABLES}
    told = {table.name: last_shown(context.instance, table.name, "delta_version") for table in LAKE_TABLES}
    files = waiting_files(stores, now)
    due = drain_is_due(stores, now)
    changed = [name for name, version in versions.items() if version is not None and version != told[name]]
    if not (files or due or changed):
        return dg.SkipReason("Nothing waits in the inbox or the intake folder, and the assets show the newest rows.")
    # Dagster keeps cursors for long, and a file may be called after a person.
    names = hashlib.blake2b("/".join(file.name for file in files).encode(errors="replace"), digest_size=8).hexdigest()
    key = json.dumps([versions, names, _inbox_state(stores) if due else None])
    if hold := _held_by(context, same=key == context.cursor):
        return dg.SkipReason(hold)
    return dg.SensorResult(run_requests=[dg.RunRequest()], cursor=key)


def _held_by(context: dg.SensorEvaluationContext, *, same: bool) -> str | None:
    """Why no run starts now: the same work is not tried again within a minute of a failure."""
    records = context.instance.get_run_records(dg.RunsFilter(job_name="intake"), limit=1)
    if not records:
        return None
    ended = records[0].end_time or 0.0
    failed = records[0].dagster_run.status == dg.DagsterRunStatus.FAILURE
    if failed and same and datetime.now(UTC).timestamp() - ended < RETRY_AFTER_S:
        return f"The last intake run failed; the same work is tried again {RETRY_AFTER_S:.0f} s after it."
    return None


def _inbox_state(store: Store) -> str:
    rows, oldest = store.inbox.pending()
    return f"{rows} since {oldest}"
