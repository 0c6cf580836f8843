"""What a chat completion asks for, and its answer's text as it comes, token by token.

Belongs here: checking the body of a call, and cutting text for a stream. Free of HTTP. Does not belong here: status
codes and events (`serve.py`), the chat template (`template.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loop_dagster.errors import BadRequest
from loop_dagster.models.engine import Request
from loop_dagster.models.template import Template
from loop_dagster.rules import canonical

_CALL = "<tool_call>"
#: Fields whose effect this engine does not have, with the values that ask for none.
_NOT_HERE: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}


def request_of(body: Mapping[str, Any], *, most_tokens: int) -> tuple[Request, tuple[str, ...]]:
    """(request, stop texts) of a chat completion's body. Raises BadRequest naming the field.

    Without `temperature` the answer is greedy; without `max_tokens` it has up to `most_tokens`.
    """
    for field, harmless in _NOT_HERE.items():
        if body.get(field) is not None and body[field] not in harmless:
            raise BadRequest(f"{field} cannot be asked of this engine; leave it out.")
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message.")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest("tools must be a list.")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise BadRequest("tool_choice can be auto or none; this engine forces no call.")
    try:
        read = [canonical.message(message) for message in messages]
        offered = canonical.tools(tools) if tools and choice != "none" else None
    except (canonical.BadMessageError, canonical.UnreadableJsonError) as error:
        raise BadRequest(error.sentence) from None
    asked = Request(
        key="",
        messages=read,
        tools=offered,
        max_new_tokens=int(_number(body, ("max_completion_tokens", "max_tokens"), 1, 1_000_000, most_tokens)),
        temperature=_number(body, ("temperature",), 0, 2, 0.0),
        top_p=_number(body, ("top_p",), 0, 1, 1.0),
        seed=_seed(body.get("seed")),
    )
    return asked, _stops(body.get("stop"))


def _number(body: Mapping[str, Any], fields: Sequence[str], lowest: float, highest: float, default: float) -> float:
    for field in fields:
        value = body.get(field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            raise BadRequest(f"{field} must be a number from {lowest:g} to {highest:g}.")
        return float(value)
    return default


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest("seed must be an integer.")
    return value % 2**63


def _stops(value: Any) -> tuple[str, ...]:
    stops = (
        (value,)
        if isinstance(value, str)
        else tuple(value)
        if isinstance(value, list)
        else ()
        if value is None
        else None
    )
    if stops is None or len(stops) > 4 or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest("stop must be a text or a list of up to four texts.")
    return stops


class Cutter:
    """Gives out an answer's text as soon as nothing that follows can change it.

    Held back: half of a character, a text that may turn out a stop or a tool call, white space that the end would
    strip, and everything after a stop or a tool call began.
    """

    def __init__(self, template: Template, stops: Sequence[str]) -> None:
        self._tokenizer = template.tokenizer
        self._marks = (*stops, _CALL)
        self._tokens: list[int] = []
        self._from = self._read = 0
        self._text = self._given = ""

    def push(self, token: int) -> str:
        """Text that became certain with this token, often none."""
        self._tokens.append(token)
        self._decode()
        text = self._text.lstrip()
        end = min((at for mark in self._marks if (at := text.find(mark)) >= 0), default=len(text))
        if end == len(text):
            end -= max((n for mark in self._marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        sure = text[:end].rstrip()
        new = sure[len(self._given) :]
        self._given += new
        return new

    def rest(self, whole: str) -> str:
        """What of the whole content was not given out yet."""
        return whole[len(self._given) :]

    def _decode(self) -> None:
        """Add the text of the newest tokens, once they make whole characters.

        They are decoded together with those before them, since some tokenizers write a token differently at the start
        of a text; not with all of them, which would take longer with each token.
        """
        before = self._words(self._tokens[self._from : self._read])
        now = self._words(self._tokens[self._from :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._tokens)

    def _words(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
