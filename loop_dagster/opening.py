"""Opens attempts: looks at the pipelines that changed and opens one where the rules say so.

Belongs here: what the sensor, Train now and `run --until-idle` share. Does not belong here: the rules themselves, runs
and partitions (sensors/). An attempt opens as one registry row under a partial unique index, so that however many look
at once, one opens; what a daemon that died had no time for after that, the sensor `progress` does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import polars as pl

from loop_dagster.errors import BaseChanged, ModelNotTrainable, ModelRevisionUnavailable, Refused
from loop_dagster.models.base import BaseModel, resolve
from loop_dagster.models.judge_ready import check_judge
from loop_dagster.models.lengths import safe_bytes
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.samples_state import sample_state
from loop_dagster.rules.schedule import ActiveAttempt, check_train_now, due_at
from loop_dagster.rules.selection import Scope, Selection
from loop_dagster.rules.signature import tag_signatures
from loop_dagster.rules.states import Trigger
from loop_dagster.store.datasets import Dataset, frozen_conditions
from loop_dagster.store.intake import LAKE_TABLES
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt
from loop_dagster.store.samples import KeyFrames
from loop_dagster.store.selecting import Length, Measured, counted_rows, measure, scope_of, trained_pairs


@dataclass(frozen=True, slots=True)
class Opened:
    """An attempt that this look opened."""

    pipeline: str
    attempt: Attempt
    sentence: str


@dataclass(frozen=True, slots=True)
class NotYet:
    """Why this look opened nothing; `next_look_at` when time alone can change that.

    `blocked` when its model cannot be used as it is: mending a folder changes nothing that a fingerprint shows, so the
    next tick looks again.
    """

    pipeline: str
    sentence: str
    next_look_at: datetime | None = None
    blocked: bool = False


#: What is wrong with one pipeline's model and no concern of the others.
MODEL_ERRORS = (ModelNotTrainable, ModelRevisionUnavailable, BaseChanged)


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a pipeline has for its next attempt at one moment, and when that attempt may start (None: not enough)."""

    measured: Measured
    base: BaseModel
    due_at: datetime | None


def base_of(store: Store, pipeline: Pipeline) -> BaseModel:
    """The pipeline's base model, as pinned when it was saved. Raises BaseChanged when the folder changed since."""
    base = resolve(pipeline.model_id, store.settings.models_dir)
    if pipeline.model_digest is not None and base.digest != pipeline.model_digest:
        raise BaseChanged(pipeline.model_id, pipeline.model_digest, base.digest)
    return base


def length_of(store: Store, base: BaseModel) -> Length:
    """Training length of a base on this installation (rules.md, Usable) and what is needed to count by it."""
    longest = min(base.max_length, store.settings.max_training_length)
    return Length(longest, safe_bytes(base.path, longest), base.digest)


def frozen_pipeline(pipeline: Pipeline, attempt: Attempt) -> Pipeline:
    """The pipeline with the settings, and the datasets' conditions, that the attempt froze when it opened."""
    return dataclasses.replace(
        pipeline,
        settings=PipelineSettings.from_json(attempt.frozen["settings"]),
        frozen_datasets=tuple(frozen_conditions(one) for one in attempt.frozen.get("datasets", ())),
    )


def frozen_base(store: Store, attempt: Attempt) -> BaseModel:
    """The base model that the attempt froze. Raises BaseChanged when its folder is another one by now."""
    base = resolve(attempt.frozen["model_id"], store.settings.models_dir)
    if base.digest != attempt.frozen["base_digest"]:
        raise BaseChanged(base.model_id, attempt.frozen["base_digest"], base.digest)
    return base


def frozen_length(attempt: Attempt) -> Length:
    """The training length that the attempt froze when it opened."""
    return Length(**attempt.frozen["length"])


def fingerprint(store: Store, now: datetime) -> Iterator[tuple[Pipeline, str]]:
    """Every pipeline that could open an attempt, with a mark that changes when a look could come to another end.

    Samples, feedback or labels, settings, the newest attempt, counts of long samples, a wish to train now, and a stored
    time that has passed all change it.
    """
    data = _data_mark(store)
    for pipeline, own in _own_marks(store, now):
        yield pipeline, json.dumps([data, own])


def _data_mark(store: Store) -> str:
    """What changes with any sample, feedback or label that comes in, moves or goes; reads no table of the lake."""
    waiting, gone = store.inbox.pending()[0], len(store.inbox.tombstones())
    return json.dumps([*(store.lake.version(table) for table in LAKE_TABLES), waiting, gone])


def _own_marks(store: Store, now: datetime) -> list[tuple[Pipeline, list[object]]]:
    """Every pipeline that is switched on with what can change a look at it beside the data."""
    counted = counted_rows(store)
    numbers = store.attempts.newest()
    revisions = {one.dataset_id: one.revision for one in store.datasets.list()}
    return [
        (
            pipeline,
            [
                pipeline.revision,
                numbers.get(pipeline.pipeline_id),
                pipeline.next_due_at is not None and pipeline.next_due_at <= now,
                pipeline.train_now,
                counted,
                [revisions.get(one) for one in pipeline.settings.datasets],
            ],
        )
        for pipeline in store.pipelines.list()
        if pipeline.enabled
    ]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last pass saw: a mark of all data, and one of each pipeline, those looked at longest ago first.

    A pipeline that is not among `marks`, or with an empty one, is looked at in any case.
    """

    data: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str | None) -> Seen:
        """From a sensor's cursor; one of another version of this program is as good as none."""
        try:
            data, marks = json.loads(text or "")
            return cls(str(data), dict(marks))
        except (ValueError, TypeError):
            return cls()

    def write(self) -> str:
        return json.dumps([self.data, self.marks])


@dataclass(frozen=True, slots=True)
class Pass:
    """The pipelines to look at now with their new marks, and what selecting needs, read once where they are several."""

    data: str
    changed: list[tuple[Pipeline, str]]
    keys: KeyFrames | None


def plan_pass(store: Store, now: datetime, seen: Seen) -> Pass:
    """Which pipelines a pass has to look at: those whose own rows, settings or times changed since `seen`.

    While nothing at all came in this reads two small tables and the versions in the Delta logs. With new data and more
    than one pipeline it goes over the keys once, so that one new sample costs one look and not one for each.
    """
    data, own = _data_mark(store), _own_marks(store, now)
    if data == seen.data:
        marked = [(one, json.dumps([mark, _signature_of(seen.marks.get(one.pipeline_id))])) for one, mark in own]
        keys = None
    elif len(own) < 2:
        marked = [(one, json.dumps([mark, data])) for one, mark in own]
        keys = None
    else:
        keys = store.samples.keys().held()
        signatures = tag_signatures(keys.samples, keys.feedback, keys.labels)
        marked = [(one, json.dumps([mark, _signature(scope_of(store, one), signatures, data)])) for one, mark in own]
    changed = [(one, mark) for one, mark in marked if seen.marks.get(one.pipeline_id) != mark]
    if keys is None and len(changed) > 1:
        keys = store.samples.keys().held()
    # What the budget of the last pass left out comes first.
    order = {pipeline_id: place for place, pipeline_id in enumerate(seen.marks)}
    changed.sort(key=lambda pair: order.get(pair[0].pipeline_id, -1))
    return Pass(data, changed, keys)


def _signature(scope: Scope, signatures: Mapping[str, tuple[int, int]], data: str) -> list[object]:
    """What changes with every sample that the scope could select; a dataset without tags may select any."""
    tags = dict.fromkeys(tag for group in scope.groups for tag in group.tags)
    anything = [data] if any(not group.tags for group in scope.groups) else []
    return [*(signatures.get(tag) for tag in tags), *anything]


def _signature_of(mark: str | None) -> object:
    return json.loads(mark)[1] if mark else None


def readiness(store: Store, pipeline: Pipeline, now: datetime, *, keys: KeyFrames | None = None) -> Readiness:
    """Count what the pipeline has, and when it may start by schedule and after failures."""
    base = base_of(store, pipeline)
    measured = measure(store, pipeline, length_of(store, base), now, keys=keys)
    if not measured.selection.ready:
        return Readiness(measured, base, None)
    attempts = store.attempts.list(pipeline.pipeline_id)
    last_end = attempts[-1].finished_at if attempts else None
    due = due_at(
        pipeline.settings.train_when.schedule,
        failures=pipeline.failures,
        last_end=last_end,
        waiting_since=pipeline.next_due_at,
        now=now,
    )
    return Readiness(measured, base, now if pipeline.train_now else due)


@dataclass(frozen=True, slots=True)
class Counted:
    """What a pipeline selects at one moment, for people to read; `problem` where its model could not be used for it."""

    selection: Selection
    problem: str | None


def counted(store: Store, pipeline: Pipeline, now: datetime) -> Counted:
    """Count what the pipeline has, also while its model is missing or changed: then no sample counts as too long."""
    try:
        length, problem = length_of(store, base_of(store, pipeline)), None
    except MODEL_ERRORS as error:
        length, problem = None, error.message
    return Counted(measure(store, pipeline, length, now).selection, problem)


def look(store: Store, pipeline: Pipeline, now: datetime, *, keys: KeyFrames | None = None) -> Opened | NotYet:
    """Open the pipeline's next attempt if the rules allow it now; otherwise say why not.

    `keys` are frames of samples that a pass over many pipelines read once, after `now`.
    """
    attempts = store.attempts.list(pipeline.pipeline_id)
    if held := _held_by(store, pipeline, attempts):
        if pipeline.next_due_at is not None:  # a slot that passes meanwhile is not one that was waited for
            store.pipelines.set_due(pipeline.pipeline_id, None)
        return NotYet(pipeline.tag, held)
    # What is counted is what the attempt freezes, also when somebody edits a dataset meanwhile.
    datasets = store.datasets.get_many(pipeline.settings.datasets)
    pipeline = dataclasses.replace(pipeline, frozen_datasets=tuple(one.conditions for one in datasets))
    try:
        ready = readiness(store, pipeline, now, keys=keys)
    except MODEL_ERRORS as error:
        return NotYet(pipeline.tag, error.message, blocked=True)
    if ready.due_at is None:
        if pipeline.next_due_at is not None:  # a slot noted when there was enough would count as waited for
            store.pipelines.set_due(pipeline.pipeline_id, None)
        return NotYet(pipeline.tag, ready.measured.selection.message)
    if ready.due_at > now:
        if pipeline.next_due_at != ready.due_at:
            store.pipelines.set_due(pipeline.pipeline_id, ready.due_at)
        return NotYet(pipeline.tag, f"It has enough and waits until {ready.due_at:%Y-%m-%d %H:%M} UTC.", ready.due_at)
    trigger: Trigger = "data"
    if pipeline.train_now:
        trigger = "manual"
    elif pipeline.settings.train_when.schedule is not None:
        trigger = "schedule"
    attempt = store.attempts.open_attempt(
        pipeline.pipeline_id,
        trigger=trigger,
        frozen=_frozen(store, pipeline, ready.base, datasets, first=not attempts),
        now=now,
        sentence=ready.measured.selection.message,
        revision=pipeline.revision,
        after=attempts[-1].attempt_no if attempts else 0,
    )
    if attempt is None:
        return NotYet(pipeline.tag, "Another look came first.")
    return Opened(pipeline.tag, attempt, f"Attempt {attempt.attempt_no} opened.")


def train_now(store: Store, pipeline: Pipeline, now: datetime | None = None) -> Attempt:
    """Train now: skips the schedule and the wait after a failure, never the minimum.

    Raises Refused in the order of rules.md, NotEnoughSamples, or AgentCouldNotStart.
    """
    now = now or datetime.now(UTC)
    newest = store.attempts.list(pipeline.pipeline_id)[-1:]
    active = [ActiveAttempt(one.attempt_no, one.run_id, one.state) for one in newest if not one.ended]
    check_train_now(
        pipeline.tag,
        enabled=pipeline.enabled,
        active=active[0] if active else None,
        versions=len(store.versions.list(pipeline.pipeline_id)),
        max_versions=pipeline.settings.max_versions,
        minimum=readiness(store, pipeline, now).measured.selection.minimum if pipeline.enabled and not active else None,
    )
    if not active:
        check_judge(store.settings)
    chosen = store.pipelines.want_training(pipeline.pipeline_id)
    found = look(store, chosen, now)
    if isinstance(found, Opened):
        return found.attempt
    store.pipelines.want_training(pipeline.pipeline_id, wanted=False)
    raise Refused("RUN_ACTIVE", f"No attempt of {pipeline.tag} was opened. {found.sentence}")


def anything_due(store: Store, now: datetime) -> bool:
    """Whether any pipeline would open an attempt at `now` or waits for long samples to be counted; opens nothing."""
    for pipeline, _mark in fingerprint(store, now):
        if _held_by(store, pipeline, store.attempts.list(pipeline.pipeline_id)):
            continue
        try:
            ready = readiness(store, pipeline, now)
        except MODEL_ERRORS:
            continue  # nothing opens until a person has mended the model
        counting = ready.due_at is None and ready.measured.uncounted.height > 0
        if counting or (ready.due_at is not None and ready.due_at <= now):
            return True
    return False


def states_of(store: Store, pipeline: Pipeline, now: datetime) -> pl.DataFrame:
    """State of every sample that the pipeline selects: `sample_id`, `state`, `attempt_no`, `version_no`, `reason`."""
    rows = counted(store, pipeline, now).selection.rows
    pair = ["sample_id", "right_key"]
    trained = trained_pairs(store, pipeline).collect()
    # One that has no right answer any more (it was marked wrong) was trained on by whoever trained on it at all.
    by_any = trained.group_by("sample_id").agg(pl.col("attempt_no").unique().sort().alias("trained_by"))
    by_pair = pl.concat(
        [
            trained.group_by(pair).agg(pl.col("attempt_no").unique().sort().alias("trained_by")),
            by_any.select("sample_id", pl.lit(None, pl.Int64).alias("right_key"), "trained_by"),
        ]
    )
    other = trained.select("sample_id").unique().with_columns(before=pl.lit(True))
    known = rows.join(by_pair, on=pair, how="left", nulls_equal=True).join(other, on="sample_id", how="left")
    # Few different situations stand for any number of samples, so each sentence is made once.
    situation = ["reason", "held_by", "trained_by", "before"]
    versions = {
        store.attempts.get(version.run_id).attempt_no: version.version_no
        for version in store.versions.list(pipeline.pipeline_id)
        if version.rolled_back_at is None
    }
    states = [
        {
            **row,
            **sample_state(
                reason=row["reason"],
                held_by=row["held_by"],
                trained_by=row["trained_by"] or [],
                trained_before_correction=bool(row["before"]) and not row["trained_by"],
                versions=versions,
            ).as_dict(),
            "code": row["reason"],
        }
        for row in known.select(situation).unique().iter_rows(named=True)
    ]
    found = pl.DataFrame(
        [
            {key: state[key] for key in (*situation[1:], "code", "state", "attempt_no", "version_no", "reason")}
            for state in states
        ],
        schema={
            **{name: known.schema[name] for name in situation[1:]},
            "code": pl.String,
            "state": pl.String,
            "attempt_no": pl.Int64,
            "version_no": pl.Int64,
            "reason": pl.String,
        },
    )
    on = [*situation[1:], "code"]
    return (
        known.rename({"reason": "code"})
        .join(found, on=on, how="left", nulls_equal=True)
        .select("sample_id", "state", "attempt_no", "version_no", "reason")
    )


def _held_by(store: Store, pipeline: Pipeline, attempts: Sequence[Attempt]) -> str | None:
    """What holds the next attempt however many samples there are; None when nothing does."""
    if attempts and not attempts[-1].ended:
        return f"Attempt {attempts[-1].attempt_no} is {attempts[-1].state}; one at a time."
    limit = pipeline.settings.max_versions
    if limit is not None and len(store.versions.list(pipeline.pipeline_id)) >= limit:
        return f"It has made the {limit} versions that its limit allows."
    return None


def _frozen(
    store: Store, pipeline: Pipeline, base: BaseModel, datasets: Sequence[Dataset], *, first: bool
) -> dict[str, object]:
    """What an attempt keeps of its pipeline and installation from the moment it opens."""
    return {
        "settings": pipeline.settings.to_json(),
        "tags": [pipeline.tag, *pipeline.settings.tags],
        "datasets": [one.frozen() for one in datasets],
        "model_id": pipeline.model_id,
        "model_family": base.family,
        "model_revision": base.revision,
        "base_digest": base.digest,
        "length": dataclasses.asdict(length_of(store, base)),
        "max_answer_tokens": store.settings.max_answer_tokens,
        "judge": store.settings.judge,
        "judge_model": store.settings.judge_model,
        "judge_prices": {
            "input_cents_per_million": str(store.settings.judge_input_cents_per_million),
            "output_cents_per_million": str(store.settings.judge_output_cents_per_million),
        },
        "scoring_limit_cents": store.settings.scoring_limit_cents,
        # Nothing is built on the live version yet, so every attempt trains from the base on all samples.
        "from_base_reason": "first_version" if first else None,
    }
