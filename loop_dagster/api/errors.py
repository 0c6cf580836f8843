"""Failures that only the API has, one class each, as in loop_dagster/errors/."""

from __future__ import annotations

from typing import Any

from loop_dagster.errors import EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE, Conflict, LoopError, NotFound


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


class UnknownModel(NotFound):
    """No upstream of the settings answers for this model."""

    def __init__(self, model: str) -> None:
        super().__init__("model", model)
        self.message = (
            f"No upstream answers for the model {model!r}. GET /v1/models lists what can be asked; `upstreams` in "
            "settings.yaml names more (docs/gateway.md)."
        )


class UpstreamUnavailable(LoopError):
    """The server that answers for a model cannot be reached, or broke off before it answered."""

    code = "UPSTREAM_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name[:1].upper()}{name[1:]} does not answer ({why}). Nothing was recorded; try again.")


class UpstreamTimedOut(LoopError):
    """The server that answers for a model took longer than the settings allow."""

    code = "UPSTREAM_TIMED_OUT"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name[:1].upper()}{name[1:]} was silent for longer than LOOP_GATEWAY_TIMEOUT_S allows. Nothing was "
            "recorded."
        )


class SampleNotYetRecorded(Conflict):
    """Feedback on a sample that the gateway has given the id of and has not stored yet."""

    code = "SAMPLE_NOT_YET_RECORDED"
    passes = True

    def __init__(self, sample_id: str) -> None:
        super().__init__(
            f"Sample {sample_id} is on its way and not recorded yet. Nothing was stored: send the same again in a "
            "moment.",
            sample_id=sample_id,
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
