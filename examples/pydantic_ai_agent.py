"""An agent of Pydantic AI that survives kill -9.

    python examples/pydantic_ai_agent.py [--slow 1] [--model openai:gpt-5.4-nano] [--db pydantic_ai.db] [--yes]

Without --model, a script answers instead of a model, and no key is needed. Kill it and start it again: calls of the
model and of the tools that have a saved result are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.integrations.pydantic_ai import Durable

TASK = "Buy apples and pears if they cost less than 5 together."
PRICES = {"apples": 2, "pears": 1}


class Receipt(BaseModel):
    """What was bought, and for how much."""

    fruits: list[str]
    total: int


def scripted(slow: float) -> FunctionModel:
    """Return a model that looks up both prices, buys, and says what it did."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        await asyncio.sleep(slow)
        results = sum(isinstance(part, ToolReturnPart) for message in messages for part in message.parts)
        print(f"model call with {results} results")
        if results == 0:
            return ModelResponse([ToolCallPart("price", {"fruit": fruit}, tool_call_id=fruit) for fruit in PRICES])
        if results == 2:
            return ModelResponse([ToolCallPart("buy", {"fruits": list(PRICES)}, tool_call_id="buy")])
        receipt = {"fruits": list(PRICES), "total": sum(PRICES.values())}
        return ModelResponse([ToolCallPart(info.output_tools[0].name, receipt)])

    return FunctionModel(answer)


class Shopper(AgentRuntime):
    """Buys fruits, and asks a person before."""

    key = "pydantic-ai-shopper"

    def __init__(self, model: str | None, slow: float) -> None:
        self.agent = Agent(model or scripted(slow), name="shopper", output_type=Receipt, capabilities=[Durable()])

        @self.agent.tool_plain(sequential=True)
        async def price(fruit: str) -> int:
            """Return the price of a fruit."""
            await asyncio.sleep(slow)
            print(f"  price({fruit!r})")
            return PRICES.get(fruit, 99)

        @self.agent.tool_plain(requires_approval=True)
        async def buy(fruits: list[str]) -> str:
            """Buy fruits."""
            await asyncio.sleep(slow)
            print(f"  buy({fruits!r})")
            return f"bought {' and '.join(fruits)}"

    async def run(self, ctx: RunContext) -> RunResult:
        result = await self.agent.run(TASK)
        return RunResult(result.output.model_dump())


async def answer_questions(runner: AgentRunner, yes: bool) -> None:
    """Ask on the terminal whatever a run asks."""
    while True:
        for question in await runner.approvals():
            details: Any = question.details
            call = f"{details['tool_name']}({json.dumps(details['tool_args'])})"
            answer = yes or await asyncio.to_thread(input, f"may it call {call}? [y/N] ") == "y"
            await runner.approve(question.run_id, question.name, answer, request_id=question.request_id)
        await asyncio.sleep(0.05)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--db", default="pydantic_ai.db")
    parser.add_argument("--run-id", default="shopping-1")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each call takes")
    parser.add_argument("--yes", action="store_true", help="approve each call")
    args = parser.parse_args()
    async with AgentRunner.open(args.db) as runner:
        answering = asyncio.create_task(answer_questions(runner, args.yes))
        result = await runner.execute(Shopper(args.model, args.slow), args.run_id, raise_on_error=True)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    print("receipt:", json.dumps(result.final_output))


if __name__ == "__main__":
    asyncio.run(main())
