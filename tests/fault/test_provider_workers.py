"""A provider worker, and the worker of the turn, are killed and started again: the turn gets each answer once."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.registry import Registry
from agent_runtime_core.turns import EventPublisherSubscriber, StepResultChunk, TurnManager
from tests.support.processes import PATIENCE, Command, becomes

PROGRAM = "tests.fault.provider_program"


async def started(stack: ExitStack, *arguments: object) -> Command:
    child = await asyncio.to_thread(lambda: stack.enter_context(Command(PROGRAM, *arguments)))
    await asyncio.to_thread(child.expect, "ready")
    return child


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
