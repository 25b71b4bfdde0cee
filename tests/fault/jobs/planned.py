"""A plan of thirty steps that use each other's results, in one run: planned.py planned DB RUN_ID EFFECTS PAUSE."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any

from agent_runtime_core import AgentRunner, RunContext, Tool, ToolRegistry
from agent_runtime_core.planning import BasePlanner, Plan, PlanningAgent, PlanStep
from tests.fault.jobs.effects import effect, ready, say
from tests.fault.jobs.graph import AT_ONCE, EDGES

#: What each step waits for, by the names under which they are recorded.
NEEDS = {f"step_{int(name[1:]) + 1}": [f"step_{int(each[1:]) + 1}" for each in needs] for name, needs in EDGES.items()}


class Fixed(BasePlanner):
    """The same plan for every prompt; every third step may have effects elsewhere."""

    async def create_plan(self, prompt: str, available_tools: ToolRegistry | Iterable[Tool]) -> Plan:
        steps = []
        for number, needs in enumerate(NEEDS.values(), 1):
            given = {"place": number, "parts": [f"{{{{{each}.result}}}}" for each in needs]}
            steps.append(PlanStep(number, "write" if number % 3 == 0 else "mix", given))
        return Plan(steps, prompt)


def tools(effects: str, pause: float) -> ToolRegistry:
    registry = ToolRegistry()

    async def mix(ctx: RunContext, place: int, parts: list[int]) -> int:
        """Mix numbers."""
        effect(effects, f"step_{place}", ctx.idempotency_key)
        await asyncio.sleep(pause * (1 + place % 4))
        return (sum(part * 31 for part in parts) + place) % 1_000_003

    registry.register(Tool.from_function(mix))
    registry.register(Tool.from_function(mix, name="write", has_side_effects=True))
    return registry


async def main(db: str, run_id: str, effects: str, pause: float) -> None:
    agent = PlanningAgent("planned", Fixed(), tools(effects, pause), max_concurrency=AT_ONCE)
    async with AgentRunner.open(db) as runner:
        await runner.runs(limit=1)  # so that most of its life is spent on the plan
        ready()
        input_: dict[str, Any] = {"messages": [{"role": "user", "content": "mix"}]}
        result = await runner.execute(agent, run_id, input_, raise_on_error=True)
    say("done " + json.dumps(result.final_output["steps"]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5])))
