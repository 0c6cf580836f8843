"""Sensor `progress`: reconciles every attempt that needs a job with the runs that there are."""

from datetime import UTC, datetime

import dagster as dg

from assets.steps import ATTEMPT_TAG, STEP_TAG, TRY_TAG
from loop_dagster.jobs import STEP_JOBS
from loop_dagster.partitions import ATTEMPTS
from loop_dagster.rules.progress import MOST_TRIES, Action, Evidence, RunStatus, next_action, tries_of
from loop_dagster.rules.states import Step, step_of
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt
from resources import StoreResource
from sensors.lost_runs import at_work_since, end_left, end_lost
from sensors.requests import request


@dg.sensor(
    jobs=list(STEP_JOBS.values()),
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Gives every attempt whose state needs a job exactly one run, and ends steps whose process is gone.",
)
def progress(context: dg.SensorEvaluationContext, store: StoreResource) -> dg.SensorResult:
    """The attempt row is the only truth; a partition that a killed daemon did not add is added here."""
    stores = store.open()
    now = datetime.now(UTC)
    requests = []
    notes = []
    needed = set()
    for attempt in stores.attempts.active():
        step = step_of(attempt.state)
        if step is None:
            continue
        run = _run_of(context, attempt, step)
        action = next_action(_evidence(stores, attempt, step, run), now)
        notes.append(f"{attempt.key} {attempt.state}: {action}.")
        if run is not None:
            needed.add(run.dagster_run.run_id)
            if action in ("try_again", "give_up"):
                end_lost(context.instance, run.dagster_run)  # it would keep its place in the queue for ever
        asked = _act(stores, attempt, step, action, now)
        if asked is not None:
            requests.append(asked)
    notes += end_left(context, stores, needed=needed)
    keys = [key for one in requests if (key := str(one.partition_key))]
    missing = [key for key in keys if not context.instance.has_dynamic_partition(str(ATTEMPTS.name), key)]
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[ATTEMPTS.build_add_request(missing)] if missing else [],
        skip_reason=None if requests else dg.SkipReason(" ".join(notes) or "No attempt needs a job."),
    )


def _act(store: Store, attempt: Attempt, step: Step, action: Action, now: datetime) -> dg.RunRequest | None:
    """Write down what was decided about an attempt's step; the run to ask for, if one is."""
    if action == "request":
        return request(attempt, step, attempt.try_no)
    if action == "try_again":
        fresh = store.attempts.next_try(attempt.run_id, expect_try=attempt.try_no, now=now)
        sentence = f"The {step} ended before its end; it is tried again ({tries_of(fresh.try_no)} of {MOST_TRIES})."
        store.attempts.remark(attempt.run_id, sentence, now=now)
        return request(fresh, step, fresh.try_no)
    if action == "give_up":
        store.attempts.fail(
            attempt.run_id,
            code="STEP_LOST",
            sentence=f"The {step} was started {tries_of(attempt.try_no)} times and did not come to its end. "
            f"The last that was heard of it: {attempt.reason}",
            now=now,
        )
    return None


def _run_of(context: dg.SensorEvaluationContext, attempt: Attempt, step: Step) -> dg.RunRecord | None:
    """What Dagster knows of the present try."""
    tags = {ATTEMPT_TAG: attempt.key, STEP_TAG: step, TRY_TAG: str(attempt.try_no)}
    records = context.instance.get_run_records(dg.RunsFilter(tags=tags), limit=1)
    return records[0] if records else None


def _evidence(store: Store, attempt: Attempt, step: Step, run: dg.RunRecord | None) -> Evidence:
    lease = store.leases.find(f"attempt/{attempt.run_id}")
    claim = store.attempts.claim(attempt.run_id, step, attempt.try_no)
    return Evidence(
        state=attempt.state,
        since=attempt.since,
        try_no=attempt.try_no,
        run=_status(run.dagster_run) if run else "none",
        run_since=at_work_since(run) if run else None,
        claimed_at=claim.claimed_at if claim else None,
        ended=claim is not None and claim.ended_at is not None,
        last_beat=lease.heartbeat_at if lease else None,
    )


def _status(run: dg.DagsterRun) -> RunStatus:
    if run.is_finished:
        return "ended"
    # One that nobody put into the queue after it was asked for never starts, so it does not count as waiting.
    return "waiting" if run.status == dg.DagsterRunStatus.QUEUED else "running"
