"""The engine on a Redis server: batches, guards, deadlines, closing, and what a server may do to it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

from agent_runtime_core._core.clock import SYSTEM
from agent_runtime_core._engines.base import INSTALL, Guard, Op, OperationSet
from agent_runtime_core._engines.redis import connection, notifier, safety_checks
from agent_runtime_core._engines.redis.connection import Connection, NoReply, ServerRefused, driver
from agent_runtime_core._engines.redis.engine import RedisEngine
from agent_runtime_core._engines.redis.pipeline import BATCH, LARGE, CommitPipeline, ScriptCall, joined
from agent_runtime_core._engines.redis.script import RedisOperationSet, Script, bulk, prepared
from agent_runtime_core._engines.redis.url import redis_place
from agent_runtime_core._engines.shared_engine import Process
from agent_runtime_core._journal.record import DONE, Record
from agent_runtime_core.errors import (
    InvalidArgument,
    LeaseLost,
    StorageBusy,
    StorageClosed,
    StorageError,
    StorageFull,
    UnsafeRedis,
)
from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.queue.redis import RedisQueue
from agent_runtime_core.state.redis import RedisStateStore
from agent_runtime_core.testing.clock import VirtualClock
from tests.compatibility.redis_keys import read_keys
from tests.support.fault_runs import until
from tests.support.redis_protocol import Refused
from tests.support.redis_proxy import Cut
from tests.support.redis_servers import RedisCluster, RedisServer
from tests.support.runs import no_thread

pytestmark = pytest.mark.redis

OLD, NEW = "0" * 26, "1" + "0" * 25
RESTARTS = 5  # until one is seen while the server still loads
RUN = "00000000-0000-4000-8000-000000000001"

SCRIPT = """
ops['put'] = function(key, value)
  write('HSET', P .. 'things', key, value)
  ring('things')
  return value
end

applied['put'] = function(key, value)
  if call('HGET', P .. 'things', key) ~= value then not_applied() end
  return value
end

ops['get'] = function(key)
  return call('HGET', P .. 'things', key) or null
end

ops['add'] = function(key, value)
  write('RPUSH', P .. 'list:' .. key, value)
  return value
end

ops['list'] = function(key)
  return call('LRANGE', P .. 'list:' .. key, 0, -1)
end

ops['fail'] = function(key)
  write('HSET', P .. 'things', key, 'half')
  error('no')
end

ops['refuse'] = function()
  refuse('SHUT')
end
"""


class Shut(Exception):
    """What the operation `refuse` says."""


THINGS = RedisOperationSet("things", {}, script=SCRIPT, refusals={"SHUT": Shut})


PATIENT = 30.0  # seconds, where it is not the point that somebody loses patience


@pytest.fixture(autouse=True)
def _a_server_may_stand_still_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER", PATIENT)


def opened(url: str, patience: float = PATIENT) -> RedisEngine:
    engine = RedisEngine.open(url)
    engine.add(THINGS)
    engine.timeout = patience
    return engine


@contextlib.contextmanager
def one(url: str, patience: float = PATIENT) -> Iterator[RedisEngine]:
    engine = opened(url, patience)
    try:
        yield engine
    finally:
        if not engine._closed:
            engine._users = 1
            engine.close_now()


@pytest.fixture
def engine(redis_url: str) -> Iterator[RedisEngine]:
    with one(redis_url) as engine:
        yield engine


async def put(engine: RedisEngine, key: str, value: str) -> Any:
    return (await engine.commit(None, [Op("put", (key, value))]))[0]


async def put_at_last(engine: RedisEngine, key: str, value: str) -> None:
    """As often as it takes, where the engine has little patience."""
    async with asyncio.timeout(PATIENT):
        while True:
            with contextlib.suppress(StorageBusy):
                await put(engine, key, value)
                return


async def get(engine: RedisEngine, *keys: str) -> list[Any]:
    return [await engine.ask("get", key) for key in keys]


async def entries(engine: RedisEngine, key: str) -> list[str]:
    return list(await engine.ask("list", key) or [])


# -- writing


async def test_results_come_in_order_and_last(engine: RedisEngine, redis_url: str) -> None:
    assert await engine.commit(None, [Op("put", ("a", "1")), Op("put", ("b", "2"))]) == ["1", "2"]
    assert await get(engine, "a", "b", "c") == ["1", "2", None]
    await engine.close()
    with one(redis_url) as again:
        assert await get(again, "b") == ["2"]


async def test_all_of_a_process_on_one_place_share_an_engine(redis_url: str) -> None:
    with one(redis_url) as engine:
        assert RedisEngine.open(redis_url) is engine
        assert RedisEngine.open(f"{redis_url}x") is not engine
        engine.add(THINGS)
        await engine.close()
        assert await put(engine, "a", "1") == "1", "one user is left"
        with pytest.raises(
            InvalidArgument, match="operation set 'other' must be a RedisOperationSet, got an OperationSet"
        ):
            engine.add(OperationSet("other", {}))


@pytest.mark.parametrize("bad", [Op("fail", ("x",)), Op("unheard of"), Op("refuse")])
async def test_one_that_fails_in_a_batch_leaves_the_others_alone(engine: RedisEngine, bad: Op) -> None:
    commits = [
        engine.commit(None, ops)
        for ops in (
            [Op("put", ("a", "1"))],
            [Op("put", ("x", "1")), bad, Op("put", ("y", "1"))],
            [Op("put", ("b", "2"))],
        )
    ]
    done = await asyncio.gather(*commits, return_exceptions=True)
    assert (done[0], done[2]) == (["1"], ["2"])
    assert isinstance(done[1], (StorageError, Shut))
    assert await get(engine, *"axyb") == ["1", None, None, "2"]


async def test_a_superseded_one_in_a_batch_leaves_the_others_alone(engine: RedisEngine) -> None:
    await engine.commit(None, [Op(INSTALL, ("run", NEW)), Op("put", ("landed", "1"))])
    done = await asyncio.gather(
        *(
            engine.commit(guard, ops)
            for guard, ops in (
                (Guard("run", NEW), [Op("put", ("a", "1"))]),
                (Guard("run", OLD), [Op("put", ("b", "1"))]),
                (Guard("run", OLD), [Op("put", ("landed", "1"))]),
                (Guard("run", OLD), [Op("fail", ("c",))]),
            )
        ),
        return_exceptions=True,
    )
    assert (done[0], done[2]) == (["1"], ["1"])
    assert isinstance(done[1], LeaseLost)
    assert isinstance(done[3], LeaseLost)
    assert await get(engine, *"abc") == ["1", None, None]


async def test_a_fence_only_grows(engine: RedisEngine) -> None:
    await engine.commit(None, [Op(INSTALL, ("run", NEW))])
    with pytest.raises(LeaseLost) as lost:
        await engine.commit(None, [Op(INSTALL, ("run", OLD))])
    assert (lost.value.key, lost.value.token) == ("run", OLD)
    assert await engine.commit(None, [Op(INSTALL, ("run", NEW))]) == [True]


async def test_what_is_posted_lands_before_what_comes_after(engine: RedisEngine) -> None:
    for n in range(200):
        engine.commit_nowait(None, [Op("add", ("k", str(n)))])
    assert await entries(engine, "k") == [str(n) for n in range(200)]
    await asyncio.to_thread(engine.commit_nowait, None, [Op("put", ("a", "1"))])
    assert await get(engine, "a") == ["1"]


async def test_large_answers_and_batches_over_the_limits(engine: RedisEngine) -> None:
    long = 'ü\u2028\0\\"' * 200_000
    assert await put(engine, "long", long) == long
    assert await get(engine, "long") == [long]
    few = LARGE // 4
    texts = [chr(97 + n) * few for n in range(10)]
    assert await asyncio.gather(*(put(engine, f"t{n}", text) for n, text in enumerate(texts))) == texts
    many = BATCH * 3 + 1
    assert await asyncio.gather(*(put(engine, str(n), str(n)) for n in range(many))) == [str(n) for n in range(many)]
    assert await engine.commit(None, [Op("put", (str(n), "x")) for n in range(many)]) == ["x"] * many


# -- callers


def test_a_thread_without_a_loop_commits(engine: RedisEngine) -> None:
    assert engine.commit_from_thread(None, [Op("put", ("a", "1"))]) == ["1"]
    with pytest.raises(StorageError, match="no"):
        engine.commit_from_thread(None, [Op("fail", ("a",))])


def test_loops_and_threads_use_one_engine_at_once(engine: RedisEngine) -> None:
    wrong: list[Any] = []

    async def work(name: str) -> None:
        for n in range(0, 100, 10):
            keys = [f"{name}.{n + i}" for i in range(10)]
            told = await asyncio.gather(*(put(engine, key, key) for key in keys))
            wrong.extend(pair for pair in zip(told, keys, strict=True) if pair[0] != pair[1])
        for key in keys:
            if (await engine.ask("get", key)) != key:
                wrong.append(key)

    def thread(name: str) -> None:
        for n in range(100):
            if engine.commit_from_thread(None, [Op("put", (f"{name}.{n}", f"{n}"))]) != [f"{n}"]:
                wrong.append(n)

    threads = [threading.Thread(target=lambda n=n: asyncio.run(work(f"l{n}"))) for n in range(3)]
    threads += [threading.Thread(target=thread, args=(f"t{n}",)) for n in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []
    assert engine.commit_from_thread(None, [Op("get", ("t1.99",))]) == ["99"]
    assert len(engine._batches) <= 3


async def test_the_loops_of_other_threads_end_while_a_new_one_is_met() -> None:
    with RedisServer() as server, one(server.url) as engine:
        table: dict[Any, Any] = engine._batches

        class Ended:
            """A loop that is met by another thread, too, while this one looks whether it is closed."""

            def is_closed(self) -> bool:
                table.clear()
                table["of another thread"] = self
                return True

        table |= {Ended(): None, Ended(): None}
        assert await put(engine, "a", "1") == "1"
        del table["of another thread"]


async def test_what_has_no_thread_is_refused_and_works_when_there_is_one() -> None:
    with RedisServer() as server, one(server.url) as engine:
        for _ in range(2):
            with no_thread("agent-runtime-"), pytest.raises(StorageBusy, match="can't start new thread"):
                await put(engine, "a", "1")
        assert await put(engine, "a", "1") == "1"


async def test_a_cancelled_caller_knows_the_outcome_before_it_goes() -> None:
    with RedisServer() as server, one(server.url) as engine:
        await put(engine, "a", "0")
        server.stop()
        task = asyncio.ensure_future(put(engine, "a", "1"))
        for _ in range(3):
            await asyncio.sleep(0.01)
            task.cancel()
        assert not task.done()
        server.cont()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await get(engine, "a") == ["1"]
        assert not any(batch.pending.waiting for batch in engine._batches.values())


# -- a server that is away


async def test_it_waits_for_a_server_that_is_away_at_first(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        server.kill()
        with one(server.url) as engine:
            first = asyncio.ensure_future(put(engine, "a", "1"))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(server.restart)
            assert await first == "1"
            assert "another server now" not in caplog.text


async def test_one_that_stays_away_is_busy_in_time() -> None:
    with RedisServer(appendonly="yes", appendfsync="always") as server, one(server.url, 0.3) as engine:
        server.kill()
        done = await asyncio.gather(*(put(engine, str(n), "1") for n in range(BATCH + 9)), return_exceptions=True)
        assert {type(each) for each in done} == {StorageBusy}
        engine.timeout = PATIENT
        await asyncio.to_thread(server.restart)
        assert await put(engine, "a", "1") == "1"


async def test_of_one_that_stayed_away_it_is_told_that_nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the caller would go before the thread can tell it that.
    monkeypatch.setattr(RedisEngine, "_caller_timeout", lambda engine: PATIENT)
    with RedisServer(appendonly="yes", appendfsync="always") as server, one(server.url, 0.3) as engine:
        server.kill()
        done = await asyncio.gather(*(put(engine, str(n), "1") for n in range(BATCH + 9)), return_exceptions=True)
        assert {type(each) for each in done} == {StorageBusy}
        assert all("Nothing was written. Try again" in str(each) for each in done)
        with pytest.raises(StorageBusy, match=r"Nothing was written\. Try again"):
            await asyncio.to_thread(engine.commit_from_thread, None, [Op("put", ("b", "1"))])
        engine.timeout = PATIENT
        await asyncio.to_thread(server.restart)
        assert await put(engine, "c", "1") == "1"
        assert await get(engine, "0", "b", "c") == [None, None, "1"]


async def test_an_idle_connection_is_made_anew_after_a_restart(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "IDLE", 0.0)
    with RedisServer(appendonly="yes", appendfsync="always") as server, one(server.url) as engine:
        await put(engine, "a", "1")
        await asyncio.to_thread(server.restart)
        assert await get(engine, "a") == ["1"], "nobody is told that it was gone"
        assert "was restarted or replaced by another server" in caplog.text
        await asyncio.to_thread(server.restart)
        assert await asyncio.to_thread(engine.commit_from_thread, None, [Op("get", ("a",))]) == ["1"]


async def test_a_busy_connection_that_is_lost_is_told_as_unknown_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE", 3600.0)  # however long the restart takes
    with RedisServer(appendonly="yes", appendfsync="always") as server, one(server.url) as engine:
        await put(engine, "a", "1")
        server.restart()
        with pytest.raises(StorageBusy, match="The outcome of the write is unknown"):
            await put(engine, "a", "2")
        assert await put(engine, "a", "2") == "2"
        await asyncio.to_thread(server.restart)
        assert await get(engine, "a") == ["2"], "what is only read is asked for again"


async def test_what_a_connection_that_was_given_up_brings_late_is_not_carried_out(engine: RedisEngine) -> None:
    await put(engine, "a", "1")
    call = joined([engine._call(None, [Op("put", ("a", "1"))])])
    # As where the network holds back what was sent over it, until after it was repeated and more was written.
    late, engine._connection.conn = engine._connection.conn, None
    assert await put(engine, "a", "1") == "1"
    assert await put(engine, "a", "2") == "2"
    late._sock.settimeout(PATIENT)
    with contextlib.suppress(OSError):
        late._sock.sendall(engine._script.call + bulk(call))
        late._sock.recv(100)
    late.disconnect()
    assert await get(engine, "a") == ["2"]


async def test_no_record_lands_behind_later_ones(redis_url: str) -> None:
    """Where the connection that was given up could not be ended: nobody waits for what comes late over it."""
    state = RedisStateStore(redis_url)
    early, late = (Record(seq, DONE, "s", f"s:{seq}", claim_id=OLD) for seq in (1, 2))
    try:
        assert await state.commit(None, [Op("journal.append", (RUN, late))]) == [2]
        with pytest.raises(LeaseLost):
            await state.commit(None, [Op("journal.append", (RUN, early))])
        assert await state.commit(None, [Op("journal.append", (RUN, late))]) == [2]  # once more
        assert [record.seq for record in await state.records(RUN)] == [2]
    finally:
        await state.close()


async def test_a_user_who_may_end_no_connection_is_served() -> None:
    with RedisServer() as server:
        server.ask("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-client|kill")
        with one(f"redis://app:pw@127.0.0.1:{server.port}/0") as engine:
            await put(engine, "a", "1")
            engine._connection.drop()
            assert await put(engine, "a", "2") == "2"


async def test_a_stopped_server_is_busy_in_time_and_used_again_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER", 0.3)
    with RedisServer() as server, one(server.url, 0.5) as engine:
        await put_at_last(engine, "a", "0")
        server.stop()
        for _ in range(3):
            done = await asyncio.gather(*(put(engine, "a", "1") for _ in range(200)), return_exceptions=True)
            assert {type(each) for each in done} == {StorageBusy}
        server.cont()
        engine.timeout = PATIENT
        assert await put(engine, "a", "2") == "2"
        assert await get(engine, "a") == ["2"], "nothing of before came after it"


@pytest.mark.parametrize("letter", ["x", "語"])
async def test_a_loop_is_not_held_by_a_stopped_server_that_takes_no_more(letter: str) -> None:
    # In a folder whose name is short: that of a socket may not be long.
    with tempfile.TemporaryDirectory(prefix="arc-") as folder, RedisServer(unixsocket=f"{folder}/s") as server:
        await _held(server, f"unix://{folder}/s", letter)


async def _held(server: RedisServer, url: str, letter: str) -> None:
    with one(url) as engine:
        await put(engine, "a", "0")
        server.stop()
        held = 0.0
        text = letter * (28_800 // len(letter.encode()))
        under_way = []
        for _ in range(20):
            under_way.append(asyncio.ensure_future(put(engine, "a", text)))
            began = time.monotonic()
            await asyncio.sleep(0.01)
            held = max(held, time.monotonic() - began)
        server.cont()
        assert await asyncio.gather(*under_way) == [text] * 20
        assert held < PATIENT / 3


async def test_a_server_that_is_still_loading_is_waited_for() -> None:
    # It looks at its connections after each 1024 commands of its log.
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        with server.link() as link:
            for n in range(6000):
                link.send("SET", f"k{n}", "x")
            for _ in range(6000):
                link.receive()
        with one(server.url) as engine:
            await put(engine, "a", "1")
            await asyncio.to_thread(server.write_out)
            server._options["key-load-delay"] = "100"
            for _ in range(RESTARTS):
                restart = threading.Thread(target=server.restart)
                restart.start()
                heard = await said_by(server, "LOADING")
                began = time.monotonic()
                with contextlib.suppress(StorageBusy):  # the one on the connection that was lost
                    await put(engine, "b", "0")
                assert await put(engine, "b", "1") == "1"
                waited = time.monotonic() - began
                await asyncio.to_thread(restart.join)
                assert await get(engine, "a", "b") == ["1", "1"]
                if heard and waited > 0.1:
                    break
            assert heard
            assert waited > 0.1, "it had to wait"


@pytest.mark.parametrize("connected", [True, False])
async def test_a_server_that_is_full_of_somebodys_script_is_waited_for(connected: bool) -> None:
    with RedisServer(busy_reply_threshold="1") as server, one(server.url) as engine:
        if connected:
            await put(engine, "a", "0")
        with server.link() as link:
            link.send("EVAL", "while true do end", "0")
            assert await said_by(server, "BUSY")
            writing = asyncio.create_task(put(engine, "a", "1"))
            await asyncio.sleep(0.1)
            assert not writing.done()
            server.ask("SCRIPT", "KILL")
            assert await writing == "1"


async def said_by(server: RedisServer, word: str) -> bool:
    """Whether it refuses with that word, within a few seconds."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            await asyncio.to_thread(server.ask, "GET", "k0")
        except Refused as refused:
            if str(refused).startswith(word):
                return True
        except (OSError, EOFError):
            pass
        await asyncio.sleep(0.002)
    return False


# -- what a server says


async def test_forgotten_scripts_are_loaded_again_and_order_is_kept(
    engine: RedisEngine, redis_server: RedisServer
) -> None:
    async def add(n: int) -> None:
        engine.commit_nowait(None, [Op("add", ("k", str(n)))])
        if n % 7 == 0:
            await engine.commit(None, [Op("put", ("a", "1"))])

    for n in range(1000):
        await add(n)
        if n % 50 == 0:
            await asyncio.sleep(0)
            await asyncio.to_thread(redis_server.ask, "SCRIPT", "FLUSH")
    assert await entries(engine, "k") == [str(n) for n in range(1000)]


async def test_a_connection_cut_while_a_script_is_loaded_again_harms_nobody(redis_server: RedisServer) -> None:
    with Cut(redis_server.port) as proxy, one(f"{proxy.url}?prefix=reload") as engine:
        for n, when in enumerate(("before", "middle", "after")):
            await put(engine, "a", "0")
            redis_server.ask("SCRIPT", "FLUSH")
            proxy.cut(when, 2)  # type: ignore[arg-type]
            assert await put(engine, "a", str(n)) == str(n)
            assert proxy.cuts == n + 1
        assert engine._pipeline._thread is not None
        assert engine._pipeline._thread.is_alive()


@pytest.mark.parametrize("how", ["replica", "too few replicas"])
async def test_a_server_that_takes_no_writes_for_a_while_is_waited_for(how: str) -> None:
    with RedisServer() as server, one(server.url) as engine:
        await put(engine, "a", "0")

        def close() -> None:
            if how == "replica":
                server.ask("REPLICAOF", "127.0.0.1", "1")
            else:
                server.ask("CONFIG", "SET", "min-replicas-to-write", "1")

        def open_() -> None:
            if how == "replica":
                server.ask("REPLICAOF", "NO", "ONE")
            else:
                server.ask("CONFIG", "SET", "min-replicas-to-write", "0")

        close()
        engine.timeout = 0.3  # of the thread, which says what was; the loop's own watch has begun with more
        with pytest.raises(StorageBusy, match="Nothing was written"):
            await put(engine, "a", "1")
        engine.timeout = PATIENT
        writing = asyncio.gather(*(put(engine, "a", "2") for _ in range(5)))
        await asyncio.sleep(0.1)
        assert not writing.done()
        open_()
        assert await writing == ["2"] * 5
        assert await get(engine, "a") == ["2"]


async def test_behind_an_address_that_another_master_has_now_that_one_is_written_to() -> None:
    with RedisServer() as first, RedisServer() as second, Cut(first.port) as proxy, one(proxy.url) as engine:
        await put(engine, "a", "1")
        proxy.target = second.port
        first.ask("REPLICAOF", "127.0.0.1", second.port)
        assert await put(engine, "a", "2") == "2"
        assert second.ask("HGET", "{arc}:things", "a") == b"2"


async def test_out_of_memory_is_full_with_nothing_half_written_and_works_after() -> None:
    with RedisServer(maxmemory_policy="noeviction") as server, one(server.url) as engine:
        await put(engine, "a", "0")
        server.ask("CONFIG", "SET", "maxmemory", int(server.info()["used_memory"]) + (2 << 20))
        kept, full = 0, None
        while full is None:
            both = [Op("add", ("k", "x" * 10_000)), Op("put", ("n", str(kept)))]
            [full] = await asyncio.gather(engine.commit(None, both), return_exceptions=True)
            if isinstance(full, list):
                kept, full = kept + 1, None
        assert isinstance(full, StorageFull)
        assert "Acknowledged writes are kept. Free memory or raise maxmemory" in str(full)
        assert kept > 10
        acknowledged = [str(kept - 1)]
        assert await get(engine, "n") == acknowledged, "reading goes on"
        assert len(await entries(engine, "k")) == kept
        done = await asyncio.gather(
            *(engine.commit(None, [Op("put", ("n", "lost")), Op("add", ("k", "x"))]) for _ in range(5)),
            return_exceptions=True,
        )
        assert {type(each) for each in done} == {StorageFull}
        assert await get(engine, "n") == acknowledged
        server.ask("CONFIG", "SET", "maxmemory", 0)
        assert await put(engine, "n", "more") == "more"


@pytest.mark.parametrize("taken", ["things", "list:k"])
async def test_a_key_of_somebody_else_fails_its_commit_and_no_other(
    taken: str, engine: RedisEngine, redis_server: RedisServer
) -> None:
    both = [Op("add", ("k", "1")), Op("put", ("a", "1"))]
    mine = f"{engine.place.tag}:{taken}"
    redis_server.ask("SET", mine, "theirs")
    done = await asyncio.gather(
        engine.commit(None, both),
        engine.commit(None, both[::-1]),
        engine.commit(None, [Op("add", ("other", "1"))]),
        return_exceptions=True,
    )
    assert [type(each) for each in done] == [StorageError, StorageError, list]
    assert taken in str(done[0])
    assert "got a string of another program" in str(done[0])
    assert redis_server.ask("GET", mine) == b"theirs"
    if taken == "things":
        assert await entries(engine, "k") == []
    else:
        assert await get(engine, "a") == [None]
    redis_server.ask("DEL", mine)
    assert await engine.commit(None, both) == ["1", "1"]


@pytest.mark.parametrize(
    "taken", ["agents", "runs", "names", "created", "state:pending:a", "status:pending", "ready:a", "idem"]
)
async def test_a_queues_key_of_somebody_else_leaves_no_half_of_a_run(
    taken: str, redis_url: str, redis_server: RedisServer
) -> None:
    queue = RedisQueue(redis_url)
    tag = queue.engine.place.tag
    try:
        redis_server.ask("SET", f"{tag}:{taken}", "theirs")
        with pytest.raises(StorageError):
            await queue.enqueue(None, "a", {}, idempotency_key="k")
        left = {key.decode().removeprefix(f"{tag}:") for key in redis_server.ask("KEYS", f"{tag}:*")}
        assert left <= {taken, "n"}
        redis_server.ask("DEL", f"{tag}:{taken}")
        run = await queue.enqueue(None, "a", {}, idempotency_key="k")
        claimed = await queue.claim("w", agent_keys=["a"])
        assert claimed.run_id == run.run_id
    finally:
        await queue.close()


@pytest.mark.parametrize("taken", ["created", "state:pending:b", "ready:b"])
async def test_what_is_undone_is_only_what_the_commit_has_added(
    taken: str, redis_url: str, redis_server: RedisServer
) -> None:
    queue = RedisQueue(redis_url)
    tag = queue.engine.place.tag
    try:
        await queue.enqueue(None, "a", {})
        await queue.enqueue(None, "b", {})
        before = {key: value for key, value in read_keys(redis_server.url).items() if key.startswith(tag)}
        (kind, _), key = before[f"{tag}:{taken}"], f"{tag}:{taken}"
        assert kind == "zset"
        redis_server.ask("RENAME", key, f"{tag}:kept")
        redis_server.ask("SET", key, "theirs")
        for agent in ("b", "c") if taken == "created" else ("b",):
            with pytest.raises(StorageError, match=f"{taken} must be a zset, got a string of another program"):
                await queue.enqueue(None, agent, {})
        redis_server.ask("DEL", key)
        redis_server.ask("RENAME", f"{tag}:kept", key)
        after = {key: value for key, value in read_keys(redis_server.url).items() if key.startswith(tag)}
        assert {key for key, value in after.items() if before.get(key) != value} == {f"{tag}:n"}
        assert before.keys() == after.keys()
    finally:
        await queue.close()


async def test_a_timer_that_cannot_be_moved_is_kept(redis_url: str, redis_server: RedisServer) -> None:
    clock = VirtualClock()
    queue = RedisQueue(redis_url, clock=clock)
    tag = queue.engine.place.tag
    try:
        run = await queue.enqueue(None, "a", {}, delay=5)
        clock.advance(10)
        redis_server.ask("SET", f"{tag}:ready:a", "theirs")
        with pytest.raises(StorageError, match="WRONGTYPE"):
            await queue.claim("w", agent_keys=["a"])
        redis_server.ask("DEL", f"{tag}:ready:a")
        claimed = await queue.claim("w", agent_keys=["a"])
        assert claimed is not None
        assert claimed.run_id == run.run_id
    finally:
        await queue.close()


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
async def test_due_times_count_from_now_whatever_the_clock_of_their_process_says(
    ahead: float, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(SYSTEM), "wall", lambda _: time.time() + ahead)
    queue = RedisQueue(redis_url)

    def minutes(row: RunRow) -> float:
        return (row.due_at - time.time()) / 60

    try:
        late = (await queue.enqueue(None, "late", {}, delay=60)).row
        assert late is not None
        assert 0.5 < minutes(late) < 1.5
        assert await queue.claim("w", agent_keys=["late"]) is None
        await queue.enqueue(None, "a", {})
        [row] = await queue.claim_rows("w", agent_keys=["a"])
        due = SYSTEM.wall() + 1800
        row = await queue.settle(
            row.run_id, queue.unchanged_update(row, row.claim_id)._replace(status="waiting", due_at=due)
        )
        assert 29 < minutes(row) < 31
        assert await queue.claim("w", agent_keys=["a"]) is None
        [row] = await queue.claim_rows("w", agent_keys=[(await queue.enqueue(None, "b", {})).agent_key])
        due = SYSTEM.wall() - 1
        await queue.settle(row.run_id, queue.unchanged_update(row, row.claim_id)._replace(status="waiting", due_at=due))
        assert await queue.claim("w", agent_keys=["b"]) is not None
    finally:
        await queue.close()


# -- meeting a server


@pytest.mark.parametrize("password", ["", ":wrong@", "someone:wrong@"])
async def test_a_wrong_password_is_told_at_once_and_not_shown(password: str) -> None:
    with RedisServer(requirepass="hush") as server:
        with one(f"redis://{password}127.0.0.1:{server.port}/0") as engine:
            with pytest.raises(
                StorageError, match=r"rejected the login: .* Check the user and the password in the URL"
            ) as told:
                await put(engine, "a", "1")
            assert "wrong@" not in str(told.value)
        with one(server.url) as engine:
            assert await put(engine, "a", "1") == "1"


async def test_an_unsafe_server_is_refused_until_it_is_safe() -> None:
    with RedisServer(maxmemory_policy="allkeys-lru") as server:
        with one(server.url) as engine:
            for _ in range(2):
                with pytest.raises(UnsafeRedis, match="allkeys-lru"):
                    await put(engine, "a", "1")
            server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
            assert await put(engine, "a", "1") == "1"
        server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with one(f"{server.url}?allow_unsafe=1") as engine:
            assert await get(engine, "a") == ["1"]


@pytest.mark.parametrize("writable", [True, False])
async def test_maxmemory_is_warned_of_once_a_day_by_all_processes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    ask = Connection.ask

    def read_only(line: Connection, *command: Any) -> Any:
        if command[0] == "SET":
            raise driver().error_reply("READONLY You can't write against a read only replica.")
        return ask(line, *command)

    if not writable:
        monkeypatch.setattr(Connection, "ask", read_only)
    with RedisServer() as server:
        for n in range(4):
            monkeypatch.setattr(safety_checks, "_logged", set())  # another process
            if n == 3 and writable:
                assert 0 < server.ask("TTL", "{arc}:warned:maxmemory") <= 86_400
                server.ask("DEL", "{arc}:warned:maxmemory")  # the day has passed
            with one(server.url) as engine:
                assert await put(engine, f"a{n}", "1") == "1"
        said = [each for each in caplog.messages if "maxmemory is '0'" in each]
        assert len(said) == (2 if writable else 4)


async def test_a_server_that_tells_nobody_its_settings_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server:
        server.ask("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-config")
        with one(f"redis://app:pw@127.0.0.1:{server.port}/0") as engine:
            assert await put(engine, "a", "1") == "1"
        assert "does not tell" in caplog.text
        server.ask("ACL", "SETUSER", "app", "-script")
        with (
            one(f"redis://app:pw@127.0.0.1:{server.port}/0") as engine,
            pytest.raises(StorageError, match="no permissions"),
        ):
            await put(engine, "a", "1")


async def test_a_server_that_cannot_write_to_its_disk_is_full_until_it_can() -> None:
    with RedisServer(save="3600 1") as server, one(server.url) as engine:
        assert await put(engine, "a", "1") == "1"
        shutil.rmtree(server.folder)
        server.ask("BGSAVE")
        await until(lambda: server.info()["rdb_last_bgsave_status"] == "err")
        with pytest.raises(StorageFull, match="MISCONF"):
            await put(engine, "a", "2")
        assert await get(engine, "a") == ["1"]
        server.ask("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")
        assert await put(engine, "a", "2") == "2"


@pytest.mark.parametrize("options", [{"databases": 4}, {"cluster_enabled": "yes"}])
async def test_a_database_that_there_is_not_is_no_server_that_is_away(options: dict[str, Any]) -> None:
    with (
        RedisServer(**options) as server,
        one(f"redis://127.0.0.1:{server.port}/99") as engine,
        pytest.raises(StorageError, match="has no database 99") as told,
    ):
        await put(engine, "a", "1")
    assert not isinstance(told.value, StorageBusy), "later is no better"


async def test_a_user_without_channels_is_told_before_anything_is_written() -> None:
    with RedisServer() as server:
        server.ask("ACL", "SETUSER", "app", "on", ">pw", "~*", "resetchannels", "+@all")
        url = f"redis://app:pw@127.0.0.1:{server.port}/0"
        with one(url) as engine:
            with pytest.raises(
                StorageError, match=r"Run: ACL SETUSER … &\{arc\}:bell &\{arc\}:bell:\* \+publish \+subscribe"
            ):
                await put(engine, "a", "1")
            assert server.ask("DBSIZE") == 0
            server.ask("ACL", "SETUSER", "app", "&{arc}:bell", "&{arc}:bell:*")
            assert await put(engine, "a", "1") == "1"
            woken = threading.Event()
            engine.listen("things", woken.set)
            await until(woken.is_set)
            woken.clear()
            await until(lambda: server.ask("PUBSUB", "NUMSUB", "{arc}:bell:things")[1] == 1)
            await put(engine, "a", "2")
            assert await asyncio.to_thread(woken.wait, PATIENT)
            server.ask("ACL", "SETUSER", "app", "resetchannels")
            await put_at_last(engine, "a", "3")
            assert await get(engine, "a") == ["3"], "what is written is told, whether or not it could be rung"


async def test_a_user_who_may_not_use_some_commands_is_told_before_anything_is_written() -> None:
    lua = [path.read_text("utf-8") for path in (Path(__file__).parents[2] / "src").rglob("*.lua")]
    written = {word for text in lua for word in re.findall(r"write\('([A-Z]+)'", text)} | {"INCR"}
    assert written == {word for text in lua for word in re.findall(r"\{'([A-Z]+)', key\b", text)}, "all are tried"
    with RedisServer() as server:
        url = f"redis://app:pw@127.0.0.1:{server.port}/0"
        user = ("ACL", "SETUSER", "app", "on", ">pw", "~{arc}:*", "allchannels", "+@all")
        for command in written:
            server.ask(*user, f"-{command}")
            with one(url) as engine:
                with pytest.raises(StorageError, match=rf"with {command}\. Run: ACL SETUSER … .* \+{command.lower()}$"):
                    await put(engine, "a", "1")
                assert server.ask("DBSIZE") == 0
        server.ask(*user, "-hset", "-xadd")
        with one(url) as engine:
            with pytest.raises(StorageError, match=r"with HSET, XADD\. Run: ACL SETUSER … ~{arc}:\* \+hset \+xadd$"):
                await put(engine, "a", "1")
            server.ask(*user)
            assert await put(engine, "a", "1") == "1"
            assert set(server.ask("KEYS", "*")) == {b"{arc}:things", b"{arc}:warned:maxmemory"}


async def test_a_user_with_the_rights_that_the_guide_names_writes_reads_and_hears() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "redis.md").read_text(encoding="utf-8")
    (rule,) = re.findall(r"^(ACL SETUSER app on >password .*)$", guide, re.MULTILINE)
    with RedisServer() as server:
        server.ask(*rule.split())
        with one(f"redis://app:password@127.0.0.1:{server.port}/0") as engine:
            assert await put(engine, "a", "1") == "1"
            assert await get(engine, "a") == ["1"]
            woken = threading.Event()
            engine.listen("things", woken.set)
            await until(lambda: server.ask("PUBSUB", "NUMSUB", "{arc}:bell:things")[1] == 1)
            woken.clear()
            await put(engine, "a", "2")
            assert await asyncio.to_thread(woken.wait, PATIENT)


async def test_a_server_that_was_replaced_is_told_and_all_listeners_are_woken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "IDLE", 0.0)
    with RedisServer() as server, one(server.url) as engine:
        woken = threading.Event()
        engine.listen("mail", woken.set)
        await until(lambda: woken.is_set() and engine._notifier._thread is not None)
        await put(engine, "a", "1")
        assert "another server" not in caplog.text
        server.restart()
        woken.clear()
        assert await get(engine, "a") == [None], "it kept nothing"
        assert "checking all claims of this process" in caplog.text
        assert woken.wait(PATIENT)


async def test_a_cluster_is_followed_to_the_node_and_taken_for_no_other_server(
    redis_cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    for tag in "abcdef":
        home = redis_cluster.node_of(f"{{{tag}}}")
        for node in redis_cluster.nodes:
            with one(f"{node.url}?prefix={tag}") as engine:
                assert await put(engine, node.url, "1") == "1"
                assert engine._connection.place.port == home.port
                engine._connection.drop()
                assert await get(engine, node.url) == ["1"]
        assert home.ask("HLEN", f"{{{tag}}}:things") == 3
    assert "another server" not in caplog.text


# -- bells


async def test_bells_are_heard_by_others_and_again_after_a_cut(redis_server: RedisServer) -> None:
    with (
        Cut(redis_server.port) as proxy,
        one(f"{proxy.url}?prefix=bells") as ear,
        one(f"{redis_server.url}?prefix=bells") as mouth,
    ):
        heard: list[int] = []
        stop = ear.listen("things", lambda: heard.append(1))
        await until(lambda: len(heard) == 1)
        await put(mouth, "a", "1")
        await until(lambda: len(heard) >= 2)
        proxy.drop()
        await until(lambda: len(heard) >= 3)  # what was rung meanwhile was not heard
        before = len(heard)
        await put(mouth, "a", "2")
        await until(lambda: len(heard) > before)
        stop()
        stop()
        before = len(heard)
        await put(mouth, "a", "3")
        await put(ear, "a", "4")
        assert len(heard) == before


async def test_only_topics_that_somebody_listens_to_wake_a_process(redis_server: RedisServer) -> None:
    url = f"{redis_server.url}?prefix=topics"
    with one(url) as ear:
        heard: list[str] = []
        ear.listen("others", lambda: heard.append("others"))
        await until(lambda: heard == ["others"])
        await put(ear, "a", "1")  # rings for "things"
        ear.listen("things", lambda: heard.append("things"))
        await until(lambda: heard == ["others", "things"])  # what was rung before was not heard
        await put(ear, "a", "2")
        await until(lambda: heard == ["others", "things", "things"])


async def test_a_topic_that_nobody_listens_to_any_more_is_left(redis_server: RedisServer) -> None:
    with one(f"{redis_server.url}?prefix=left") as engine:
        client = engine._notifier

        def listeners() -> int:
            _, count = redis_server.ask("PUBSUB", "NUMSUB", client._channel_of("things"))
            return int(count)

        stops = [engine.listen("things", lambda: None) for _ in range(2)]
        await until(lambda: listeners() == 1)
        stops[0]()
        assert listeners() == 1
        stops[1]()
        await until(lambda: listeners() == 0)
        engine.listen("things", lambda: None)
        await until(lambda: listeners() == 1)


async def test_a_bell_that_hears_nothing_asks_and_then_connects_anew(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "QUIET", 0.05)
    monkeypatch.setattr(notifier, "_POLL", 0.02)
    with Cut(redis_server.port) as proxy, one(f"{proxy.url}?prefix=quiet") as engine:
        heard: list[int] = []
        engine.listen("things", lambda: heard.append(1))
        await until(lambda: "PING" in proxy.asked)
        connections = proxy.connections
        proxy.cut("stall", 1)
        await until(lambda: proxy.connections > connections)
        await until(lambda: len(heard) >= 2)


@pytest.mark.parametrize("when", ["it subscribes", "it hears"])
async def test_a_bell_is_hung_anew_where_a_listeners_thread_drops_its_connection_while(
    when: str, engine: RedisEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe, dropped = notifier.PubSubNotifier._subscribe, threading.Event()

    def subscribing(self: notifier.PubSubNotifier, conn: Any) -> None:
        send = conn.send_command

        def drop() -> None:  # as redis-py does where it cannot send
            if not dropped.is_set():
                dropped.set()
                conn.disconnect()

        def sending(*words: str) -> None:
            send(*words)
            if when == "it subscribes":
                drop()

        conn.send_command = sending
        subscribe(self, conn)
        drop()

    monkeypatch.setattr(notifier.PubSubNotifier, "_subscribe", subscribing)
    woken = threading.Event()
    engine.listen("things", woken.set)
    assert await asyncio.to_thread(woken.wait, PATIENT)
    assert dropped.is_set()
    assert engine._notifier._thread is not None
    assert engine._notifier._thread.is_alive()
    woken.clear()
    await put(engine, "a", "1")
    assert await asyncio.to_thread(woken.wait, PATIENT)


async def test_why_a_bell_is_not_heard_is_said_once_for_each_kind_of_error(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear, errors = notifier.PubSubNotifier._receive, [ValueError("one"), ValueError("two"), TypeError("three")]

    def hearing(self: notifier.PubSubNotifier, conn: Any) -> None:
        if errors:
            raise errors.pop(0)
        hear(self, conn)

    monkeypatch.setattr(notifier.PubSubNotifier, "_receive", hearing)
    monkeypatch.setattr(notifier, "reconnect_delay", lambda seconds: None)
    with one(f"{redis_server.url}?prefix=said") as engine:
        woken: list[int] = []
        engine.listen("things", lambda: woken.append(1))
        await until(lambda: len(woken) == 4)  # once for each connection
        await put(engine, "a", "1")
        await until(lambda: len(woken) == 5)
    said = [message for message in caplog.messages if f"{redis_server.url} sends no notifications" in message]
    assert len(said) == 2
    assert "(ValueError: one)" in said[0]
    assert "(TypeError: three)" in said[1]


async def test_a_listener_hears_nothing_of_a_connection_that_is_dropped_while_it_comes(
    engine: RedisEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = threading.Event()
    engine.listen("other", woken.set)
    assert await asyncio.to_thread(woken.wait, PATIENT)

    def closed(*words: Any) -> None:
        raise ValueError("I/O operation on closed file.")

    monkeypatch.setattr(engine._notifier._conn, "send_command", closed)
    engine.listen("things", woken.set)()


async def test_a_bell_waits_for_a_server_that_is_away() -> None:
    with RedisServer() as server, one(server.url) as engine:
        server.kill()
        heard: list[int] = []
        engine.listen("things", lambda: heard.append(1))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.restart)
        await until(lambda: bool(heard))


# -- closing


async def test_close_carries_out_what_is_under_way(redis_url: str) -> None:
    engine = opened(redis_url)
    await put(engine, "a", "0")
    for n in range(100):
        engine.commit_nowait(None, [Op("add", ("k", str(n)))])
    waiting = [asyncio.ensure_future(put(engine, str(n), "1")) for n in range(100)]
    await asyncio.sleep(0)
    await engine.close()
    assert await asyncio.gather(*waiting) == ["1"] * 100
    with one(redis_url) as again:
        assert len(await entries(again, "k")) == 100


async def test_after_close_nothing_is_taken(redis_url: str) -> None:
    engine = opened(redis_url)
    await put(engine, "a", "0")
    await engine.close()
    await engine.close()
    for use in (lambda: engine.commit_from_thread(None, []), lambda: engine.commit_nowait(None, [])):
        with pytest.raises(StorageClosed, match="was closed"):
            use()
    with pytest.raises(StorageClosed, match="was closed"):
        await put(engine, "a", "1")
    engine._pipeline.put([late := ScriptCall(None, [], "[]")])
    assert late.error is None
    thread = engine._pipeline._thread
    assert thread is not None
    assert not thread.is_alive()


async def test_close_does_not_wait_for_ever_for_a_server_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER", 0.2)
    with RedisServer() as server:
        engine = opened(server.url, 0.3)
        engine.listen("things", lambda: None)
        await put_at_last(engine, "a", "0")
        server.stop()
        writing = asyncio.ensure_future(put(engine, "a", "1"))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises((StorageBusy, StorageClosed)):
            await writing


async def test_after_a_fork_it_has_to_be_opened_again(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with one(redis_url) as engine:
        await put(engine, "a", "1")
        with monkeypatch.context() as forked:
            forked.setattr(Process, "forks", Process.forks + 1)
            with pytest.raises(StorageClosed, match="Open it again in this process"):
                await get(engine, "a")
            with one(redis_url) as own:
                assert own is not engine
                assert await get(own, "a") == ["1"]
        assert await get(engine, "a") == ["1"], "the parent notices nothing"


async def test_a_commit_of_a_loop_that_does_not_turn_is_answered_and_those_of_others_too(engine: RedisEngine) -> None:
    await put(engine, "a", "0")
    mine = asyncio.ensure_future(put(engine, "a", "1"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.commit_from_thread(None, [Op("get", ("a",))]) == ["1"], "and it was sent after that"
    assert await mine == "1"


async def test_a_connection_that_speaks_unasked_is_not_used_again(
    engine: RedisEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "IDLE", 0.0)
    await put(engine, "a", "1")
    conn = engine._connection.conn
    conn.send_command("PING")
    await until(lambda: conn.can_read(0))
    assert await get(engine, "a") == ["1"]
    assert engine._connection.conn is not conn


# -- the pipeline and the connection, where a server cannot be made to do it


class Still:
    """A connection whose answers are those of the test."""

    def __init__(self, *answers: Any) -> None:
        self.answers_left = list(answers)
        self.place = redis_place("redis://127.0.0.1:1/0")
        self.sent: list[bytes] = []

    def evaluate(self, last: bytes, unsent: bytes | None = None) -> Any:
        self.sent.append(last)
        answer = self.answers_left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def drop(self) -> None:
        """It has nothing to close."""


def pipeline(line: Still, patience: float = PATIENT) -> CommitPipeline:
    def read_answer(call: ScriptCall, answer: bytes) -> None:
        call.result = [answer.decode("ascii")]

    return CommitPipeline(line, read_answer, lambda: patience)  # type: ignore[arg-type]


def carried(line: Still, *texts: str) -> list[ScriptCall]:
    """What became of these commits, which are sent together."""
    pipe = pipeline(line)
    calls = [ScriptCall(None, [], text) for text in texts]
    for call in calls:
        call.done = threading.Event()
    pipe.put(calls)
    for call in calls:
        assert call.done is not None
        assert call.done.wait(PATIENT)
    assert pipe._thread is not None
    assert pipe._thread.is_alive(), "the thread goes on whatever it is told"
    pipe.close()
    return calls


@pytest.mark.parametrize("answer", [[], [b"1", b"2"], 7, None], ids=repr)
def test_answers_that_are_no_answers_are_nobodys(answer: Any) -> None:
    [call] = carried(Still(answer), "[1]")
    assert isinstance(call.error, StorageBusy)
    assert "answers something else" in str(call.error)


def test_an_answer_that_makes_no_sense_is_its_callers_alone() -> None:
    one, two = carried(Still([b"\xff", b"2"]), "[1]", "[2]")
    assert isinstance(one.error, StorageError)
    assert "makes no sense" in str(one.error)
    assert two.result == ["2"]


def test_what_was_posted_goes_again_and_before_what_came_after_it() -> None:
    line = Still(NoReply("cut"), [b"1"], [b"3"])
    pipe = pipeline(line)
    posted, waited, last = (ScriptCall(None, [], f"[{n}]") for n in (1, 2, 3))
    waited.done, last.done = threading.Event(), threading.Event()
    pipe.put([posted, waited])
    assert waited.done.wait(PATIENT)
    pipe.put([last])
    assert last.done.wait(PATIENT)
    pipe.close()
    assert isinstance(waited.error, StorageBusy), "who waits for it has to know, and repeats it"
    assert (posted.result, last.result) == (["1"], ["3"])
    assert line.sent == [b"[[1],[2]]", b"[[1]]", b"[[3]]"]


def test_what_was_posted_is_not_kept_for_ever() -> None:
    pipe = pipeline(Still(*[NoReply("cut")] * 50), 0.005)
    posted = ScriptCall(None, [], "[1]")
    pipe.put([posted])
    end = time.monotonic() + PATIENT
    while posted.error is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    pipe.close()
    assert isinstance(posted.error, StorageBusy)


ECHO = prepared("return {ARGV[1]}", "k")


def line_to(url: str, script: Script = ECHO) -> Connection:
    return Connection(redis_place(url), lambda line: None, lambda: script)


def test_a_line_that_was_cut_is_not_sent_to_again_and_nobody_gets_anothers_answer(redis_server: RedisServer) -> None:
    line = line_to(redis_server.url)
    assert line.evaluate(b"0") == [b"0"]
    conn, send = line.conn, line.conn.send_packed_command

    def broken(*args: Any) -> None:
        conn.send_packed_command = send
        raise OSError("cut")

    conn.send_packed_command = broken
    with pytest.raises(NoReply):
        line.evaluate(b"1")
    assert line.conn is None
    assert line.evaluate(b"3") == [b"3"]
    line.drop()


@pytest.mark.parametrize("error", [AttributeError("closed"), ValueError("I/O"), OSError("cut")])
def test_whatever_goes_wrong_with_an_answer_is_unknown(error: Exception, redis_server: RedisServer) -> None:
    line = line_to(redis_server.url)
    line.evaluate(b"0")

    def broken(*args: Any) -> None:
        raise error

    line.conn.read_response = broken
    with pytest.raises(NoReply):
        line.evaluate(b"1")
    assert line.evaluate(b"2") == [b"2"]
    line.drop()


def test_a_server_that_sends_us_elsewhere_again_and_again_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_to("redis://127.0.0.1:1/0")
    monkeypatch.setattr(Connection, "_connect", lambda self: None)
    monkeypatch.setattr(Connection, "fresh", lambda self: False)
    monkeypatch.setattr(Connection, "call", lambda self, last: (_ for _ in ()).throw(ServerRefused("MOVED 7 :6380")))
    with pytest.raises(connection.NotSent, match="elsewhere again and again"):
        line.evaluate(b"")
    assert (line.place.host, line.place.port) == ("127.0.0.1", 6380)


def test_where_the_node_is_gone_that_we_were_sent_to_the_first_one_is_asked_again(redis_server: RedisServer) -> None:
    line = line_to(redis_server.url)
    with RedisServer() as node:
        line.mend(ServerRefused(f"MOVED 7 127.0.0.1:{node.port}"))
        assert line.evaluate(b"1") == [b"1"]
        assert line.place.port == node.port
    with pytest.raises(NoReply):
        line.evaluate(b"2")
    with pytest.raises(connection.NotSent, match="cannot be reached"):
        line.evaluate(b"3")
    assert line.evaluate(b"4") == [b"4"]
    assert line.place.port == redis_server.port
    line.drop()


async def test_one_url_by_two_names_is_one_too_many(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(InvalidArgument, match="url and redis_url must not both be passed, got two different URLs"):
        RedisQueue(redis_url, redis_url=f"{redis_url}x")
    with pytest.raises(InvalidArgument, match=r"Pass url='redis://host:6379/0', or call configure\(redis_url=\.\.\.\)"):
        RedisQueue()
