"""What the scheduler does about an attempt, by evidence."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.progress import (
    LOST_AFTER,
    MOST_TRIES,
    OPENED_AFTER,
    UNCLAIMED_AFTER,
    Evidence,
    next_action,
    step_key,
)
from loop_dagster.rules.states import STATES, step_of

NOW = datetime(2026, 2, 28, 23, 59, 58, tzinfo=UTC)


def seen(**known) -> Evidence:
    return Evidence(**{"since": NOW - timedelta(minutes=5), **known})


@pytest.mark.parametrize("state", [state for state in STATES if step_of(state) is None])
def test_a_state_without_a_job_waits(state):
    assert next_action(seen(state=state, try_no=1, run="none"), NOW) == "wait"


def test_a_new_attempt_gets_a_run():
    assert next_action(seen(state="built", try_no=1, run="none"), NOW) == "request"


def test_the_first_run_is_left_to_the_sensor_that_opened_the_attempt():
    fresh = seen(state="built", try_no=1, run="none", since=NOW)
    assert next_action(fresh, NOW) == "wait"
    assert next_action(fresh, NOW + OPENED_AFTER) == "request"


def test_a_queued_run_is_waited_for_however_long():
    old = NOW - timedelta(days=2)
    assert next_action(seen(state="built", try_no=1, run="waiting", run_since=old), NOW) == "wait"


def test_a_run_that_ended_without_a_claim_is_tried_again_under_a_new_key():
    assert next_action(seen(state="built", try_no=1, run="ended", run_since=NOW), NOW) == "try_again"
    assert step_key("a-0000/0001", "training", 1) != step_key("a-0000/0001", "training", 2)


def test_a_run_that_never_claims_is_given_time_and_then_tried_again():
    started = NOW - UNCLAIMED_AFTER
    assert next_action(seen(state="built", try_no=1, run="running", run_since=started), NOW) == "wait"
    late = NOW + timedelta(seconds=1)
    assert next_action(seen(state="built", try_no=1, run="running", run_since=started), late) == "try_again"


def test_a_killed_worker_is_noticed_by_its_lease_and_not_by_dagster():
    claimed = NOW - timedelta(hours=1)
    alive = seen(state="training", try_no=1, run="running", claimed_at=claimed, last_beat=NOW - LOST_AFTER / 2)
    assert next_action(alive, NOW) == "wait"
    dead = seen(state="training", try_no=1, run="running", claimed_at=claimed, last_beat=NOW - LOST_AFTER)
    assert next_action(dead, NOW) == "try_again"


def test_the_last_try_gives_up():
    lost = seen(state="evaluating", try_no=MOST_TRIES, run="ended", claimed_at=NOW, ended=True)
    assert next_action(lost, NOW) == "give_up"


@given(
    try_no=st.integers(1, MOST_TRIES),
    run=st.sampled_from(["none", "waiting", "running", "ended"]),
    claim_age=st.integers(0, 1000),
    beat_age=st.integers(0, 1000),
)
def test_a_step_with_a_sign_of_life_never_gets_a_second_run(try_no, run, claim_age, beat_age):
    evidence = seen(
        state="training",
        try_no=try_no,
        run=run,
        claimed_at=NOW - timedelta(seconds=claim_age),
        last_beat=NOW - timedelta(seconds=beat_age),
    )
    action = next_action(evidence, NOW)
    if min(claim_age, beat_age) < LOST_AFTER.total_seconds():
        assert action == "wait"
    else:
        assert action in ("try_again", "give_up")
