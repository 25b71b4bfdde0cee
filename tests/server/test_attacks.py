"""Requests that get around a check: forged positions, foreign ids, answers without a schema, many at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from websockets.exceptions import InvalidStatus

from agent_runtime_core._views.queries import cursor_of
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.server.access import Caller, Tokens
from agent_runtime_core.server.settings import ServerSettings
from agent_runtime_core.turns import TurnManager
from tests.server.conftest import TOKEN, client_of
from tests.server.streaming import serving
from tests.server.test_socket import connected
from tests.support.runs import Script, soon

API = "/api/v1"
TENANT = {"metadata": {"tenant": "ben"}}


async def _asks(ctx: Any) -> Any:
    return {"answer": await ctx.approve("plan", schema={"type": "boolean"})}


@pytest.fixture
def runner(tmp_path: Path) -> AgentRunner:
    registry = Registry()
    registry.register(Script(_asks, "asks"))
    config = RunnerConfig(park_after=0.0, max_retries=1)
    return AgentRunner.open(tmp_path / "runs.db", registry=registry, config=config)


def _by_tenant(runner: AgentRunner, **options: Any) -> FastAPI:
    from agent_runtime_core.server.app import create_app

    ben = Caller("ben", may=lambda _, run: run.metadata.get("tenant") == "ben")
    return create_app(runner, turns=TurnManager(runner), authenticate=lambda _: ben, **options)


async def test_a_turn_over_a_socket_is_checked_like_one_of_a_request(runner: AgentRunner) -> None:
    anna = {"text": "hi", "turn_id": "of anna", "metadata": {"tenant": "anna"}}
    await TurnManager(runner).start_turn(anna)
    app = _by_tenant(runner, settings=ServerSettings(max_pending=2))
    async with serving(app) as port, connected(port) as client:
        foreign = await client.ask("turn", turn={**anna, "turn_id": "new"})
        taken = await client.ask("turn", turn={**anna, **TENANT})
        own = await client.ask("turn", turn={"text": "hi", **TENANT})
        full = await client.ask("turn", turn={"text": "hi", **TENANT})
    assert [each.get("status") for each in (foreign, taken, own, full)] == [403, 409, None, 429]
    assert [each.metadata["tenant"] for each in await runner.runs()] == ["anna", "ben"]


async def _may(verb: str, run: Any) -> bool:
    return False


async def test_a_coroutine_as_may_shows_nothing(runner: AgentRunner) -> None:
    from agent_runtime_core.server.app import create_app

    with pytest.raises(InvalidArgument, match="may must be a function"):
        Caller("ben", may=_may)  # type: ignore[arg-type]
    await runner.submit("asks", run_id="one")
    hidden = _may("read", None)
    app = create_app(runner, authenticate=lambda _: Caller("ben", may=lambda verb, run: hidden))  # type: ignore[arg-type, return-value]
    async with client_of(app) as client:
        found = [await client.get(f"{API}{path}") for path in ("/runs", "/runs/one")]
    hidden.close()
    assert [each.status_code for each in found] == [500, 500]


async def test_a_fork_is_not_made_under_an_id_that_its_caller_may_not_use(runner: AgentRunner) -> None:
    from agent_runtime_core.server.app import create_app

    ben = Caller("ben", may=lambda _, run: (run.run_key or "").startswith("ben/"))
    app = create_app(runner, authenticate=lambda _: ben)
    await runner.submit("asks", run_id="ben/1")
    async with client_of(app) as client:
        foreign = await client.post(f"{API}/runs/ben%2F1/fork", json={"new_run_id": "anna/1"})
        own = await client.post(f"{API}/runs/ben%2F1/fork", json={"new_run_id": "ben/2"})
    assert (foreign.status_code, own.status_code) == (403, 201)
    assert [each.run_key for each in await runner.runs()] == ["ben/1", "ben/2"]


async def test_a_signal_cannot_answer_a_question_without_a_check_of_its_schema(
    app: FastAPI, client: httpx.AsyncClient, runner: AgentRunner
) -> None:
    await runner.submit("asks", run_id="one")
    await runner.run_once()
    [question] = await runner.approvals()
    forged = f"arc.answer:{question.request_id}"
    async with client:
        answer = await client.post(f"{API}/runs/one/signals/plan", json="maybe", headers={"Idempotency-Key": forged})
    async with serving(app) as port, connected(port) as socket:
        frame = await socket.ask("signal", run_id="one", name="plan", payload="maybe", message_id=forged)
    assert (answer.status_code, frame["status"]) == (422, 422)
    with pytest.raises(InvalidArgument, match="message_id must not begin with"):
        await runner.signal("one", "plan", "maybe", message_id=forged)
    assert await runner.approvals() == [question]


@pytest.mark.parametrize("position", [[1.0, 2**70], [10**400, 1], [float("inf"), 1], [1.0, float("nan")]])
async def test_a_forged_cursor_is_refused(client: httpx.AsyncClient, position: list[Any]) -> None:
    bound: dict[str, Any] = {"state": [], "agent": None, "since": None, "until": None, "q": None, "parent": None}
    async with client:
        response = await client.get(f"{API}/runs", params={"cursor": cursor_of(position, bound)})
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "cursor")


@pytest.mark.parametrize("path", ["/usage?by=day&until=", "/usage?since=", "/runs?until=", "/runs?since="])
async def test_the_first_time_of_the_calendar_is_a_time(client: httpx.AsyncClient, path: str) -> None:
    async with client:
        response = await client.get(f"{API}{path}0001-01-01T00:00:00Z")
    assert response.status_code == 200


async def test_the_number_of_patterns_of_event_types_is_limited(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("asks", run_id="one")
    await runner.run_once()
    async with client:
        path = f"{API}/runs/one/events?follow=false&types=approval.*"
        page = await client.get(path + "&types=x[" * 19)
        refused = await client.get(path + "&types=x[" * 20)
    assert [each["type"] for each in page.json()["items"]] == ["approval.requested"]
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "types")


async def test_requests_at_once_do_not_pass_the_limit_of_pending_runs(
    make_app: Callable[..., FastAPI], runner: AgentRunner
) -> None:
    for _ in range(3):
        await runner.submit("asks")
    async with client_of(make_app(settings=ServerSettings(max_pending=5))) as client:
        found = await asyncio.gather(*[client.post(f"{API}/runs", json={"agent": "asks"}) for _ in range(10)])
    assert sorted(each.status_code for each in found) == [201] * 2 + [429] * 8


async def test_two_answers_at_once_are_one_answer(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    async with client:
        for number in range(20):
            await runner.submit("asks", run_id=f"{number}")
            while await runner.run_once():
                pass
            path = f"{API}/runs/{number}/approvals/plan"
            found = await asyncio.gather(*[client.post(path, json={"answer": each}) for each in (True, False)])
            assert sorted(each.status_code for each in found) == [200, 409]


class _Request:
    """The channel of an ASGI request; its `send` waits forever from a message on."""

    def __init__(self, path: str, *received: dict[str, Any], blocks_at: int, token: str = TOKEN) -> None:
        kind = "websocket" if received[0]["type"].startswith("websocket") else "http"
        headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {token}".encode())]
        path, _, query = f"{API}{path}".partition("?")
        self.scope = {
            "type": kind, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": headers, "scheme": "http", "http_version": "1.1", "root_path": "", "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1), "subprotocols": [], "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        self.sent: list[MutableMapping[str, Any]] = []
        self._received = [*received]
        self._blocks_in = blocks_at

    def has_sent(self, code: int) -> bool:
        return any(each.get("code") == code for each in self.sent)

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if not self._received:
            await asyncio.Future()
        return self._received.pop(0)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)
        await asyncio.sleep(0)
        self._blocks_in -= 1
        if self._blocks_in <= 0:
            await asyncio.Future()


_FOLLOW = {"type": "websocket.receive", "text": '{"type":"follow","run_id":"one"}'}
_GET = {"type": "http.request", "body": b"", "more_body": False}


@pytest.mark.parametrize(
    ("path", "received"),
    [
        ("/runs/one/events", (_GET,)),
        ("/runs/one/result?wait=60", (_GET,)),
        ("/socket", ({"type": "websocket.connect"}, _FOLLOW, _FOLLOW)),
    ],
)
@pytest.mark.parametrize("blocks_at", [2, 5, 99])
async def test_a_request_that_is_cancelled_anywhere_leaves_no_open_stream(
    make_app: Callable[..., FastAPI], runner: AgentRunner, path: str, received: tuple[Any, ...], blocks_at: int
) -> None:
    app = make_app(settings=ServerSettings(request_burst=10**6))
    await runner.submit("asks", run_id="one")
    await runner.run_once()
    limits = app.state.server.limits
    for steps in range(60):
        channel = _Request(path, *received, blocks_at=blocks_at)
        task = asyncio.ensure_future(app(channel.scope, channel.receive, channel.send))
        for _ in range(steps):
            await asyncio.sleep(0)
        if "result" in path:
            assert limits.open_streams == 0
        elif steps == 59:  # the threads of the store may need more steps
            await soon(lambda: limits.open_streams > 0)
        task.cancel()
        await asyncio.wait([task])
        assert (limits.open_streams, limits.open_sockets, dict(limits._streams)) == (0, 0, {})


async def test_rejected_sockets_that_stay_open_are_limited(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime_core.server.limits.MOST_REJECTED", 2)
    channels = [_Request("/socket", {"type": "websocket.connect"}, blocks_at=99, token="no") for _ in range(3)]
    tasks = [asyncio.ensure_future(app(each.scope, each.receive, each.send)) for each in channels]
    await tasks[2]
    assert [channels[2].sent[0].get("status")] == [503]
    for each in channels[:2]:
        await soon(partial(each.has_sent, 4401))
    assert app.state.server.limits.rejected_sockets == 2
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert app.state.server.limits.rejected_sockets == 0


async def test_a_rejected_client_that_does_not_answer_is_disconnected(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core.server.socket.CLOSE_SECONDS", 0.0)
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"GET {API}/socket HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        writer.write(f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n\r\n".encode())
        async with asyncio.timeout(5):  # the limit of uvicorn is 10 s
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        writer.close()


async def test_rejected_handshakes_do_not_fill_the_log(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(app) as port:
        with pytest.raises(InvalidStatus):
            async with connected(port, additional_headers={"Origin": "http://elsewhere.example"}):
                pass
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_deleted_token_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens(tmp_path / "token")
    known = tokens.tokens
    text = (tmp_path / "token").read_text()
    (tmp_path / "token").unlink()
    with caplog.at_level(logging.WARNING):
        assert [tokens.tokens for _ in range(3)] == [known] * 3
    [told] = [each.message for each in caplog.records if "cannot be read" in each.message]
    assert told.endswith("cannot be read again: No such file or directory. The tokens read before stay valid")
    (tmp_path / "token").write_text(f"{text}another second read\n")
    assert [each.name for each in tokens.tokens] == ["default", "second"]
