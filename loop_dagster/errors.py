"""Every failure that a person or a script can meet, one class each.

Belongs here: classes built from data whose message says what went wrong, where, what was needed, what was found
and what to do next. Does not belong here: control flow, logging, anything that formats a secret or a sample's text.

`code` is stable and is what scripts branch on; `exit_code` is what the command line returns.
"""

from __future__ import annotations

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
        super().__init__(f"The lease {name!r} was {why}: this process stops and writes nothing more.", lease=name, why=why)


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
