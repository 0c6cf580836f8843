"""What is damaged in a table of the lake, file by file, and the command that mends it.

Belongs here: looking at a local table's log and data files without changing any. Does not belong here: refusing to read
a damaged table (lake.py does that on every opening), and mending: whoever reads it decides what to give up.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from loop_dagster.store.lake import Lake
from loop_dagster.tables.base import Table

_COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint.*\.parquet")
_PARQUET: Final = b"PAR1"
#: Damaged data files that are named one by one.
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Torn:
    """One damaged thing of a table: the file, what is wrong with it, and what to do. Rows of it are never shown."""

    path: str
    found: str
    mend: str


def look(lake: Lake, table: Table, *, thorough: bool = False) -> list[Torn]:
    """Everything that is damaged; empty when the table is whole or not there. Local folders only.

    Log and file sizes are always looked at; `thorough` reads every row of every data file.
    """
    folder = Path(lake.path(table))
    if folder.is_file():
        return [Torn(str(folder), "it is a file in place of the table's folder", f"`rm {_q(folder)}`")]
    log = folder / "_delta_log"
    commits, checkpoints = _versions(log, _COMMIT), _versions(log, _CHECKPOINT)
    if not commits and not checkpoints:
        if not any(folder.glob("*.parquet")):
            return []
        found = "its log is gone, and with it what the data files mean"
        return [Torn(str(log), found, f"Put {_q(log)} back from a copy. {_begin_anew(folder)}")]
    torn = list(_log(log, commits, checkpoints))
    return torn or list(_data(folder, thorough=thorough))


def _versions(log: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    if not log.is_dir():
        return {}
    found = {path: pattern.fullmatch(path.name) for path in log.iterdir()}
    return {int(match[1]): path for path, match in found.items() if match}


def _log(log: Path, commits: dict[int, Path], checkpoints: dict[int, Path]) -> Iterator[Torn]:
    """Commits and checkpoints that a reader needs: the newest whole checkpoint and every commit after it."""
    newest = max(commits, default=-1)
    start = -1
    for version in sorted(checkpoints, reverse=True):
        if (problem := _checkpoint_problem(checkpoints[version])) is None:
            start = version
            break
        yield Torn(str(checkpoints[version]), problem, _without_checkpoint(log, checkpoints[version], version, commits))
    else:
        hint = log / "_last_checkpoint"
        if hint.is_file() and not checkpoints and _hints_at_something(hint):
            mend = _without_checkpoint(log, hint, max(commits, default=0), commits)
            yield Torn(str(hint), "the checkpoint that it names is missing", mend)
    for version in range(start + 1, newest + 1):
        path = commits.get(version)
        if path is None:
            name = log / f"{version:020d}.json"
            found = "this commit is missing, and later ones are there"
            yield Torn(str(name), found, f"Put {_q(name)} back from a copy.")
        elif (problem := _commit_problem(path)) is not None:
            yield Torn(str(path), problem, _without_commit(path, newest=version == newest))


def _commit_problem(path: Path) -> str | None:
    text = path.read_bytes()
    if not text.strip():
        return "this commit is empty, as a power cut leaves it"
    try:
        for line in text.splitlines():
            json.loads(line)
    except ValueError:
        return "this commit is cut off or overwritten"
    return None


def _checkpoint_problem(path: Path) -> str | None:
    try:
        pl.read_parquet_schema(path)
    except (OSError, pl.exceptions.PolarsError):
        return "this checkpoint is damaged"
    return None


def _hints_at_something(hint: Path) -> bool:
    try:
        return "version" in json.loads(hint.read_text("utf-8"))
    except (ValueError, TypeError):
        return False  # readers take no notice of one that cannot be read


def _without_commit(path: Path, *, newest: bool) -> str:
    if not newest:
        return f"Put {_q(path)} back from a copy."
    return (
        f"`mv {_q(path)} {_q(path.with_suffix('.torn'))}`: it is the newest one and was never finished. Then repeat "
        "what was under way (an import of the same file stores nothing twice)."
    )


def _without_checkpoint(log: Path, path: Path, version: int, commits: dict[int, Path]) -> str:
    if all(number in commits for number in range(version + 1)):
        gone = " ".join(_q(one) for one in dict.fromkeys((path, log / "_last_checkpoint")) if one.exists())
        return (
            f"`rm {gone}`: every commit up to it is still there, so nothing is lost, and the next one comes by itself."
        )
    return f"Put {_q(path)} back from a copy: commits from before it are gone already."


def _data(folder: Path, *, thorough: bool) -> Iterator[Torn]:
    """Data files of the newest version: there, of the size that the log says, and Parquet at both ends."""
    try:
        added = DeltaTable(str(folder)).get_add_actions()
    except (DeltaError, OSError) as error:
        yield Torn(str(folder), f"it cannot be opened ({type(error).__name__})", f"Put {_q(folder)} back from a copy.")
        return
    names, sizes = added["path"].to_pylist(), added["size_bytes"].to_pylist()
    found = []
    for name, size in zip(names, sizes, strict=True):
        problem = _file_problem(folder / name, size, thorough=thorough)
        if problem is not None:
            found.append((folder / name, problem))
    missing = f"{shlex.quote(sys.executable)} -c 'import deltalake, sys; deltalake.DeltaTable(sys.argv[1]).repair()'"
    for path, problem in found[:_NAMED]:
        first = "" if not path.exists() else f"`mv {_q(path)} {_q(path.with_suffix('.torn'))}` and "
        yield Torn(
            str(path),
            problem,
            f"Put it back from a copy. If there is none, give its rows up: {first}`{missing} {_q(folder)}`, then "
            "import their files again; what is there is not stored twice.",
        )
    if len(found) > _NAMED:
        rest = f"{len(found) - _NAMED} further data files are missing or damaged"
        yield Torn(str(folder), rest, f"Put {_q(folder)} back from a copy.")


def _file_problem(path: Path, size: int, *, thorough: bool) -> str | None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return "this data file is missing"
    if found != size:
        return f"this data file has {found:,} bytes, needed {size:,}"
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(-4, 2)
        if head != _PARQUET or file.read(4) != _PARQUET:
            return "this data file is overwritten: it is no Parquet any more"
    if thorough:
        try:
            pl.read_parquet(path)
        except Exception as error:  # a damaged page can end in any error of the reader
            return f"this data file cannot be read through ({type(error).__name__})"
    return None


def _begin_anew(folder: Path) -> str:
    return f"If there is none: `mv {_q(folder)} {_q(folder.with_suffix('.lost'))}`, then import the files again."


def _q(path: Path) -> str:
    return shlex.quote(str(path))
