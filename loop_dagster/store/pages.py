"""A page of rows on its way into the lake: decoded, parsed, redacted, with every key computed, as columns.

Belongs here: everything about a page that needs no store, and the same for one conversation that the gateway recorded.
Does not belong here: files (rowfiles.py), identity matching and commits (importing.py). Nothing unredacted leaves.

Rows are decoded and parsed one by one, since a number must keep its spelling and a bad row must not take the rest with
it; everything that can run over columns does. The redactor runs only on the rows that the columnar prefilter names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

import orjson
import polars as pl
import uuid_utils

from loop_dagster.rules import canonical
from loop_dagster.rules.canonical import Json, Message, UnreadableJsonError, dump_bytes
from loop_dagster.rules.redaction import Counts, Kind, redact_message, redact_value, redactions, suspect_expression
from loop_dagster.rules.retention import imported_until
from loop_dagster.rules.shapes import Flag, Refusal, Shape, Verdict, parse, plain_order, plain_verdict
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
    """Lists that grow together, one entry per row that becomes a sample; tools and right answers only of some rows."""

    lines: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    answers: list[bytes | None] = field(default_factory=list)
    prompts: list[bytes] = field(default_factory=list)
    verdicts: list[Verdict | None] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    flags: dict[int, Flag] = field(default_factory=dict)
    tools: dict[int, bytes] = field(default_factory=dict)
    offered: dict[int, list[Json]] = field(default_factory=dict)
    rights: dict[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, item: Input, identity: str, row: _Row) -> None:
        index = len(self.lines)
        self.lines.append(item.line)
        self.positions.append(item.position)
        self.identities.append(identity)
        self.messages.append(row.messages)
        self.answers.append(row.answer)
        self.prompts.append(row.prompt)
        self.verdicts.append(row.verdict)
        self.shapes.append(row.shape)
        if row.flag is not None:
            self.flags[index] = row.flag
        if row.tools is not None and row.offered is not None:
            self.tools[index] = row.tools
            self.offered[index] = row.offered
        if row.right is not None:
            self.rights[index] = row.right


class _Row(NamedTuple):
    """One row that becomes a sample, in canonical bytes; `whole` is the row as it came."""

    whole: bytes
    messages: bytes
    answer: bytes | None
    prompt: bytes
    verdict: Verdict | None
    shape: Shape
    flag: Flag | None
    tools: bytes | None = None
    offered: list[Json] | None = None
    right: bytes | None = None


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
        return f"Decoded({len(self.columns)} rows)"


def decode_page(inputs: Iterable[Input], options: Options) -> Decoded:
    """Decode and parse a page of rows. Never raises for what a row holds."""
    columns, refusals = _Columns(), []
    identify = canonical.positions(options.source, options.import_id)
    verdict = plain_verdict(options.default_feedback)
    for item in inputs:
        row: _Row | Refusal | None = None
        if not item.decoded:
            row = TOO_LARGE if item.value is None else _plain_row(item.value, verdict)
        if row is None:
            row = _row(item, options.default_feedback)
        if isinstance(row, Refusal):
            refusals.append((item.line, row))
        elif item.row_id is None:
            columns.add(item, identify(item.position, row.whole), row)
        else:
            columns.add(item, canonical.identity("row_id", options.source, item.row_id), row)
    return Decoded(columns, refusals)


def build_page(decoded: Decoded, options: Options) -> Page:
    """Redact and key a decoded page, the part that runs over columns."""
    columns = decoded.columns
    texts = _text_frame(columns)
    redacted = _redact(columns, texts)
    if redacted:
        texts = _changed(texts, columns, list(redacted))
    samples, verdicts = _keyed(columns, texts, options)
    flags = [(columns.lines[index], flag) for index, flag in columns.flags.items()]
    return Page(samples, verdicts, columns.lines, columns.shapes, flags, decoded.refusals, redacted)


#: What begins every message but the first in the canonical text of plain messages, and stands nowhere else in it: in a
#: string a quote has a backslash before it.
_NEXT: Final = b',{"content":"'
_START: Final = b'{"messages":['


def _plain_row(value: bytes | str, verdict: Verdict | None) -> _Row | None:
    """A plain row (`shapes.parse_plain`) in canonical bytes, None for any other: `_row` at a quarter of its cost.

    A plain row holds no number that the quicker parser could respell. Whatever is odd about a row, or wrong, shows as
    an exception or a length here, and `_row` says what it is.
    """
    try:
        row = orjson.loads(value)
        messages = row["messages"]
        if len(row) != 1 or type(messages) is not list:
            return None
        whole = dump_bytes(row)  # before `encode`, which then copies the bytes that this has made
        roles, heads, prompt = [], canonical.PROMPT_HEADS, []
        for turn in messages:
            role = turn["role"]
            if len(turn) != 2:
                return None
            roles.append(role)
            prompt.append(heads[role] + turn["content"].encode())
        usual, flag = plain_order(tuple(roles))
        if not usual or not messages[-1]["content"].strip():
            return None
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
    prompt.pop()
    end = whole.rindex(_NEXT)
    return _Row(
        whole, whole[len(_START) - 1 : end] + b"]", whole[end + 1 : -2], b"\x1e".join(prompt), verdict, "messages", flag
    )


def _row(item: Input, default_feedback: str | None) -> _Row | Refusal:
    """What any row becomes."""
    try:
        row = canonical.spelled(item.value) if item.decoded else canonical.loads(item.value)
        parsed = parse(row, default_feedback=default_feedback)
        if isinstance(parsed, Refusal):
            return parsed
        return _Row(
            whole=dump_bytes(row),
            messages=dump_bytes(parsed.messages),
            answer=_dumped(parsed.answer),
            prompt=canonical.prompt_text(parsed.messages).encode("utf-8"),
            verdict=parsed.verdict,
            shape=parsed.shape,
            flag=parsed.flag,
            tools=_dumped(parsed.tools),
            offered=parsed.tools,
            right=_dumped(parsed.right),
        )
    except UnreadableJsonError as error:
        return Refusal(error.code, error.sentence)


def _dumped(value: Json) -> bytes | None:
    return None if value is None else dump_bytes(value)


def _text_frame(columns: _Columns) -> pl.DataFrame:
    count = len(columns)
    return pl.DataFrame(
        {
            "messages": _column(columns.messages),
            "answer": _column(columns.answers),
            "tools": _column(_filled(columns.tools, count)),
            "right_answer": _column(_filled(columns.rights, count)),
            "prompt": _column(columns.prompts),
        }
    )


def _changed(texts: pl.DataFrame, columns: _Columns, places: list[int]) -> pl.DataFrame:
    """The frame with the rows at `places` as they are now."""
    lists: dict[str, Sequence[bytes | None]] = {
        "messages": columns.messages,
        "answer": columns.answers,
        "prompt": columns.prompts,
    }
    maps = {"tools": columns.tools, "right_answer": columns.rights}
    now = {name: _column([values[place] for place in places]) for name, values in lists.items()}
    now |= {name: _column([values.get(place) for place in places]) for name, values in maps.items()}
    return texts.with_columns(texts[name].clone().scatter(places, values) for name, values in now.items())


def _filled(values: Mapping[int, bytes], count: int) -> list[bytes | None]:
    filled: list[bytes | None] = [None] * count
    for index, value in values.items():
        filled[index] = value
    return filled


def _column(texts: Sequence[bytes | None]) -> pl.Series:
    return pl.Series(texts, dtype=pl.Binary).cast(pl.String)


def _redact(columns: _Columns, texts: pl.DataFrame) -> dict[int, Counts]:
    """Redact the rows that the prefilter names, in place; counts by index of the rows that changed."""
    looked_at = ("messages", "answer", "tools", "right_answer")
    named = texts.select(suspect_expression(pl.col(name)) for name in looked_at)
    prompts = named["messages"]
    rows = [
        (index, _parts(columns, index, with_prompt=prompts[index]))
        for index in named.select(pl.any_horizontal(pl.all())).to_series().arg_true().to_list()
    ]
    known = redactions(turn["content"] for _, row in rows for turn in row.turns() if turn["content"] is not None)
    found: dict[int, Counts] = {}
    for index, row in rows:
        clean = redact_parts(row.messages, row.answer, row.tools, row.right, known=known)
        if not clean.counts:
            continue
        found[index] = clean.counts
        columns.answers[index] = _dumped(clean.answer)
        if clean.messages:
            columns.messages[index] = dump_bytes(clean.messages)
            columns.prompts[index] = canonical.prompt_text(clean.messages).encode("utf-8")
        if clean.tools is not None:
            columns.tools[index] = dump_bytes(clean.tools)
        if clean.right is not None:
            columns.rights[index] = dump_bytes(clean.right)
    return found


class _Parts(NamedTuple):
    """A conversation read back from its canonical bytes."""

    messages: list[Message]
    answer: Message | None
    tools: list[Json] | None
    right: Message | None

    def turns(self) -> list[Message]:
        return [*self.messages, *(turn for turn in (self.answer, self.right) if turn is not None)]


def _parts(columns: _Columns, index: int, *, with_prompt: bool) -> _Parts:
    """What is to be looked at again; the prompt is left out where the prefilter has cleared it.

    Few rows are, so reading them again costs less than keeping all. Messages hold no numbers.
    """
    answer, right = columns.answers[index], columns.rights.get(index)
    return _Parts(
        orjson.loads(columns.messages[index]) if with_prompt else [],
        None if answer is None else orjson.loads(answer),
        columns.offered.get(index),
        None if right is None else orjson.loads(right),
    )


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
    known: Mapping[str, tuple[str, Counts]] | None = None,
) -> Clean:
    """Every part of a canonical conversation redacted; `known` are the `redactions` of all its contents."""
    counts: Counter[Kind] = Counter()

    def message(given: Message) -> Message:
        clean, found = redact_message(given, known=known)
        if found:
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
    count = len(columns)
    joined = [messages + b"\x1e" for messages in columns.messages]
    for index, tools in columns.tools.items():
        joined[index] += tools
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
        flag=pl.Series([columns.flags.get(index) for index in range(count)], dtype=pl.String),
        created_at=pl.lit(options.now, dtype=SAMPLES["created_at"].dtype),
        expires_at=pl.lit(imported_until(options.now), dtype=SAMPLES["expires_at"].dtype),
    ).select(list(SAMPLES.schema))
    verdicts = pl.DataFrame(
        {
            "sample_id": sample_ids,
            "verdict": pl.Series(columns.verdicts, dtype=pl.String),
            "right_answer": texts["right_answer"],
            "right_key": canonical.keys(_filled(columns.rights, count)),
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
