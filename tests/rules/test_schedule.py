from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.errors import NotEnoughSamples, Refused
from loop_dagster.rules.minimums import Minimum
from loop_dagster.rules.pipelines import Schedule
from loop_dagster.rules.schedule import ActiveAttempt, check_train_now, due_at, next_slot, wait_after

DAILY = Schedule(every="day", hour_utc=3)
SUNDAYS = Schedule(every="week", weekday=0, hour_utc=23)
moments = st.integers(0, 2**31).map(lambda seconds: datetime.fromtimestamp(seconds, UTC))
schedules = st.one_of(
    st.builds(Schedule, every=st.just("day"), hour_utc=st.integers(0, 23)),
    st.builds(Schedule, every=st.just("week"), weekday=st.integers(0, 6), hour_utc=st.integers(0, 23)),
)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("schedule", "now", "slot"),
    [
        (DAILY, "2026-01-05T02:59:59", "2026-01-05T03:00"),
        (DAILY, "2026-01-05T03:00:00", "2026-01-05T03:00"),
        (DAILY, "2026-01-05T03:00:01", "2026-01-06T03:00"),
        (DAILY, "2026-01-31T12:00:00", "2026-02-01T03:00"),
        (DAILY, "2026-12-31T12:00:00", "2027-01-01T03:00"),
        (DAILY, "2028-02-28T12:00:00", "2028-02-29T03:00"),
        (DAILY, "2026-02-28T12:00:00", "2026-03-01T03:00"),
        (SUNDAYS, "2026-01-05T00:00:00", "2026-01-11T23:00"),
        (SUNDAYS, "2026-01-11T23:00:00", "2026-01-11T23:00"),
        (SUNDAYS, "2026-01-11T23:30:00", "2026-01-18T23:00"),
        (SUNDAYS, "2028-02-27T23:30:00", "2028-03-05T23:00"),
        (Schedule(every="week", weekday=6, hour_utc=0), "2026-01-05T00:00:00", "2026-01-10T00:00"),
        (Schedule(every="week", weekday=1, hour_utc=0), "2026-01-05T00:00:00", "2026-01-05T00:00"),
    ],
)
def test_slots(schedule: Schedule, now: str, slot: str) -> None:
    assert next_slot(schedule, at(now)) == at(slot)


def test_slots_are_utc_wherever_now_comes_from() -> None:
    berlin = timezone(timedelta(hours=2))
    assert next_slot(DAILY, datetime(2026, 7, 1, 4, 30, tzinfo=berlin)) == at("2026-07-01T03:00")


@given(schedules, moments)
def test_the_next_slot_is_the_first_one(schedule: Schedule, now: datetime) -> None:
    slot = next_slot(schedule, now)
    assert timedelta(0) <= slot - now < timedelta(days=7 if schedule.every == "week" else 1)
    assert (slot.hour, slot.minute, slot.second, slot.microsecond) == (schedule.hour_utc, 0, 0, 0)
    if schedule.weekday is not None:
        assert slot.isoweekday() % 7 == schedule.weekday


@pytest.mark.parametrize(
    ("failures", "minutes"), [(0, 0), (1, 30), (2, 60), (3, 120), (4, 240), (5, 1_440), (6, 1_440), (50, 1_440)]
)
def test_waits_after_failures(failures: int, minutes: int) -> None:
    assert wait_after(failures) == timedelta(minutes=minutes)
    now, end = at("2026-01-05T12:00"), at("2026-01-05T11:45")
    due = due_at(None, failures=failures, last_end=end, waiting_since=None, now=now)
    assert due == max(now, end + timedelta(minutes=minutes))


def test_without_a_schedule_it_starts_at_once() -> None:
    now = at("2026-01-05T12:00")
    assert due_at(None, failures=0, last_end=None, waiting_since=None, now=now) == now


def test_a_schedule_delays_to_its_next_slot_and_that_slot_is_taken() -> None:
    met = at("2026-01-05T12:00")
    slot = due_at(DAILY, failures=0, last_end=None, waiting_since=None, now=met)
    assert slot == at("2026-01-06T03:00")
    before = slot - timedelta(seconds=1)
    assert due_at(DAILY, failures=0, last_end=None, waiting_since=slot, now=before) == slot
    for late in (timedelta(0), timedelta(seconds=4), timedelta(hours=5)):
        assert due_at(DAILY, failures=0, last_end=None, waiting_since=slot, now=slot + late) == slot + late


@pytest.mark.parametrize("schedule", [DAILY, SUNDAYS])
@pytest.mark.parametrize("hours", [1, 23, 24, 25, 30, 47, 48, 167, 168, 169, 400, 24 * 90])
def test_a_slot_that_passed_while_the_scheduler_was_down_is_taken_now(schedule: Schedule, hours: int) -> None:
    slot = next_slot(schedule, at("2026-01-06T12:00"))
    back = slot + timedelta(hours=hours)
    assert due_at(schedule, failures=0, last_end=None, waiting_since=slot, now=back) == back
    # A slot that an attempt has used since is not used twice: that attempt ended after it.
    used = due_at(schedule, failures=0, last_end=slot + timedelta(minutes=5), waiting_since=slot, now=back)
    assert used == next_slot(schedule, back)
    # Nor does a slot count that passed before a failure was waited out.
    waited = due_at(schedule, failures=1, last_end=slot - timedelta(minutes=5), waiting_since=slot, now=back)
    assert waited == next_slot(schedule, back)


def test_a_stored_moment_that_is_no_slot_is_not_taken() -> None:
    now, stored = at("2026-01-06T12:00"), at("2026-01-06T11:30")
    assert due_at(DAILY, failures=0, last_end=None, waiting_since=stored, now=now) == at("2026-01-07T03:00")


def test_a_failed_attempt_waits_and_then_for_a_slot() -> None:
    end = at("2026-01-06T02:50")
    due = due_at(DAILY, failures=1, last_end=end, waiting_since=None, now=at("2026-01-06T02:55"))
    assert due == at("2026-01-07T03:00")
    stale = due_at(DAILY, failures=1, last_end=end, waiting_since=at("2026-01-06T03:00"), now=at("2026-01-06T04:00"))
    assert stale == at("2026-01-07T03:00")


@given(st.none() | schedules, st.integers(0, 8), st.none() | moments, st.none() | moments, moments)
def test_due_is_never_in_the_past(
    schedule: Schedule | None, failures: int, last_end: datetime | None, stored: datetime | None, now: datetime
) -> None:
    due = due_at(schedule, failures=failures, last_end=last_end, waiting_since=stored, now=now)
    assert due >= now
    if last_end is not None:
        assert due >= last_end + wait_after(failures)
    # Asked again at the moment that it gave, it says now: nothing is put off for ever. Only a later moment is stored.
    waiting = stored if due == now else due
    assert due_at(schedule, failures=failures, last_end=last_end, waiting_since=waiting, now=due) == due


def minimum(short: int) -> Minimum:
    return Minimum(basis="first_version", needed=1_100, have=1_100 - short, short=short, picked=0)


def test_train_now_is_refused_in_the_order_of_the_rules() -> None:
    running = ActiveAttempt(3, "run", "training")
    options = {"enabled": False, "active": running, "versions": 2, "max_versions": 2, "minimum": minimum(5)}
    codes = []
    for fix in ({"enabled": True}, {"active": None}, {"max_versions": 3}, {"minimum": minimum(0)}):
        with pytest.raises((Refused, NotEnoughSamples)) as refused:
            check_train_now("support", **options)  # type: ignore[arg-type]
        codes.append(refused.value.code)
        options |= fix
    assert codes == ["RULE_PAUSED", "RUN_ACTIVE", "VERSION_LIMIT_REACHED", "NOT_ENOUGH_SAMPLES"]
    check_train_now("support", **options)  # type: ignore[arg-type]


def test_train_now_books_an_attempt_that_waits_for_gpus_again() -> None:
    waiting = ActiveAttempt(3, "run", "waiting_gpus")
    check_train_now("support", enabled=True, active=waiting, versions=0, max_versions=None, minimum=minimum(5))
    with pytest.raises(Refused, match="paused"):
        check_train_now("support", enabled=False, active=waiting, versions=0, max_versions=None, minimum=None)
