"""When a pipeline's next attempt may start once it has enough, and why Train now is refused.

Belongs here: schedule slots, the waits after attempts that kept no adapter, the order of refusals. Does not belong
here: whether there is enough (`minimums.py`), and any clock: `now` comes in. All times are UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from loop_dagster.errors import NotEnoughSamples, Refused
from loop_dagster.rules.minimums import Minimum
from loop_dagster.rules.pipelines import Schedule
from loop_dagster.rules.states import TrainingRunState

#: Waits before the next automatic try after 1, 2, 3 and 4 attempts in a row that kept no adapter; then a day each time.
WAITS: Final = (timedelta(minutes=30), timedelta(hours=1), timedelta(hours=2), timedelta(hours=4))
LONGEST_WAIT: Final = timedelta(days=1)


def wait_after(failures: int) -> timedelta:
    """How long the next automatic try waits after `failures` attempts in a row that kept no adapter."""
    if failures <= 0:
        return timedelta(0)
    return WAITS[failures - 1] if failures <= len(WAITS) else LONGEST_WAIT


def next_slot(schedule: Schedule, at: datetime) -> datetime:
    """The first slot of the schedule at `at` or after it, on the hour."""
    at = at.astimezone(UTC)
    slot = at.replace(hour=schedule.hour_utc, minute=0, second=0, microsecond=0)
    if schedule.weekday is not None:
        # Monday is 0 in Python and 1 in the schedule, whose week begins on Sunday.
        slot += timedelta(days=(schedule.weekday - (slot.weekday() + 1)) % 7)
    if slot < at:
        slot += timedelta(days=7 if schedule.every == "week" else 1)
    return slot


def due_at(
    schedule: Schedule | None,
    *,
    failures: int,
    last_end: datetime | None,
    waiting_since: datetime | None,
    now: datetime,
) -> datetime:
    """When an attempt with enough samples may start on its own: `now`, or the moment to look again.

    `failures` attempts in a row kept no adapter, the last of which ended at `last_end`. `waiting_since` is what this
    function gave when it was asked before (`next_due_at`): a slot that has passed since, in the meantime or while the
    scheduler was down, is taken now rather than waited for once more, however long ago it was. The caller
    forgets that moment when an attempt opens, when there is no longer enough, and when the pipeline is held or paused:
    a slot is used once, and a minimum that is met only after a slot waits for the next one.
    """
    earliest = now if last_end is None else max(now, last_end + wait_after(failures))
    if schedule is None:
        return earliest
    if waiting_since is not None and earliest == now and waiting_since <= now:
        was_slot = next_slot(schedule, waiting_since) == waiting_since
        waited = last_end is None or waiting_since >= last_end + wait_after(failures)
        if was_slot and waited:
            return now
    return next_slot(schedule, earliest)


@dataclass(frozen=True, slots=True)
class ActiveAttempt:
    """The pipeline's attempt that has not ended."""

    attempt_no: int
    run_id: str
    state: TrainingRunState


def check_train_now(
    tag: str,
    *,
    enabled: bool,
    active: ActiveAttempt | None,
    versions: int,
    max_versions: int | None,
    minimum: Minimum | None,
) -> None:
    """Raise the first reason, in the order of rules.md, why Train now may not open an attempt.

    `Refused` with RULE_PAUSED, RUN_ACTIVE or VERSION_LIMIT_REACHED, then `NotEnoughSamples`. An attempt in
    waiting_gpus does not refuse it: the caller books that one again instead. `minimum` None leaves the last check to
    the caller, who may not have counted yet.
    """
    if not enabled:
        raise Refused("RULE_PAUSED", f"Pipeline {tag} is paused, so it does not train. Switch it back on first.")
    if active is not None and active.state != "waiting_gpus":
        raise Refused(
            "RUN_ACTIVE",
            f"Attempt {active.attempt_no} of {tag} is {active.state}; a pipeline runs one attempt at a time. "
            "Wait for it or cancel it.",
            run_id=active.run_id,
        )
    if active is not None:
        return
    if max_versions is not None and versions >= max_versions:
        raise Refused(
            "VERSION_LIMIT_REACHED",
            f"Pipeline {tag} has made {versions} versions and its limit is {max_versions}. Raise or remove the limit.",
        )
    if minimum is not None and not minimum.ready:
        raise NotEnoughSamples(tag, minimum.have, minimum.needed, minimum.message)
