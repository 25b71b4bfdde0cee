"""The time for which a run is deferred counts against its limits of time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import CircuitOpen, InvalidArgument, RateLimited
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.portal import call
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.runner.settings import RunnerConfig
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import KINDS, Agent, drop, settings, store, until

LIMIT = 60.0
CONFIG: dict[str, Any] = {"run_timeout_seconds": LIMIT, "max_retries": 1, "lease_ttl_seconds": 10_000}
kinds = pytest.mark.parametrize("kind", KINDS)


class Outage:
    """An agent whose provider is down: each attempt takes `work` seconds and is deferred for `after`."""

    def __init__(self, clock: VirtualClock, after: float = 10.0, work: float = 0.0) -> None:
        self.clock, self.after, self.work = clock, after, work
        self.asked = 0
        self.over = False

    async def ask(self) -> str:
        self.asked += 1
        self.clock.advance(self.work)
        if self.over:
            return "done"
        raise CircuitOpen("openai was not asked", after=self.after)

    async def __call__(self, ctx: Any) -> str:
        return await self.ask()


async def jumping(clock: VirtualClock, work: Awaitable[RunResult]) -> RunResult:
    """Its result, with the clock moved on over every pause."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0.001)
        if not task.done() and (due := clock.next_due) is not None:
            clock.advance(due)
    return await task


def timed_out(result: RunResult, cause: str = "CircuitOpen") -> str:
    assert result.status is RunStatus.TIMED_OUT, result
    assert result.error is not None
    assert result.error.type == "TimedOut"
    assert not result.error.retriable
    assert cause in result.error.message
    return result.error.message


@kinds
@pytest.mark.parametrize("work", [0.0, 7.0])
async def test_execute_returns_within_the_time_limit_of_an_attempt(kind: str, work: float, tmp_path: Path) -> None:
    clock = VirtualClock()
    outage = Outage(clock, work=work)
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", outage)
        result = await jumping(clock, here.runner(settings(**CONFIG)).execute("a", "r"))
        message = timed_out(result)
        assert "run_timeout_seconds=60" in message
        assert "openai was not asked" in message
        assert LIMIT - 13 - work <= clock.boot() <= LIMIT + work + 0.01, "neither much earlier nor later"
        assert outage.asked > 2
        assert (await here.runner().get_run("r")).attempt == 1


@kinds
@pytest.mark.parametrize("work", [0.0, 7.0])
async def test_deferrals_add_up_over_the_claims_of_workers(kind: str, work: float, tmp_path: Path) -> None:
    clock = VirtualClock()
    outage = Outage(clock, work=work)
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", outage)
        run_id = await here.runner(settings(**CONFIG)).submit("a")
        while await here.runner(settings(**CONFIG)).run_once():
            info = await here.runner().get_run(run_id)
            if info.status is not RunStatus.PENDING:
                break
            assert info.scheduled_at is not None
            clock.advance(info.scheduled_at.timestamp() - clock.wall() + 0.01)
        timed_out(await here.runner().wait(run_id))
        assert LIMIT - 13 - work <= clock.boot() <= LIMIT + work + 1
        assert outage.asked > 2


@kinds
async def test_time_in_which_no_worker_was_there_is_not_counted(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    outage = Outage(clock)
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", outage)
        runner = here.runner(settings(**CONFIG))
        run_id = await runner.submit("a")
        assert await runner.run_once()
        clock.advance(86_400)
        outage.over = True
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": "done"}


@kinds
@pytest.mark.parametrize("by_worker", [False, True])
@pytest.mark.parametrize("error", [CircuitOpen("down", after=61.0), RateLimited("slow down", retry_after=61.0)])
async def test_a_run_that_cannot_resume_in_time_ends_at_once(
    kind: str, by_worker: bool, error: Exception, tmp_path: Path
) -> None:
    clock = VirtualClock()

    async def code(ctx: Any) -> Any:
        raise error

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner(settings(**CONFIG))
        if by_worker:
            await runner.submit("a", run_id="r")
            assert await runner.run_once()
            result = await runner.wait("r")
        else:
            result = await runner.execute("a", "r")
        message = timed_out(result, type(error).__name__)
        assert "defers it for 61 s, and 60 s are left" in message
        assert clock.boot() == 0.0


@kinds
@pytest.mark.parametrize("by_worker", [False, True])
async def test_the_count_restarts_when_a_step_is_recorded(kind: str, by_worker: bool, tmp_path: Path) -> None:
    """A run that makes progress in between may be deferred as often as it takes."""
    clock, deferred = VirtualClock(), set[int]()

    async def code(ctx: Any) -> int:
        for number in range(10):

            async def ask(number: int = number) -> int:
                if number not in deferred:
                    deferred.add(number)
                    raise CircuitOpen("down", after=40.0)
                return number

            await ctx.step(f"s{number}", ask)
        return 10

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner(settings(**CONFIG))
        if by_worker:
            await runner.submit("a", run_id="r")
            while await runner.run_once():
                clock.advance(50)
            result = await runner.wait("r", timeout=5)
        else:
            result = await jumping(clock, runner.execute("a", "r"))
        assert result.final_output == {"value": 10}, result.error
        assert clock.boot() >= 400


@kinds
async def test_an_attempt_that_records_a_step_has_its_whole_time(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    raised = [CircuitOpen("down", after=50.0)]

    async def work(ctx: Any) -> None:
        clock.advance(40)
        ctx.control.notify()  # as the alarm does on a clock that moves by itself
        for _ in range(5):
            await asyncio.sleep(0)

    async def code(ctx: Any) -> str:
        if raised:
            raise raised.pop()
        await ctx.step("first", lambda: 1)
        await work(ctx)
        return "done"

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        result = await jumping(clock, here.runner(settings(**CONFIG)).execute("a", "r"))
        assert result.final_output == {"value": "done"}, result.error
        assert clock.boot() >= 90


@kinds
async def test_waiting_for_a_person_is_not_counted(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    outage = Outage(clock, after=35.0)

    async def code(ctx: Any) -> Any:
        if outage.asked == 1:
            await ctx.wait_for_signal("go")
        return await outage.ask()

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner(settings(**CONFIG, park_after=0))
        run_id = await runner.submit("a")
        assert await runner.run_once()
        clock.advance(50)
        assert await runner.run_once()
        assert (await runner.get_run(run_id)).status is RunStatus.WAITING
        clock.advance(100_000)
        await runner.signal(run_id, "go")
        assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert (info.status, info.reason) == (RunStatus.PENDING, "CircuitOpen")
        outage.over = True
        clock.advance(50)
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": "done"}


@kinds
async def test_a_killed_worker_does_not_restart_the_count(kind: str, tmp_path: Path) -> None:
    clock, hangs = VirtualClock(), asyncio.Event()

    async def code(ctx: Any) -> Any:
        if ctx.attempt == 1 and hangs.is_set():
            hangs.clear()
            await asyncio.get_running_loop().create_future()
        raise CircuitOpen("down", after=35.0)

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        first = here.runner(settings(**{**CONFIG, "lease_ttl_seconds": 60}))
        run_id = await first.submit("a")
        assert await first.run_once()
        clock.advance(43)
        hangs.set()
        dying = asyncio.ensure_future(first.run_once())
        try:
            await until(lambda: not hangs.is_set())
            await drop(first, dying, run_id)
            clock.advance(61)
            second = here.runner(settings(**CONFIG))
            assert await second.run_once()
            timed_out(await second.wait(run_id))
        finally:
            dying.cancel()
            await asyncio.wait([dying])


@kinds
async def test_a_release_of_the_claim_does_not_restart_the_count(kind: str, tmp_path: Path) -> None:
    clock, began = VirtualClock(), asyncio.Event()
    outage = Outage(clock, after=35.0)

    async def code(ctx: Any) -> Any:
        if began.is_set():
            began.clear()
            await asyncio.get_running_loop().create_future()
        return await outage.ask()

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        first = here.runner(settings(**{**CONFIG, "grace_seconds": 0}))
        run_id = await first.submit("a")
        assert await first.run_once()
        clock.advance(43)
        began.set()
        working = asyncio.ensure_future(first.run_once())
        await until(lambda: not began.is_set())
        await first.close()
        await working
        second = here.runner(settings(**CONFIG))
        assert await second.run_once()
        timed_out(await second.wait(run_id))


@kinds
async def test_a_failed_attempt_restarts_the_count(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    raised: list[Exception] = [CircuitOpen("down", after=40.0), OSError("once"), CircuitOpen("down", after=40.0)]

    async def code(ctx: Any) -> str:
        if raised:
            raise raised.pop(0)
        return "done"

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner(settings(**{**CONFIG, "max_retries": 2}))
        result = await jumping(clock, runner.execute("a", "r"))
        assert result.final_output == {"value": "done"}, result.error


async def test_an_attempt_that_takes_what_deferrals_left_names_them(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def code(ctx: Any) -> None:
        if clock.boot() > 0:
            clock.advance(30)
            ctx.control.notify()  # as the alarm does on a clock that moves by itself
            await asyncio.get_running_loop().create_future()
        raise CircuitOpen("down", after=40.0)

    async with store("memory", tmp_path, clock) as here:
        here.agent("a", code)
        message = timed_out(await jumping(clock, here.runner(settings(**CONFIG)).execute("a", "r")))
        assert "more than 60 s" in message
        assert "deferred by CircuitOpen: down" in message


async def test_a_block_of_open_run_is_deferred_by_its_caller_as_often_as_it_likes(tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(CircuitOpen):
            async with open_run(tmp_path / "runs.db", "r"):
                raise CircuitOpen("down", after=1e8)
    async with open_run(tmp_path / "runs.db", "r") as ctx:
        assert ctx.attempt == 1


# -- a deadline


def late(result: RunResult) -> str:
    assert result.status is RunStatus.TIMED_OUT, result
    assert result.error is not None
    assert result.error.type == "DeadlineExceeded"
    return result.error.message


@kinds
async def test_execute_returns_by_its_deadline(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    outage = Outage(clock)
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", outage)
        runner = here.runner(settings(run_timeout_seconds=100_000))
        deadline = clock.wall() + 45
        message = late(await jumping(clock, runner.execute("a", "r", deadline=deadline)))
        assert clock.boot() <= 45.01
        assert "CircuitOpen defers it for 10 s (openai was not asked)" in message
        assert outage.asked > 2
        assert (await runner.get_run("r")).deadline is not None, "it is stored with a new run"


@kinds
async def test_a_run_that_cannot_resume_before_its_deadline_ends_at_once(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", Outage(clock, after=100.0))
        runner = here.runner(settings())
        assert "2023-11-14 22:14:20 UTC" in late(await runner.execute("a", "r", deadline=clock.wall() + 60))
        run_id = await runner.submit("a", deadline=clock.wall() + 60)
        assert await runner.run_once()
        late(await runner.wait(run_id))
        assert clock.boot() == 0.0


@kinds
async def test_work_is_stopped_at_the_deadline(kind: str, tmp_path: Path) -> None:
    clock, stopped = VirtualClock(), list[str]()

    async def code(ctx: Any) -> None:
        clock.advance(31)
        ctx.control.notify()  # as the alarm does on a clock that moves by itself
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            stopped.append("yes")

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        late(await here.runner().execute("a", "r", deadline=clock.wall() + 30))
        assert stopped == ["yes"]


@kinds
async def test_another_deadline_replaces_that_of_a_stored_run_during_the_call(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    outage = Outage(clock, after=40.0)
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", outage)
        runner = here.runner(settings(run_timeout_seconds=100_000))
        late(await runner.execute("a", "r", deadline=clock.wall() + 5))
        late(await runner.execute("a", "r"))
        assert outage.asked == 2
        later = asyncio.ensure_future(runner.execute("a", "r", deadline=clock.wall() + 1000))
        await until(lambda: outage.asked == 3)
        outage.over = True
        result = await jumping(clock, later)
        assert result.final_output == {"value": "done"}, result.error


@kinds
async def test_execute_does_not_wait_for_others_beyond_its_deadline(kind: str, tmp_path: Path) -> None:
    clock, began = VirtualClock(), asyncio.Event()
    end = asyncio.Event()

    async def code(ctx: Any) -> str:
        began.set()
        await end.wait()
        return "done"

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        first, second = here.runner(settings(**CONFIG)), here.runner(settings(**CONFIG))
        running = asyncio.ensure_future(first.execute("a", "r", concurrency_key="k"))
        await began.wait()
        for run_id in ("r", "behind"):
            waiting = asyncio.ensure_future(
                second.execute("a", run_id, concurrency_key="k", deadline=clock.wall() + 0.02)
            )
            await asyncio.sleep(0)
            clock.advance(1)
            with pytest.raises(TimeoutError, match=f"deadline of run .{run_id}. passed"):
                await waiting
        end.set()
        assert (await running).final_output == {"value": "done"}


async def test_a_deadline_is_checked_like_that_of_submit(tmp_path: Path) -> None:
    async with store("memory", tmp_path) as here:
        here.agent("a", Outage(VirtualClock()))
        with pytest.raises(InvalidArgument, match="deadline must be a time after the year 2000, got 60"):
            await here.runner().execute("a", deadline=60)


def test_without_a_loop_a_deadline_is_the_same(tmp_path: Path) -> None:
    runner = AgentRunner.open(tmp_path / "runs.db", config=RunnerConfig(run_timeout_seconds=90))
    clock = runner.queue.clock

    async def down(ctx: Any) -> None:
        raise CircuitOpen("down", after=100.0)

    agent = Agent("a", down)
    try:
        late(runner.execute_sync(agent, "r", deadline=clock.wall() + 60))
        timed_out(runner.execute_sync(agent, "s"))
    finally:
        call(runner.close)
