"""`labels`: append-only changes of the tags and attributes of samples; the newest of each counts.

A tag and an attribute of the same name are two things: what has a `value` is about the attribute.
"""

from __future__ import annotations

from loop_dagster.tables.base import Column, Table

LABELS = Table(
    "labels",
    "tags and attributes of samples, append-only",
    (
        Column("label_id", "id", "UUIDv7, so that newer ones sort later"),
        Column("sample_id", "id", "sample that carries it"),
        Column("label", "word", "the tag, or the key of an attribute"),
        Column("value", "text", "value of an attribute, '' where that is taken off; null for a tag", nullable=True),
        Column("parent", "word", "parent tag, null for none", nullable=True),
        Column("removed", "bool", "true takes the tag or the attribute off the sample"),
        Column("created_at", "time", "when it was put on or taken off"),
    ),
    key=("label_id",),
)
