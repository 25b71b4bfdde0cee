"""Steps on a disk that fills up: full.py DIRECTORY SIZE…, sizes in bytes a file may grow to beyond what it has.

Says one JSON line per size: what was acknowledged, what is stored, which error came, and what came after.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sqlite3
import sys
from pathlib import Path
from typing import Any

from agent_runtime_core import open_run
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from tests.fault.jobs.effects import say

RUN = "a run"
UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)


def limit(size: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED if size is None else (size, UNLIMITED[1]))


def largest(db: Path) -> int:
    return max(path.stat().st_size for path in db.parent.iterdir() if path.name.startswith(db.name) and path.is_file())


async def fill(db: Path, size: int) -> dict[str, Any]:
    acknowledged: dict[str, str] = {}
    text = "x" * (2_000 if size < 1 << 20 else 100_000)
    error: BaseException | None = None
    async with open_run(db, RUN) as ctx:

        async def step(i: int) -> None:
            acknowledged[str(i)] = await ctx.step("s", lambda: f"{i} {text}", key=str(i))

        for i in range(3):
            await step(i)
        limit(largest(db) + size)
        try:
            for i in range(3, 10_000):
                await step(i)
        except Exception as caught:  # noqa: BLE001 - told to the test
            error = caught
        again = ""
        try:
            await step(10_000)
            again = "not refused"
        except Exception as caught:  # noqa: BLE001 - told to the test
            again = type(caught).__name__
        limit(None)
        for i in range(20_000, 20_003):
            await step(i)
        engine: Any = ctx._writer.state.commits
        assert isinstance(engine, SQLiteEngine)
        stored = {
            record.key.removeprefix("k:"): json.loads(record.result or "null")
            for record in await ctx._writer.state.records(ctx.run_id)
            if record.kind == "done"
        }
    conn = sqlite3.connect(db)
    integrity = [row[0] for row in conn.execute("PRAGMA integrity_check")]
    conn.close()
    return {
        "size": size, "error": type(error).__name__, "again": again, "integrity": integrity,
        "acknowledged": len(acknowledged),
        "lost": [key for key, value in acknowledged.items() if stored.get(key) != value],
        "after": [key for key in ("20000", "20001", "20002") if key in stored],
    }  # fmt: skip


async def open_full(db: Path) -> dict[str, Any]:
    limit(0)
    error = ""
    try:
        async with open_run(db, RUN):
            pass
    except Exception as caught:  # noqa: BLE001 - told to the test
        error = type(caught).__name__
    limit(None)
    async with open_run(db, RUN) as ctx:
        after = await ctx.step("s", lambda: 1)
    return {"error": error, "after": after}


async def main(where: Path, sizes: list[int]) -> None:
    for n, size in enumerate(sizes):
        say(json.dumps(await fill(where / f"{n}.db", size)))
    say(json.dumps(await open_full(where / "none.db")))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]))
