"""Claims in turns: milliseconds of a claim of one run, with 100,000 ready runs of 1 and of 10,000 tenants.

python -m benchmarks.turns sqlite /tmp/runs.db
python -m benchmarks.turns redis redis://localhost:6379/0
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

from agent_runtime_core._engines.base import Op
from agent_runtime_core.queue import RunQueue, get_queue

RUNS, CLAIMS, AT_ONCE = 100_000, 500, 1_000


async def fill(queue: RunQueue, agent: str, tenants: int, *, turns: bool) -> None:
    """Store the ready runs. All runs of the first tenants have arrived before those of the others."""
    for start in range(0, RUNS, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, RUNS))
        names = [f"tenant-{number * tenants // RUNS}" for number in numbers]
        rows = [queue.new_row(None, agent, {}, tenant=name, turn=name if turns else None) for name in names]
        await queue.commits.commit(None, [Op("queue.insert", (row,)) for row in rows])


async def claimed(queue: RunQueue, agent: str, *, turns: bool) -> list[float]:
    """Return the milliseconds of claims, one after another."""
    found, after = list[float](), "" if turns else None
    for _ in range(CLAIMS):
        began = time.perf_counter()
        [row] = await queue.claim_rows("w", 3600, agent_keys=[agent], after_turn=after)
        found.append((time.perf_counter() - began) * 1000)
        after = row.turn
    return found


async def measure(kind: str, place: str) -> None:
    """Print what was measured."""
    options: dict[str, Any] = {"sqlite": {"path": place}, "memory": {}}.get(kind, {"url": place})
    queue = get_queue(kind, **options)
    for agent, tenants, turns in (("plain", 1, False), ("one", 1, True), ("many", 10_000, True)):
        await fill(queue, agent, tenants, turns=turns)
        times = await claimed(queue, agent, turns=turns)
        what = f"{tenants} tenants, {'in turns' if turns else 'in order of arrival'}"
        p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
        print(f"{kind}, {RUNS} runs, {what}: {p50:.2f} ms p50, {p99:.2f} ms p99")
    await queue.close()


if __name__ == "__main__":
    asyncio.run(measure(*sys.argv[1:3]))
