"""Rows of a body, cut out of it and read one by one: one that cannot be read does not take the others with it.

Belongs here: finding the elements of one list in a body without reading them. Does not belong here: what a row becomes
(rules/shapes.py), files of rows, which never stand in memory as a whole (store/rowfiles.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from loop_dagster.rules import canonical
from loop_dagster.rules.shapes import Refusal

_BLANK: Final = b" \t\r\n"
#: Strings whole, the signs that structure JSON, and the quote of a string that has no end.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},:]|"', re.DOTALL)


def cut(raw: bytes, name: str, *, most: int) -> tuple[bytes, list[bytes]]:
    """The body with `0` in place of each element of its list `name`, and the elements as they were sent.

    Of more than `most` elements, one more comes back and the others are not looked for. Nothing is checked here: that
    the body is JSON shows when the rest is read and each element is.
    """
    kept: list[bytes] = []
    elements: list[bytes] = []
    copied = begin = depth = 0
    said, named, inside = b"", False, False
    for match in _TOKEN.finditer(raw):
        sign = match[0]
        ends = inside and ((sign == b"," and depth == 2) or (sign in (b"]", b"}") and depth == 2))
        if ends:
            element = raw[begin : match.start()].strip(_BLANK)
            if element:
                kept += [raw[copied:begin], b"0"]
                copied = match.start()
                elements.append(element)
                if len(elements) > most:
                    break
            begin = match.end()
        if sign == b":" and depth == 1:
            named = _is(said, name)
        elif sign == b"," and depth == 1:
            named = False
        elif sign in (b"[", b"{"):
            if named and depth == 1 and sign == b"[":
                begin, inside = match.end(), True
            depth += 1
        elif sign in (b"]", b"}"):
            depth -= 1
            inside = inside and depth > 1
        elif depth == 1:
            said = sign
    return b"".join([*kept, raw[copied:]]), elements


def read(elements: Sequence[bytes]) -> list[Any]:
    """Each element as `canonical.loads` gives it, or the Refusal of one that cannot be kept.

    Raises UnreadableJsonError for one that is no JSON: then the body is none either.
    """
    rows = []
    for element in elements:
        try:
            rows.append(canonical.loads(element, once=True))
        except canonical.UnreadableJsonError as error:
            if error.code in canonical.NO_JSON or not _is_json(element):  # one may be followed by the other
                raise canonical.UnreadableJsonError("not_json") from None
            rows.append(Refusal(error.code, error.sentence))
    return rows


def _is_json(element: bytes) -> bool:
    """Whether this is one JSON value, with NaN and the like counted as numbers; true of what is too deep to tell."""
    try:
        json.loads(element, parse_int=str, parse_float=str)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def _is(said: bytes, name: str) -> bool:
    try:
        return bool(canonical.loads(said) == name)
    except canonical.UnreadableJsonError:
        return False
