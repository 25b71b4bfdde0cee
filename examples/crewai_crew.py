"""A crew of CrewAI that survives kill -9.

    pip install . "crewai>=1.15,<2"
    python examples/crewai_crew.py [--slow 1] [--model gpt-5.4-nano] [--db crewai.db]

Without --model, a script answers instead of a model, and no key is needed. Kill it and start it again: no recorded
model call is made again, and no recorded tool call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")

from crewai import LLM, Agent, BaseLLM, Crew, Task  # pyright: ignore[reportMissingImports]
from crewai.tools import tool  # pyright: ignore[reportMissingImports]
from pydantic import PrivateAttr

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    LimitExceeded,
    RunContext,
    RunLimits,
    RunnerConfig,
    RunResult,
    current_run,
)
from agent_runtime_core.portal import from_thread

TASK = "Say how much apples and pears cost together."
PRICES = {"apples": 2, "pears": 1}


class Scripted(BaseLLM):
    """A model that looks up both prices, and says their sum."""

    slow: float = 0

    def call(self, messages: Any, *_: Any, **__: Any) -> str:
        time.sleep(self.slow)
        said = "\n".join(str(message["content"]) for message in messages if message["role"] == "assistant")
        missing = [fruit for fruit in PRICES if f'"{fruit}"' not in said]
        print(f"model call with {len(PRICES) - len(missing)} results", flush=True)
        if missing:
            arguments = json.dumps({"fruit": missing[0]})
            return f"Thought: I need a price.\nAction: price\nAction Input: {arguments}"
        return f"Thought: I know both prices.\nFinal Answer: Together they cost {sum(PRICES.values())}."

    def supports_function_calling(self) -> bool:
        return False


class DurableLLM(BaseLLM):
    """Makes each call of another model a step of the run, which counts against the limits of the run."""

    _inner: BaseLLM = PrivateAttr()

    def __init__(self, inner: BaseLLM) -> None:
        super().__init__(model=inner.model)
        self._inner = inner

    def call(
        self,
        messages: Any,
        tools: Any = None,
        callbacks: Any = None,
        available_functions: Any = None,
        from_task: Any = None,
        from_agent: Any = None,
        response_model: Any = None,
    ) -> Any:
        """Return the recorded answer, or ask the model."""
        ctx = current_run()
        assert ctx is not None, "a crew with a DurableLLM runs inside a run"
        ctx.check_limits()

        def ask() -> Any:
            before = self._inner.get_token_usage_summary()
            # Without `available_functions`, the model returns its tool calls, and CrewAI executes them: each is then
            # a step next to this one, and not a part of it.
            answer = self._inner.call(messages, tools, callbacks, None, from_task, from_agent, response_model)
            after = self._inner.get_token_usage_summary()
            with suppress(LimitExceeded):  # this answer is paid and kept; the next call is not made
                ctx.charge(
                    model=self.model,
                    input_tokens=after.prompt_tokens - before.prompt_tokens,
                    output_tokens=after.completion_tokens - before.completion_tokens,
                )
            return answer

        return from_thread(ctx.step, "model", ask)

    def supports_function_calling(self) -> bool:
        """Return what the other model supports: CrewAI then sends tools in that form."""
        return self._inner.supports_function_calling()


def durable(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Return the recorded result of a tool, or call it."""
    ctx = current_run()
    assert ctx is not None, "a durable tool is called inside a run"
    return from_thread(ctx.step, name, fn, *args)


class Buyer(AgentRuntime):
    """Has a crew of one agent answer the task."""

    key = "buyer"

    def __init__(self, model: str | None, slow: float) -> None:
        self.model = LLM(model=model) if model else Scripted(model="script", slow=slow)
        self.slow = slow

    async def run(self, ctx: RunContext) -> RunResult:
        def find_price(fruit: str) -> int:
            time.sleep(self.slow)
            print(f"  price({fruit!r})", flush=True)
            return PRICES.get(fruit, 99)

        @tool("price")
        def price(fruit: str) -> int:
            """Return the price of a fruit."""
            found: int = durable("price", find_price, fruit)
            return found

        buyer = Agent(
            role="Buyer", goal="Know prices", backstory="Buys fruits.", llm=DurableLLM(self.model), tools=[price],
            cache=False,
        )  # fmt: skip
        task = Task(description=ctx.params["task"], expected_output="One sentence.", agent=buyer)
        output = await asyncio.to_thread(Crew(agents=[buyer], tasks=[task]).kickoff)
        return RunResult(final_output={"answer": output.raw})


async def main() -> None:
    """Start or resume the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--db", default="crewai.db", help="SQLite file of the run")
    parser.add_argument("--run-id", default="buyer-1")
    parser.add_argument("--model", help="a model, by its name in CrewAI; without it, a script answers")
    parser.add_argument("--max-turns", type=int, default=20, help="model calls of the run, at most")
    parser.add_argument("--slow", type=float, default=0, metavar="SECONDS", help="length of every call")
    args = parser.parse_args()
    config = RunnerConfig(limits=RunLimits(max_turns=args.max_turns))
    async with AgentRunner.open(args.db, config=config) as runner:
        agent = Buyer(args.model, args.slow)
        result = await runner.execute(agent, args.run_id, params={"task": args.task}, raise_on_error=True)
    print(result.final_output["answer"])
    print(f"({result.usage.get('turns', 0)} model calls)")


if __name__ == "__main__":
    asyncio.run(main())
