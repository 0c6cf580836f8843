"""`loop doctor`: looks at an installation and says what is wrong and how to mend it."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from loop_dagster.cli.output import AsJson, emit_json, out, table
from loop_dagster.errors import EXIT_FAILED, LoopError
from loop_dagster.models.judge import open_judge
from loop_dagster.opening import base_of
from loop_dagster.processes import check_port
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.tables import TABLES

#: Free space under which an installation is one training away from a full disk.
LOW_DISK_BYTES = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `mend` says what to do and is empty when all is well."""

    what: str
    ok: bool
    found: str
    mend: str = ""


def doctor(as_json: AsJson = False) -> None:
    """Check Python, home, registry, lake, models, ports, leases; exit status 1 if anything needs mending."""
    findings = list(examine(Settings()))
    if as_json:
        emit_json({"findings": [asdict(finding) for finding in findings], "ok": all(f.ok for f in findings)})
    else:
        rows = [("ok" if one.ok else "MEND", one.what, one.found, one.mend) for one in findings]
        table(("", "What", "Found", "How to mend"), rows, "loop doctor")
        out.print("All is well." if all(one.ok for one in findings) else "See the last column.")
    if not all(one.ok for one in findings):
        sys.exit(EXIT_FAILED)


def examine(settings: Settings) -> Iterator[Finding]:
    """Every finding, in the order in which a person would look."""
    yield _python()
    yield from _home(settings)
    yield _dagster_home(settings)
    try:
        store = open_store(settings)
    except (LoopError, OSError) as error:
        yield Finding("registry", False, str(error), "Mend that first; nothing behind it can be looked at.")
        return
    health = store.registry.check()
    yield Finding("registry", health.ok, f"{health.where}, {health.server}", " ".join(health.problems))
    yield from _lake(store)
    yield from _models(store)
    yield _tried("judge", functools.partial(_judge, settings))
    yield _leases(store)
    for what, host, port, setting in (
        ("Dagster's UI", "127.0.0.1", settings.webserver_port, "LOOP_WEBSERVER_PORT"),
        ("Serving", settings.serve_host, settings.serve_port, "LOOP_SERVE_PORT"),
    ):
        yield _tried(f"port of {what}", functools.partial(_port, what, host, port, setting))


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = sys.version_info >= (3, 11)
    return Finding(
        "Python", fits, version, "" if fits else "Python 3.11 or newer is needed: make PYTHON=python3.11 venv."
    )


def _home(settings: Settings) -> Iterator[Finding]:
    root = settings.root
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / ".doctor"
        probe.write_text("writable")
        probe.unlink()
        yield Finding("LOOP_HOME", True, f"{settings.home} can be written to")
    except OSError as error:
        yield Finding("LOOP_HOME", False, f"{settings.home}: {error.strerror}", "Make it writable, or set LOOP_HOME.")
        return
    free = shutil.disk_usage(root).free
    enough = free >= LOW_DISK_BYTES
    mend = "" if enough else "Free space, or move LOOP_HOME: a training writes up to 3 GB."
    yield Finding("disk", enough, f"{free / 1e9:.1f} GB free", mend)


def _dagster_home(settings: Settings) -> Finding:
    given = os.environ.get("DAGSTER_HOME")
    if given is None or Path(given).expanduser().resolve() == settings.dagster_home:
        return Finding("DAGSTER_HOME", True, "the installation's own")
    return Finding(
        "DAGSTER_HOME",
        False,
        f"{given} is not this installation's",
        "Unset it: `loop` sets it for what it starts. For the `dagster` command, point it at $LOOP_HOME/dagster.",
    )


def _lake(store: Store) -> Iterator[Finding]:
    for one in TABLES:
        try:
            rows = store.lake.row_count(one)
        except LoopError as error:
            yield Finding(f"table {one.name}", False, error.message, "Restore the named file from a copy of the lake.")
            continue
        if rows:
            yield Finding(f"table {one.name}", True, f"{rows:,} rows at Delta version {store.lake.version(one)}")


def _models(store: Store) -> Iterator[Finding]:
    for pipeline in store.pipelines.list():
        yield _tried(f"model of {pipeline.tag}", functools.partial(_pinned, store, pipeline))
        live = store.versions.live(pipeline.tag)
        if live is not None:
            kept = all(store.artifacts.has(digest) for digest in live.adapters)
            mend = "" if kept else "Restore the artifacts folder from a copy, or train again: `loop train`."
            yield Finding(f"live version of {pipeline.tag}", kept, f"v{live.version_no}", mend)


def _leases(store: Store) -> Finding:
    stale = [f"{lease.name} ({lease.holder})" for lease in store.leases.expired()]
    if not stale:
        return Finding("leases", True, "none is stale")
    return Finding("leases", True, f"ended by themselves: {', '.join(stale)}; the next one to need them takes them")


def _judge(settings: Settings) -> str:
    return open_judge(settings).name


def _pinned(store: Store, pipeline: Pipeline) -> str:
    return f"{base_of(store, pipeline).model_id}, as pinned"


def _port(what: str, host: str, port: int, setting: str) -> str:
    check_port(what, host, port, setting)
    return f"{host}:{port} is free"


def _tried(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, look())
    except LoopError as error:
        return Finding(what, False, error.code, error.message)
