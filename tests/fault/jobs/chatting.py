"""A conversation of many runs, each of two steps: chatting.py STORES DB DIRECTORY TURNS PAUSE.

STORES is files, default (the runner gets no stores), own (those of the runs' own file), sqlite, or the URL of a Redis.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from agent_runtime_core import AgentRunner, AgentRuntime, RunnerConfig, RunResult
from agent_runtime_core.persistence import PersistenceConfig, PersistenceManager
from tests.fault.jobs.effects import say

CHAT = UUID(int=7)


def stores(where: str, db: str, directory: str) -> PersistenceManager:
    match where:
        case "files":
            return PersistenceManager(PersistenceConfig(project_dir=directory))
        case "default" | "own":
            return PersistenceManager.open(db)
        case "sqlite":
            return PersistenceManager.open(Path(directory) / "stores.db")
        case _:
            return PersistenceManager.open(where)


class Talker(AgentRuntime):
    key = "talker"

    def __init__(self, pause: float) -> None:
        self.pause = pause

    async def run(self, ctx: Any) -> RunResult:
        heard = len(ctx.input_messages)
        first = await ctx.step("listen", self.work, heard)
        told = await ctx.step("think", self.work, first)
        answer = {"role": "assistant", "content": f"answer to {ctx.input_messages[-1]['content']}, {told}th"}
        return RunResult({"response": answer["content"]}, [*ctx.input_messages, answer])

    async def work(self, value: int) -> int:
        await asyncio.sleep(self.pause)
        return value


async def main(where: str, db: str, directory: str, turns: int, pause: float) -> None:
    os.environ["HOME"] = directory  # of two at once, each has its own global stores too: their runs have the same ids
    manager = stores(where, db, directory)
    passed: PersistenceManager | Literal["default"] = "default" if where == "default" else manager
    runner = AgentRunner.open(db, config=RunnerConfig(worker_id="one"), persistence=passed)
    agent = Talker(pause)
    say("ready")
    for turn in range(turns):
        said = {"role": "user", "content": f"question {turn}"}
        result = await runner.execute(
            agent, f"turn-{turn}", {"messages": [said], "conversation_id": str(CHAT)}, raise_on_error=True
        )
        say(f"turn {turn} {result.final_output['response']}")
    say("done")
    await runner.close()
    await manager.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))
