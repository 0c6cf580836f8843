"""Datasets in the registry: saved sets of conditions, each looked up anew whenever somebody asks what it selects.

Belongs here: names, revisions, and which pipelines and attempts a dataset belongs to. Does not belong here: what a
condition means (rules/), which samples meet it (rules/matching.py). Deleting one takes it off its pipelines in the same
transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from loop_dagster.errors import NotFound, Refused, RevisionMismatch
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.names import checked_name, name_key
from loop_dagster.store.pipelines import Pipeline, Pipelines, lock_datasets
from loop_dagster.store.registry import Registry, insert_new
from loop_dagster.store.schema import datasets


@dataclass(frozen=True, slots=True)
class Dataset:
    """One dataset as it was when it was read; `created_by` is the API key that saved it, None for the command line."""

    dataset_id: str
    name: str
    conditions: DatasetConditions
    revision: int
    created_by: str | None
    created_at: datetime
    updated_at: datetime

    def frozen(self) -> dict[str, Any]:
        """What an attempt that trains on it keeps of it (`TrainedOnDataset`)."""
        return {
            "id": self.dataset_id,
            "name": self.name,
            "revision": self.revision,
            **self.conditions.to_json(),
        }


def frozen_conditions(kept: Mapping[str, Any]) -> DatasetConditions:
    """The conditions in what `Dataset.frozen` gave."""
    beside = ("id", "name", "revision")
    return DatasetConditions.from_json({name: value for name, value in kept.items() if name not in beside})


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a deletion did: the dataset as it was, and the pipelines that it was taken off."""

    dataset: Dataset
    removed_from: tuple[Pipeline, ...]


class Datasets:
    """The datasets of one workspace. A `ref` is an id or a name."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def get(self, ref: str) -> Dataset:
        """The dataset with this id or, whatever its case, this name. Raises NotFound."""
        with self.registry.read() as connection:
            return self._find(connection, ref)

    def list(self) -> tuple[Dataset, ...]:
        """Every dataset, the most recently changed first."""
        query = sa.select(datasets).where(datasets.c.workspace == self.registry.workspace)
        ordered = query.order_by(datasets.c.updated_at.desc(), datasets.c.dataset_id.desc())
        with self.registry.read() as connection:
            return tuple(_dataset(row) for row in connection.execute(ordered).mappings())

    def get_many(self, dataset_ids: Sequence[str]) -> tuple[Dataset, ...]:
        """Those with these ids, in their order; one that is not there any more is left out."""
        if not dataset_ids:
            return ()
        query = sa.select(datasets).where(
            datasets.c.workspace == self.registry.workspace, datasets.c.dataset_id.in_(list(dataset_ids))
        )
        with self.registry.read() as connection:
            found = {row["dataset_id"]: _dataset(row) for row in connection.execute(query).mappings()}
        return tuple(found[one] for one in dataset_ids if one in found)

    def create(
        self,
        name: str,
        *,
        conditions: DatasetConditions | None = None,
        created_by: str | None = None,
        now: datetime | None = None,
    ) -> Dataset:
        """Save a dataset. Raises BadRequest for a name that is empty or over 80 characters, DATASET_NAME_TAKEN."""
        now = now or datetime.now(UTC)
        clean = checked_name(name, whose="A dataset's")
        row = {
            "workspace": self.registry.workspace,
            "dataset_id": f"ds_{secrets.token_hex(8)}",
            "name": clean,
            "name_key": name_key(clean),
            "conditions": (conditions or DatasetConditions()).to_json(),
            "revision": 1,
            "created_by": created_by,
            "created_at": now,
            "updated_at": now,
        }
        with self.registry.write() as connection:
            if not insert_new(connection, datasets, row):
                raise _name_taken(clean)
            return self._find(connection, str(row["dataset_id"]))

    def edit(
        self,
        ref: str,
        *,
        conditions: Mapping[str, Any] | None = None,
        name: str | None = None,
        expected_revision: int | None = None,
        now: datetime | None = None,
    ) -> Dataset:
        """Change what is given; in `conditions` absent keeps, null takes one out and a value replaces it.

        A new revision is made if anything changed, none otherwise. Raises RevisionMismatch, DATASET_NAME_TAKEN,
        BadRequest and NotFound; nothing changes then.
        """
        with self.registry.write() as connection:
            found = self._find(connection, ref, lock=True)
            if expected_revision is not None and expected_revision != found.revision:
                raise RevisionMismatch(found.dataset_id, expected_revision, found.revision, kind="Dataset")
            changes: dict[str, Any] = {}
            if name is not None and (clean := checked_name(name, whose="A dataset's")) != found.name:
                changes |= {"name": clean, "name_key": name_key(clean)}
            wanted = found.conditions.merged(conditions or {})
            if wanted != found.conditions:
                changes["conditions"] = wanted.to_json()
            if not changes:
                return found
            changes |= {"revision": found.revision + 1, "updated_at": now or datetime.now(UTC)}
            try:
                connection.execute(sa.update(datasets).where(self._is(found.dataset_id)).values(**changes))
            except sa.exc.IntegrityError:
                raise _name_taken(str(name)) from None
            return self._find(connection, found.dataset_id)

    def delete(self, ref: str, *, now: datetime | None = None) -> Deleted:
        """Delete a dataset and take it off every pipeline, each of which is at a new revision then."""
        with self.registry.write() as connection:
            lock_datasets(self.registry, connection, shared=False)
            found = self._find(connection, ref, lock=True)
            taken_off = Pipelines(self.registry).drop_dataset(connection, found.dataset_id, now or datetime.now(UTC))
            connection.execute(sa.delete(datasets).where(self._is(found.dataset_id)))
            return Deleted(found, taken_off)

    def _find(self, connection: sa.Connection, ref: str, *, lock: bool = False) -> Dataset:
        for match in (datasets.c.dataset_id == ref, datasets.c.name_key == name_key(ref)):
            query = sa.select(datasets).where(datasets.c.workspace == self.registry.workspace, match)
            row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
            if row is not None:
                return _dataset(row)
        raise NotFound("dataset", ref)

    def _is(self, dataset_id: str) -> sa.ColumnElement[bool]:
        return sa.and_(datasets.c.workspace == self.registry.workspace, datasets.c.dataset_id == dataset_id)


def using(pipelines: Collection[Pipeline], dataset_id: str) -> list[Pipeline]:
    """Those of the pipelines that train on a dataset."""
    return [one for one in pipelines if dataset_id in one.settings.datasets]


def _name_taken(name: str) -> Refused:
    said = f"Another dataset has the name {name!r}, whatever its case. Nothing was saved; choose another name."
    return Refused("DATASET_NAME_TAKEN", said, name=name)


def _dataset(row: sa.RowMapping) -> Dataset:
    values = {name: row[name] for name in ("dataset_id", "name", "revision", "created_by", "created_at", "updated_at")}
    return Dataset(**values, conditions=DatasetConditions.from_json(row["conditions"]))
