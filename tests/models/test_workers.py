from __future__ import annotations

import threading
import time

import pytest

from loop_dagster.models.workers import Workers


@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_job_comes_back_with_its_tag(count: int) -> None:
    with Workers[int, int](count, name="w") as workers:
        for number in range(20):
            workers.hand_in(number, lambda number=number: 10 // (number % 5))  # type: ignore[misc]
        assert workers.busy == 20
        back = dict(taken for _ in range(20) if (taken := workers.take(5.0)) is not None)
        assert workers.busy == 0 and workers.take(0.01) is None
    assert sorted(back) == list(range(20))
    assert all(isinstance(back[number], ZeroDivisionError) for number in (0, 5, 10, 15))
    assert back[1] == 10 and back[19] == 2


def test_one_worker_is_the_callers_own_thread() -> None:
    with Workers[str, int](1, name="w") as workers:
        workers.hand_in("a", threading.get_ident)
        assert workers.take(0.0) == ("a", threading.get_ident())


def test_a_job_that_hangs_holds_nobody() -> None:
    held = threading.Event()
    began = time.monotonic()
    with Workers[str, bool](2, name="hangs") as workers:
        workers.hand_in("a", held.wait)
        assert workers.take(0.05) is None
    assert time.monotonic() - began < 1
    left = [thread for thread in threading.enumerate() if thread.name.startswith("hangs")]
    assert left and all(thread.daemon for thread in left)
    held.set()
