"""The registry's transactions, locks, errors and health, on both databases."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from loop_dagster.errors import BadRequest, RegistryNotReady, RegistryUnavailable
from loop_dagster.store.registry import Registry, insert_new, put_row
from loop_dagster.store.schema import Utc, leases, tombstones

NOW = datetime(2026, 12, 1, 8, 30, tzinfo=UTC)


def lease_row(registry: Registry, name: str, holder: str = "0") -> dict[str, Any]:
    return {
        "workspace": registry.workspace,
        "name": name,
        "token": None,
        "holder": holder,
        "taken_at": NOW,
        "heartbeat_at": NOW,
        "ttl_s": 1.0,
    }


def holder(registry: Registry, name: str) -> str | None:
    with registry.read() as connection:
        return connection.execute(sa.select(leases.c.holder).where(leases.c.name == name)).scalar()


def add_one(registry: Registry, name: str) -> None:
    """Read, then write: the pattern that loses updates, or fails, without the right transaction."""
    with registry.write() as connection:
        registry.lock(connection, name)
        found = connection.execute(sa.select(leases.c.holder).where(leases.c.name == name)).scalar_one()
        connection.execute(sa.update(leases).where(leases.c.name == name).values(holder=str(int(found) + 1)))


def add_many(url: str, times: int) -> None:
    registry = Registry(url)
    for _ in range(times):
        add_one(registry, "counter")


def test_a_failing_block_leaves_nothing(registry: Registry) -> None:
    with pytest.raises(ZeroDivisionError), registry.write() as connection:
        connection.execute(sa.insert(leases).values(**lease_row(registry, "a")))
        raise ZeroDivisionError
    assert holder(registry, "a") is None
    with registry.write() as connection:
        connection.execute(sa.insert(leases).values(**lease_row(registry, "a")))
    assert holder(registry, "a") == "0"


def test_read_then_write_loses_no_update(registry: Registry, processes: ForkServerContext) -> None:
    with registry.write() as connection:
        connection.execute(sa.insert(leases).values(**lease_row(registry, "counter")))
    children = [processes.Process(target=add_many, args=(registry.url, 20)) for _ in range(3)]
    threads = [threading.Thread(target=add_many, args=(registry.url, 20)) for _ in range(3)]
    for worker in (*children, *threads):
        worker.start()
    for worker in (*children, *threads):
        worker.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert holder(registry, "counter") == "120"


def test_a_read_sees_one_snapshot(registry: Registry) -> None:
    count = sa.select(sa.func.count()).select_from(leases)
    with registry.read() as reading:
        assert reading.execute(count).scalar_one() == 0
        with registry.write() as connection:
            connection.execute(sa.insert(leases).values(**lease_row(registry, "a")))
        assert reading.execute(count).scalar_one() == 0
    with registry.read() as reading:
        assert reading.execute(count).scalar_one() == 1


def test_insert_new_and_put_row(registry: Registry) -> None:
    with registry.write() as connection:
        assert insert_new(connection, leases, lease_row(registry, "a", "1"))
        assert not insert_new(connection, leases, lease_row(registry, "a", "2"))
        assert insert_new(connection, leases, lease_row(registry, "b", "3"))
        put_row(connection, leases, lease_row(registry, "b", "4"))
    assert (holder(registry, "a"), holder(registry, "b")) == ("1", "4")


def test_times_keep_their_moment_and_need_a_zone(registry: Registry) -> None:
    berlin = NOW.astimezone(datetime.fromisoformat("2026-12-01T09:30:00.123456+01:00").tzinfo)
    exact = berlin.replace(microsecond=123456)
    with registry.write() as connection:
        connection.execute(sa.insert(tombstones).values(workspace="default", sample_id="s", created_at=exact))
    with registry.read() as connection:
        found = connection.execute(sa.select(tombstones.c.created_at)).scalar_one()
    assert found == exact
    assert found.utcoffset() == timedelta(0)
    with pytest.raises(ValueError, match="without a zone"):
        Utc().process_bind_param(NOW.replace(tzinfo=None), registry.engine.dialect)


def test_the_clock_is_near_and_aware(registry: Registry) -> None:
    with registry.read() as connection:
        assert abs(registry.now(connection) - datetime.now(UTC)) < timedelta(seconds=5)


def test_pickled_and_forked(registry: Registry) -> None:
    add = pickle.loads(pickle.dumps(registry))
    assert (add.url, add.workspace) == (registry.url, registry.workspace)
    with registry.write() as connection:  # opens connections that the fork inherits
        connection.execute(sa.insert(leases).values(**lease_row(registry, "counter")))
    with warnings_off():
        child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            add_one(registry, "counter")
            code = 0
        os._exit(code)
    add_one(registry, "counter")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert holder(registry, "counter") == "2"
    with registry.engine.connect() as connection:  # the parent's connections still work
        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1


@contextlib.contextmanager
def warnings_off() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def test_errors_name_the_place_and_no_password() -> None:
    registry = Registry("postgresql://loop:s3cret-word@127.0.0.1:1/none?sslpassword=other-word")
    with pytest.raises(RegistryUnavailable) as caught, registry.read():
        pass
    assert "127.0.0.1:1/none" in caught.value.message
    for text in (caught.value.message, repr(registry), str(registry.check())):
        assert "s3cret-word" not in text
        assert "other-word" not in text
    assert registry.check().problems


def test_errors_show_no_row(registry: Registry) -> None:
    row = lease_row(registry, "a", "very private")
    with registry.write() as connection:
        connection.execute(sa.insert(leases).values(**row))
    with pytest.raises(sa.exc.IntegrityError) as caught, registry.write() as connection:
        connection.execute(sa.insert(leases).values(**row))
    assert "very private" not in str(caught.value)


@pytest.mark.parametrize("url", ["mysql://h/d", "sqlite://", "sqlite:///:memory:", "no url: secret"])
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Registry(url)
    assert "secret" not in caught.value.message


def test_sqlite_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    registry = Registry("sqlite:///here.db")
    assert registry.path == tmp_path / "here.db"
    assert Registry(registry.url).path == registry.path


def test_without_tables(sqlite_url: str) -> None:
    registry = Registry(sqlite_url)
    assert not registry.check().ok
    assert registry.path is not None
    assert not registry.path.exists()
    with pytest.raises(RegistryNotReady, match="loop init"):
        holder(registry, "a")


@pytest.mark.postgres
def test_without_tables_on_postgres(empty_postgres_url: str) -> None:
    registry = Registry(empty_postgres_url)
    assert not registry.check().ok
    with pytest.raises(RegistryNotReady, match="loop init"):
        holder(registry, "a")
    registry.dispose()


def test_check_is_content_with_a_migrated_registry(registry: Registry) -> None:
    health = registry.check()
    assert health.ok, health.problems
    assert health.revision is not None
    assert health.server.startswith("SQLite" if registry.backend == "sqlite" else "PostgreSQL")


def test_sqlite_file_is_private_and_set_up(sqlite_registry: Registry) -> None:
    assert sqlite_registry.path is not None
    assert sqlite_registry.path.stat().st_mode & 0o077 == 0
    found = {}
    with sqlite_registry.read() as connection:
        for name in ("journal_mode", "synchronous", "secure_delete", "busy_timeout"):
            found[name] = connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
    assert found == {"journal_mode": "wal", "synchronous": 2, "secure_delete": 1, "busy_timeout": 30_000}


def test_check_names_a_wrong_journal(sqlite_registry: Registry) -> None:
    sqlite_registry._outside("PRAGMA journal_mode = DELETE")
    assert any("journal_mode" in problem for problem in sqlite_registry.check().problems)


def test_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryUnavailable, match=r"file/registry\.db"):
        Registry(f"sqlite:///{tmp_path / 'file' / 'registry.db'}").migrate()


def write_until_killed(url: str, acknowledged: str, start: int) -> None:
    registry = Registry(url)
    out = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in range(start, start + 100_000):
        with registry.write() as connection:  # two rows that belong together
            for half in ("x", "y"):
                row = {"workspace": registry.workspace, "sample_id": f"{number}{half}", "created_at": NOW}
                connection.execute(sa.insert(tombstones).values(**row))
        os.write(out, f"{number}\n".encode())


def test_killed_writers_leave_whole_transactions(
    registry: Registry, processes: ForkServerContext, tmp_path: Path
) -> None:
    acknowledged = tmp_path / "acknowledged"
    for round_no, delay in enumerate((0.02, 0.05, 0.11, 0.17, 0.08)):
        start = round_no * 1_000_000
        child = processes.Process(target=write_until_killed, args=(registry.url, str(acknowledged), start))
        child.start()
        wait_for(lambda start=start: acknowledged.exists() and f"{start}\n" in acknowledged.read_text())
        time.sleep(delay)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    with registry.read() as connection:
        stored = set(connection.execute(sa.select(tombstones.c.sample_id)).scalars())
    promised = {line for line in acknowledged.read_text().split("\n") if line}
    assert len(promised) > 5
    assert {f"{number}{half}" for number in promised for half in "xy"} <= stored
    assert {name[:-1] for name in stored if name.endswith("x")} == {name[:-1] for name in stored if name.endswith("y")}
    assert len(stored) <= 2 * (len(promised) + 5)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.005)
