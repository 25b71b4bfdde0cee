"""A worker that takes tasks until there are none left, and says which: working.py KIND WHERE NAME."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agent_runtime_core.persistence import FileTaskStore, PostgresTaskStore, RedisTaskStore, SQLiteTaskStore
from tests.fault.jobs.effects import say

STORES: dict[str, Any] = {
    "sqlite": SQLiteTaskStore, "redis": RedisTaskStore, "postgres": PostgresTaskStore, "files": FileTaskStore,
}  # fmt: skip


def task_store(kind: str, where: str) -> Any:
    return STORES[kind](where)


async def main(kind: str, where: str, name: str) -> None:
    store = task_store(kind, where)
    taken: list[str] = []
    await store.ready(limit=1)
    say("ready")
    sys.stdin.readline()
    while (task := await store.claim(name, lease_seconds=60)) is not None:
        taken.append(task.name)
        await store.complete(task, data={"by": name})
    await store.close()
    say("took " + json.dumps(taken))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
