"""`samples`: one row per conversation; `messages`, `answer` and `tools` are canonical JSON after redaction."""

from __future__ import annotations

from loop_dagster.tables.base import Column, Table

SAMPLES = Table(
    "samples",
    "conversations as recorded or imported, one row each, never edited",
    (
        Column("sample_id", "id", "UUIDv7"),
        Column("source", "word", "what the sample comes from; recording is switched on per source"),
        Column("origin", "word", "how it came in", words=("captured", "imported")),
        Column(
            "identity", "id", "hash of (source, request_id), (source, row id) or (source, import id, position, text)"
        ),
        Column("import_id", "word", "import that brought it", nullable=True),
        Column("position", "int", "row of the import, from 0", nullable=True),
        Column("conversation_id", "word", "the app's own id of the conversation", nullable=True),
        Column("model", "word", "model that gave the answer", nullable=True),
        Column("messages", "text", "the prompt: JSON array of every message before the answer"),
        Column(
            "answer", "text", "the answer: JSON of one assistant message; null while it waits for one", nullable=True
        ),
        Column("tools", "text", "JSON array of the tools on offer", nullable=True),
        Column("text_key", "key", "hash of `messages` and `tools`, exact"),
        Column("prompt_key", "key", "hash of the normalised prompt: case, white space and punctuation folded"),
        Column("answer_key", "key", "hash of `answer`, exact", nullable=True),
        Column(
            "bytes",
            "int",
            "UTF-8 bytes of messages, answer and tools: at least the tokens that a byte-level tokenizer makes of them",
        ),
        Column("flag", "word", "what is odd about the conversation, a code of rules/shapes.py", nullable=True),
        Column("created_at", "time", "when it was recorded"),
        Column("expires_at", "time", "when it leaves every selection"),
    ),
    key=("sample_id",),
)
