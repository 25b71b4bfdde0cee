"""A streamed agent of OpenAI Agents with a session; for `tests/support/framework_kills.py`."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, function_tool, set_tracing_disabled
from agents.testing import assistant_message, function_call

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.integrations.openai_agents import ConversationSession, run_agent
from tests.support.framework_kills import begin, called, finish
from tests.support.openai_models import FakeModel, results


@function_tool
def double(number: int) -> int:
    called(f"double {number}")
    return 2 * number


def answer(items: list[dict[str, Any]]) -> list[Any]:
    found = results(items)
    called(f"model {len(found)}")
    if len(found) == 2:
        return [assistant_message(f"It is {found[-1]}.")]
    return [function_call("double", {"number": 3 + len(found)}, call_id=f"call_{len(found)}")]


class Streaming(AgentRuntime):
    key = "streaming"

    async def run(self, ctx: RunContext) -> RunResult:
        async def ignore(event: object) -> None:
            """Receive an event."""

        agent = Agent(name="doubler", model=FakeModel(answer), tools=[double])
        session = ConversationSession()
        result = await run_agent(agent, "Double!", on_event=ignore, session=session)
        return RunResult(final_output={"said": result.final_output, "items": await session.get_items()})


async def main() -> None:
    async with AgentRunner.open(begin()) as runner:
        result = await runner.execute(Streaming(), input_data={"conversation_id": "room"}, run_id="killed")
        finish(result.final_output)


if __name__ == "__main__":
    set_tracing_disabled(True)
    asyncio.run(main())
