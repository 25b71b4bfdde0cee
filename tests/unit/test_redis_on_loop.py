"""The event loop that sends and reads commits itself, and what it leaves to the thread of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("redis")

from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.redis import connection, pipeline
from agent_runtime_core._engines.redis.connection import LoopSocket
from agent_runtime_core._engines.redis.engine import RedisEngine
from agent_runtime_core._engines.redis.script import RedisOperationSet
from agent_runtime_core._engines.shared_engine import Process
from agent_runtime_core.errors import StorageBusy
from tests.support.fault_runs import until
from tests.support.redis_proxy import Cut
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.redis

PATIENT = 30.0  # seconds, where it is not the point that somebody loses patience

LISTS = RedisOperationSet(
    "lists",
    {},
    script="""
ops['add'] = function(key, value)
  write('RPUSH', P .. 'list:' .. key, value)
  return value
end

ops['list'] = function(key)
  return call('LRANGE', P .. 'list:' .. key, 0, -1)
end

ops['repeat'] = function(value, times)
  return string.rep(value, times)
end
""",
)


@pytest.fixture(autouse=True)
def _a_server_may_stand_still_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER", PATIENT)
    monkeypatch.setattr(pipeline, "LATE", PATIENT)  # on a busy machine, an answer may take longer


@contextlib.contextmanager
def opened(url: str) -> Iterator[RedisEngine]:
    engine = RedisEngine.open(url)
    engine.add(LISTS)
    engine.timeout = PATIENT
    try:
        yield engine
    finally:
        if not engine._closed:
            engine.close_now()


@pytest.fixture
def engine(redis_url: str) -> Iterator[RedisEngine]:
    with opened(redis_url) as engine:
        yield engine


async def add(engine: RedisEngine, value: str, key: str = "k") -> str:
    [added] = await engine.commit(None, [Op("add", (key, value))])
    return str(added)


async def entries(engine: RedisEngine, key: str = "k") -> list[str]:
    return list(await engine.ask("list", key) or [])


async def taken(engine: RedisEngine) -> None:
    """Have the running loop use the connection."""
    await engine.ask("list", "none")  # the thread connects
    await until(lambda: engine._pipeline._queued == 0)
    await engine.ask("list", "none")
    assert engine._pipeline._socket is not None
    assert engine._pipeline._socket.loop is asyncio.get_running_loop()


async def sent(engine: RedisEngine) -> None:
    """Let the loop send what a new task requests."""
    for _ in range(2):
        await asyncio.sleep(0)
    assert engine._pipeline._in_flight is not None


@contextlib.contextmanager
def without_thread(engine: RedisEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def put(batch: Any) -> None:
        raise AssertionError(f"left to the thread: {batch}")

    with monkeypatch.context() as patch:
        patch.setattr(engine._pipeline, "_put", put)
        yield


async def test_a_loop_sends_and_reads_by_itself(engine: RedisEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    await taken(engine)
    with without_thread(engine, monkeypatch):
        for n in range(5):
            assert await add(engine, str(n)) == str(n)
        many = [str(n) for n in range(300)]
        assert await asyncio.gather(*(add(engine, n, "many") for n in many)) == many
        engine.commit_nowait(None, [Op("add", ("k", "5"))])
        assert await entries(engine) == list("012345")
        assert await entries(engine, "many") == many


async def test_requests_during_a_call_go_together_in_the_next(engine: RedisEngine) -> None:
    await taken(engine)
    counts: list[int] = []
    request = engine._connection.request

    def counted(last: bytes) -> bytes:
        counts.append(last.count(b'"add"'))
        return request(last)

    engine._connection.request = counted  # type: ignore[method-assign]
    first = asyncio.ensure_future(add(engine, "0"))
    await sent(engine)
    others = [asyncio.ensure_future(add(engine, str(n))) for n in range(1, 4)]
    assert await asyncio.gather(first, *others) == list("0123")
    assert sum(counts) == 4
    assert len(counts) <= 3
    assert await entries(engine) == list("0123")


async def test_a_thread_overtakes_nothing_that_a_loop_requested_before(engine: RedisEngine) -> None:
    await taken(engine)
    for round_ in range(20):
        key = f"k{round_}"
        engine.commit_nowait(None, [Op("add", (key, "0"))])
        engine._batches.here().flush()
        engine.commit_nowait(None, [Op("add", (key, "1"))])
        engine._batches.here().flush()
        # The loop does not turn until this is answered.
        assert engine.commit_from_thread(None, [Op("add", (key, "2"))]) == ["2"]
        assert await entries(engine, key) == list("012")


@pytest.mark.parametrize("taken_bytes", [0, 1, 40])
async def test_what_the_socket_does_not_take_is_sent_by_the_thread(
    taken_bytes: int, engine: RedisEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await taken(engine)

    def full(used: LoopSocket, request: bytes) -> bytes:
        assert used._socket.send(request[:taken_bytes]) == taken_bytes
        return request[taken_bytes:]

    with monkeypatch.context() as patch:
        patch.setattr(LoopSocket, "send", full)
        assert await asyncio.gather(*(add(engine, n) for n in "012")) == list("012")
        assert await add(engine, "3") == "3"
    assert await entries(engine) == list("0123")


async def test_large_requests_and_answers_are_left_to_the_thread(engine: RedisEngine) -> None:
    await taken(engine)
    for size in (pipeline.ON_LOOP // 2, pipeline.ON_LOOP + 1, connection.PIECE, connection.PIECE + 1):
        assert await engine.ask("repeat", "ab", size) == "ab" * size
        assert await add(engine, "x" * size) == "x" * size
        small, large = await asyncio.gather(add(engine, "s"), add(engine, "y" * size))
        assert (small, large) == ("s", "y" * size)
    assert [len(each) for each in await entries(engine)] == [
        length
        for size in (pipeline.ON_LOOP // 2, pipeline.ON_LOOP + 1, connection.PIECE, connection.PIECE + 1)
        for length in (size, 1, size)
    ]


@pytest.mark.parametrize("reply", [b"*1\r\n$4\r\n[nul", b"*2\r\n$2\r\n[]\r\n", b"*1", b"*1\r\n$9", b"-ERR no\r\n", b""])
def test_nothing_is_read_of_an_answer_that_is_not_whole_and_plain(reply: bytes) -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.new_event_loop()
    conn = type("Conn", (), {"_sock": ours})
    loop_socket = LoopSocket(loop, conn, lambda: None)
    try:
        with pytest.raises(BlockingIOError):
            loop_socket.answer()
        theirs.sendall(reply)
        if not reply:
            theirs.shutdown(socket.SHUT_WR)
        assert loop_socket.answer() is None
        assert ours.recv(100) == reply
        if reply:
            theirs.sendall(b'*2\r\n$2\r\n[]\r\n$7\r\n["\r\n$"]\r\n*1')
            assert loop_socket.answer() == [b"[]", b'["\r\n$"]']
            assert ours.recv(100) == b"*1"
    finally:
        loop_socket.close()
        loop.close()
        ours.close()
        theirs.close()


async def test_a_late_answer_is_awaited_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LATE", 0.01)
    with RedisServer() as server, opened(server.url) as engine:
        await taken(engine)
        server.stop()
        writing = asyncio.ensure_future(add(engine, "1"))
        await until(lambda: engine._pipeline._in_flight is None and engine._pipeline._queued == 1)
        assert engine._pipeline._socket is None
        assert not writing.done()
        server.cont()
        assert await writing == "1"
        assert await entries(engine) == ["1"]


async def test_a_server_without_an_answer_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LATE", 0.01)
    monkeypatch.setattr(connection, "ANSWER", 0.2)
    with RedisServer() as server, opened(server.url) as engine:
        await taken(engine)
        server.stop()
        engine.commit_nowait(None, [Op("add", ("k", "0"))])
        with pytest.raises(StorageBusy, match="The outcome of the write is unknown"):
            await add(engine, "1")
        server.cont()
        assert await add(engine, "2") == "2"
        assert [each for each in await entries(engine) if each != "1"][-2:] == ["0", "2"], "it was repeated, and first"


async def test_a_connection_that_is_cut_during_a_call_leaves_its_outcome_unknown(redis_server: RedisServer) -> None:
    with Cut(redis_server.port) as proxy, opened(f"{proxy.url}?prefix=cutonloop") as engine:
        for n, when in enumerate(("before", "after")):
            await taken(engine)
            proxy.cut(when)  # type: ignore[arg-type]
            with pytest.raises(StorageBusy, match="The outcome of the write is unknown"):
                await add(engine, str(n))
        await taken(engine)
        assert await entries(engine) == ["1"]


async def test_an_idle_connection_that_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE", 3600.0)
    with RedisServer(appendonly="yes", appendfsync="always") as server, opened(server.url) as engine:
        await taken(engine)
        await add(engine, "1")
        await asyncio.to_thread(server.restart)
        await until(lambda: engine._pipeline._socket is None)
        assert engine._connection.conn is None
        assert await add(engine, "2") == "2", "nobody is told that it was gone"


async def test_a_connection_that_sends_what_nobody_asked_for_is_dropped(engine: RedisEngine) -> None:
    await taken(engine)
    conn = engine._connection.conn
    conn.send_command("PING")
    await until(lambda: engine._connection.conn is None)
    assert await add(engine, "1") == "1"
    assert engine._connection.conn is not conn


async def test_of_several_loops_only_one_uses_the_connection(engine: RedisEngine) -> None:
    await taken(engine)

    async def other() -> bool:
        assert await asyncio.gather(*(add(engine, n, "other") for n in "012")) == list("012")
        return engine._pipeline._socket is None or engine._pipeline._socket.loop is not asyncio.get_running_loop()

    mine = asyncio.gather(*(add(engine, str(n)) for n in range(100)))
    assert await asyncio.to_thread(asyncio.run, other())
    assert await mine == [str(n) for n in range(100)]
    assert await entries(engine, "other") == list("012")


def test_a_new_loop_takes_the_connection_of_a_closed_one(engine: RedisEngine) -> None:
    for _ in range(3):
        asyncio.run(taken(engine))


def test_a_commit_that_a_loop_leaves_in_flight_is_applied(engine: RedisEngine) -> None:
    async def leave(key: str) -> None:
        await taken(engine)
        for n in "01":
            engine.commit_nowait(None, [Op("add", (key, n))])
            engine._batches.here().flush()

    asyncio.run(leave("a"))
    assert engine.commit_from_thread(None, [Op("list", ("a",))]) == [["0", "1"]]
    asyncio.run(leave("b"))
    assert asyncio.run(entries(engine, "b")) == ["0", "1"]


@pytest.mark.parametrize("by", ["loop", "thread"])
async def test_closing_answers_what_is_in_flight(by: str, redis_url: str) -> None:
    with opened(redis_url) as engine:
        await taken(engine)
        engine.commit_nowait(None, [Op("add", ("k", "0"))])
        engine._batches.here().flush()
        waiting = [asyncio.ensure_future(add(engine, n)) for n in "12"]
        await asyncio.sleep(0)
        if by == "loop":
            await engine.close()
        else:
            await asyncio.sleep(0)  # else the loop has not sent them
            await asyncio.to_thread(engine.close_now)
        assert await asyncio.gather(*waiting) == ["1", "2"]
        await until(lambda: engine._pipeline._socket is None)
    with opened(redis_url) as again:
        assert await entries(again) == list("012")


def test_closing_without_a_running_loop_closes_the_socket(redis_url: str) -> None:
    with opened(redis_url) as engine:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(taken(engine))
        used = engine._pipeline._socket
        assert used is not None
        engine.close_now()
        assert used._socket.fileno() == -1
        loop.close()


async def test_a_forked_child_reads_no_answer_of_its_parent(
    engine: RedisEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await taken(engine)
    writing = asyncio.ensure_future(add(engine, "1"))
    await sent(engine)
    with monkeypatch.context() as forked:
        forked.setattr(Process, "forks", Process.forks + 1)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not writing.done()
    assert await writing == "1"


async def test_a_loop_that_cannot_watch_sockets_leaves_all_to_the_thread(
    engine: RedisEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_reader(*args: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", add_reader)
    for n in "012":
        assert await add(engine, n) == n
    assert engine._pipeline._socket is None


async def test_an_interrupted_loop_still_wakes_the_callers(
    engine: RedisEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await taken(engine)
    first = asyncio.ensure_future(add(engine, "1"))
    await sent(engine)
    engine.commit_nowait(None, [Op("add", ("k", "2"))])
    engine._batches.here().flush()
    caught: list[BaseException] = []

    class Interrupt(Exception):
        """As KeyboardInterrupt, which would end the loop of the test."""

    def interrupted() -> None:
        raise Interrupt

    monkeypatch.setattr(engine._pipeline, "_send_next", interrupted)
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: caught.append(about["exception"]))
    assert await first == "1"
    assert [type(each) for each in caught] == [Interrupt]
    monkeypatch.undo()
    assert await entries(engine) == ["1", "2"]


def test_threads_and_a_loop_commit_at_the_same_time(engine: RedisEngine) -> None:
    wrong: list[Any] = []

    async def loop() -> None:
        for n in range(300):
            if await add(engine, str(n), "loop") != str(n):
                wrong.append(n)

    def thread(name: str) -> None:
        for n in range(150):
            if engine.commit_from_thread(None, [Op("add", (name, str(n)))]) != [str(n)]:
                wrong.append((name, n))

    threads = [threading.Thread(target=thread, args=(name,)) for name in ("t1", "t2")]
    for each in threads:
        each.start()
    asyncio.run(loop())
    for each in threads:
        each.join()
    assert wrong == []
    for name, count in (("loop", 300), ("t1", 150), ("t2", 150)):
        assert engine.commit_from_thread(None, [Op("list", (name,))]) == [[str(n) for n in range(count)]]
