"""Calls with an Idempotency-Key: one turn, one answer for a day, and what happens when the first is never answered."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from loop_dagster.errors import CallUnderWay, Conflict
from loop_dagster.store.calls import KEPT, TURN, Answered, Calls, Turn
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import idempotent_calls

NOW = datetime(2026, 12, 1, tzinfo=UTC)


def test_the_first_answer_is_everybodys(registry: Registry) -> None:
    calls = Calls(registry)
    turn = calls.begin("key", "name", "print", now=NOW)
    assert isinstance(turn, Turn)
    with pytest.raises(CallUnderWay):
        calls.begin("key", "name", "print", now=NOW + timedelta(seconds=1))
    calls.settle(turn, 201, {"made": [1]})
    assert calls.begin("key", "name", "print", now=NOW + timedelta(hours=23)) == Answered(201, {"made": [1]})
    with pytest.raises(Conflict, match="another call"):
        calls.begin("key", "name", "other print", now=NOW)
    assert isinstance(calls.begin("other key", "name", "other print", now=NOW), Turn)
    assert isinstance(Calls(Registry(registry.url, "elsewhere")).begin("key", "name", "x", now=NOW), Turn)


def test_after_a_day_the_key_is_free_and_its_row_gone(registry: Registry) -> None:
    calls = Calls(registry)
    for name in ("one", "two"):
        turn = calls.begin("key", name, "print", now=NOW)
        assert isinstance(turn, Turn)
        calls.settle(turn, 200, None)
    assert isinstance(calls.begin("key", "one", "other", now=NOW + KEPT), Turn)
    with registry.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(idempotent_calls)).scalar_one() == 1


def test_a_turn_given_back_may_be_taken_with_anything(registry: Registry) -> None:
    calls = Calls(registry)
    turn = calls.begin("key", "name", "print", now=NOW)
    assert isinstance(turn, Turn)
    calls.release(turn)
    assert isinstance(calls.begin("key", "name", "other", now=NOW), Turn)


def test_a_turn_that_was_lost_is_taken_over_and_its_late_answer_dropped(registry: Registry) -> None:
    calls = Calls(registry)
    lost = calls.begin("key", "name", "print", now=NOW)
    taken = calls.begin("key", "name", "print", now=NOW + TURN)
    assert isinstance(lost, Turn)
    assert isinstance(taken, Turn)
    calls.settle(lost, 200, "late")
    calls.release(lost)
    with pytest.raises(CallUnderWay):
        calls.begin("key", "name", "print", now=NOW + TURN)
    calls.settle(taken, 200, "in time")
    assert calls.begin("key", "name", "print", now=NOW + TURN) == Answered(200, "in time")


def test_a_long_write_keeps_its_turn(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loop_dagster.store.calls._BEAT_S", 0.05)
    calls = Calls(registry)
    began = datetime.now(UTC) - TURN + timedelta(seconds=1)
    turn = calls.begin("key", "name", "print", now=began)
    assert isinstance(turn, Turn)
    give_up = time.monotonic() + 20
    with calls.under_way(turn):
        while _created(registry) == began and time.monotonic() < give_up:
            time.sleep(0.02)
        with pytest.raises(CallUnderWay):
            calls.begin("key", "name", "print", now=began + TURN)
    calls.settle(turn, 200, "done")
    while any(thread.name == "turns" for thread in threading.enumerate()) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert time.monotonic() < give_up, "the thread that beats did not end with the last call"
    assert calls.begin("key", "name", "print", now=began + TURN) == Answered(200, "done")


def test_a_turn_that_is_given_back_while_others_ask_for_it_fails_none_of_them(registry: Registry) -> None:
    """Refused calls give their turn back: on PostgreSQL between another's insert and its look at the row."""
    calls, gate = Calls(registry), threading.Barrier(8)
    taken, failed = [], []

    def ask() -> None:
        gate.wait()
        for _ in range(25):
            try:
                turn = calls.begin("key", "name", "print")
            except CallUnderWay:
                continue
            except Exception as error:  # a thread's own would be lost
                failed.append(error)
                return
            assert isinstance(turn, Turn)
            taken.append(turn)
            calls.release(turn)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert taken


def _created(registry: Registry) -> datetime:
    with registry.read() as connection:
        found: datetime = connection.execute(sa.select(idempotent_calls.c.created_at)).scalar_one()
    return found
