"""Job `upkeep`: what expires, what was deleted and what nothing needs, one visible step each.

Belongs here: the order of the rounds and what each says of itself. Does not belong here: what a round does
(loop_dagster/upkeep.py) and when the job runs (sensors/upkeep.py).
"""

from datetime import timedelta

import dagster as dg

from assets.steps import sign_of_life, utc_now
from loop_dagster import upkeep
from loop_dagster.rules.upkeep import RUN_TIME
from resources import StoreResource

#: Jobs whose runs tell nothing about any attempt.
PRUNED_JOBS = ("intake", "scoring", "upkeep")
FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
#: Runs deleted in one go, so that the first upkeep of an old installation ends.
MOST_PRUNED = 2_000


@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def end_reviews(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Expire attempts that waited 14 days for a decision."""
    stores = store.open()
    with sign_of_life(stores, context.run_id):
        for attempt in upkeep.end_reviews(stores, utc_now()):
            context.log.info(f"{attempt.key} expired: nobody decided.")


@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def purge_deleted(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Remove deleted samples from every file."""
    stores = store.open()
    with sign_of_life(stores, context.run_id):
        purged = upkeep.purge_deleted(stores, holder=f"run {context.run_id}")
    rows = ", ".join(f"{count} rows of {name}" for name, count in purged.rows.items() if count) or "no row"
    context.log.info(f"{purged.samples} samples are gone for good ({rows}), {purged.waiting} wait for a step to end.")


@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def drop_expired(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Remove samples whose retention is over."""
    stores = store.open()
    with sign_of_life(stores, context.run_id):
        gone = upkeep.drop_expired(stores, utc_now(), holder=f"run {context.run_id}")
    context.log.info(f"{gone} samples had expired and are gone.")


@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def erase_pipelines(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Remove reports and training rows of deleted pipelines."""
    stores = store.open()
    with sign_of_life(stores, context.run_id):
        rows = upkeep.erase_pipelines(stores, holder=f"run {context.run_id}")
    context.log.info(f"Rows of deleted pipelines removed: {rows or 'none'}.")


@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def trim_selections(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Drop why older attempts left samples out, one by one; the numbers stay."""
    stores = store.open()
    with sign_of_life(stores, context.run_id):
        dropped = upkeep.trim_selections(stores, holder=f"run {context.run_id}")
    context.log.info(f"{dropped} rows of older selections dropped.")


@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def sweep_artifacts(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Delete adapters and private folders that nothing needs."""
    stores = store.open()
    with sign_of_life(stores, context.run_id):
        gone = upkeep.sweep(stores, utc_now())
    context.log.info(f"{len(gone)} adapters deleted: {', '.join(digest[:12] for digest in gone) or 'none'}.")


@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def keep_tables(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Compact, vacuum and checkpoint every Delta table."""
    stores = store.open()
    with sign_of_life(stores, context.run_id):
        kept = upkeep.keep_tables(stores, holder=f"run {context.run_id}")
    for name, done in kept.items():
        files = f"{done.files_before} to {done.files_after} files, {done.removed} removed from storage"
        context.log.info(f"{name}: {files}, version {done.version}.")


@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def prune_runs(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Delete finished runs of intake, scoring and upkeep after 7 days; runs of attempts stay."""
    before = utc_now() - RUN_TIME
    gone = 0
    with sign_of_life(store.open(), context.run_id):
        for job in PRUNED_JOBS:
            old = dg.RunsFilter(job_name=job, created_before=before, statuses=FINISHED)
            for record in context.instance.get_run_records(old, limit=MOST_PRUNED, ascending=True):
                context.instance.delete_run(record.dagster_run.run_id)
                gone += 1
    context.log.info(f"{gone} runs older than {RUN_TIME // timedelta(days=1)} days deleted.")


@dg.job(
    name="upkeep",
    executor_def=dg.in_process_executor,
    description="End reviews, purge what was deleted or has expired, delete what nothing needs, keep the tables small.",
)
def upkeep_job() -> None:
    """One after the other: each waits for the one before."""
    done = purge_deleted(start=end_reviews())
    done = trim_selections(start=erase_pipelines(start=drop_expired(start=done)))
    prune_runs(start=keep_tables(start=sweep_artifacts(start=done)))
