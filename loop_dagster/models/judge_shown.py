"""How a conversation and its answers are shown to a judge that is a model, so that nothing in them can speak for us.

Belongs here: which parts of a message are shown, the JSON lines that they become, the fence around them. Does not
belong here: what the judge is told about them (`judge_openai.py`).

Every text stands in one line of JSON between two lines that name the fence, a word drawn anew for each call. Inside the
JSON nothing is left that a chat template or a reader could take for more than text: marks of templates (`<|im_end|>`,
`[INST]`), control characters, invisible and direction-changing ones are written as JSON escapes, which say the same.
"""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loop_dagster.models.judge import Case, Message

Block = tuple[str, Any]

#: Of a message of the conversation; whatever else it carries could tell where it comes from.
_OF_MESSAGE = ("role", "name", "content", "tool_calls", "tool_call_id")
#: Joins letters of many scripts and emojis, and changes nothing else.
_JOINERS = frozenset("\u200c\u200d")
#: What the marks of chat templates begin with. No JSON outside of its strings has any of these.
_MARK = re.compile(r"[<◁]|\[(?=/?[A-Z_]{3,}\])")


def blocks(case: Case, answers: Mapping[str, Message]) -> list[Block]:
    """(title, value) of everything that a judge is shown, in order."""
    shown: list[Block] = [("CONVERSATION", [_part(message, _OF_MESSAGE) for message in case.messages])]
    if case.tools:
        shown.append(("TOOLS", list(case.tools)))
    if case.right_answer is not None:
        shown.append(("RIGHT ANSWER", _said(case.right_answer)))
    return shown + [(title, _said(answer)) for title, answer in answers.items()]


def fenced(shown: Sequence[Block]) -> tuple[str, str]:
    """(fence, text): each block between `BEGIN <fence> <title>` and `END <fence>`, the fence in none of the texts."""
    lines = [(title, escaped(value)) for title, value in shown]
    fence = word_not_in("".join(line for _, line in lines))
    return fence, "\n\n".join(f"BEGIN {fence} {title}\n{line}\nEND {fence}" for title, line in lines)


def word_not_in(text: str) -> str:
    """A word drawn anew that the text does not hold."""
    word = secrets.token_hex(8)
    while word in text:
        word = secrets.token_hex(8)
    return word


def escaped(value: Any) -> str:
    """One line of JSON that reads as `value`."""
    line = _MARK.sub(lambda mark: _escape(mark[0]), json.dumps(value, ensure_ascii=False))
    if line.isprintable():
        return line
    return "".join(sign if sign.isprintable() or _harmless(sign) else _escape(sign) for sign in line)


def texts(value: Any) -> Iterator[str]:
    """Every text in a value that is shown: what a judge could quote."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from texts(item)


def _harmless(sign: str) -> bool:
    """Whether a character that is not printable is a space of some width, or a joiner."""
    return sign in _JOINERS or unicodedata.category(sign) == "Zs"


def _escape(sign: str) -> str:
    """As JSON escapes: `\\u003c`; two for a character beyond the first 65,536."""
    return f"\\u{ord(sign):04x}" if sign.isascii() else json.dumps(sign)[1:-1]


def _said(message: Message) -> dict[str, Any]:
    """What an answer says, and nothing that could tell whose it is: ids of calls are an engine's own."""
    said = _part(message, ("content", "tool_calls"))
    if "tool_calls" in said:
        said["tool_calls"] = [_part(call.get("function", call), ("name", "arguments")) for call in said["tool_calls"]]
    return said


def _part(message: Message, keys: Sequence[str]) -> dict[str, Any]:
    return {key: message[key] for key in keys if message.get(key) is not None}
