"""Twelve to-dos added and some of them deleted by a plan, in one run: todos.py todos DB RUN_ID EFFECTS PAUSE."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable

from agent_runtime_core import AgentRunner, Tool, ToolRegistry
from agent_runtime_core.planning import BasePlanner, Plan, PlanningAgent, PlanStep
from agent_runtime_core.tools import TodoStoreTool, ToolResult
from agent_runtime_core.tools.todo import RunContext
from tests.fault.jobs.effects import ready, say

TODOS = 12


class Busy(BasePlanner):
    """Adds to-dos, deletes every third, and lists what is left."""

    async def create_plan(self, prompt: str, available_tools: ToolRegistry | Iterable[Tool]) -> Plan:
        steps = [
            PlanStep(number, "todo_store", {"action": "add", "text": f"to-do {number:02}"})
            for number in range(1, TODOS + 1)
        ]
        for place in range(3, TODOS + 1, 3):
            gone = {"action": "delete", "todo_id": f"{{{{step_{place}.result.id}}}}"}
            steps.append(PlanStep(len(steps) + 1, "todo_store", gone))
        before = [step.step_number for step in steps]
        return Plan([*steps, PlanStep(len(steps) + 1, "todo_store", {"action": "list"}, depends_on=before)], prompt)


class Lingering(TodoStoreTool):
    """Its effect is there for a while before it is recorded: time to be killed in."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause

    async def execute(
        self, action: str, todo_id: str | None = None, text: str | None = None, ctx: RunContext | None = None
    ) -> ToolResult:
        result = await super().execute(action, todo_id, text, ctx)
        await asyncio.sleep(self.pause)
        return result


async def main(db: str, run_id: str, pause: float) -> None:
    tools = ToolRegistry()
    tools.register(Lingering(pause))
    agent = PlanningAgent("todos", Busy(), tools, max_concurrency=4)
    async with AgentRunner.open(db) as runner:
        stores = runner.persistence
        await asyncio.gather(runner.runs(limit=1), stores.memory.list_keys(), stores.tasks.ready())  # all is loaded
        ready()
        input_ = {"messages": [{"role": "user", "content": "be busy"}]}
        result = await runner.execute(agent, run_id, input_, raise_on_error=True)
    left = result.final_output["result"]
    assert len({each["number"] for each in left}) == len(left)
    say("done " + json.dumps(sorted(each["text"] for each in left)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[2], sys.argv[3], float(sys.argv[5])))
