"""A process that claims a run and is inside it: claims.py URL block|worker|family.

Says "in" once it is inside. "block" opens the run "import" and records steps until it cannot, and then says why;
"worker" is the worker "first" for the agent "busy", and says "ready" before; "family" executes a run that executes a
child run.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

from agent_runtime_core.errors import AgentRuntimeError
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig, open_run
from tests.fault.jobs.effects import say
from tests.support.fault_runs import Agent, settings

LEASE = 0.9


def quick(**changes: Any) -> RunnerConfig:
    return settings(lease_ttl_seconds=LEASE, heartbeat_interval_seconds=LEASE / 3, **changes)


async def block(url: str) -> None:
    try:
        async with open_run(url, run_id="import", config=quick(run_timeout_seconds=1e9)) as ctx:
            for number in itertools.count():
                await ctx.step("read", lambda: 1, key=str(number))
                if number == 1:
                    say("in")
                await asyncio.sleep(0.01)
    except (AgentRuntimeError, asyncio.CancelledError) as error:
        say(f"out {type(error).__name__}")


async def hang(ctx: Any) -> None:
    say("in")
    await asyncio.sleep(600)


def agents() -> Registry:
    registry = Registry()
    registry.register(Agent("busy", hang))
    registry.register(Agent("parent", lambda ctx: ctx.call("busy", {}, key="child")))
    return registry


async def worker(url: str) -> None:
    async with AgentRunner.open(url, config=quick(worker_id="first"), registry=agents()) as runner:
        say("ready")
        await runner.run_loop(0.05)
    say("stopped")


async def family(url: str) -> None:
    async with AgentRunner.open(url, config=quick(), registry=agents()) as runner:
        await runner.execute("parent", run_id="parent")


if __name__ == "__main__":
    asyncio.run({"block": block, "worker": worker, "family": family}[sys.argv[2]](sys.argv[1]))
