"""Artifacts: folders of weights, kept whole under their digest or not at all.

Belongs here: the digest of a folder, private folders of work in progress, keeping, opening, deleting. Does not belong
here: what is in the files, which artifact belongs to which attempt or version (the registry says so).

`<root>/<digest>/` holds the files of an artifact and `.artifact.json`, which lists them with size and digest and is no
part of what is digested. A folder gets there by one rename, after every byte of it is on the disk; `.work/` holds
private folders, `.trash/` what is being deleted. Everything lies on one file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from loop_dagster.errors import ArtifactTorn, BadRequest, NotFound

MANIFEST: Final = ".artifact.json"
#: `sweep` leaves alone what was kept or touched this recently: its row in the registry may not be written yet.
GRACE_S: Final = 3_600.0
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Scan:
    """A folder as it was read: digest of the whole, and (bytes, sha256) of each file by its relative name."""

    digest: str
    files: dict[str, tuple[int, str]]


class Artifacts:
    """The artifact folder of an installation. Safe for several processes on one file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def private(self, token: str) -> Path:
        """Work folder of whoever holds `token`, on the file system of the artifacts; made if it is not there."""
        if not _TOKEN.fullmatch(token):
            raise BadRequest(f"A token has 1 to 80 letters, digits, '_' or '-', got {token!r}.")
        folder = self.root / ".work" / token
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def keep(self, folder: Path, *, still_mine: Callable[[], None]) -> str:
        """Move a finished folder to its place and return its digest.

        Every file is on the disk before `still_mine` is called, which raises (LeaseLost) when the caller's lease is
        gone; then one rename. Killed anywhere, the artifact is there whole or not at all, and calling it again is safe
        while `folder` is there. If the same content is kept already, that stays and `folder` is removed. The folder
        must hold plain files and folders only: BadRequest otherwise, as when it is empty.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        folder = self._on_our_disk(folder)
        (folder / MANIFEST).unlink(missing_ok=True)  # of an earlier call that was killed
        found = scan_folder(folder, sync=True)
        _write_manifest(folder, found)
        target = self.root / found.digest
        with self._locked():
            still_mine()
            if target.exists() and self._is_whole(found.digest):
                os.utime(target)
                self._discard(folder)
                return found.digest
            if target.exists():
                self._discard(target)  # torn by the disk or by hand: the same content replaces it
            folder.rename(target)
            os.utime(target)
            _sync_folder(self.root)
        self._empty_trash()
        return found.digest

    def open(self, digest: str, *, verify: bool = False) -> Path:
        """Folder of an artifact. Files, names and sizes are always checked; with `verify`, every byte is read again.

        Raises NotFound, or ArtifactTorn naming the artifact and what is wrong with it.
        """
        folder = self._folder(digest)
        if not folder.is_dir():
            raise NotFound("artifact", digest)
        problem = self._problem(digest)
        if problem is None and verify and scan_folder(folder).digest != digest:
            problem = "its bytes no longer make its digest"
        if problem is not None:
            raise ArtifactTorn(digest, str(folder), problem)
        return folder

    def has(self, digest: str) -> bool:
        """Whether the artifact is there, with the right files and sizes."""
        return self._folder(digest).is_dir() and self._is_whole(digest)

    def list(self, *, untouched_s: float = 0.0) -> tuple[str, ...]:
        """Digests of everything that is kept and was not touched for `untouched_s` seconds, torn ones too."""
        if not self.root.is_dir():
            return ()
        folders = [path for path in self.root.iterdir() if _DIGEST.fullmatch(path.name)]
        before = time.time() - untouched_s
        return tuple(sorted(path.name for path in folders if not untouched_s or path.stat().st_mtime <= before))

    def size(self, digest: str) -> int:
        """Bytes of an artifact's files. Raises as `open`."""
        return sum(size for size, _ in _read_manifest(self.open(digest)).files.values())

    def delete(self, digest: str) -> bool:
        """Delete an artifact; False when it was not there."""
        folder = self._folder(digest)
        with self._locked():
            if not folder.is_dir():
                return False
            self._discard(folder)
        self._empty_trash()
        return True

    def sweep(
        self, keep: Collection[str], *, tokens: Collection[str] = (), grace_s: float = GRACE_S
    ) -> tuple[str, ...]:
        """Delete every artifact not in `keep` and every private folder not in `tokens`; returns the digests deleted.

        What was kept or written to within `grace_s` seconds stays: its row in the registry may be on its way.
        """
        gone = []
        with self._locked():
            before = time.time() - grace_s
            for digest in self.list(untouched_s=grace_s):
                if digest not in keep:
                    self._discard(self.root / digest)
                    gone.append(digest)
            work = self.root / ".work"
            for folder in work.iterdir() if work.is_dir() else ():
                if folder.name not in tokens and _newest_change(folder) <= before:
                    self._discard(folder)
        self._empty_trash()
        return tuple(gone)

    def _folder(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise BadRequest(f"A digest is 64 hexadecimal digits, got {digest!r}.")
        return self.root / digest

    def _is_whole(self, digest: str) -> bool:
        return self._problem(digest) is None

    def _problem(self, digest: str) -> str | None:
        """What the manifest and the sizes say against an artifact; None if nothing."""
        folder = self.root / digest
        try:
            listed = _read_manifest(folder)
            sizes = {name: path.stat().st_size for name, path in _files(folder)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, BadRequest) as error:
            return f"its list of files cannot be read ({type(error).__name__})"
        if listed.digest != digest:
            return f"its list of files belongs to {listed.digest}"
        for name in sorted(set(sizes) | set(listed.files)):
            wanted = listed.files.get(name, (None,))[0]
            if sizes.get(name) != wanted:
                return f"{name} has {sizes.get(name, 'no')} bytes, needed {'none' if wanted is None else wanted}"
        return None

    def _on_our_disk(self, folder: Path) -> Path:
        """The folder, copied to a private one if it lies on another file system, where a rename cannot reach."""
        if not folder.is_dir() or folder.is_symlink():
            raise BadRequest(f"There is no folder {folder.name!r} to keep.")
        if folder.stat().st_dev == self.root.stat().st_dev:
            return folder
        copy = self.private(f"copy-{uuid4().hex}") / "files"
        shutil.copytree(folder, copy, symlinks=True)
        return copy

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time puts things into place or takes them away; ends with the process, however it ends."""
        self.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _discard(self, folder: Path) -> None:
        """Take a folder out of sight at once; its files go with the next `_empty_trash`."""
        trash = self.root / ".trash"
        trash.mkdir(exist_ok=True)
        folder.rename(trash / uuid4().hex)

    def _empty_trash(self) -> None:
        trash = self.root / ".trash"
        for folder in trash.iterdir() if trash.is_dir() else ():
            shutil.rmtree(folder, ignore_errors=True)  # another process may be at it as well


def scan_folder(folder: Path, *, sync: bool = False) -> Scan:
    """Digest a folder: sha256 over its files in the order of their names, whatever the names of the folders above.

    Each file counts as length of its name (8 bytes, big-endian), name (UTF-8, parts joined by `/`), length, bytes. The
    manifest does not count. With `sync`, files and folders are on the disk afterwards. Raises BadRequest for an empty
    folder, a link or anything else than files and folders.
    """
    whole = hashlib.sha256()
    files: dict[str, tuple[int, str]] = {}
    for name, path in _files(folder):
        encoded = name.encode()
        size = path.stat().st_size
        whole.update(len(encoded).to_bytes(8, "big") + encoded + size.to_bytes(8, "big"))
        files[name] = (size, _digest_into(path, size, whole, sync=sync))
    if not files:
        raise BadRequest(f"The folder {folder.name!r} holds no file: there is nothing to keep.")
    if sync:
        for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            _sync_folder(inner)
    return Scan(whole.hexdigest(), files)


def _digest_into(path: Path, size: int, whole: hashlib._Hash, *, sync: bool) -> str:
    own = hashlib.sha256()
    read = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            own.update(chunk)
            whole.update(chunk)
            read += len(chunk)
        if sync:
            os.fsync(file.fileno())
    if read != size:
        raise BadRequest(f"{path.name} changed while it was read: {read} bytes, before that {size}. Nothing was kept.")
    return own.hexdigest()


def _files(folder: Path) -> list[tuple[str, Path]]:
    """Relative name and path of every file but the manifest, in the order of the names' bytes."""
    found = []
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        name = path.relative_to(folder).as_posix()
        if stat.S_ISREG(mode):
            if name != MANIFEST:
                found.append((name, path))
        elif not stat.S_ISDIR(mode):
            raise BadRequest(
                f"{name} is neither a file nor a folder (a link?): an artifact holds files and folders only."
            )
    return sorted(found, key=lambda pair: pair[0].encode())


def _write_manifest(folder: Path, found: Scan) -> None:
    with (folder / MANIFEST).open("w") as file:
        json.dump({"digest": found.digest, "files": found.files}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def _read_manifest(folder: Path) -> Scan:
    content = json.loads((folder / MANIFEST).read_text())
    return Scan(content["digest"], {name: (size, own) for name, (size, own) in content["files"].items()})


def _newest_change(folder: Path) -> float:
    """When anything in the folder was last written to; far in the future if it is vanishing right now."""
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:
        return float("inf")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
