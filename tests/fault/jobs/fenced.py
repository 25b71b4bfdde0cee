"""A claim that is superseded while its process is stopped, and then tries every write: fenced.py '[PLACES]'.

Says "ready" under its claim, and answers each line it is told with what became of each write.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from agent_runtime_core import AgentRunner, LeaseLost
from agent_runtime_core._core.context_vars import RUN
from agent_runtime_core._execution.claim_writer import ClaimWriter
from agent_runtime_core._execution.context import Context
from agent_runtime_core._execution.run_control import RunControl
from agent_runtime_core._execution.step_journal import StepJournal
from agent_runtime_core._journal.record import ENDED, Record
from agent_runtime_core.queue.records import RunRow, RunUpdate
from agent_runtime_core.steps import Step, StepExecutor
from tests.fault.jobs.agents import open_runner
from tests.fault.jobs.effects import say

OLD = "old"


async def context(runner: AgentRunner, row: RunRow) -> Context:
    writer = ClaimWriter(row, runner.queue, runner.event_bus, runner.state_store, runner.queue.clock)
    control = RunControl(task=asyncio.current_task(), tracked=True)
    RUN.set(control)
    return Context(row, StepJournal(writer, await writer.open(), control), runner.services(inline=False), control)


def insert(conn: Any) -> None:
    conn.execute("CREATE TABLE IF NOT EXISTS effects (i INTEGER)")
    conn.execute("INSERT INTO effects VALUES (1)")


def writes(runner: AgentRunner, row: RunRow, ctx: Context) -> dict[str, Callable[[], Awaitable[Any]]]:
    writer: Any = ctx.journal.writer
    queue, run, claim = runner.queue, row.run_id, row.claim_id

    async def chain() -> Any:
        return await StepExecutor(ctx).run([Step("late", lambda ctx, state: 1)])

    async def fan_out() -> Any:
        return await StepExecutor(ctx).map("items", lambda i: i, [1, 2, 3])

    async def settle() -> Any:
        return await writer.update_run(RunUpdate(claim, "failed", queue.clock.wall()))

    async def end() -> Any:
        record = Record(writer.next_seq(), ENDED, "failed", "", row.generation, claim, queue.clock.wall(), "{}", nev=1)
        return await writer.update_run(RunUpdate(claim, "failed", queue.clock.wall()), [record])

    async def note() -> str:
        await writer.buffer(ctx.journal.records.boundary("resumed", nev=1))
        writer.flush()  # now, not with the next write
        return "queued"

    async def status() -> str:
        await writer.status("failed")
        writer.flush()
        return "queued"

    return {
        "step": lambda: ctx.step("late", lambda: 1),
        "chain": chain,
        "map": fan_out,
        "emit": lambda: ctx.emit("late", {}),
        "checkpoint": lambda: ctx.checkpoint({"late": True}),
        "transaction": lambda: ctx.transaction("insert", insert),
        "child": lambda: ctx.call("noop", {}),
        "park": lambda: ctx.sleep(3600),
        "approve": lambda: ctx.approve("late"),
        "settle": settle,
        "end": end,
        "release": lambda: queue.release(run, OLD, True, claim_id=claim),
        "extend_lease": lambda: queue.extend_lease(run, OLD, 60, claim_id=claim),
        "requeue": lambda: queue.requeue_for_retry(run, OLD, None, claim_id=claim),
        "publish": lambda: runner.event_bus.publish(run, "late", {}, claim=claim),
        "save_checkpoint": lambda: runner.state_store.save_checkpoint(run, {"late": True}, claim=claim),
        "update_run_status": lambda: runner.state_store.update_run_status(run, "failed", claim=claim),
        "note": note,
        "status": status,
    }


async def main(places: list[str]) -> None:
    async with open_runner(places, worker_id=OLD, park_after=0) as runner:
        [row] = await runner.queue.claim_rows(OLD, 1.0, agent_keys=["steps"])
        ctx = await context(runner, row)
        await ctx.step("first", lambda: 1)
        await ctx.emit("mine", {})
        await ctx.checkpoint({"mine": True})
        say("ready")
        while sys.stdin.readline():
            became: dict[str, str] = {}
            for name, write in writes(runner, row, ctx).items():
                try:
                    became[name] = repr(await write())
                except LeaseLost:
                    became[name] = "LeaseLost"
                except Exception as error:  # noqa: BLE001 - told to the test, which wants none
                    became[name] = repr(error)
            # Behind what was queued without waiting.
            for backend in runner.backends:
                await backend.commits.commit(None, [])
            say(json.dumps(became))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
