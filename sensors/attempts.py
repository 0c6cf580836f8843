"""Sensor `attempts`: opens an attempt when a pipeline has what its next one needs and nothing holds it."""

import json
from datetime import UTC, datetime

import dagster as dg

from loop_dagster.jobs import training_job
from loop_dagster.opening import NotYet, Opened, fingerprint, look
from loop_dagster.partitions import ATTEMPTS
from resources import StoreResource
from sensors.requests import request

#: A tick leaves the rest of the pipelines to the next one after this many seconds.
BUDGET_S = 5.0


@dg.sensor(
    job=training_job,
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Opens attempt 1 at 1,100 good or corrected samples, every later one at 1,000 new ones.",
)
def attempts(context: dg.SensorEvaluationContext, store: StoreResource) -> dg.SensorResult:
    """The cursor holds what each pipeline's last look saw; an unchanged pipeline that is not due is not looked at."""
    stores = store.open()
    now = datetime.now(UTC)
    seen: dict[str, str] = json.loads(context.cursor) if context.cursor else {}
    changed = [(one, mark) for one, mark in fingerprint(stores, now) if seen.get(one.pipeline_id) != mark]
    # The order of the cursor is the order of the last looks: what the budget left out last time comes first.
    order = {pipeline_id: place for place, pipeline_id in enumerate(seen)}
    changed.sort(key=lambda pair: order.get(pair[0].pipeline_id, -1))
    frames = stores.samples.keys().held() if len(changed) > 1 else None
    looks = []
    for pipeline, mark in changed:
        found = look(stores, pipeline, now, keys=frames)
        looks.append(found)
        seen.pop(pipeline.pipeline_id, None)
        if not (isinstance(found, NotYet) and found.blocked):
            seen[pipeline.pipeline_id] = mark
        if (datetime.now(UTC) - now).total_seconds() > BUDGET_S:
            break
    opened = [one.attempt for one in looks if isinstance(one, Opened)]
    requests = [request(attempt, "training", attempt.try_no) for attempt in opened]
    keys = [attempt.key for attempt in opened]
    reason = " ".join(f"{one.pipeline}: {one.sentence}" for one in looks) or "Nothing changed since the last look."
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[ATTEMPTS.build_add_request(keys)] if keys else [],
        cursor=json.dumps(seen),
        skip_reason=None if requests else dg.SkipReason(reason),
    )
