"""`loop run` and `loop dev`: the daemon, the UI, serving and the intake folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

import typer

from loop_dagster.cli.output import AsJson, emit_json, err, out, progress
from loop_dagster.errors import EXIT_FAILED, BadRequest
from loop_dagster.models.child import progress_of
from loop_dagster.opening import anything_due, fingerprint
from loop_dagster.processes import PROJECT, Process, running, start_daemon, start_dagster, start_serving
from loop_dagster.rules.states import step_of
from loop_dagster.store.records import Attempt
from loop_dagster.store.intake import waiting_files
from loop_dagster.store.open import Store, open_store

#: How often the registry is asked, in seconds.
LOOK_EVERY_S = 1.0
#: Nothing may have moved for this long before it counts as idle: two ticks of the slowest sensor.
QUIET_S = 3.0


@dataclass(slots=True)
class Watch:
    """What one stay with the daemon saw."""

    ended: list[Attempt] = field(default_factory=list)
    states: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def failed(self) -> list[Attempt]:
        return [attempt for attempt in self.ended if attempt.state == "failed"]


def until_idle(store: Store, daemon: Process, show: Callable[[Attempt], None] | None = None) -> Watch:
    """Stay until no attempt moves and nothing is due; raises DaemonEnded when the daemon is gone.

    `show` is called with each attempt on every look; an attempt that waits for a person does not keep this going.
    """
    watch = Watch()
    looked_at: list[str] | None = None
    quiet_since = time.monotonic()
    while True:
        daemon.check()
        now = datetime.now(UTC)
        if _note(store, watch, show):
            quiet_since = time.monotonic()
        busy = _moving(store, now)
        if not busy and time.monotonic() - quiet_since >= QUIET_S:
            marks = [mark for _pipeline, mark in fingerprint(store, now)]
            if marks != looked_at and anything_due(store, now):
                looked_at = None
            elif not _runs_under_way(store):
                return watch
            else:
                looked_at = marks
        if busy:
            quiet_since = time.monotonic()
        time.sleep(LOOK_EVERY_S)


def _note(store: Store, watch: Watch, show: Callable[[Attempt], None] | None) -> bool:
    """Record every change of state since the last look; True if there was one."""
    changed = False
    for attempt in store.attempts.recent():
        known = watch.states.get(attempt.run_id)
        first_look = not watch.states and known is None
        if known is None or known[0] != attempt.state:
            changed = True
            watch.states[attempt.run_id] = (attempt.state, attempt.reason or "")
            if attempt.finished_at is not None and not first_look and attempt.finished_at >= _STARTED:
                watch.ended.append(attempt)
        if show is not None and attempt.finished_at is None:
            show(attempt)
    return changed


_STARTED = datetime.now(UTC)
