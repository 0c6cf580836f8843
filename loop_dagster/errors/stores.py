"""Leases, lake, registry, artifacts and disk: where something is kept that cannot be read or written."""

from __future__ import annotations

from typing import Literal

from loop_dagster.errors.base import EXIT_REFUSED, EXIT_UNAVAILABLE, LoopError


class LeaseLost(LoopError):
    """Another process took the lease, or it was revoked: this one must stop writing at once."""

    code = "LEASE_LOST"

    def __init__(self, name: str, why: Literal["taken", "expired", "revoked"]) -> None:
        super().__init__(
            f"The lease {name!r} was {why}: this process stops and writes nothing more.", lease=name, why=why
        )


class LeaseBusy(LoopError):
    """Somebody else holds the lease and it has not expired."""

    passes = True
    code = "LEASE_BUSY"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, name: str, holder: str, seconds_left: float) -> None:
        super().__init__(
            f"The lease {name!r} is held by {holder} for at most {seconds_left:.0f} s more. "
            "Wait for it; if that process is gone, the lease ends by itself.",
            lease=name,
            holder=holder,
        )


class LakeUnreadable(LoopError):
    """A Delta table is there and its log cannot be read; never answered as an empty table."""

    code = "LAKE_UNREADABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, table: str, path: str, why: str) -> None:
        super().__init__(
            f"The lake's table {table!r} at {path!r} (relative to the lake) cannot be read: {why} Nothing was written. "
            "`loop doctor` names the damaged file and the command that mends it.",
            table=table,
            path=path,
        )


class LakeNotWritable(LoopError):
    """A commit to a Delta table failed for another reason than a racing writer: a full disk, a refused request."""

    code = "LAKE_NOT_WRITABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, table: str, path: str, action: str, why: str) -> None:
        super().__init__(
            f"{action} on the lake's table {table!r} at {path!r} (relative to the lake) failed: {why} Nothing was "
            "committed. See to the space and the rights of the lake's place, then run it again.",
            table=table,
            path=path,
        )


class LakeOfAnother(LoopError):
    """The lake belongs to another registry; nothing of ours may be written to it."""

    code = "LAKE_OF_ANOTHER"
    exit_code = EXIT_REFUSED

    def __init__(self, lake: str, owner: str, mine: str, mark: str) -> None:
        super().__init__(
            f"The lake {lake} is written by {owner}, and this is {mine}. Nothing was written: two registries on one "
            "lake would take each other's samples for theirs. Give this installation a lake of its own "
            "(LOOP_LAKE_URL, or another LOOP_WORKSPACE), or name that registry with LOOP_REGISTRY_URL. If the other "
            f"one is gone for good, delete {mark} and run this again.",
            owner=owner,
            lake=lake,
        )


class LakeSchemaMismatch(LoopError):
    """A frame, or a stored table, does not have the columns that its declaration asks for."""

    code = "LAKE_SCHEMA_MISMATCH"

    def __init__(self, table: str, problems: list[str]) -> None:
        super().__init__(
            f"Not the columns of table {table!r}: {'; '.join(problems)}. Nothing was written. "
            f"loop_dagster/tables declares what is needed.",
            table=table,
            problems=problems,
        )


class LakeConflict(LoopError):
    """Another writer changed the same rows each time that this one tried to commit."""

    passes = True
    code = "LAKE_CONFLICT"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, table: str, action: str, tries: int) -> None:
        super().__init__(
            f"{action} on the lake's table {table!r} met another writer {tries} times and was given up; nothing was "
            "written. Writers that touch the same rows hold the lake's lease: run it again.",
            table=table,
            tries=tries,
        )


class RegistryUnavailable(LoopError):
    """The registry's database does not answer. `where` is its URL without any password."""

    passes = True
    code = "REGISTRY_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, where: str, found: str) -> None:
        super().__init__(
            f"The registry at {where} does not answer: {found}. Check that the server runs or the folder can be "
            "written, and that LOOP_REGISTRY_URL names it; then try again, nothing half-written was kept.",
            registry=where,
        )


class RegistryNotWritable(RegistryUnavailable):
    """The registry's database answers and cannot write: a full disk, a folder that may only be read."""

    code = "REGISTRY_NOT_WRITABLE"

    def __init__(self, where: str, found: str) -> None:
        LoopError.__init__(
            self,
            f"The registry at {where} cannot be written to: {found}. What was acknowledged before is kept, and nothing "
            "of this. Free space on its disk (`df -h`), or give its folder the right to write, then run it again.",
            registry=where,
        )


class RegistryDamaged(RegistryUnavailable):
    """The registry's file is not a whole database any more."""

    code = "REGISTRY_DAMAGED"

    def __init__(self, where: str, found: str) -> None:
        LoopError.__init__(
            self,
            f"The registry at {where} is damaged: {found}. Nothing was changed. End every process of the installation, "
            "then put back a copy of the file, or save what can be read with `sqlite3 registry.db .recover`.",
            registry=where,
        )


class RegistryNotReady(LoopError):
    """The registry's tables are missing or older than this program."""

    code = "REGISTRY_NOT_READY"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, where: str, found: str, needed: str) -> None:
        super().__init__(
            f"The registry at {where} is {found}, and this version needs revision {needed}. Run `loop init`: it "
            "creates or upgrades the tables and keeps what is there.",
            registry=where,
            needed=needed,
        )


class RegistryTooNew(LoopError):
    """A newer version of this program has upgraded the registry."""

    code = "REGISTRY_TOO_NEW"
    exit_code = EXIT_REFUSED

    def __init__(self, where: str, found: str, known: str) -> None:
        super().__init__(
            f"The registry at {where} is at revision {found}, and this version knows revisions up to {known} only. "
            "Nothing was changed: install the version that upgraded it, or restore a copy from before.",
            registry=where,
            found=found,
            known=known,
        )


class DiskFull(LoopError):
    """Too little free space for what is about to be written."""

    code = "DISK_FULL"

    def __init__(self, where: str, free_bytes: int, needed_bytes: int) -> None:
        super().__init__(
            f"The disk under {where} has {free_bytes / 1e9:.1f} GB free, needed {needed_bytes / 1e9:.1f} GB. "
            "Free some space, or put LOOP_HOME on another disk; nothing was written.",
            free_bytes=free_bytes,
            needed_bytes=needed_bytes,
        )


class ArtifactTorn(LoopError):
    """Kept weights are not what they were when they were kept."""

    code = "ARTIFACT_TORN"

    def __init__(self, digest: str, where: str, found: str) -> None:
        super().__init__(
            f"The artifact {digest} at {where} is damaged: {found}. It is not used. Restore the folder, or "
            "delete it and train again.",
            artifact=digest,
        )
