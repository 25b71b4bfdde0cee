"""A process that stops itself in the middle of a commit: standing.py DB."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from agent_runtime_core import open_run
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from tests.fault.jobs.effects import say


def stand(tx: Any, *args: Any) -> None:
    say("inside")
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)  # another thread may be the first to hear of it


async def main(db: str) -> None:
    async with open_run(db, "standing") as ctx:
        await ctx.step("first", lambda: 1)
        engine: SQLiteEngine = ctx._writer.queue.engine  # type: ignore[attr-defined]
        ops: dict[str, Callable[..., Any]] = engine.writer.committer.operations
        ops["events.publish"] = stand
        await ctx.emit("x", {})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
