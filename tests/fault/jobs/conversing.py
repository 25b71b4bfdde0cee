"""A 12-turn tool agent over a model server: conversing.py DB RUN_ID BASE_URL EFFECTS.

Says "ready" when it is about to begin, then "done" and the result.
"""

from __future__ import annotations

import asyncio
import json
import sys

from agent_runtime_core import AgentRunner, RunContext, RunnerConfig, ToolCallingAgent, ToolRegistry, tool
from agent_runtime_core.llm import OpenAIClient
from tests.fault.jobs.effects import effect, say

TURNS = 12
PATH: list[str] = []


@tool(has_side_effects=True)
def note(number: int, ctx: RunContext) -> str:
    """Write a number down."""
    effect(PATH[0], number, ctx.idempotency_key)
    return f"noted {number}"


class Converses(ToolCallingAgent):
    key = "converses"
    system_prompt = "You note numbers."
    max_iterations = TURNS + 5
    tools = ToolRegistry()
    tools.register(note)

    def __init__(self, base_url: str) -> None:
        self.client = OpenAIClient("sk-test", "gpt-4o", base_url=base_url)

    def get_llm_client(self) -> OpenAIClient:
        return self.client


async def main(db: str, run_id: str, base_url: str, effects: str) -> None:
    PATH[:] = [effects]
    agent = Converses(base_url)  # imports the SDK, which takes longer than the conversation
    async with AgentRunner.open(db, config=RunnerConfig(max_retries=1)) as runner:
        say("ready")
        asked = {"messages": [{"role": "user", "content": "Note the numbers"}]}
        result = await runner.execute(agent, run_id, asked)
        status = None if result.status is None else result.status.value
        told = {"output": result.final_output, "messages": result.final_messages, "status": status}
        say("done " + json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
