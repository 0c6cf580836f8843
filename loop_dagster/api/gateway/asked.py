"""The conversation that a call brings, in the one form in which samples are stored.

Belongs here: bodies of chat completions and of messages to canonical messages and tools. Does not belong here: answers
(answers.py), redaction (store/pages.py). What a sample cannot hold, such as an image, is refused, never left out in
silence: a sample without it would teach an answer to another question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from loop_dagster.api.gateway.upstreams import Shape
from loop_dagster.rules import canonical
from loop_dagster.rules.canonical import BadMessageError, Json, Message, UnreadableJsonError

#: Parts of a turn that a model wrote for itself.
_THOUGHTS: Final = frozenset({"thinking", "redacted_thinking"})

__all__ = ["Asked", "BadMessageError", "UnreadableJsonError", "anthropic_calls", "read_asked"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a model was asked: canonical messages and the tools on offer."""

    messages: list[Message]
    tools: list[Json] | None

    def __repr__(self) -> str:
        return f"Asked({len(self.messages)} messages)"


def read_asked(raw: bytes, shape: Shape) -> Asked:
    """The conversation in a body. Raises BadMessageError or UnreadableJsonError for what no sample can hold."""
    body = canonical.loads(raw)
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadMessageError("bad_message", "The body has no messages.")
    asked = _openai(body) if shape == "openai" else _anthropic(body)
    canonical.check(asked.messages)
    return asked


def _openai(body: Mapping[str, Json]) -> Asked:
    offered = body.get("tools")
    if not offered and isinstance(body.get("functions"), list):
        offered = [{"type": "function", "function": one} for one in body["functions"]]
    return Asked([canonical.message(one) for one in body["messages"]], canonical.tools(offered))


def _anthropic(body: Mapping[str, Json]) -> Asked:
    messages: list[Message] = []
    if body.get("system"):
        messages.append(canonical.message({"role": "system", "content": body["system"]}))
    for turn in body["messages"]:
        messages += [canonical.message(one) for one in _turn(turn)]
    offered = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                **({"description": tool["description"]} if tool.get("description") else {}),
                "parameters": tool["input_schema"],
            },
        }
        for tool in body.get("tools") or ()
        if isinstance(tool, dict) and "input_schema" in tool  # others run on the upstream's side
    ]
    return Asked(messages, canonical.tools(offered))


def _turn(turn: Json) -> Iterator[dict[str, Any]]:
    """One turn of Anthropic's form as one or more of OpenAI's: results of tools are turns of their own there."""
    if not isinstance(turn, dict):
        raise BadMessageError("bad_message", "A message is not an object with role and content.")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    blocks = [block for block in content if not (isinstance(block, dict) and block.get("type") in _THOUGHTS)]
    results = [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_result"]
    for result in results:
        yield {"role": "tool", "tool_call_id": result.get("tool_use_id"), "content": result.get("content") or ""}
    calls = anthropic_calls(blocks) if role == "assistant" else []
    taken = ("tool_result", "tool_use") if role == "assistant" else ("tool_result",)
    texts = [block for block in blocks if not (isinstance(block, dict) and block.get("type") in taken)]
    if texts or not (results or calls):
        yield {"role": role, "content": texts, **({"tool_calls": calls} if calls else {})}
    elif calls:
        yield {"role": role, "content": None, "tool_calls": calls}


def anthropic_calls(blocks: list[Json]) -> list[dict[str, Any]]:
    """The tool calls among blocks of an assistant's turn, in OpenAI's form."""
    return [
        {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
        for block in blocks
        if isinstance(block, dict) and block.get("type") == "tool_use"
    ]
