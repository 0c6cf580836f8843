"""What Dagster has recorded: daemons, sensors that were switched off, runs that hold a place for ever.

Belongs here: reading Dagster's instance through its own API, only where its databases are there already: opening a
missing one would make it. Does not belong here: starting or ending anything.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from loop_dagster.doctor.clock import words
from loop_dagster.doctor.findings import Finding, fine, mistake
from loop_dagster.doctor.installation import Installation
from loop_dagster.errors import NotFound
from loop_dagster.rules.states import step_of
from loop_dagster.store.registry import open_to_read

if TYPE_CHECKING:
    from dagster import DagsterInstance

#: A daemon says that it lives every 30 s.
HEARTBEAT_S: Final = 90.0
#: What waits longer than this with a daemon running is stuck.
WAITS: Final = timedelta(minutes=10)
#: A run whose attempt has gone on ends within seconds; a cancelled one stops its training first.
LEFT: Final = timedelta(minutes=3)
#: Where Dagster keeps runs, sensors and heartbeats on SQLite.
_FILES: Final = ("history/runs.db", "schedules/schedules.db")
_START: Final = "`loop run` starts one; `loop dev` with Dagster's UI."


def daemon(installation: Installation) -> Iterator[Finding]:
    """One daemon where something waits for it; never two on one home."""
    daemons = [one for one in installation.running if one.kind == "daemon"]
    beat = _last_beat(installation)
    alive = bool(daemons) or (beat is not None and time.time() - beat < HEARTBEAT_S)
    if len(daemons) > 1:
        pids = [str(one.pid) for one in sorted(daemons, key=lambda one: one.since)]
        yield mistake(
            "two_daemons",
            "daemon",
            where=str(installation.known.dagster_home),
            found=f"{len(daemons)} daemons run on this home: processes {', '.join(pids)}",
            mend=f"End all but the first: `kill -INT {' '.join(pids[1:])}`. No attempt opens twice, but everything is "
            "looked at twice.",
        )
        return
    waiting = list(_waiting(installation))
    if not alive and waiting:
        yield mistake("no_daemon", "daemon", where="no daemon runs", found=f"{'; '.join(waiting)}", mend=_START)
        return
    elsewhere = "one runs elsewhere" if alive else "none runs, none is needed"
    yield fine("daemon", "daemon", found=f"process {daemons[0].pid} runs" if daemons else elsewhere)


def records(installation: Installation) -> Iterator[Finding]:
    """Dagster's own SQLite files, where they are not in PostgreSQL."""
    for path in _files(installation):
        if _is_damaged(path):
            yield mistake(
                "dagster_records",
                "Dagster's records",
                where=str(path),
                found="damaged: Dagster cannot start with it",
                mend=f"End the daemon, then `mv {path} {path}.torn`: Dagster begins a new one. Only its list of runs "
                "is lost; attempts and versions are in the registry.",
            )


def sensors(installation: Installation) -> Iterator[Finding]:
    """Sensors and schedules that somebody has switched off in Dagster's UI."""
    from dagster._core.scheduler.instigation import InstigatorStatus

    with _instance(installation) as instance:
        if instance is None:
            return
        states = instance.all_instigator_state()
        off = sorted({state.name for state in states if state.status == InstigatorStatus.STOPPED})
    home = installation.known.dagster_home
    for name in off:
        yield mistake(
            "sensor_off",
            "sensors",
            where=f"sensor {name}",
            found="switched off, so what it does no longer happens",
            mend=f"Dagster's UI, Automation, {name}, switch on; or `DAGSTER_HOME={home} dagster sensor start {name} "
            "-w workspace.yaml` in the project's folder.",
        )
    if not off:
        yield fine("sensors", "sensors", found="none is switched off")


def runs(installation: Installation) -> Iterator[Finding]:
    """Runs that Dagster counts as under way and whose process is gone, and a queue that does not move."""
    from dagster import DagsterRunStatus, RunsFilter

    with _instance(installation) as instance:
        if instance is None:
            return
        going = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
        started = list(instance.get_run_records(RunsFilter(statuses=going), limit=200))
        queued = list(instance.get_run_records(RunsFilter(statuses=[DagsterRunStatus.QUEUED]), limit=200))
    dead = [record for record in started if _is_dead(installation, record)]
    for record in dead:
        run = record.dagster_run
        age = installation.now - record.create_timestamp
        yield mistake(
            "run_stuck",
            "runs",
            where=f"run {run.run_id} ({run.job_name})",
            found=f"{run.status.value.lower()} for {words(age)} without a process, and it holds its place in the queue",
            mend="A running daemon (`loop run`) ends it within minutes. If one runs and it stays: Dagster's UI, Runs, "
            f"{run.run_id[:8]}, Terminate, force.",
        )
    longest = max((installation.now - record.create_timestamp for record in queued), default=timedelta(0))
    if queued and longest > WAITS and len(started) == len(dead):
        yield mistake(
            "queue_stuck",
            "runs",
            where=f"run {queued[-1].dagster_run.run_id} ({queued[-1].dagster_run.job_name})",
            found=f"{len(queued)} runs are queued, the oldest for {words(longest)}, and none is under way",
            mend=f"{_START} If one runs: end it (Ctrl-C) and start it again.",
        )
    elif not dead:
        yield fine("runs", "runs", found=f"{len(started)} under way, {len(queued)} queued, none stuck")


def _waiting(installation: Installation) -> Iterator[str]:
    """What only a daemon can move on, in words."""
    store = installation.store
    for attempt in store.attempts.active():
        if step_of(attempt.state) is not None:
            yield f"attempt {attempt.key} is {attempt.state} since {words(installation.now - attempt.since)}"
    for pipeline in store.pipelines.list():
        if pipeline.enabled and pipeline.train_now:
            yield f"{pipeline.tag} is to be trained now"
    rows, oldest = store.inbox.pending()
    if oldest is not None and installation.now - oldest > WAITS:
        yield f"{rows:,} rows of the inbox wait for the lake, the oldest since {words(installation.now - oldest)}"


def _is_dead(installation: Installation, record: Any) -> bool:
    """Whether no process of this machine can be a run's: each is younger than the run, and no lease of it is alive.

    A run whose attempt has left its step, or its try of it, has nothing to do any more: only its own lease counts.
    """
    if _is_left(installation, record):
        return True
    if installation.now - record.create_timestamp < WAITS:
        return False
    began = record.start_time or record.create_timestamp.timestamp()
    if any(one.since <= began + 60 for one in installation.running):
        return False
    leases = installation.store.leases
    key = record.dagster_run.tags.get("loop/attempt")
    names = [f"run/{record.dagster_run.run_id}"]
    names += [f"attempt/{one.run_id}" for one in installation.store.attempts.active() if one.key == key]
    held = [lease for name in names if (lease := leases.find(name)) is not None]
    return all(lease.expires_at <= installation.now for lease in held)


def _is_left(installation: Installation, record: Any) -> bool:
    """Whether a run's attempt has been elsewhere for a while and the run does not hold the attempt's lease."""
    tags = record.dagster_run.tags
    store = installation.store
    try:
        attempt = store.attempts.get(tags.get("loop/attempt", ""))
    except NotFound:
        return False
    if step_of(attempt.state) == tags.get("loop/step") and str(attempt.try_no) == tags.get("loop/try"):
        return False
    if installation.now - max(attempt.since, record.update_timestamp) < LEFT:
        return False
    lease = store.leases.find(f"attempt/{attempt.run_id}")
    mine = lease is not None and lease.holder == f"run {record.dagster_run.run_id}"
    return not (mine and lease is not None and lease.expires_at > installation.now)


def _last_beat(installation: Installation) -> float | None:
    with _instance(installation) as instance:
        if instance is None:
            return None
        beats = [beat.timestamp for beat in instance.get_daemon_heartbeats().values()]
    return max(beats, default=None)


@contextmanager
def _instance(installation: Installation) -> Iterator[DagsterInstance | None]:
    """Dagster's instance of this installation; None where it has recorded nothing yet, or cannot be opened."""
    settings = installation.known
    if not (settings.dagster_home / "dagster.yaml").is_file() or not _recorded(installation):
        yield None
        return
    from dagster import DagsterInstance

    url = settings.dagster_postgres_url
    if url is not None:  # dagster.yaml names the variable, and settings.yaml may be what holds it
        os.environ.setdefault("LOOP_DAGSTER_POSTGRES_URL", url.get_secret_value())
    with DagsterInstance.from_config(str(settings.dagster_home)) as instance:
        yield instance


def _files(installation: Installation) -> list[Path]:
    """Dagster's SQLite files that are there."""
    if installation.known.dagster_postgres_url is not None:
        return []
    return [path for name in _FILES if (path := installation.known.dagster_home / name).is_file()]


def _is_damaged(path: Path) -> bool:
    try:
        with closing(open_to_read(str(path))) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        return False  # busy, or not to be opened: other looks say why
    except sqlite3.DatabaseError:
        return True
    return False


def _recorded(installation: Installation) -> bool:
    """Whether Dagster's tables are there: opening an instance without them would make them."""
    settings = installation.known
    if settings.dagster_postgres_url is None:
        files = _files(installation)
        # Dagster opens them for writing, and does not start on what it cannot write to.
        return len(files) == len(_FILES) and all(
            os.access(path.parent, os.W_OK) and not _is_damaged(path) for path in files
        )
    if installation.offline:
        return False
    url = sa.make_url(settings.dagster_postgres_url.get_secret_value()).set(drivername="postgresql+psycopg2")
    engine = sa.create_engine(url, connect_args={"connect_timeout": 4}, hide_parameters=True)
    try:
        with engine.connect() as connection:
            tables = set(sa.inspect(connection).get_table_names())
            return {"runs", "instigators", "daemon_heartbeats"} <= tables
    except sa.exc.SQLAlchemyError:
        return False  # dagster_home.py says why
    finally:
        engine.dispose()
