from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.samples_state import State, sample_state
from loop_dagster.rules.selection import Reason


@pytest.mark.parametrize(
    ("facts", "state", "attempt", "version", "says"),
    [
        ({"reason": "held_before", "held_by": 2}, "held_back", 2, None, "judges attempts"),
        ({"reason": "wrong", "held_by": 2}, "left_out", 2, None, "marked wrong"),
        ({"reason": None, "held_by": 2}, "left_out", 2, None, "never trained on"),
        ({"reason": "held_new"}, "waiting", None, None, "holds it back"),
        ({"reason": "new"}, "waiting", None, None, "next attempt"),
        ({"reason": "new", "trained_before_correction": True}, "waiting", None, None, "changed"),
        ({"reason": "again", "trained_by": [1, 3]}, "trained", 3, None, "trains on it again"),
        ({"reason": "again", "trained_by": [1, 3], "versions": {1: 1}}, "learned", 1, 1, "v1 learned it"),
        ({"reason": "again", "trained_by": [1, 3, 4], "versions": {1: 1, 3: 2}}, "learned", 3, 2, "v2 learned it"),
        ({"reason": "wrong", "trained_by": [1], "versions": {1: 1}}, "learned", 1, 1, "not trained on again"),
        ({"reason": "wrong", "trained_by": [1]}, "trained", 1, None, "not trained on again"),
        ({"reason": "no_feedback"}, "left_out", None, None, "Nobody reviewed it"),
        ({"reason": "twin_of_held"}, "left_out", None, None, "same prompt"),
        ({"reason": None}, "left_out", None, None, "does not select it"),
    ],
)
def test_states(facts: dict[str, Any], state: State, attempt: int | None, version: int | None, says: str) -> None:
    found = sample_state(**({"held_by": None, "trained_by": [], "versions": {}} | facts))
    assert (found.state, found.attempt_no, found.version_no) == (state, attempt, version)
    assert says in found.reason


@given(
    st.sampled_from([None, *get_args(Reason)]),
    st.none() | st.integers(1, 9),
    st.lists(st.integers(1, 9), unique=True),
    st.dictionaries(st.integers(1, 9), st.integers(1, 9)),
)
def test_every_sample_has_a_state_and_a_sentence(
    reason: Reason | None, held_by: int | None, trained_by: list[int], versions: dict[int, int]
) -> None:
    found = sample_state(reason=reason, held_by=held_by, trained_by=trained_by, versions=versions)
    assert found.state in get_args(State)
    assert found.reason.endswith(".")
    assert (found.version_no is not None) == (found.state == "learned")
