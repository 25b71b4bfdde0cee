"""A process that is killed after it published an event, before it notifies others: silent.py URL RUN_ID."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from agent_runtime_core._engines.postgres.engine import PostgresEngine
from agent_runtime_core.events import get_event_bus


async def main(url: str, run_id: str) -> None:
    PostgresEngine.notify_others = lambda self, topics: None  # type: ignore[method-assign]
    bus = get_event_bus("postgres", url=url)
    await bus.publish(run_id, "custom.last", {"by": os.getpid()})
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
