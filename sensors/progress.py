"""Sensor `progress`: reconciles every attempt that needs a job with the runs that there are."""

from datetime import UTC, datetime

import dagster as dg

from assets.steps import ATTEMPT_TAG, STEP_TAG, TRY_TAG
from loop_dagster.jobs import STEP_JOBS
from loop_dagster.partitions import ATTEMPTS
from loop_dagster.rules.progress import Evidence, RunStatus, next_action
from loop_dagster.rules.states import step_of
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt
from resources import StoreResource
from sensors.requests import request

_WAITING = (dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED)


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
    for attempt in stores.attempts.active():
        step = step_of(attempt.state)
        if step is None:
            continue
        action = next_action(_evidence(context, stores, attempt), now)
        notes.append(f"{attempt.key} {attempt.state}: {action}.")
        if action == "request":
            requests.append(request(attempt, step, attempt.try_no))
        elif action == "try_again":
            fresh = stores.attempts.next_try(attempt.run_id, expect_try=attempt.try_no, now=now)
            requests.append(request(fresh, step, fresh.try_no))
        elif action == "give_up":
            stores.attempts.fail(
                attempt.run_id,
                code="STEP_LOST",
                sentence=f"The {step} was started {attempt.try_no} times and its process was gone each time. "
                "The runs of the attempt in Dagster's UI show why.",
                now=now,
            )
    keys = [key for one in requests if (key := str(one.partition_key))]
    missing = [key for key in keys if not context.instance.has_dynamic_partition(str(ATTEMPTS.name), key)]
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[ATTEMPTS.build_add_request(missing)] if missing else [],
        skip_reason=None if requests else dg.SkipReason(" ".join(notes) or "No attempt needs a job."),
    )


def _evidence(context: dg.SensorEvaluationContext, store: Store, attempt: Attempt) -> Evidence:
    step = str(step_of(attempt.state))
    tags = {ATTEMPT_TAG: attempt.key, STEP_TAG: step, TRY_TAG: str(attempt.try_no)}
    records = context.instance.get_run_records(dg.RunsFilter(tags=tags), limit=1)
    lease = store.leases.find(f"attempt/{attempt.run_id}")
    claim = store.attempts.claim(attempt.run_id, step, attempt.try_no)
    return Evidence(
        state=attempt.state,
        since=attempt.since,
        try_no=attempt.try_no,
        run=_status(records[0].dagster_run) if records else "none",
        run_since=records[0].create_timestamp if records else None,
        claimed_at=claim.claimed_at if claim else None,
        ended=claim is not None and claim.ended_at is not None,
        last_beat=lease.heartbeat_at if lease else None,
    )


def _status(run: dg.DagsterRun) -> RunStatus:
    if run.is_finished:
        return "ended"
    return "waiting" if run.status in _WAITING else "running"
