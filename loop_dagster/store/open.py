"""Opens everything that an installation keeps: the one place that turns settings into stores."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from loop_dagster.settings import Settings
from loop_dagster.store.artifacts import Artifacts
from loop_dagster.store.attempts import Attempts
from loop_dagster.store.calls import Calls
from loop_dagster.store.capturing import Capturing
from loop_dagster.store.datasets import Datasets
from loop_dagster.store.inbox import Inbox
from loop_dagster.store.keys import Keys
from loop_dagster.store.lake import Lake
from loop_dagster.store.leases import Leases
from loop_dagster.store.owner import owner_of
from loop_dagster.store.pipelines import Pipelines
from loop_dagster.store.registry import Registry
from loop_dagster.store.samples import Samples
from loop_dagster.store.scorings import Scorings
from loop_dagster.store.sources import Sources
from loop_dagster.store.versions import Versions


@dataclass(frozen=True, slots=True)
class Store:
    """Plain objects over one registry, one lake and one artifact folder."""

    settings: Settings
    registry: Registry
    leases: Leases
    lake: Lake
    artifacts: Artifacts
    inbox: Inbox
    samples: Samples
    pipelines: Pipelines
    attempts: Attempts
    versions: Versions
    keys: Keys
    calls: Calls
    sources: Sources
    scorings: Scorings
    capturing: Capturing
    datasets: Datasets


def open_store(settings: Settings | None = None) -> Store:
    """Stores of the installation that `settings` (the environment by default) names, migrated to this version.

    Where nothing can be written, on a file system mounted read-only, what is there can be read all the same. Raises the
    errors of registry.py when the registry cannot be reached or belongs to a newer version.
    """
    settings = settings or Settings()
    settings.root.mkdir(parents=True, exist_ok=True)
    registry = Registry(settings.registry, settings.workspace)
    if registry.path is not None and registry.path.exists() and not os.access(registry.path.parent, os.W_OK):
        registry = Registry(settings.registry, settings.workspace, read_only=True)
    registry.migrate()
    return store_over(settings, registry)


def store_over(settings: Settings, registry: Registry) -> Store:
    """The same stores over a registry that is there already; nothing is made, migrated or looked at."""
    lake = Lake(settings.lake, settings.workspace, owner=functools.partial(owner_of, registry, settings.root))
    inbox = Inbox(registry)
    return Store(
        settings=settings,
        registry=registry,
        leases=Leases(registry),
        lake=lake,
        artifacts=Artifacts(settings.artifacts),
        inbox=inbox,
        samples=Samples(lake, inbox),
        pipelines=Pipelines(registry),
        attempts=Attempts(registry),
        versions=Versions(registry),
        keys=Keys(registry),
        calls=Calls(registry),
        sources=Sources(registry),
        scorings=Scorings(registry, inbox),
        capturing=Capturing(registry),
        datasets=Datasets(registry),
    )
