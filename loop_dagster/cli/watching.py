"""Staying with the daemon until nothing moves: what `loop run --until-idle` and `loop demo` share."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from loop_dagster.cli.output import err, progress
from loop_dagster.opening import anything_due, fingerprint
from loop_dagster.processes import Process, runs_under_way
from loop_dagster.rules.states import step_of
from loop_dagster.scoring import wanted
from loop_dagster.store.intake import waiting_files
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt

#: How often the registry is asked, in seconds.
LOOK_EVERY_S = 0.5
#: Nothing may have moved for this long before it counts as idle.
QUIET_S = 3.0
#: The part of the work that a bar can follow: state → (child's folder, what it counts).
BARS = {"training": ("train", "Training"), "candidate_running": ("answer", "Answering")}


@dataclass(slots=True)
class Watch:
    """What one stay with the daemon saw: attempts that ended, and the state that each was last seen in."""

    ended: list[Attempt] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[Attempt]:
        return [attempt for attempt in self.ended if attempt.state == "failed"]


def until_idle(store: Store, daemon: Process, *, quiet: bool) -> Watch:
    """Stay until no attempt moves and nothing is due. Raises DaemonEnded when the daemon is gone.

    An attempt that waits for a person does not keep this going, nor does one whose next try is hours away. Unless
    `quiet`, each change of state is a line on standard error, and training and answering have a bar.
    """
    watch = Watch(states={attempt.run_id: attempt.state for attempt in store.attempts.recent()})
    settled_since: float | None = None
    settled_marks: list[str] | None = None
    while True:
        daemon.check()
        now = datetime.now(UTC)
        changed = _note_changes(store, watch, quiet=quiet)
        running = [attempt for attempt in store.attempts.active() if step_of(attempt.state) is not None]
        if running and not quiet:
            _follow(store, running[0], daemon)
        if changed or running or store.inbox.pending().rows or waiting_files(store, now):
            settled_since = None
        elif settled_since is None:
            settled_since = time.monotonic()
        elif time.monotonic() - settled_since >= QUIET_S:
            marks = [mark for _pipeline, mark in fingerprint(store, now)]
            if marks != settled_marks and (anything_due(store, now) or wanted(store, now)):
                settled_since = None  # the sensor's next look opens it, or has its samples scored
            elif not runs_under_way(store.settings):
                return watch
            else:
                settled_marks = marks
        time.sleep(LOOK_EVERY_S)


def _note_changes(store: Store, watch: Watch, *, quiet: bool) -> bool:
    changed = False
    for attempt in store.attempts.recent():
        if watch.states.get(attempt.run_id) == attempt.state:
            continue
        changed = True
        watch.states[attempt.run_id] = attempt.state
        if attempt.ended:
            watch.ended.append(attempt)
        if not quiet:
            err.print(
                f"[dim]{datetime.now(UTC):%H:%M:%S}[/dim] {attempt.key}  [bold]{attempt.state}[/bold]  {attempt.reason}"
            )
    return changed


def _follow(store: Store, attempt: Attempt, daemon: Process) -> None:
    """Draw a bar for as long as the attempt's child works and the attempt stays in its state.

    Raises DaemonEnded when the daemon is gone: nobody would move the attempt any more.
    """
    if attempt.state not in BARS:
        return
    folder, label = BARS[attempt.state]
    path = store.settings.work / attempt.run_id / folder / "progress.json"
    if not path.is_file():
        return
    with progress(label, quiet=False) as update:
        while store.attempts.get(attempt.run_id).state == attempt.state:
            daemon.check()
            with contextlib.suppress(OSError, ValueError):
                seen: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                update(seen["done"], seen["total"])
            time.sleep(LOOK_EVERY_S)
