"""Publishes numbered events of one run, AT_ONCE in a commit, from a little before where its log ends:
tells.py URL RUN COUNT AT_ONCE DIES_AT.

In the commit that has the event DIES_AT it kills itself, up to 2 ms after it asked for it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys

from agent_runtime_core.runner.backends import open_url


async def main(url: str, run: str, count: int, at_once: int, dies_at: int) -> None:
    backends = open_url(url)
    bus = backends.bus
    # Whether its last commit landed is not known to one that was killed: it tells that again, under the same ids.
    start = max(await bus.head(run) - 2 * at_once, 0)
    for first in range(start, count, at_once):
        numbers = range(first, min(first + at_once, count))
        events = [(f"e{n}", "counted", {"n": n}) for n in numbers]
        telling = asyncio.ensure_future(bus.commit(None, [bus.publishing(run, events)]))
        if dies_at in numbers:
            await asyncio.sleep(random.random() * 0.002)
            os.kill(os.getpid(), signal.SIGKILL)
        assert await telling == [list(numbers)]
    await backends.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
