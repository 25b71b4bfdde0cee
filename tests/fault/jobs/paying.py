"""A process that is killed while it pays: paying.py WHERE RUN_ID. It says "paying" and then waits for its end."""

from __future__ import annotations

import asyncio
import sys

from agent_runtime_core import open_run
from tests.fault.jobs.effects import say


async def main(where: str, run_id: str) -> None:
    async def pay() -> None:
        say("paying")
        await asyncio.Event().wait()

    async with open_run(where, run_id) as ctx:
        await ctx.step("first", lambda: 1)
        await ctx.step("pay", pay, on_in_doubt="fail")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
