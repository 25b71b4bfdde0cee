"""What a process reads that may write neither the store nor its directory: reads.py ANOTHER_STORE STORE URL.

As root, it becomes the user nobody first, to whom modes apply. The other store is read before that, so that all modules
are loaded, which nobody may not read everywhere. Then STORE is the path to which it must have no right to write.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from tests.fault.jobs.effects import say
from tests.support.read_only import read_all

NOBODY = 65534


async def main(another: str, store: str, url: str) -> None:
    await read_all(another)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    assert not os.access(store, os.W_OK)
    assert not os.access(os.path.dirname(store), os.W_OK)
    say("read " + json.dumps(await read_all(url)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
