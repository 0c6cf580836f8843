"""Reads an answer while it passes: the text and the tool calls of a whole body or of a stream of events.

Belongs here: reassembling OpenAI's deltas and Anthropic's events, and whether an answer came to its end. Does not
belong here: passing on; a reader never raises and never holds anything up. Of several choices the first (index 0) is
the answer: a sample has one, and it is the one that a caller reads who knows of no others.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from loop_dagster.api.gateway.asked import anthropic_calls
from loop_dagster.api.gateway.upstreams import Shape
from loop_dagster.rules import canonical
from loop_dagster.rules.canonical import Json, Message
from loop_dagster.store.capturing import Reason

#: Bytes of an answer's text and tool calls that a sample keeps (rules: 1 MiB).
MOST_ANSWER: Final = 2**20
#: Bytes of a whole body, or of one event, that are looked at: beside the answer they hold probabilities and the like.
MOST_READ: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: a canonical assistant message, and the model that says it gave it."""

    message: Message
    model: str | None

    def __repr__(self) -> str:
        return f"Said(by {self.model!r})"


class Reader(Protocol):
    """Reads one answer. `feed` takes what passed, `end` says that all of it did, `result` what it came to.

    `cut` says that the upstream broke it off: the caller met an error, even if the last word had passed.
    """

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def cut(self) -> None: ...

    def result(self) -> Said | Reason: ...


def reader_for(shape: Shape, content_type: str, encoding: str) -> Reader:
    """The reader of an answer with these headers."""
    unzip = zlib.decompressobj(wbits=47) if encoding in ("gzip", "x-gzip", "deflate") else None
    readable = unzip is not None or encoding in ("", "identity")
    if content_type.partition(";")[0].strip().lower() == "text/event-stream":
        events: _Events = _OpenAIEvents() if shape == "openai" else _AnthropicEvents()
        return StreamReader(events, unzip, readable=readable)
    return WholeReader(shape, unzip, readable=readable)


class WholeReader:
    """An answer in one JSON body; it is put aside and read at the end."""

    def __init__(self, shape: Shape, unzip: Any = None, *, readable: bool = True) -> None:
        self._shape, self._unzip = shape, unzip
        self._parts: list[bytes] = []
        self._size = 0
        self._ended, self._readable = False, readable

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MOST_READ:
            self._parts.append(data)

    def end(self) -> None:
        self._ended = True

    def cut(self) -> None:
        self._ended = False

    def result(self) -> Said | Reason:
        if self._size > MOST_READ:
            return "too_large"
        if not (self._ended and self._readable):
            return "incomplete"
        try:
            raw = b"".join(self._parts)
            if self._unzip is not None:
                raw = self._unzip.decompress(raw, MOST_READ)
                if self._unzip.unconsumed_tail:
                    return "too_large"
            body = canonical.loads(raw)
        except (canonical.UnreadableJsonError, zlib.error):
            return "incomplete"
        found = None
        if isinstance(body, dict):
            found = _whole_openai(body) if self._shape == "openai" else _whole_anthropic(body)
        return "incomplete" if found is None else _said(found, body.get("model"))


def _whole_openai(body: Mapping[str, Json]) -> Json:
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index", "0") in ("0", None):  # a Number is a text
            message = choice.get("message")
            if not isinstance(message, dict):
                return None
            calls = message.get("tool_calls") or []
            if not calls and isinstance(message.get("function_call"), dict):
                calls = [{"function": message["function_call"]}]
            return {"content": message.get("content") or message.get("refusal"), "tool_calls": calls}
    return None


def _whole_anthropic(body: Mapping[str, Json]) -> Json:
    blocks = body.get("content")
    if not isinstance(blocks, list):
        return None
    texts = [one["text"] for one in blocks if isinstance(one, dict) and one.get("type") == "text" and "text" in one]
    return {
        "content": [{"type": "text", "text": text} for text in texts] or None,
        "tool_calls": anthropic_calls(blocks),
    }


def _said(found: Mapping[str, Any], model: Json) -> Said | Reason:
    """An answer in its canonical form, unless there is nothing in it, or too much."""
    try:
        message = canonical.answer({"content": found["content"], "tool_calls": found["tool_calls"] or None})
        size = len(canonical.dump_bytes(message))
    except (canonical.BadMessageError, canonical.UnreadableJsonError):
        return "incomplete"
    if size > MOST_ANSWER:
        return "too_large"
    if not (message["content"] or "").strip() and not message.get("tool_calls"):
        return "incomplete"
    return Said(message, str(model) if isinstance(model, str) and 0 < len(model) <= 200 else None)


class _Events(ABC):
    """What the events of a stream add up to."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.model: Json = None
        self.size = 0
        self.finished = self.closed = self.broken = False  # all was said; its last event came; there is no answer

    @abstractmethod
    def take(self, data: bytes) -> None:
        """One event's data. Raises anything for what it cannot be."""

    def _text(self, text: Any) -> None:
        if isinstance(text, list):  # some servers stream parts
            text = "".join(part["text"] for part in text if part.get("type") == "text")
        if text:
            self.size += len(text.encode())
            self.texts.append(text)

    def _call(self, place: int) -> dict[str, Any]:
        return self.calls.setdefault(place, {"id": None, "name": "", "arguments": []})

    def _arguments(self, call: dict[str, Any], text: str | None) -> None:
        if text:
            self.size += len(text.encode())
            call["arguments"].append(text)

    def whole(self) -> dict[str, Any]:
        """The answer in the form of one message."""
        calls = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": "".join(call["arguments"]) or "{}"}}
            for _place, call in sorted(self.calls.items())
        ]
        return {"content": "".join(self.texts) or None, "tool_calls": calls}


class _OpenAIEvents(_Events):
    """`chat.completion.chunk`, ended by a finish_reason and `[DONE]`."""

    def take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.finished = self.closed = True
            return
        event = orjson.loads(data)
        if event.get("error"):
            self.broken = True
        self.model = event.get("model") or self.model
        for choice in event.get("choices") or ():
            if (choice.get("index") or 0) != 0:
                continue
            delta = choice.get("delta") or {}
            self._text(delta.get("content"))
            self._text(delta.get("refusal"))
            for part in delta.get("tool_calls") or ():
                self._part(part)
            if delta.get("function_call"):
                self._part({"index": 0, "function": delta["function_call"]})
            if choice.get("finish_reason"):
                self.finished = True

    def _part(self, part: Mapping[str, Any]) -> None:
        place = part.get("index")
        if place is None:  # some servers number none: an id begins a call, and what has none goes on with the last
            place = len(self.calls) if part.get("id") or not self.calls else len(self.calls) - 1
        call = self._call(int(place))
        function = part.get("function") or {}
        call["id"] = call["id"] or part.get("id")
        call["name"] = call["name"] or function.get("name") or ""
        self._arguments(call, function.get("arguments"))


class _AnthropicEvents(_Events):
    """`message_start` to `message_stop`, with blocks of text and of tool_use between them."""

    def take(self, data: bytes) -> None:
        event = orjson.loads(data)
        kind = event.get("type")
        if kind == "message_start":
            self.model = event["message"].get("model")
        elif kind == "content_block_start":
            block = event["content_block"]
            if block["type"] == "text":
                self._text(block.get("text"))
            elif block["type"] == "tool_use":
                call = self._call(event["index"])
                call["id"], call["name"] = block.get("id"), block.get("name") or ""
                if block.get("input"):
                    self._arguments(call, orjson.dumps(block["input"]).decode())
        elif kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                self._text(delta["text"])
            elif delta["type"] == "input_json_delta" and event["index"] in self.calls:
                self._arguments(self.calls[event["index"]], delta["partial_json"])
        elif kind == "message_stop":
            self.finished = self.closed = True
        elif kind == "error":
            self.broken = True


class StreamReader:
    """An answer in server-sent events, taken apart as it passes; only its text is kept."""

    def __init__(self, events: _Events, unzip: Any = None, *, readable: bool = True) -> None:
        self._events, self._unzip = events, unzip
        self._rest = b""
        self._data: list[bytes] = []
        self._readable = readable

    def feed(self, data: bytes) -> None:
        if not self._readable or self._events.size > MOST_ANSWER:
            return
        try:
            if self._unzip is not None:
                data = self._unzip.decompress(data, MOST_READ)
                self._readable = not self._unzip.unconsumed_tail
            lines = (self._rest + data).split(b"\n")
            self._rest = lines.pop()
            for line in lines:
                self._line(line.rstrip(b"\r"))
            if len(self._rest) > MOST_READ:
                self._readable = False
        except Exception:  # no stream that this knows; whatever it is, it passes on
            self._readable = False

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            self._events.take(data)

    def end(self) -> None:
        """Some servers leave the last blank line out."""
        self.feed(b"\n\n")

    def cut(self) -> None:
        self._events.broken |= not self._events.closed

    def result(self) -> Said | Reason:
        events = self._events
        if events.size > MOST_ANSWER:
            return "too_large"
        if not self._readable or events.broken or not events.finished:
            return "incomplete"
        return _said(events.whole(), events.model)
