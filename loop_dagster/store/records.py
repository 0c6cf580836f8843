"""What the registry says about attempts, as frozen records.

Belongs here: the records that `attempts.py` returns and the names of the columns that its writers may set. Does not
belong here: any statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import sqlalchemy as sa

from loop_dagster.rules.states import Decision, TrainingRunState, Trigger, Verdict, is_terminal

StepOutcome = Literal["done", "failed", "lost"]

#: Who did something when no person or key is named.
LOOP: Final = "loop"
#: What `move` and `note` may set beside the state.
FIELDS: Final[frozenset[str]] = frozenset(
    {
        "train_rows",
        "holdout_rows",
        "counts",
        "base_digest",
        "adapter_digest",
        "compared_with",
        "compared_with_version",
        "verdict",
        "report",
        "decision",
        "decided_at",
        "forced",
        "version_no",
        "error_code",
        "review_until",
        "gpu_seconds",
    }
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt as it was when it was read. `run_id` is its id on the wire, `try_no` counts tries of its step.

    `frozen` holds settings, model, judge and limits as they were when it opened; `reason` is its last sentence.
    `forced`: the approval under `decision` was given with force.
    """

    run_id: str
    pipeline_id: str
    attempt_no: int
    state: TrainingRunState
    since: datetime
    trigger: Trigger
    revision: int
    frozen: dict[str, Any]
    try_no: int
    train_rows: int | None
    holdout_rows: int | None
    counts: dict[str, Any]
    base_digest: str | None
    adapter_digest: str | None
    compared_with: Literal["version", "original"] | None
    compared_with_version: int | None
    verdict: Verdict | None
    report: dict[str, Any] | None
    decision: Decision | None
    decided_at: datetime | None
    forced: bool
    version_no: int | None
    reason: str | None
    error_code: str | None
    review_until: datetime | None
    cancel_requested: bool
    gpu_seconds: int | None
    created_at: datetime
    finished_at: datetime | None

    @property
    def key(self) -> str:
        """Partition key, `<pipeline id>/<number, four digits>`."""
        return f"{self.pipeline_id}/{self.attempt_no:04d}"

    @property
    def ended(self) -> bool:
        return is_terminal(self.state)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of an attempt's timeline; `seq` counts from 1. Sentences hold codes, ids, counts, no sample text."""

    seq: int
    at: datetime
    from_state: TrainingRunState | None
    to_state: TrainingRunState
    sentence: str
    error_code: str | None
    actor: str


@dataclass(frozen=True, slots=True)
class Claim:
    """That one run of Dagster works, or worked, on one try of one step."""

    run_id: str
    step: str
    try_no: int
    dagster_run_id: str
    claimed_at: datetime
    ended_at: datetime | None
    outcome: StepOutcome | None


def check_fields(fields: Mapping[str, Any]) -> None:
    unknown = sorted(set(fields) - FIELDS)
    if unknown:
        raise TypeError(
            f"an attempt has no such fields to set: {', '.join(unknown)}; known: {', '.join(sorted(FIELDS))}"
        )


def attempt_from(row: sa.RowMapping) -> Attempt:
    return Attempt(**without_workspace(row))


def without_workspace(row: sa.RowMapping) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "workspace"}
