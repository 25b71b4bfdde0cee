"""A raw HTTP server on loopback that answers each request with the next of its scripts, byte for byte.

It serves until its `async with` block ends, and keeps what it was asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Script:
    """One answer. `cut` ends the connection after that many bytes of the body, `stall` stops sending there.

    The body is as long as the connection lives, so a cut looks like a clean end; `broken` announces more than is sent,
    so that it looks like a failure.
    """

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    cut: int | None = None
    stall: int | None = None
    broken: bool = False


#: A script, or what makes one of the JSON body of the request.
Scripted = Script | Callable[[dict[str, Any]], Script]


def script(body: Any, **options: Any) -> Script:
    """A script whose body is JSON."""
    return Script(json.dumps(body).encode(), **options)


def events(*datas: Any, end: str = "data: [DONE]\n\n") -> bytes:
    """Server-sent events, each of JSON data; `(name, data)` is an event with a name."""
    lines = [
        f"event: {each[0]}\ndata: {json.dumps(each[1])}\n\n"
        if isinstance(each, tuple)
        else f"data: {json.dumps(each)}\n\n"
        for each in datas
    ]
    return ("".join(lines) + end).encode()


def stream(*datas: Any, end: str = "data: [DONE]\n\n", **options: Any) -> Script:
    """A script that sends `events(*datas)`."""
    return Script(events(*datas, end=end), content_type="text/event-stream", **options)


def cut_places(body: bytes, every: int) -> list[int]:
    """Numbers of bytes to cut it after, the last of them all: each `every`-th, and all about the ends of lines."""
    ends = [place for place, byte in enumerate(body) if byte == ord("\n")]
    about = {min(place + more, len(body)) for place in ends for more in range(3)}
    return sorted({*range(0, len(body), every), *about, len(body)})


@dataclass
class WireServer:
    url: str
    #: The JSON bodies of the requests so far; `paths` and `headers` go with them.
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    #: Set when a client lets go of a connection on which this server stalls.
    let_go: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def serving(*scripts: Scripted) -> AsyncIterator[WireServer]:
    """A server that answers the n-th request with the n-th script, and all later ones with the last."""
    server = WireServer("")
    tasks: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await _answer(server, scripts, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client went first; some tests are about that.
        finally:
            tasks.discard(task)
            writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        listening.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    server: WireServer, scripts: Sequence[Scripted], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    chosen = scripts[min(len(server.asked), len(scripts) - 1)]
    server.paths.append(first.split(" ")[1])
    server.headers.append(headers)
    server.asked.append(json.loads(body) if body else {})
    if callable(chosen):
        chosen = chosen(server.asked[-1])
    sent = {"content-type": chosen.content_type, "connection": "close", **chosen.headers}
    if chosen.broken:
        sent["content-length"] = str(len(chosen.body) + 1)
    text = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    writer.write(f"HTTP/1.1 {chosen.status} Scripted\r\n{text}\r\n".encode("latin-1"))
    writer.write(chosen.body[: chosen.stall if chosen.stall is not None else chosen.cut])
    await writer.drain()
    if chosen.stall is not None:
        await reader.read()
        server.let_go.set()
