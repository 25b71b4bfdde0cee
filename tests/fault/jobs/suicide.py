"""Three steps in open_run, the last of which ends its process for lack of a cure: suicide.py DB RUN_ID EFFECTS CURE."""

from __future__ import annotations

import asyncio
import os
import sys

from agent_runtime_core import open_run
from tests.fault.jobs.effects import effect, say


async def main(db: str, run_id: str, effects: str, cure: str) -> None:
    def step(i: int) -> None:
        effect(effects, f"s{i}")
        if i == 2 and not os.path.exists(cure):
            os._exit(3)

    say("ready")
    async with open_run(db, run_id) as ctx:
        for i in range(3):
            await ctx.step(f"s{i}", step, i)
    say("succeeded")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
