"""Private folders of running steps, and their end: they hold copies of texts that only the running step needs.

Belongs here: which of them may go, and which samples they may still hold. Does not belong here: what a step puts into
its folder.

`<work>/<run id of an attempt>/` belongs to an attempt, `<work>/run-<run id of Dagster>/` to a run that has no attempt
and holds the lease `run/<that id>` while its process lives. `<work>/scoring/` holds what a judge said of unreviewed
samples until it is stored, without any text, and stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from loop_dagster.errors import NotFound
from loop_dagster.rules.states import step_of
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt

_OF_RUN = "run-"
_SCORING = "scoring"


def run_folder(store: Store, dagster_run_id: str) -> Path:
    """Where a run that has no attempt works."""
    return store.settings.work / f"{_OF_RUN}{dagster_run_id}"


def scoring_folder(store: Store, pipeline_id: str) -> Path:
    """Where chunks of unreviewed samples are scored for a pipeline; a killed run's are there to be stored."""
    return store.settings.work / _SCORING / store.settings.workspace / pipeline_id


def run_lease_name(dagster_run_id: str) -> str:
    """The lease that such a run holds while its process lives."""
    return f"run/{dagster_run_id}"


def run_lives(store: Store, dagster_run_id: str) -> bool:
    """Whether the process of such a run has shown a sign of life within the time of its lease."""
    lease = store.leases.find(run_lease_name(dagster_run_id))
    return lease is not None and lease.expires_at > datetime.now(UTC)


def sweep_work(store: Store) -> int:
    """Remove folders of attempts that need no step now, of runs whose process is gone, and what scoring left of deleted
    pipelines; returns how many.
    """
    gone = 0
    known = {pipeline.pipeline_id for pipeline in store.pipelines.list()}
    left = [folder for folder in scoring_folder(store, "-").parent.glob("*") if folder.name not in known]
    for folder in [*_folders(store), *left]:
        if folder in left or not _needed(store, folder):
            shutil.rmtree(folder, ignore_errors=True)
            gone += 1
    return gone


def attempts_at_work(store: Store) -> list[Attempt]:
    """Attempts whose folder a step may still read."""
    names = {folder.name for folder in _folders(store)}
    return [attempt for attempt in store.attempts.active() if attempt.run_id in names]


def counts_at_work(store: Store) -> bool:
    """Whether a run that counts tokens is at work: its folder holds texts of any pipeline."""
    return any(folder.name.startswith(_OF_RUN) for folder in _folders(store))


def _folders(store: Store) -> Iterator[Path]:
    if store.settings.work.is_dir():
        yield from [folder for folder in store.settings.work.iterdir() if folder.is_dir()]


def _needed(store: Store, folder: Path) -> bool:
    if folder.name == _SCORING:
        return True
    if folder.name.startswith(_OF_RUN):
        return run_lives(store, folder.name.removeprefix(_OF_RUN))
    try:
        return step_of(store.attempts.get(folder.name).state) is not None
    except NotFound:
        return False  # of an attempt that this registry does not know: nobody goes on with it
