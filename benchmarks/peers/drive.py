"""One measure in a process of its own, so that no two peers share an interpreter.

`python -m benchmarks.peers.drive MEASURE JSON`, the JSON its arguments; the last line printed is what was found.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from . import event_measures, queue_measures
from .alone import alone
from .contenders import ALL


async def probe(kind: str, name: str, where: str) -> dict[str, Any]:
    """That it can be opened at all."""
    found = ALL[kind][name].load(where)
    if kind == "queue":
        await found.open()
    await found.close()
    return {}


async def server(where: str) -> dict[str, Any]:
    """Which server that is, and how many keys its database holds."""
    from redis.asyncio import Redis

    async with contextlib.aclosing(Redis.from_url(where)) as client:
        about = await client.info("server")
        version = f"{about.get('server_name', 'redis')} {about.get('valkey_version', about['redis_version'])}"
        return {"version": version, "keys": await client.dbsize()}


async def empty(where: str) -> dict[str, Any]:
    """Remove what earlier measures left in that database."""
    if where.startswith("postgresql"):
        return _empty_postgres(where)
    from redis.asyncio import Redis

    async with contextlib.aclosing(Redis.from_url(where)) as client:
        await client.flushdb()
    return {}


def _empty_postgres(where: str) -> dict[str, Any]:
    import psycopg

    with psycopg.connect(where, autocommit=True) as conn:
        conn.execute("SET client_min_messages = error")
        for (schema,) in conn.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'"
        ).fetchall():
            conn.execute(f'DROP SCHEMA "{schema}" CASCADE'.encode())
        conn.execute("CREATE SCHEMA public")
        conn.execute("CHECKPOINT")
    return {}


MEASURES: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "drain": queue_measures.drain,
    "enqueue": queue_measures.enqueue,
    "idle": queue_measures.idle,
    "chain": queue_measures.chain,
    "live": event_measures.live,
    "replay": event_measures.replay,
    "across": event_measures.across,
    "probe": probe,
    "server": server,
    "empty": empty,
}


async def _measured(measure: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if measure != "server" and "://" in arguments["where"]:
        await empty(arguments["where"])
    return await MEASURES[measure](**arguments)


if __name__ == "__main__":
    alone()
    print(json.dumps(asyncio.run(_measured(sys.argv[1], json.loads(sys.argv[2])))))
