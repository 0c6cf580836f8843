"""Reading what a judge wrote: ratings and preferences, strictly.

Belongs here: pure parsers of a judge's reply, which is text that nobody controls. Does not belong here: asking a judge,
asking again, and what an unreadable reply does to a sample (`models/judge.py`).

A reply is one JSON value, bare or as the whole of one fenced block. Nothing is searched for inside prose: a sentence
with a number in it says less than it seems to, and the answer that is judged may have put it there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, Literal

#: A reply longer than this is not read: a verdict is short, and parsing must stay cheap whatever arrives.
MOST_CHARACTERS: Final = 100_000
HIGHEST: Final = 10.0

#: A number, alone or "x/10" or "x out of 10"; ASCII digits only, no sign, no exponent. Longer numerals are no rating.
_RATING: Final = re.compile(
    r"(\d{1,2}(?:\.\d{1,20})?|\.\d{1,20})(?:\s*/\s*10|\s+out\s+of\s+10)?", re.ASCII | re.IGNORECASE
)
_LONGEST_RATING: Final = 64
_FENCE: Final = "```"

Preference = Literal["first", "second", "tie"]


def read_rating(value: object) -> float | None:
    """One rating from 0 to 10: a number, a numeric string, "x/10" or "x out of 10"; None for anything else.

    True is no 1, "10" is 10, NaN and what lies outside the range is nothing (rules.md, How it is tested).
    """
    if isinstance(value, str):
        found = _RATING.fullmatch(value.strip()) if len(value) <= _LONGEST_RATING else None
        value = float(found.group(1)) if found else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= HIGHEST else None


def read_ratings(reply: str, dimensions: Sequence[str]) -> dict[str, float] | None:
    """The rating of every dimension, in their order, from one JSON object; None when any is missing or unreadable.

    Other keys beside them (a judge may give its reasons) are not looked at; a key named twice is ambiguous and makes
    the reply unreadable.
    """
    found = _json_object(reply)
    if found is None:
        return None
    ratings: dict[str, float] = {}
    for name in dimensions:
        rating = read_rating(found.get(name))
        if rating is None:
            return None
        ratings[name] = rating
    return ratings


def read_preference(reply: str, *, key: str = "better") -> Preference | None:
    """Which answer a judge prefers: `first`, `second` or `tie`, from a JSON object's `key` or the word alone.

    Case and white space around the word do not count; None for anything else.
    """
    found = _json_object(reply)
    word = found.get(key) if found is not None else reply.strip().strip('"')
    if not isinstance(word, str):
        return None
    words: dict[str, Preference] = {"first": "first", "second": "second", "tie": "tie"}
    return words.get(word.strip().lower())


def _json_object(reply: str) -> dict[str, object] | None:
    if len(reply) > MOST_CHARACTERS:
        return None
    try:
        value = json.loads(_unfenced(reply.strip()), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _unfenced(text: str) -> str:
    """What stands in the one fenced block that `text` is, else `text` itself."""
    opening, newline, rest = text.partition("\n")
    language = opening.removeprefix(_FENCE).strip().lower()
    if newline and opening.startswith(_FENCE) and language in ("", "json") and rest.endswith(_FENCE):
        return rest.removesuffix(_FENCE)
    return text


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")
