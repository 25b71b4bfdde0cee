"""Three calls of a run that are no steps: what `check_kills` must refuse. Usage: see framework_kills.py."""

from __future__ import annotations

import asyncio

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from tests.integrations.plain_program import work
from tests.support.framework_kills import begin, finish


class Forgetful(AgentRuntime):
    key = "forgetful-calls"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult({"sum": sum(work(number) for number in range(3))})


async def main() -> None:
    async with AgentRunner.open(begin()) as runner:
        result = await runner.execute(Forgetful(), "forgetful-1", raise_on_error=True)
    finish(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
