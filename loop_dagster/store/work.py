"""Private folders of running steps, and their end: they hold copies of texts that only the running attempt needs.

Belongs here: which of them may go. Does not belong here: what a step puts into its folder.
"""

from __future__ import annotations

import shutil

from loop_dagster.errors import NotFound
from loop_dagster.rules.states import step_of
from loop_dagster.store.open import Store


def sweep_work(store: Store) -> int:
    """Remove the work folders of attempts that have ended or wait for a person; returns how many."""
    gone = 0
    if not store.settings.work.is_dir():
        return gone
    for folder in store.settings.work.iterdir():
        try:
            needed = step_of(store.attempts.get(folder.name).state) is not None
        except NotFound:
            continue  # of a run that has no attempt; it removes its folder itself
        if not needed:
            shutil.rmtree(folder, ignore_errors=True)
            gone += 1
    return gone
