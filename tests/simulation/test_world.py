"""What the simulation itself stands on: its loop, its machines, and its remote store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_runtime_core._engines.base import Op, OperationSet
from agent_runtime_core._engines.sqlite.writer import Writer
from agent_runtime_core._journal.memory import CONCERN as JOURNAL
from agent_runtime_core._journal.record import DONE, Record
from agent_runtime_core.errors import LeaseLost, StorageBusy

from .hosts import Host
from .loop import HOST, Deadlock, SimLoop
from .remote import SimRemoteEngine
from .stores import SimWriter
from .wire import Faults
from .world import World


def test_time_jumps_and_a_lost_wake_up_is_a_deadlock() -> None:
    loop = SimLoop(0)

    loop.run_until_complete(asyncio.sleep(86_400))
    assert loop.time() == 86_400
    with pytest.raises(Deadlock):
        loop.run_until_complete(loop.create_future())
    loop.bury()


def test_time_goes_on_during_a_sleep_that_rounding_swallows() -> None:
    loop = SimLoop(0)

    loop.run_until_complete(asyncio.sleep(4.75))
    loop.run_until_complete(asyncio.sleep(3e-16))
    assert loop.time() > 4.75
    loop.bury()


async def _work(host: str, done: list[str]) -> None:
    HOST.set(host)
    try:
        await asyncio.sleep(1)
        done.append(f"{host} worked")
    finally:
        done.append(f"{host} left")


def test_a_killed_host_runs_no_finally_and_a_stopped_one_goes_on() -> None:
    loop, done = SimLoop(0), list[str]()

    async def main() -> None:
        tasks = [loop.create_task(_work(host, done)) for host in ("killed", "stopped")]
        await asyncio.sleep(0.5)
        loop.kill("killed")
        loop.stop_host("stopped")
        await asyncio.sleep(5)
        assert done == []
        loop.resume_host("stopped")
        await asyncio.wait(tasks[1:])
        assert loop.time() == 5.5

    loop.run_until_complete(main())
    assert done == ["stopped worked", "stopped left"]
    loop.bury()


def test_the_timers_of_a_machine_that_sleeps_do_not_go_on() -> None:
    loop, done = SimLoop(0), list[str]()

    async def main() -> None:
        task = loop.create_task(_work("asleep", done))
        for wakes in (2.5, 6.75):
            await asyncio.sleep(0.25)
            loop.suspend("asleep")
            await asyncio.sleep(wakes - loop.time())
            loop.resume_host("asleep")
        await task
        assert loop.time() == pytest.approx(6.75 + 0.5)

    loop.run_until_complete(main())
    loop.bury()


# -- the remote store


def _noted(tx: Any, word: str) -> int:
    words = tx.tables["words"]
    tx.put(words, len(words), word)
    return len(words)


def _words(tx: Any) -> list[str]:
    return [*tx.tables["words"].values()]


WORDS = OperationSet("words", {"word": _noted}, tables=("words",))


def _in_a_world(body: Any, place: str = "remote-a", **faults: float) -> None:
    """Run `body(world, one, other)` with the engines of two hosts at one place."""
    world = World(1, layout=(place, place, place), faults=Faults(latency=0.01, **faults))

    async def idle(host: Host) -> None:
        return None

    async def main() -> None:
        engines = [world.host(name, idle).engines[place] for name in ("client0", "client1")]
        for engine in engines:
            if isinstance(engine, SimRemoteEngine):
                engine.add(WORDS)
        await body(world, *engines)

    try:
        world.loop.run_until_complete(main())
    finally:
        world.close()


def test_messages_of_a_connection_arrive_in_order() -> None:
    async def body(world: World, one: SimRemoteEngine, other: SimRemoteEngine) -> None:
        for i in range(20):
            one.commit_nowait(None, [Op("word", (str(i),))])
        assert await one.commit(None, [Op("word", ("last",))]) == [21]
        assert await other.read(_words) == [*map(str, range(20)), "last"]

    _in_a_world(body)


def test_what_is_under_way_when_a_connection_breaks_fails_and_may_have_landed() -> None:
    async def body(world: World, one: SimRemoteEngine, other: SimRemoteEngine) -> None:
        told = list[str]()
        for i in range(40):
            writing = asyncio.ensure_future(one.commit(None, [Op("word", (f"w{i}",))]))
            await asyncio.sleep(world.chance.random() * 0.01)
            one.cut()
            await asyncio.wait({writing})
            error = writing.exception()
            assert error is None or (isinstance(error, StorageBusy) and "unknown" in str(error))
            told += [f"w{i}"] if error is None else []
            await asyncio.sleep(1)
        there = await other.read(_words)
        assert len(set(there)) == len(there)
        assert set(told) < set(there) < {f"w{i}" for i in range(40)}

    _in_a_world(body)


def test_no_record_lands_behind_later_ones() -> None:
    async def body(world: World, one: SimRemoteEngine, other: SimRemoteEngine) -> None:
        one.add(JOURNAL)
        early, late = (Record(seq, DONE, "s", f"s:{seq}", claim_id="c") for seq in (1, 2))

        async def append(engine: SimRemoteEngine, record: Record) -> list[Any]:
            return await engine.commit(None, [Op("journal.append", ("r", record))])

        assert await append(one, late) == [2]
        with pytest.raises(LeaseLost):
            await append(other, early)
        assert await append(other, late) == [2]  # once more

    _in_a_world(body)


def test_a_host_that_is_cut_off_reaches_nothing_and_hears_of_nothing_until_it_is_back() -> None:
    async def body(world: World, one: SimRemoteEngine, other: SimRemoteEngine) -> None:
        heard = list[float]()
        one.listen("work", lambda: heard.append(world.loop.time()))
        one.cut(2.0)
        for attempt in (one.commit(None, [Op("word", ("no",))]), one.read(_words)):
            with pytest.raises(StorageBusy):
                await attempt
        with pytest.raises(StorageBusy):
            one.commit_from_thread(None, [])
        await other.commit(None, [Op("word", ("yes",))])
        world.ring(one.server, {"work"})
        await asyncio.sleep(3)
        assert heard == [2.0]
        assert await one.read(_words) == ["yes"]

    _in_a_world(body)


def test_leases_are_kept_in_the_time_of_the_server() -> None:
    async def body(world: World, one: SimRemoteEngine, other: SimRemoteEngine) -> None:
        queue, peer = (world.hosts[name].runner.queue for name in ("client0", "client1"))
        assert abs(one.clock.boot() - one.server.clock.boot()) > 10
        await queue.enqueue("r", "agent", {})
        [row] = await queue.claim_rows("w", 5.0)
        assert row.lease_until == pytest.approx(one.server.clock.boot() + 5.0, abs=0.1)
        await asyncio.sleep(4)
        assert await peer.claim_rows("w2", 5.0) == []
        await asyncio.sleep(1.1)
        assert len(await peer.claim_rows("w2", 5.0)) == 1

    _in_a_world(body)


@pytest.mark.parametrize("place", ["memory-a", "sqlite-a", "remote-a"])
def test_others_may_see_a_commit_before_its_answer_arrives(place: str) -> None:
    assert 0 < _seen_before_the_answer(place) < 40


def test_without_the_delay_of_answers_nobody_sees_a_commit_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimWriter, "write", Writer.write)

    assert _seen_before_the_answer("sqlite-a") == 0


def _seen_before_the_answer(place: str) -> int:
    """Of 40 commits, how many another host read before the answer arrived."""
    seen = list[bool]()

    async def body(world: World, one: Any, other: Any) -> None:
        queue, peer = (world.hosts[name].runner.queue for name in ("client0", "client1"))
        for i in range(40):
            writing = asyncio.ensure_future(queue.enqueue(f"r{i}", "agent", {}))
            while await peer.row(f"r{i}") is None:  # noqa: ASYNC110 - each look takes its way to the store
                await asyncio.sleep(0.0001)
            seen.append(not writing.done())
            await writing

    _in_a_world(body, place)
    return sum(seen)


def test_a_request_of_a_host_that_died_may_land() -> None:
    async def body(world: World, one: SimRemoteEngine, other: SimRemoteEngine) -> None:
        def send() -> None:
            one.commit_nowait(None, [Op("word", ("a last word",))])

        world.hosts["client0"].context.run(send)
        world.kill("client0.0")
        await asyncio.sleep(0.5)
        assert await other.read(_words) == ["a last word"]

    _in_a_world(body)
