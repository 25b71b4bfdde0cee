"""The engine on dicts: all or nothing, fenced, deaf after close."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agent_runtime_core._engines.base import FORGET, INSTALL, Engine, Guard, NotApplied, Op, OperationSet
from agent_runtime_core._engines.memory import MemoryEngine, MemoryTx
from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.queue.records import MailboxMessage, RowChanged
from agent_runtime_core.testing import VirtualClock

OLD, NEW = "0" * 26, "1" + "0" * 25


def put(tx: MemoryTx, key: str, value: int) -> int:
    tx.put(tx.tables["things"], key, value)
    tx.notify("things")
    return value


def drop(tx: MemoryTx, key: str) -> None:
    tx.drop(tx.tables["things"], key)


def fail(tx: MemoryTx) -> None:
    raise ValueError("no")


def was_put(tx: MemoryTx, key: str, value: int) -> int:
    if tx.tables["things"].get(key) != value:
        raise NotApplied
    return value


def get(tx: MemoryTx, key: str) -> Any:
    return tx.tables["things"].get(key)


THINGS = OperationSet("things", {"put": put, "drop": drop, "fail": fail}, {"put": was_put}, tables=("things",))


@pytest.fixture
def engine() -> MemoryEngine:
    engine = MemoryEngine(VirtualClock())
    engine.add(THINGS)
    return engine


async def test_results_come_in_order(engine: MemoryEngine) -> None:
    assert await engine.commit(None, [Op("put", ("a", 1)), Op("put", ("b", 2)), Op("drop", ("a",))]) == [1, 2, None]
    assert (await engine.read(get, "a"), await engine.read(get, "b")) == (None, 2)
    assert await engine.commit(None, []) == []


async def test_a_commit_that_fails_leaves_nothing(engine: MemoryEngine) -> None:
    await engine.commit(None, [Op("put", ("a", 1)), Op("put", ("b", 1))])
    with pytest.raises(ValueError, match="no"):
        await engine.commit(
            None, [Op("put", ("a", 2)), Op("drop", ("b",)), Op("put", ("c", 3)), Op("put", ("a", 3)), Op("fail")]
        )
    assert [await engine.read(get, key) for key in "abc"] == [1, 1, None]
    with pytest.raises(KeyError):
        await engine.commit(None, [Op("put", ("a", 2)), Op("unheard of")])
    assert await engine.read(get, "a") == 1


async def test_a_guard_holds_only_for_its_token(engine: MemoryEngine) -> None:
    with pytest.raises(LeaseLost):
        await engine.commit(Guard("run", OLD), [Op("put", ("a", 1))])
    await engine.commit(None, [Op(INSTALL, ("run", OLD))])
    assert await engine.commit(Guard("run", OLD), [Op("put", ("a", 1))]) == [1]
    await engine.commit(None, [Op(INSTALL, ("run", NEW))])
    with pytest.raises(LeaseLost, match=f"claim {OLD} of run 'run' is no longer valid") as caught:
        await engine.commit(Guard("run", OLD), [Op("put", ("a", 2))])
    assert (caught.value.key, caught.value.token) == ("run", OLD)
    assert await engine.read(get, "a") == 1


async def test_a_superseded_write_that_had_landed_is_answered(engine: MemoryEngine) -> None:
    await engine.commit(None, [Op("put", ("a", 1)), Op(INSTALL, ("run", NEW))])
    assert await engine.commit(Guard("run", OLD), [Op("put", ("a", 1))]) == [1]
    for ops in ([Op("put", ("a", 1)), Op("put", ("b", 1))], [Op("put", ("a", 1)), Op("drop", ("a",))]):
        with pytest.raises(LeaseLost):
            await engine.commit(Guard("run", OLD), ops)


async def test_a_fence_only_grows_and_can_be_forgotten(engine: MemoryEngine) -> None:
    assert await engine.commit(None, [Op(INSTALL, ("run", NEW)), Op(INSTALL, ("run", NEW))]) == [True, True]
    with pytest.raises(LeaseLost):
        await engine.commit(None, [Op(INSTALL, ("run", OLD))])
    await engine.commit(None, [Op(FORGET, ("run",)), Op(FORGET, ("never",)), Op(INSTALL, ("run", OLD))])
    assert await engine.commit(Guard("run", OLD), [Op("put", ("a", 1))]) == [1]


async def test_a_posted_write_is_there_and_a_refused_one_is_dropped(engine: MemoryEngine) -> None:
    engine.commit_nowait(None, [Op("put", ("a", 1))])
    engine.commit_nowait(Guard("run", OLD), [Op("put", ("a", 2))])
    assert await engine.read(get, "a") == 1
    assert engine.commit_from_thread(None, [Op("put", ("a", 3))]) == [3]


async def test_listeners_hear_only_commits_that_rang(engine: MemoryEngine) -> None:
    heard: list[str] = []
    stop = engine.listen("things", lambda: heard.append("a"))
    engine.listen("other", lambda: heard.append("other"))
    await engine.commit(None, [Op("put", ("a", 1))])
    await engine.commit(None, [Op("drop", ("a",))])
    with pytest.raises(ValueError, match="no"):
        await engine.commit(None, [Op("put", ("a", 1)), Op("fail")])
    assert heard == ["a"]
    stop()
    stop()
    await engine.commit(None, [Op("put", ("a", 1))])
    assert heard == ["a"]


async def test_threads_do_not_meet_inside_a_commit(engine: MemoryEngine) -> None:
    def work(name: str) -> None:
        for n in range(200):
            engine.commit_from_thread(None, [Op("put", (name, n)), Op("put", ("both", n))])

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [await engine.read(get, str(n)) for n in range(4)] == [199] * 4


def test_a_beat_comes_from_a_thread_of_its_own_until_it_is_stopped(engine: MemoryEngine) -> None:
    beaten, seen = threading.Event(), list[int]()

    def beat() -> None:
        seen.append(threading.get_ident())
        beaten.set()

    stop = engine.beat(beat, 0.001)
    assert beaten.wait(10)
    stop()
    assert seen[0] != threading.get_ident()


async def test_each_engine_has_a_name_and_its_clock(engine: MemoryEngine) -> None:
    assert engine.name != MemoryEngine().name
    assert engine.lease_now() == engine.clock.boot()
    assert isinstance(engine, Engine)
    assert (engine.kind, engine.process_id) == ("memory", "")
    await engine.close()
    # Whoever shares it may still read.
    assert await engine.read(get, "a") is None


async def test_a_row_that_a_rollback_took_back_is_taken_for_no_other() -> None:
    queue = InMemoryQueue(clock=VirtualClock())
    row = queue.new_row("one", "first", {})
    with pytest.raises(RowChanged):
        await queue.engine.commit(
            None, [Op("queue.insert", (row,)), Op("queue.end", ("nobody", (), "failed", 1.0, ""))]
        )
    await queue.enqueue("one", "second", {})
    assert await queue.claim("w", agent_keys=["first"]) is None
    assert (await queue.claim("w", agent_keys=["second"])).agent_key == "second"


async def test_a_message_that_a_rollback_took_back_was_never_there() -> None:
    queue = InMemoryQueue(clock=VirtualClock())
    run_id = str((await queue.enqueue("one", "agent", {})).run_id)
    fails = Op("queue.end", ("nobody", (), "failed", 1.0, ""))
    for earlier in range(2):
        lost = [Op("queue.post", (run_id, MailboxMessage("signal", "go", "0", each, 1.0))) for each in ("a", "b")]
        with pytest.raises(RowChanged):
            await queue.engine.commit(None, [*lost, fails])
        assert [mail.seq for mail in await queue.mail(run_id)] == [*range(1, 1 + earlier)]
        assert await queue.post(run_id, "signal", "go", "1", "ab"[earlier]) == ("pending", 1 + earlier)
    assert [(mail.seq, mail.payload) for mail in await queue.mail(run_id)] == [(1, "1"), (2, "1")]
