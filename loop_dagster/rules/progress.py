"""What the scheduler does about an attempt that needs a job: request a run, wait, try again, or give up.

Belongs here: the decision for one attempt from what is recorded. Does not belong here: reading or writing any of it.

Dagster never launches a used run key again, failed or not, its default launcher does not notice a killed run worker,
and a killed daemon may have launched a run without noting it. So the only evidence that counts is the attempt's own:
the claim that a run makes as its first act, and the heartbeat of the attempt's lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from loop_dagster.rules.states import Step, TrainingRunState, step_of

#: A step is tried this often before the attempt fails.
MOST_TRIES = 3
#: An attempt can need the same step once more (compared again, tested again). Tries of a step are numbered on for ever,
#: since a try is claimed once; those of its second time begin at 101, of its third at 201.
ROUND = 100
#: A claimed step whose lease has shown no sign of life for this long has lost its process.
LOST_AFTER = timedelta(seconds=60)
#: The sensor that opens an attempt asks for its first run itself; only after this long somebody else does.
OPENED_AFTER = timedelta(seconds=20)
#: A requested run that Dagster has and that never claimed within this time is not going to.
UNCLAIMED_AFTER = timedelta(seconds=300)

Action = Literal["request", "wait", "try_again", "give_up"]
RunStatus = Literal["none", "waiting", "running", "ended"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is recorded about the step that an attempt needs.

    `run` is what Dagster says of the run with this try's key; `claimed_at` and `ended` are of the claim; `last_beat` is
    the newest heartbeat of the attempt's lease; `since` is when it entered its state, `run_since` when that run left
    the queue (or was asked for, before it came into it).
    """

    state: TrainingRunState
    since: datetime
    try_no: int
    run: RunStatus
    run_since: datetime | None = None
    claimed_at: datetime | None = None
    ended: bool = False
    last_beat: datetime | None = None


def step_key(attempt: str, step: Step, try_no: int) -> str:
    """Run key of one try of one step: one key, one run, whoever asks for it."""
    return f"{attempt}:{step}:{try_no}"


def next_action(evidence: Evidence, now: datetime) -> Action:
    """What to do now. Never two live runs of one step: a run is given up only without any sign of life for a minute."""
    if step_of(evidence.state) is None:
        return "wait"
    if evidence.claimed_at is None:
        return _unclaimed(evidence, now)
    if evidence.ended:
        return _again(evidence)
    alive = max(moment for moment in (evidence.claimed_at, evidence.last_beat) if moment is not None)
    if now - alive < LOST_AFTER:
        return "wait"
    return _again(evidence)


def _unclaimed(evidence: Evidence, now: datetime) -> Action:
    if evidence.run == "none":
        just_opened = evidence.state == "built" and evidence.try_no == 1 and now - evidence.since < OPENED_AFTER
        return "wait" if just_opened else "request"
    if evidence.run == "ended":
        return _again(evidence)
    stuck = evidence.run == "running" and evidence.run_since is not None and now - evidence.run_since > UNCLAIMED_AFTER
    return _again(evidence) if stuck else "wait"


def _again(evidence: Evidence) -> Action:
    return "give_up" if tries_of(evidence.try_no) >= MOST_TRIES else "try_again"


def first_try(newest: int | None) -> int:
    """Number of the first try of a step that begins anew; `newest` is the last that was ever claimed of it."""
    return 1 if newest is None else -(-newest // ROUND) * ROUND + 1


def tries_of(try_no: int) -> int:
    """How many tries of its step an attempt has made this time, that one included."""
    return (try_no - 1) % ROUND + 1
