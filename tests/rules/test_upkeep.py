"""How long things are kept, at the edges of days, months and years."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.promotion import REVIEW_TIME, fate
from loop_dagster.rules.upkeep import FULL_ROUND, Weights, adapter_is_kept, review_is_over, round_is_due

END = datetime(2027, 12, 31, 23, 59, 59, tzinfo=UTC)
MOMENT = timedelta(microseconds=1)


def weights(
    digest: str | None = "a", end: datetime | None = END, version: bool = False, deleted: bool = False
) -> Weights:
    return Weights(digest, end, version, deleted)


def test_an_adapter_of_no_version_is_kept_for_a_day_after_its_end_across_new_year() -> None:
    last = datetime(2028, 1, 1, 23, 59, 59, tzinfo=UTC)
    assert adapter_is_kept(weights(), last - MOMENT)
    assert not adapter_is_kept(weights(), last)


def test_an_attempt_that_has_not_ended_and_a_version_keep_theirs_for_good() -> None:
    century = END + timedelta(days=36_500)
    assert adapter_is_kept(weights(end=None), century)
    assert adapter_is_kept(weights(version=True), century)


def test_a_deleted_pipeline_keeps_nothing() -> None:
    for version in (True, False):
        for end in (None, END):
            assert not adapter_is_kept(weights(end=end, version=version, deleted=True), END)


def test_no_adapter_is_no_adapter() -> None:
    assert not adapter_is_kept(weights(digest=None, version=True), END)


@pytest.mark.parametrize(
    ("opened", "over"),
    [
        (datetime(2028, 2, 20, 12, tzinfo=UTC), datetime(2028, 3, 5, 12, tzinfo=UTC)),  # a leap year
        (datetime(2027, 2, 20, 12, tzinfo=UTC), datetime(2027, 3, 6, 12, tzinfo=UTC)),
        (datetime(2027, 12, 25, 0, tzinfo=UTC), datetime(2028, 1, 8, 0, tzinfo=UTC)),
    ],
)
def test_a_review_lasts_fourteen_days(opened: datetime, over: datetime) -> None:
    waits = fate("manual", verdict="better", tested=True, now=opened)
    assert waits.review_until == opened + REVIEW_TIME == over
    assert not review_is_over(waits.review_until, over - MOMENT)
    assert review_is_over(waits.review_until, over)


def test_what_waits_for_nobody_is_never_over() -> None:
    assert not review_is_over(None, END)


@given(st.timedeltas(min_value=-timedelta(days=400), max_value=timedelta(days=400)))
def test_the_daily_round_comes_once_a_day_also_after_the_clock_was_set_back(passed: timedelta) -> None:
    assert round_is_due(END, END + passed) == (passed < timedelta(0) or passed >= FULL_ROUND)
