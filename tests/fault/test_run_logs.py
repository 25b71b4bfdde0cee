"""The log of runs: each is claimed, started and finished, a lost one is a warning, and no record holds contents."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import CircuitOpen
from agent_runtime_core.interfaces import ErrorInfo, RunResult
from agent_runtime_core.runner import AgentRunner, open_run, open_run_sync
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import KINDS, Agent, drop, settings, store, until

SECRET = "private words"
INPUT = {"messages": [{"role": "user", "content": SECRET}], "params": {"token": SECRET}}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """All records of the library; none of them may hold contents."""
    with caplog.at_level(logging.DEBUG, "agent_runtime_core"):
        yield caplog
    for record in caplog.records:
        held = f"{record.getMessage()} {record.exc_info} {record.__dict__}"
        assert SECRET not in held, f"a record holds contents: {record.getMessage()}"


def warnings(heard: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in heard.records if record.levelno >= logging.WARNING]
    return [each for each in found if "redis://" not in each]  # settings of the server


def infos(heard: pytest.LogCaptureFixture, run: object) -> list[str]:
    found = [record.getMessage() for record in heard.records if record.levelno == logging.INFO]
    return [each.partition(f"run {run} of agent 'a' ")[2] for each in found if f"run {run} of agent" in each]


async def fails(ctx: Any) -> None:
    raise ValueError(SECRET)


async def succeeds(ctx: Any) -> Any:
    await ctx.step("s", lambda: SECRET)
    return SECRET


@kinds
async def test_a_run_that_succeeds_is_claimed_started_and_finished(
    kind: str, heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", succeeds)
        runner = here.runner()
        run_id = await runner.submit("a", INPUT)
        assert await runner.run_once()
        await runner.execute("a", "mine", INPUT)
    for run in (run_id, "mine"):
        assert infos(heard, run) == ["claimed by worker-1, attempt 1", "started, attempt 1", "finished: succeeded"]
    assert warnings(heard) == []


@kinds
@pytest.mark.parametrize("by_worker", [False, True])
async def test_each_failed_attempt_is_one_warning(
    kind: str, by_worker: bool, heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", fails)
        runner = here.runner(settings(max_retries=3))
        if by_worker:
            run_id = await runner.submit("a", INPUT, run_id="mine", metadata={"key": SECRET})
            for number in range(3):
                assert len(warnings(heard)) == number
                assert await runner.run_once()
        else:
            result = await runner.execute("a", "mine", INPUT)
            assert result.run_id is not None
            run_id = result.run_id
    assert warnings(heard) == [
        "attempt 1 of run mine of agent 'a' failed: ValueError, next attempt in 0 s",
        "attempt 2 of run mine of agent 'a' failed: ValueError, next attempt in 0 s",
        "run mine of agent 'a' failed: ValueError in attempt 3",
    ]
    told = [each for each in heard.records if each.levelno == logging.WARNING]
    assert {each.__dict__["run_id"] for each in told} == {str(run_id)}
    assert sum("started" in each for each in infos(heard, "mine")) == 3


async def test_a_run_without_a_key_is_named_by_its_id(heard: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    async with store("memory", tmp_path) as here:
        here.agent("a", fails)
        runner = here.runner(settings(max_retries=1))
        run_id = await runner.submit("a", INPUT)
        assert await runner.run_once()
    assert warnings(heard) == [f"run {run_id} of agent 'a' failed: ValueError in attempt 1"]


@kinds
async def test_an_error_that_the_agent_returned_is_named_by_its_type(
    kind: str, heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def code(ctx: Any) -> RunResult:
        return RunResult({"said": SECRET}, error=ErrorInfo("Rejected", SECRET, retriable=False))

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        await here.runner().execute("a", "mine", INPUT)
    assert warnings(heard) == ["run mine of agent 'a' failed: Rejected in attempt 1"]


@kinds
async def test_a_run_that_kills_its_workers_is_one_warning(
    kind: str, heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    clock, tasks, began = VirtualClock(), list[asyncio.Task[Any]](), asyncio.Event()

    async def code(ctx: Any) -> None:
        began.set()
        await asyncio.get_running_loop().create_future()

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        run_id = await here.runner().submit("a", INPUT, run_id="mine")
        for _ in range(3):
            began.clear()
            runner = here.runner()
            tasks.append(asyncio.ensure_future(runner.run_once()))
            await until(began.is_set)
            await drop(runner, tasks[-1], run_id)
            clock.advance(61)
        assert await here.runner().run_once()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert warnings(heard) == ["run mine of agent 'a' is dead: Poisoned in attempt 4"]


@kinds
async def test_runs_that_end_for_want_of_time_are_one_warning_each(
    kind: str, heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    clock = VirtualClock()

    async def code(ctx: Any) -> None:
        if "down" in ctx.input:
            raise CircuitOpen(SECRET, after=1000.0)
        clock.advance(301)
        ctx.control.notify()
        await asyncio.get_running_loop().create_future()

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner()
        await runner.submit("a", INPUT, run_id="expired", expires_in=5)
        await runner.submit("a", INPUT, run_id="late", deadline=clock.wall() + 5)
        clock.advance(10)
        assert await runner.run_once()
        assert await runner.run_once()
        await runner.execute("a", "slow", INPUT)
        await runner.execute("a", "deferred", {**INPUT, "down": True})
    assert warnings(heard) == [
        "run expired of agent 'a' timed out: Expired in attempt 1",
        "run late of agent 'a' timed out: DeadlineExceeded in attempt 1",
        "run slow of agent 'a' timed out: TimedOut in attempt 1",
        "run deferred of agent 'a' timed out: TimedOut in attempt 1",
    ]


@kinds
async def test_a_cancelled_run_is_no_warning(kind: str, heard: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    began = asyncio.Event()

    async def code(ctx: Any) -> None:
        began.set()
        await asyncio.get_running_loop().create_future()

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        runner = here.runner()
        running = asyncio.ensure_future(runner.execute("a", "here", INPUT))
        await began.wait()
        assert await runner.cancel("here", wait=True) == "cancelled"
        await running
        await runner.submit("a", INPUT, run_id="pending")
        assert await runner.cancel("pending", wait=True) == "cancelled"
    assert infos(heard, "here")[-1] == "finished: cancelled"
    assert infos(heard, "pending") == ["finished: cancelled"]
    assert warnings(heard) == []


@kinds
async def test_a_retry_is_a_warning_and_a_deferral_is_none(
    kind: str, heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    clock = VirtualClock()
    raised: list[Exception] = [CircuitOpen(SECRET, after=5.0), OSError(SECRET)]

    async def code(ctx: Any) -> str:
        if raised:
            raise raised.pop(0)
        return SECRET

    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner()
        run_id = await runner.submit("a", INPUT)
        assert await runner.run_once()
        clock.advance(10)
        assert await runner.run_once()
        assert await runner.run_once()
    assert infos(heard, run_id) == [
        "claimed by worker-1, attempt 1", "started, attempt 1",
        next(each for each in infos(heard, run_id) if re.fullmatch(r"deferred for [56][.\d]* s: CircuitOpen", each)),
        "claimed by worker-1, attempt 1", "resumed, attempt 1",
        "claimed by worker-1, attempt 2", "started, attempt 2", "finished: succeeded",
    ]  # fmt: skip
    assert warnings(heard) == [f"attempt 1 of run {run_id} of agent 'a' failed: OSError, next attempt in 0 s"]


async def test_a_block_of_open_run_is_logged_like_a_run(heard: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=SECRET):
        async with open_run(tmp_path / "runs.db", "mine", input=INPUT):
            raise ValueError(SECRET)
    assert warnings(heard) == ["run mine of agent 'open_run' failed: ValueError in attempt 1"]
    async with open_run(tmp_path / "runs.db", "mine", input=INPUT) as ctx:
        await ctx.step("s", lambda: SECRET)
    assert "run mine of agent 'open_run' finished: succeeded" in heard.text
    assert len(warnings(heard)) == 1


def test_without_a_loop_it_is_the_same(heard: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=SECRET), open_run_sync(tmp_path / "runs.db", "mine", input=INPUT):
        raise ValueError(SECRET)
    assert warnings(heard) == ["run mine of agent 'open_run' failed: ValueError in attempt 1"]


async def test_a_child_and_its_parent_are_one_warning_each(heard: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    async def parent(ctx: Any) -> None:
        await ctx.call("a", INPUT)

    async with AgentRunner.open(tmp_path / "runs.db", config=settings(max_retries=1)) as runner:
        runner.registry = (here := type(runner.registry)())
        here.register(Agent("a", fails))
        result = await runner.execute(Agent("p", parent), "mine", INPUT)
    assert result.error is not None
    child, own = warnings(heard)
    assert re.fullmatch(r"run [-0-9a-f]{36} of agent 'a' failed: ValueError in attempt 1", child)
    assert own == "run mine of agent 'p' failed: RunFailed in attempt 1"


@kinds
async def test_an_end_that_a_killed_process_recorded_alone_is_logged_by_the_next(
    kind: str, heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The journal has the end, and the row does not: its queue is on another engine and was not reached."""
    async with store(kind, tmp_path) as here, store("memory", tmp_path) as other:
        here.agent("a", fails)
        config = settings(max_retries=1)
        apart = AgentRunner(
            other.runner().queue, here.runner().event_bus, here.runner().state_store, config, registry=here.agents
        )
        run_id = await apart.submit("a", INPUT, run_id="mine")
        engine = other.engine

        real = engine.apply

        def refuses(guard: Any, ops: Any) -> Any:
            if any(op.name == "queue.settle" for op in ops):
                raise ConnectionError("the queue is gone")
            return real(guard, ops)

        engine.apply = refuses
        with pytest.raises(ConnectionError):
            await apart.run_once()
        engine.apply = real
        assert "failed: ValueError" not in heard.text
        await apart.queue.give_back([row.claim_id for row in [await apart.queue.require(run_id)]])
        assert await apart.run_once()
        assert warnings(heard)[-1] == "run mine of agent 'a' failed: ValueError in attempt 1"
        assert sum("failed: ValueError" in each for each in warnings(heard)) == 1
