"""The lake: one Delta table per declaration of `tables/`, under a folder or an object store.

Belongs here: opening, scanning, appending, replacing, deleting and keeping house, for any declared table. Does not
belong here: what the rows mean, inbox and tombstones (samples.py), leases (leases.py). Nothing here assumes a local
path, but for two looks at a local log that an object store's atomic writes make needless.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import polars as pl
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import PrimitiveType

from loop_dagster.errors import LakeConflict, LakeNotWritable, LakeSchemaMismatch, LakeUnreadable
from loop_dagster.store.owner import Owner, OwnerMark
from loop_dagster.tables.base import Kind, Table

#: Delta's name of each declared kind.
DELTA_TYPES: Mapping[Kind, str] = {
    "id": "string",
    "key": "long",
    "text": "string",
    "word": "string",
    "int": "long",
    "float": "double",
    "bool": "boolean",
    "time": "timestamp",
}
TRIES = 10
#: Files under this size are small, and so many of them are written together: each costs every reader a tenth of a
#: millisecond, whatever it holds.
SMALL_BYTES = 32 * 2**20
MOST_SMALL_FILES = 100
#: Row groups are what readers work on side by side, what a search has in memory at a time, and what has to be unpacked
#: for a single sample; too many of them cost every reader.
GROUP_ROWS, FEWEST_GROUP_ROWS, GROUP_BYTES = 16 * 1024, 256, 64 * 2**20
#: How many times its packed size a conversation takes.
PACKED = 5
#: Commits between two checkpoints: every commit after the last one costs each opening a fifth of a millisecond.
CHECKPOINT_EVERY = "20"
_COMMIT = re.compile(r"^(\d{20})\.json$")
_CHECKPOINT = re.compile(r"^(\d{20})\.checkpoint.*\.parquet$")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a table: its lazy frame, the rows that the log says it has, and its data files with their sizes.

    `mark` is what the newest commit's file looked like, None on an object store.
    """

    frame: pl.LazyFrame
    rows: int
    files: tuple[tuple[str, int], ...]
    mark: tuple[str, int, int] | None


@dataclass(frozen=True, slots=True)
class Maintained:
    """What one round of housekeeping did: data files before and after, files removed from storage, Delta version."""

    files_before: int
    files_after: int
    removed: int
    version: int


class Lake:
    """All tables of one workspace, at `<root>/<workspace>/<table name>`.

    `root` is a folder or an URL of an object store (`s3://`, `gs://`, `az://`); `storage_options` go to the store as
    they are. Every call opens the table anew: a stale handle fails a commit that carries a transaction. With `owner`,
    which says who writes here, a lake of another registry is read and never written (owner.py).
    """

    def __init__(
        self,
        root: str,
        workspace: str = "default",
        *,
        storage_options: dict[str, str] | None = None,
        owner: Callable[[], Owner] | None = None,
    ) -> None:
        self.root = root.rstrip("/") or "/"
        self.workspace = workspace
        self.mark = OwnerMark(f"{self.root}/{workspace}", storage_options)
        self._options = storage_options
        self._local = "://" not in root
        self._owner = owner
        self._snapshots: dict[str, Snapshot] = {}

    def path(self, table: Table) -> str:
        """Where the table lies, absolute or as URL."""
        return f"{self.root}/{self.relative(table)}"

    def relative(self, table: Table) -> str:
        """Where the table lies in the lake; the form for messages."""
        return f"{self.workspace}/{table.name}"

    # reading

    def scan(self, table: Table, *, version: int | None = None) -> pl.LazyFrame:
        """All rows, in exactly the declared columns and order; empty while the table does not exist.

        Filters and projections go down to the Parquet files. Raises LakeUnreadable for a log that cannot be read and
        LakeSchemaMismatch for a stored table that lacks a declared column.
        """
        if version is None:
            found = self.snapshot(table)
            return table.empty().lazy() if found is None else found.frame
        handle = self._open(table, version=version)
        if handle is None:
            return table.empty().lazy()
        files = _files(handle)
        if self._local and (problem := self._incomplete(table, files)) is not None:
            raise LakeUnreadable(table.name, self.relative(table), problem)
        return self._frame(table, handle)

    def snapshot(self, table: Table) -> Snapshot | None:
        """The newest version as it is read; None while the table does not exist. Raises as `scan`.

        Opening costs a few milliseconds after each commit and next to nothing in between.
        """
        mark = self._mark(table) if self._local else None
        known = self._snapshots.get(table.name)
        if mark is not None and known is not None and known.mark == mark and not self._incomplete(table, known.files):
            return known
        handle = self._open(table)
        if handle is None:
            return None
        files = _files(handle)
        while self._local and (problem := self._incomplete(table, files)) is not None:
            newer = self._open(table)
            if newer is None or newer.version() == handle.version():
                raise LakeUnreadable(table.name, self.relative(table), problem)
            handle, files = newer, _files(newer)  # housekeeping took the files of the version that was opened
        found = Snapshot(self._frame(table, handle), int(handle.count()), files, mark)
        if mark is not None and mark[0] == f"{handle.version():020d}.json":
            self._snapshots[table.name] = found
        return found

    def scan_files(self, table: Table, names: Sequence[str]) -> pl.LazyFrame:
        """All rows of some of a snapshot's files, in the declared columns; names are as the snapshot has them."""
        places = [f"{self.path(table)}/{name}" for name in names]
        options = {"storage_options": self._options} if self._options else {}
        return pl.scan_parquet(places, glob=False, **options).select(list(table.schema))  # type: ignore[arg-type]

    def version(self, table: Table) -> int | None:
        """The newest Delta version, None while the table does not exist."""
        handle = self._open(table)
        return None if handle is None else int(handle.version())

    def files(self, table: Table) -> list[str]:
        """Paths or URLs of the data files of the newest version."""
        handle = self._open(table)
        return [] if handle is None else list(handle.file_uris())

    def row_count(self, table: Table) -> int:
        """Rows of the newest version, from the log alone."""
        handle = self._open(table)
        return 0 if handle is None else int(handle.count())

    def transaction(self, table: Table, application: str) -> int | None:
        """The newest number of `append(transaction=(application, number))` that the table carries; None for none."""
        handle = self._open(table)
        return None if handle is None else handle.transaction_version(application)

    # writing

    def append(
        self,
        table: Table,
        frame: pl.DataFrame,
        *,
        transaction: tuple[str, int] | None = None,
        sync: bool = False,
    ) -> int | None:
        """Append rows in one commit and return the new Delta version.

        With `transaction` (application id, number) a number that the table already carries, or an older one, writes
        nothing and returns None; numbers of one application therefore only grow. An empty frame without transaction
        writes nothing and returns the present version. `sync` flushes the commit of a local lake to the disk before
        it returns, for a caller that deletes its only other copy next.
        """
        ready = self._checked(table, frame)

        def commit() -> int | None:
            handle = self._open_or_create(table)
            properties = None
            if transaction is not None:
                app, number = transaction
                seen = handle.transaction_version(app)
                if seen is not None and seen >= number:
                    return None
                properties = CommitProperties(app_transactions=[Transaction(app, number)])
            elif ready.is_empty():
                return int(handle.version())
            writer = _writer(int(ready.estimated_size()), ready.height)
            write_deltalake(handle, ready, mode="append", commit_properties=properties, writer_properties=writer)
            if sync:
                self._flush(table, int(handle.version()))
            _gather(handle)
            return int(handle.version())

        return self._retried(table, "Appending", commit)

    def replace_attempt(self, table: Table, attempt: str, frame: pl.DataFrame) -> int:
        """Make `frame` the only rows of `attempt` in a table that is written per attempt; returns the Delta version.

        Doing it twice leaves the same rows. Every row of the frame must carry that attempt; an empty frame takes the
        attempt's rows away.
        """
        if not table.by_attempt:
            raise LakeSchemaMismatch(table.name, ["column attempt: needed, found a table that has none"])
        ready = self._checked(table, frame)
        foreign = ready.filter(pl.col("attempt") != attempt).height
        if foreign:
            raise LakeSchemaMismatch(
                table.name, [f"column attempt: needed {attempt!r} in every row, found {foreign} of another attempt"]
            )
        predicate = f"attempt = {quoted(attempt)}"

        def commit() -> int:
            handle = self._open_or_create(table)
            if ready.is_empty():
                handle.delete(predicate)
            else:
                writer = _writer(int(ready.estimated_size()), ready.height)
                write_deltalake(handle, ready, mode="overwrite", predicate=predicate, writer_properties=writer)
            _gather(handle)
            return int(handle.version())

        return self._retried(table, "Replacing an attempt", commit)

    def delete(self, table: Table, predicate: str) -> int:
        """Delete the rows for which the SQL predicate holds; returns how many. Build values with `quoted`.

        The data stays in older files until `maintain`. The predicate is kept in the log: ids only, never text.
        """

        def commit() -> int:
            handle = self._open(table)
            return 0 if handle is None else int(handle.delete(predicate)["num_deleted_rows"])

        return self._retried(table, "Deleting", commit)

    def maintain(self, table: Table) -> Maintained | None:
        """Compact, remove every file that the newest version does not need, and write a checkpoint.

        Older versions cannot be read afterwards, and a file that another writer has not committed yet is removed too:
        the caller holds the lake's lease, and so does every other writer. None while the table does not exist.
        """

        def work() -> Maintained | None:
            handle = self._open(table)
            if handle is None:
                return None
            before = len(handle.file_uris())
            _compact(handle)
            removed = handle.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
            handle.create_checkpoint()
            return Maintained(before, len(handle.file_uris()), len(removed), int(handle.version()))

        return self._retried(table, "Housekeeping", work)

    # the rest is private

    def _open(self, table: Table, *, version: int | None = None) -> DeltaTable | None:
        if self._local:
            self._refuse_torn(table)
        try:
            return DeltaTable(self.path(table), version=version, storage_options=self._options)
        except TableNotFoundError as error:
            if self._local and any(Path(self.path(table)).glob("*.parquet")):
                raise LakeUnreadable(table.name, self.relative(table), "data files without any log.") from error
            return None
        except DeltaError as error:
            if self._local and not Path(self.path(table)).exists():
                return None
            raise LakeUnreadable(table.name, self.relative(table), self._why(error)) from None

    def _open_or_create(self, table: Table) -> DeltaTable:
        handle = self._open(table)
        if handle is not None:
            return handle
        fields = [
            Field(column.name, PrimitiveType(DELTA_TYPES[column.kind]), nullable=column.nullable)
            for column in table.columns
        ]
        # Statistics only where declared: a minimum of a text column would keep deleted text in the log.
        configuration = {
            "delta.dataSkippingStatsColumns": ",".join(table.statistics_columns),
            "delta.checkpointInterval": CHECKPOINT_EVERY,
        }
        if self._local:
            Path(self.path(table)).mkdir(parents=True, exist_ok=True)
        DeltaTable.create(
            self.path(table),
            Schema(fields),
            mode="ignore",
            description=table.meaning,
            configuration=configuration,
            storage_options=self._options,
        )
        handle = self._open(table)
        if handle is None:
            raise LakeUnreadable(table.name, self.relative(table), "it was created and is not there.")
        return handle

    def _checked(self, table: Table, frame: pl.DataFrame) -> pl.DataFrame:
        """The frame in declared order, or LakeSchemaMismatch that lists every fault."""
        problems: list[str] = []
        for column in table.columns:
            if column.name not in frame.columns:
                problems.append(f"column {column.name}: needed {column.dtype}, found nothing")
                continue
            found = frame.schema[column.name]
            if found not in (column.dtype, pl.Null):
                problems.append(f"column {column.name}: needed {column.dtype}, found {found}")
            elif not column.nullable and (nulls := frame[column.name].null_count()):
                problems.append(f"column {column.name}: needed a value in every row, found {nulls} nulls")
        problems += [f"column {name}: not declared" for name in frame.columns if name not in table.schema]
        if problems:
            raise LakeSchemaMismatch(table.name, problems)
        return frame.select(pl.col(name).cast(dtype) for name, dtype in table.schema.items())

    def _retried(self, table: Table, action: str, commit: Callable[[], _T]) -> _T:
        """Run `commit` from a fresh handle until it is not beaten by another writer; each try is safe to repeat."""
        for attempt in range(TRIES):
            try:
                if self._owner is not None:
                    self.mark.claim(self._owner)
                return commit()
            except CommitFailedError:
                time.sleep(random.uniform(0, 0.02 * 2 ** min(attempt, 5)))  # noqa: S311  # only spreads writers
            except (DeltaError, OSError) as error:
                raise LakeNotWritable(table.name, self.relative(table), action, self._why(error)) from None
        raise LakeConflict(table.name, action, TRIES)

    def _why(self, error: Exception) -> str:
        """First line only, and no absolute place: what follows can be a preview of rows."""
        line = str(error).partition("\n")[0].replace(self.root, "<lake>")
        return line if line.endswith(".") else f"{line}."

    def _frame(self, table: Table, handle: DeltaTable) -> pl.LazyFrame:
        options = {"storage_options": self._options} if self._options else {}
        frame = pl.scan_delta(handle, **options)  # type: ignore[arg-type]
        found = frame.collect_schema()
        problems = [
            f"column {name}: needed {dtype}, found {found.get(name, 'nothing')} in the stored table"
            for name, dtype in table.schema.items()
            if found.get(name) != dtype
        ]
        if problems:
            raise LakeSchemaMismatch(table.name, problems)
        return frame.select(list(table.schema))

    def _log_names(self, table: Table) -> list[str]:
        """Names of the files of a local log; none while there is no table."""
        try:
            return os.listdir(f"{self.path(table)}/_delta_log")  # noqa: PTH208  # names alone, a tenth of the time
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            if not Path(self.path(table)).is_file():
                raise
            raise LakeUnreadable(table.name, self.relative(table), "there is a file in place of its folder.") from None

    def _mark(self, table: Table) -> tuple[str, int, int] | None:
        """Name, inode and time of the newest commit's file: another version, or another table, has others."""
        newest = max((name for name in self._log_names(table) if _COMMIT.match(name)), default=None)
        if newest is None:
            return None
        try:
            found = Path(self.path(table), "_delta_log", newest).stat()
        except FileNotFoundError:
            return None
        return (newest, found.st_ino, found.st_mtime_ns) if found.st_size else None

    def _refuse_torn(self, table: Table) -> None:
        """A commit file of no bytes, as a power cut leaves it, would be read as a commit without rows."""
        log, names = Path(self.path(table)) / "_delta_log", self._log_names(table)
        checkpoint = max((int(match[1]) for name in names if (match := _CHECKPOINT.match(name))), default=-1)
        for name in names:
            match = _COMMIT.match(name)
            if match and int(match[1]) > checkpoint and (log / name).stat().st_size == 0:
                raise LakeUnreadable(table.name, self.relative(table), f"its commit {name} is empty.")

    def _incomplete(self, table: Table, files: tuple[tuple[str, int], ...]) -> str | None:
        """Which data file is gone or cut off: it would end a reader in the middle of its work, without a name."""
        folder = self.path(table)
        for name, size in files:
            try:
                found = os.stat(f"{folder}/{name}").st_size  # noqa: PTH116  # 2,000 of them: a Path costs ten times that
            except FileNotFoundError:
                return f"its data file {name} is missing."
            if found != size:
                return f"its data file {name} has {found:,} bytes, needed {size:,}."
        return None

    def _flush(self, table: Table, version: int) -> None:
        """Write the files of one commit through to the disk of a local lake."""
        if not self._local:
            return
        folder = Path(self.path(table))
        log = folder / "_delta_log" / f"{version:020d}.json"
        actions = [json.loads(line) for line in log.read_text("utf-8").splitlines() if line]
        added = [folder / action["add"]["path"] for action in actions if "add" in action]
        for path in [*added, folder, log, log.parent]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _writer(unpacked: int, rows: int) -> WriterProperties:
    """Row groups of at most GROUP_ROWS rows, and about GROUP_BYTES once they are unpacked."""
    fit = GROUP_BYTES * rows // max(unpacked, 1)
    size = min(GROUP_ROWS, max(FEWEST_GROUP_ROWS, fit))
    return WriterProperties(compression="ZSTD", compression_level=1, max_row_group_size=size)


def _compact(handle: DeltaTable) -> None:
    added = pl.DataFrame(handle.get_add_actions()).select("size_bytes", "num_records").drop_nulls()
    packed, rows = (int(value or 0) for value in added.sum().row(0))
    handle.optimize.compact(writer_properties=_writer(PACKED * packed, rows or GROUP_ROWS))


def _files(handle: DeltaTable) -> tuple[tuple[str, int], ...]:
    """Path in the table and bytes of each data file."""
    added = handle.get_add_actions()
    return tuple(zip(added["path"].to_pylist(), added["size_bytes"].to_pylist(), strict=True))


def quoted(value: str) -> str:
    """A string as literal of a Delta predicate."""
    return "'" + value.replace("'", "''") + "'"


def _gather(handle: DeltaTable) -> None:
    """Write small files together once there are many.

    No file is removed from storage, so a reader of an older version goes on. The rows are safe before this begins: when
    it fails, it is simply tried again after a later commit.
    """
    with contextlib.suppress(DeltaError, OSError):
        if len(handle.file_uris()) <= MOST_SMALL_FILES:
            return
        sizes = pl.DataFrame(handle.get_add_actions()).get_column("size_bytes")
        if int((sizes < SMALL_BYTES).sum()) > MOST_SMALL_FILES:
            _compact(handle)
