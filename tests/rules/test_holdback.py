from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.holdback import check_rows, first_rows, questions, ranks

keys = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50)
MASK = 2**64 - 1


def mixed(word: int) -> int:
    """SplitMix64's finaliser in plain integers."""
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


@given(keys, st.integers(-(2**63), 2**63 - 1))
def test_ranks_are_a_function_of_seed_and_prompt_alone(prompts: list[int], seed: int) -> None:
    expected = [mixed((prompt ^ mixed(seed & MASK)) & MASK) for prompt in prompts]
    signed = [value - 2**64 if value >= 2**63 else value for value in expected]
    assert ranks(pl.Series(prompts, dtype=pl.Int64), seed=seed).to_list() == signed


def test_ranks_never_change() -> None:
    found = ranks(pl.Series([0, 1, -1], dtype=pl.Int64), seed=42).to_list()
    assert found == [6_332_618_229_526_065_668, -914_255_856_146_365_723, -3_732_346_207_070_569_421]


def test_another_seed_is_another_order() -> None:
    prompts = pl.Series(range(1_000), dtype=pl.Int64)
    one, two = ranks(prompts, seed=1), ranks(prompts, seed=2)
    both = set(one.arg_sort()[:100].to_list()) & set(two.arg_sort()[:100].to_list())
    assert 0 < len(both) < 30


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**6)), max_size=40, unique=True),
    st.integers(-3, 45),
    st.booleans(),
)
def test_first_rows_are_those_of_a_whole_sort(rows: list[Any], count: int, descending: bool) -> None:
    frame = pl.DataFrame(
        {"a": [a for a, _ in rows], "b": [f"{b:07d}" for _, b in rows]}, schema={"a": pl.Int64, "b": pl.String}
    )
    marked = frame.filter(first_rows(frame, count, by=["a", "b"], descending=descending))
    expected = frame.sort("a", "b", descending=descending).head(max(0, count))
    assert sorted(marked.rows()) == sorted(expected.rows())


@pytest.mark.parametrize(("rows", "aside"), [(0, 0), (19, 0), (20, 1), (21, 2), (100, 5), (101, 6), (1_000, 50)])
def test_rows_kept_aside_for_checks(rows: int, aside: int) -> None:
    train = pl.DataFrame(
        {"sample_id": [f"s{n}" for n in range(rows)], "prompt_key": list(range(rows))},
        schema={"sample_id": pl.String, "prompt_key": pl.Int64},
    )
    assert check_rows(train, seed=1).sum() == aside


def test_twins_stay_together_in_the_checks() -> None:
    train = pl.DataFrame({"sample_id": [f"s{n}" for n in range(1_000)], "prompt_key": [n // 5 for n in range(1_000)]})
    aside = train.filter(check_rows(train, seed=1))
    assert aside.height == 50
    assert aside["prompt_key"].n_unique() == 10


def test_questions_questions() -> None:
    held = pl.DataFrame({"sample_id": ["a", "b", "c", "d"], "held_by": [2, 1, 1, 1], "rank": [-9, 5, 5, -5]})
    assert questions(held)["sample_id"].to_list() == ["d", "b", "c", "a"]
