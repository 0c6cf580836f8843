"""`feedback`: append-only verdicts on samples; the newest from a person decides (rules/feedback.py)."""

from __future__ import annotations

from loop_dagster.tables.base import Column, Table

#: Stored words, in the order of rules.md.
VERDICTS = ("accepted", "rejected", "edited", "gold", "scored")

FEEDBACK = Table(
    "feedback",
    "verdicts on samples, append-only",
    (
        Column("feedback_id", "id", "UUIDv7, so that newer ones sort later"),
        Column("sample_id", "id", "sample that it is about"),
        Column("verdict", "word", "stored word", words=VERDICTS),
        Column(
            "origin",
            "word",
            "given here by a person, brought by an import, or by the judge",
            words=("here", "import", "judge"),
        ),
        Column(
            "right_answer", "text", "JSON of the assistant message that is right (edited and gold only)", nullable=True
        ),
        Column("right_key", "key", "hash of `right_answer`, exact", nullable=True),
        Column("right_bytes", "int", "UTF-8 bytes of `right_answer`", nullable=True),
        Column("score", "float", "the judge's score, 0 to 1 (scored only)", nullable=True),
        Column("reason", "text", "what the person wrote with it", nullable=True),
        Column("created_at", "time", "when it was given"),
    ),
    key=("feedback_id",),
)
