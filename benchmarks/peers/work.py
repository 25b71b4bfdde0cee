"""One worker process: `python -m benchmarks.peers.work NAME WHERE CONCURRENCY`, begun by a line on its input."""

from __future__ import annotations

import asyncio
import sys

from .alone import alone, end_with_the_parent
from .contenders import ALL


async def work(name: str, where: str, concurrency: int) -> None:
    queue = ALL["queue"][name].load(where)
    await queue.open()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    end_with_the_parent()
    await queue.work(concurrency)


if __name__ == "__main__":
    alone()
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3])))
