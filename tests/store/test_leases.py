"""Leases: one holder at a time over threads and processes, loss that is noticed, kills that end by themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from loop_dagster.errors import LeaseBusy, LeaseLost, RegistryUnavailable
from loop_dagster.store.leases import Lease, Leases
from loop_dagster.store.registry import Registry


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = datetime(2026, 12, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def test_take_beat_release(registry: Registry) -> None:
    clock = Clock()
    leases = Leases(registry, clock=clock)
    lease = leases.take("lake/default", holder="me", ttl_s=10)
    assert (lease.name, lease.holder, lease.expires_at) == ("lake/default", "me", clock.now + timedelta(seconds=10))
    clock.forward(9)
    leases.beat(lease.name, lease.token)
    clock.forward(9)
    leases.check(lease.name, lease.token)
    with pytest.raises(LeaseBusy, match="held by me for at most 1 s"):
        leases.take("lake/default", holder="you")
    leases.take("attempt/x", holder="you")  # another name is another lease
    assert leases.release(lease.name, lease.token)
    assert not leases.release(lease.name, lease.token)
    assert leases.find("lake/default") is None
    assert leases.take("lake/default", holder="you").token != lease.token


def test_workspaces_do_not_share_leases(registry: Registry) -> None:
    mine = Leases(registry).take("same")
    other = Leases(Registry(registry.url, "other")).take("same")
    Leases(registry).check("same", mine.token)
    with pytest.raises(LeaseLost):
        Leases(registry).check("same", other.token)


def test_each_way_to_lose_it(registry: Registry) -> None:
    clock = Clock()
    leases = Leases(registry, clock=clock)
    lease = leases.take("a", ttl_s=10)
    clock.forward(10)
    assert why(lambda: leases.beat("a", lease.token)) == "expired"
    assert why(lambda: leases.check("a", lease.token)) == "expired"
    taker = leases.take("a", ttl_s=10)
    assert why(lambda: leases.beat("a", lease.token)) == "taken"
    assert not leases.release("a", lease.token)
    leases.beat("a", taker.token)
    assert not leases.revoke("a", token=lease.token)
    assert leases.revoke("a", token=taker.token)
    assert not leases.revoke("a")
    assert why(lambda: leases.beat("a", taker.token)) == "revoked"
    assert why(lambda: leases.beat("never taken", taker.token)) == "revoked"
    leases.take("a")  # free at once


def why(call: Callable[[], None]) -> str:
    with pytest.raises(LeaseLost) as caught:
        call()
    return str(caught.value.details["why"])


def test_expired_lists_only_the_abandoned(registry: Registry) -> None:
    clock = Clock()
    leases = Leases(registry, clock=clock)
    old, young, revoked = (leases.take(name, ttl_s=ttl) for name, ttl in (("old", 5), ("young", 50), ("revoked", 5)))
    leases.revoke(revoked.name)
    assert leases.expired() == []
    clock.forward(5)
    assert [lease.token for lease in leases.expired()] == [old.token]
    leases.beat(young.name, young.token)
    leases.take("old")
    assert leases.expired() == []


@pytest.mark.parametrize("start", ["free", "expired", "revoked"])
def test_one_taker_of_many(registry: Registry, start: str) -> None:
    clock = Clock()
    leases = Leases(registry, clock=clock)
    before = None
    if start != "free":
        before = leases.take("a", ttl_s=1)
        clock.forward(2)
    if start == "revoked":
        leases.revoke("a")
    won: list[Lease] = []
    lost: list[LeaseBusy] = []
    barrier = threading.Barrier(8)

    def race() -> None:
        barrier.wait()
        try:
            won.append(leases.take("a", ttl_s=100))
        except LeaseBusy as busy:
            lost.append(busy)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    leases.check("a", won[0].token)
    assert before is None or before.token != won[0].token


def count_up(url: str, file: str, times: int) -> None:
    leases = Leases(Registry(url))
    for _ in range(times):
        with leases.hold("counter", ttl_s=10, wait_s=30) as held:
            number = int(Path(file).read_text())
            time.sleep(0.002)  # a second holder would read the same number here
            held.verify()
            Path(file).write_text(str(number + 1))


def test_processes_exclude_each_other(registry: Registry, processes: ForkServerContext, tmp_path: Path) -> None:
    file = tmp_path / "counter"
    file.write_text("0")
    children = [processes.Process(target=count_up, args=(registry.url, str(file), 8)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert file.read_text() == "24"


def hold_for_ever(url: str, ready: str) -> None:
    with Leases(Registry(url)).hold("a", ttl_s=1.5):
        Path(ready).write_text("held")
        time.sleep(600)


def test_a_killed_holder_is_followed(registry: Registry, processes: ForkServerContext, tmp_path: Path) -> None:
    leases = Leases(registry)
    ready = tmp_path / "ready"
    child = processes.Process(target=hold_for_ever, args=(registry.url, str(ready)))
    child.start()
    while not ready.exists():
        time.sleep(0.01)
    time.sleep(1.8)  # longer than ttl_s: its thread keeps it
    with pytest.raises(LeaseBusy):
        leases.take("a")
    assert leases.expired() == []
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    with leases.hold("a", wait_s=10) as held:
        held.verify()


def test_a_revoked_holder_notices(registry: Registry) -> None:
    leases = Leases(registry)
    with pytest.raises(LeaseLost, match="revoked"), leases.hold("a", ttl_s=3) as held:
        held.check()
        leases.revoke("a")
        with pytest.raises(LeaseLost):
            held.verify()
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            held.check()
            time.sleep(0.01)


def test_a_lost_lease_fails_a_block_that_never_asked(registry: Registry) -> None:
    leases = Leases(registry)
    with pytest.raises(LeaseLost), leases.hold("a", ttl_s=0.3):
        leases.revoke("a")
        other = leases.take("a")
        time.sleep(0.3)
    leases.check("a", other.token)  # the loser did not release the winner's


def test_the_block_s_own_error_wins_and_the_lease_is_free(registry: Registry) -> None:
    leases = Leases(registry)
    with pytest.raises(ZeroDivisionError), leases.hold("a"):
        raise ZeroDivisionError
    assert leases.find("a") is None


def test_a_registry_that_is_gone_counts_as_lost_after_the_ttl(sqlite_registry: Registry) -> None:
    class Gone(Leases):
        def beat(self, name: str, token: str) -> None:
            raise RegistryUnavailable("there", "gone")

    with pytest.raises(LeaseLost, match="expired"), Gone(sqlite_registry).hold("a", ttl_s=0.2) as held:
        held.check()
        time.sleep(0.25)
        held.check()


def test_a_child_beats_its_parent_s_lease(registry: Registry, processes: ForkServerContext) -> None:
    leases = Leases(registry)
    lease = leases.take("attempt/r", ttl_s=60)
    before = leases.find("attempt/r")
    child = processes.Process(target=beat_once, args=(registry.url, registry.workspace, lease.name, lease.token))
    child.start()
    child.join(30)
    after = leases.find("attempt/r")
    assert child.exitcode == 0
    assert before is not None
    assert after is not None
    assert after.heartbeat_at > before.heartbeat_at


def beat_once(url: str, workspace: str, name: str, token: str) -> None:
    Leases(Registry(url, workspace)).beat(name, token)
