"""Canonical JSON, the canonical form of messages, and every key that is hashed from them.

Belongs here: reading JSON so that a number keeps its spelling, writing it in one form, bringing a message, its content
and its tool calls into the form in which they are stored, and the keys of rules.md (identity, exact keys, the
normalised prompt). Does not belong here: what a row of a file becomes (shapes.py), secrets (redaction.py).

One form: keys sorted, no white space, UTF-8 unescaped, numbers as they were spelled (`1e2` stays `1e2`). A tool call's
arguments are one JSON-encoded string of canonical JSON, whether they came as string or object.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, TypeAlias

import orjson
import polars as pl
import xxhash

Json: TypeAlias = Any
Message: TypeAlias = dict[str, Any]
UnreadableCode: TypeAlias = Literal[
    "not_utf8", "not_json", "not_finite", "number_too_large", "lone_surrogate", "too_deep", "name_twice"
]

#: What is no JSON at all; the other codes are about JSON that cannot be kept.
NO_JSON: Final[frozenset[UnreadableCode]] = frozenset({"not_utf8", "not_json"})
#: Characters of a number: Python reads whole ones of up to 4,300 digits.
MAX_NUMBER: Final = 4_000
#: Bits of a whole number that Python writes as text without complaint.
_MAX_BITS: Final = 10_000
#: Nested arrays and objects that a document may have; JSON schemas of tools seldom pass 20.
MAX_DEPTH: Final = 100

_SENTENCES: Final[Mapping[str, str]] = {
    "not_utf8": "The row is not UTF-8 text.",
    "not_json": "The row is not valid JSON.",
    "not_finite": "The row has NaN or Infinity, which are no JSON numbers.",
    "number_too_large": f"The row has a number of more than {MAX_NUMBER:,} digits, or a fraction beyond 1.8e308.",
    "lone_surrogate": "The row has half of a surrogate pair (a broken emoji or \\ud800 alone), which is no text.",
    "name_twice": "The row has a name twice in one object, and which of the two was meant cannot be told.",
    "too_deep": f"The row nests arrays and objects deeper than {MAX_DEPTH}.",
}


class UnreadableJsonError(ValueError):
    """JSON that cannot be read, or a value that has no JSON form. `sentence` never quotes it; `name` came twice."""

    def __init__(self, code: UnreadableCode, name: str | None = None) -> None:
        super().__init__(_SENTENCES[code])
        self.code: UnreadableCode = code
        self.sentence = _SENTENCES[code]
        self.name = name


class BadMessageError(ValueError):
    """A message that has no canonical form. `code` is one of shapes.py; `sentence` never quotes the message."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


class Number(str):
    """A JSON number in the spelling of its file."""

    __slots__ = ()


# reading and writing


def _refuse_constant(_: str) -> NoReturn:
    raise UnreadableJsonError("not_finite")


def _whole(text: str) -> Number:
    if len(text) > MAX_NUMBER:
        raise UnreadableJsonError("number_too_large")
    return Number(text)


def _fraction(text: str) -> Number:
    if len(text) > MAX_NUMBER or math.isinf(float(text)):
        raise UnreadableJsonError("number_too_large")
    return Number(text)


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise UnreadableJsonError("name_twice", doubled(name for name, _ in pairs))
    return found


def doubled(names: Iterable[str]) -> str | None:
    """The first name that comes a second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


_scan: Final = json.JSONDecoder(parse_int=_whole, parse_float=_fraction, parse_constant=_refuse_constant).raw_decode
_scan_once: Final = json.JSONDecoder(
    parse_int=_whole, parse_float=_fraction, parse_constant=_refuse_constant, object_pairs_hook=_once
).raw_decode
_BLANK: Final = " \t\n\r"


def loads(text: str | bytes, *, once: bool = False) -> Json:
    """Read one JSON document; every number becomes a `Number`, of two equal keys the last counts.

    With `once` two equal keys are refused instead, which takes about a tenth longer. A UTF-8 byte order mark is passed
    over. Raises UnreadableJsonError, also for lone surrogates and for a depth over MAX_DEPTH: what comes back can
    always be written.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError:
            raise UnreadableJsonError("not_utf8") from None
    elif not _encodable(text):
        raise UnreadableJsonError("lone_surrogate")
    text = text.lstrip("\ufeff").strip(_BLANK)
    try:
        value, end = _scan_once(text) if once else _scan(text)
    except RecursionError:
        raise UnreadableJsonError("too_deep") from None
    except json.JSONDecodeError:
        raise UnreadableJsonError("not_json") from None
    if end != len(text):
        raise UnreadableJsonError("not_json")
    # Most documents are cleared by counting alone; an escaped emoji is two \\ud….
    if text.count("{") + text.count("[") > MAX_DEPTH or "\\ud" in text or "\\uD" in text:
        check(value)
    return value


_OPTIONS: Final = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS


def _spell(value: object) -> orjson.Fragment:
    if isinstance(value, Number):
        return orjson.Fragment(value.encode("ascii"))
    raise TypeError


def dumps(value: Json) -> str:
    """Canonical JSON text of a value that `loads` or `spelled` gave. Raises UnreadableJsonError."""
    return dump_bytes(value).decode("utf-8")


def dump_bytes(value: Json) -> bytes:
    """As `dumps`, in UTF-8."""
    try:
        return orjson.dumps(value, default=_spell, option=_OPTIONS)
    except (TypeError, RecursionError):  # orjson does not say which of its limits was met
        check(value)
        raise UnreadableJsonError("not_json") from None


def check(value: Json) -> None:
    """Raise UnreadableJsonError for a depth over MAX_DEPTH, a lone surrogate, or a value that is no JSON."""
    stack: list[tuple[Json, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            if not _encodable(item):
                raise UnreadableJsonError("lone_surrogate")
        elif isinstance(item, dict):
            if depth >= MAX_DEPTH:
                raise UnreadableJsonError("too_deep")
            stack.extend((key, depth + 1) for key in item)
            stack.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            if depth >= MAX_DEPTH:
                raise UnreadableJsonError("too_deep")
            stack.extend((inner, depth + 1) for inner in item)
        elif item is not None and not isinstance(item, bool):
            raise UnreadableJsonError("not_json")


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def spelled(value: object, *, depth: int = 0) -> Json:
    """A value of ordinary Python objects in the form that `loads` gives: numbers as `Number`, tuples as lists.

    A number that was parsed before has lost its spelling; Python's own is taken. Raises UnreadableJsonError.
    """
    if value is None or isinstance(value, bool | Number):
        return value
    if isinstance(value, str):
        if not _encodable(value):
            raise UnreadableJsonError("lone_surrogate")
        return str(value)
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise UnreadableJsonError("number_too_large")
        return _whole(int.__repr__(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UnreadableJsonError("not_finite")
        return Number(float.__repr__(value))
    if depth >= MAX_DEPTH:
        raise UnreadableJsonError("too_deep")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UnreadableJsonError("not_json")
        return {spelled(key): spelled(inner, depth=depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [spelled(inner, depth=depth + 1) for inner in value]
    raise UnreadableJsonError("not_json")


# messages

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})


def content(value: Json) -> str | None:
    """Content as text: a string as it stands, text parts joined without anything between, null as null.

    Raises BadMessageError for anything else, also for an image, audio or file part: nothing here could train on it.
    """
    if value is None or (isinstance(value, str) and not isinstance(value, Number)):
        return value
    if not isinstance(value, list):
        raise BadMessageError("bad_content", "The content of a message is neither text, nor a list of parts, nor null.")
    texts: list[str] = []
    for part in value:
        inner = part
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind == "refusal":
                inner = part.get("refusal")
            elif kind in _TEXT_PARTS:
                inner = part.get("text")
            else:
                raise BadMessageError(
                    "unsupported_content", "A message has a part that is not text (an image, audio or a file)."
                )
        if not isinstance(inner, str) or isinstance(inner, Number):
            raise BadMessageError("bad_content", "A part of a message has no text.")
        texts.append(inner)
    return "".join(texts)


def arguments(value: Json) -> str:
    """A tool call's arguments in their one form: canonical JSON as a string; an unparsable string as it stands."""
    if isinstance(value, str) and not isinstance(value, Number):
        try:
            parsed = loads(value)
            return dumps(parsed)
        except UnreadableJsonError:
            return value
    return dumps({} if value is None else value)


def tool_call(value: Json) -> dict[str, Any]:
    """One tool call as `{id?, type: "function", function: {name, arguments}}`. Raises BadMessageError.

    The bare form `{name, arguments}` is taken too.
    """
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name or isinstance(name, Number):
        raise BadMessageError("bad_tool_call", "A tool call has no function name.")
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments(function.get("arguments"))},
    }
    call_id = value.get("id")
    if call_id is not None:
        call["id"] = _word(call_id, "The id of a tool call is no text.")
    return call


def _word(value: Json, sentence: str) -> str:
    if isinstance(value, str) and not isinstance(value, Number):
        return value
    raise BadMessageError("bad_tool_call", sentence)


def message(value: Json) -> Message:
    """One message in the form in which a prompt stores it: role, content, name?, tool_calls?, tool_call_id?.

    Other keys are dropped, and so are keys whose value is null and empty `tool_calls`. `content` is always there; it
    may be null only beside tool calls. Raises BadMessageError.
    """
    if not isinstance(value, dict):
        raise BadMessageError("bad_message", "A message is not an object with role and content.")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadMessageError("unknown_role", f"A message has a role that is none of {', '.join(sorted(ROLES))}.")
    result: Message = {"role": role, "content": content(value.get("content"))}
    calls = value.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise BadMessageError("bad_tool_call", "Only an assistant message can carry tool_calls, as a list.")
        result["tool_calls"] = [tool_call(call) for call in calls]
    elif result["content"] is None:
        raise BadMessageError("no_content", "A message has neither content nor tool calls.")
    if role == "tool" and value.get("tool_call_id") is not None:
        result["tool_call_id"] = _word(value["tool_call_id"], "The tool_call_id of a message is no text.")
    name = value.get("name")
    if isinstance(name, str) and name:
        result["name"] = str(name)
    return result


def answer(value: Json) -> Message:
    """An assistant message, or plain text, as an answer is stored: role, content, tool_calls?.

    Raises BadMessageError.
    """
    if isinstance(value, str) and not isinstance(value, Number):
        return {"role": "assistant", "content": value}
    if isinstance(value, dict) and "role" not in value:
        value = {**value, "role": "assistant"}
    result = message(value)
    if result["role"] != "assistant":
        raise BadMessageError("unknown_role", "An answer is not the message of an assistant.")
    result.pop("name", None)
    return result


def tools(value: Json) -> list[Json] | None:
    """The tools on offer as a list of objects, null for none. Raises BadMessageError."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadMessageError("bad_tools", "`tools` is not a list of objects.")
    return value


# keys


def key(text: str) -> int:
    """Hash key of a text: xxh3, 64 bits, signed, since Delta has no unsigned integers."""
    unsigned = int(xxhash.xxh3_64_intdigest(text.encode("utf-8")))
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def keys(texts: Iterable[bytes | None]) -> pl.Series:
    """`key` of many UTF-8 texts as an Int64 column, null where there is none."""
    digest = xxhash.xxh3_64_intdigest
    hashes = [None if text is None else digest(text) for text in texts]
    return pl.Series(hashes, dtype=pl.UInt64).reinterpret(signed=True)


def text_key(messages_text: str, tools_text: str | None) -> int:
    """Exact key of a prompt from the canonical texts of its messages and tools."""
    return key(joined_text(messages_text, tools_text))


def joined_text(messages_text: str, tools_text: str | None) -> str:
    """What `text_key` hashes."""
    return f"{messages_text}\x1e{tools_text or ''}"


IdentityKind: TypeAlias = Literal["request", "row_id", "position"]


def identity(kind: IdentityKind, source: str, *parts: str | bytes) -> str:
    """Identity of a sample in a workspace (rules.md, Samples and Import): 32 hex digits of blake2b.

    `parts`: the request id; the row id; or import id, position and the row's canonical text.
    """
    digest = hashlib.blake2b(digest_size=16, person=_PERSONS[kind])
    for part in (source, *parts):
        data = part.encode("utf-8") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))  # so that no two lists of parts read the same
        digest.update(data)
    return digest.hexdigest()


def positions(source: str, import_id: str) -> Callable[[int, bytes], str]:
    """`identity("position", source, import_id, position, text)` of many rows of one import."""
    start = hashlib.blake2b(digest_size=16, person=_PERSONS["position"])
    for part in (source.encode("utf-8"), import_id.encode("utf-8")):
        start.update(len(part).to_bytes(8, "little") + part)

    def of(position: int, text: bytes) -> str:
        digits = b"%d" % position
        digest = start.copy()
        digest.update(len(digits).to_bytes(8, "little") + digits + len(text).to_bytes(8, "little") + text)
        return digest.hexdigest()

    return of


_PERSONS: Final[Mapping[IdentityKind, bytes]] = {
    "request": b"loop request",
    "row_id": b"loop row",
    "position": b"loop position",
}


def prompt_text(messages: Sequence[Message]) -> str:
    """What `fold_prompt` folds: role, text and tool calls of each canonical message, messages joined by \\x1e."""
    parts: list[str] = []
    for item in messages:
        part = f"{item['role']}\x1d{item['content'] or ''}"
        if "tool_calls" in item:
            part += "\x1d" + dumps([call["function"] for call in item["tool_calls"]])
        parts.append(part)
    return "\x1e".join(parts)


#: How `prompt_text` begins a message of each role, in bytes.
PROMPT_HEADS: Final[Mapping[str, bytes]] = {role: f"{role}\x1d".encode() for role in sorted(ROLES)}

#: Unicode punctuation, the backtick (a symbol to Unicode) and white space; the same in ASCII, and beyond it.
_FOLDED: Final = r"\p{P}`\s"
_FOLDED_ASCII: Final = b" \t\n\v\f\r!\"#%&'()*,-./:;?@[\\]_`{}"
_FOLDED_BEYOND: Final = r"[[\p{P}\s]--[\x00-\x7f]]+"
#: Characters that NFKC leaves as they are in every company: a prompt of these alone need not be normalised.
_STABLE: Final = (
    r"\x00-\x7f\u{c0}-\u{131}\u{134}-\u{13e}\u{141}-\u{148}\u{14a}-\u{17e}\u{400}-\u{482}\u{48a}-\u{4ff}"
    r"\u{2012}-\u{2016}\u{2018}-\u{2023}\u{3041}-\u{3096}\u{30a1}-\u{30fa}\u{4e00}-\u{9fff}\u{ac00}-\u{d7a3}"
    r"\u{1f300}-\u{1f64f}\u{1f680}-\u{1f6c5}\u{1f900}-\u{1f9ff}"
)
_UNSTABLE: Final = rf"[^{_STABLE}]|[\p{{Changes_When_Lowercased}}--[\x00-\x7f]]"
_LOWER_ASCII: Final = bytes(range(256)).lower()


def fold_prompt(prompts: pl.Series) -> pl.Series:
    """Normalised prompts (rules.md, Held back) of what `prompt_text` gave; same length and order, no nulls.

    NFKC, lower case, then punctuation and white space go, except that between two digits they leave one \\x1f, so that
    1.5 stays apart from 15. A prompt of which only roles would be left keeps its lower-cased text.
    """
    return pl.Series(prompts.name, _folded(prompts), dtype=pl.Binary).cast(pl.String)


def _folded(prompts: pl.Series) -> list[bytes]:
    # Few prompts hold a letter that NFKC or lower-casing changes beyond ASCII; `translate` lowers that of all below.
    normal = prompts
    unstable = prompts.str.contains(_UNSTABLE)
    if unstable.any():
        places = unstable.arg_true()
        lowered = prompts.gather(places).str.normalize("NFKC").str.to_lowercase()
        normal = prompts.clone().scatter(places, lowered)
    pair, mark = rf"(\d)[{_FOLDED}]+(\d)", "${1}\x1f${2}"
    text, kept = pl.col("text"), pl.col("kept")
    frame = normal.rename("text").to_frame()
    # Two questions at a time: for a handful of prompts asking takes longer than answering.
    frame = frame.select(
        kept=text.str.replace_all(pair, mark),
        bare=~text.str.contains(rf"\x1d[{_FOLDED}]*[^{_FOLDED}\x1d\x1e]"),
    ).select(
        "kept",
        "bare",
        folded=kept.str.replace_all(_FOLDED_BEYOND, "").cast(pl.Binary),
        shared=kept.str.contains(rf"\x1f\d[{_FOLDED}]+\d"),
    )
    folded = frame["folded"].to_list()
    # Twice where two pairs share a digit, which cannot match in one pass: the second follows the mark of the first.
    if frame["shared"].any():
        places = frame["shared"].arg_true()
        again = frame["kept"].gather(places).str.replace_all(pair, mark).str.replace_all(_FOLDED_BEYOND, "")
        for place, more in zip(places, again.cast(pl.Binary), strict=True):
            folded[place] = more
    # Most of what goes is ASCII, and bytes lose it ten times faster than a pattern does.
    result = [one.translate(_LOWER_ASCII, _FOLDED_ASCII) for one in folded]
    for place in frame["bare"].arg_true():
        result[place] = normal[place].encode("utf-8").lower()
    return result


def prompt_keys(prompts: pl.Series) -> pl.Series:
    """Hash keys (Int64) of the normalised prompts of what `prompt_text` gave."""
    return keys(_folded(prompts)).rename(prompts.name)


def prompt_key(messages: Sequence[Message]) -> int:
    """`prompt_keys` of one prompt; the same implementation, so that it cannot disagree."""
    return int(prompt_keys(pl.Series([prompt_text(messages)]))[0])
