"""The server process of `http_server`: python -m benchmarks.http_app SIDE DATABASE DURABILITY.

SIDE is "ours", or "bare": what one writes with FastAPI alone; "bare-on-loop" inserts on the event loop. It says its
port and token, and then obeys lines:
"publish READERS EVENTS RATE" (0: as fast as possible), "cpu". It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvicorn
import uvloop
from fastapi import FastAPI
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel

from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
from agent_runtime_core.cli.worker import freeze_imports
from agent_runtime_core.registry import Registry
from agent_runtime_core.server import ServerSettings, create_app
from agent_runtime_core.server.serving import Server

MANY = 1_000_000
PAYLOAD = {"text": "a word or two", "n": 1}

Publish = Callable[[int], Awaitable[None]]


class NoWork(AgentRuntime):
    key = "noop"

    async def run(self, ctx: Any) -> RunResult:
        return RunResult()


class Side:
    """A server, where it is asked for what, and how an event is published."""

    def __init__(
        self, server: uvicorn.Server, token: str, readers: Callable[[], int], publish: Publish,
        close: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.server = server
        self.token = token
        self.readers = readers
        self.publish = publish
        self.close = close


async def ours(path: Path, durability: str) -> Side:
    registry = Registry()
    registry.register(NoWork())
    runner = AgentRunner.open(path, durability=durability, registry=registry)
    run_id = await runner.submit("noop", run_id="followed")  # no worker executes it: it only has events
    settings = ServerSettings(
        max_streams=MANY, max_streams_per_caller=MANY, max_connections=MANY, requests_per_second=MANY,
        request_burst=MANY,
    )  # fmt: skip
    app = create_app(runner, settings=settings)
    token = Path(f"{path}.token").read_text(encoding="utf-8").split()[0]  # noqa: ASYNC240 - nothing is served yet

    async def publish(n: int) -> None:
        await runner.event_bus.publish(run_id, "word", {**PAYLOAD, "n": n})

    return Side(Server(app), token, lambda: app.state.server.limits.open_streams, publish, runner.close)


class NewRun(BaseModel):
    agent: str
    input: dict[str, Any]


async def bare(path: Path, durability: str, on_loop: bool = False) -> Side:
    """One queue for each reader; one row and one commit for each run, over one connection.

    The route of `POST /runs` is a plain `def`, which FastAPI executes in its threads, as its documentation says for
    code that waits for a disk. With `on_loop` it is an `async def`, which stops all requests during each flush.
    """
    app = FastAPI(openapi_url=None)
    queues: set[asyncio.Queue[tuple[int, dict[str, Any]]]] = set()
    conn = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    conn.execute("PRAGMA journal_mode=WAL")
    conn.execute(f"PRAGMA synchronous={durability}")
    conn.execute("CREATE TABLE run (id TEXT PRIMARY KEY, agent TEXT, input TEXT, created_at REAL) WITHOUT ROWID")

    @app.get("/events", response_class=EventSourceResponse)
    async def events() -> AsyncIterator[ServerSentEvent]:
        queue: asyncio.Queue[tuple[int, dict[str, Any]]] = asyncio.Queue()
        queues.add(queue)
        try:
            while True:
                n, event = await queue.get()
                yield ServerSentEvent(data=event, id=str(n))
        finally:
            queues.discard(queue)

    def submit(run: NewRun) -> dict[str, str]:
        run_id = str(uuid4())
        conn.execute("INSERT INTO run VALUES (?, ?, ?, ?)", (run_id, run.agent, json.dumps(run.input), time.time()))
        return {"run_id": run_id}

    async def submit_on_loop(run: NewRun) -> dict[str, str]:
        return submit(run)

    app.post("/runs", status_code=201)(submit_on_loop if on_loop else submit)

    async def publish(n: int) -> None:
        for queue in queues:
            queue.put_nowait((n, {"sequence": n, "type": "word", "time": time.time(), "payload": {**PAYLOAD, "n": n}}))
        await asyncio.sleep(0)

    async def close() -> None:
        conn.close()

    config = uvicorn.Config(  # as in `serving.config_of`
        app, lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        http="httptools", backlog=2048,
    )  # fmt: skip
    return Side(uvicorn.Server(config), "", lambda: len(queues), publish, close)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def publish(side: Side, readers: int, events: int, rate: float) -> None:
    """Publish events once all readers are there; say when it began, and when each event was committed."""
    while side.readers() < readers:  # noqa: ASYNC110 - the other process connects them
        await asyncio.sleep(0.01)
    committed: list[float] = []
    used, began = time.process_time(), time.monotonic()
    for n in range(events):
        if rate:
            await asyncio.sleep(max(0.0, began + n / rate - time.monotonic()))
        await side.publish(n)
        committed.append(time.monotonic())
    say(began=began, used=used, committed=committed)


async def main(name: str, path: str, durability: str) -> None:
    sides = {"ours": ours, "bare": bare, "bare-on-loop": partial(bare, on_loop=True)}
    side = await sides[name](Path(path), durability)
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    freeze_imports()  # as `agent-runtime serve` does
    serving = asyncio.create_task(side.server.serve([listening]))
    say(port=listening.getsockname()[1], token=side.token)
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["publish", readers, events, rate]:
                await publish(side, int(readers), int(events), float(rate))
            case ["cpu"]:
                say(used=time.process_time())
    side.server.should_exit = side.server.force_exit = True
    await serving
    await side.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
