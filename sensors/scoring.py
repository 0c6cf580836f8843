"""Sensor `scoring`: starts a run for a pipeline that is short and has unreviewed samples worth asking about."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Self

import dagster as dg

from assets.scores import PIPELINE_TAG
from loop_dagster.jobs import scoring_job
from loop_dagster.models.judge import judge_key, why_no_scoring
from loop_dagster.opening import Seen, plan_pass
from loop_dagster.rules.scoring import Standing
from loop_dagster.scoring import leftovers, plan
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from resources import StoreResource
from sensors.lost_runs import under_way

#: A tick leaves the rest of the pipelines to the next one after this many seconds.
BUDGET_S = 5.0
#: Time alone changes something: a run that ended without a trace is repeated, samples that failed may be asked again.
AFTER_RUN, AFTER_IDLE = timedelta(minutes=10), timedelta(hours=1)


@dataclass
class Cursor:
    """What the last ticks saw: `again` has the moment at which a pipeline is looked at even if nothing changed."""

    judge: str
    seen: Seen = field(default_factory=Seen)
    again: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str | None, judge: str) -> Self:
        """A cursor of another judge's time, or of another version of this program, is as good as none."""
        try:
            found = json.loads(text or "")
            if found["judge"] == judge:
                return cls(judge, Seen.read(found["seen"]), dict(found["again"]))
        except (ValueError, TypeError, KeyError):
            pass
        return cls(judge)

    def due(self, now: datetime) -> Seen:
        """What was seen, without the pipelines whose moment has come."""
        come = {one for one, moment in self.again.items() if datetime.fromisoformat(moment) <= now}
        return Seen(self.seen.data, {one: "" if one in come else mark for one, mark in self.seen.marks.items()})

    def write(self) -> str:
        return json.dumps({"judge": self.judge, "seen": self.seen.write(), "again": self.again})


@dg.sensor(
    job=scoring_job,
    minimum_interval_seconds=15,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Lets the judge score what nobody reviewed, for one pipeline at a time that is short.",
)
def scoring(context: dg.SensorEvaluationContext, store: StoreResource) -> dg.SensorResult | dg.SkipReason:
    """One run at a time; an unchanged pipeline is not looked at until time alone can change something."""
    stores = store.open()
    # Asked even where no judge is set: a run whose process is gone ends here.
    if under_way(context, stores, scoring_job.name):
        return dg.SkipReason("A run is under way.")
    now = datetime.now(UTC)
    left = leftovers(stores)
    cannot = why_no_scoring(stores.settings)
    if cannot and not left:
        return dg.SkipReason(cannot)
    for pipeline in stores.pipelines.list():
        if pipeline.pipeline_id in left:
            return dg.SensorResult(run_requests=[_request(pipeline)])
    cursor = Cursor.read(context.cursor, judge_key(stores.settings))
    chosen, reasons = _look(stores, cursor, now)
    return dg.SensorResult(
        run_requests=[_request(chosen)] if chosen else [],
        cursor=cursor.write(),
        skip_reason=None if chosen else dg.SkipReason(" ".join(reasons) or "Nothing changed since the last look."),
    )


def _look(store: Store, cursor: Cursor, now: datetime) -> tuple[Pipeline | None, list[str]]:
    """The first pipeline with something to score, those looked at longest ago first; the cursor is kept up."""
    pass_ = plan_pass(store, now, cursor.due(now))
    marks = {**cursor.seen.marks, **{pipeline.pipeline_id: "" for pipeline, _mark in pass_.changed}}
    reasons = []
    chosen = None
    for pipeline, mark in pass_.changed:
        found = plan(store, pipeline, now, keys=pass_.keys).standing
        reasons.append(f"{pipeline.tag}: {found.message}")
        marks.pop(pipeline.pipeline_id)
        marks[pipeline.pipeline_id] = mark
        _note_again(cursor, pipeline, found, now)
        chosen = pipeline if found.status == "scoring" else None
        if chosen or (datetime.now(UTC) - now).total_seconds() > BUDGET_S:
            break
    cursor.seen = Seen(pass_.data, marks)
    return chosen, reasons


def _note_again(cursor: Cursor, pipeline: Pipeline, found: Standing, now: datetime) -> None:
    waits = {"scoring": AFTER_RUN, "held": AFTER_RUN, "idle": AFTER_IDLE}
    again = found.held_until or (now + waits[found.status] if found.status in waits else None)
    cursor.again.pop(pipeline.pipeline_id, None)
    if again is not None:
        cursor.again[pipeline.pipeline_id] = again.isoformat()


def _request(pipeline: Pipeline) -> dg.RunRequest:
    return dg.RunRequest(tags={PIPELINE_TAG: pipeline.pipeline_id})
