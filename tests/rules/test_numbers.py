from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.numbers import binomial_tail, mean, paired_se, rounded, sample_sd, share_ceil

changes = st.lists(st.floats(-1, 1), min_size=2, max_size=60)


def test_scores_are_compared_after_rounding() -> None:
    assert (0.7 + 0.7 + 0.7) / 3 < 0.7
    assert rounded((0.7 + 0.7 + 0.7) / 3) >= 0.7
    assert rounded(0.6999999989) < 0.7


@given(st.integers(0, 100), st.integers(0, 10**7))
def test_shares_round_up_in_whole_numbers(percent: int, count: int) -> None:
    share = share_ceil(percent, count)
    assert 100 * share >= percent * count > 100 * (share - 1)


@given(changes)
def test_deviation_and_error_are_those_of_a_sample(values: list[float]) -> None:
    spread = sample_sd(values)
    assert spread == pytest.approx(statistics.stdev(values), abs=1e-12)
    assert paired_se(values) == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-12)


def test_cannot_tell_is_none_and_never_zero() -> None:
    assert mean([]) is None
    assert sample_sd([0.3]) is None
    assert paired_se([]) is None
    assert paired_se([0.2, 0.2, 0.2]) == pytest.approx(0, abs=1e-15)
    assert binomial_tail(0, 0) is None


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_binomial_tail_is_exact(case: tuple[int, int]) -> None:
    wins, decided = case
    exact = sum(math.comb(decided, k) for k in range(wins, decided + 1)) / 2**decided
    assert binomial_tail(wins, decided) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("wins", "decided"), [(32, 50), (59, 100)])
def test_fewest_wins_beyond_chance(wins: int, decided: int) -> None:
    enough, short = binomial_tail(wins, decided), binomial_tail(wins - 1, decided)
    assert enough is not None and short is not None
    assert enough < 0.05 <= short
