"""An outage of the store uses no attempt: a Redis that is killed or stopped and a full disk, under short steps.

The long form, with more moments: pytest tests/fault/test_outages.py -m slow
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core._engines.sqlite.group_commit import GroupCommitter
from agent_runtime_core.errors import StepInDoubt
from agent_runtime_core.queue import RedisQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.backends import open_url
from tests.support.fault_runs import Agent, consistent, settings, until
from tests.support.redis_servers import RedisServer

STEPS = 12
RUNS = 6


class Fleet:
    """Two workers on one store, and what the code of their runs has done."""

    def __init__(self, url: str, **changes: Any) -> None:
        self.ran: Counter[tuple[str, int]] = Counter()
        self.again: list[tuple[str, int]] = []
        self.confirmed: set[tuple[str, int]] = set()
        self.caught: list[BaseException] = []
        self.executed_by: dict[str, set[str]] = {}
        self.runners = [self._runner(url, f"w{n}", **changes) for n in range(2)]

    def _runner(self, url: str, name: str, **changes: Any) -> AgentRunner:
        agents = Registry()

        async def code(ctx: Any) -> int:
            run = str(ctx.run_key)
            self.executed_by.setdefault(run, set()).add(name)
            for i in range(STEPS):
                try:
                    await ctx.step(f"s{i}", self._step, run, i, on_in_doubt="fail" if i % 4 == 3 else "retry")
                    self.confirmed.add((run, i))
                    await ctx.emit("said", {"i": i})
                except Exception as error:  # noqa: BLE001 - as code of users does
                    self.caught.append(error)
                    raise RuntimeError("the step has failed") from None
            return STEPS

        agents.register(Agent("a", code))
        config = settings(worker_id=name, max_retries=1, max_crashes=1, **changes)
        runner = AgentRunner(*open_url(url, max_retries=1), config, registry=agents)
        cast("Any", runner.queue.commits).timeout = 1.0  # a store that is away is found to be away sooner
        return runner

    async def _step(self, run: str, i: int) -> int:
        if (run, i) in self.confirmed:
            self.again.append((run, i))
        self.ran[run, i] += 1
        await asyncio.sleep(0.005)
        return i

    async def check(self) -> None:
        near = self.runners[0]
        for n in range(RUNS):
            result = await near.wait(f"r{n}", timeout=30)
            assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": STEPS}), result.error
            row = await near.queue.require(f"r{n}")
            assert (row.attempt, row.failures, row.crashes) == (1, 0, 0)
            records = await near.state_store.records(row.run_id)
            assert [each.name for each in records if each.kind == "done"] == [f"s{i}" for i in range(STEPS)]
            assert [each.kind for each in records].count("attempt") == 1
        assert {len(names) for names in self.executed_by.values()} == {1}, "each run is executed by one worker"
        assert (self.again, self.caught) == ([], [])


@asynccontextmanager
async def fleet(url: str, **changes: Any) -> AsyncIterator[Fleet]:
    made = Fleet(url, **changes)
    for n in range(RUNS):
        await made.runners[0].submit("a", {}, run_id=f"r{n}")
    loops = [
        asyncio.create_task(each.run_loop(0.1, concurrency=RUNS // 2, handle_signals=False)) for each in made.runners
    ]
    try:
        yield made
    finally:
        for each in made.runners:
            each.stop()
        await asyncio.gather(*loops)
        for each in made.runners:
            await each.close()


def outage_records(caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """How many records have a traceback, and how many say that the store answers again."""
    found = [each for each in caplog.records if each.name == "agent_runtime_core"]
    return sum(each.exc_info is not None for each in found), sum("answers again" in each.getMessage() for each in found)


async def killed(server: RedisServer, seconds: float) -> None:
    await asyncio.to_thread(server.write_out)
    server.kill()
    await asyncio.sleep(seconds)
    await asyncio.to_thread(server.restart)


async def stopped(server: RedisServer, seconds: float) -> None:
    server.stop()
    await asyncio.sleep(seconds)
    server.cont()


OUTAGES = pytest.mark.parametrize("outage", [killed, stopped])


@OUTAGES
@pytest.mark.redis
async def test_an_outage_of_redis_uses_no_attempt(outage: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """Longer than a commit is repeated without a word, and shorter than the lease."""
    caplog.set_level(logging.INFO)
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        async with fleet(server.url, lease_ttl_seconds=60.0) as working:
            await until(lambda: len(working.confirmed) > 10)
            await outage(server, 6)
            await working.check()
            assert set(working.ran.values()) == {1}, "no step was cut"
    assert outage_records(caplog) == (1, 1)


@OUTAGES
@pytest.mark.redis
async def test_a_lease_that_ended_during_an_outage_is_its_worker_s(outage: Callable[..., Any]) -> None:
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        async with fleet(server.url, lease_ttl_seconds=3.0) as working:
            await until(lambda: len(working.confirmed) > 10)
            await outage(server, 5)
            for n in range(RUNS):
                await working.runners[0].wait(f"r{n}", timeout=30)
            rows = [await working.runners[0].queue.require(f"r{n}") for n in range(RUNS)]
    assert [(row.crashes, row.attempt) for row in rows] == [(0, 1)] * RUNS
    assert {len(names) for names in working.executed_by.values()} == {1}
    assert working.again == []
    # A guarded step that was cut follows its policy, and raises to the code.
    assert {type(each) for each in working.caught} <= {StepInDoubt}
    assert sum(row.status != "succeeded" for row in rows) == len(working.caught)


@pytest.mark.parametrize("seed", range(4))
async def test_a_full_disk_uses_no_attempt(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every write is refused from a random commit on, for a while."""
    await full_disk(seed, tmp_path, monkeypatch, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 60))
async def test_a_full_disk_at_many_moments(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await full_disk(seed, tmp_path, monkeypatch, caplog)


def full() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


async def full_disk(seed: int, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with fleet(f"sqlite:///{path}/runs.db") as working:
        real, left = GroupCommitter._end, [Random(seed).randrange(1, 18), 30]

        def end(committer: GroupCommitter, tx: Any) -> None:
            left[0] -= 1
            if left[0] <= 0 < left[1]:
                left[1] -= 1
                raise full()
            real(committer, tx)

        monkeypatch.setattr(GroupCommitter, "_end", end)
        await working.check()
        for n in range(RUNS):
            await consistent(working.runners[0], f"r{n}")
        assert left[1] == 0, "the disk was full"
        assert set(working.ran.values()) == {1}
    tracebacks, ends = outage_records(caplog)
    begins = sum("is not available" in each.getMessage() for each in caplog.records)
    assert (tracebacks, ends) == (1, begins), "each outage that is told has ended"
    assert ends in (1, 2), "a failure may be noticed after another commit has succeeded"


@pytest.mark.redis
@pytest.mark.parametrize("restarted", [True, False])
async def test_no_lease_is_taken_over_right_after_redis_was_away(restarted: bool) -> None:
    """A process that comes later, and so has seen nothing of the outage, gives the others time to renew as well."""
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        queue = RedisQueue(server.url)
        run_id = (await queue.enqueue(None, "a", {})).run_id
        assert await queue.claim("first", 1.5) is not None
        if restarted:
            await killed(server, 1.6)
        else:
            await stopped(server, 1.6)
        later = RedisQueue(server.url.replace("127.0.0.1", "localhost"))
        assert await later.claim("second", 1.5) is None
        assert await queue.extend_lease(run_id, "first", 0.001)
        found = await taken(later, "second")
        assert (found.run_id, found.attempt) == (run_id, 2), "the lease has ended for good"
        await later.close()
        await queue.close()


@pytest.mark.redis
async def test_a_lease_that_had_ended_before_nobody_came_is_taken_over() -> None:
    """As with a worker that a timer starts: the store cannot tell the absence of all workers from its own."""
    with RedisServer() as server:
        queue = RedisQueue(server.url)
        await queue.enqueue(None, "a", {})
        assert await queue.claim("first", 0.3) is not None
        await asyncio.sleep(0.4)
        assert await queue.claim("second", 0.3) is None
        await asyncio.sleep(0.4)
        assert (await queue.claim("second", 0.3)).attempt == 2
        await queue.close()


async def taken(queue: RedisQueue, worker: str) -> Any:
    async with asyncio.timeout(10):
        while (found := await queue.claim(worker, 1.5)) is None:  # noqa: ASYNC110 - the server's clock decides
            await asyncio.sleep(0.05)
    return found


@pytest.mark.redis
async def test_a_worker_on_redis_that_ends_in_order_releases_its_runs() -> None:
    with RedisServer() as server:
        working = Fleet(server.url)
        runner, begun = working.runners[0], asyncio.Event()

        async def endless(ctx: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        runner.registry.register(Agent("endless", endless))
        run_id = await runner.submit("endless", {})
        loop = asyncio.create_task(runner.run_loop(0.1, handle_signals=False))
        await begun.wait()
        runner.stop()
        await loop
        row = await working.runners[1].queue.require(run_id)
        assert (row.status, row.attempt, row.lease_until) == ("pending", 1, 0.0)
        for each in working.runners:
            await each.close()


@pytest.mark.redis
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (30, 10)),
        ({"lease_ttl_seconds": 60}, (60, 10)),
        ({"heartbeat_interval_seconds": 5}, (30, 5)),
        ({"lease_ttl_seconds": 60, "heartbeat_interval_seconds": 30}, (60, 30)),
    ],
)
async def test_redis_has_a_shorter_lease_where_none_is_set(
    changes: dict[str, Any], expected: tuple[float, float], tmp_path: Path
) -> None:
    with RedisServer() as server:
        async with AgentRunner.open(server.url, config=settings(**changes)) as runner:
            assert (runner.config.lease_ttl_seconds, runner.config.heartbeat_interval_seconds) == expected
    async with AgentRunner.open(tmp_path / "runs.db", config=settings()) as runner:
        assert (runner.config.lease_ttl_seconds, runner.config.heartbeat_interval_seconds) == (60, 30)


async def test_an_idle_worker_logs_a_full_disk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk answers the claims of a worker that has nothing to do, because they only read."""
    caplog.set_level(logging.INFO)
    working, real, refused = Fleet(f"sqlite:///{tmp_path}/runs.db"), GroupCommitter._end, [0]
    changes = Counter[int]()

    def end(committer: GroupCommitter, tx: Any) -> None:
        before, changes[id(committer)] = changes[id(committer)], committer.conn.total_changes
        if refused[0] < 5 and changes[id(committer)] > before:
            refused[0] += 1
            raise full()
        real(committer, tx)

    runner = working.runners[0]
    monkeypatch.setattr(GroupCommitter, "_end", end)
    loop = asyncio.create_task(runner.run_loop(0.01, handle_signals=False))
    await until(lambda: "answers again" in caplog.text)
    runner.stop()
    await loop
    for each in working.runners:
        await each.close()
    assert refused == [5]
    assert outage_records(caplog) == (1, 1)


async def test_a_worker_that_is_stopped_in_an_outage_says_that_it_released_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    working, real, is_full = Fleet(f"sqlite:///{tmp_path}/runs.db", grace_seconds=0.0), GroupCommitter._end, [False]

    def end(committer: GroupCommitter, tx: Any) -> None:
        if is_full[0]:
            raise full()
        real(committer, tx)

    monkeypatch.setattr(GroupCommitter, "_end", end)
    monkeypatch.setattr("agent_runtime_core.runner.worker.SHUTDOWN_SECONDS", 0.05)
    runner = working.runners[0]
    await runner.submit("a", {}, run_id="r0")
    loop = asyncio.create_task(runner.run_loop(0.1, handle_signals=False))
    await until(lambda: len(working.confirmed) > 2)
    is_full[0] = True
    await until(lambda: "is not available" in caplog.text)
    runner.stop()
    await loop
    is_full[0] = False
    assert "run r0 of agent 'a' did not stop before the worker ended; its store is away: another" in caplog.text
    assert (await runner.queue.require("r0")).status == "running"
    for each in working.runners:
        await each.close()
