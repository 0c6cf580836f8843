"""Runs whose process is gone: Dagster's default launcher does not notice, and they would hold their place for ever.

Belongs here: ending such a run in Dagster's books, so that the queue and the sensors go on. Does not belong here: what
becomes of an attempt, and whether the run of the step that it needs now is lost (sensors/progress.py with
rules/progress.py).
"""

import time
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

import dagster as dg

from assets.decisions import DECISION_JOBS
from assets.steps import ATTEMPT_TAG, TRY_TAG
from loop_dagster.errors import NotFound
from loop_dagster.jobs import STEP_JOBS
from loop_dagster.store.attempts import lease_name
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt
from loop_dagster.store.work import run_lives

#: A run is not looked at before it could have taken its lease.
YOUNG = timedelta(seconds=90)
#: A process that was asked for and has not begun by then was killed, or its launcher was: the longest a start may take.
START = timedelta(minutes=3)
#: Between two steps of one process nobody holds the lease for a moment.
LOOK_AGAIN_AFTER_S = 2.0

#: What a run reads that has a process, or is about to get one.
_WITH_PROCESS = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
UNDER_WAY = [dg.DagsterRunStatus.QUEUED, *_WITH_PROCESS]

_STEPS = {job.name: step for step, job in STEP_JOBS.items()}
#: Jobs with an attempt as their partition. A run of a step holds the attempt's lease while it works; a decision is one
#: transaction.
_ATTEMPT_JOBS = {*_STEPS, *(job.name for job in DECISION_JOBS)}


def under_way(context: dg.SensorEvaluationContext, store: Store, job: str) -> bool:
    """Whether a run of a job that has one run at a time is under way; one whose process is gone is ended first."""
    records = context.instance.get_run_records(dg.RunsFilter(job_name=job, statuses=UNDER_WAY))
    now = datetime.now(UTC)
    for record in records:
        if _may_be_lost(record, now) and not _shows_life(store, record.dagster_run.run_id):
            end_lost(context.instance, record.dagster_run)
    return bool(context.instance.get_runs(dg.RunsFilter(job_name=job, statuses=UNDER_WAY), limit=1))


def end_left(context: dg.SensorEvaluationContext, store: Store, *, needed: Collection[str]) -> list[str]:
    """End the runs of attempts that nobody lives for, whatever their attempt does by now; returns a sentence for each.

    `needed` are the runs that active attempts need now: sensors/progress.py decides about those, with its own patience.
    """
    records = context.instance.get_run_records(dg.RunsFilter(statuses=_WITH_PROCESS))
    now = datetime.now(UTC)
    said = []
    for record in records:
        run = record.dagster_run
        if run.job_name not in _ATTEMPT_JOBS or run.run_id in needed or not _may_be_lost(record, now):
            continue
        if not _lives_for_attempt(store, record, now):
            end_lost(context.instance, run)
            said.append(f"Run {run.run_id[:8]} ({run.job_name}): its process is gone, so it was ended.")
    return said


def at_work_since(record: dg.RunRecord) -> datetime:
    """When a run started, or when it was last heard of before that; it may have been queued hours earlier."""
    if record.start_time is not None:
        return datetime.fromtimestamp(record.start_time, UTC)
    return record.update_timestamp


def _may_be_lost(record: dg.RunRecord, now: datetime) -> bool:
    """Whether a run is old enough to show life; one in the queue waits for others and shows none."""
    status = record.dagster_run.status
    age = now - at_work_since(record)
    if status in (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING):
        return age > YOUNG
    return status != dg.DagsterRunStatus.QUEUED and age > START


def _lives_for_attempt(store: Store, record: dg.RunRecord, now: datetime) -> bool:
    """Whether a run that is old enough holds its attempt's lease, or did anything of late that its end may follow.

    Between the end of its last asset and its own end a run holds no lease, and a cancelled one needs a moment to stop.
    """
    run = record.dagster_run
    attempt = _attempt_of(store, run)
    if attempt is None:
        return True  # of another workspace in the same books: only its own sensors can tell
    signs = [record.update_timestamp, attempt.since]
    lease = store.leases.find(lease_name(attempt.run_id))
    if lease is not None and lease.holder == f"run {run.run_id}":
        if lease.expires_at > now:
            return True
        signs.append(lease.heartbeat_at)
    if run.job_name in _STEPS:
        try_tag = run.tags.get(TRY_TAG, "")  # a run that a person started has none, or what the person wrote
        try_no = int(try_tag) if try_tag.isdecimal() else attempt.try_no
        claim = store.attempts.claim(attempt.run_id, _STEPS[run.job_name], try_no)
        if claim is not None and claim.dagster_run_id == run.run_id:
            signs += [claim.claimed_at, claim.ended_at or claim.claimed_at]
    return now - max(signs) < YOUNG


def _attempt_of(store: Store, run: dg.DagsterRun) -> Attempt | None:
    """The attempt that a run is of; a run that a person started has its partition only."""
    try:
        return store.attempts.get(run.tags.get(ATTEMPT_TAG) or run.tags.get("dagster/partition", ""))
    except NotFound:
        return None


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
