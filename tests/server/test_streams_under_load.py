"""Event streams with many reconnects, killed servers, and readers that never read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.settings import ServerSettings
from tests.server.conftest import Served
from tests.server.gated import Gated
from tests.server.streaming import (
    HEADERS,
    SLOW,
    Frame,
    SilentReader,
    client_at,
    following,
    frames_in,
    serving,
    streams_of,
)
from tests.support.runs import soon

KIB = 1024
RECONNECTS = 500
AHEAD = 40  # events
READERS = 200
EVENTS = 5000


@pytest.fixture
def gated(runner: AgentRunner) -> Gated:
    return Gated(runner)


async def received(client: httpx.AsyncClient, position: str | None, most: int) -> list[Frame]:
    """The complete frames in the first bytes of a stream, which is then cut, maybe in the middle of a frame."""
    headers = {} if position is None else {"Last-Event-ID": position}
    data = b""
    async with client.stream("GET", "/runs/r/events", headers=headers) as response:
        assert response.status_code == 200
        async for part in response.aiter_bytes():
            data += part
            if len(data) >= most:
                data = data[:most]
                break
    complete = data[: data.rfind(b"\n\n") + 2]
    return [frame for frame in frames_in(complete.decode()) if frame] if complete else []


async def test_a_client_that_reconnects_all_the_time_gets_every_event_once(
    gated: Gated, make_app: Callable[..., Any]
) -> None:
    app = make_app(settings=ServerSettings(request_burst=RECONNECTS * 2))
    running = await gated.start("r")
    found: list[int] = []
    has_read = asyncio.Event()

    async def publish() -> None:
        """Publish while the client reads and reconnects, so far ahead of it that it never waits for long."""
        for n in itertools.count():
            while n > len(found) + AHEAD:
                has_read.clear()
                await has_read.wait()
            await gated.emit(text="é" * (n % 4 * 20))

    publishing = asyncio.ensure_future(publish())
    async with serving(app) as port, client_at(port) as client:
        position: str | None = None
        for number in range(RECONNECTS):
            # With 15 bytes, not even the first frame is complete.
            for frame in await received(client, position, 15 + number * 7919 % 1500):
                if frame.id is not None:
                    position = frame.id
                    found.append(frame["sequence"])
            has_read.set()
        publishing.cancel()
        gated.finish()
        await running
        response = await client.get("/runs/r/events", headers={"Last-Event-ID": position or ""})
        rest = frames_in(response.text)
    found += [frame["sequence"] for frame in rest if "sequence" in frame]
    assert found == list(range(await gated.runner.event_bus.head("r")))
    assert len(found) > RECONNECTS
    assert rest[-1] == {"type": "end", "state": "succeeded"}


async def test_a_client_resumes_when_its_server_is_killed(
    gated: Gated, serve: Callable[..., Served], tmp_path: Path
) -> None:
    running = await gated.start("r")
    found: list[int] = []
    for _ in range(5):
        server = await asyncio.to_thread(serve, "--no-worker")
        await gated.emit(3)
        async with httpx.AsyncClient(base_url=f"{server.url}/api/v1", headers=HEADERS, timeout=60) as client:
            headers = {"Last-Event-ID": str(found[-1])} if found else {}
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                async with following(client, "r", headers=headers) as frames:
                    before = len(found)
                    async for frame in frames:
                        found += [frame["sequence"]] if frame else []
                        if len(found) == before + 2:
                            server.process.kill()
                            await gated.emit(2)
        server.process.wait()
    server = await asyncio.to_thread(serve, "--no-worker")
    gated.finish()
    await running
    async with httpx.AsyncClient(base_url=f"{server.url}/api/v1", headers=HEADERS, timeout=60) as client:
        response = await client.get("/runs/r/events", headers={"Last-Event-ID": str(found[-1])})
        found += [frame["sequence"] for frame in frames_in(response.text) if "sequence" in frame]
        again = await client.get("/runs/r/events", headers={"Last-Event-ID": str(found[-1])})
    assert found == list(range(27))
    assert again.status_code == 204


async def test_readers_that_never_read_take_little_memory_and_do_not_slow_the_run(
    gated: Gated, runner: AgentRunner, make_app: Callable[..., Any]
) -> None:
    app = make_app(settings=ServerSettings(max_streams_per_caller=READERS + 1, request_burst=READERS * 2))
    running = await gated.start("r")
    bus = runner.event_bus
    async with serving(app, **SLOW) as port, contextlib.AsyncExitStack() as stack:
        readers = [stack.enter_context(SilentReader()) for _ in range(READERS)]
        for reader in readers:
            await reader.connect(port, "/runs/r/events")
        await soon(lambda: app.state.server.limits.open_streams == READERS)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for start in range(0, EVENTS, 50):
            rows = [(f"e{n}", "test.event", {"text": "x" * KIB}) for n in range(start, start + 50)]
            await bus.commit(None, [bus.publishing("r", rows)])
        gated.finish()
        await running
        await soon(lambda: all(each.sending for each in streams_of(app)._readers), seconds=60)
        _, peak = tracemalloc.get_traced_memory()
        assert await bus.head("r") == EVENTS + 2
        # Only gross failures: all events in the memory of each reader would be ten times as much.
        assert peak < READERS * 640 * KIB
        async with client_at(port) as client:
            response = await client.get("/runs/r/events")
        numbers = [frame["sequence"] for frame in frames_in(response.text) if "sequence" in frame]
        assert numbers == list(range(EVENTS + 2))


async def test_a_served_process_says_bye_to_its_streams(
    gated: Gated, serve: Callable[..., Served], tmp_path: Path
) -> None:
    running = await gated.start("r")
    server = await asyncio.to_thread(serve, "--no-worker")
    async with (
        httpx.AsyncClient(base_url=f"{server.url}/api/v1", headers=HEADERS, timeout=60) as client,
        following(client, "r") as frames,
    ):
        assert [(await anext(frames)).id for _ in range(2)] == [None, "0"]
        server.send(signal.SIGTERM)
        [bye] = [frame async for frame in frames]
        assert (bye.event, bye.retry) == ("bye", "5000")
    assert await server.aended() == 0
    gated.finish()
    await running
