"""Whose a lake is: one registry writes it, named in `_owner.json` beside the tables of the workspace.

Belongs here: the mark, who may write over it, and refusing a second registry before it writes a row. Does not belong
here: the commits (lake.py), leases (they live in a registry and so cannot keep two registries apart).

Two installations with registries of their own on one lake would take each other's samples for theirs, count them
twice and delete them unasked. The mark says which registry writes, where that lies and which folder it marked, so that
a lake that was copied, a registry that was moved and one that was made anew in its old place are told apart from that.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import sqlalchemy as sa
from uuid_utils import uuid4

from loop_dagster.errors import LakeOfAnother, RegistryNotReady
from loop_dagster.store.registry import Registry, insert_new
from loop_dagster.store.schema import installations

FILE: Final = "_owner.json"
#: What a mark says of this registry: `ours` as it stands, `adopt` to be written anew, `other` not ours to write.
Standing = Literal["ours", "adopt", "other"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A registry that writes a lake.

    `registry` is where it lies, without any password; `home` the installation that wrote the mark, as `host:folder`;
    `place` what was marked: inode of a local folder, or the URL of an object store. All of it may be shown to people.
    """

    registry_id: str
    registry: str
    home: str
    place: str = ""

    @property
    def words(self) -> str:
        return f"the registry {self.registry} of the installation {self.home}"


def registry_id(registry: Registry, *, make: bool = True) -> str | None:
    """The registry's own mark in this workspace, made on first use; None when it has none and none is to be made."""
    mine = sa.select(installations.c.registry_id).where(installations.c.workspace == registry.workspace)
    try:
        with registry.read() as connection:
            found = connection.execute(mine).scalar_one_or_none()
    except RegistryNotReady:
        if make:
            raise
        return None
    if found is not None or not make:
        return found
    row = {"workspace": registry.workspace, "registry_id": str(uuid4()), "created_at": datetime.now(UTC)}
    with registry.write() as connection:
        insert_new(connection, installations, row)
        return str(connection.execute(mine).scalar_one())


def owner_of(registry: Registry, root: Path, *, make: bool = True) -> Owner:
    """What this installation writes into a lake; its id is empty while its registry has none and none is to be made."""
    known = registry_id(registry, make=make) or ""
    host = socket.gethostname()
    where = registry.where if registry.path is None else f"{host}:{registry.path}"
    return Owner(known, where, f"{host}:{root}")


class OwnerMark:
    """The mark of one lake's workspace, at `<folder>/_owner.json`; `folder` is a path or an URL."""

    def __init__(self, folder: str, options: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._options = dict(options) if options else None
        self._local = "://" not in folder
        self._seen: str | None = None

    @property
    def path(self) -> str:
        return f"{self.folder}/{FILE}"

    def read(self) -> Owner | None:
        """Who is marked; None when nobody is, or the file is not readable as a mark. Raises OSError."""
        text = self._read()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(text or "")
            return Owner(*(str(found[name]) for name in ("registry_id", "registry", "home", "place")))
        return None

    def claim(self, me: Callable[[], Owner]) -> None:
        """Before a write: mark the lake as ours if it may be. Raises LakeOfAnother, naming both; OSError.

        A folder's mark is read before each write (30 microseconds), an object store's once per process.
        """
        if not self._local and self._seen is not None:
            return
        text = self._read()
        if text is not None and text == self._seen:
            return
        mine = me()
        found = self.read()
        if found is not None and (standing := self.standing(found, mine)) != "adopt":
            if standing == "other":
                raise LakeOfAnother(self.folder, found.words, mine.words, self.path)
        else:
            self._write(mine, fresh=text is None)
            found = self.read()  # of two that write the first mark at once, one stays
            if found is not None and self.standing(found, mine) == "other":
                raise LakeOfAnother(self.folder, found.words, mine.words, self.path)
        self._seen = self._read()

    def standing(self, found: Owner, mine: Owner) -> Standing:
        """What a mark means to the registry `mine`."""
        if found.registry_id == mine.registry_id:
            if found.place != self.place():
                return "adopt"  # lake and registry were copied together: what was marked is another folder
            return "other" if _is_a_copy(found, mine) else "ours" if found.registry == mine.registry else "adopt"
        # Another registry in the same place: the one that marked it is gone. Elsewhere the lake is never ours to take,
        # nor is a copied one: the copy of its own registry may lie beside it.
        return "adopt" if found.registry == mine.registry else "other"

    def place(self) -> str:
        """What tells this lake from a copy of it."""
        if not self._local:
            return self.folder
        try:
            return f"inode {Path(self.folder).stat().st_ino}"
        except FileNotFoundError:
            return ""

    def _read(self) -> str | None:
        if not self._local:
            return self._read_remote()
        try:
            return Path(self.path).read_text("utf-8")
        except FileNotFoundError:
            return None

    def _read_remote(self) -> str | None:
        import polars as pl

        try:
            frame = pl.scan_ndjson(self.path, storage_options=self._options).collect()
        except (OSError, pl.exceptions.PolarsError):  # what a store says of a missing file differs; a write will tell
            return None
        return json.dumps(frame.row(0, named=True)) if frame.height else None

    def _write_remote(self, mine: Owner) -> None:
        import polars as pl

        frame = pl.DataFrame([{**asdict(mine), "place": self.folder}])
        try:
            frame.lazy().sink_ndjson(self.path, storage_options=self._options)
        except pl.exceptions.PolarsError as error:
            raise OSError(f"{FILE} could not be written: {str(error).partition(chr(10))[0]}") from None

    def _write(self, mine: Owner, *, fresh: bool) -> None:
        if not self._local:
            self._write_remote(mine)
            return
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**asdict(mine), "place": self.place(), "what": _WHAT}, indent=1) + "\n"
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{FILE}.", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                if fresh:
                    with contextlib.suppress(FileExistsError):
                        os.link(file.name, self.path)
                else:
                    Path(file.name).replace(self.path)
            finally:
                Path(file.name).unlink(missing_ok=True)


_WHAT: Final = "Names the one registry that writes this lake. Two on one lake would spoil it; see docs/doctor.md."


def _is_a_copy(found: Owner, mine: Owner) -> bool:
    """Whether a registry with our mark still lies where the mark says, on this machine, beside ours."""
    host, _, path = found.registry.partition(":")
    ours = mine.registry.partition(":")
    if found.registry == mine.registry or host != ours[0] or host != socket.gethostname():
        return False
    old = Path(path)
    return old.is_file() and not (Path(ours[2]).exists() and old.samefile(ours[2]))
