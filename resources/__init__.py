"""Dagster resources: thin ConfigurableResource wrappers that hand out the plain objects of `store/` and `models/`.

Belongs here: configuration and life cycle. Does not belong here: any rule, any query.
"""

from pathlib import Path

import dagster as dg
from pydantic import PrivateAttr

from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store


class StoreResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # hands out a Store, holds no value itself
    """The installation's stores. `home` overrides LOOP_HOME; other settings come from the environment and the home."""

    home: str | None = None

    _store: Store | None = PrivateAttr(default=None)

    def open(self) -> Store:
        """The stores, opened once per process and migrated to this version."""
        if self._store is None:
            settings = Settings(home=Path(self.home)) if self.home else Settings()
            self._store = open_store(settings)
        return self._store
