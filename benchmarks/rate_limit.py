"""A rate limit of 50 starts per second over four workers: the most starts in a second, and the average.

python -m benchmarks.rate_limit /tmp/runs.db
python -m benchmarks.rate_limit redis://localhost:6379/0
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from bisect import bisect_left
from itertools import pairwise

from agent_runtime_core import AgentRunner, RateLimit
from agent_runtime_core.queue import RunFilter
from agent_runtime_core.registry import Registry

WORKERS, STARTS, SECONDS = 4, 50, 20

_WORKER = """
import asyncio, sys
from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
from agent_runtime_core.registry import Registry

class Job(AgentRuntime):
    key = "job"
    async def run(self, ctx):
        return RunResult()

async def main(url):
    registry = Registry()
    registry.register(Job())
    async with AgentRunner.open(url, registry=registry) as runner:
        print("ready", flush=True)
        await runner.run_loop(concurrency=8)

asyncio.run(main(sys.argv[1]))
"""


def most(times: list[float], per: float = 1.0) -> int:
    """Return the greatest number of times in any sliding period."""
    return max(bisect_left(times, True, lo=n, key=lambda at: at - first >= per) - n for n, first in enumerate(times))


def workers(url: str) -> list[subprocess.Popen[str]]:
    """Start the workers."""
    command = [sys.executable, "-c", _WORKER, url]
    return [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)]


async def measure(url: str) -> str:
    """Return what was measured, as a line of text."""
    runs = STARTS * SECONDS
    async with AgentRunner.open(url, registry=Registry()) as runner:
        ids = [await runner.submit("job", rate_limit=RateLimit(STARTS, per=1.0)) for _ in range(runs)]
        started = workers(url)
        try:
            for run_id in ids:
                await runner.wait(run_id)
        finally:
            for worker in started:
                worker.terminate()
            for worker in started:
                worker.wait()
        rows = await runner.queue.find(RunFilter(agent="job", limit=runs))
    in_arrival = [row.started_at or 0.0 for row in rows]
    times = sorted(in_arrival)
    average = len(times) / (times[-1] - times[0])
    in_order = sum(first <= second for first, second in pairwise(in_arrival))
    return (
        f"{runs} runs, {WORKERS} workers: at most {most(times)} starts in a second, {average:.1f} on average, "
        f"{in_order / (runs - 1):.1%} not before the run that was submitted before"
    )


if __name__ == "__main__":
    print(asyncio.run(measure(sys.argv[1])))
