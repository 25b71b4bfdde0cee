"""Agents that have a say at the end of their runs: whoever ends one, what they say is there once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.interfaces import RunResult, TraceSink
from agent_runtime_core.persistence import PersistenceManager
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.runner.completion_hooks import CompletionHook
from agent_runtime_core.runner.settings import RunInfo
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from tests.support.runs import Body, Hurried, Rig, Script, interrupted, until

LOG = UUID(int=7)


class Last(Script, CompletionHook):
    """Tells a log of its own how its runs ended."""

    def __init__(self, runner: AgentRunner, body: Body, failing: bool = False) -> None:
        super().__init__(body)
        self.bus, self.failing = runner.event_bus, failing
        self.heard: list[str] = []

    async def operations(self, info: RunInfo, result: RunResult) -> Sequence[Op]:
        assert result.status is not None
        if self.failing:
            raise RuntimeError("no words")
        return [self.bus.publishing(LOG, [(f"end:{info.run_id}:{info.generation}", result.status.value, {})])]

    async def on_end(self, info: RunInfo, result: RunResult) -> None:
        assert result.status is not None
        self.heard.append(result.status.value)
        if self.failing:
            raise RuntimeError("no ears")

    async def told(self) -> list[str]:
        return [event.event_type for event in await self.bus.get_events(LOG)]


async def well(ctx: Any) -> int:
    return 1


async def badly(ctx: Any) -> int:
    raise ValueError("no")


async def never(ctx: Any) -> None:
    await ctx.wait_for_signal("go")


def last(rig: Rig, body: Body, **options: Any) -> Last:
    agent = Last(rig.runner, body, **options)
    rig.registry.register(agent)
    return agent


@pytest.mark.parametrize(("body", "status"), [(well, "succeeded"), (badly, "failed")])
async def test_an_end_by_a_claim_is_told_with_it(body: Body, status: str, place: Path | None) -> None:
    async with Rig(place) as rig:
        agent = last(rig, body)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).status == status
        assert (agent.heard, await agent.told()) == ([status], [status])


async def test_an_end_that_no_code_of_the_run_saw_is_told(place: Path | None) -> None:
    async with Rig(place) as rig:
        agent = last(rig, well)
        await rig.runner.submit("script", run_id="late", expires_in=5)
        rig.clock.advance(10)  # type: ignore[attr-defined]
        assert await rig.runner.run_once()
        assert (agent.heard, await agent.told()) == (["timed_out"], ["timed_out"])


async def test_a_run_that_is_cancelled_under_no_claim_is_told(place: Path | None) -> None:
    async with Rig(place, park_after=0) as rig:
        agent = last(rig, never)
        await rig.runner.submit("script", run_id="pending")
        assert await rig.runner.cancel("pending")
        await rig.runner.submit("script", run_id="parked")
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("parked")).status is RunStatus.WAITING
        assert await rig.runner.cancel("parked")
        assert not await rig.runner.cancel("parked")
        assert (agent.heard, await agent.told()) == (["cancelled"] * 2, ["cancelled"] * 2)


async def test_each_generation_has_an_end_of_its_own(place: Path | None) -> None:
    async with Rig(place) as rig:
        agent = last(rig, badly)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        agent.body = well
        await rig.runner.resume("r")
        assert await rig.runner.run_once()
        assert await agent.told() == ["failed", "succeeded"]


async def test_what_fails_there_keeps_no_run_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig() as rig:
        agent = last(rig, well, failing=True)
        for run_id in ("done", "gone"):
            await rig.runner.submit("script", run_id=run_id)
        assert await rig.runner.cancel("gone")
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("done")).status is RunStatus.SUCCEEDED
        assert (await rig.runner.get_run("gone")).status is RunStatus.CANCELLED
        assert (agent.heard, await agent.told()) == (["cancelled", "succeeded"], [])
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 4


async def test_a_worker_that_is_gone_between_the_hook_and_the_end_leaves_nothing_told(place: Path | None) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()
    async with Rig(place) as rig:
        agent = last(rig, well)

        async def slow(info: RunInfo, result: RunResult) -> None:
            inside.set()
            await go_on.wait()

        agent.on_end = slow  # type: ignore[method-assign]
        await rig.runner.submit("script", run_id="r")
        running = asyncio.ensure_future(rig.runner.run_once())
        await until(inside)
        running.cancel()
        await asyncio.wait({running})
        assert await agent.told() == []
        go_on.set()
        assert await rig.another().run_once()
        assert await agent.told() == ["succeeded"]


def apart(shape: str, **options: Any) -> tuple[AgentRunner, Rig]:
    """A runner on several engines, by letter: that of queue, bus and state."""
    clock = Hurried()
    rig = Rig(clock=clock)
    engines = {letter: MemoryEngine(clock) for letter in shape}
    queue, bus, state = (engines[letter] for letter in shape)
    rig.runner = AgentRunner(
        InMemoryQueue(engine=queue), InMemoryEventBus(engine=bus), InMemoryStateStore(engine=state),
        RunnerConfig(park_after=0), registry=rig.registry, **options,
    )  # fmt: skip
    return rig.runner, rig


@pytest.mark.parametrize("shape", ["aab", "aba", "abb", "abc"])
async def test_on_engines_apart_a_cancel_that_got_half_way_is_made_whole_and_told_once(shape: str) -> None:
    runner, rig = apart(shape)
    async with rig:
        agent = last(rig, never)
        other = runner.event_bus if shape == "aba" else runner.state_store
        engine, away = other.commits, True
        commit = engine.commit

        async def unsure(guard: Any, ops: Sequence[Op]) -> list[Any]:
            if away:
                raise StorageBusy("no answer")
            return await commit(guard, ops)

        await runner.submit("script", run_id="r")
        engine.commit = unsure  # type: ignore[method-assign]
        with pytest.raises(StorageBusy):
            await runner.cancel("r")
        assert await agent.told() == []
        away = False
        for _ in range(2):
            assert not await runner.cancel("r")
        assert await agent.told() == ["cancelled"]
        assert [each.event_type for each in await runner.event_bus.get_events("r")] == ["run.cancelled"]


@pytest.mark.parametrize("shape", ["aab", "aba", "abb", "abc"])
async def test_on_engines_apart_an_end_that_the_queue_did_not_hear_of_is_told_once(shape: str) -> None:
    runner, rig = apart(shape)
    async with rig:
        agent = last(rig, well)
        engine, away, refused = runner.queue.commits, False, list[Any]()
        commit = engine.commit

        async def unsure(guard: Any, ops: Sequence[Op]) -> list[Any]:
            if away and any(op.name == "queue.settle" for op in ops):
                refused.append(ops)
                raise StorageBusy("no answer")
            return await commit(guard, ops)

        engine.commit = unsure  # type: ignore[method-assign]
        await runner.submit("script", run_id="r")
        away = True
        await interrupted(runner, refused)
        away = False
        rig.clock.advance(1000)  # type: ignore[attr-defined]
        assert await runner.run_once()
        assert (await runner.wait("r")).status is RunStatus.SUCCEEDED
        assert await agent.told() == ["succeeded"]


class Sink(TraceSink):
    """Hears how runs ended."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def end_run(self, run_id: UUID, outcome: str, metadata: dict[str, Any] | None = None) -> None:
        self.heard.append((outcome, (metadata or {}).get("output")))


@pytest.mark.parametrize("shape", ["aab", "aba", "abb", "abc"])
async def test_the_claim_that_closes_a_run_tells_the_trail_and_the_traces_of_its_result(shape: str) -> None:
    sink, stores = Sink(), PersistenceManager.open("memory://")
    runner, rig = apart(shape, trace_sinks=[sink], persistence=stores)
    async with rig:
        rig.register(well)
        engine, away, refused = runner.queue.commits, True, list[Any]()
        commit = engine.commit

        async def unsure(guard: Any, ops: Sequence[Op]) -> list[Any]:
            if away and any(op.name == "queue.settle" for op in ops):
                refused.append(ops)
                raise StorageBusy("no answer")
            return await commit(guard, ops)

        engine.commit = unsure  # type: ignore[method-assign]
        await runner.submit("script", run_id="r")
        await interrupted(runner, refused)
        away = False
        rig.clock.advance(1000)  # type: ignore[attr-defined]
        assert await runner.run_once()
        assert (await runner.wait("r")).final_output == {"value": 1}
        await runner.close()
        assert sink.heard == [("given back", None), ("succeeded", {"value": 1})]
        assert stores.audit is not None
        entries = await stores.audit.get_events()
        assert {each.action for each in entries} == {"agent 'script' started", "agent 'script' succeeded"}
        figures = {each.name: each.tags for each in await stores.audit.get_metrics("run_duration_ms")}
        assert figures == {"run_duration_ms": {"status": "succeeded"}}
        await stores.close()
