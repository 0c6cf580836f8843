"""What an installation no longer needs, and when somebody has to look.

Belongs here: how long adapters, runs and reviews are kept (rules.md, Building on the live version, Kept weights; Going
live). Does not belong here: deleting anything, any clock: `now` comes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

#: An attempt that became no version keeps its adapter this long after its end; until then it can be tested again.
ADAPTER_TIME: Final = timedelta(days=1)
#: Runs that only moved samples or kept house are of no interest after this long (design.md, Machines).
RUN_TIME: Final = timedelta(days=7)
#: Of so many attempts of a pipeline it is kept, sample by sample, why they left a sample out; of older ones in numbers.
LEFT_OUT_KEPT: Final = 3
#: Housekeeping that nothing asks for happens this often.
FULL_ROUND: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Weights:
    """What decides whether an attempt's adapter is still needed."""

    adapter_digest: str | None
    finished_at: datetime | None
    is_version: bool
    pipeline_deleted: bool


def adapter_is_kept(weights: Weights, now: datetime) -> bool:
    """Whether the adapter is needed at `now`: of versions as long as their pipeline, of others until a day after."""
    if weights.adapter_digest is None or weights.pipeline_deleted:
        return False
    if weights.is_version or weights.finished_at is None:
        return True
    return now < weights.finished_at + ADAPTER_TIME


def review_is_over(review_until: datetime | None, now: datetime) -> bool:
    """Whether a review has ended without a decision (rules.md: it waits 14 days, then expires)."""
    return review_until is not None and now >= review_until


def round_is_due(last: datetime | None, now: datetime) -> bool:
    """Whether the daily round is due. A clock that was set back does not put it off for longer than a day."""
    return last is None or not timedelta(0) <= now - last < FULL_ROUND
