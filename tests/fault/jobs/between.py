"""A worker process that is killed before or after its n-th commit, of all engines together.

between.py '[PLACES]' before|after N: drives one run; says "ready", and how many commits there were if it lives.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from agent_runtime_core._engines.sqlite.writer import Writer
from tests.fault.jobs.agents import open_runner
from tests.fault.jobs.effects import say


class Scythe:
    """Counts the groups of commits that reach the disk, and cuts at one of them."""

    def __init__(self, when: str, n: int) -> None:
        self.when, self.n = when, n
        self.count = 0
        self._lock = threading.Lock()
        Writer.commit_group = self._over(Writer.commit_group)  # type: ignore[method-assign]

    def _over(self, carry_out: Callable[..., bool]) -> Callable[..., bool]:
        def cut(*args: Any, **options: Any) -> bool:
            # One at a time, so that nothing of another engine lands while this process dies.
            with self._lock:
                self.count += 1
                if self.when == "before" and self.count == self.n:
                    os.kill(os.getpid(), signal.SIGKILL)
                done = carry_out(*args, **options)
                if self.when == "after" and self.count == self.n:
                    os.kill(os.getpid(), signal.SIGKILL)
                return done

        return cut


async def main(places: list[str], when: str, n: int) -> None:
    async with open_runner(places, park_after=0) as runner:
        say("ready")
        scythe = Scythe(when, n)
        await runner.run_once()
        await runner.run_once()
        say(str(scythe.count))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
