"""What an error may repeat of the request that it is about: everything but secrets.

Belongs here: the one way that an answer to a failure goes through before anybody reads it, whatever its message quotes.
Does not belong here: what a secret is (redaction.py), the failures and their sentences (errors/).
"""

from __future__ import annotations

import re
from typing import Any, Final

from loop_dagster.rules.redaction import redact

#: A value as messages quote it. It is looked at alone first, or the mark before an address would count as part of it.
_QUOTED: Final = re.compile(r"'([^'\n]{4,})'|\"([^\"\n]{4,})\"")


def without_secrets(text: str) -> str:
    """A message in which every secret is its marker, `[redacted:<kind>]`, and all else stands as it was."""
    return redact(_QUOTED.sub(_inside, text))[0]


def answer_without_secrets(body: Any) -> Any:
    """The same for every text, name of a field and whole number of an error's envelope."""
    if isinstance(body, str):
        return without_secrets(body)
    if isinstance(body, dict):
        return {without_secrets(str(name)): answer_without_secrets(value) for name, value in body.items()}
    if isinstance(body, list | tuple):
        return [answer_without_secrets(value) for value in body]
    if isinstance(body, int) and not isinstance(body, bool) and str(body) != (shown := without_secrets(str(body))):
        return shown
    return body


def shown(value: object, most: int) -> str:
    """A value that was given, as a message quotes it: without secrets, and cut only then, since half of a secret looks
    like none."""
    text = repr(without_secrets(value)) if isinstance(value, str) else without_secrets(repr(value))
    return text[:most]


def _inside(match: re.Match[str]) -> str:
    return match[0][0] + redact(match[1] or match[2])[0] + match[0][-1]
