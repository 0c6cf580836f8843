"""Reading what a judge wrote: ratings and preferences, strictly.

Belongs here: pure parsers of a judge's reply, which is text that nobody controls. Does not belong here: asking a judge,
asking again, and what an unreadable reply does to a sample (`models/judge.py`).

A verdict is one JSON object: bare, in a fence, after the judge's reasoning, or beside prose. Only the judge's own words
count. A reply that is nothing but the object is its own. Where there are other words, the object may be a quotation of
the answer that is judged, so it counts only where a verdict stands (first, last or fenced), where it is the only one,
and where the texts that the judge was shown do not hold it. What could be read in two ways is not read at all: the
judge is asked again, and a sample that fails is neither won nor lost.

So that nobody can make a judge unreadable by writing verdicts into an answer, a judge that is shown anything like one
is asked for keys with a `mark` that no text it was shown holds: an object with such keys is its own wherever it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, TypeVar

#: A reply longer than this is not read: it has room for any reasoning, and parsing must stay cheap whatever arrives.
MOST_CHARACTERS: Final = 300_000
#: Objects that one reply may hold; one with more is no verdict.
MOST_OBJECTS: Final = 64
HIGHEST: Final = 10.0

#: A number as JSON spells it (or without its leading zero), or one with "/10" or "out of 10" behind it. ASCII digits
#: only, no sign. Longer numerals are no rating.
_RATING: Final = re.compile(
    r"(\d{1,2}(?:\.\d{1,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,2}|\s*/\s*10|\s+out\s+of\s+10)?", re.ASCII | re.IGNORECASE
)
_EXPONENT: Final = re.compile(r"[eE][+-]?\d{1,2}\Z", re.ASCII)
_LONGEST_RATING: Final = 64
#: How many braces before a marked key are tried as the begin of its object.
_NESTED: Final = 16

_THOUGHT: Final = r"(?:[a-z]{1,12}:)?(?:think|thinking|thought|thoughts|reason|reasoning|analysis|scratchpad)"
#: How models mark reasoning that a server did not take out of the reply.
_REASONING_BEGINS: Final = re.compile(
    rf"<{_THOUGHT}>|\[THINK\]|◁think▷|<\|channel\|>\s*(?:analysis|commentary)", re.IGNORECASE
)
_REASONING_ENDS: Final = re.compile(
    rf"</{_THOUGHT}>|\[/THINK\]|◁/think▷|<\|channel\|>\s*final\s*<\|message\|>", re.IGNORECASE
)
_FENCE: Final = re.compile(r"(?:```|~~~)[ \t]{0,4}[a-z0-9]{0,12}", re.IGNORECASE)
#: Where an object may begin: braces of prose, of code and of formulas hold no key.
_BEGINS: Final = re.compile(r"\{(?=\s*[\"}])")
#: Marks around a verdict that are no words: emphasis, a fence, a tag such as <answer>.
_MARKS: Final = re.compile(r"(?:[\s*_`~]|</?[a-z_|:]{1,24}>|(?<=```)json)+", re.IGNORECASE)
#: What quoting changes: spacing, quotation marks, escapes and emphasis.
_SPELLING: Final = re.compile(r"(?:\\[nrt]|[\s\\\"'`*_])+")

Preference = Literal["first", "second", "tie"]
_WORDS: Final[Mapping[str, Preference]] = {"first": "first", "second": "second", "tie": "tie"}
V = TypeVar("V")


def read_rating(value: object) -> float | None:
    """One rating from 0 to 10: a number, a numeric string, "x/10" or "x out of 10"; None for anything else.

    True is no 1, "10" is 10, NaN and what lies outside the range is nothing (rules.md, How it is tested).
    """
    if isinstance(value, str):
        found = _RATING.fullmatch(value.strip()) if len(value) <= _LONGEST_RATING else None
        value = float(found[0] if _EXPONENT.search(found[0]) else found[1]) if found else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) + 0.0 if 0 <= value <= HIGHEST else None


def wants_mark(texts: Sequence[str]) -> bool:
    """Whether a judge that is shown these texts must be asked for marked keys: one may hold an object or reasoning."""
    return any("{" in text or _REASONING_ENDS.search(text) for text in texts)


def read_ratings(
    reply: str, dimensions: Sequence[str], *, shown: Sequence[str] = (), mark: str = ""
) -> dict[str, float] | None:
    """The rating of every dimension, in their order, from one JSON object; None when any is missing or unreadable.

    `shown`: the texts that the judge was shown, which it may have quoted. `mark`: what it was asked to put behind each
    key, in none of them; a judge that leaves it out is read like one that was not asked. Other keys beside the
    dimensions (a judge may give its reasons) are not looked at, nor is the case of keys; one named twice makes the
    reply unreadable.
    """

    def read(found: Mapping[str, object]) -> dict[str, float] | None:
        read_ones = {name: read_rating(found.get(name)) for name in dimensions}
        ratings = {name: rating for name, rating in read_ones.items() if rating is not None}
        return ratings if len(ratings) == len(dimensions) else None

    marked = _marked_verdict(reply, mark, read) if mark else None
    return _only_verdict(_Reply.of(reply, shown), dimensions, read, shown) if marked is None else marked


def read_preference(reply: str, *, key: str = "better", shown: Sequence[str] = (), mark: str = "") -> Preference | None:
    """Which answer a judge prefers: `first`, `second` or `tie`, from a JSON object's `key` or the word alone.

    `shown` and `mark` as in `read_ratings`. Case and what surrounds the word (white space, quotation marks, emphasis, a
    full stop) do not count; None for anything else.
    """

    def read(found: Mapping[str, object]) -> Preference | None:
        value = found.get(key)
        return _WORDS.get(value.strip().lower()) if isinstance(value, str) else None

    marked: Preference | None = _marked_verdict(reply, mark, read) if mark else None
    if marked is not None:
        return marked
    read_as = _Reply.of(reply, shown)
    if read_as is not None and read_as.own and (word := _word(read_as.text)) is not None:
        return word
    return _only_verdict(read_as, (key,), read, shown)


def _word(text: str) -> Preference | None:
    return _WORDS.get(text.strip(" \t\r\n\"'`*_.").lower())


@dataclass(frozen=True, slots=True)
class _Reply:
    """What a judge said after its reasoning. `own`: it is surely that, and not the end of something quoted."""

    text: str
    own: bool

    @classmethod
    def of(cls, reply: str, shown: Sequence[str]) -> _Reply | None:
        """None for a reply that is too long, or that ends in the middle of its reasoning."""
        if len(reply) > MOST_CHARACTERS:
            return None
        text = reply.strip().removeprefix("\ufeff")
        ends = [found.end() for found in _REASONING_ENDS.finditer(text)]
        if ends:
            # An answer may hold such a mark: what the judge quotes of it must not pass for what comes after reasoning.
            return cls(text[ends[-1] :].strip(), own=not any(_REASONING_ENDS.search(one) for one in shown))
        return None if _REASONING_BEGINS.match(text) else cls(text, own=True)


def _only_verdict(
    reply: _Reply | None,
    keys: Sequence[str],
    read: Callable[[Mapping[str, object]], V | None],
    shown: Sequence[str],
) -> V | None:
    """What the one object of the reply that holds any of `keys` says; None when there is none, or more than one."""
    if reply is None:
        return None
    try:
        found = [one for one in _objects(reply.text) if any(key in one.keys for key in keys)]
    except (ValueError, RecursionError):
        return None
    if len(found) != 1 or not found[0].alone or not reply.own:
        told = _spelled(" ".join(shown))
        meant = [said for text in shown for one in _objects_shown(text) if (said := read(one.keys)) is not None]
        found = [one for one in found if _spelled(one.source) not in told and read(one.keys) not in meant]
    verdicts = [read(one.keys) for one in found]
    stands = any(one.stands for one in found)
    return verdicts[0] if stands and all(verdict == verdicts[0] for verdict in verdicts) else None


def _marked_verdict(reply: str, mark: str, read: Callable[[Mapping[str, object]], V | None]) -> V | None:
    """What the judge says under keys with the mark: all its objects alike, or the one that ends its reply.

    Anything may stand around them, broken objects and marks of reasoning that an answer brought included.
    """
    if len(reply) > MOST_CHARACTERS:
        return None
    found: dict[int, tuple[int, V | None]] = {}
    for place in islice(re.finditer(re.escape(mark), reply), MOST_OBJECTS):
        if any(begin < place.start() < end for begin, (end, _) in found.items()):
            continue
        begin = place.start()
        for _ in range(_NESTED):
            begin = reply.rfind("{", 0, begin)
            if begin < 0:
                break
            with suppress(ValueError, RecursionError):
                value, end = _DECODER.raw_decode(reply, begin)
                if end > place.start():
                    keys = {key.removesuffix(mark): item for key, item in _folded(value).items() if key.endswith(mark)}
                    found[begin] = end, read(keys)
                    break
    verdicts = [verdict for _, verdict in found.values()]
    if not verdicts or verdicts[-1] is None:
        return None
    last_end = max(end for end, _ in found.values())
    alike = all(verdict == verdicts[0] for verdict in verdicts)
    return verdicts[-1] if alike or not _MARKS.sub("", reply[last_end:].strip()) else None


# --- objects in a text -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Object:
    """A JSON object of a reply, its keys folded. `alone`: nothing else is said; `stands`: where a verdict stands."""

    keys: Mapping[str, object]
    source: str
    alone: bool
    stands: bool


def _objects(text: str) -> Iterator[_Object]:
    """Each outermost JSON object, in order. Raises ValueError for one that is broken: what it meant cannot be told."""
    at = 0
    for _ in range(MOST_OBJECTS):
        begins = _BEGINS.search(text, at)
        if begins is None:
            return
        begin = begins.start()
        value, at = _DECODER.raw_decode(text, begin)
        before, after = text[:begin].rstrip(), text[at:].lstrip()
        first, last = not _MARKS.sub("", before), not _MARKS.sub("", after)
        fenced = _FENCE.fullmatch(before.rpartition("\n")[2].strip()) and after.startswith(("```", "~~~"))
        yield _Object(_folded(value), text[begin:at], first and last, bool(first or last or fenced))
    raise ValueError("more objects than a verdict has")


def _objects_shown(text: str) -> Iterator[_Object]:
    """The first objects of a text that anybody may have written: broken ones end it, and more are not looked for."""
    with suppress(ValueError, RecursionError):
        yield from _objects(text)


def _spelled(text: str) -> str:
    """A text without what quoting it changes."""
    return _SPELLING.sub("", text).casefold()


def _folded(value: Mapping[str, object]) -> dict[str, object]:
    folded = {key.strip().casefold(): item for key, item in value.items()}
    if len(folded) != len(value):
        raise ValueError("a key stands twice")
    return folded


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
