"""Secrets and personal numbers out of a conversation before anything of it is stored.

Belongs here: the exact redactor of one decoded string or one JSON value, and the columnar prefilter that finds the few
rows for which it must run. Does not belong here: when it runs (store/importing.py, the gateway), what a message is.

Patterns run over decoded strings, never over JSON text, in which an escape hides a secret (`pat\\u0040example.org`) or
glues a letter to it (`\\nfoo@…`). A string may still *contain* JSON text, as a tool's result does; the escapes there
are looked through as well. The kinds are those of rules.md; order numbers, versions, hashes, UUIDs, prices, telephone
numbers, dates, times and MAC addresses stay.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import compress
from typing import Any, Final, Literal, TypeAlias

import polars as pl

from loop_dagster.rules import secret_patterns as patterns
from loop_dagster.rules.canonical import Json, Number, UnreadableJsonError, dumps, loads

Kind: TypeAlias = Literal["email", "api_key", "aws_key", "jwt", "private_key", "card", "ssn", "ip"]
KINDS: Final[tuple[Kind, ...]] = ("email", "api_key", "aws_key", "jwt", "private_key", "card", "ssn", "ip")
Counts: TypeAlias = dict[Kind, int]


def marker(kind: Kind) -> str:
    """What stands in place of a secret."""
    return f"[redacted:{kind}]"


def suspect_expression(text: pl.Expr) -> pl.Expr:
    """Whether `redact` could change a text; true for every text that it would change, and for a few more.

    Holds for canonical JSON text of messages too: true whenever a string inside would be changed.
    """
    return text.str.contains(patterns.SUSPECT).fill_null(value=False)


def suspects(texts: pl.Series) -> pl.Series:
    """Boolean mask of `suspect_expression`, same length; null counts as clean."""
    return pl.DataFrame({"text": texts}).select(suspect_expression(pl.col("text"))).to_series().rename(texts.name)


def redact(text: str) -> tuple[str, Counts]:
    """The text with every secret replaced by its marker, and how many of each kind there were.

    Doing it again changes nothing.
    """
    changed, counts = _redact_once(text)
    if not counts:
        return text, {}
    while True:  # a marker can leave something beside it that now stands alone
        changed, found = _redact_once(changed)
        if not found:
            return changed, dict(counts)
        counts += found


def redactions(texts: Iterable[str]) -> dict[str, tuple[str, Counts]]:
    """By text what `redact` gives for it, of those texts that it changes; columns find the steps that each needs."""
    given = pl.Series(list(dict.fromkeys(texts)), dtype=pl.String)
    pending = {text: text for text in given.filter(suspects(given))}
    changed: dict[str, tuple[str, Counter[Kind]]] = {}
    looks = [pl.col("text").str.contains(look).alias(look) for look in patterns.SUSPECTS]
    escape = pl.col("text").str.contains(patterns.SUSPECT_ESCAPE).alias("escape")
    while pending:
        due = pl.DataFrame({"text": list(pending.values())}, schema={"text": pl.String}).select(escape, *looks)
        again: dict[str, str] = {}
        for (text, present), (escaped, *steps) in zip(pending.items(), due.iter_rows(), strict=True):
            if escaped or any(steps):
                clean, found = _redact_once(present, _STEPS if escaped else tuple(compress(_STEPS, steps)))
                if found:
                    again[text] = clean
                    changed[text] = clean, found + changed[text][1] if text in changed else found
        pending = again
    return {text: (clean, dict(counts)) for text, (clean, counts) in changed.items()}


def _redact_once(text: str, steps: tuple[_Step, ...] | None = None) -> tuple[str, Counter[Kind]]:
    changed, counts = _redact_plain(text, _STEPS if steps is None else steps)
    if "\\u00" in changed or "\\/" in changed:
        # JSON text inside the string: look at it without the escapes of plain characters, and keep that only if a
        # secret was behind them.
        seen, hidden = _redact_plain(patterns.ESCAPE.sub(_unescape, changed), _STEPS)
        if hidden:
            return seen, counts + hidden
    return changed, counts


def _unescape(match: re.Match[str]) -> str:
    if match[1] is None:
        return "/"
    sign = chr(int(match[1], 16))
    return match[0] if sign in '"\\\x7f' else sign


def _redact_plain(text: str, steps: tuple[_Step, ...]) -> tuple[str, Counter[Kind]]:
    counts: Counter[Kind] = Counter()

    def put(kind: Kind, before: str = "", after: str = "") -> str:
        counts[kind] += 1
        return f"{before}{marker(kind)}{after}"

    lowered = text.lower()
    for may_hold, pattern, replace in steps:
        if may_hold(text, lowered):
            text = _sub_near(pattern, partial(replace, put), text)
    return text, counts


def _sub_near(pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str) -> str:
    """`pattern.sub`, but only where `patterns.NEAR` says that a match could be replaced; looking at the rest of a text
    costs far more."""
    if pattern not in patterns.NEAR:
        return pattern.sub(replace, text)
    needed, signs = patterns.NEAR[pattern]
    likely = [match.span() for match in needed.finditer(text)]
    if not likely:
        return text
    # No match goes over a sign that none can have: what follows it is matched as it is when the whole text is read.
    start = len(text[: likely[0][0]].rstrip(signs))
    result: list[str] = []
    position = 0
    for match in pattern.finditer(text, start):
        if match.start() >= likely[-1][1]:
            break
        result += text[position : match.start()], replace(match)
        position = match.end()
    return "".join([*result, text[position:]])


_Put: TypeAlias = Callable[..., str]


def _whole(kind: Kind, put: _Put, match: re.Match[str]) -> str:
    return put(kind)


def _captured(kind: Kind, put: _Put, match: re.Match[str]) -> str:
    """The marker in place of the group that matched; what stands around it is context and stays."""
    whole, (start, end), offset = match[0], match.span(match.lastindex or 0), match.start()
    return put(kind, whole[: start - offset], whole[end - offset :])


def _api_key(put: _Put, match: re.Match[str]) -> str:
    return match[0] if _is_words(match[0]) else put("api_key")


def _is_words(key: str) -> bool:
    """Whether what begins like an OpenAI key is words with hyphens, such as sk-learn-something-long."""
    if patterns.VENDOR_KEY.match(key) or not key.startswith("sk-"):
        return False
    parts = key[3:].split("-")
    return len(parts) > 1 and all(len(part) < 16 and part.isalpha() and part.islower() for part in parts)


def _email(put: _Put, match: re.Match[str]) -> str:
    if match[2].rpartition(".")[2].lower() in patterns.FILE_ENDS:
        return match[0]
    # The first letter after a backslash belongs to an escape such as \n, not to the address.
    local, kept = match[1], 0
    if match.start() and match.string[match.start() - 1] == "\\":
        kept = 5 if re.match(r"u[0-9A-Fa-f]{4}", local) else int(local[0] in "nrtbf")
    return put("email", match[0][:kept]) if len(local) > kept else match[0]


def _ssn(put: _Put, match: re.Match[str]) -> str:
    parts = [part for part in match.groups() if part is not None]
    if not parts:
        return match[0]  # a UUID
    area, group, serial = parts
    if area in {"000", "666"} or area[0] == "9" or group == "00" or serial == "0000":
        return match[0]
    first = next(index for index in (1, 4) if match[index] is not None)
    return put("ssn", match[0][: match.start(first) - match.start()])


# card numbers


_DOUBLED: Final = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)


def is_card(digits: str) -> bool:
    """Whether 13 to 19 digits have an issuer's prefix and length and pass the Luhn check."""
    size = len(digits)
    if not any(size in sizes and low <= digits[: len(low)] <= high for low, high, sizes in patterns.ISSUERS):
        return False
    odd = sum(int(digit) for digit in digits[-1::-2])
    even = sum(_DOUBLED[int(digit)] for digit in digits[-2::-2])
    return (odd + even) % 10 == 0


def _glued(text: str, start: int, step: int) -> bool:
    """Whether digits stand in a hash or an id: next to letters that are no word of their own."""
    end = start
    while 0 <= end < len(text) and text[end].isalpha() and abs(end - start) < 40:
        end += step
    letters = text[start:end] if step > 0 else text[end + 1 : start + 1]
    if not letters:
        return False
    if step < 0 and end >= 0 and text[end] == "\\" and letters[0] in "nrtbf":
        letters = letters[1:]  # an escape such as \n in JSON text
        if not letters:
            return False
    beyond = text[end] if 0 <= end < len(text) else " "
    return beyond.isdigit() or len(letters) < 3 or set(letters.lower()) <= set("abcdef")


def _card(put: _Put, match: re.Match[str]) -> str:
    run = match[1]
    if run is None or len(run) < 13:
        return match[0]
    text, start, end = match.string, match.start(), match.end()
    groups = [(found.start(), found.end()) for found in patterns.GROUP.finditer(run)]
    digits, loose = sum(last - first for first, last in groups), True
    before = text[start - 1] if start else " "
    if before == "+" and len(groups) == 1 and digits <= 15:
        return run  # a telephone number
    if before == "+" and len(groups) > 1:
        groups, loose = groups[1:], False  # one in groups, with something after it perhaps
    if _glued(text, start - 1, -1) or (before in ".," and start > 1 and text[start - 2].isdigit()):
        groups = groups[1:]
    if groups and _glued(text, end, 1):
        groups = groups[:-1]
    spans = _card_spans(run, groups, loose=loose)
    result, position = "", 0
    for first, last in spans:
        result += put("card", run[position:first])
        position = last
    return result + run[position:]


def _card_spans(run: str, groups: list[tuple[int, int]], *, loose: bool) -> list[tuple[int, int]]:
    """Where cards lie in a run of digit groups: whole groups of it in a grouping that cards have, or, if `loose`, the
    whole run in any grouping."""

    def digits(chosen: list[tuple[int, int]]) -> str:
        return "".join(run[first:last] for first, last in chosen)

    lengths = tuple(last - first for first, last in groups)
    # A list of small numbers is none, whatever its digits say.
    if loose and groups and sum(lengths) <= 19 and max(lengths) >= 3 and is_card(digits(groups)):
        return [(groups[0][0], groups[-1][1])]
    spans, index = [], 0
    while index < len(groups):
        taken = 0
        if 13 <= lengths[index] <= 19:
            taken = 1 if is_card(digits(groups[index : index + 1])) else 0
        else:
            for grouping in patterns.GROUPINGS:
                size = len(grouping)
                if lengths[index : index + size] == grouping and is_card(digits(groups[index : index + size])):
                    taken = size
                    break
        if taken:
            spans.append((groups[index][0], groups[index + taken - 1][1]))
        index += taken or 1
    return spans


# addresses


def _ipv6(put: _Put, match: re.Match[str]) -> str:
    run, text = match[0], match.string
    if run.count(":") < 2:
        return run
    address, zone, name = run.partition("%")
    head = len(address) - len(address.lstrip("."))
    before = text[match.start() - 1] if match.start() else " "
    escaped = match.start() > 1 and text[match.start() - 2] == "\\" and before in "nrtbf"
    if not head and before.isalnum() and not escaped:
        head = address.index(":") + 1  # the end of a word, as in addr:fe80::1 or std::deque
    elif match.start() and before == "\\" and address[:1] in ("b", "f"):
        head = 1
    tail = len(address)
    after = text[match.end()] if match.end() < len(text) else " "
    if not zone and after.isalnum() and address[-1] not in ".:":
        return run
    while tail > head and (address[tail - 1] == "." or (address[tail - 1] == ":" and address[tail - 2] != ":")):
        tail -= 1
    if not _is_ipv6(address[head:tail]):
        return run
    rest = "" if tail == len(address) else address[tail:] + zone + name
    return put("ip", address[:head], rest)


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    groups = [group for group in address.split(":") if group]
    if "::" not in address:
        return not all(len(group) == 2 for group in groups)  # eight pairs are a hardware address
    if address == "::1" or len(groups) >= 3:
        return True
    # Abc::Def and the slice 1::2 are code.
    return any(len(group) >= 3 for group in groups) and any(sign.isdigit() for sign in address)


def _ipv4(put: _Put, match: re.Match[str]) -> str:
    if any(int(part) > 255 for part in match.groups()):
        return match[0]
    before = match.string[max(0, match.start() - 40) : match.start()]
    return match[0] if patterns.VERSION_BEFORE.search(before) else put("ip")


# the steps, in order: a later pattern must not see the inside of an earlier secret

#: By the sign that each has, so that most texts are cleared by looking for the sign alone.
_KEY_SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "_": (
        *("_live_", "_test_", "whsec_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "hf_", "npm_"),
        *("dop_v1_", "loop_", "shpat_", "shpca_", "shppa_", "shpss_", "lin_api_", "ntn_", "gsk_", "r8_"),
    ),
    "-": (
        *("sk-", "xox", "xapp-", "glpat-", "glptt-", "gldt-", "glrt-", "glcbt-", "glft-", "glsoat-", "glagent-"),
        *("glimt-", "GOCSPX-", "pypi-", "xai-", "pplx-", "key-"),
    ),
    "": ("AIza", "ya29.", "SG.", "dapi", "SK"),
}


def _has_key_sign(text: str, _: str) -> bool:
    for sign, beginnings in _KEY_SIGNS.items():
        if sign in text:
            for beginning in beginnings:
                if beginning in text:
                    return True
    return ":" in text and patterns.BOT_KEY.search(text) is not None


def _has_ssn(text: str, lowered: str) -> bool:
    return patterns.SSN_LIKE.search(text) is not None or "ssn" in lowered or "social security" in lowered


#: May the text hold this kind (a cheap look, given the lower-cased text too), pattern, what stands for a match.
_Step: TypeAlias = tuple[Callable[[str, str], bool], re.Pattern[str], Callable[[_Put, re.Match[str]], str]]
_STEPS: Final[tuple[_Step, ...]] = (
    (lambda text, _: "PRIVATE KEY" in text, patterns.PRIVATE_KEY, partial(_whole, "private_key")),
    (lambda text, _: "eyJ" in text, patterns.JWT, partial(_whole, "jwt")),
    (lambda text, _: "AKIA" in text or "ASIA" in text, patterns.AWS_ID, partial(_whole, "aws_key")),
    (lambda _, low: "secret" in low or "token" in low, patterns.AWS_SECRET, partial(_captured, "aws_key")),
    (_has_key_sign, patterns.API_KEY, _api_key),
    (
        lambda _, low: any(word in low for word in ("key", "token", "secret", "bearer", "basic")),
        patterns.IN_CONTEXT,
        partial(_captured, "api_key"),
    ),
    (lambda text, _: "@" in text or "%40" in text or "&#" in text, patterns.EMAIL, _email),
    (_has_ssn, patterns.SSN, _ssn),
    (lambda _text, _low: True, patterns.DIGITS, _card),
    (lambda text, _: "::" in text or text.count(":") >= 6, patterns.IPV6, _ipv6),
    (lambda text, _: text.count(".") >= 3, patterns.IPV4, _ipv4),
)


# JSON values


def redact_value(value: Json, *, key: str | None = None) -> tuple[Json, Counts]:
    """A JSON value of canonical.py with every string, object key and number in it redacted, and the counts.

    A number that is a secret becomes its marker, a string. The key of an object is context for its value, as the
    words before it are in a text: `{"version": "1.2.3.4"}` stays, `{"ssn": 123456789}` does not.
    """
    counts: Counter[Kind] = Counter()
    return _walk(value, key, counts), dict(counts)


def _walk(value: Json, key: str | None, counts: Counter[Kind]) -> Json:
    if isinstance(value, Number):
        changed = _in_context(_plain_number(value), key, counts)
        return changed if "[redacted:" in changed else value
    if isinstance(value, str):
        return _in_context(value, key, counts)
    if isinstance(value, list):
        return [_walk(item, key, counts) for item in value]
    if isinstance(value, dict):
        result: dict[str, Json] = {}
        for name, item in value.items():
            clean, found = redact(name)
            counts.update(found)
            unique, number = clean, 2
            while found and (unique in result or unique in value):
                unique, number = f"{clean} {number}", number + 1
            result[unique] = _walk(item, name, counts)
        return result
    return value


def _plain_number(number: Number) -> str:
    """The digits of a whole number that was spelled with a point or an exponent, else its spelling."""
    match = patterns.INTEGRAL.fullmatch(number)
    if match is None:
        return str(number)
    if match[1]:
        return match[1]
    mantissa, _, exponent = number.lower().lstrip("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    shift = int(exponent)
    fraction = fraction.rstrip("0") if shift < len(fraction) else fraction
    return whole + fraction.ljust(shift, "0") if len(fraction) <= shift else str(number)


def _in_context(text: str, key: str | None, counts: Counter[Kind]) -> str:
    if key is not None and patterns.CONTEXT.search(key):
        prefix = f"{key}: "
        changed, found = redact(prefix + text)
        if changed.startswith(prefix):
            counts.update(found)
            return changed[len(prefix) :]
    changed, found = redact(text)
    counts.update(found)
    return changed


def redact_arguments(arguments: str) -> tuple[str, Counts]:
    """A tool call's stored arguments: decoded, redacted and encoded again where they are JSON, else as text."""
    try:
        value = loads(arguments)
    except UnreadableJsonError:
        return redact(arguments)
    clean, counts = redact_value(value)
    return (dumps(clean), counts) if counts else (arguments, counts)


def redact_message(
    message: Mapping[str, Any], *, known: Mapping[str, tuple[str, Counts]] | None = None
) -> tuple[dict[str, Any], Counts]:
    """A canonical message with text, name, ids and arguments redacted, and the counts.

    `known` are the `redactions` of texts with the content of this message among them, which is not looked at again.
    """
    counts: Counter[Kind] = Counter()
    result: dict[str, Any] = {}
    for name, value in message.items():
        if name == "role" or value is None:
            result[name] = value
        elif name == "content" and known is not None:
            result[name], found = known.get(value, (value, None))
            if found:
                counts.update(found)
        elif name == "tool_calls":
            result[name] = [_redact_call(call, counts) for call in value]
        else:
            result[name] = _walk(value, None, counts)
    return result, dict(counts)


def _redact_call(call: Mapping[str, Any], counts: Counter[Kind]) -> dict[str, Any]:
    arguments, found = redact_arguments(call["function"]["arguments"])
    counts.update(found)
    function = {**_walk({**call["function"], "arguments": ""}, None, counts), "arguments": arguments}
    return {
        **_walk({part: item for part, item in call.items() if part != "function"}, None, counts),
        "function": function,
    }
