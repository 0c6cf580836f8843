"""Feedback and tags that people give, as rows on their way to the inbox: redacted, keyed, checked.

Belongs here: one row of FEEDBACK or LABELS from what a person said. Does not belong here: storing it (inbox.py), who
may say what (cli/, api/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from uuid_utils import uuid7

from loop_dagster.errors import BadRequest
from loop_dagster.rules import canonical, tags
from loop_dagster.rules.redaction import redact, redact_message


def feedback_row(sample_id: str, verdict: str, answer: str | None, reason: str | None, now: datetime) -> dict[str, Any]:
    """What a person here said of a sample: the stored verdict, and for edited and gold the right answer as text."""
    right = None
    if answer is not None:
        message, _kinds = redact_message(canonical.answer({"role": "assistant", "content": answer}))
        right = canonical.dumps(message)
    return {
        "feedback_id": str(uuid7()),
        "sample_id": sample_id,
        "verdict": verdict,
        "origin": "here",
        "right_answer": right,
        "right_key": canonical.key(right) if right else None,
        "right_bytes": len(right.encode()) if right else None,
        "score": None,
        "reason": redact(reason)[0] if reason else None,
        "created_at": now,
    }


def carried(rows: Iterable[Mapping[str, Any]]) -> dict[tags.Name, Mapping[str, Any]]:
    """What a sample carries now, by name, from its rows of LABELS, the oldest first."""
    newest = {(row["label"], row["value"] is not None): row for row in rows}
    return {name: row for name, row in newest.items() if not row["removed"]}


def label_rows(
    sample_id: str,
    *,
    now: datetime,
    labels: Sequence[object] = (),
    attributes: Mapping[str, object] | None = None,
    parent: str | None = None,
    already: Mapping[tags.Name, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Rows that put tags and attributes on a sample which carries `already`; none for what it carries as it is.

    `parent` null keeps a tag's parent, `""` takes it out. Raises BadTag or TooManyTags; BadRequest for a parent without
    any tag.
    """
    have = already or {}
    clean = tags.labels(labels, attributes, already=have)
    group = tags.parent(parent)
    if group is not None and not clean.tags:
        raise BadRequest("parent groups tags, and labels names none. Nothing was stored.", field="parent")
    wanted: list[tuple[str, str | None, str | None]] = [
        (tag, None, _parent(have.get((tag, False)), group)) for tag in clean.tags
    ]
    wanted += [(key, _redacted(value), None) for key, value in clean.attributes]
    return [
        _label_row(sample_id, label, value, above, removed=False, now=now)
        for label, value, above in wanted
        if (old := have.get((label, value is not None))) is None or (old["value"], old["parent"]) != (value, above)
    ]


def removal_row(sample_id: str, name: tags.Name, now: datetime) -> dict[str, Any]:
    """A row that takes a tag or an attribute off a sample."""
    label, is_attribute = name
    return _label_row(sample_id, label, "" if is_attribute else None, None, removed=True, now=now)


def _parent(old: Mapping[str, Any] | None, group: str | None) -> str | None:
    if group is None:
        return old["parent"] if old is not None else None
    return group or None


def _redacted(value: str) -> str:
    return redact(value)[0]


def _label_row(
    sample_id: str, label: str, value: str | None, parent: str | None, *, removed: bool, now: datetime
) -> dict[str, Any]:
    return {
        "label_id": str(uuid7()),
        "sample_id": sample_id,
        "label": label,
        "value": value,
        "parent": parent,
        "removed": removed,
        "created_at": now,
    }
