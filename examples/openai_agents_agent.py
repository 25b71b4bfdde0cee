"""An agent of the OpenAI Agents SDK that survives kill -9.

    python examples/openai_agents_agent.py [--slow 1] [--model gpt-5.4-nano] [--db openai_agents.db]

Without --model, a script answers instead of a model, and no key is needed. Kill it and start it again: the model is
not asked again, no order is placed twice, and the question to you is asked once more only if you have not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from agents import Agent, function_tool, set_tracing_disabled
from agents.items import ModelResponse
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call
from agents.usage import Usage

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunLimits, RunnerConfig, RunResult
from agent_runtime_core.integrations.openai_agents import run_agent

TASK = "Buy apples and pears if they cost less than 5 together."
PRICES = {"apples": 2, "pears": 1}


def scripted(slow: float) -> ScriptedModel:
    """Return a model that looks up both prices, buys, and says what it did."""

    async def answer(call: ModelCall) -> ModelResponse:
        await asyncio.sleep(slow)
        outputs = [item["output"] for item in call.input if item.get("type") == "function_call_output"]
        print(f"model call with {len(outputs)} results")
        output: list[Any] = [function_call("price", {"fruit": fruit}, call_id=fruit) for fruit in PRICES]
        if len(outputs) == 2:
            output = [function_call("buy", {"fruits": list(PRICES)}, call_id="buy")]
        elif len(outputs) == 3:
            output = [assistant_message(f"Done: {outputs[-1]}.")]
        return ModelResponse(
            output=output, usage=Usage(requests=1, input_tokens=90, output_tokens=10), response_id=None
        )

    return ScriptedModel([ModelStep.respond(answer) for _ in range(3)])


class Shopper(AgentRuntime):
    """Buys fruits, and asks a person before."""

    key = "shopper"

    def __init__(self, model: str | None, slow: float) -> None:
        self.model = model or scripted(slow)
        self.slow = slow

    async def run(self, ctx: RunContext) -> RunResult:
        @function_tool
        async def price(fruit: str) -> int:
            """Return the price of a fruit."""
            await asyncio.sleep(self.slow)
            print(f"  price({fruit!r})")
            return PRICES.get(fruit, 99)

        @function_tool(needs_approval=True)
        async def buy(fruits: list[str]) -> str:
            """Buy fruits."""
            await asyncio.sleep(self.slow)
            print(f"  buy({fruits!r})")
            return f"bought {' and '.join(fruits)}"

        agent = Agent(name="Shopper", instructions="Be brief.", model=self.model, tools=[price, buy])
        result = await run_agent(agent, TASK)
        return RunResult(final_output={"response": result.final_output})


async def answer_questions(runner: AgentRunner, yes: bool) -> None:
    """Ask on the terminal whatever a run asks."""
    while True:
        for question in await runner.approvals():
            call = f"{question.details['tool_name']}({json.dumps(question.details['tool_args'])})"
            answer = yes or await asyncio.to_thread(input, f"may it call {call}? [y/N] ") == "y"
            await runner.approve(question.run_id, question.name, answer, request_id=question.request_id)
        await asyncio.sleep(0.05)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--db", default="openai_agents.db")
    parser.add_argument("--run-id", default="shopping-1")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each call takes")
    parser.add_argument("--yes", action="store_true", help="answer all questions with yes")
    args = parser.parse_args()
    if args.model is None:
        set_tracing_disabled(True)
    config = RunnerConfig(limits=RunLimits(max_turns=10, max_tokens=20_000))
    async with AgentRunner.open(args.db, config=config) as runner:
        questions = asyncio.create_task(answer_questions(runner, args.yes))
        result = await runner.execute(Shopper(args.model, args.slow), run_id=args.run_id)
        questions.cancel()
    print(result.final_output.get("response") or result.error)


if __name__ == "__main__":
    asyncio.run(main())
