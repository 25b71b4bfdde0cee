"""The lifespan of an agent is entered once, before its first run, and left at shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunnerConfig, RunResult, current_run
from agent_runtime_core.interfaces import AgentRuntime as Base
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.worker import Lifespans
from tests.support.runs import Rig


class Connected(AgentRuntime):
    """Notes what happens to it; its runs need what its lifespan opens."""

    key = "connected"

    def __init__(self, key: str = "connected", log: list[str] | None = None, failures: int = 0) -> None:
        self.key = key
        self.log: list[str] = [] if log is None else log
        self.failures = failures
        self.connection: str | None = None
        self.task: asyncio.Task[Any] | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        assert current_run() is None
        self.task = asyncio.current_task()
        self.log.append(f"open {self.key}")
        if self.failures:
            self.failures -= 1
            raise ConnectionError("nobody answers")
        await asyncio.sleep(0)
        self.connection = "open"
        yield
        assert asyncio.current_task() is self.task
        await asyncio.sleep(0)
        self.connection = None
        self.log.append(f"close {self.key}")

    async def run(self, ctx: RunContext) -> RunResult:
        self.log.append(f"run {self.key}")
        return RunResult({"connection": self.connection})


class Plain(Connected):
    def run(self, ctx: Any) -> RunResult:  # type: ignore[override]
        return RunResult({"connection": self.connection})


def registry_of(*agents: AgentRuntime) -> Registry:
    registry = Registry()
    for agent in agents:
        registry.register(agent)
    return registry


async def test_a_worker_enters_it_once_for_all_runs_and_leaves_it_when_its_loop_ends(place: Path | None) -> None:
    agent, idle = Connected(), Connected("idle")
    async with AgentRunner.open(place or "memory://", registry=registry_of(agent, idle)) as runner:
        ids = [await runner.submit(agent, {"n": n}) for n in range(5)]
        working = asyncio.create_task(runner.run_loop(concurrency=3, handle_signals=False))
        results = [await runner.wait(run_id) for run_id in ids]
        assert agent.log.count("open connected") == 1
        assert "close connected" not in agent.log
        runner.stop()
        await working
        assert agent.log == ["open connected", *["run connected"] * 5, "close connected"]
    assert [result.final_output for result in results] == [{"connection": "open"}] * 5
    assert agent.log.count("close connected") == 1
    assert idle.log == []


@pytest.mark.parametrize("kind", [Connected, Plain])
async def test_execute_enters_it_and_closing_the_runner_leaves_it(kind: type[Connected]) -> None:
    agent = kind()
    async with AgentRunner.open("memory://") as runner:
        for _ in range(3):
            result = await runner.execute(agent, raise_on_error=True)
            assert result.final_output == {"connection": "open"}
        assert agent.log.count("open connected") == 1
        assert agent.connection == "open"
    assert agent.connection is None
    assert agent.log.count("close connected") == 1


async def test_it_is_entered_again_after_a_loop_of_the_runner_has_ended() -> None:
    agent = Connected()
    async with AgentRunner.open("memory://", registry=registry_of(agent)) as runner:
        for _ in range(2):
            runner.stop()
            await runner.run_loop(handle_signals=False)
            await runner.execute(agent, raise_on_error=True)
    assert agent.log == ["open connected", "run connected", "close connected"] * 2


async def test_the_end_of_a_loop_leaves_none_that_a_run_uses() -> None:
    held, go = asyncio.Event(), asyncio.Event()

    class Slow(Connected):
        async def run(self, ctx: RunContext) -> RunResult:
            held.set()
            await go.wait()
            return await super().run(ctx)

    agent = Slow()
    async with AgentRunner.open("memory://", registry=registry_of()) as runner:
        running = asyncio.create_task(runner.execute(agent))
        await held.wait()
        runner.stop()
        await runner.run_loop(handle_signals=False)
        assert agent.connection == "open"
        go.set()
        assert (await running).final_output == {"connection": "open"}
    assert agent.log == ["open connected", "run connected", "close connected"]


def test_the_end_of_the_event_loop_leaves_it() -> None:
    agent = Connected()

    async def main() -> None:
        await AgentRunner.open("memory://").execute(agent, raise_on_error=True)

    asyncio.run(main())
    assert agent.log == ["open connected", "run connected", "close connected"]
    asyncio.run(main())
    assert agent.log == ["open connected", "run connected", "close connected"] * 2


async def test_an_error_of_entering_it_fails_the_attempt_and_the_next_one_enters_it_again() -> None:
    agent = Connected(failures=2)
    async with Rig(max_retries=3).runner as runner:
        result = await runner.execute(agent, raise_on_error=True)
    assert result.final_output == {"connection": "open"}
    assert agent.log == [*["open connected"] * 3, "run connected", "close connected"]


async def test_without_a_further_attempt_the_run_fails_with_that_error() -> None:
    async with AgentRunner.open("memory://", config=RunnerConfig(max_retries=1)) as runner:
        result = await runner.execute(Connected(failures=1))
    assert result.error is not None
    assert (result.error.type, result.error.message) == ("ConnectionError", "nobody answers")


async def test_it_must_be_an_async_context_manager() -> None:
    class Generator(Connected):
        async def lifespan(self) -> AsyncIterator[None]:  # type: ignore[override]
            yield

    async with AgentRunner.open("memory://", config=RunnerConfig(max_retries=1)) as runner:
        result = await runner.execute(Generator())
    assert result.error is not None
    assert "lifespan() of agent 'connected' must return an async context manager" in result.error.message
    assert "asynccontextmanager" in result.error.message


async def test_several_are_left_in_reverse_order_in_spite_of_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Connected):
        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[None]:
            yield
            self.log.append("fail broken")
            raise OSError("no end")

    log: list[str] = []
    with caplog.at_level(logging.ERROR, "agent_runtime_core"):
        async with AgentRunner.open("memory://") as runner:
            for agent in (Connected("first", log), Broken("broken", log), Connected("last", log)):
                await runner.execute(agent, raise_on_error=True)
            log.clear()
    assert log == ["close last", "fail broken", "close first"]
    assert [record.message for record in caplog.records] == ["leaving the lifespan of agent 'broken' failed: no end"]


async def test_a_run_that_is_cancelled_while_it_is_entered_leaves_the_others_waiting() -> None:
    opening, go = asyncio.Event(), asyncio.Event()

    class Slow(Connected):
        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[None]:
            opening.set()
            await go.wait()
            async with Connected.lifespan(self):
                yield

    agent = Slow()
    async with AgentRunner.open("memory://") as runner:
        cancelled = asyncio.create_task(runner.execute(agent, "cancelled"))
        other = asyncio.create_task(runner.execute(agent, "other"))
        await opening.wait()
        await runner.cancel("cancelled")
        assert (await cancelled).status == "cancelled"
        go.set()
        assert (await other).final_output == {"connection": "open"}
    assert agent.log == ["open connected", "run connected", "close connected"]


async def test_an_agent_that_is_registered_again_has_its_own() -> None:
    log: list[str] = []
    registry = registry_of(Connected(log=log))
    async with AgentRunner.open("memory://", registry=registry) as runner:
        await runner.execute("connected", raise_on_error=True)
        registry.register(Connected(log=log))
        await runner.execute("connected", raise_on_error=True)
        assert log == ["open connected", "run connected"] * 2
    assert log[4:] == ["close connected"] * 2


async def test_one_that_does_not_end_is_cancelled_after_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    class Endless(Connected):
        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[None]:
            yield
            try:
                await asyncio.Event().wait()
            finally:
                self.log.append("cancelled")

    agent, lifespans = Endless(), Lifespans(lambda: 0)
    assert await lifespans.enter(agent) is not None
    await lifespans.leave()
    assert agent.log == ["cancelled"]
    assert "the lifespan of agent 'connected' is not left after 0 s: cancelled" in caplog.text


async def test_an_agent_has_none_by_default() -> None:
    class Small(AgentRuntime):
        key = "small"

        async def run(self, ctx: RunContext) -> RunResult:
            return RunResult()

    assert await Lifespans(lambda: 0).enter(Small()) is None
    async with Base.lifespan(Small()) as value:
        assert value is None
