"""Appends messages to a conversation that others append to: `appends <technology> <where> <id> <who> <count>`.

It says "ready", waits for a line, appends one message at a time, and says how many it appended.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from uuid import UUID

from agent_runtime_core.persistence import (
    FileConversationStore,
    PostgresConversationStore,
    RedisConversationStore,
    SQLiteConversationStore,
)
from agent_runtime_core.persistence.models import ConversationMessage
from tests.fault.jobs.effects import say


def conversations(technology: str, where: str) -> Any:
    stores: dict[str, Any] = {
        "sqlite": lambda: SQLiteConversationStore(where, durability="normal"),
        "redis": lambda: RedisConversationStore(where),
        "postgres": lambda: PostgresConversationStore(where),
        "files": lambda: FileConversationStore(where),
    }
    return stores[technology]()


async def main(technology: str, where: str, conversation: str, who: str, count: str) -> None:
    store = conversations(technology, where)
    try:
        assert await store.get(UUID(conversation)) is not None
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        added = 0
        for n in range(int(count)):
            added += await store.append(UUID(conversation), [ConversationMessage(role="user", content=[who, n])])
        say(str(added))
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
