"""One subscriber in a process of its own: `python -m benchmarks.peers.listen NAME WHERE RUN_ID`."""

from __future__ import annotations

import asyncio
import sys

from .alone import alone, end_with_the_parent
from .event_measures import listen

if __name__ == "__main__":
    alone()
    end_with_the_parent()
    asyncio.run(listen(*sys.argv[1:4]))
