"""A judge's server for tests: real HTTP on loopback, replies from a function. It stands for the network alone."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

KEY = "sk-not-a-real-key-4711"


@dataclass
class Shown:
    """What the judge was shown, read back as it must read it: by the fence that the system message names."""

    body: dict[str, Any]
    blocks: dict[str, Any]
    task: str

    @property
    def asks_preference(self) -> bool:
        return "SECOND ANSWER" in self.blocks

    @property
    def mark(self) -> str:
        """What the keys of the reply are to end with, as the task spells them."""
        asked = re.search(r'"(?:better|correctness)(\w*)"', self.task)
        assert asked is not None
        return asked[1]

    @property
    def answers(self) -> list[str]:
        titles = ("FIRST ANSWER", "SECOND ANSWER") if self.asks_preference else ("ANSWER",)
        return [self.blocks[title].get("content") or "" for title in titles]


@dataclass
class Reply:
    """Raw: status, headers and body; `delay_s` before it; null status closes the connection without a word.

    With `trickle_s` the body goes out one byte at a time, so many seconds apart.
    """

    status: int | None = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    trickle_s: float = 0.0


USAGE = {"prompt_tokens": 100, "completion_tokens": 10}


def completion(content: Any, finish: str | None = "stop", *, usage: Any = USAGE, **message: Any) -> Reply:
    """A chat completion; `message` adds to, or replaces, what is in its message."""
    said = {"role": "assistant", "content": content, **message}
    return Reply(body=json.dumps({"choices": [{"message": said, "finish_reason": finish}], "usage": usage}))


def rating(value: Any = 8) -> str:
    return json.dumps({"correctness": value, "completeness": value, "style": value})


def read(body: dict[str, Any]) -> Shown:
    # A server whose template has no system message gets both in one.
    system, user = ([message["content"] for message in body["messages"]] * 2)[:2]
    fence = re.search(r"BEGIN ([0-9a-f]+) ", system)
    assert fence is not None
    blocks, task = {}, user
    for title, text in re.findall(rf"^BEGIN {fence[1]} ([A-Z ]+)\n(.*)\nEND {fence[1]}$", user, re.MULTILINE):
        blocks[title] = json.loads(text)
        task = task.replace(text, "")
    return Shown(body, blocks, task.replace(fence[1], "FENCE"))


class StubJudge:
    """`with StubJudge(lambda shown: completion("…")) as stub:`, then `stub.url`. Keeps every request that it got."""

    def __init__(self, reply: Callable[[Shown], Reply]) -> None:
        self.seen: list[Shown] = []
        self.most_at_once = 0
        self._at_once = 0
        lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # head and body leave together, so that no delayed acknowledgement is waited for

            def do_POST(self) -> None:
                assert self.path.partition("?")[0] == "/v1/chat/completions"
                assert self.headers["Authorization"] == f"Bearer {KEY}"
                shown = read(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                with lock:
                    stub.seen.append(shown)
                    stub._at_once += 1
                    stub.most_at_once = max(stub.most_at_once, stub._at_once)
                    answer = reply(shown)
                time.sleep(answer.delay_s)
                with lock:
                    stub._at_once -= 1
                if answer.status is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                data = answer.body.encode()
                self.send_response(answer.status)
                for name, value in {**answer.headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if not answer.trickle_s:
                    self.wfile.write(data)
                    return
                for at in range(len(data)):
                    self.wfile.write(data[at : at + 1])
                    self.wfile.flush()
                    time.sleep(answer.trickle_s)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:  # a client that gave up waiting
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> StubJudge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
