"""Agents of OpenAI Agents with tools, an agent as a tool and a handoff; for `tests/support/framework_kills.py`."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, function_tool, set_tracing_disabled
from agents.testing import assistant_message, function_call

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.integrations.openai_agents import durable, run_agent
from tests.support.framework_kills import begin, called, finish
from tests.support.openai_models import FakeModel, results


@function_tool
async def add(a: int, b: int) -> int:
    called(f"add {a} {b}")
    return a + b


def first(items: list[dict[str, Any]]) -> list[Any]:
    found = results(items)
    called(f"first {len(found)}")
    calls: list[tuple[str, dict[str, Any]]] = [
        ("add", {"a": 1, "b": 2}),
        ("ask_helper", {"input": "Add 10 and 20."}),
        ("transfer_to_last", {}),
    ]
    name, arguments = calls[len(found)]
    return [function_call(name, arguments, call_id=f"call_{len(found)}")]


def helping(items: list[dict[str, Any]]) -> list[Any]:
    found = results(items)
    called(f"helper {len(found)}")
    # The id of the call is that of a call of the other agent.
    return [assistant_message(found[0])] if found else [function_call("add", {"a": 10, "b": 20}, call_id="call_0")]


def last(items: list[dict[str, Any]]) -> list[Any]:
    called("last")
    return [assistant_message(" ".join(map(str, results(items))))]


class Computing(AgentRuntime):
    key = "computing"

    async def run(self, ctx: RunContext) -> RunResult:
        on_in_doubt = {"add": "fail"} if ctx.params.get("guarded") else "retry"
        helper = Agent(name="helper", model=FakeModel(helping), tools=[add])
        agent = Agent(
            name="first",
            model=FakeModel(first),
            tools=[add, helper.as_tool("ask_helper", "Helps.")],
            handoffs=[Agent(name="last", model=FakeModel(last))],
        )
        result = await run_agent(durable(agent, on_in_doubt=on_in_doubt), "Compute!")
        return RunResult(final_output={"said": result.final_output, "items": result.to_input_list()})


async def main() -> None:
    store = begin()
    input_data = {"params": {"guarded": "guarded" in store}}
    async with AgentRunner.open(store) as runner:
        result = await runner.execute(Computing(), input_data=input_data, run_id="killed")
        finish(result.final_output if result.error is None else result.error.type)


if __name__ == "__main__":
    set_tracing_disabled(True)
    asyncio.run(main())
