"""A worker with old or new code: deployed.py '{"url": …, "version": "old", "worker": …, "effects": …, …}'.

The new code has a renamed and an inserted step, so each version can resume only the runs that it began. Its guarded
steps find out from the file of effects whether they were done. Says "ready" once it claims runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from agent_runtime_core import AgentRunner, AgentRuntime, RunnerConfig, RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.steps import AlreadyDone
from tests.fault.jobs.effects import effect, say
from tests.support.processes import lines

#: The steps of each version; the guarded ones are the last of each half.
STEPS = {"old": (("load", "weigh", "pay"), ("send",)), "new": (("read", "clean", "weigh", "pay"), ("send",))}
GUARDED = ("pay", "send")


class Job(AgentRuntime):
    """The steps of a version, with a wait between them."""

    key = "job"

    def __init__(self, version: str, effects: str, pause: float) -> None:
        self._version, self._effects, self._pause = version, effects, pause

    async def run(self, ctx: Any) -> RunResult:
        done = []
        before, after = STEPS[self._version]
        for name in before:
            done.append(await self._step(ctx, name))
        await ctx.wait_for_signal("go")
        for name in after:
            done.append(await self._step(ctx, name))
        return RunResult({"done": done})

    async def _step(self, ctx: Any, name: str) -> str:
        def check() -> AlreadyDone | None:
            found = [ctx.run_key, name] in (line[:2] for line in lines(Path(self._effects)))
            return AlreadyDone(f"{self._version} {name}") if found else None

        async def act() -> str:
            await asyncio.sleep(self._pause)
            effect(self._effects, ctx.run_key, name, self._version)
            await asyncio.sleep(self._pause)
            return f"{self._version} {name}"

        return str(await ctx.step(name, act, on_in_doubt=check if name in GUARDED else "retry"))


class Pinned(Job):
    """The same for code that names its version."""

    key = "pinned"

    def __init__(self, version: str, effects: str, pause: float) -> None:
        super().__init__(version, effects, pause)
        self.code_version = version


async def main(how: dict[str, Any]) -> None:
    logging.basicConfig(filename=how["log"], level=logging.INFO, format=f"{how['worker']} %(message)s")
    agents = Registry()
    for agent in (Job, Pinned):
        agents.register(agent(how["version"], how["effects"], how["pause"]))
    config = RunnerConfig(worker_id=how["worker"], **how["config"])
    async with AgentRunner.open(how["url"], config=config, registry=agents) as runner:
        working = asyncio.create_task(runner.run_loop(0.5, concurrency=4))
        await asyncio.sleep(0)  # it handles signals from here on
        say("ready")
        await working


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
