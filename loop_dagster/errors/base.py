"""What every error of the project is: a code, a sentence and an exit status, and the five that say it plainly."""

from __future__ import annotations

from typing import Any, ClassVar

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
    #: Whether the same thing done again may well succeed: then a step of an attempt is tried again, not failed.
    passes: ClassVar[bool] = False

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
