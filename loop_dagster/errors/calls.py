"""Two writers at once: somebody else changed it, or sends the same call."""

from __future__ import annotations

from loop_dagster.errors.base import Conflict


class RevisionMismatch(Conflict):
    """An edit was based on an older revision of the pipeline or dataset."""

    code = "REVISION_MISMATCH"

    def __init__(self, name: str, expected: int, found: int, *, kind: str = "Pipeline") -> None:
        super().__init__(
            f"{kind} {name} is at revision {found}, the edit expected {expected}. Nothing was saved: "
            f"read the {kind.lower()} again and resend the edit.",
            expected=expected,
            found=found,
        )


class LabelsMoved(Conflict):
    """Somebody else put a tag or an attribute on the sample between the look at its labels and the write."""

    passes = True

    def __init__(self, sample_id: str) -> None:
        super().__init__(f"The labels of sample {sample_id} changed meanwhile. Nothing was stored; send it again.")


class CallUnderWay(Conflict):
    """The first call with this Idempotency-Key is not answered yet."""

    passes = True

    def __init__(self) -> None:
        super().__init__("The first call with this Idempotency-Key is still under way. Send it again in a moment.")
