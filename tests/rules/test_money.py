from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.money import NANOCENTS, Prices, comparison_limit, in_dollars, whole_cents

PRICES = st.decimals(0, 10**6, places=3)
TOKENS = st.integers(0, 10**9)


@given(PRICES, PRICES, st.lists(st.tuples(TOKENS, TOKENS), max_size=20))
def test_a_cost_is_exact_and_costs_add_up(read: Decimal, written: Decimal, calls: list[tuple[int, int]]) -> None:
    prices = Prices(input_cents_per_million=read, output_cents_per_million=written)
    one_by_one = sum(prices.cost(input_tokens=tokens_in, output_tokens=tokens_out) for tokens_in, tokens_out in calls)
    tokens_in, tokens_out = (sum(column) for column in zip(*calls, strict=True)) if calls else (0, 0)
    assert one_by_one == prices.cost(input_tokens=tokens_in, output_tokens=tokens_out)
    exact = (Fraction(read) * tokens_in + Fraction(written) * tokens_out) / 10**6
    assert Fraction(one_by_one, NANOCENTS) == exact


def test_a_price_finer_than_it_can_be_exact_is_refused() -> None:
    for price in (Decimal("0.0001"), Decimal(-1)):
        with pytest.raises(ValueError, match="decimals"):
            Prices(input_cents_per_million=price).cost(input_tokens=1, output_tokens=0)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 10**13), max_size=6))
def test_whole_cents_add_up_to_the_total(parts: dict[str, int]) -> None:
    cents = whole_cents(parts)
    assert list(cents) == list(parts)
    assert sum(cents.values()) == sum(parts.values()) // NANOCENTS
    assert all(0 <= cents[name] - amount // NANOCENTS <= 1 for name, amount in parts.items())


def test_sub_cent_amounts_accrue() -> None:
    third = NANOCENTS // 3 + 1
    assert whole_cents({"scoring": third, "benchmarks": third}) == {"scoring": 0, "benchmarks": 0}
    assert whole_cents({"scoring": third, "benchmarks": third, "picks": third}) == {
        "scoring": 1,
        "benchmarks": 0,
        "picks": 0,
    }


def test_the_limit_of_a_comparison() -> None:
    assert comparison_limit(2_500) == 2_500 * NANOCENTS
    assert comparison_limit(2_500, benchmarks=1) == comparison_limit(2_500, benchmarks=5) == 1_500 * NANOCENTS
    assert comparison_limit(600, benchmarks=1) == 0


@pytest.mark.parametrize(
    ("nanocents", "said"),
    [
        (0, "$0.00"),
        (2_487 * NANOCENTS, "$24.87"),
        (123_456_700 * NANOCENTS, "$1,234,567.00"),
        (NANOCENTS, "$0.01"),
        (NANOCENTS // 25, "$0.0004"),
        (1, "$0.00000000001"),
    ],
)
def test_amounts_for_people(nanocents: int, said: str) -> None:
    assert in_dollars(nanocents) == said
