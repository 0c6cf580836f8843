"""Pipelines in the registry: made, found, edited with revisions, paused, deleted.

Belongs here: names, tags and ids that stay unique for ever, revisions, the source that a pipeline switches on, and what
has to happen with it in one transaction. Does not belong here: what a setting means (rules/pipelines.py), when an
attempt starts (rules/minimums.py), attempts and versions themselves.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import sqlalchemy as sa

from loop_dagster.errors import BadRequest, NotFound, Refused, RevisionMismatch
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.names import checked_name, name_key
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.states import TERMINAL
from loop_dagster.rules.tags import slug
from loop_dagster.store.attempts import Attempts
from loop_dagster.store.registry import Registry, insert_new
from loop_dagster.store.schema import attempts, datasets, live, pipeline_revisions, pipelines, sources


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One pipeline as it was when it was read.

    `seed` orders its hold-back and never changes; `failures` counts attempts in a row that kept no adapter; `train_now`
    is a person's wish that skips the schedule once, never the minimum.
    """

    pipeline_id: str
    name: str
    tag: str
    model_id: str
    model_digest: str | None
    seed: int
    enabled: bool
    paused_reason: str | None
    revision: int
    settings: PipelineSettings
    next_due_at: datetime | None
    looked_at: datetime | None
    look_said: str | None
    failures: int
    train_now: bool
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None
    #: Conditions of its datasets, where they are not those of today: as an attempt froze them.
    frozen_datasets: tuple[DatasetConditions, ...] | None = None

    @property
    def live_name(self) -> str:
        """Model name under which its live version answers; stays the same over versions and renames."""
        return f"loop-{self.tag}"


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a deletion did. `cancelled_run_id` is the attempt that was in progress."""

    pipeline: Pipeline
    cancelled_run_id: str | None


#: What a pipeline file has beside its settings.
FILE_FIELDS: Final = ("name", "model", "enabled")


def settings_of(spec: Mapping[str, Any]) -> PipelineSettings:
    """The settings of one pipeline of a file. Raises BadRequest as `PipelineSettings.from_json` does."""
    fields = [*FILE_FIELDS, *PipelineSettings.model_fields]
    unknown = [str(name) for name in spec if name not in fields]
    if unknown:
        raise BadRequest(f"{unknown[0]} is not a field of a pipeline file (known: {', '.join(fields)}).")
    return PipelineSettings.from_json({name: value for name, value in spec.items() if name not in FILE_FIELDS})


class Pipelines:
    """The pipelines of one workspace. A `ref` is an id, a tag or a name."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    # reading

    def get(self, ref: str, *, deleted: bool = False) -> Pipeline:
        """The pipeline that `ref` names; with `deleted`, also one that was deleted. Raises NotFound with near names."""
        with self.registry.read() as connection:
            return self._find(connection, ref, deleted=deleted)

    def list(self) -> tuple[Pipeline, ...]:
        """Every pipeline that was not deleted, oldest first."""
        with self.registry.read() as connection:
            return tuple(_pipeline(row) for row in self._rows(connection) if row["deleted_at"] is None)

    def deleted(self) -> tuple[Pipeline, ...]:
        """Every pipeline that was deleted, oldest first."""
        with self.registry.read() as connection:
            return tuple(_pipeline(row) for row in self._rows(connection) if row["deleted_at"] is not None)

    def revision(self, pipeline_id: str, revision: int) -> PipelineSettings:
        """Settings as they were at a revision. Raises NotFound."""
        with self.registry.read() as connection:
            found = connection.execute(
                sa.select(pipeline_revisions.c.settings).where(
                    pipeline_revisions.c.workspace == self.registry.workspace,
                    pipeline_revisions.c.pipeline_id == pipeline_id,
                    pipeline_revisions.c.revision == revision,
                )
            ).scalar()
        if found is None:
            raise NotFound("revision", f"{pipeline_id}@{revision}")
        return PipelineSettings.from_json(found)

    # writing

    def create(
        self,
        name: str,
        *,
        model_id: str,
        model_digest: str | None = None,
        settings: PipelineSettings | None = None,
        enabled: bool = True,
        seed: int | None = None,
        now: datetime | None = None,
    ) -> Pipeline:
        """Make a pipeline, its tag (a slug of the name) and switch on the source of that tag, which stamps it.

        Raises BadRequest for a name that is empty or over 80 characters; Refused with PIPELINE_NAME_TAKEN or
        OWN_TAG_TAKEN (deleted ones count). `seed` is drawn unless given.
        """
        now = now or datetime.now(UTC)
        with self.registry.write() as connection:
            lock_datasets(self.registry, connection)
            return self._create(
                connection,
                name,
                model_id=model_id,
                model_digest=model_digest,
                settings=settings,
                enabled=enabled,
                seed=seed,
                now=now,
            )

    def edit(
        self,
        ref: str,
        *,
        settings: Mapping[str, Any] | None = None,
        name: str | None = None,
        model_id: str | None = None,
        model_digest: str | None = None,
        enabled: bool | None = None,
        expected_revision: int | None = None,
        now: datetime | None = None,
    ) -> Pipeline:
        """Change what is given. In `settings` absent keeps, null puts back to the default, a value replaces.

        `enabled` pauses it or switches it on again, which is no revision.

        A new revision is made if anything changed, none otherwise. A new `model_id` drops the old pin unless
        `model_digest` comes with it. Raises RevisionMismatch; Refused with PIPELINE_NAME_TAKEN, or RUN_ACTIVE when the
        model would change under an attempt; the errors of PipelineSettings. Nothing changes when anything is refused.
        """
        now = now or datetime.now(UTC)
        with self.registry.write() as connection:
            lock_datasets(self.registry, connection)
            pipeline = self._find(connection, ref, lock=True)
            if expected_revision is not None and expected_revision != pipeline.revision:
                raise RevisionMismatch(pipeline.pipeline_id, expected_revision, pipeline.revision)
            wanted = pipeline.settings.merged(settings) if settings else pipeline.settings
            saved = self._save(
                connection, pipeline, wanted, name=name, model_id=model_id, model_digest=model_digest, now=now
            )
            return saved if enabled is None else self._switch(connection, saved, on=enabled, reason=None, now=now)

    def apply(
        self, spec: Mapping[str, Any], *, model_digest: str | None = None, now: datetime | None = None
    ) -> Literal["created", "changed", "unchanged"]:
        """Make the pipeline of this name as the file says: `name`, `model`, maybe `enabled`, and any settings.

        The file is the whole truth: a setting that it leaves out has its default. A missing `enabled` leaves the switch
        as it is. Applying the same file again answers `unchanged` and makes no revision. Errors as in create and edit.
        """
        now = now or datetime.now(UTC)
        name, model, enabled = (spec.get(field) for field in FILE_FIELDS)
        for field, value, kind in (("name", name, str), ("model", model, str)):
            if not isinstance(value, kind) or not value.strip():
                raise BadRequest(f"{field} must be a text, got {value!r}. A pipeline file begins with name and model.")
        if not isinstance(enabled, (bool, type(None))):
            raise BadRequest(f"enabled must be true or false, got {enabled!r}.")
        wanted = settings_of(spec)
        pin: dict[str, Any] = {"model_id": str(model), "model_digest": model_digest, "now": now}
        with self.registry.write() as connection:
            lock_datasets(self.registry, connection)
            found = self._named(connection, str(name), lock=True)
            if found is None:
                self._create(connection, str(name), settings=wanted, enabled=enabled is not False, seed=None, **pin)
                return "created"
            if found.deleted_at is not None:
                raise _name_taken(str(name), found)
            saved = self._save(connection, found, wanted, name=str(name), **pin)
            if enabled is not None and enabled != saved.enabled:
                saved = self._switch(connection, saved, on=enabled, reason=None, now=now)
            return "unchanged" if saved == found else "changed"

    def pause(self, ref: str, *, reason: str | None = None, now: datetime | None = None) -> Pipeline:
        """Start no further attempt; one in progress finishes and is decided. `reason` is a code, None for a person."""
        with self.registry.write() as connection:
            pipeline = self._find(connection, ref, lock=True)
            return self._switch(connection, pipeline, on=False, reason=reason, now=now or datetime.now(UTC))

    def resume(self, ref: str, *, now: datetime | None = None) -> Pipeline:
        with self.registry.write() as connection:
            pipeline = self._find(connection, ref, lock=True)
            return self._switch(connection, pipeline, on=True, reason=None, now=now or datetime.now(UTC))

    def want_training(self, ref: str, *, wanted: bool = True) -> Pipeline:
        """Note a person's Train now; the attempt that opens next takes the note away."""
        return self._note(ref, train_now=wanted)

    def set_due(self, ref: str, next_due_at: datetime | None) -> Pipeline:
        """When the sensor looks again even if nothing changed; None for never."""
        return self._note(ref, next_due_at=next_due_at)

    def set_look(self, pipeline_id: str, said: str, now: datetime) -> None:
        """What the sensor said when it looked whether an attempt opens; nothing for a pipeline that is gone."""
        mine = sa.and_(pipelines.c.workspace == self.registry.workspace, pipelines.c.pipeline_id == pipeline_id)
        with self.registry.write() as connection:
            connection.execute(sa.update(pipelines).where(mine).values(looked_at=now, look_said=said))

    def delete(self, ref: str, *, now: datetime | None = None) -> Deleted:
        """Delete a pipeline: its attempt is cancelled, its live name stops, its own source is switched off.

        It answers NotFound from then on and its name is never free again. Its samples stay.
        """
        now = now or datetime.now(UTC)
        with self.registry.write() as connection:
            pipeline = self._find(connection, ref, lock=True)
            run_id = self._active_run(connection, pipeline.pipeline_id)
            if run_id is not None:
                Attempts(self.registry).cancel_in(connection, run_id, "Its pipeline was deleted.", now=now)
            workspace = self.registry.workspace
            connection.execute(
                sa.delete(live).where(live.c.workspace == workspace, live.c.pipeline_id == pipeline.pipeline_id)
            )
            connection.execute(
                sa.update(sources)
                .where(sources.c.workspace == workspace, sources.c.source == pipeline.tag)
                .values(enabled=False, updated_at=now)
            )
            gone = self._update(
                connection, pipeline.pipeline_id, deleted_at=now, updated_at=now, enabled=False, train_now=False
            )
            return Deleted(gone, run_id)

    # inside one transaction

    def drop_dataset(self, connection: sa.Connection, dataset_id: str, now: datetime) -> tuple[Pipeline, ...]:
        """Take a dataset off every pipeline that trains on it, in a transaction that holds `lock_datasets`."""
        dropped = []
        for row in self._rows(connection):
            pipeline = _pipeline(row)
            if pipeline.deleted_at is None and dataset_id in pipeline.settings.datasets:
                locked = self._find(connection, pipeline.pipeline_id, lock=True)
                kept = [one for one in locked.settings.datasets if one != dataset_id]
                without = locked.settings.merged({"datasets": kept})
                dropped.append(
                    self._save(connection, locked, without, name=None, model_id=None, model_digest=None, now=now)
                )
        return tuple(dropped)

    def _create(
        self,
        connection: sa.Connection,
        name: str,
        *,
        model_id: str,
        model_digest: str | None,
        settings: PipelineSettings | None,
        enabled: bool,
        seed: int | None,
        now: datetime,
    ) -> Pipeline:
        name, tag = checked_name(name, whose="A pipeline's"), slug(name)
        settings = settings or PipelineSettings()
        self._check_datasets(connection, settings)
        row = {
            "workspace": self.registry.workspace,
            "pipeline_id": f"{tag}-{secrets.token_hex(2)}",
            "name": name,
            "name_key": name_key(name),
            "tag": tag,
            "model_id": model_id,
            "model_digest": model_digest,
            "seed": secrets.randbits(63) if seed is None else seed,
            "enabled": enabled,
            "revision": 1,
            "settings": settings.to_json(),
            "failures": 0,
            "train_now": False,
            "created_at": now,
            "updated_at": now,
        }
        if not insert_new(connection, pipelines, row):
            namesake = self._named(connection, name)
            raise _name_taken(name, namesake) if namesake else _tag_taken(name, tag)
        pipeline = self._find(connection, str(row["pipeline_id"]))
        self._keep_revision(connection, pipeline)
        self._switch_on_source(connection, tag, now)
        return pipeline

    def _save(
        self,
        connection: sa.Connection,
        pipeline: Pipeline,
        settings: PipelineSettings,
        *,
        name: str | None,
        model_id: str | None,
        model_digest: str | None,
        now: datetime,
    ) -> Pipeline:
        changes: dict[str, Any] = {}
        if name is not None and (clean := checked_name(name, whose="A pipeline's")) != pipeline.name:
            changes |= {"name": clean, "name_key": name_key(clean)}
            namesake = self._named(connection, name)
            if namesake is not None and namesake.pipeline_id != pipeline.pipeline_id:
                raise _name_taken(name, namesake)
        digest = model_digest or (pipeline.model_digest if model_id in (None, pipeline.model_id) else None)
        if (model_id or pipeline.model_id, digest) != (pipeline.model_id, pipeline.model_digest):
            run_id = self._active_run(connection, pipeline.pipeline_id)
            if run_id is not None:
                raise Refused(
                    "RUN_ACTIVE",
                    f"The model of pipeline {pipeline.name!r} cannot change while its attempt {run_id} is in progress. "
                    "Nothing was saved: wait until it has ended, or cancel it.",
                    run_id=run_id,
                )
            changes |= {"model_id": model_id or pipeline.model_id, "model_digest": digest}
        if settings != pipeline.settings:
            self._check_datasets(connection, settings)
            changes["settings"] = settings.to_json()
        if not changes:
            return pipeline
        changes |= {"revision": pipeline.revision + 1, "updated_at": now}
        saved = self._update(connection, pipeline.pipeline_id, **changes)
        self._keep_revision(connection, saved)
        return saved

    def _switch(
        self, connection: sa.Connection, pipeline: Pipeline, *, on: bool, reason: str | None, now: datetime
    ) -> Pipeline:
        if (pipeline.enabled, pipeline.paused_reason) == (on, reason):
            return pipeline
        # While it is paused nobody looks whether it still has enough, so a slot that passes then was not waited for.
        state = {"enabled": on, "paused_reason": reason, "next_due_at": None}
        return self._update(connection, pipeline.pipeline_id, **state, updated_at=now)

    def _note(self, ref: str, **values: Any) -> Pipeline:
        with self.registry.write() as connection:
            return self._update(connection, self._find(connection, ref, lock=True).pipeline_id, **values)

    def _update(self, connection: sa.Connection, pipeline_id: str, **values: Any) -> Pipeline:
        mine = sa.and_(pipelines.c.workspace == self.registry.workspace, pipelines.c.pipeline_id == pipeline_id)
        try:
            connection.execute(sa.update(pipelines).where(mine).values(**values))
        except sa.exc.IntegrityError:  # a rename met one that was committed after we looked
            raise _name_taken(str(values.get("name")), None) from None
        return _pipeline(connection.execute(sa.select(pipelines).where(mine)).mappings().one())

    def _keep_revision(self, connection: sa.Connection, pipeline: Pipeline) -> None:
        connection.execute(
            sa.insert(pipeline_revisions).values(
                workspace=self.registry.workspace,
                pipeline_id=pipeline.pipeline_id,
                revision=pipeline.revision,
                settings=pipeline.settings.to_json(),
                model_id=pipeline.model_id,
                created_at=pipeline.updated_at,
            )
        )

    def _check_datasets(self, connection: sa.Connection, settings: PipelineSettings) -> None:
        """Raise NotFound for the first dataset of the settings that is not there."""
        if not settings.datasets:
            return
        query = sa.select(datasets.c.dataset_id).where(
            datasets.c.workspace == self.registry.workspace, datasets.c.dataset_id.in_(settings.datasets)
        )
        there = set(connection.execute(query).scalars())
        missing = next((one for one in settings.datasets if one not in there), None)
        if missing is not None:
            raise NotFound("dataset", missing)

    def _switch_on_source(self, connection: sa.Connection, tag: str, now: datetime) -> None:
        """The source of the tag's name, recording and stamping the tag; what else it was set to stays."""
        row = {
            "workspace": self.registry.workspace,
            "source": tag,
            "enabled": True,
            "tags": [tag],
            "updated_at": now,
        }
        if insert_new(connection, sources, row):
            return
        mine = sa.and_(sources.c.workspace == self.registry.workspace, sources.c.source == tag)
        tags = connection.execute(sa.select(sources.c.tags).where(mine).with_for_update()).scalar_one()
        together = list(dict.fromkeys([tag, *tags]))
        connection.execute(sa.update(sources).where(mine).values(enabled=True, tags=together, updated_at=now))

    def _active_run(self, connection: sa.Connection, pipeline_id: str) -> str | None:
        return connection.execute(
            sa.select(attempts.c.run_id).where(
                attempts.c.workspace == self.registry.workspace,
                attempts.c.pipeline_id == pipeline_id,
                attempts.c.state.not_in(TERMINAL),
            )
        ).scalar()

    def _rows(self, connection: sa.Connection) -> Sequence[sa.RowMapping]:
        mine = sa.select(pipelines).where(pipelines.c.workspace == self.registry.workspace)
        ordered = mine.order_by(pipelines.c.created_at, pipelines.c.pipeline_id)
        return [*connection.execute(ordered).mappings()]

    def _named(self, connection: sa.Connection, name: str, *, lock: bool = False) -> Pipeline | None:
        query = sa.select(pipelines).where(
            pipelines.c.workspace == self.registry.workspace, pipelines.c.name_key == name_key(name)
        )
        row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
        return _pipeline(row) if row is not None else None

    def _find(self, connection: sa.Connection, ref: str, *, lock: bool = False, deleted: bool = False) -> Pipeline:
        """By id, else by tag, else by name; with `lock`, no other transaction changes it until this one ends."""
        lowered = ref.strip().lower()
        for match in (
            pipelines.c.pipeline_id == lowered,
            pipelines.c.tag == lowered,
            pipelines.c.name_key == name_key(ref),
        ):
            query = sa.select(pipelines).where(pipelines.c.workspace == self.registry.workspace, match)
            query = query if deleted else query.where(pipelines.c.deleted_at.is_(None))
            row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
            if row is not None:
                return _pipeline(row)
        known = [row for row in self._rows(connection) if row["deleted_at"] is None]
        words = {row[column].lower(): row["tag"] for row in known for column in ("pipeline_id", "tag", "name")}
        near = difflib.get_close_matches(lowered, words, n=3, cutoff=0.6)
        raise NotFound("pipeline", ref, list(dict.fromkeys(words[word] for word in near)))


def lock_datasets(registry: Registry, connection: sa.Connection, *, shared: bool = True) -> None:
    """Until the transaction ends no dataset is deleted; not `shared`: nor is one given to a pipeline. Take it first."""
    registry.lock(connection, f"datasets/{registry.workspace}", shared=shared)


def _name_taken(name: str, namesake: Pipeline | None) -> Refused:
    what = "A deleted pipeline had" if namesake is not None and namesake.deleted_at else "Another pipeline has"
    return Refused(
        "PIPELINE_NAME_TAKEN",
        f"{what} the name {name!r}, and a name is never given twice in a workspace. Choose another name.",
        name=name,
    )


def _tag_taken(name: str, tag: str) -> Refused:
    return Refused(
        "OWN_TAG_TAKEN",
        f"The name {name!r} makes the tag {tag!r}, which another pipeline owns (a deleted one's counts). "
        "Choose another name.",
        tag=tag,
    )


def _pipeline(row: sa.RowMapping) -> Pipeline:
    values = {name: value for name, value in row.items() if name not in ("workspace", "name_key", "settings")}
    return Pipeline(**values, settings=PipelineSettings.from_json(row["settings"]))
