"""What every process that touches weights shares: its job, its progress, its lease, its end.

Belongs here: reading a job and writing a result as JSON, the environment of a child, the reporter (progress file,
Dagster Pipes log lines, lease heartbeat, end of the parent, signals). Does not belong here: any training, answering
or merging, and anything of Dagster beyond opening Pipes.

A child is `python -m loop_dagster.models.<name> JOB.json`. It writes `progress.json` while it works and one of
`result.json` and `error.json` when it ends, all in the job's `work_dir`, each replaced as a whole. Its log lines and
files never hold the text of a sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from loop_dagster.errors import ChildFailed, LeaseLost, LoopError, Stopped

#: Exit status of a child whose lease was taken away: it wrote nothing more (EX_TEMPFAIL).
EXIT_LEASE_LOST = 75
#: Exit status after a signal asked it to stop, as a shell reports SIGTERM.
EXIT_STOPPED = 143

#: A lease is beaten at least this often, in seconds, also while one step of the work takes longer: a step that was
#: cancelled ends its child within this time.
BEAT_EVERY_S = 2.0
#: Shortest time between two progress reports, and between two log lines, in seconds.
REPORT_EVERY_S = 0.5
LOG_EVERY_S = 5.0
#: A registry that cannot be reached for so long, in seconds, counts as a lost lease (TTL_S of store/leases.py).
UNREACHABLE_S = 30.0
#: A process that was asked to end and is still in its step after so many seconds ends where it is.
GRACE_S = 5.0

_PARENT = "LOOP_PARENT"  # host:pid of who started a child; on another host (a pod) the number means nothing

J = TypeVar("J", bound="Job")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRef:
    """The lease under which a child works (store/leases.py); without a URL, in the registry of the child's settings."""

    registry_url: str
    workspace: str
    name: str
    token: str


class Job(Protocol):
    """What every job carries beside its own fields; jobs are frozen dataclasses of plain values."""

    @property
    def work_dir(self) -> str: ...

    @property
    def lease(self) -> LeaseRef | None: ...

    @property
    def seed(self) -> int: ...


def write_atomic(path: Path, data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Replace `path` with `data` as JSON; a reader sees the old or the new file, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def to_json(value: Any) -> dict[str, Any]:
    """A dataclass as a JSON object."""
    return dataclasses.asdict(value)


def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
    """The dataclass `cls` from a JSON object, nested dataclasses and tuples of them too; unknown keys are refused."""
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cast(Any, cls))}
    unknown = sorted(set(data) - names)
    if unknown:
        raise TypeError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(names))}")
    return cls(**{name: _rebuild(hints[name], value) for name, value in data.items()})


def _rebuild(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        return _rebuild(arms[0], value) if len(arms) == 1 else value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return from_json(hint, value)
    if origin is tuple and isinstance(value, list):
        item = typing.get_args(hint)[0]
        return tuple(_rebuild(item, each) for each in value)
    return value


def write_job(path: Path, job: Any) -> Path:
    """Write a job where `command` expects it; returns `path`."""
    write_atomic(path, to_json(job))
    return path


def read_result(cls: type[R], work_dir: str | Path) -> R:
    """The result that a child left in its work folder.

    Raises ChildFailed with the child's own code and sentence when it failed, or when it ended without a word (killed,
    out of memory).
    """
    folder = Path(work_dir)
    for name in ("result.json", "error.json"):
        with contextlib.suppress(FileNotFoundError):
            data = json.loads((folder / name).read_text(encoding="utf-8"))
            if name == "result.json":
                return from_json(cls, data)
            raise ChildFailed(data["error"]["code"], data["error"]["message"])
    raise ChildFailed(
        "CHILD_ENDED",
        f"The process working in {folder.name} ended without a result: it was killed, or memory ran out. "
        "Look at the machine's own log for the kill, free memory, and run the step again.",
    )


def child_env(*, hub: bool = False) -> dict[str, str]:
    """Environment that a child needs on top of its parent's.

    OpenMP waits without spinning: with its default, one busy neighbour makes torch five to fifty times slower. `hub`
    leaves Hugging Face on line, for a model that is named by its hub id.
    """
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0" if hub else "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "PYTHONUNBUFFERED": "1",
        _PARENT: f"{socket.gethostname()}:{os.getpid()}",
    }


def command(module: Literal["train", "answer", "merge", "lengths"], job_path: Path) -> list[str]:
    """Command line of a child, for a subprocess or for Dagster's Pipes client."""
    return [sys.executable, "-m", f"loop_dagster.models.{module}", str(job_path)]


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, and give torch every core that this process may use."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_num_threads(cores())


def cores() -> int:
    """Cores that this process may run on (a container's or taskset's limit counts)."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        return max(1, os.cpu_count() or 1)


class Reporter:
    """Tells the world how far a child is, and the child when to stop.

    `report` may be called at every step: it writes, beats the lease and logs at a bounded rate. `stopping` is set by
    SIGTERM and SIGINT; work looks at it between steps, or calls `check`, which raises Stopped. A lost lease or a dead
    parent ends the process at once, from whatever it is doing: nothing is written after that.
    """

    def __init__(
        self, work_dir: str | Path, *, lease: LeaseRef | None = None, log: Callable[[str], None] | None = None
    ) -> None:
        self.work_dir = Path(work_dir)
        self.stopping = threading.Event()
        self._log = log or (lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
        self._lease = lease
        self._beat = _beater(lease) if lease is not None else None
        self._beat_lock = threading.Lock()
        self._beaten = time.monotonic()
        self._reported = self._logged = float("-inf")
        self._ended = threading.Event()
        self._parent = os.getppid()
        self._watch: threading.Thread | None = None

    def start(self) -> None:
        """Beat the lease once, then watch lease and parent from a thread."""
        self.beat()
        self._watch = threading.Thread(target=self._watch_over, name="lease-and-parent", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._watch is not None:
            self._watch.join(timeout=5)

    def report(
        self, done: int, total: int, *, unit: str = "step", force: bool = False, **facts: float | int | str | None
    ) -> None:
        """Say that `done` of `total` units are done; `facts` are numbers and short words, never text of a sample."""
        now = time.monotonic()
        if not force and now - self._reported < REPORT_EVERY_S:
            return
        self._reported = now
        self.beat()
        write_atomic(
            self.work_dir / "progress.json",
            {"done": done, "total": total, "unit": unit, **facts, "at": time.time()},
        )
        if force or now - self._logged >= LOG_EVERY_S:
            self._logged = now
            said = ", ".join(f"{name} {_short(value)}" for name, value in facts.items() if value is not None)
            self._log(f"{unit} {done} of {total}" + (f": {said}" if said else ""))

    def say(self, line: str) -> None:
        """One log line that stands for itself (the precision, a refusal count)."""
        self._log(line)

    def check(self) -> None:
        """Raise Stopped when a signal asked this process to end."""
        if self.stopping.is_set():
            raise Stopped("a signal asked it to end")

    def beat(self) -> None:
        """Prove the lease now; ends the process with EXIT_LEASE_LOST when it is lost. Call it right before a rename."""
        if self._beat is None:
            return
        with self._beat_lock:
            try:
                self._beat()
                self._beaten = time.monotonic()
            except LeaseLost as lost:
                self._end(EXIT_LEASE_LOST, lost)
            except Exception as error:
                left = UNREACHABLE_S - (time.monotonic() - self._beaten)
                if left < 0:
                    assert self._lease is not None
                    self._end(EXIT_LEASE_LOST, LeaseLost(self._lease.name, "expired"))
                self._log(f"the registry did not answer ({type(error).__name__}); the lease holds {left:.0f} s more")

    def _watch_over(self) -> None:
        host, _, pid = os.environ.get(_PARENT, "").rpartition(":")
        named = int(pid) if host == socket.gethostname() else 0
        asked: float | None = None
        while not self._ended.wait(0.5):
            if self.stopping.is_set():
                asked = asked or time.monotonic()
                if time.monotonic() - asked > GRACE_S:
                    self._end(EXIT_STOPPED, Stopped("a signal asked it to end, and its step took too long"))
            if os.getppid() != self._parent or (named and named != self._parent and not _alive(named)):
                # Nobody is left who would read a result; a Pipes child outlives its killed parent otherwise.
                os._exit(EXIT_STOPPED)
            if time.monotonic() - self._beaten > BEAT_EVERY_S:
                self.beat()

    def _end(self, status: int, error: LoopError) -> None:
        # From any thread and at once: an exception here would end only the thread that noticed.
        with contextlib.suppress(OSError):
            write_atomic(self.work_dir / "error.json", error.as_dict())
        os._exit(status)


def _short(value: float | int | str | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _beater(lease: LeaseRef) -> Callable[[], None]:
    leases_of = importlib.import_module("loop_dagster.store.leases").Leases
    url = lease.registry_url or importlib.import_module("loop_dagster.settings").Settings().registry
    registry = importlib.import_module("loop_dagster.store.registry").Registry(url, lease.workspace)
    leases = leases_of(registry)
    return lambda: leases.beat(lease.name, lease.token)


@contextlib.contextmanager
def _pipes() -> Iterator[Callable[[str], None] | None]:
    """The log function of Dagster Pipes where this process was started through it, else None."""
    if "DAGSTER_PIPES_CONTEXT" not in os.environ:
        yield None
        return
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as pipes:
        yield pipes.log.info


def run(cls: type[J], work: Callable[[J, Reporter], Any], argv: list[str] | None = None) -> int:
    """Run `work` on the job named on the command line; returns the exit status.

    0 with `result.json`, or `error.json` and the error's own status, EXIT_STOPPED after a signal, EXIT_LEASE_LOST.
    An error that is not ours is named by its class and place only, since its message may quote a sample.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m loop_dagster.models.<name> JOB.json\n")
        return 2
    for name, value in child_env().items():
        os.environ.setdefault(name, value)
    job = from_json(cls, json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    folder = Path(job.work_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("RANK", "0") != "0":
        # Of several processes of one training the first alone speaks; what the others leave lies in a folder beside.
        folder = folder / f"rank-{os.environ['RANK']}"
    for name in ("result.json", "error.json", "progress.json"):
        (folder / name).unlink(missing_ok=True)
    with _pipes() as log:
        reporter = Reporter(folder, lease=job.lease, log=log)
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, lambda *_: reporter.stopping.set())
        reporter.start()
        try:
            result = work(job, reporter)
            reporter.beat()
            write_atomic(folder / "result.json", to_json(result))
            return 0
        except LoopError as error:
            write_atomic(folder / "error.json", error.as_dict())
            reporter.say(f"{error.code}: {error.message}")
            return EXIT_STOPPED if isinstance(error, Stopped) else error.exit_code
        except Exception as error:
            failure = ChildFailed("CHILD_FAILED", _without_text(error))
            write_atomic(folder / "error.json", failure.as_dict())
            reporter.say(failure.message)
            return failure.exit_code
        finally:
            reporter.close()


def _without_text(error: BaseException) -> str:
    """Class and place of an error, and its message only where that cannot quote a sample."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    place = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    quotable = isinstance(error, OSError | MemoryError | ImportError) or type(error).__name__ == "OutOfMemoryError"
    message = f" ({error})" if quotable or (isinstance(error, RuntimeError) and "memory" in str(error)) else ""
    return f"{type(error).__name__}{message} at {place}. Run the step again; if it repeats, this place names the cause."
