"""An agent of Pydantic AI with three model turns and three tools, in one run. Usage: see framework_kills.py."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.integrations.pydantic_ai import Durable
from tests.support.framework_kills import begin, called, finish


class Price(BaseModel):
    item: str
    cents: int


def turn_of(messages: list[ModelMessage]) -> int:
    return sum(isinstance(message, ModelResponse) for message in messages) + 1


def answers(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    turn = turn_of(messages)
    called(f"model {turn}")
    usage = RequestUsage(input_tokens=10, output_tokens=turn)
    if turn == 1:
        parts: list[Any] = [
            ToolCallPart("price", {"item": "tea"}, tool_call_id="call-1"),
            ToolCallPart("price", {"item": "milk"}, tool_call_id="call-2"),
        ]
    elif turn == 2:
        parts = [ToolCallPart("order", {"item": "tea", "count": 2}, tool_call_id="call-3")]
    else:
        returned = [
            part.model_response_str()
            for message in messages
            for part in message.parts
            if isinstance(part, ToolReturnPart)
        ]
        parts = [TextPart(" ".join(returned))]
    return ModelResponse(parts, usage=usage, model_name="scripted")


agent = Agent(FunctionModel(answers, model_name="scripted"), name="shop", capabilities=[Durable()])


@agent.tool_plain(sequential=True)
def price(item: str) -> Price:
    called(f"price {item}")
    return Price(item=item, cents=len(item) * 100)


@agent.tool_plain
async def order(item: str, count: int) -> str:
    called(f"order {count} {item}")
    return f"ordered {count} {item}"


class Shop(AgentRuntime):
    key = "shop"

    async def run(self, ctx: RunContext) -> RunResult:
        result = await agent.run("Order tea.")
        return RunResult({"text": result.output, "tokens": result.usage.total_tokens})


class PlainShop(AgentRuntime):
    key = "plain-shop"

    def run(self, ctx: Any) -> RunResult:
        result = agent.run_sync("Order tea.")
        return RunResult({"text": result.output, "tokens": result.usage.total_tokens})


async def main(shop: AgentRuntime) -> None:
    async with AgentRunner.open(begin()) as runner:
        result = await runner.execute(shop, "shop-1", raise_on_error=True)
    finish(result.final_output)


if __name__ == "__main__":
    asyncio.run(main(Shop()))
