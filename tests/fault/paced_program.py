"""The two sides of a streamed answer, each a process of its own.

Arguments: "worker", the store, and the file that says how many pieces were told; or "reader", the store, and "all",
"some" or "slow": it reads everything, stops reading after some pieces, or reads a piece every 20 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.registry import Registry

PIECES = 300


class Telling(AgentRuntime):
    key = "telling"

    def __init__(self, told: Path) -> None:
        self._told = told

    async def run(self, ctx: RunContext) -> RunResult:
        for number in range(PIECES):
            await ctx.emit("assistant.delta", {"delta": f"{number:08d}" + "x" * ctx.params["size"]})
            self._told.write_text(str(number + 1))
            await asyncio.sleep(0.005)  # as a model does
        return RunResult()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def work(store: str, told: Path) -> None:
    registry = Registry()
    registry.register(Telling(told))
    async with AgentRunner.open(store, registry=registry) as runner:
        say("ready")
        await runner.run_loop(0.05)
        say(f"waited {runner.backpressure_seconds:.3f}")


async def read(store: str, how: str) -> None:
    async with AgentRunner.open(store, registry=Registry()) as runner:
        events: Any = runner.stream("r", backpressure=True)
        async with contextlib.aclosing(events):
            say("ready")
            count = 0
            async for event in events:
                count += event.event_type == "assistant.delta"
                if how == "slow":
                    await asyncio.sleep(0.02)
                if how == "some" and count == 5:
                    say("stalls")
                    await asyncio.get_running_loop().create_future()
        say(f"read {count}")


if __name__ == "__main__":
    asyncio.run(work(sys.argv[2], Path(sys.argv[3])) if sys.argv[1] == "worker" else read(sys.argv[2], sys.argv[3]))
