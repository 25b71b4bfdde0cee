"""A job of twenty steps, or transactions, in one run: twenty.py steps|transactions PLACE RUN_ID EFFECTS PAUSE."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import SystemRandom
from typing import Any

from agent_runtime_core import RunBusy, RunnerConfig, StepExecutor, open_run
from agent_runtime_core.steps import Step
from tests.fault.jobs.effects import effect, ready, say

STEPS = 20
LEASE = 0.5
EARLY = 0.25


def step(i: int, effects: str, pause: float) -> Callable[..., Any]:
    def finish(state: Any) -> dict[str, Any]:
        state["sum"] = state.get("sum", 0) + i
        before = state.results.get(f"s{i - 1}", {})
        return {"i": i, "sum": state["sum"], "chain": before.get("chain", 0) * 31 + i}

    async def in_the_loop(ctx: Any, state: Any) -> dict[str, Any]:
        effect(effects, f"s{i}", ctx.idempotency_key)
        await asyncio.sleep(pause)
        return finish(state)

    def in_a_thread(ctx: Any, state: Any) -> dict[str, Any]:
        effect(effects, f"s{i}", ctx.idempotency_key)
        time.sleep(pause)
        return finish(state)

    return in_a_thread if i % 3 == 0 else in_the_loop


def insert(conn: Any, run_id: str, i: int) -> int:
    conn.execute("CREATE TABLE IF NOT EXISTS effects (run_id TEXT, i INTEGER)")
    conn.execute("INSERT INTO effects VALUES (?, ?)", (run_id, i))
    return i * i


@asynccontextmanager
async def taken(place: str, run_id: str) -> AsyncIterator[Any]:
    """The run; on a server, which does not see that a process died, once the lease of the last one is over.

    A few lives are counted from here, so that some end while it is opened, and the others from when it is.
    """
    early = "://" not in place and SystemRandom().random() < EARLY
    if early:
        ready()
    config = RunnerConfig(lease_ttl_seconds=LEASE) if "://" in place else None
    async with AsyncExitStack() as stack:
        while True:
            try:
                ctx = await stack.enter_async_context(open_run(place, run_id, config=config))
                break
            except RunBusy:
                await asyncio.sleep(LEASE / 20)
        if not early:
            ready()
        yield ctx


async def main(kind: str, db: str, run_id: str, effects: str, pause: float) -> None:
    async with taken(db, run_id) as ctx:
        if kind == "steps":
            steps = [Step(f"s{i}", step(i, effects, pause)) for i in range(STEPS)]
            results: Any = await StepExecutor(ctx).run(steps)
        else:
            results = {}
            for i in range(STEPS):
                results[f"t{i}"] = await ctx.transaction(f"t{i}", insert, run_id, i)
                await asyncio.sleep(pause)
    say("done " + json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5])))
