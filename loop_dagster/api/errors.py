"""Failures that only the API has, one class each, as in loop_dagster/errors/."""

from __future__ import annotations

from typing import Any

from loop_dagster.errors import EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE, LoopError


class Unauthorized(LoopError):
    """A request without a key, or with one that is not known or was revoked; it never says which."""

    code = "UNAUTHORIZED"
    exit_code = EXIT_REFUSED

    def __init__(self) -> None:
        super().__init__(
            "A valid key is needed: send it as `X-API-Key: …` or `Authorization: Bearer …`. "
            "`loop keys create` makes one."
        )


class Forbidden(LoopError):
    """The key is good and may not do this, or not in this workspace."""

    code = "FORBIDDEN"
    exit_code = EXIT_REFUSED


class PayloadTooLarge(LoopError):
    """A request's body is longer than this address takes."""

    code = "PAYLOAD_TOO_LARGE"
    exit_code = EXIT_USAGE

    def __init__(self, most: int) -> None:
        super().__init__(
            f"The body is longer than the {most:,} bytes that this address takes. Nothing was stored.", most=most
        )


class NotBuilt(LoopError):
    """Something of the API that this version does not have yet (docs/coverage.md)."""

    code = "NOT_BUILT"
    exit_code = EXIT_REFUSED

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not built in this version; docs/coverage.md lists what is. Nothing was done.")


class CurveUnavailable(LoopError):
    """The curve of a training is stored and cannot be read just now."""

    code = "TRAINING_CURVE_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, attempt: str) -> None:
        super().__init__(f"The training curve of attempt {attempt} cannot be read just now. Try again in a moment.")


class ImportIncomplete(LoopError):
    """A part of an import could not be stored; the answer has every count all the same."""

    code = "IMPORT_INCOMPLETE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result["error"]["message"])
        self._result = result

    def as_dict(self) -> dict[str, Any]:
        return self._result
