"""Which conversations of a source are recorded (rules.md, Samples).

Belongs here: the share of a source, by a hash. Does not belong here: consent and switches (the API, the gateway).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from loop_dagster.rules import canonical

#: What the hash of a conversation is out of.
_WHOLE = 2**64


def opening(messages: Sequence[canonical.Message]) -> str:
    """What every turn of a conversation begins with: all canonical messages up to the user's first."""
    first = next((at for at, turn in enumerate(messages) if turn["role"] == "user"), len(messages))
    return canonical.dumps(list(messages[: first + 1]))


def is_kept(source: str, conversation: str, sample_rate: float) -> bool:
    """Whether a conversation falls into the share that a source records: the same answer for every turn of it."""
    digest = hashlib.blake2b(f"{source}\0{conversation}".encode(), digest_size=8, person=b"loop share").digest()
    return int.from_bytes(digest, "little") < sample_rate * _WHOLE
