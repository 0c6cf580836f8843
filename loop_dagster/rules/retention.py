"""When a sample leaves every selection (rules.md, Samples).

Belongs here: the days and the moment. Does not belong here: deleting what has expired.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from loop_dagster.errors import BadRequest

IMPORTED_DAYS: Final = 365
CAPTURED_DAYS: Final = 30
MIN_DAYS, MAX_DAYS = 1, 3_650


class BadRetention(BadRequest):
    """Days of retention that are no whole number from 1 to 3,650."""

    code = "RETENTION_OUT_OF_RANGE"

    def __init__(self, found: object) -> None:
        super().__init__(
            f"retention_days must be a whole number from {MIN_DAYS} to {MAX_DAYS:,}, got {found!r}. Nothing was saved; "
            f"leave it out for {CAPTURED_DAYS} days.",
            field="retention_days",
        )


def retention_days(value: object) -> int:
    """A source's days of retention; null is the default. Raises BadRetention."""
    if value is None:
        return CAPTURED_DAYS
    if isinstance(value, bool) or not isinstance(value, int) or not MIN_DAYS <= value <= MAX_DAYS:
        raise BadRetention(value)
    return value


def imported_until(now: datetime) -> datetime:
    """When a sample imported at `now` expires; the source's own days do not apply to imports."""
    return now + timedelta(days=IMPORTED_DAYS)


def captured_until(now: datetime, days: int | None = None) -> datetime:
    """When a sample captured at `now` expires, by its source's days of retention (null: 30)."""
    return now + timedelta(days=retention_days(days))
