"""Starts Dagster for an installation: its home, its environment, its daemon and its UI.

Belongs here: rendering `$LOOP_HOME/dagster/dagster.yaml`, the environment of every child, starting and ending the
processes that this one started. Does not belong here: what the daemon does (sensors/) or any rule.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from loop_dagster.errors import LoopError
from loop_dagster.settings import Settings

PROJECT = Path(__file__).resolve().parent.parent


class PortTaken(LoopError):
    """Another program listens where a server of ours would."""

    code = "PORT_TAKEN"

    def __init__(self, what: str, host: str, port: int, setting: str) -> None:
        super().__init__(
            f"{what} needs port {port} on {host}, and another program listens there. "
            f"End that program, or choose another port with {setting}=<port>.",
            port=port,
            setting=setting,
        )


class DaemonEnded(LoopError):
    """A process that we started ended by itself."""

    code = "DAEMON_ENDED"

    def __init__(self, what: str, returncode: int, log: Path) -> None:
        tail = log.read_text(errors="replace").splitlines()[-12:] if log.is_file() else []
        super().__init__(
            f"{what} ended with exit status {returncode}. The end of {log.name}:\n" + "\n".join(tail),
            returncode=returncode,
        )


def environment(settings: Settings) -> dict[str, str]:
    """Environment of every child process: absolute homes, telemetry off, hub offline, OpenMP without spin-waits.

    With OpenMP's default spin-wait one busy neighbour makes torch five to fifty times slower.
    """
    fixed = {
        "LOOP_HOME": str(settings.root),
        "DAGSTER_HOME": str(settings.dagster_home),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "GX_ANALYTICS_ENABLED": "false",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if settings.dagster_postgres_url is not None:  # Dagster reads it from there, also when settings.yaml says it
        fixed["LOOP_DAGSTER_POSTGRES_URL"] = settings.dagster_postgres_url.get_secret_value()
    return {**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), **fixed}


def home_config(settings: Settings) -> dict[str, Any]:
    """What `dagster.yaml` of this installation says: the template of the project, with its storage."""
    config: dict[str, Any] = yaml.safe_load((PROJECT / "dagster.yaml").read_text())
    if settings.dagster_postgres_url is not None:
        # The URL stays in the environment: a file in the home never holds a password.
        config["storage"] = {"postgres": {"postgres_url": {"env": "LOOP_DAGSTER_POSTGRES_URL"}}}
    return config


def render_home(settings: Settings) -> Path:
    """Write DAGSTER_HOME from the template `dagster.yaml`; returns the folder. Atomic, the same bytes every time."""
    home = settings.dagster_home
    home.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(home_config(settings), sort_keys=False)
    target = home / "dagster.yaml"
    if not target.is_file() or target.read_text() != text:
        with tempfile.NamedTemporaryFile("w", dir=home, delete=False) as file:
            file.write(text)
        Path(file.name).replace(target)
    return home


#: Makes Dagster's databases as its own processes would.
_MAKE = "import dagster, sys; dagster.DagsterInstance.from_config(sys.argv[1]).dispose()"


def make_books(settings: Settings) -> None:
    """Render DAGSTER_HOME and make Dagster's databases in it, unless that was done.

    Two of Dagster's processes that make them at the same moment note two revisions, and none can open them any more; so
    they are made here, by one at a time. What keeps them from being made, the process that needs them tells.
    """
    made = render_home(settings) / ".made"
    with made.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if made.stat().st_size:
            return
        command = [sys.executable, "-W", "ignore", "-c", _MAKE, str(settings.dagster_home)]
        quiet = subprocess.DEVNULL
        done = subprocess.run(command, env=environment(settings), cwd=PROJECT, stdout=quiet, stderr=quiet, check=False)
        if done.returncode == 0:
            file.write("Dagster's databases were made.\n")


def check_port(what: str, host: str, port: int, setting: str) -> None:
    """Raise PortTaken when something listens there already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(what, host, port, setting) from error


def _end_with_parent() -> None:
    """In a new child: be ended when the parent is, also when nobody could clean up after it (kill -9)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Process:
    """One child in its own process group, its output in a log file."""

    def __init__(self, name: str, command: list[str], settings: Settings) -> None:
        logs = settings.root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = logs / f"{name}.log"
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                command,
                env=environment(settings),
                cwd=PROJECT,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509  # no threads yet
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def check(self) -> None:
        """Raise DaemonEnded when it is no longer there."""
        returncode = self._child.poll()
        if returncode is not None:
            raise DaemonEnded(self.name, returncode, self.log)

    def stop(self, grace_s: float = 20.0) -> None:
        """End it and everything in its group: politely first, for good after `grace_s` seconds."""
        for sign, patience in ((signal.SIGINT, grace_s), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, sign)
            try:
                self._child.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
        # The code server's children are in the same group and may outlive their parent by a moment.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)


@contextlib.contextmanager
def running(*processes: Process) -> Iterator[None]:
    """End all of them at the end of the block, the last started first."""
    try:
        yield
    finally:
        for process in reversed(processes):
            process.stop()


def start_daemon(settings: Settings) -> Process:
    """Dagster's daemon with the project's code location: sensors, run queue, launches."""
    make_books(settings)
    command = [sys.executable, "-m", "dagster._daemon", "run", "-w", str(PROJECT / "workspace.yaml")]
    return Process("daemon", command, settings)


def start_dagster(settings: Settings) -> Process:
    """Dagster's UI and daemon in one (`dagster dev`), sharing one code server."""
    check_port("Dagster's UI", "127.0.0.1", settings.webserver_port, "LOOP_WEBSERVER_PORT")
    make_books(settings)
    command = [sys.executable, "-m", "dagster", "dev", "-w", str(PROJECT / "workspace.yaml")]
    return Process("dagster", [*command, "-h", "127.0.0.1", "-p", str(settings.webserver_port)], settings)


def start_serving(settings: Settings) -> Process:
    """The engine that answers for live versions."""
    check_port("Serving", settings.serve_host, settings.serve_port, "LOOP_SERVE_PORT")
    return Process("serving", [sys.executable, "-m", "loop_dagster.models.serve"], settings)


def start_api(settings: Settings) -> Process:
    """The HTTP API."""
    check_port("The API", settings.api_host, settings.api_port, "LOOP_API_PORT")
    command = [sys.executable, "-m", "loop_dagster.cli", "serve"]
    return Process("api", [*command, "--host", settings.api_host, "--port", str(settings.api_port)], settings)


def runs_under_way(settings: Settings) -> bool:
    """Whether Dagster has any run of this installation that has not ended."""
    from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

    going = [
        DagsterRunStatus.QUEUED,
        DagsterRunStatus.NOT_STARTED,
        DagsterRunStatus.STARTING,
        DagsterRunStatus.STARTED,
        DagsterRunStatus.CANCELING,
    ]
    with DagsterInstance.from_config(str(settings.dagster_home)) as instance:
        return bool(instance.get_run_ids(RunsFilter(statuses=going), limit=1))
