"""`WS /socket`: frames, turns, access, ends and backpressure of WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import signal
import socket as sockets
import struct
import termios
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, cast

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.access import Caller
from agent_runtime_core.server.settings import ServerSettings
from agent_runtime_core.server.socket import Socket
from agent_runtime_core.turns import TurnManager
from tests.server.conftest import TOKEN, Served
from tests.server.streaming import SLOW, SMALL, resume_as_it_ends, serving, streams_of
from tests.support.runs import Script, soon
from tests.support.scripted_model import Scripted

KIB = 1024
PIECE = 16 * KIB
OFFERED = ["agent-runtime", f"bearer.{TOKEN}"]


def url(port: int) -> str:
    return f"ws://127.0.0.1:{port}/api/v1/socket"


class Client:
    """A socket whose frames are dicts."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"type": kind, **fields}))

    async def get(self) -> dict[str, Any]:
        found = json.loads(await self.connection.recv())
        assert isinstance(found, dict)
        return found

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The reply to a frame; events of runs that come before it are skipped."""
        await self.send(kind, **fields)
        while (frame := await self.get())["type"] not in ("ack", "error"):
            pass
        return frame

    async def until_done(self, run_id: str) -> list[dict[str, Any]]:
        """The frames of a run up to its last one."""
        found: list[dict[str, Any]] = []
        while not found or found[-1]["type"] not in ("done", "error"):
            if (frame := await self.get()).get("run_id") == run_id:
                found.append(frame)
        return found


@contextlib.asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncIterator[Client]:
    async with connect(url(port), **{"subprotocols": OFFERED, "compression": None, **options}) as connection:
        yield Client(connection)


@contextlib.asynccontextmanager
async def working(runner: AgentRunner) -> AsyncIterator[None]:
    """A worker in this loop."""
    task = asyncio.ensure_future(runner.run_loop(handle_signals=False))
    try:
        yield
    finally:
        runner.stop()
        await task


@pytest.fixture
def turns(runner: AgentRunner) -> TurnManager:
    return TurnManager(runner, client=Scripted(say=lambda messages: f"You said: {messages[-1]['content']}"))


@pytest.mark.parametrize("execute", [False, True], ids=["pending", "finished again"])
async def test_a_run_is_done_when_it_has_a_final_state(
    app: Any, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch, execute: bool
) -> None:
    run_id = str(await runner.submit("echo"))
    await runner.cancel(run_id)
    resume_as_it_ends(monkeypatch, runner, execute=execute)
    async with serving(app) as port, connected(port) as client:
        await client.send("follow", run_id=run_id)
        *_, event, done = await client.until_done(run_id)
    assert event["event"]["type"] == "run.succeeded"
    assert done == {"type": "done", "run_id": run_id, "state": "succeeded"}


async def test_a_conversation_over_one_socket(app: Any, runner: AgentRunner) -> None:
    async with working(runner), serving(app) as port, connected(port) as client:
        assert client.connection.subprotocol == "agent-runtime"
        for number, text in enumerate(("Hello", "How are you?")):
            turn = {"text": text, "conversation_id": "c", "turn_id": f"turn-{number}"}
            ack = await client.ask("turn", turn=turn, ref=number)
            assert (ack["type"], ack["ref"]) == ("ack", number)
            frames = await client.until_done(ack["run_id"])
            deltas = [frame["delta"] for frame in frames if frame["type"] == "delta"]
            assert "".join(deltas) == f"You said: {text}"
            assert frames[-1] == {"type": "done", "run_id": ack["run_id"], "state": "succeeded"}
            assert [frame["sequence"] for frame in frames[:-1]] == list(range(len(frames) - 1))
            last = frames[-2]["event"]
            assert (last["type"], last["sequence"]) == ("run.succeeded", frames[-2]["sequence"])
            assert set(last) == {"sequence", "type", "time", "payload"}


async def test_a_turn_that_is_sent_again_is_followed_from_a_position(app: Any, runner: AgentRunner) -> None:
    turn = {"text": "Hello", "turn_id": "turn-1"}
    async with working(runner), serving(app) as port:
        async with connected(port) as client:
            ack = await client.ask("turn", turn=turn)
            frames = await client.until_done(ack["run_id"])
        async with connected(port) as client:
            again = await client.ask("turn", turn=turn, after=2)
            assert again["run_id"] == ack["run_id"]
            assert await client.until_done(ack["run_id"]) == frames[3:]
    assert len(await runner.runs(agent="turn")) == 1


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"text": "Hi", "mesages": []}, "mesages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"messages": "Hi"}, "messages"),
        ({}, "messages"),
        (7, "turn"),
        ({"text": "Hi", "personality": "nobody"}, "personality"),
        ({"text": "Hi", "turn_id": "x" * 300}, "turn_id"),
    ],
)
async def test_a_malformed_turn_gets_an_error_and_the_socket_stays_open(
    app: Any, runner: AgentRunner, turn: Any, field: str
) -> None:
    async with working(runner), serving(app) as port, connected(port) as client:
        error = await client.ask("turn", turn=turn, ref="t")
        assert (error["type"], error["status"], error["ref"]) == ("error", 422, "t")
        assert error["field"] == field
        ack = await client.ask("turn", turn={"text": "Hi"})
        assert (await client.until_done(ack["run_id"]))[-1]["state"] == "succeeded"


@pytest.mark.parametrize(
    ("text", "status", "field"),
    [
        ("", 400, None),
        ("{", 400, None),
        ("[]", 400, None),
        ('{"type": NaN}', 400, None),
        ("[" * 30_000, 422, None),
        (b"{}", 400, None),
        ("{}", 422, "type"),
        ('{"type": "folow", "run_id": "r"}', 422, "type"),
        ('{"type": ["follow"]}', 422, "type"),
        ('{"type": "follow"}', 422, "run_id"),
        ('{"type": "follow", "run_id": 7}', 422, "run_id"),
        ('{"type": "follow", "run_id": "r", "after": -1}', 422, "after"),
        ('{"type": "follow", "run_id": "r", "after": true}', 422, "after"),
        ('{"type": "follow", "run_id": "r", "after": 1e3}', 422, "after"),
        ('{"type": "follow", "run_id": "r", "aftr": 1}', 422, "aftr"),
        ('{"type": "follow", "run_id": "r", "ref": {}}', 422, "ref"),
        ('{"type": "follow", "run_id": "unknown"}', 404, None),
        ('{"type": "follow", "run_id": ""}', 404, None),
        ('{"type": "cancel", "run_id": "unknown"}', 404, None),
        ('{"type": "signal", "run_id": "r", "name": ""}', 422, None),
        ('{"type": "signal", "run_id": "r", "name": "x", "payload": "\\ud800"}', 422, None),
    ],
)
async def test_a_bad_frame_gets_an_error_and_the_socket_stays_open(
    app: Any, runner: AgentRunner, text: str | bytes, status: int, field: str | None
) -> None:
    await runner.submit("echo", {}, run_id="r")
    async with serving(app) as port, connected(port) as client:
        await client.connection.send(text)
        error = await client.get()
        assert (error["type"], error["status"], error.get("field")) == ("error", status, field)
        assert (await client.ask("follow", run_id="r", ref=1))["type"] == "ack"


async def test_one_socket_follows_many_runs(app: Any, runner: AgentRunner) -> None:
    async def body(ctx: Any) -> None:
        pass

    runner.registry.register(Script(body, "quick"))
    ids = [str(await runner.submit("quick", {"n": n}, run_id=f"run/{n}")) for n in range(5)]
    async with serving(app) as port, connected(port) as client:
        for n, run_id in enumerate(ids):
            assert (await client.ask("follow", run_id=f"run/{n}", ref=n))["run_id"] == run_id
        async with working(runner):
            found: dict[str, list[int]] = {each: [] for each in ids}
            done: set[str] = set()
            while len(done) < len(ids):
                frame = await client.get()
                if frame["type"] == "done":
                    done.add(frame["run_id"])
                else:
                    found[frame["run_id"]].append(frame["sequence"])
        assert list(found.values()) == [[0, 1]] * 5
        assert (await client.ask("follow", run_id="run/0", after=0, ref=9))["ref"] == 9
        assert [frame.get("sequence") for frame in await client.until_done(ids[0])] == [1, None]


async def test_a_run_is_answered_and_cancelled_over_a_socket(app: Any, runner: AgentRunner) -> None:
    async def body(ctx: Any) -> Any:
        answer = await ctx.approve("deploy", {"to": "production"})
        signal = await ctx.wait_for_signal("go")
        return [answer, signal]

    runner.registry.register(Script(body, "asking"))
    first, second = [str(await runner.submit("asking", {}, run_id=name)) for name in ("first", "second")]
    async with working(runner), serving(app) as port, connected(port) as client:
        await client.ask("follow", run_id="first")
        while (frame := await client.get()).get("event", {}).get("type") != "approval.requested":
            pass
        request_id = frame["event"]["payload"]["request_id"]
        answer = {"run_id": "first", "name": "deploy", "answer": {"ok": True}, "request_id": request_id}
        assert (await client.ask("approve", **answer, ref=1))["type"] == "ack"
        again = await client.ask("approve", **answer, ref=2)
        assert (again["type"], again["status"], again["ref"]) == ("error", 409, 2)
        assert (await client.ask("signal", run_id="first", name="go", payload=7, ref=3))["type"] == "ack"
        assert (await client.until_done(first))[-1]["state"] == "succeeded"
        assert (await runner.wait("first")).final_output == {"value": [{"ok": True}, 7]}
        late = await client.ask("signal", run_id="first", name="go", ref=4)
        assert (late["type"], late["status"]) == ("error", 410)
        late = await client.ask("approve", **answer, ref=5)
        assert (late["type"], late["status"]) == ("error", 410)
        await client.ask("follow", run_id="second")
        assert (await client.ask("cancel", run_id="second", ref=6))["ref"] == 6
        assert (await client.until_done(second))[-1]["state"] == "cancelled"
        assert (await client.ask("cancel", run_id="second"))["state"] == "cancelled"


async def test_a_socket_follows_a_run_past_what_its_agent_emits(app: Any, runner: AgentRunner) -> None:
    async def body(ctx: Any) -> str:
        for kind in ("run.succeeded", "run.failed"):
            await ctx.emit(kind, {"lie": True})
        await ctx.wait_for_signal("go")
        return "true"

    runner.registry.register(Script(body, "liar"))
    await runner.submit("liar", {}, run_id="r")
    async with working(runner), serving(app) as port, connected(port) as client:
        run_id = (await client.ask("follow", run_id="r"))["run_id"]
        frames = [await client.get() for _ in range(3)]
        await client.send("signal", run_id="r", name="go")
        frames += await client.until_done(run_id)
    events = [frame["event"] for frame in frames if frame["type"] == "event"]
    marks = [(each["type"], each.get("from_agent")) for each in events if each["type"] != "run.resumed"]
    assert marks == [("run.started", None), ("run.succeeded", True), ("run.failed", True), ("run.succeeded", None)]
    assert frames[-1] == {"type": "done", "run_id": frames[0]["run_id"], "state": "succeeded"}


async def test_a_run_that_is_no_longer_followed_sends_nothing(app: Any, runner: AgentRunner) -> None:
    gate = asyncio.Event()

    async def body(ctx: Any) -> None:
        await gate.wait()

    runner.registry.register(Script(body, "gated"))
    run_id = str(await runner.submit("gated", {}, run_id="r"))
    async with working(runner), serving(app) as port, connected(port) as client:
        await client.ask("follow", run_id="r", ref=1)
        assert (await client.get())["sequence"] == 0
        await client.ask("unfollow", run_id="r", ref=2)
        gate.set()
        await runner.wait("r")
        await client.send("follow", run_id="r", after=0, ref=3)
        assert (await client.get())["ref"] == 3
        assert [frame.get("sequence") for frame in await client.until_done(run_id)] == [1, None]


# -- access


async def close_code(port: int, **options: Any) -> int | None:
    async with connected(port, **options) as client:
        with contextlib.suppress(ConnectionClosed):
            await client.get()
        return client.connection.close_code


@pytest.mark.parametrize("offered", [None, ["agent-runtime"], ["bearer."], ["bearer.wrong"], ["Bearer.x"], [TOKEN]])
async def test_a_socket_without_a_valid_token_is_closed(app: Any, offered: Any) -> None:
    async with serving(app) as port:
        assert await close_code(port, subprotocols=offered) == 4401


async def test_a_token_in_the_url_is_not_read(app: Any) -> None:
    async with serving(app) as port:
        for query in (f"token={TOKEN}", f"access_token={TOKEN}", f"bearer={TOKEN}"):
            async with connect(f"{url(port)}?{query}") as connection:
                with pytest.raises(ConnectionClosed):
                    await connection.recv()
                assert connection.close_code == 4401


async def test_the_token_may_be_the_only_subprotocol_or_a_header(app: Any) -> None:
    async with serving(app) as port:
        for options in (
            {"subprotocols": [f"bearer.{TOKEN}"]},
            {"subprotocols": None, "additional_headers": {"Authorization": f"Bearer {TOKEN}"}},
        ):
            async with connected(port, **options) as client:
                assert (await client.ask("follow", run_id="unknown"))["status"] == 404


async def test_a_page_needs_the_cookie_and_the_own_origin(app: Any) -> None:
    async with serving(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1") as browser:
        own = f"http://127.0.0.1:{port}"
        headers = {"Origin": own, "Sec-Fetch-Site": "same-origin", "X-Agent-Runtime": "1"}
        signed_in = await browser.post("/session", json={"token": TOKEN}, headers=headers)
        assert signed_in.status_code < 300
        [(name, value)] = browser.cookies.items()
        cookie = {"subprotocols": None, "additional_headers": {"Cookie": f"{name}={value}"}}
        async with connected(port, **cookie, origin=own) as client:
            assert (await client.ask("follow", run_id="unknown"))["status"] == 404
        assert await close_code(port, **cookie) == 4403
        for options in (cookie, {}):
            with pytest.raises(InvalidStatus) as refused:
                await close_code(port, **options, origin="https://evil.example")
            assert refused.value.response.status_code == 403


async def test_scopes_and_may_count(runner: AgentRunner, make_app: Callable[..., Any]) -> None:
    await runner.submit("echo", {}, run_id="r")
    await runner.submit("echo", {}, run_id="hidden")

    def as_caller(*scopes: str) -> Any:
        return make_app(
            authenticate=lambda _: Caller("ada", frozenset(scopes), may=lambda verb, run: run.run_key != "hidden")
        )

    async with serving(as_caller("read")) as port:
        assert await close_code(port) == 4403
    async with serving(as_caller("run")) as port, connected(port) as client:
        for kind in ("follow", "cancel"):
            assert (await client.ask(kind, run_id="r"))["status"] == 403
        assert (await client.ask("signal", run_id="r", name="go"))["status"] == 403
    frames = {"follow": {}, "cancel": {}, "signal": {"name": "go"}, "approve": {"name": "go"}}
    for scopes, allowed in (
        ("result", ["follow"]), ("read", ["follow"]), ("send", ["signal"]), ("act", ["cancel", "signal"]),
        ("approve", ["approve"]),
    ):  # fmt: skip
        async with serving(as_caller("run", scopes)) as port, connected(port) as client:
            codes = {
                kind: (await client.ask(kind, run_id="unknown", **more))["status"] for kind, more in frames.items()
            }
            assert codes == {kind: 404 if kind in allowed else 403 for kind in frames}, scopes
    async with serving(as_caller("run", "read", "act")) as port, connected(port) as client:
        assert (await client.ask("follow", run_id="r"))["type"] == "ack"
        for kind in ("follow", "cancel"):
            assert (await client.ask(kind, run_id="hidden"))["status"] == 404


async def test_a_turn_that_the_caller_could_not_have_is_not_stored(
    runner: AgentRunner, turns: TurnManager, make_app: Callable[..., Any]
) -> None:
    def tenant(verb: str, run: Any) -> bool:
        return bool(run.metadata.get("tenant") == "anna")

    await turns.start_turn({"text": "Hi", "turn_id": "of-ben", "metadata": {"tenant": "ben"}})
    app = make_app(turns=turns, authenticate=lambda _: Caller("anna", may=tenant))
    async with serving(app) as port, connected(port) as client:
        for turn, status in (
            ({"text": "Hi", "metadata": {"tenant": "ben"}}, 403),
            ({"text": "Hi"}, 403),
            ({"text": "Hi", "turn_id": "of-ben", "metadata": {"tenant": "anna"}}, 409),
        ):
            assert (await client.ask("turn", turn=turn))["status"] == status
        ack = await client.ask("turn", turn={"text": "Hi", "turn_id": "own", "metadata": {"tenant": "anna"}})
    assert ack["type"] == "ack"
    assert [run.metadata["turn_key"] for run in await runner.runs()] == ["of-ben", "own"]


async def test_turns_of_a_socket_count_in_the_limit_of_pending_runs(make_app: Callable[..., Any]) -> None:
    async with serving(make_app(settings=ServerSettings(max_pending=1))) as port, connected(port) as client:
        assert (await client.ask("turn", turn="One"))["type"] == "ack"
        assert (await client.ask("turn", turn="Two"))["status"] == 429


async def test_the_number_of_sockets_is_limited(make_app: Callable[..., Any]) -> None:
    for settings, status in ((ServerSettings(max_streams=1), 503), (ServerSettings(max_streams_per_caller=1), 429)):
        async with serving(make_app(settings=settings)) as port, connected(port):
            with pytest.raises(InvalidStatus) as refused:
                await close_code(port)
            assert refused.value.response.status_code == status


async def test_the_number_of_followed_runs_is_limited(make_app: Callable[..., Any], runner: AgentRunner) -> None:
    for name in ("a", "b", "c"):
        await runner.submit("echo", {}, run_id=name)
    app = make_app(settings=ServerSettings(max_streams_per_caller=2))
    async with serving(app) as port, connected(port) as client:
        replies = [await client.ask("follow", run_id=name, ref=name) for name in ("a", "b", "c")]
        assert [each["type"] for each in replies] == ["ack", "ack", "error"]
        assert replies[2]["status"] == 429
        assert (await client.ask("turn", turn={"text": "Hi"}))["status"] == 429
        assert await runner.runs(agent="turn") == []
        await client.ask("unfollow", run_id="a")
        assert (await client.ask("follow", run_id="c"))["type"] == "ack"


# -- ends


async def test_a_frame_that_is_too_large_closes_the_socket(app: Any) -> None:
    async with serving(app) as port, connected(port) as client:
        await client.connection.send("x" * (64 * KIB))
        assert (await client.get())["status"] == 400
        await client.connection.send("x" * (64 * KIB + 1))
        with pytest.raises(ConnectionClosed):
            await client.get()
        assert client.connection.close_code == 1009


async def test_a_server_that_shuts_down_closes_its_sockets(app: Any, runner: AgentRunner) -> None:
    await runner.submit("echo", {}, run_id="r")
    async with serving(app) as port, connected(port) as client:
        await client.ask("follow", run_id="r")
        app.state.server.draining.set()
        with pytest.raises(ConnectionClosed):
            await client.get()
        assert client.connection.close_code == 1012


async def test_closing_a_socket_does_not_stop_its_turn(app: Any, runner: AgentRunner) -> None:
    async with serving(app) as port:
        async with connected(port) as client:
            ack = await client.ask("turn", turn={"text": "Hello"})
        await soon(lambda: app.state.server.limits.open_streams == 0)
        async with working(runner):
            assert (await runner.wait(ack["run_id"])).status == "succeeded"


# -- backpressure


class Pouring:
    """An agent that answers in pieces, and counts the bytes it has published."""

    def __init__(self, runner: AgentRunner, size: int, piece: int = PIECE) -> None:
        self.published = 0
        self._runner = runner
        self._piece = piece
        self._left = size
        runner.registry.register(Script(self._body, "pouring"))

    def has_more_than(self, size: int) -> bool:
        return self.published > size

    async def _body(self, ctx: Any) -> RunResult:
        await soon(lambda: bool(self._runner._flow._buffers))  # the reader, which it is to wait for, is there
        while self.published < self._left:
            await ctx.emit("assistant.delta", {"delta": "x" * self._piece})
            self.published += self._piece
        return RunResult()


class SlowSocket:
    """A client whose kernel keeps little and that reads nothing, until `read`."""

    def __init__(self) -> None:
        self.raw = sockets.socket()
        self.raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, SMALL)
        self.raw.setblocking(False)
        self.taken = 0

    async def follow(self, port: int, run_id: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.raw, ("127.0.0.1", port))
        await loop.sock_sendall(
            self.raw,
            (
                f"GET /api/v1/socket HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
                "Upgrade: websocket\r\nConnection: Upgrade\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
                f"Sec-WebSocket-Protocol: bearer.{TOKEN}\r\n\r\n"
            ).encode(),
        )
        answer = await loop.sock_recv(self.raw, 4096)
        assert answer.startswith(b"HTTP/1.1 101")
        frame = json.dumps({"type": "follow", "run_id": run_id}).encode()
        await loop.sock_sendall(self.raw, bytes((0x81, 0x80 | len(frame), 0, 0, 0, 0)) + frame)

    async def read_until(self, end: bytes) -> None:
        """All up to and with these bytes."""
        last = b""
        while end not in last:
            part = await asyncio.get_running_loop().sock_recv(self.raw, 65536)
            assert part, "the socket was closed"
            self.taken += part.count(b"x")
            last = last[-len(end) :] + part

    async def read(self, size: int) -> bytes:
        """Up to so many bytes; fewer only at the end."""
        loop, found = asyncio.get_running_loop(), bytearray()
        while len(found) < size and (part := await loop.sock_recv(self.raw, min(65536, size - len(found)))):
            found += part
        self.taken += found.count(b"x")
        return bytes(found)

    def in_kernel(self, server: Any) -> int:
        """Bytes that the kernel holds on their way here: those that the server's end has sent, and nobody has read."""
        return _queued(server, termios.TIOCOUTQ) + _queued(self.raw, termios.FIONREAD)


def _queued(connection: Any, which: int) -> int:
    [size] = struct.unpack("i", fcntl.ioctl(connection.fileno(), which, bytes(4)))
    return int(size)


async def paused(runner: AgentRunner) -> None:
    """Returns when the run waits for its reader."""
    await soon(lambda: any(each._waiters for each in runner._flow._buffers.values()))


#: Beyond what the reader has taken and the kernel holds: `max_unsent_bytes`, and the transport.
UNSENT = (128 + 64) * KIB
GROWTH = 2 * KIB * KIB


def socket_of(app: Any) -> Any:
    """The server's end of the only open socket."""
    [reader] = streams_of(app)._readers
    assert isinstance(reader, Socket)
    return cast("Any", reader._socket._receive).__self__.transport.get_extra_info("socket")


@contextlib.contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """A function that returns how many bytes this process has allocated at most since the start of the block."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def slow_socket() -> Any:
    found = SlowSocket()
    with found.raw:
        yield found


@pytest.mark.sentence("001", "pauses consumption if the output WebSocket buffer exceeds 128 KB")
async def test_a_run_waits_for_a_socket_that_does_not_read(
    app: Any, runner: AgentRunner, slow_socket: SlowSocket
) -> None:
    pouring = Pouring(runner, 10 * KIB * KIB)
    await runner.submit("pouring", {}, run_id="r")
    async with working(runner), serving(app, **SLOW) as port:
        await slow_socket.follow(port, "r")
        for _ in range(3):
            await paused(runner)
            published = pouring.published
            assert published <= slow_socket.taken + slow_socket.in_kernel(socket_of(app)) + UNSENT
            await slow_socket.read(KIB * KIB)
            await soon(partial(pouring.has_more_than, published))
        await slow_socket.read_until(b'"type":"done"')
        assert pouring.published == 10 * KIB * KIB


async def test_a_process_does_not_keep_what_a_socket_has_not_read(
    app: Any, runner: AgentRunner, slow_socket: SlowSocket
) -> None:
    pouring = Pouring(runner, 10 * KIB * KIB)
    await runner.submit("pouring", {}, run_id="r")
    async with working(runner), serving(app, **SLOW) as port:
        await slow_socket.follow(port, "r")
        await paused(runner)
        with traced_memory() as peak:
            while pouring.published < 6 * KIB * KIB:
                await slow_socket.read(64 * KIB)
                await paused(runner)
            assert peak() <= GROWTH
        await slow_socket.read_until(b'"type":"done"')


async def test_a_run_continues_when_its_socket_is_gone(app: Any, runner: AgentRunner, slow_socket: SlowSocket) -> None:
    pouring = Pouring(runner, 10 * KIB * KIB)
    await runner.submit("pouring", {}, run_id="r")
    async with working(runner), serving(app, **SLOW) as port:
        await slow_socket.follow(port, "r")
        await paused(runner)
        slow_socket.raw.close()
        assert (await runner.wait("r")).status == "succeeded"
        assert pouring.published == 10 * KIB * KIB
        await soon(lambda: app.state.server.limits.open_streams == 0)


async def test_a_socket_that_accepts_nothing_is_closed_and_the_run_continues(
    app: Any, runner: AgentRunner, slow_socket: SlowSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core.server.socket.CLOSE_SECONDS", 60.0)
    Pouring(runner, KIB * KIB)
    await runner.submit("pouring", {}, run_id="r")
    async with working(runner), serving(app, **SLOW) as port:
        await slow_socket.follow(port, "r")
        streams = streams_of(app)
        await soon(lambda: any(each.sending for each in streams._readers))
        await paused(runner)
        streams.look(0)
        streams.look(121)
        assert (await runner.wait("r")).status == "succeeded"
        # A client that reads after all gets the code.
        await slow_socket.read_until(b"\x88\x02" + (4408).to_bytes(2, "big"))


async def test_a_socket_that_accepts_nothing_is_dropped(
    app: Any, runner: AgentRunner, slow_socket: SlowSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core.server.socket.CLOSE_SECONDS", 0.0)
    Pouring(runner, KIB * KIB, 200 * KIB)
    await runner.submit("pouring", {}, run_id="r")
    async with working(runner), serving(app, **SLOW) as port:
        await slow_socket.follow(port, "r")
        streams = streams_of(app)
        await soon(lambda: any(each.sending for each in streams._readers))
        await paused(runner)
        streams.look(0)
        streams.look(121)
        assert (await runner.wait("r")).status == "succeeded"
        await soon(lambda: app.state.server.limits.open_streams == 0)
        with contextlib.suppress(ConnectionResetError):
            # Only what the kernel had comes yet: the rest of the frame was dropped with the connection.
            assert len(await slow_socket.read(20 * KIB * KIB)) < 100 * KIB


async def test_a_turn_over_the_socket_of_a_served_process(serve: Callable[..., Served]) -> None:
    served = await asyncio.to_thread(serve)
    async with connected(served.port) as client:
        error = await client.ask("turn", turn={"text": ""}, ref=1)
        assert (error["status"], error["field"], error["ref"]) == (422, "text", 1)
        ack = await client.ask("turn", turn={"text": "add 12 and 30"}, ref=2)
        *events, done = await client.until_done(ack["run_id"])
        assert [each["sequence"] for each in events] == list(range(len(events)))
        assert (done["type"], done["state"]) == ("done", "succeeded")
        assert "42" in json.dumps(events[-1])
        served.send(signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            await client.get()
        assert client.connection.close_code == 1012
    assert await served.aended() == 0
