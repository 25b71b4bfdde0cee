"""Four workers on one file for as long as is wanted, one killed every so often:
`python -m tests.support.soak --seconds 3600 --every 10`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from uuid import UUID

from agent_runtime_core import AgentRunner, RunStatus
from tests.fault.jobs.agents import open_runner
from tests.support.processes import Child

WORKERS = 4
AT_ONCE = 20  # runs that are waited for together
MOST_LOG = 64 << 20
MOST_SLOPE = 0.01  # of its mean, an hour
ENOUGH = 1800.0  # seconds after which a slope says something
PATIENCE = 60.0
_STATM = "/proc/{pid}/statm"


class Soak:
    """What was done, and what was seen of the log beside the file and of the one worker that is never killed."""

    def __init__(self, where: Path, every: float, seed: int = 0) -> None:
        self.db = where / "all.db"
        self.every = every
        self.random = Random(seed)
        self.ended = self.kills = self.log = 0
        #: (seconds, descriptors, resident pages) of that worker.
        self.seen: list[tuple[float, int, int]] = []
        self._how = json.dumps({"places": [str(self.db)] * 3, "concurrency": 4, "poll": 0.2})

    async def go(self, seconds: float, kills: int = 0) -> None:
        """For so long, and until so many were killed; AssertionError or TimeoutError where a run is lost."""
        async with open_runner([self.db] * 3) as runner:
            with ExitStack() as stack:
                workers = [stack.enter_context(Child("worker", self._how)) for _ in range(WORKERS)]
                for worker in workers:
                    assert await worker.aline() == "ready"
                began = killed = looked = time.monotonic()
                while (now := time.monotonic()) < began + seconds or self.kills < kills:
                    runs = await asyncio.gather(*(self._submit(runner) for _ in range(AT_ONCE)))
                    if now >= killed + self.every:
                        killed = now
                        await self._kill(workers, stack)
                    for result in await asyncio.gather(*(runner.wait(run, timeout=PATIENCE) for run in runs)):
                        assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"out": [0, 1, 4]})
                    self.ended += len(runs)
                    # Else the file would grow; to compact it would begin the log anew.
                    await asyncio.gather(*map(runner.discard, runs))
                    if now >= looked + 1 or not self.seen:
                        looked = now
                        self._look(workers[0].pid, now - began)
                for worker in workers:
                    worker.process.terminate()
                assert [await worker.aended() for worker in workers] == [0] * WORKERS
            assert await runner.runs() == [], "more than was submitted"

    async def _submit(self, runner: AgentRunner) -> UUID:
        return await runner.submit("steps", {"params": {"n": 3, "pause": 0.002}})

    async def _kill(self, workers: list[Child], stack: ExitStack) -> None:
        n = self.random.randrange(1, WORKERS)
        assert workers[n].kill()
        workers[n] = stack.enter_context(Child("worker", self._how))
        self.kills += 1
        assert await workers[n].aline() == "ready"

    def _look(self, pid: int, at: float) -> None:
        self.log = max(self.log, os.stat(f"{self.db}-wal").st_size)
        statm = Path(_STATM.format(pid=pid))
        if statm.exists():
            self.seen.append((at, len(os.listdir(f"/proc/{pid}/fd")), int(statm.read_text().split()[1])))

    def wrong(self) -> list[str]:
        """What is beyond its bar."""
        found = [f"the log had {self.log} bytes"] if self.log > MOST_LOG else []
        if self.seen and self.seen[-1][0] >= ENOUGH:
            for n, what in ((1, "descriptors"), (2, "memory")):
                grown = slope([(each[0], each[n]) for each in self.seen])
                if grown > MOST_SLOPE:
                    found.append(f"its {what} grow by {grown:.1%} an hour")
        return found

    def __str__(self) -> str:
        first, last = (self.seen[0], self.seen[-1]) if self.seen else ((0, 0, 0), (0, 0, 0))
        return (
            f"{self.ended} runs over {self.kills} kills, none lost; the log had at most {self.log / 2**20:.1f} MiB; "
            f"the worker that lived had {first[1]} and then {last[1]} descriptors, {first[2]} and then {last[2]} pages"
        )


def slope(seen: Sequence[tuple[float, float]]) -> float:
    """By what part of its mean it grows in an hour, once the first sixth of the time is over."""
    settled = [each for each in seen if each[0] >= seen[-1][0] / 6]
    times, values = zip(*settled, strict=True)
    return statistics.linear_regression(times, values).slope * 3600 / statistics.fmean(values)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="arc-soak-") as where:
        soak = Soak(Path(where), options.every, options.seed)
        asyncio.run(soak.go(options.seconds))
    wrong = soak.wrong()
    sys.stdout.write("\n".join([str(soak), *wrong]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
