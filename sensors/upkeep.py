"""Sensor `upkeep`: asks for a round of housekeeping once a day, and when something was deleted or is over."""

import math
from datetime import datetime, timedelta

import dagster as dg

from assets.steps import utc_now
from assets.upkeep import upkeep_job
from loop_dagster.rules.upkeep import round_is_due
from loop_dagster.upkeep import due
from resources import StoreResource
from sensors.lost_runs import under_way

#: A reason that a round could not settle (an attempt still works with a deleted sample) asks again after this long.
AGAIN_AFTER = timedelta(minutes=10)


@dg.sensor(
    job=upkeep_job,
    minimum_interval_seconds=60,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Runs upkeep once a day, and soon after a deletion, a review that ended or an adapter that may go.",
)
def upkeep(context: dg.SensorEvaluationContext, store: StoreResource) -> dg.SensorResult | dg.SkipReason:
    """The cursor holds when the last round was asked for."""
    stores = store.open()
    now = utc_now()
    last = datetime.fromisoformat(context.cursor) if context.cursor else None
    if last is None:
        context.update_cursor(now.isoformat())  # a new installation has nothing to keep house of yet
        return dg.SkipReason("The first daily round is a day away.")
    if under_way(context, stores, upkeep_job.name):
        return dg.SkipReason("A round is under way.")
    reasons = due(stores, now)
    if round_is_due(last, now):
        reasons.append("the daily round")
    elif reasons and timedelta(0) <= now - last < AGAIN_AFTER:
        minutes = math.ceil((last + AGAIN_AFTER - now) / timedelta(minutes=1))
        return dg.SkipReason(f"The next round is due in {minutes} min: {', '.join(reasons)}.")
    if not reasons:
        return dg.SkipReason("Nothing was deleted, is over or is unneeded; the daily round is not due.")
    context.log.info(f"Why: {', '.join(reasons)}.")
    return dg.SensorResult(run_requests=[dg.RunRequest(run_key=now.isoformat())], cursor=now.isoformat())
