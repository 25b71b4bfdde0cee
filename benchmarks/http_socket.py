"""A WebSocket whose client stops reading and starts again: how soon the run that it follows continues.

The server, the run and the client are one process with one event loop. The buffers of the kernel are small, so that the
run pauses several times within its answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect

from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.server import Caller, create_app
from agent_runtime_core.server.serving import Server

from .floor import Line, Size

CONTINUES = 100.0  # milliseconds
PIECE = 16_384
ANSWER = 10 << 20
KERNEL = 65_536  # bytes that are asked for, of each buffer
QUIET = 0.2  # seconds without a new event, after which the run is paused


class Writer(AgentRuntime):
    key = "writer"

    def __init__(self, size: int) -> None:
        self.published = 0
        self._size = size
        self.more = asyncio.Event()

    async def run(self, ctx: Any) -> RunResult:
        while self.published < self._size:
            await ctx.emit("assistant.delta", {"delta": "x" * PIECE})
            self.published += PIECE
            self.more.set()
        return RunResult()

    async def pauses(self) -> bool:
        """Return True when the run is paused, False if it has published its whole answer."""
        while True:
            self.more.clear()
            try:
                async with asyncio.timeout(QUIET):
                    await self.more.wait()
            except TimeoutError:
                return self.published < self._size


async def _pauses(path: Path, size: int) -> list[float]:
    """Return how many seconds passed from the first read to the next event of the run, for each pause."""
    registry, writer, found = Registry(), Writer(size), []
    registry.register(writer)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL)
    port = listening.getsockname()[1]
    async with AgentRunner.open(path, registry=registry) as runner:
        server = Server(create_app(runner, authenticate=lambda _: Caller("benchmark")))
        serving = asyncio.create_task(server.serve([listening]))
        await server.ready.wait()
        run_id = await runner.submit("writer")
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL)
        link.connect(("127.0.0.1", port))
        link.setblocking(False)
        async with connect(f"ws://127.0.0.1:{port}/api/v1/socket", sock=link, max_queue=1, compression=None) as client:
            await client.send(json.dumps({"type": "follow", "run_id": str(run_id)}))
            await client.recv()
            running = asyncio.create_task(runner.run_once())
            while await writer.pauses():
                writer.more.clear()
                began = time.monotonic()
                while not writer.more.is_set():
                    await client.recv()
                found.append(time.monotonic() - began)
            while json.loads(await client.recv())["type"] != "done":
                pass
            await running
        server.should_exit = True
        await serving
    return found


def rows(size: Size) -> Iterator[Line]:
    with size.file() as path:
        found = asyncio.run(_pauses(path, size.of(ANSWER, 1 << 20)))
    assert found, "the run has not paused"
    note = f"slowest of {len(found)}"
    yield Line("http socket reads again: until its run continues", max(found) * 1000, "ms", most=CONTINUES, note=note)
