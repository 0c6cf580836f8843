"""Runs whose process is gone: Dagster's default launcher does not notice, and they would hold their place for ever.

Belongs here: ending such a run in Dagster's books, so that the queue and the sensors go on. Does not belong here: what
becomes of an attempt (sensors/progress.py with rules/progress.py).
"""

import time
from datetime import UTC, datetime, timedelta

import dagster as dg

from loop_dagster.store.open import Store
from loop_dagster.store.work import run_lives

#: A run is not looked at before it could have taken its lease.
YOUNG = timedelta(seconds=90)
#: A process that was asked for and has not begun by then was killed, or its launcher was: the longest a start may take.
START = timedelta(minutes=3)
#: Between two steps of one process nobody holds the lease for a moment.
LOOK_AGAIN_AFTER_S = 2.0

UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def under_way(context: dg.SensorEvaluationContext, store: Store, job: str) -> bool:
    """Whether a run of a job that has one run at a time is under way; one whose process is gone is ended first."""
    records = context.instance.get_run_records(dg.RunsFilter(job_name=job, statuses=UNDER_WAY))
    now = datetime.now(UTC)
    for record in records:
        if _may_be_lost(record, now) and not _shows_life(store, record.dagster_run.run_id):
            end_lost(context.instance, record.dagster_run)
    return bool(context.instance.get_runs(dg.RunsFilter(job_name=job, statuses=UNDER_WAY), limit=1))


def _may_be_lost(record: dg.RunRecord, now: datetime) -> bool:
    """Whether a run is old enough to show life; one in the queue waits for others and shows none."""
    status = record.dagster_run.status
    if status in (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING):
        return now - record.create_timestamp > YOUNG
    return status != dg.DagsterRunStatus.QUEUED and now - record.update_timestamp > START


def end_lost(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Say in Dagster's books that a run failed because its process is gone."""
    fresh = instance.get_run_by_id(run.run_id)
    if fresh is not None and not fresh.is_finished:
        instance.report_run_failed(fresh, "Its process is gone: no sign of life for a minute.")


def _shows_life(store: Store, dagster_run_id: str) -> bool:
    for look in range(2):
        if run_lives(store, dagster_run_id):
            return True
        if look == 0:
            time.sleep(LOOK_AGAIN_AFTER_S)
    return False
