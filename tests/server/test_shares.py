"""What one caller can take of a server: waits for runs, and bytes of answers that it does not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.access import Caller
from agent_runtime_core.server.settings import ServerSettings
from tests.server.conftest import TOKEN, client_of
from tests.server.streaming import SLOW, SilentReader, client_at, serving
from tests.support.processes import PATIENCE
from tests.support.runs import soon

LARGE = 900_000


def by_header(request: Any) -> Caller:
    return Caller(request.headers.get("x-who") or "silent")


async def test_the_waits_of_a_caller_have_a_share(runner: AgentRunner, make_app: Callable[..., Any]) -> None:
    settings = ServerSettings(max_waits_per_caller=2, max_connections=6)
    app = make_app(authenticate=by_header, settings=settings)
    await runner.submit("echo", run_id="r")
    async with client_of(app, None) as client:

        async def ask(who: str, method: str, path: str, **options: Any) -> Any:
            headers = {"x-who": who, **options.pop("headers", {})}
            return await client.request(method, f"/api/v1{path}", headers=headers, **options)

        waits = [asyncio.create_task(ask(who, "GET", "/runs/r/result?wait=60")) for who in ("ada", "ada", "ben")]
        await soon(lambda: app.state.server.limits.no_wait("carl") is not None)
        over = await ask("ada", "GET", "/runs/r/result?wait=60")
        other = await ask("carl", "GET", "/runs/r/result?wait=60")
        short = await ask("ada", "GET", "/runs/r/result")
        body = {"agent": "echo", "run_id": "new"}
        made = await ask("ada", "POST", "/runs", headers={"Prefer": "wait=60"}, json=body)
        # It would end the waits: so it asks for a run that nobody waits for.
        cancelled = await ask("ada", "POST", "/runs/new/cancel", json={"wait": 60})
        live = await ask("ada", "GET", "/health/live")
        await runner.run_once()
        ended = [(await each).status_code for each in waits]
        again = await ask("ada", "GET", "/runs/r/result?wait=60")
    assert (over.status_code, over.headers["retry-after"]) == (429, "5")
    assert other.status_code == 503
    assert (short.status_code, made.status_code, cancelled.status_code, live.status_code) == (202, 201, 200, 200)
    assert "preference-applied" not in made.headers
    assert (ended, again.status_code) == ([200] * 3, 200)
    assert app.state.server.limits.no_wait("ada") is None


def requested(path: str, version: str = "1.1") -> bytes:
    return f"GET {path} HTTP/{version}\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


async def with_a_large_result(runner: AgentRunner) -> None:
    await runner.execute("echo", "r", {"text": "x" * LARGE})


@pytest.mark.parametrize(
    "request_bytes",
    [
        requested("/api/v1/runs/r/result"),
        requested("/api/v1/runs/r/result", "1.0"),
        requested("/static/style.css"),
        requested("/api/v1/runs/r/result") * 3,
    ],
    ids=["json", "closed", "file", "pipelined"],
)
async def test_an_answer_that_is_not_read_is_dropped(runner: AgentRunner, app: Any, request_bytes: bytes) -> None:
    await with_a_large_result(runner)
    async with serving(app, **SLOW) as port:
        with SilentReader() as reader:
            await reader.send(port, request_bytes)
            guard = app.state.connections

            def unsent() -> int:
                return sum(each.get_write_buffer_size() for each in guard._transports)

            await soon(lambda: unsent() > 0)
            guard.look(ServerSettings().stalled_seconds - 60)
            assert unsent() > 0
            guard.look(63)
            await soon(lambda: not guard._transports)
            assert unsent() == 0
            assert len(await reader.read_all()) < LARGE
        async with client_at(port) as client:
            assert (await client.get("/health/live")).status_code == 200


async def test_a_connection_with_an_unread_answer_makes_way(runner: AgentRunner, make_app: Callable[..., Any]) -> None:
    await with_a_large_result(runner)
    app = make_app(settings=ServerSettings(max_connections=3))
    async with serving(app, **SLOW) as port:
        transports = app.state.connections._transports

        def is_unread(address: Any) -> bool:
            found = (each for each in transports if each.get_extra_info("peername") == address)
            return any(each.get_write_buffer_size() for each in found)

        with contextlib.ExitStack() as stack:
            for _ in range(8):
                reader = stack.enter_context(SilentReader())
                await reader.send(port, requested("/api/v1/runs/r/result"))
                await soon(partial(is_unread, reader.address))
            async with client_at(port) as client:
                assert (await client.get("/runs/r/result")).status_code == 200
            assert len(transports) <= 4


async def test_unread_bytes_of_a_caller_are_bounded(runner: AgentRunner, make_app: Callable[..., Any]) -> None:
    await with_a_large_result(runner)
    settings = ServerSettings(max_unsent_bytes_per_caller=LARGE // 2)
    app = make_app(authenticate=by_header, settings=settings)
    async with serving(app, **SLOW) as port, client_at(port) as client:

        async def status(who: str) -> int:
            return (await client.get("/runs/r", headers={"x-who": who})).status_code

        with SilentReader() as reader:
            await reader.send(port, requested("/api/v1/runs/r/result"))
            await soon(lambda: app.state.server.limits.unread("silent") is not None)
            refused = await client.get("/runs/r", headers={"x-who": "silent"})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            assert await status("other") == 200
            assert (await client.get("/health/live")).status_code == 200
            await reader.read(LARGE)
            await soon(lambda: app.state.server.limits.unread("silent") is None)
            assert await status("silent") == 200


async def test_unread_bytes_are_bounded_however_the_requests_come(
    runner: AgentRunner, make_app: Callable[..., Any]
) -> None:
    """The answers to many requests that come at the same time, each on its connection, and pipelined ones."""
    await with_a_large_result(runner)
    most = 3 * LARGE
    app = make_app(authenticate=by_header, settings=ServerSettings(max_unsent_bytes_per_caller=most))
    highest = 0
    async with serving(app, **SLOW) as port:
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(SilentReader()) for _ in range(20)]
            for reader in readers:
                await reader.send(port, requested("/api/v1/runs/r/result") * 5)
            limits, guard = app.state.server.limits, app.state.connections

            def held() -> int:
                return int(sum(each.get_write_buffer_size() for each in guard._transports) + limits._unwritten.total())

            left = 2000  # iterations after the limit was reached
            async with asyncio.timeout(PATIENCE):
                while left:
                    await asyncio.sleep(0)
                    highest = max(highest, held())
                    left -= highest > most
        assert most < highest < most + 2 * LARGE
