"""Three calls as steps of a run, without a framework: what `check_kills` must accept. Usage: see framework_kills.py."""

from __future__ import annotations

import asyncio

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from tests.support.framework_kills import begin, called, finish


def work(number: int) -> int:
    called(f"call {number}")
    return number * number


class Recorded(AgentRuntime):
    key = "recorded-calls"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult({"sum": sum([await ctx.step("work", work, number) for number in range(3)])})


async def main() -> None:
    async with AgentRunner.open(begin()) as runner:
        result = await runner.execute(Recorded(), "plain-1", raise_on_error=True)
    finish(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
