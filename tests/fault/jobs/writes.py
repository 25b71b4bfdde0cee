"""Writes of four kinds, each a commit of its own, as fast as they go: writes.py DB NUMBER SECONDS."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter

from agent_runtime_core import AgentRuntimeError
from tests.fault.jobs.agents import open_runner
from tests.fault.jobs.effects import say


async def main(db: str, number: int, seconds: float) -> None:
    errors: Counter[str] = Counter()
    writes, slowest, run = 0, 0.0, f"run {number}"
    async with open_runner([db] * 3, max_retries=1_000_000) as runner:
        run_id = await runner.submit(f"agent {number}", {}, run_id=run)
        say("ready")
        sys.stdin.readline()
        until = time.monotonic() + seconds
        worker = f"worker {number}"
        while time.monotonic() < until:
            for write in (
                runner.event_bus.publish(run_id, "tick", {"n": writes, "text": "x" * 200}),
                runner.state_store.save_checkpoint(run_id, {"n": writes, "text": "y" * 500}),
                runner.queue.claim(worker, 60, agent_keys=[f"agent {number}"]),
                runner.queue.requeue_for_retry(run_id, worker, None),
            ):
                began = time.monotonic()
                try:
                    await write
                except AgentRuntimeError as error:
                    errors[f"{type(error).__name__}: {error}"] += 1
                slowest = max(slowest, time.monotonic() - began)
                writes += 1
    say("wrote " + json.dumps({"writes": writes, "errors": errors, "slowest": slowest}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
