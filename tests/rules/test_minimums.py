from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.minimums import first_minimum, held_size, minimum, still_short

percents = st.integers(5, 20)


@pytest.mark.parametrize(
    ("percent", "usable", "held"), [(5, 800, 100), (5, 4_000, 200), (20, 4_000, 800), (5, 2_001, 101)]
)
def test_held_back_size(percent: int, usable: int, held: int) -> None:
    assert held_size(percent, usable) == held


def test_held_back_never_shrinks_below_what_is_held() -> None:
    assert held_size(5, 800, already=160) == 160


@pytest.mark.parametrize(
    ("percent", "needed"), [(5, 1_100), (6, 1_100), (7, 1_100), (8, 1_100), (9, 1_100), (10, 1_112), (20, 1_250)]
)
def test_first_minimum_at(percent: int, needed: int) -> None:
    assert first_minimum(percent) == needed


def test_first_minimum_grows_with_what_is_held_already() -> None:
    assert first_minimum(5, already=300) == 1_300
    assert first_minimum(20, already=300) == 1_300
    assert first_minimum(20, already=240) == 1_250


@given(percents, st.integers(0, 3_000))
def test_first_minimum_is_the_smallest(percent: int, already: int) -> None:
    needed = first_minimum(percent, already=already)
    assert needed - held_size(percent, needed, already=already) >= 1_000
    assert all(
        fewer - held_size(percent, fewer, already=already) < 1_000 for fewer in range(max(0, needed - 40), needed)
    )


@given(percents, st.integers(0, 1_000_000), st.integers(0, 300), st.integers(0, 999))
def test_short_is_the_smallest_number_of_arrivals(percent: int, usable: int, gap: int, counting: int) -> None:
    held = max(0, held_size(percent, usable) - gap)
    short = still_short(percent, usable=usable, held=held, counting=counting)

    def after(arrivals: int) -> int:
        return counting + arrivals - max(0, held_size(percent, usable + arrivals) - held)

    assert after(short) >= 1_000
    assert after(short - 1) < 1_000


def test_short_is_zero_exactly_when_the_minimum_is_met() -> None:
    assert still_short(5, usable=1_100, held=100, counting=1_000) == 0
    assert still_short(5, usable=1_099, held=100, counting=999) == 1


@given(percents, st.integers(0, 2_000))
def test_without_twins_the_first_minimum_is_a_count_of_samples(percent: int, usable: int) -> None:
    held = min(usable, held_size(percent, usable))
    found = minimum(
        percent, first=True, usable=usable, held=held, kept=0, train=usable - held, new=usable - held, picked=0
    )
    assert (found.have, found.needed) == (usable, first_minimum(percent))
    assert found.short == max(0, found.needed - usable)
    assert found.ready == (usable >= found.needed)


def test_twins_make_more_necessary() -> None:
    found = minimum(20, first=True, usable=2_000, held=400, kept=0, train=900, new=900, picked=0)
    assert (found.have, found.needed, found.short, found.ready) == (1_300, 1_425, 125, False)


def test_after_a_raised_share_more_must_arrive_than_is_missing() -> None:
    found = minimum(20, first=False, usable=4_000, held=200, kept=200, train=3_800, new=400, picked=0)
    assert (found.basis, found.needed, found.have) == ("new_rows", 1_000, 400)
    # 600 that train, 600 that the held-back set lacks, and a fifth of all that arrive.
    assert found.short == 1_500


def test_messages() -> None:
    first = minimum(5, first=True, usable=950, held=100, kept=0, train=850, new=850, picked=12)
    assert first.message == (
        "The first attempt needs 1,100 good or corrected samples, the held-back ones among them; 950 are there "
        "(12 of them picked by the judge), 150 more to come."
    )
    ready = minimum(5, first=False, usable=3_000, held=150, kept=150, train=2_850, new=1_000, picked=0)
    assert ready.message == ("The next attempt needs 1,000 new samples beside the held-back ones; 1,000 are there.")
