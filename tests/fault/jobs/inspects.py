"""A process that may only read inspects a store: inspects.py ANOTHER_STORE STORE.

As root, it becomes the user nobody first, to whom modes apply. The other store is inspected before that, so that all
modules and files of the page are loaded, which nobody may not read everywhere.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.fault.jobs.effects import say
from tests.fault.jobs.reads import NOBODY
from tests.support.local_client import PATHS, LocalClient, inspecting


def statuses(store: str) -> dict[str, int]:
    with inspecting(Path(store)) as server:
        client = LocalClient(server.port)
        found = {target: client.send(target).status for target in ("/", *(f"/api/v1/{path}" for path in PATHS))}
        client.close()
        return found


def main(another: str, store: str) -> None:
    statuses(another)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    assert not os.access(store, os.W_OK)
    assert not os.access(os.path.dirname(store), os.W_OK)
    say("read " + json.dumps(statuses(store)))


if __name__ == "__main__":
    main(*sys.argv[1:])
