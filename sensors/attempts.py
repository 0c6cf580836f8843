"""Sensor `attempts`: opens an attempt when a pipeline has what its next one needs and nothing holds it."""

from datetime import UTC, datetime

import dagster as dg

from loop_dagster.jobs import training_job
from loop_dagster.opening import NotYet, Opened, Seen, look, plan_pass
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
    seen = Seen.read(context.cursor)
    plan = plan_pass(stores, now, seen)
    # Those left out keep their place and no mark, so that the next tick looks at them, before the others.
    marks = {**seen.marks, **{pipeline.pipeline_id: "" for pipeline, _mark in plan.changed}}
    looks = []
    for pipeline, mark in plan.changed:
        found = look(stores, pipeline, now, keys=plan.keys)
        looks.append(found)
        stores.pipelines.set_look(pipeline.pipeline_id, found.sentence, now)
        marks.pop(pipeline.pipeline_id)
        marks[pipeline.pipeline_id] = "" if isinstance(found, NotYet) and found.blocked else mark
        if (datetime.now(UTC) - now).total_seconds() > BUDGET_S:
            break
    opened = [one.attempt for one in looks if isinstance(one, Opened)]
    requests = [request(attempt, "training", attempt.try_no) for attempt in opened]
    keys = [attempt.key for attempt in opened]
    reason = " ".join(f"{one.pipeline}: {one.sentence}" for one in looks) or "Nothing changed since the last look."
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[ATTEMPTS.build_add_request(keys)] if keys else [],
        cursor=Seen(plan.data, marks).write(),
        skip_reason=None if requests else dg.SkipReason(reason),
    )
