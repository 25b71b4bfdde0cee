"""A job of twenty steps of an agent with a plain `run`: plain.py plain DB RUN_ID EFFECTS PAUSE."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunnerConfig, RunResult, SyncRunContext
from agent_runtime_core.portal import call
from tests.fault.jobs.effects import effect, ready, say

STEPS = 20

begun: list[int] = []


class Plain(AgentRuntime):
    key = "plain"

    def __init__(self, effects: str, pause: float) -> None:
        self.effects, self.pause = effects, pause

    def run(self, ctx: SyncRunContext) -> RunResult:
        begun.append(ctx.attempt)
        ready()
        results: dict[str, Any] = {}
        for i in range(STEPS):
            work = self.in_a_thread if i % 2 else self.on_the_loop
            results[f"s{i}"] = ctx.step(f"s{i}", work, i, results.get(f"s{i - 1}", 0))
            time.sleep(self.pause)
        return RunResult(results)

    def in_a_thread(self, ctx: SyncRunContext, i: int, before: int) -> int:
        effect(self.effects, f"s{i}", ctx.idempotency_key)
        time.sleep(self.pause)
        return before * 31 + i

    async def on_the_loop(self, ctx: RunContext, i: int, before: int) -> int:
        effect(self.effects, f"s{i}", ctx.idempotency_key)
        await asyncio.sleep(self.pause)
        return before * 31 + i


def main(db: str, run_id: str, effects: str, pause: float) -> None:
    runner = AgentRunner.open(db, config=RunnerConfig(max_retries=1))
    result = runner.execute_sync(Plain(effects, pause), run_id).raise_for_status()
    call(runner.close)
    if not begun:  # an earlier process has finished the run
        ready()
    say("done " + json.dumps(result.final_output))


if __name__ == "__main__":
    main(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
