"""A model server that answers what it is told to, after a set time: the other end of the benchmarks that call one.

It runs in a process of its own, since what is measured must not share an interpreter with it: a benchmark starts
itself again with `--serve` (see `started`) and calls `serve` there. It speaks only as much HTTP as its callers do:
keep-alive, a `Content-Length` on each request.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: A request's body → all of the reply after its status line.
Reply = Callable[[bytes], bytes]


def whole(content: bytes) -> bytes:
    """JSON in one piece."""
    return b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


def streamed(events: list[bytes]) -> bytes:
    """Server-sent events, each a chunk."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events)
    return b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


async def serve(reply: Reply, delay_s: float) -> None:
    """Answer each request after `delay_s`, without end; the port goes to stdout first."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                body = await reader.readexactly(int(headers[b"content-length"]))
                await asyncio.sleep(delay_s)
                writer.write(b"HTTP/1.1 200 OK\r\n" + reply(body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


@contextmanager
def started(module: str, delay_ms: float) -> Iterator[str]:
    """Run `python -m <module> --serve` beside this process; gives the URL that an OpenAI client wants."""
    command = [sys.executable, "-m", module, "--serve", "--delay-ms", str(delay_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.kill()
