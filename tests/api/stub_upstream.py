"""An upstream for tests: real HTTP on loopback, speaking OpenAI's and Anthropic's forms.

It stands for the network alone. What it answers is given by the test; what it was sent is kept, byte for byte.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-upstream-not-a-real-key-0815"


@dataclass
class Sent:
    """One request as it came in."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for given, value in self.headers if given.lower() == name.lower()), None)


@dataclass
class Reply:
    """One answer. With `events` it is a stream of these pieces, `pause_s` apart; `cut` breaks it off after them."""

    status: int = 200
    body: bytes = b""
    events: Sequence[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    pause_s: float = 0.0
    cut: bool = False
    zipped: bool = False


@dataclass
class Upstream:
    """The server: `url` is what settings name; `reply` makes the answer to a request."""

    url: str
    reply: Callable[[Sent], Reply]
    sent: list[Sent] = field(default_factory=list)
    #: Pieces of streams that a caller did not take any more.
    broken: list[str] = field(default_factory=list)


def sse(*events: Any, done: bool = True) -> list[bytes]:
    """Events of OpenAI's streams."""
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    return [*lines, b"data: [DONE]\n\n"] if done else lines


def named(*events: dict[str, Any]) -> list[bytes]:
    """Events of Anthropic's streams."""
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]


def completion(text: str | None = "Within 30 days.", *, calls: Any = None, model: str = "gpt-test-1") -> Reply:
    """A chat completion, spelled with spaces so that a re-encoded one would show."""
    message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls" if calls else "stop"}
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
    }
    return Reply(body=json.dumps(body, indent=1).encode())


def chunks(*texts: str, finish: str | None = "stop", done: bool = True, model: str = "gpt-test-1") -> list[bytes]:
    """A streamed chat completion of these pieces of text."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({"content": text} for text in texts)]
    return sse(*[chunk(delta, model=model) for delta in deltas], *([chunk({}, finish)] if finish else []), done=done)


def chunk(delta: dict[str, Any], finish: str | None = None, *, index: int = 0, model: str = "gpt-test-1") -> Any:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}


def message(*blocks: dict[str, Any], stop: str = "end_turn") -> Reply:
    """One of Anthropic's messages."""
    body = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-test-1",
        "content": list(blocks),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 3},
    }
    return Reply(body=json.dumps(body, indent=1).encode())


def message_events(*blocks: dict[str, Any], stopped: bool = True) -> list[bytes]:
    """The same as a stream; the text and the arguments of a call come in pieces of seven characters."""
    start = json.loads(message().body)
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {**start, "stop_reason": None}}]
    for at, block in enumerate(blocks):
        begun = {**block, "input": {}} if block["type"] == "tool_use" else {**block, "text": ""}
        events.append({"type": "content_block_start", "index": at, "content_block": begun})
        whole = block["text"] if block["type"] == "text" else json.dumps(block["input"])
        for place in range(0, len(whole), 7):
            piece = whole[place : place + 7]
            kind = {"type": "text_delta", "text": piece}
            if block["type"] == "tool_use":
                kind = {"type": "input_json_delta", "partial_json": piece}
            events.append({"type": "content_block_delta", "index": at, "delta": kind})
        events.append({"type": "content_block_stop", "index": at})
    if stopped:
        end = {"stop_reason": "end_turn", "stop_sequence": None}
        events.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": 3}})
        events.append({"type": "message_stop"})
    return named(*events)


@contextlib.contextmanager
def upstream(reply: Callable[[Sent], Reply] | None = None) -> Iterator[Upstream]:
    """A running upstream until the block ends."""
    kept: Upstream

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"])))

        def _answer(self, body: bytes) -> None:
            sent = Sent(self.command, self.path, list(self.headers.items()), body)
            kept.sent.append(sent)
            given = kept.reply(sent)
            time.sleep(given.delay_s)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(given.status)
                for name, value in given.headers.items():
                    self.send_header(name, value)
                if given.events is None:
                    self._whole(given)
                else:
                    self._stream(given, given.events)

        def _whole(self, given: Reply) -> None:
            body = gzip.compress(given.body) if given.zipped else given.body
            if given.zipped:
                self.send_header("Content-Encoding", "gzip")
            if "Content-Type" not in given.headers:
                self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body) + (10 if given.cut else 0)))
            self.end_headers()
            self.wfile.write(body)
            if given.cut:
                self.close_connection = True

        def _stream(self, given: Reply, events: Sequence[bytes]) -> None:
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for event in events:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                    self.wfile.flush()
                    time.sleep(given.pause_s)
            except OSError as error:
                kept.broken.append(type(error).__name__)
                raise
            if not given.cut:
                self.wfile.write(b"0\r\n\r\n")
            else:
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    kept = Upstream(f"http://127.0.0.1:{server.server_address[1]}/v1", reply or (lambda _: completion()))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
