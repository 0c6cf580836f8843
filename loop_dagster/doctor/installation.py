"""What the looks share: settings, the registry opened for reading, this machine's processes of the installation.

Belongs here: opening each thing once and changing none of it. Does not belong here: judging what is found.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from loop_dagster.doctor.rows import BrokenRow, broken_rows
from loop_dagster.errors import LoopError, RegistryDamaged
from loop_dagster.settings import Settings
from loop_dagster.store import migrations
from loop_dagster.store.open import Store, store_over
from loop_dagster.store.registry import Registry, RegistryHealth

Kind = Literal["daemon", "ui", "serving", "api", "other"]
#: A bigger SQLite file is looked through only when asked to: a page takes about a microsecond.
QUICK_BYTES: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Running:
    """A process of an installation on this machine; `since` in seconds of the epoch."""

    pid: int
    kind: Kind
    since: float


class Installation:
    """The installation that the environment names. `settings` is None when they cannot be read."""

    def __init__(self, *, offline: bool = False, thorough: bool = False, now: datetime | None = None) -> None:
        self.offline, self.thorough = offline, thorough
        self.now = now or datetime.now(UTC)

    @cached_property
    def settings_or_error(self) -> Settings | Exception:
        try:
            return Settings()
        except Exception as error:  # of pydantic, of YAML, of the disk: settings.py tells them apart
            return error

    @property
    def settings(self) -> Settings | None:
        found = self.settings_or_error
        return found if isinstance(found, Settings) else None

    @property
    def known(self) -> Settings:
        """The settings, for looks that are made only when they can be read."""
        assert self.settings is not None
        return self.settings

    @property
    def root(self) -> Path:
        return self.known.root

    @property
    def is_there(self) -> bool:
        """Whether anything was ever set up: a registry elsewhere counts as much as one under LOOP_HOME."""
        signs = (self.root / name for name in ("registry.db", "lake", "artifacts"))
        return self.known.registry_url is not None or any(sign.exists() for sign in signs)

    @cached_property
    def registry(self) -> Registry:
        return Registry(self.known.registry, self.known.workspace, read_only=True)

    @cached_property
    def health(self) -> RegistryHealth:
        return self.registry.check()

    @cached_property
    def readable(self) -> bool:
        """Whether the registry can be read as this version expects it."""
        whole = self.is_there and self.health.revision == migrations.HEAD and self.damage is None
        return whole and not self.broken_rows

    @cached_property
    def damage(self) -> str | None:
        """What SQLite's own look through the registry's file finds; None when it is whole, or lies elsewhere."""
        path = self.registry.path
        if path is None or (path.stat().st_size > QUICK_BYTES and not self.thorough):
            return None
        try:
            with self.registry.read() as connection:
                said = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA quick_check(3)")]
        except RegistryDamaged as error:
            return error.message.partition("damaged: ")[2].partition(". ")[0]
        return None if said == ["ok"] else "; ".join(line.replace("\n", " ") for line in said)

    @cached_property
    def broken_rows(self) -> tuple[BrokenRow, ...]:
        """Rows at which reading ends; those of a big file are looked for only when asked to."""
        path = self.registry.path
        if path is not None and path.stat().st_size > QUICK_BYTES and not self.thorough:
            return ()
        try:
            return broken_rows(self.registry)
        except LoopError:
            return ()  # the looks that read the registry say why

    @cached_property
    def store(self) -> Store:
        return store_over(self.known, self.registry)

    @cached_property
    def running(self) -> tuple[Running, ...]:
        """This installation's processes on this machine, as far as this user may see them."""
        return tuple(processes_of(self.root, self.known.dagster_home))

    def close(self) -> None:
        if "registry" in self.__dict__:
            self.registry.dispose()


def processes_of(root: Path, dagster_home: Path) -> list[Running]:
    """Processes whose LOOP_HOME or DAGSTER_HOME is this one's, without this process and those that it came from."""
    import psutil

    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in mine:
            continue
        try:
            environment = process.environ()
            command = process.cmdline()
            since = process.create_time()
        except (psutil.Error, OSError):
            continue
        # A shell or an editor in which the variables are set is nobody's daemon.
        if not command or not Path(command[0]).name.startswith(("python", "dagster", "loop")):
            continue
        if is_in(environment.get("DAGSTER_HOME"), dagster_home) or is_in(environment.get("LOOP_HOME"), root):
            found.append(Running(process.pid, kind_of(command), since))
    return found


def is_in(given: str | None, folder: Path) -> bool:
    return bool(given) and Path(str(given)).expanduser().resolve() == folder


def kind_of(command: list[str]) -> Kind:
    """What a process is, by its command line. `dagster dev` starts a daemon and a web server as children of its own."""
    words = [Path(word).name for word in command[:6]]
    if "run" in words and ("dagster._daemon" in words or "dagster-daemon" in words):
        return "daemon"
    if "loop_dagster.models.serve" in words:
        return "serving"
    if "dagster_webserver" in words or "dagster-webserver" in words:
        return "ui"
    if "serve" in words and ("loop_dagster.cli" in words or "loop" in words):
        return "api"
    return "other"


def describe(pid: int) -> str:
    """Name of a process for people: never its arguments, which may hold a key."""
    import psutil

    try:
        return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        return f"process {pid}"


def is_alive(pid: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(pid))
