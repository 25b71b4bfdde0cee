"""The row of a runner in the store of its queue: who claims runs here, and whether that process lives."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import agent_runtime_core
from agent_runtime_core._core.clock import aware
from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, ProcessInfo
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.testing import VirtualClock
from tests.contract.third_party.their_queue import TheirQueue
from tests.support.runs import Rig, soon

DAY = 86_400.0


async def body(ctx: Any) -> int:
    return 1


async def listed(runner: AgentRunner, condition: Callable[[list[ProcessInfo]], bool] = bool) -> list[ProcessInfo]:
    async with asyncio.timeout(10):
        while not condition(found := await runner.processes()):  # noqa: ASYNC110 - a row rings for nobody
            await asyncio.sleep(0.001)
    return found


@asynccontextmanager
async def working(runner: AgentRunner, **options: Any) -> AsyncIterator[None]:
    loop = asyncio.ensure_future(runner.run_loop(handle_signals=False, **options))
    try:
        yield
    finally:
        runner.stop()
        await loop


class Commits:
    """The names of the operations in the commits of a runner's queue that have one about a process."""

    def __init__(self, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, ...]] = []
        commits: Any = runner.queue.commits
        for name in ("commit", "commit_from_thread"):
            monkeypatch.setattr(commits, name, self._noting(getattr(commits, name)))

    def _noting(self, commit: Any) -> Any:
        def note(guard: Any, ops: Any) -> Any:
            names = tuple(op.name.removeprefix("queue.") for op in ops)
            if any(name.endswith("_process") for name in names):
                self.seen.append(names)
            return commit(guard, ops)

        return note


async def test_a_worker_is_listed_while_its_loop_runs(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, worker_id="orders-1") as rig:
        started = clock.wall()
        rig.register(body, "one")
        clock.advance(5)
        other = rig.another()
        async with working(rig.runner, concurrency=3):
            [found] = await listed(other)
            assert found == ProcessInfo(
                found.process_id, "orders-1", socket.gethostname(), os.getpid(), aware(started),
                agent_runtime_core.__version__, ("one",), 3, aware(started + 5), living=True,
            )  # fmt: skip
        assert await other.processes() == []


async def test_a_second_loop_is_the_same_process_and_a_second_runner_another(place: Path | None) -> None:
    async with Rig(place, VirtualClock()) as rig:
        other = rig.another()
        async with working(rig.runner):
            [first] = await listed(rig.runner)
        async with working(rig.runner), working(other):
            found = await listed(rig.runner, lambda found: len(found) == 2)
            assert first.process_id in {each.process_id for each in found}


async def test_an_idle_worker_renews_its_row_once_in_an_interval(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig:
        commits, interval = Commits(rig.runner, monkeypatch), rig.runner.config.heartbeat_interval
        async with working(rig.runner, poll_interval=interval / 4):
            await soon(lambda: clock.next_due is not None)
            for _ in range(12):
                clock.advance(interval / 4)
                await soon(lambda: clock.next_due is not None)
            assert commits.seen == [("save_process",)] * 4
        assert commits.seen[4:] == [("drop_process",)]


async def test_a_worker_that_polls_seldom_stays_living(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig, working(rig.runner, poll_interval=3600):
        for _ in range(5):
            await soon(lambda: clock.next_due is not None)
            clock.advance(clock.next_due or 0)
        await listed(rig.runner, lambda found: found[0].last_seen_at == aware(clock.wall()))


async def test_agents_that_are_registered_later_are_listed(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig, working(rig.runner):
        assert (await listed(rig.runner))[0].agents == ()
        rig.register(body, "later")
        await soon(lambda: clock.next_due is not None)
        clock.advance(1)
        await listed(rig.runner, lambda found: found[0].agents == ("later",))


async def test_a_heartbeat_renews_the_row_in_its_commit(place: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(place, VirtualClock()) as rig:
        commits = Commits(rig.runner, monkeypatch)

        async def long(ctx: Any) -> None:
            assert await rig.runner.processes() == []
            for _ in range(2):
                await asyncio.to_thread(rig.runner.heartbeat.beat)
            found.extend(await rig.runner.processes())

        found: list[ProcessInfo] = []
        assert await rig.value(body, "short") == 1
        assert commits.seen == [], "no commit more for a short call"
        assert await rig.value(long) is None
        assert [(each.slots, each.agents) for each in found] == [(0, ())]
        assert commits.seen == [("beat", "save_process")] * 2
        await rig.runner.close()
        assert commits.seen[2:] == [("drop_process",)]
        await rig.runner.close()
        assert len(commits.seen) == 3


async def test_a_process_counts_as_living_for_two_intervals(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig:
        await rig.runner._process.renew()
        interval = rig.runner.config.heartbeat_interval
        for seconds, living in ((0, True), (2 * interval, True), (0.1, False)):
            clock.advance(seconds)
            assert [each.living for each in await rig.runner.processes()] == [living]
        clock.set_wall(clock.wall() - DAY)
        await rig.runner._process.renew()
        assert [each.living for each in await rig.runner.processes()] == [True], "whatever the wall clock says"


async def test_after_a_day_the_row_of_a_process_is_deleted_by_the_next_one(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig:
        await rig.runner._process.renew()  # and it is killed
        other = rig.another()
        clock.advance(DAY + 1)
        assert len(await other.processes()) == 1
        async with working(other):
            await listed(other, lambda found: [each.living for each in found] == [True])


async def test_a_worker_starts_and_ends_while_the_store_does_not_reply(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, away = VirtualClock(), True
    async with Rig(place, clock) as rig:
        rig.register(body)
        commits: Any = rig.runner.queue.commits
        commit, refused = commits.commit, asyncio.Event()

        async def or_away(guard: Any, ops: Any) -> Any:
            if away and any(op.name.endswith("_process") for op in ops):
                refused.set()
                raise StorageBusy("no reply")
            return await commit(guard, ops)

        monkeypatch.setattr(commits, "commit", or_away)
        async with working(rig.runner):
            await refused.wait()
            await rig.runner.submit("script", run_id="r")
            assert (await rig.runner.wait("r", 10)).final_output == {"value": 1}
            away = False
            clock.advance(1)
            await listed(rig.runner)
            away = True
        assert len(await rig.runner.processes()) == 1


async def test_a_queue_without_rows_of_processes_has_none() -> None:
    registry = Registry()
    runner = AgentRunner(TheirQueue(), InMemoryEventBus(), InMemoryStateStore(), registry=registry)
    async with runner, working(runner):
        run_id = await runner.submit("nobody")
        assert await runner.cancel(run_id)
        assert await runner.processes() == []


async def test_a_runner_that_only_reads_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with AgentRunner.open(path, registry=Registry()) as runner, working(runner):
        await listed(runner)
        async with AgentRunner.open(path, read_only=True) as reader:
            [found] = await reader.processes()
            assert found.living
