"""Claims that stand on a Redis server until a run comes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("redis")

from agent_runtime_core._engines.redis.notifier import Subscription
from agent_runtime_core.queue import blocking_claims as standing_module
from agent_runtime_core.queue.blocking_claims import BlockingClaims
from agent_runtime_core.queue.records import RunFilter, RunRow
from agent_runtime_core.queue.redis import RedisQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.runner.worker import Worker
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import Agent, until
from tests.support.redis_servers import RedisCluster, RedisServer

pytestmark = pytest.mark.redis

LONG = 600.0  # seconds between looks: what comes before was heard of


class Stand:
    """A standing claim without a worker: what it is given."""

    def __init__(self, url: str, *agents: str) -> None:
        self.queue = RedisQueue(url)
        self.agents = agents or ("a",)
        self.given: list[RunRow] = []
        self.calls = 0
        self.standing = self.queue.blocking_claims(self._take)
        assert self.standing is not None

    def _take(self, rows: list[RunRow]) -> None:
        self.calls += 1
        self.given += rows

    async def claim(self, limit: int = 1, stands_for: float = LONG) -> list[RunRow]:
        return await self.queue.claim_rows(
            "w", agent_keys=self.agents, limit=limit, blocking=self.standing, wait_seconds=stands_for
        )

    @property
    def name(self) -> str | None:
        return self.own.ready()

    @property
    def own(self) -> BlockingClaims:
        assert isinstance(self.standing, BlockingClaims)
        return self.standing

    @property
    def letters(self) -> Subscription:
        assert isinstance(self.own._subscription, Subscription)
        return self.own._subscription

    @property
    def runs(self) -> list[str]:
        return [row.run_id for row in self.given]


@asynccontextmanager
async def standing(url: str, *agents: str, limit: int = 1, stands_for: float = LONG) -> AsyncIterator[Stand]:
    stand = Stand(url, *agents)
    try:
        stand.own.ready()
        await until(lambda: stand.calls > 0)  # it is connected
        assert await stand.claim(limit, stands_for) == []
        yield stand
    finally:
        await stand.own.close()
        await stand.queue.close()


@pytest.fixture
def queue(redis_url: str) -> Iterator[RedisQueue]:
    found = RedisQueue(redis_url)
    yield found
    found.engine.close_now()


async def test_it_is_given_the_next_run_under_a_claim_of_its_own(redis_url: str, queue: RedisQueue) -> None:
    async with standing(redis_url) as stand:
        run = await queue.enqueue(None, "a", {"n": 1})
        await until(lambda: bool(stand.given))
        [row] = stand.given
        assert (row.run_id, row.status, row.worker, row.attempt) == (str(run.run_id), "running", "w", 1)
        assert row.lease_until > row.created_at + 50
        assert await queue.claim("other") is None
        await stand.queue.release(run.run_id, "w", True, claim_id=row.claim_id)
        assert (await queue.row(row.run_id)).status == "succeeded"  # type: ignore[union-attr]


async def test_it_takes_once(redis_url: str, queue: RedisQueue) -> None:
    async with standing(redis_url) as stand:
        runs = [str((await queue.enqueue(None, "a", {})).run_id) for _ in range(2)]
        await until(lambda: bool(stand.given))
        assert [row.run_id for row in await stand.claim()] == runs[1:]
        assert stand.runs == runs[:1]


async def test_of_several_runs_in_one_go_it_takes_as_many_as_it_claimed_for(redis_url: str, queue: RedisQueue) -> None:
    async with standing(redis_url, limit=2) as stand:
        await asyncio.gather(*(queue.enqueue(None, "a", {}, priority=n) for n in range(4)))
        await until(lambda: bool(stand.given))
        left = await queue.claim("other", limit=4)
        assert len(left) + len(stand.given) == 4


async def test_it_is_given_nothing_of_other_agents(redis_url: str, queue: RedisQueue) -> None:
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with standing(redis_url, "a") as stand:

        def hear() -> None:
            loop.call_soon_threadsafe(heard.set)

        stop = queue.listen("work", hear)
        await queue.enqueue(None, "b", {})
        async with asyncio.timeout(10):
            await heard.wait()  # others are told
        await queue.enqueue(None, "a", {})
        await until(lambda: bool(stand.given))
        assert [row.agent for row in stand.given] == ["a"]
        assert stop is not None
        stop()


async def test_delayed_and_held_runs_are_not_given(redis_url: str, queue: RedisQueue) -> None:
    head = await queue.enqueue(None, "b", {}, concurrency_key="lane")
    async with standing(redis_url) as stand:
        await queue.enqueue(None, "a", {}, delay=500)
        behind = await queue.enqueue(None, "a", {}, concurrency_key="lane")
        assert [row.run_id for row in await queue.claim_rows("w", agent_keys=["b"])] == [str(head.run_id)]
        assert stand.given == []
        await queue.release(head.run_id, "w", True, claim_id=(await queue.row(str(head.run_id))).claim_id)  # type: ignore[union-attr]
        await until(lambda: bool(stand.given))
        assert stand.runs == [str(behind.run_id)]


async def test_nothing_goes_to_one_that_is_gone(redis_url: str, redis_server: RedisServer, queue: RedisQueue) -> None:
    async with standing(redis_url) as stand:
        stand.letters.close()  # as a process that is killed leaves it
        channel = f"{queue.engine.place.tag}:bell:stand:{stand.name}"
        await until(lambda: redis_server.ask("PUBSUB", "NUMSUB", channel)[1] == 0)
        run = await queue.enqueue(None, "a", {})
        assert (await queue.claim("other")).run_id == run.run_id
        assert stand.given == []


async def test_one_that_stood_for_long_enough_is_given_nothing(
    redis_url: str, redis_server: RedisServer, queue: RedisQueue
) -> None:
    async with standing(redis_url, stands_for=0.01) as stand:
        await asyncio.sleep(0.05)  # by the server's clock
        run = await queue.enqueue(None, "a", {})
        assert (await queue.claim("other")).run_id == run.run_id
        assert stand.given == []
        assert await stand.claim(stands_for=0.01) == []
        await asyncio.sleep(0.05)
        assert await stand.claim() == []  # which takes away what is over
        assert redis_server.ask("ZCARD", f"{queue.engine.place.tag}:stands") == 1


async def test_a_run_that_makes_a_long_letter_is_claimed_as_ever(redis_url: str, queue: RedisQueue) -> None:
    async with standing(redis_url) as stand:
        large = await queue.enqueue(None, "a", {"text": "x" * 100_000})
        assert stand.given == []
        assert (await queue.claim("other")).run_id == large.run_id
        small = await queue.enqueue(None, "a", {})
        await until(lambda: bool(stand.given))
        assert stand.runs == [str(small.run_id)]


async def test_what_comes_while_the_next_claim_is_under_way_is_not_lost(
    redis_url: str, queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing(redis_url) as stand:
        with _not_read(stand):
            runs = [str((await queue.enqueue(None, "a", {})).run_id) for _ in range(2)]
            assert [row.run_id for row in await stand.claim()] == runs[1:]
        await until(lambda: bool(stand.given))
        assert stand.runs == runs[:1]
        assert stand.own._open == []


@contextlib.contextmanager
def _not_read(stand: Stand) -> Any:
    """What the server says meanwhile is read afterwards."""
    letters, held = stand.letters, list[bytes]()
    letters._deliver = held.append  # type: ignore[method-assign, assignment]
    yield
    del letters._deliver
    for message in held:
        letters._deliver(message)


async def test_what_was_given_and_not_read_goes_back_when_it_is_closed(redis_url: str, queue: RedisQueue) -> None:
    async with standing(redis_url) as stand:
        with _not_read(stand):
            run = await queue.enqueue(None, "a", {})
            assert await queue.claim("other") is None
            await stand.own.close()
        again = await queue.claim("other")
        assert (again.run_id, again.attempt) == (run.run_id, 1)
        assert stand.given == []


async def test_what_was_given_and_lost_goes_back_with_the_next_claim(redis_url: str, queue: RedisQueue) -> None:
    async with standing(redis_url) as stand:
        with _not_read(stand):
            run = await queue.enqueue(None, "a", {})
            letters = stand.letters
            letters.close()
            letters._lost()  # the connection broke before
        assert [row.run_id for row in await stand.claim()] == [str(run.run_id)]
        assert stand.queue.unconfirmed_tickets == set()


async def test_what_was_told_is_sure_though_its_claim_got_no_answer(redis_url: str, queue: RedisQueue) -> None:
    async with standing(redis_url) as stand:
        [tickets] = stand.own._open
        stand.queue.unconfirmed_tickets.update(tickets)
        await queue.enqueue(None, "a", {})
        await until(lambda: bool(stand.given))
        assert stand.queue.unconfirmed_tickets == set()


async def test_after_a_break_it_stands_anew(redis_url: str, queue: RedisQueue) -> None:
    async with standing(redis_url) as stand:
        name, calls = stand.name, stand.calls
        stand.own._tried_at = float("-inf")
        stand.letters._conn._sock.shutdown(socket.SHUT_RDWR)
        await until(lambda: stand.calls > calls)  # it is to claim
        assert await stand.claim() == []
        await until(lambda: stand.calls > calls + 1)
        assert stand.name not in (None, name)
        assert await stand.claim() == []
        await queue.enqueue(None, "a", {})
        await until(lambda: bool(stand.given))


async def test_where_it_cannot_connect_it_claims_as_ever(
    redis_url: str, queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Subscription) -> None:
        raise OSError("no more connections")

    monkeypatch.setattr(Subscription, "_connect", refuse)
    stand = Stand(redis_url)
    assert await stand.claim() == []
    await until(lambda: stand.own._opening is None)
    assert stand.own.ready() is None
    run = await queue.enqueue(None, "a", {})
    assert [row.run_id for row in await stand.claim()] == [str(run.run_id)]
    await stand.own.close()
    await stand.queue.close()


async def test_one_that_is_closed_while_it_connects_keeps_no_connection(
    redis_url: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand, reached, go, connected = Stand(redis_url), threading.Event(), threading.Event(), threading.Event()
    letters: list[Subscription] = []
    connect = Subscription._connect

    def slow(self: Subscription) -> None:
        letters.append(self)
        reached.set()
        go.wait(20)
        connect(self)
        connected.set()

    monkeypatch.setattr(Subscription, "_connect", slow)
    stand.own.ready()
    await until(reached.is_set)
    opening = stand.own._opening
    assert opening is not None
    await stand.own.close()
    with contextlib.suppress(asyncio.CancelledError):
        await opening
    assert letters[0]._closed
    go.set()
    await until(connected.is_set)
    channel = letters[0].channel
    await until(lambda: redis_server.ask("PUBSUB", "NUMSUB", channel)[1] == 0)
    await stand.queue.close()


async def test_what_makes_no_sense_ends_the_connection(
    redis_url: str, redis_server: RedisServer, queue: RedisQueue
) -> None:
    async with standing(redis_url) as stand:
        channel = f"{queue.engine.place.tag}:bell:stand:{stand.name}"
        calls = stand.calls
        redis_server.ask("PUBLISH", channel, "nonsense")
        await until(lambda: stand.calls > calls)
        assert stand.own._subscription is None


async def test_on_a_cluster_it_follows_the_node_that_has_the_keys(redis_cluster: RedisCluster) -> None:
    for number, url in enumerate(redis_cluster.urls):
        async with standing(f"{url}?prefix=standing{number}") as stand:
            run = await stand.queue.enqueue(None, "a", {})
            await until(lambda: bool(stand.given))
            assert stand.runs == [str(run.run_id)]


async def test_claims_that_are_refused_again_and_again_are_not_kept(redis_url: str, queue: RedisQueue) -> None:
    async with standing(redis_url) as stand:
        for number in range(20):
            stand.own.sent([f"{number:026}"])
        assert len(stand.own._open) == standing_module.MAX_UNCONFIRMED
        assert len(stand.queue.unconfirmed_tickets) == 21 - standing_module.MAX_UNCONFIRMED
        stand.own._open.clear()


async def test_what_comes_by_a_clock_of_ones_own_is_claimed_as_ever(redis_url: str) -> None:
    other = RedisQueue(redis_url, clock=VirtualClock())
    async with standing(redis_url) as stand:
        await other.enqueue(None, "a", {})
        assert len(await stand.claim()) == 1
        assert stand.given == []
    await other.close()


def test_by_a_clock_of_ones_own_no_claim_stands(redis_url: str) -> None:
    queue = RedisQueue(redis_url, clock=VirtualClock())
    assert queue.blocking_claims(lambda rows: None) is None
    queue.engine.close_now()


# -- workers


Code = Callable[[Any], Awaitable[Any]]


@asynccontextmanager
async def working(
    url: str, server: RedisServer, code: Code, concurrency: int = 1, poll: float = LONG
) -> AsyncIterator[AgentRunner]:
    registry = Registry()
    registry.register(Agent("a", code))
    config = RunnerConfig(grace_seconds=0.2)
    async with AgentRunner.open(url, registry=registry, config=config) as runner:
        loop = asyncio.ensure_future(runner.run_loop(poll, concurrency=concurrency, handle_signals=False))
        await until(lambda: runner._worker._blocking_claims is not None)
        await until(lambda: _stands(server, runner))
        yield runner
        runner.stop()
        await loop


def _stands(server: RedisServer, runner: AgentRunner) -> bool:
    """Whether a claim of its worker stands at the server."""
    queue, own = runner.queue, runner._worker._blocking_claims
    assert isinstance(queue, RedisQueue)
    assert isinstance(own, BlockingClaims)
    return bool(own._name) and server.ask("HEXISTS", f"{queue.engine.place.tag}:standing", own._name) == 1


async def test_an_idle_worker_is_given_its_runs(
    redis_url: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def counted(self: Worker, rows: list[RunRow], _given: Any = Worker.start_delivered) -> None:
        given.append(len(rows))
        _given(self, rows)

    monkeypatch.setattr(Worker, "start_delivered", counted)

    async def code(ctx: Any) -> str:
        return "done"

    async with working(redis_url, redis_server, code) as runner:
        for n in range(5):
            run = await runner.submit("a")
            assert (await runner.wait(run, 10)).status is RunStatus.SUCCEEDED
            assert sum(given) == n + 1
            await until(lambda: _stands(redis_server, runner))


async def test_each_run_goes_to_one_of_many_workers_once(redis_url: str, redis_server: RedisServer) -> None:
    ran: list[str] = []

    async def code(ctx: Any) -> None:
        ran.append(str(ctx.run_id))
        await asyncio.sleep(0.002)

    async with contextlib.AsyncExitStack() as stack:
        runners = [
            await stack.enter_async_context(working(redis_url, redis_server, code, 2, poll=0.3)) for _ in range(4)
        ]
        runs = []
        for _ in range(100):
            runs.append(await runners[0].submit("a"))
            await asyncio.sleep(0)
        results = await asyncio.gather(*(runners[0].wait(run, 30) for run in runs))
    assert {result.status for result in results} == {RunStatus.SUCCEEDED}
    assert sorted(ran) == sorted(map(str, runs))


async def test_what_is_given_to_a_worker_that_is_told_to_stop_goes_back(
    redis_url: str, redis_server: RedisServer, queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, given = list[str](), list[RunRow]()

    def told(self: Worker, rows: list[RunRow], _given: Any = Worker.start_delivered) -> None:
        given.extend(rows)
        _given(self, rows)

    monkeypatch.setattr(Worker, "start_delivered", told)

    async def code(ctx: Any) -> None:
        ran.append(str(ctx.run_id))

    async with working(redis_url, redis_server, code) as runner:
        runner._worker._stopping = True  # and the loop has not seen it yet
        run = await queue.enqueue(None, "a", {})
        await until(lambda: bool(given))
    assert ran == []
    again = await queue.claim("other")
    assert (again.run_id, again.attempt) == (run.run_id, 1)


async def test_what_is_given_to_a_worker_without_a_free_slot_goes_back(
    redis_url: str, redis_server: RedisServer, queue: RedisQueue
) -> None:
    gate, ran = asyncio.Event(), list[str]()

    async def code(ctx: Any) -> None:
        ran.append(str(ctx.run_id))
        await gate.wait()

    async with working(redis_url, redis_server, code) as runner:
        runs = [str((await queue.enqueue(None, "a", {})).run_id)]
        await until(lambda: bool(ran))
        row = (await queue.claim_rows("w", agent_keys=["a"])) or None
        assert row is None
        runs.append(str((await queue.enqueue(None, "a", {})).run_id))
        [second] = await queue.claim_rows("w", agent_keys=["a"])
        runner._worker.start_delivered([second])
        [task] = [task for task, drive in runner._worker._executions.items() if drive.claim.row.run_id == second.run_id]
        await task
        assert [each.run_id for each in await queue.find(RunFilter(("pending",)))] == runs[1:]
        gate.set()
        await until(lambda: ran == runs)


async def test_a_suspect_is_alone_where_another_is_given_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs whose next crash is their last, one is given while the other waits for its companion to go back."""
    inside, most, gate = set[str](), list[int](), asyncio.Event()

    async def code(ctx: Any) -> None:
        inside.add(str(ctx.run_id))
        most.append(len(inside))
        await gate.wait()
        inside.discard(str(ctx.run_id))

    registry = Registry()
    registry.register(Agent("a", code))
    async with AgentRunner.open("memory://", registry=registry) as runner:
        runs = [str(await runner.submit("a")) for _ in range(3)]
        first, companion, given = [
            row.with_values(crashes_in_row=2) for row in await runner.queue.claim_rows("w", limit=3)
        ]
        worker = runner._worker
        worker.slots.count = 4
        beginning = asyncio.ensure_future(worker._start_claimed([first, companion]))
        await asyncio.sleep(0)  # the companion is on its way back
        worker.start_delivered([given])
        await beginning
        await until(lambda: len(worker._executions) == 1)
        assert inside == {given.run_id}
        gate.set()
        await until(lambda: not worker._executions)
        while await runner.run_once():
            pass
        assert {(await runner.get_run(run)).status for run in runs} == {RunStatus.SUCCEEDED}
    assert max(most) == 1
