"""The two sides of a step that a provider worker executes, each a process of its own.

Arguments: "turn" or "provider", the store, and for a provider worker the file that notes what it does, and how often it
is killed: with N it is killed inside the N-th request that it begins.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from agent_runtime_core import AgentRunner, RunnerConfig
from agent_runtime_core.planning import Plan, PlanStep, StepKind
from agent_runtime_core.planning.plan import BasePlanner
from agent_runtime_core.turns import EventPublisherSubscriber, ProviderSteps, StepRequest, StepResultChunk, TurnManager


class TwoCalls(BasePlanner):
    async def create_plan(self, prompt: str, available_tools: object) -> Plan:
        ask = PlanStep(1, "", {"prompt": prompt}, kind=StepKind.LLM_CALL)
        again = PlanStep(2, "", {"prompt": "{{step_1.result}}"}, depends_on=[1], kind=StepKind.LLM_CALL)
        return Plan([ask, again], prompt)


async def turn(store: str) -> None:
    config = RunnerConfig(lease_ttl_seconds=2, heartbeat_interval_seconds=0.5, max_retries=5)
    async with AgentRunner.open(store, config=config) as runner:
        TurnManager(runner, planner=TwoCalls(), provider_steps=ProviderSteps(deadline=60))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await runner.run_loop(0.1)


async def provide(store: str, noted: Path, kill_at: int) -> None:
    async with AgentRunner.open(store) as runner:
        topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        async for envelope in topics.subscribe("agent.steps", consumer="provider"):
            request = envelope.payload
            if isinstance(request, StepRequest):
                with noted.open("a") as file:
                    file.write(f"{request.step_number} {request.attempt}\n")
                about: dict[str, Any] = {"step_number": request.step_number, "attempt": request.attempt}
                ids = {"turn_id": envelope.turn_id, "step_id": envelope.step_id, "trace_id": envelope.trace_id}
                await topics.tell(StepResultChunk(**about, delta="<"), event_id=f"{envelope.event_id}:0", **ids)
                if len(noted.read_text().splitlines()) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = f"<{request.messages[-1]['content']}>"
                for number in range(2):  # it answers twice
                    await topics.tell(
                        StepResultChunk(**about, index=1, final=True, status="completed", result=f"{result}{number}"),
                        event_id=f"{envelope.event_id}:end:{number}",
                        **ids,
                    )
            assert envelope.offset is not None
            await topics.commit("agent.steps", "provider", envelope.offset)


if __name__ == "__main__":
    if sys.argv[1] == "turn":
        asyncio.run(turn(sys.argv[2]))
    else:
        asyncio.run(provide(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
