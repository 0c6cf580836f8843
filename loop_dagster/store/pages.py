"""A page of rows on its way into the lake: decoded, parsed, redacted, with every key computed, as columns.

Belongs here: everything about a page that needs no store, and the same for one conversation that the gateway recorded.
Does not belong here: files (rowfiles.py), identity matching and commits (importing.py). Nothing unredacted leaves.

Rows are decoded and parsed one by one, since a number must keep its spelling and a bad row must not take the rest with
it; everything that can run over columns does. The redactor runs only on the rows that the columnar prefilter names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from operator import is_
from typing import Any, Final, NamedTuple

import orjson
import polars as pl
import uuid_utils

from loop_dagster.rules import canonical
from loop_dagster.rules.canonical import Json, Message, UnreadableJsonError, dump_bytes
from loop_dagster.rules.redaction import Counts, Kind, redact_message, redact_value, suspect_expression, suspects
from loop_dagster.rules.retention import imported_until
from loop_dagster.rules.shapes import Flag, Parsed, Refusal, Shape, parse, parse_plain
from loop_dagster.tables import FEEDBACK, SAMPLES

TOO_LARGE: Final = Refusal("row_too_large", "The row is longer than a row may be.")


class Input(NamedTuple):
    """One row as it was given. `line` counts from 1 for people; `value` is its bytes, None for a row too long, or
    an object (then `decoded`); `row_id` its own id where the caller gave one."""

    position: int
    line: int
    value: Any
    decoded: bool = False
    row_id: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What all rows of one import share."""

    source: str
    import_id: str
    now: datetime
    model: str | None = None
    default_feedback: str | None = None


@dataclass(slots=True)
class _Columns:
    """Lists that grow together, one entry per row that becomes a sample."""

    lines: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    parsed: list[Parsed] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    answers: list[bytes | None] = field(default_factory=list)
    tools: list[bytes | None] = field(default_factory=list)
    rights: list[bytes | None] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Page:
    """Rows that become samples, in the order given, and the refusals of the others.

    `samples` has the columns of SAMPLES. `verdicts` has one row per sample: `sample_id`, `verdict` (null where the row
    brings none), `right_answer`, `right_key`, `right_bytes`. `redactions` maps a row's index to its counts.
    """

    samples: pl.DataFrame
    verdicts: pl.DataFrame
    lines: list[int]
    shapes: list[Shape]
    flags: list[tuple[int, Flag]]
    refusals: list[tuple[int, Refusal]]
    redactions: Mapping[int, Counts]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A page half way: decoded and parsed, the part that Python does row by row. Not redacted: never kept or shown."""

    columns: _Columns
    refusals: list[tuple[int, Refusal]]

    def __repr__(self) -> str:
        return f"Decoded({len(self.columns.lines)} rows)"


def decode_page(inputs: Iterable[Input], options: Options) -> Decoded:
    """Decode and parse a page of rows. Never raises for what a row holds."""
    columns, refusals = _Columns(), []
    identify = canonical.positions(options.source, options.import_id)
    for item in inputs:
        refused = _add(columns, item, options, identify)
        if refused is not None:
            refusals.append((item.line, refused))
    return Decoded(columns, refusals)


def build_page(decoded: Decoded, options: Options) -> Page:
    """Redact and key a decoded page, the part that runs over columns."""
    columns = decoded.columns
    texts = _text_frame(columns)
    redactions = _redact(columns, texts)
    if redactions:
        texts = _text_frame(columns)
    samples, verdicts = _keyed(columns, texts, options)
    flags = [(line, row.flag) for line, row in zip(columns.lines, columns.parsed, strict=True) if row.flag is not None]
    shapes = [row.shape for row in columns.parsed]
    return Page(samples, verdicts, columns.lines, shapes, flags, decoded.refusals, redactions)


def _add(columns: _Columns, item: Input, options: Options, identify: Callable[[int, bytes], str]) -> Refusal | None:
    if item.value is None and not item.decoded:
        return TOO_LARGE
    try:
        row, parsed = _read(item, options.default_feedback)
        if isinstance(parsed, Refusal):
            return parsed
        whole = dump_bytes(row)
        answer = None if parsed.answer is None else dump_bytes(parsed.answer)
        messages = _messages_bytes(row, parsed, whole, answer)
        tools = None if parsed.tools is None else dump_bytes(parsed.tools)
        right = None if parsed.right is None else dump_bytes(parsed.right)
        prompt = canonical.prompt_text(parsed.messages)
    except UnreadableJsonError as error:
        return Refusal(error.code, error.sentence)
    if item.row_id is None:
        identity = identify(item.position, whole)
    else:
        identity = canonical.identity("row_id", options.source, item.row_id)
    columns.lines.append(item.line)
    columns.positions.append(item.position)
    columns.identities.append(identity)
    columns.parsed.append(parsed)
    columns.messages.append(messages)
    columns.answers.append(answer)
    columns.tools.append(tools)
    columns.rights.append(right)
    columns.prompts.append(prompt)
    return None


def _read(item: Input, default_feedback: str | None) -> tuple[Json, Parsed | Refusal]:
    """Row and what it becomes. Plain rows are read by the quicker parser: they hold no number that it could respell."""
    if item.decoded:
        row = canonical.spelled(item.value)
        return row, parse(row, default_feedback=default_feedback)
    try:
        row = orjson.loads(item.value)
    except orjson.JSONDecodeError:  # the other parser knows a byte order mark, and why a row is refused
        pass
    else:
        parsed = parse_plain(row, default_feedback=default_feedback)
        if parsed is not None:
            return row, parsed
    row = canonical.loads(item.value)
    return row, parse(row, default_feedback=default_feedback)


def _messages_bytes(row: dict[str, Json], parsed: Parsed, whole: bytes, answer: bytes | None) -> bytes:
    """Canonical bytes of the prompt, cut out of the row's where the row is nothing but messages that are canonical."""
    if len(row) == 1 and answer is not None and "messages" in row:
        given = row["messages"]
        if len(given) == len(parsed.messages) + 1 and all(map(is_, given, parsed.messages)):
            end = len(whole) - len(answer) - 3
            if whole.endswith(b"," + answer + b"]}"):
                return whole[12:end] + b"]"
    return dump_bytes(parsed.messages)


def _text_frame(columns: _Columns) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "messages": columns.messages,
            "answer": columns.answers,
            "tools": columns.tools,
            "right_answer": columns.rights,
            "prompt": columns.prompts,
        },
        schema={
            "messages": pl.Binary,
            "answer": pl.Binary,
            "tools": pl.Binary,
            "right_answer": pl.Binary,
            "prompt": pl.String,
        },
    ).with_columns(pl.col(pl.Binary).cast(pl.String))


def _redact(columns: _Columns, texts: pl.DataFrame) -> dict[int, Counts]:
    """Redact the rows that the prefilter names, in place; counts by index of the rows that changed."""
    looked_at = ("messages", "answer", "tools", "right_answer")
    named = texts.select(pl.any_horizontal([suspect_expression(pl.col(name)) for name in looked_at])).to_series()
    found: dict[int, Counts] = {}
    rows = [(index, columns.parsed[index]) for index in named.arg_true()]
    contents = pl.Series([turn["content"] for _, row in rows for turn in _turns(row)], dtype=pl.String)
    cleared = frozenset(contents.filter(~suspects(contents)).drop_nulls())
    for index, row in rows:
        clean = redact_parts(row.messages, row.answer, row.tools, row.right, cleared=cleared)
        if not clean.counts:
            continue
        found[index] = clean.counts
        columns.messages[index] = dump_bytes(clean.messages)
        columns.answers[index] = None if clean.answer is None else dump_bytes(clean.answer)
        columns.tools[index] = None if clean.tools is None else dump_bytes(clean.tools)
        columns.rights[index] = None if clean.right is None else dump_bytes(clean.right)
        columns.prompts[index] = canonical.prompt_text(clean.messages)
    return found


def _turns(row: Parsed) -> list[Message]:
    return [*row.messages, *(turn for turn in (row.answer, row.right) if turn is not None)]


@dataclass(frozen=True, slots=True)
class Clean:
    """The parts of a conversation after redaction, and how many secrets of each kind there were."""

    messages: list[Message]
    answer: Message | None
    tools: list[Json] | None
    right: Message | None
    counts: Counts


def redact_parts(
    messages: list[Message],
    answer: Message | None,
    tools: list[Json] | None,
    right: Message | None,
    *,
    cleared: Collection[str] = (),
) -> Clean:
    """Every part of a canonical conversation redacted; `cleared` are texts that the prefilter has cleared."""
    counts: Counter[Kind] = Counter()

    def message(given: Message) -> Message:
        clean, found = redact_message(given, clean=cleared)
        counts.update(found)
        return clean

    clean_messages = [message(item) for item in messages]
    clean_answer = None if answer is None else message(answer)
    clean_right = None if right is None else message(right)
    clean_tools = tools
    if tools is not None:
        clean_tools, found = redact_value(tools)
        counts.update(found)
    return Clean(clean_messages, clean_answer, clean_tools, clean_right, dict(counts))


def _keyed(columns: _Columns, texts: pl.DataFrame, options: Options) -> tuple[pl.DataFrame, pl.DataFrame]:
    count = len(columns.lines)
    joined = [
        messages + b"\x1e" + (tools or b"") for messages, tools in zip(columns.messages, columns.tools, strict=True)
    ]
    uuid7 = uuid_utils.uuid7
    sample_ids = pl.Series([str(uuid7()) for _ in range(count)], dtype=pl.String)
    length = pl.col("messages").str.len_bytes() + pl.sum_horizontal(
        pl.col("answer", "tools").str.len_bytes().fill_null(0)
    )
    samples = texts.with_columns(
        sample_id=sample_ids,
        source=pl.lit(options.source),
        origin=pl.lit("imported"),
        identity=pl.Series(columns.identities, dtype=pl.String),
        import_id=pl.lit(options.import_id),
        position=pl.Series(columns.positions, dtype=pl.Int64),
        conversation_id=pl.lit(None, dtype=pl.String),
        model=pl.lit(options.model, dtype=pl.String),
        text_key=canonical.keys(joined),
        prompt_key=canonical.prompt_keys(texts["prompt"]),
        answer_key=canonical.keys(columns.answers),
        bytes=length.cast(pl.Int64),
        flag=pl.Series([row.flag for row in columns.parsed], dtype=pl.String),
        created_at=pl.lit(options.now, dtype=SAMPLES["created_at"].dtype),
        expires_at=pl.lit(imported_until(options.now), dtype=SAMPLES["expires_at"].dtype),
    ).select(list(SAMPLES.schema))
    verdicts = pl.DataFrame(
        {
            "sample_id": sample_ids,
            "verdict": pl.Series([row.verdict for row in columns.parsed], dtype=pl.String),
            "right_answer": texts["right_answer"],
            "right_key": canonical.keys(columns.rights),
        }
    ).with_columns(right_bytes=pl.col("right_answer").str.len_bytes().cast(FEEDBACK["right_bytes"].dtype))
    return samples, verdicts


def sample_row(
    *,
    source: str,
    identity: str,
    messages: list[Message],
    answer: Message | None,
    tools: list[Json] | None,
    flag: Flag | None,
    now: datetime,
    expires_at: datetime,
    model: str | None = None,
    conversation_id: str | None = None,
) -> tuple[dict[str, Any], Counts]:
    """One captured conversation as a row of SAMPLES, redacted and keyed, and how many secrets of each kind it had.

    Messages, answer and tools are canonical (rules/canonical.py). The keys are those that an import of the same
    conversation gets. Raises UnreadableJsonError for text that is no UTF-8.
    """
    clean = redact_parts(messages, answer, tools, None)
    texts = {
        "messages": canonical.dumps(clean.messages),
        "answer": None if clean.answer is None else canonical.dumps(clean.answer),
        "tools": None if clean.tools is None else canonical.dumps(clean.tools),
    }
    row: dict[str, Any] = {
        "sample_id": str(uuid_utils.uuid7()),
        "source": source,
        "origin": "captured",
        "identity": identity,
        "import_id": None,
        "position": None,
        "conversation_id": conversation_id,
        "model": model,
        **texts,
        "text_key": canonical.text_key(texts["messages"] or "", texts["tools"]),
        "prompt_key": canonical.prompt_key(clean.messages),
        "answer_key": None if texts["answer"] is None else canonical.key(texts["answer"]),
        "bytes": sum(len(text.encode("utf-8")) for text in texts.values() if text is not None),
        "flag": flag,
        "created_at": now,
        "expires_at": expires_at,
    }
    return {name: row[name] for name in SAMPLES.schema}, clean.counts
