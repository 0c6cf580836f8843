"""Searching samples' text, whatever its case: a pattern over the JSON as it is stored, a closer look where that lies.

Belongs here: what a search finds and how. Does not belong here: filters and pages (finding.py). What people and models
wrote counts: content of messages and of the answer, and names, ids and arguments of tool calls. JSON's own words, such
as "role":"user", do not.

A text without quotes and backslashes stands in the JSON letter by letter, so a pattern over the column finds it, ten
times faster than reading the JSON would. It finds too much in three cases: the text is part of a word that JSON adds,
which is taken out first; of punctuation alone; or it begins inside an escape, as `next` does in a line break before
`ext`. The last two are decided by reading the few rows that are left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson
import polars as pl

#: Words of a stored message that nobody wrote: keys, and the values of role and type.
_WORDS: Final = (
    *("arguments", "content", "function", "id", "name", "role", "tool_call_id", "tool_calls", "type", "null"),
    *("system", "developer", "user", "assistant", "tool"),
)
#: The same in place. A quote inside a string follows a backslash, so this is never found in what somebody wrote.
_STRUCTURE: Final = (
    r'"role":"[a-z]+"|"type":"function"|"content":(?:null)?|'
    r'"(?:arguments|function|id|name|tool_call_id|tool_calls)":'
)
_PUNCTUATION: Final = re.compile(r"[\[\]{}:,]+")
#: What may follow a backslash, and the digits of \u00XX.
_ESCAPES: Final = frozenset("bfnrtu0123456789abcdef")
_COLUMNS: Final = ("messages", "answer")


def holds(text: str) -> pl.Expr:
    """Whether a sample's messages, answer or tool calls hold `text`, as a condition over `messages` and `answer`."""
    written = orjson.dumps(text).decode()[1:-1]
    pattern = "(?i)" + pl.escape_regex(written)
    added = any(text.lower() in word for word in _WORDS)
    found = pl.any_horizontal(
        (pl.col(name).str.replace_all(_STRUCTURE, "") if added else pl.col(name)).str.contains(pattern)
        for name in _COLUMNS
    ).fill_null(False)
    exact = "\\" not in written and _PUNCTUATION.fullmatch(text) is None
    if exact and text[0].lower() not in _ESCAPES:
        return found
    sure = "(?i)(?:^|[^\\\\])" + pl.escape_regex(written) if exact else None

    def look(rows: pl.Series) -> pl.Series:
        return _looked(rows.struct.unnest(), text, sure)

    return pl.struct(found.alias("found"), *_COLUMNS).map_batches(look, pl.Boolean, is_elementwise=True)


def _looked(rows: pl.DataFrame, text: str, sure: str | None) -> pl.Series:
    """`found`, with those taken back whose text does not hold it; what `sure` matches needs no reading."""
    found = rows["found"]
    doubtful = found
    if sure is not None:
        plain = pl.any_horizontal(pl.col(name).str.contains(sure) for name in _COLUMNS).fill_null(False)
        escaped = pl.any_horizontal(pl.col(name).str.contains("\\u00", literal=True) for name in _COLUMNS)
        places = found.arg_true()
        clear = rows[places].select((plain & ~escaped.fill_null(False)).alias("clear"))["clear"]
        doubtful = found.clone().scatter(places.filter(clear), False)
    places = doubtful.arg_true()
    owners, parts = [], []
    for place, row in zip(places, rows[places].iter_rows(named=True), strict=True):
        said = _parts(row)
        parts += said
        owners += [place] * len(said)
    says = pl.Series(parts, dtype=pl.String).str.contains("(?i)" + pl.escape_regex(text))
    right = set(pl.Series(owners, dtype=pl.Int64).filter(says))
    return found.clone().scatter([place for place in places if place not in right], False)


def _parts(row: Mapping[str, Any]) -> list[str]:
    """What people and models wrote in a sample."""
    turns = [*orjson.loads(row["messages"]), *([orjson.loads(row["answer"])] if row["answer"] else [])]
    return [part for turn in turns for part in _parts_of(turn)]


def _parts_of(turn: Mapping[str, Any]) -> list[str]:
    parts = [turn.get("content") or "", turn.get("name") or "", turn.get("tool_call_id") or ""]
    for call in turn.get("tool_calls") or ():
        parts += [call["function"]["name"], call["function"]["arguments"], call.get("id") or ""]
    return parts
