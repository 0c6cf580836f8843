"""Every failure that a person or a script can meet, one class each.

Belongs here: classes built from data whose message says what went wrong, where, what was needed, what was found
and what to do next. Does not belong here: control flow, logging, anything that formats a secret or a sample's text.

`code` is stable and is what scripts branch on; `exit_code` is what the command line returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_NOT_FOUND = 4
EXIT_UNAVAILABLE = 5


class LoopError(Exception):
    """Base of all errors of this project. `details` ride along in JSON answers."""

    code: ClassVar[str] = "INTERNAL_ERROR"
    exit_code: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def as_dict(self) -> dict[str, Any]:
        """The error envelope of http-api.md: `{"error": {"code", "message"}, ...details}`."""
        return {"error": {"code": self.code, "message": self.message}, **self.details}


class BadRequest(LoopError):
    """A value that no state of the installation could accept."""

    code = "BAD_REQUEST"
    exit_code = EXIT_USAGE


class NotFound(LoopError):
    """Something named does not exist in this workspace."""

    code = "NOT_FOUND"
    exit_code = EXIT_NOT_FOUND

    def __init__(self, kind: str, name: str, near: list[str] | None = None) -> None:
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        super().__init__(f"No {kind} called {name!r} in this workspace.{hint}", kind=kind, name=name)


class Conflict(LoopError):
    """The request is fine and the present state forbids it."""

    code = "CONFLICT"
    exit_code = EXIT_REFUSED


class MoveNotAllowed(Conflict):
    """An attempt cannot go from its state to another one (rules/states.py)."""

    def __init__(self, old: str, new: str, allowed: Sequence[str]) -> None:
        way = f"only {', '.join(allowed)} may follow" if allowed else "it has ended and nothing follows"
        super().__init__(
            f"An attempt in state {old} cannot become {new}: {way}. Read its state again before moving it.",
            state=old,
            wanted=new,
            allowed=list(allowed),
        )


class Refused(LoopError):
    """A rule of the loop says no; the subclass or `code` says which one (rules.md)."""

    exit_code = EXIT_REFUSED

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.code = code  # type: ignore[misc]  # one class, the rule's own code per instance


class TrainingSettingOutOfRange(LoopError):
    """A training setting outside its range (rules.md, How it trains)."""

    code = "TRAINING_SETTING_OUT_OF_RANGE"
    exit_code = EXIT_USAGE

    def __init__(self, field: str, allowed: str, got: object) -> None:
        super().__init__(
            f"training.{field} must be {allowed}, got {got!r}. Nothing was saved; leave it out for the automatic value.",
            field=field,
            allowed=allowed,
        )


class RevisionMismatch(Conflict):
    """An edit was based on an older revision of the pipeline."""

    code = "REVISION_MISMATCH"

    def __init__(self, pipeline: str, expected: int, found: int) -> None:
        super().__init__(
            f"Pipeline {pipeline} is at revision {found}, the edit expected {expected}. Nothing was saved: "
            "read the pipeline again and resend the edit.",
            expected=expected,
            found=found,
        )


class LeaseLost(LoopError):
    """Another process took the lease, or it was revoked: this one must stop writing at once."""

    code = "LEASE_LOST"

    def __init__(self, name: str, why: Literal["taken", "expired", "revoked"]) -> None:
        super().__init__(
            f"The lease {name!r} was {why}: this process stops and writes nothing more.", lease=name, why=why
        )


class LeaseBusy(LoopError):
    """Somebody else holds the lease and it has not expired."""

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
            "Restore that folder from a backup, or remove the newest commit under its _delta_log if it is torn.",
            table=table,
            path=path,
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

    code = "LAKE_CONFLICT"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, table: str, action: str, tries: int) -> None:
        super().__init__(
            f"{action} on the lake's table {table!r} met another writer {tries} times and was given up; nothing was "
            "written. Writers that touch the same rows hold the lake's lease: run it again.",
            table=table,
            tries=tries,
        )


class JudgeUnreadable(LoopError):
    """The judge answered in a form that holds no rating or preference; it is asked once more (rules.md, How it is tested)."""

    code = "JUDGE_UNREADABLE"

    def __init__(self, judge: str, asked: Literal["ratings", "preference"], found: str) -> None:
        super().__init__(
            f"The judge {judge} was asked for a {'rating per dimension' if asked == 'ratings' else 'preference'} and {found}. "
            "It is asked once more; then the sample counts as failed.",
            judge=judge,
            asked=asked,
        )


class JudgeRejected(LoopError):
    """The judge's server takes no such request (mostly: too long for it); this one sample cannot be judged."""

    code = "JUDGE_REJECTED"

    def __init__(self, judge: str, where: str, status: int) -> None:
        super().__init__(
            f"The judge {judge} at {where} rejected a request with status {status}; the sample counts as failed. "
            "If all are rejected, check LOOP_JUDGE_MODEL and whether its context is long enough for two answers.",
            judge=judge,
            status=status,
        )


class JudgeUnavailable(LoopError):
    """The judge could not be reached, or answered with server errors until the retries were used up."""

    code = "JUDGE_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, judge: str, where: str, found: str, tries: int) -> None:
        super().__init__(
            f"The judge {judge} at {where} gave no answer after {tries} tries (last: {found}). "
            "Check that the server runs and that LOOP_JUDGE_URL leads to it.",
            judge=judge,
        )


class JudgeRefused(LoopError):
    """The judge's key was refused or its model is gone: no further call can succeed, the comparison ends at once."""

    code = "JUDGE_REFUSED"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, judge: str, where: str, status: int, reason: Literal["key", "model", "credit"]) -> None:
        what = {
            "key": "refused the key (LOOP_JUDGE_API_KEY)",
            "model": "does not know the model or the address (LOOP_JUDGE_MODEL, LOOP_JUDGE_URL)",
            "credit": "has no credit left for the key",
        }[reason]
        super().__init__(
            f"The judge {judge} at {where} answered {status}: it {what}. Nothing more is asked; set it right and test again.",
            judge=judge,
            status=status,
            reason=reason,
        )
