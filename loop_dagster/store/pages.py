"""A page of rows on its way into the lake: decoded, parsed, redacted, with every key computed, as columns.

Belongs here: everything about a page that needs no store, and the same for one conversation that the gateway recorded.
Does not belong here: files (rowfiles.py), identity matching and commits (importing.py). Nothing unredacted leaves.

Rows are decoded and parsed one by one, since a number must keep its spelling and a bad row must not take the rest with
it; everything that can run over columns does. The redactor runs only on the rows that the columnar prefilter names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import orjson
import polars as pl
import uuid_utils

from loop_dagster.rules import canonical
from loop_dagster.rules.canonical import Json, Message, UnreadableJsonError, dump_bytes
from loop_dagster.rules.redaction import (
    Counts,
    Kind,
    redact,
    redact_message,
    redact_value,
    redactions,
    suspect_expression,
)
from loop_dagster.rules.retention import imported_until
from loop_dagster.rules.shapes import (
    REFUSALS,
    Flag,
    Refusal,
    RowLabel,
    Shape,
    Verdict,
    parse,
    plain_order,
    plain_verdict,
)
from loop_dagster.rules.tags import MAX_ON_SAMPLE, Name
from loop_dagster.tables import FEEDBACK, SAMPLES

TOO_LARGE: Final = Refusal("row_too_large", "The row is longer than a row may be.")
#: In place of a row, where a file ends before its array does (store/rowfiles.py).
NO_END: Final = Refusal(
    "array_cut_off", "The array has no end, so the file may have been cut off; the rows before this were taken."
)


class Input(NamedTuple):
    """One row as it was given. `line` counts from 1 for people; `value` is its bytes, None for a row too long, or
    an object (then `decoded`), which is a Refusal where the caller could not read it; `row_id` its own id where the
    caller gave one."""

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
    #: Tags and keys of attributes that the call puts on every row: they count among the 32 of each.
    names: frozenset[Name] = frozenset()


class _Row(NamedTuple):
    """One row that becomes a sample, in canonical bytes; `offered` are its tools as they were decoded."""

    messages: bytes
    answer: bytes | None
    prompt: bytes
    verdict: Verdict | None
    shape: Shape
    flag: Flag | None
    tools: bytes | None = None
    offered: list[Json] | None = None
    right: bytes | None = None
    labels: tuple[RowLabel, ...] = ()


@dataclass(slots=True)
class _Columns:
    """Lists of one length, one entry per row that becomes a sample."""

    lines: list[int]
    positions: list[int]
    identities: list[str]
    messages: list[bytes]
    answers: list[bytes | None]
    prompts: list[bytes]
    verdicts: list[Verdict | None]
    shapes: list[Shape]
    flags: list[Flag | None]
    tools: list[bytes | None]
    offered: list[list[Json] | None]
    rights: list[bytes | None]
    labels: list[tuple[RowLabel, ...]]

    @classmethod
    def of(cls, lines: list[int], positions: list[int], identities: list[str], rows: list[_Row]) -> _Columns:
        columns = zip(*rows, strict=True) if rows else ((),) * len(_Row._fields)
        return cls(lines, positions, identities, *map(list, columns))


@dataclass(frozen=True, slots=True)
class Page:
    """Rows that become samples, in the order given, and the refusals of the others.

    `samples` has the columns of SAMPLES. `verdicts` has one row per sample: `sample_id`, `verdict` (null where the row
    brings none), `right_answer`, `right_key`, `right_bytes`. `labels` are the rows' own: `row` (index in `samples`),
    `label`, `value`, `parent`. `redactions` maps a row's index to its counts. Flags and
    refusals begin with position and line.
    """

    samples: pl.DataFrame
    verdicts: pl.DataFrame
    labels: pl.DataFrame
    lines: list[int]
    shapes: list[Shape]
    flags: list[tuple[int, int, Flag]]
    refusals: list[tuple[int, int, Refusal]]
    redactions: Mapping[int, Counts]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A page half way: decoded and parsed, the part that Python does row by row. Not redacted: never kept or shown."""

    columns: _Columns
    refusals: list[tuple[int, int, Refusal]]

    def __repr__(self) -> str:
        return f"Decoded({len(self.columns.lines)} rows)"


def decode_page(inputs: Iterable[Input], options: Options) -> Decoded:
    """Decode and parse a page of rows. Never raises for what a row holds."""
    lines: list[int] = []
    positions: list[int] = []
    identities: list[str] = []
    rows: list[_Row] = []
    refusals: list[tuple[int, int, Refusal]] = []
    identify = canonical.positions(options.source, options.import_id)
    verdict = plain_verdict(options.default_feedback)
    for item in inputs:
        position, line, value, decoded, row_id = item
        became: tuple[bytes, _Row] | Refusal | None = None
        if not decoded:
            became = TOO_LARGE if value is None else _plain_row(value, verdict) if value else NO_END
        if became is None:
            became = _row(item, options)
        if isinstance(became, Refusal):
            refusals.append((position, line, became))
            continue
        whole, row = became
        lines.append(line)
        positions.append(position)
        rows.append(row)
        if row_id is None:
            identities.append(identify(position, whole))
        else:
            identities.append(canonical.identity("row_id", options.source, row_id))
    return Decoded(_Columns.of(lines, positions, identities, rows), refusals)


def build_page(decoded: Decoded, options: Options) -> Page:
    """Redact and key a decoded page, the part that runs over columns."""
    columns = decoded.columns
    texts = _text_frame(columns)
    redacted = _redact(columns, texts)
    if redacted:
        texts = _changed(texts, columns, list(redacted))
    samples, verdicts = _keyed(columns, texts, options)
    places = zip(columns.positions, columns.lines, columns.flags, strict=True)
    flags = [(position, line, flag) for position, line, flag in places if flag is not None]
    return Page(
        samples, verdicts, _own_labels(columns.labels), columns.lines, columns.shapes, flags, decoded.refusals, redacted
    )


def _own_labels(labels: list[tuple[RowLabel, ...]]) -> pl.DataFrame:
    rows = [
        (row, one.label, None if one.value is None else redact(one.value)[0], one.parent)
        for row, own in enumerate(labels)
        for one in own
    ]
    schema = {"row": pl.Int64, "label": pl.String, "value": pl.String, "parent": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


#: What begins every message but the first in the canonical text of plain messages, and stands nowhere else in it: in a
#: string a quote has a backslash before it.
_NEXT: Final = b',{"content":"'
_START: Final = b'{"messages":['


def _plain_row(value: bytes | str, verdict: Verdict | None) -> tuple[bytes, _Row] | None:
    """Whole and parts of a plain row (`shapes.parse_plain`) in canonical bytes, None for any other.

    This is `_row` at a quarter of its cost. A plain row holds no number that the quicker parser could respell. Whatever
    is odd about a row, or wrong, shows as an exception or a length here, and `_row` says what it is.
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
    messages = whole[len(_START) - 1 : end] + b"]"
    return whole, _Row(messages, whole[end + 1 : -2], b"\x1e".join(prompt), verdict, "messages", flag)


def _row(item: Input, options: Options) -> tuple[bytes, _Row] | Refusal:
    """Canonical bytes of any row, and what it becomes."""
    if isinstance(item.value, Refusal):
        return item.value
    try:
        row = canonical.spelled(item.value) if item.decoded else canonical.loads(item.value)
        parsed = parse(row, default_feedback=options.default_feedback)
        if isinstance(parsed, Refusal):
            return parsed
        if parsed.labels and len({*options.names, *(one.name for one in parsed.labels)}) > MAX_ON_SAMPLE:
            return Refusal("too_many_labels", REFUSALS["too_many_labels"])
        return dump_bytes(row), _Row(
            messages=dump_bytes(parsed.messages),
            answer=_dumped(parsed.answer),
            prompt=canonical.prompt_text(parsed.messages).encode("utf-8"),
            verdict=parsed.verdict,
            shape=parsed.shape,
            flag=parsed.flag,
            tools=_dumped(parsed.tools),
            offered=parsed.tools,
            right=_dumped(parsed.right),
            labels=parsed.labels,
        )
    except UnreadableJsonError as error:
        return Refusal(error.code, error.sentence)


def _dumped(value: Json) -> bytes | None:
    return None if value is None else dump_bytes(value)


def _text_frame(columns: _Columns) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "messages": _column(columns.messages),
            "answer": _column(columns.answers),
            "tools": _column(columns.tools),
            "right_answer": _column(columns.rights),
            "prompt": _column(columns.prompts),
        }
    )


def _changed(texts: pl.DataFrame, columns: _Columns, places: list[int]) -> pl.DataFrame:
    """The frame with the rows at `places` as they are now."""
    lists: dict[str, Sequence[bytes | None]] = {
        "messages": columns.messages,
        "answer": columns.answers,
        "tools": columns.tools,
        "right_answer": columns.rights,
        "prompt": columns.prompts,
    }
    now = {name: _column([values[place] for place in places]) for name, values in lists.items()}
    return texts.with_columns(texts[name].clone().scatter(places, values) for name, values in now.items())


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
        columns.tools[index] = _dumped(clean.tools)
        columns.rights[index] = _dumped(clean.right)
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
    answer, right = columns.answers[index], columns.rights[index]
    return _Parts(
        orjson.loads(columns.messages[index]) if with_prompt else [],
        None if answer is None else orjson.loads(answer),
        columns.offered[index],
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
        flag=pl.Series(columns.flags, dtype=pl.String),
        created_at=pl.lit(options.now, dtype=SAMPLES["created_at"].dtype),
        expires_at=pl.lit(imported_until(options.now), dtype=SAMPLES["expires_at"].dtype),
    ).select(list(SAMPLES.schema))
    verdicts = pl.DataFrame(
        {
            "sample_id": sample_ids,
            "verdict": pl.Series(columns.verdicts, dtype=pl.String),
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
    keyed: bool = True,
) -> tuple[dict[str, Any], Counts]:
    """One captured conversation as a row of SAMPLES, redacted and keyed, and how many secrets of each kind it had.

    Messages, answer and tools are canonical (rules/canonical.py). The keys are those that an import of the same
    conversation gets; with `keyed` false prompt_key is 0, and `put_prompt_keys` sets it for many rows at once, which
    costs a tenth. Raises UnreadableJsonError for text that is no UTF-8.
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
        "prompt_key": canonical.prompt_key(clean.messages) if keyed else 0,
        "answer_key": None if texts["answer"] is None else canonical.key(texts["answer"]),
        "bytes": sum(len(text.encode("utf-8")) for text in texts.values() if text is not None),
        "flag": flag,
        "created_at": now,
        "expires_at": expires_at,
    }
    return {name: row[name] for name in SAMPLES.schema}, clean.counts


def put_prompt_keys(rows: Sequence[dict[str, Any]]) -> None:
    """Set prompt_key of rows that `sample_row` left without."""
    prompts = pl.Series([canonical.prompt_text(orjson.loads(row["messages"])) for row in rows], dtype=pl.String)
    for row, key in zip(rows, canonical.prompt_keys(prompts).to_list(), strict=True):
        row["prompt_key"] = key
