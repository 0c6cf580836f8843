"""LOOP_HOME and the other places of an installation: there, writable, with space, on a fit file system, private.

Belongs here: folders, disks and rights. Does not belong here: what the files hold.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loop_dagster.doctor.findings import Finding, fine, mistake, warning
from loop_dagster.doctor.installation import Installation
from loop_dagster.settings import Settings

#: Free space under which an installation is one training away from a full disk, and twice that where it is near.
LOW_DISK_BYTES: Final = 3_000_000_000
#: What a temporary folder, or a disk that holds the registry alone, needs.
LOW_SIDE_DISK_BYTES: Final = 200_000_000
LOW_INODES: Final = 2_000
#: File systems of other machines, on which SQLite's locks and its shared memory do not work.
NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "fuse.sshfs"}
    | {"fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "drvfs"}
)


def home(installation: Installation) -> Iterator[Finding]:
    """The home, and every place outside of it that is written to."""
    settings = installation.known
    root = installation.root
    if root.exists() and not root.is_dir():
        yield mistake(
            "home_no_folder",
            "LOOP_HOME",
            where=str(root),
            found="it is a file",
            mend="`export LOOP_HOME=/path/to/a/folder`, or move that file away.",
        )
        return
    refused = [problem for place in _written(settings) if (problem := not_writable(place)) is not None]
    yield from refused
    if not installation.is_there:
        given = "LOOP_HOME" if os.environ.get("LOOP_HOME") else "LOOP_HOME is not set; the default is ./.loop"
        yield warning(
            "no_installation",
            "LOOP_HOME",
            where=str(root),
            found="there is no installation here yet",
            mend=f"If you have one elsewhere, `export LOOP_HOME=/its/folder` ({given}). If not, `loop init` makes one.",
        )
    elif not refused:
        yield fine("home", "LOOP_HOME", where=str(root), found="it can be written to")


def disk(installation: Installation) -> Iterator[Finding]:
    """Free bytes and files, once for each disk that the installation writes to."""
    settings = installation.known
    seen: set[int] = set()
    main = [settings.root, *([Path(settings.lake)] if "://" not in settings.lake else []), settings.artifacts]
    side = [*([path.parent] if (path := installation.registry.path) else []), Path(tempfile.gettempdir())]
    for place, least in [*((one, LOW_DISK_BYTES) for one in main), *((one, LOW_SIDE_DISK_BYTES) for one in side)]:
        standing = nearest_folder(place)
        device = standing.stat().st_dev
        if device not in seen:
            seen.add(device)
            yield space(standing, least)


def space(folder: Path, least: int) -> Finding:
    """What one disk has left."""
    free = shutil.disk_usage(folder).free
    state = os.statvfs(folder)
    if state.f_files and state.f_favail < LOW_INODES:
        return mistake(
            "disk_files",
            "disk",
            where=str(folder),
            found=f"its disk can hold {state.f_favail:,} more files, needed {LOW_INODES:,}",
            mend=f"`du --inodes -d 2 {folder} | sort -n | tail` shows where they are; remove what nothing needs.",
        )
    if free >= 2 * least:
        return fine("disk", "disk", where=str(folder), found=f"{free / 1e9:.1f} GB free")
    make = warning if free >= least else mistake
    return make(
        "disk_low",
        "disk",
        where=str(folder),
        found=f"{free / 1e9:.2f} GB free, needed {least / 1e9:.1f} GB",
        mend=f"`du -xh -d 1 {folder} | sort -h | tail` shows what takes it. Free space, or move the folder to a bigger "
        "disk and `export LOOP_HOME=` with its new place; a training alone writes up to 3 GB.",
    )


def file_system(installation: Installation) -> Iterator[Finding]:
    """SQLite on a file system of another machine loses locks, and with them samples."""
    path = installation.registry.path
    if path is None:
        return
    mount = mount_of(path, mounts())
    kind = mount.kind if mount is not None else None
    if kind in NETWORK:
        yield mistake(
            "network_file_system",
            "file system",
            where=str(path),
            found=f"the registry lies on {kind}, where SQLite's locks do not hold",
            mend="Move LOOP_HOME to a disk of this machine, or `export LOOP_REGISTRY_URL=postgresql://…` "
            "(the lake may stay where it is: LOOP_LAKE_URL).",
        )
    else:
        yield fine("file_system", "file system", where=str(path), found=f"{kind or 'unknown kind'}, of this machine")


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a file system is mounted, and of which kind it is; Windows' own disks under WSL count as `drvfs`."""

    point: Path
    kind: str


def mount_of(path: Path, text: str) -> Mount | None:
    """The mount that holds a path, from the text of /proc/mounts; None when none is listed."""
    best: Mount | None = None
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        point = Path(fields[1].replace("\\040", " "))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= len(best.point.parts)):
            best = Mount(point, "drvfs" if "drvfs" in fields[3] else fields[2])
    return best


def mounts() -> str:
    """What is mounted; empty where the system does not say."""
    file = Path("/proc/mounts")
    return file.read_text("utf-8", errors="replace") if file.exists() else ""


def rights(installation: Installation) -> Iterator[Finding]:
    """Files with keys or texts that other users of the machine could read."""
    settings = installation.known
    held = [installation.root / "settings.yaml", *([path] if (path := installation.registry.path) else [])]
    for path in held:
        if path.is_file() and path.stat().st_mode & 0o077 and _says_something_secret(path, settings):
            yield warning(
                "readable_by_others",
                "secrets in files",
                where=str(path),
                found=f"mode {path.stat().st_mode & 0o777:o}: other users of this machine can read it",
                mend=f"`chmod 600 {path}`",
            )


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    path = path.expanduser().absolute()
    while not path.is_dir():
        path = path.parent
    return path


def not_writable(place: Path) -> Finding | None:
    """Why nothing can be written to a place; None when something can. Asks the system, and writes nothing."""
    standing = place if place.is_file() else nearest_folder(place)
    needed = os.W_OK if standing.is_file() else os.W_OK | os.X_OK
    if os.access(standing, needed):
        return None
    if os.statvfs(standing).f_flag & os.ST_RDONLY:
        found = "its file system is mounted read-only"
        mount = mount_of(standing, mounts())
        point = mount.point if mount is not None else standing
        mend = f"`mount -o remount,rw {point}`, after `dmesg | tail` has told why it became read-only."
    else:
        found = "this user may not write there"
        mend = f"`chown -R $(id -un) {standing}` (if that changes nothing: `lsattr -d {standing}`, `chattr -i`)."
    return mistake("not_writable", "LOOP_HOME", where=str(standing), found=found, mend=mend)


def _written(settings: Settings) -> list[Path]:
    """The places that are written to: the home first, others only where they are not simply a part of it."""
    root = settings.root
    inner = [settings.artifacts, settings.work, settings.models_dir, settings.dagster_home, root / "logs", root / "run"]
    places = [*inner, settings.intake]
    if "://" not in settings.lake:
        lake = Path(settings.lake).expanduser().absolute()
        places += [lake, lake / settings.workspace]
    if settings.registry.startswith("sqlite:///"):
        places.append(Path(settings.registry.removeprefix("sqlite:///")).absolute())
    if not_writable(root) is not None:
        places = [place for place in places if not place.is_relative_to(root)]
    standing: dict[Path, None] = {root: None}
    for place in places:
        standing.setdefault(place if place.is_file() else nearest_folder(place))
    return list(standing)


def _says_something_secret(path: Path, settings: Settings) -> bool:
    if path.name != "settings.yaml":
        return True  # the registry holds the texts of the inbox
    text = path.read_text("utf-8", errors="replace")
    return "api_key" in text or "@" in text or "dagster_postgres_url" in text
