"""The partition `attempts` and the key of one attempt.

Belongs here: the dynamic partitions definition and the only place that reads or writes its keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dagster import DynamicPartitionsDefinition

from loop_dagster.errors import BadRequest

ATTEMPTS = DynamicPartitionsDefinition(name="attempts")

_KEY = re.compile(r"^(?P<pipeline>[a-z0-9][a-z0-9._-]*-[0-9a-f]{4})/(?P<number>[0-9]{4,})$")


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """Partition key of one attempt: the immutable pipeline id and the attempt's number, `support-replies-3f2a/0007`."""

    pipeline_id: str
    attempt_no: int

    def __str__(self) -> str:
        return f"{self.pipeline_id}/{self.attempt_no:04d}"

    @classmethod
    def parse(cls, text: str) -> AttemptKey:
        """The key that `text` spells; BadRequest when it spells none."""
        found = _KEY.match(text)
        if found is None:
            raise BadRequest(
                f"{text!r} is no attempt: needed `<pipeline id>/<number>`, as in support-replies-3f2a/0007."
            )
        return cls(found["pipeline"], int(found["number"]))
