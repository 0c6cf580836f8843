"""What is wrong with a value that a person gave, in one sentence that names the field and never the value.

Belongs here: the words for each way in which a value can miss its type or its range. Does not belong here: which types
and ranges there are (the models themselves), unknown fields, which each place names with those that it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: How a value has to be, by the beginning of the kind of its error; the longest that fits counts.
_NEEDED: Final[Mapping[str, str]] = {
    "string": "must be a text",
    "int": "must be a whole number",
    "float": "must be a number",
    "finite_number": "must be a number that is finite",
    "bool": "must be true or false",
    "list": "must be a list",
    "tuple": "must be a list",
    "set": "must be a list",
    "frozen_set": "must be a list",
    "iterable": "must be a list",
    "dict": "must be an object",
    "model": "must be an object",
    "mapping": "must be an object",
    "datetime": "must be a time with its zone, as in 2026-01-31T00:00:00Z",
    "date": "must be a time with its zone, as in 2026-01-31T00:00:00Z",
    "timezone": "must be a time with its zone, as in 2026-01-31T00:00:00Z",
    "none_required": "must be null",
    "missing": "is needed",
    "string_pattern_mismatch": "has a character that cannot be in it",
    "string_unicode": "must be text in UTF-8",
}
#: The same with what the range is.
_RANGES: Final[Mapping[str, str]] = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "string_too_short": "must have at least {min_length:,} characters",
    "string_too_long": "must have at most {max_length:,} characters",
    "too_short": "must have at least {min_length:,} entries",
    "too_long": "must have at most {max_length:,} entries",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}
_OWN: Final = ("value_error", "assertion_error")


def sentence_of(error: Mapping[str, Any], nameless: str = "The value") -> str:
    """The sentence about one error of a model (`type`, `loc`, `msg`, `ctx`); `nameless` stands for no field."""
    where = ".".join(str(part) for part in error["loc"]) or nameless
    kind, limits = str(error["type"]), error.get("ctx", {})
    if kind in _OWN:  # a sentence of ours, after the library's word for where it comes from
        return f"{where}: {str(error['msg']).partition(', ')[2] or error['msg']}."
    if kind in ("string_too_short", "too_short") and limits.get("min_length") == 1:
        return f"{where} must not be empty."
    if kind in _RANGES and limits:
        return f"{where} {_RANGES[kind].format(**limits)}."
    fitting = [name for name in _NEEDED if kind == name or kind.startswith(f"{name}_")]
    return f"{where} {_NEEDED[max(fitting, key=len)] if fitting else 'is not what is needed here'}."
