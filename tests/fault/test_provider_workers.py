"""A provider worker, and the worker of the turn, are killed and started again: the turn gets each answer once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.registry import Registry
from agent_runtime_core.turns import EventPublisherSubscriber, StepRequest, StepResultChunk, TurnManager
from tests.fault.deadline_program import SharedClock, manager_of, noted
from tests.support.backends import SERVERS, backends
from tests.support.fault_runs import store
from tests.support.processes import PATIENCE, Command, becomes

PROGRAM = "tests.fault.provider_program"
DEADLINES = "tests.fault.deadline_program"
#: When the killed processes are started again, in seconds after the deadline of the request.
MOMENTS = {"before": -500.0, "at": 0.0, "after": 500.0}


async def started(stack: ExitStack, *arguments: object, program: str = PROGRAM) -> Command:
    child = await asyncio.to_thread(lambda: stack.enter_context(Command(program, *arguments)))
    await asyncio.to_thread(child.expect, "ready")
    return child


@pytest.mark.sentence("001", "Lifecycle flow: StepEvent to the Provider Worker, StepResultChunk back, WebSocket delta")
@pytest.mark.parametrize("killed", ["provider", "turn", "both"])
async def test_each_step_is_answered_once(tmp_path: Path, killed: str) -> None:
    db, noted = tmp_path / "turns.db", tmp_path / "noted"
    noted.touch()
    with ExitStack() as stack:
        async with AgentRunner.open(db, registry=Registry()) as runner:
            manager = TurnManager(runner)
            await manager.start_turn({"text": "hello", "turn_id": "t"})
            worker = await started(stack, "turn", db)
            dies = killed in ("provider", "both")
            provider = await started(stack, "provider", db, noted, 1 if dies else 0)
            if killed in ("turn", "both"):

                async def asked() -> bool:
                    return bool(noted.read_text())

                await becomes(asked, "a step is requested")
                worker.kill()
                await started(stack, "turn", db)
            if dies:
                assert await provider.aended() == -signal.SIGKILL
                await started(stack, "provider", db, noted, 0)
            turn = await manager.wait("t", timeout=PATIENCE)
            assert turn.status is RunStatus.SUCCEEDED
            assert [step.result for step in turn.steps] == ["<hello>0", "<<hello>0>0"]
            topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
            final = [
                (each.payload.step_number, each.payload.result)
                async for each in topics.subscribe("agent.step_results", 0, follow=False)
                if isinstance(each.payload, StepResultChunk) and each.payload.final
            ]
            assert {number for number, _ in final} == {1, 2}
            requested = [line.split()[0] for line in noted.read_text().splitlines()]
            assert requested == (["1", "1", "2"] if dies else ["1", "2"])


@pytest.mark.sentence("001", "Lifecycle flow: StepEvent to the Provider Worker, StepResultChunk back, WebSocket delta")
@pytest.mark.parametrize("kind", backends(["sqlite", "redis", "postgres"], default=["sqlite"]))
@pytest.mark.parametrize("moment", ["before", pytest.param("at", marks=pytest.mark.slow), "after"])
@pytest.mark.parametrize(
    ("killed", "at_its"),
    [("turn", "last"), ("provider", "first"), ("provider", "last"), ("both", "first"), ("both", "last")],
)
async def test_a_tool_runs_once_whoever_is_killed_and_whenever_it_returns(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, moment: str, killed: str, at_its: str
) -> None:
    """`at_its` says when the provider worker is killed: before it executes the request, or after its answer."""
    url = request.getfixturevalue(f"{kind}_url") if kind in SERVERS else "-"
    clock = SharedClock(tmp_path)
    clock.set_ahead(0)
    (tmp_path / "noted").touch()
    where = (kind, tmp_path, url)
    async with store(kind, tmp_path, clock) as place:
        manager = manager_of(place, tmp_path)
        topics = manager.topics
        with ExitStack() as stack:
            worker = await started(stack, "turn", *where, program=DEADLINES)
            await manager.start_turn({"text": "charge", "turn_id": "t"})
            asked = [await _first(topics.subscribe("agent.steps", 0), StepRequest)]
            if killed != "provider":
                worker.kill()
            dies = "never" if killed == "turn" else at_its
            provider = await started(stack, "provider", *where, dies, program=DEADLINES)
            if at_its == "last":
                await _first(topics.subscribe("agent.step_results", 0), StepResultChunk)
            if killed != "turn":
                assert await provider.aended() == -signal.SIGKILL
            clock.set_ahead(asked[0].deadline - time.time() + MOMENTS[moment], leases_end=killed != "provider")
            if killed != "turn":
                await started(stack, "provider", *where, "never", program=DEADLINES)
            if killed != "provider":
                await started(stack, "turn", *where, program=DEADLINES)
            turn = await manager.wait("t", timeout=PATIENCE)
        expected = "provider" if at_its == "last" or moment == "before" else "here"
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, expected)
        assert noted(tmp_path) == [expected]
        asked = [each.payload async for each in topics.subscribe("agent.steps", 0, follow=False)
                 if isinstance(each.payload, StepRequest)]  # fmt: skip
        assert [each.attempt for each in asked] == [1]


async def _first(events: Any, kind: type[Any]) -> Any:
    """The first payload of that kind."""
    async with asyncio.timeout(PATIENCE), contextlib.aclosing(events):
        async for each in events:
            if isinstance(each.payload, kind):
                return each.payload
    raise AssertionError("a topic has no end")
