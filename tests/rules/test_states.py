from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.errors import MoveNotAllowed
from loop_dagster.rules import states
from loop_dagster.rules.states import FLOW, STATES, TERMINAL, check_move, followers, outcome_of, reached, step_of

any_state = st.sampled_from(STATES)


def test_the_ordinary_way_is_allowed_step_by_step() -> None:
    for old, new in itertools.pairwise(FLOW):
        check_move(old, new)


@pytest.mark.parametrize("end", ["failed", "cancelled", "superseded", "expired", "budget_stopped"])
def test_every_attempt_that_has_not_ended_can_end(end: states.TrainingRunState) -> None:
    for state in STATES:
        if state not in TERMINAL:
            check_move(state, end)


def test_an_ended_attempt_stays_ended_but_for_a_rollback() -> None:
    assert followers("promoted") == ("rolled_back",)
    assert all(followers(state) == () for state in TERMINAL if state != "promoted")


def test_a_cancelled_attempt_is_not_revived_by_a_late_step() -> None:
    with pytest.raises(MoveNotAllowed, match="cancelled cannot become checkpoint_ready: it has ended"):
        check_move("cancelled", "checkpoint_ready")


@given(any_state, any_state)
def test_a_refusal_lists_exactly_what_is_allowed(old: states.TrainingRunState, new: states.TrainingRunState) -> None:
    if new in followers(old):
        check_move(old, new)
        return
    with pytest.raises(MoveNotAllowed) as refused:
        check_move(old, new)
    assert refused.value.details["allowed"] == list(followers(old))
    assert all(state in refused.value.message for state in followers(old))


def test_every_state_can_be_reached_from_built() -> None:
    seen = {"built"}
    while True:
        grown = seen | {new for state in STATES if state in seen for new in followers(state)}
        if grown == seen:
            break
        seen = grown
    assert seen == set(STATES)


def test_jobs_of_states() -> None:
    assert [step_of(state) for state in FLOW] == ["training"] * 6 + ["comparison"] * 4 + ["promotion"] * 2 + [None]
    for state in ("awaiting_review", "waiting_funds", "waiting_gpus", *TERMINAL):
        assert step_of(state) is None


def test_a_second_try_does_not_move_an_attempt_backwards() -> None:
    assert reached("training", "registering")
    assert reached("training", "training")
    assert not reached("training", "checkpoint_ready")
    assert not reached("waiting_gpus", "training")
    assert not reached("failed", "built")


@pytest.mark.parametrize(
    ("state", "verdict", "decision", "trained", "tested", "outcome"),
    [
        ("promoted", "better", "auto_promoted", True, True, "became_version"),
        ("rolled_back", "better", "rolled_back", True, True, "became_version"),
        ("rejected", "not_better", "auto_rejected", True, True, "not_better"),
        ("rejected", "better", "rejected", True, True, "stopped"),
        ("rejected", "not_better", "rejected", True, True, "stopped"),
        ("expired", "better", "expired", True, True, "stopped"),
        ("expired", "inconclusive", "expired", True, True, "inconclusive"),
        ("expired", "not_better", "expired", True, True, "not_better"),
        ("expired", "inconclusive", "expired", True, False, "not_tested"),
        ("failed", None, None, False, False, "failed"),
        ("failed", None, None, True, False, "not_tested"),
        ("failed", "better", None, True, True, "failed"),
        ("cancelled", None, None, True, False, "stopped"),
        ("superseded", None, None, True, False, "not_tested"),
        ("budget_stopped", None, None, True, True, "stopped"),
        ("awaiting_review", "inconclusive", None, True, True, "waiting_for_review"),
        ("training", None, None, False, False, "running"),
        ("waiting_funds", None, None, False, False, "running"),
    ],
)
def test_outcomes(
    state: states.TrainingRunState,
    verdict: states.Verdict | None,
    decision: states.Decision | None,
    trained: bool,
    tested: bool,
    outcome: states.Outcome,
) -> None:
    assert outcome_of(state, verdict=verdict, decision=decision, trained=trained, tested=tested) == outcome


@given(
    any_state,
    st.sampled_from([None, *get_args(states.Verdict)]),
    st.sampled_from([None, *get_args(states.Decision)]),
    st.booleans(),
    st.booleans(),
)
def test_an_outcome_of_an_ended_attempt_never_says_that_it_runs(
    state: states.TrainingRunState,
    verdict: states.Verdict | None,
    decision: states.Decision | None,
    trained: bool,
    tested: bool,
) -> None:
    outcome = outcome_of(state, verdict=verdict, decision=decision, trained=trained, tested=tested)
    assert (outcome in ("running", "waiting_for_review")) == (state not in TERMINAL)
