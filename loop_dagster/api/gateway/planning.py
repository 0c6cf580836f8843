"""Whether a call is recorded, and as what: looked up in a thread while the upstream already answers.

Belongs here: consent (rules.md, Samples), tags, the share of a source, the sample's id. Does not belong here: waiting
for it (gateway.py), storing (recorder.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from loop_dagster.api.gateway.asked import Asked, BadMessageError, UnreadableJsonError, read_asked
from loop_dagster.api.gateway.calls import Call
from loop_dagster.rules import canonical
from loop_dagster.rules.recording import is_kept, opening
from loop_dagster.rules.tags import MAX_ON_SAMPLE, BadTag, tag
from loop_dagster.store.capturing import Reason
from loop_dagster.store.sources import Source

#: Bytes of a body that a sample is made of: beyond a million tokens of text, so what is larger holds pictures or files.
MOST_ASKED: Final = 8_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a call: recorded under `sample_id` with `labels` when it has one.

    `unknown` are its tags that no pipeline has. `refused`: it would be recorded if a sample could hold what was asked.
    """

    source: Source
    at: datetime
    identity: str = ""
    sample_id: str | None = None
    labels: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    asked: Asked | None = field(default=None, repr=False)
    refused: Reason | None = None
    conversation: str | None = None

    @property
    def counted(self) -> tuple[str, ...]:
        """The tags under which a miss of the whole call counts; "" where it has none."""
        return self.labels or ("",)


def plan(call: Call) -> Plan:
    """Look everything up. Raises RegistryUnavailable and its kin."""
    store, now = call.store, datetime.now(UTC)
    fit, unfit = _sorted(call.tags)
    asked_before = None
    if call.request_id is not None:
        asked_before = canonical.identity("request", call.model, call.request_id)
    look = store.capturing.look(call.model, fit, asked_before, now)
    source = look.source
    known = [word for word in fit if word in look.known]
    unknown = (*(word for word in fit if word not in look.known), *unfit)
    if not (known or source.enabled):
        return Plan(source, now, unknown=unknown)
    labels = tuple(dict.fromkeys([*known, *(source.tags if source.enabled else ())]))[:MAX_ON_SAMPLE]
    if len(call.raw) > MOST_ASKED:
        return Plan(source, now, labels=labels, unknown=unknown, refused="too_large")
    try:
        asked = read_asked(call.raw, call.shape)
    except (BadMessageError, UnreadableJsonError):
        return Plan(source, now, labels=labels, unknown=unknown, refused="incomplete")
    conversation = call.conversation or opening(asked.messages)
    if not known and not is_kept(source.name, conversation, source.sample_rate):
        return Plan(source, now, unknown=unknown)
    sample_id = look.first_id or store.capturing.new_id(now)
    identity = asked_before or canonical.identity("request", source.name, "", sample_id)
    return Plan(source, now, identity, sample_id, labels, unknown, asked, conversation=call.conversation)


def _sorted(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Words that can be tags, and one "" for all that cannot: what they hold is nobody's to read in a list."""
    fit: list[str] = []
    unfit: tuple[str, ...] = ()
    for word in words:
        try:
            fit.append(tag(word))
        except BadTag:
            unfit = ("",)
    return fit, unfit
