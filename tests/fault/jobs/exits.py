"""A process that ends with work in flight: exits.py HOW DB RUN_ID.

"left": its loop ends and nothing was closed. "sys.exit": in the middle of a loop. "synchronous": the main thread
ends while another one waits in `execute_sync`. "thread": the main thread ends while another one has a loop, finishes
its run and closes the file. "abandoned": a loop is closed in the middle of everything, the runner in another after it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from typing import Any

from agent_runtime_core import AgentRunner, AgentRuntime, RunResult, open_run, register_runtime
from tests.fault.jobs.effects import say

begun = threading.Event()


class Endless(AgentRuntime):
    key = "endless"

    async def run(self, ctx: Any) -> RunResult:
        for i in range(1_000_000):
            await ctx.step("s", lambda: 1, key=str(i))
            begun.set()
            await asyncio.sleep(0.005)
        return RunResult()


async def working(db: str, run_id: str) -> tuple[AgentRunner, asyncio.Task[None]]:
    register_runtime(Endless())
    runner = AgentRunner.open(db)
    await runner.submit("endless", {}, run_id=run_id)
    task = asyncio.create_task(runner.run_loop(handle_signals=False))
    await asyncio.to_thread(begun.wait)
    return runner, task


async def leave(db: str, run_id: str) -> None:
    await working(db, run_id)


async def leave_at_once(db: str, run_id: str) -> None:
    await working(db, run_id)
    sys.exit(3)


async def a_run(db: str, run_id: str) -> None:
    async with open_run(db, run_id) as ctx:
        begun.set()
        for i in range(20):
            await ctx.step("s", lambda: 1, key=str(i))
            await asyncio.sleep(0.02)
    say("closed")


def abandon(db: str, run_id: str) -> None:
    loop = asyncio.new_event_loop()
    runner, _ = loop.run_until_complete(working(db, run_id))
    loop.set_exception_handler(lambda loop, context: None)  # that its tasks are destroyed is no wonder
    loop.close()
    asyncio.run(runner.close())
    say("closed")


def main(how: str, db: str, run_id: str) -> None:
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # that a machine is busy is no fault of ours
    match how:
        case "left":
            asyncio.run(leave(db, run_id))
        case "sys.exit":
            asyncio.run(leave_at_once(db, run_id))
        case "synchronous":
            runner = AgentRunner.open(db)
            threading.Thread(target=lambda: runner.execute_sync(Endless(), run_id, {}), daemon=True).start()
            begun.wait()
        case "thread":
            threading.Thread(target=lambda: asyncio.run(a_run(db, run_id))).start()
            begun.wait()
        case "abandoned":
            abandon(db, run_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
