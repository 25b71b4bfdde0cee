"""Write the stores of this version: `python -m tests.compatibility.make_stores DIRECTORY`.

Run it at the last commit before a change of the storage code, and commit the directory. It holds a SQLite file, and as
JSON the document files of a directory and the keys of a Redis server.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from agent_runtime_core.persistence import PersistenceConfig, PersistenceManager
from tests.compatibility.redis_keys import read_keys
from tests.compatibility.stored_runs import runner_of, store_documents, store_runs
from tests.support.redis_servers import RedisServer


async def write(url: str, stores: PersistenceManager) -> None:
    async with runner_of(url) as runner:
        await store_runs(runner)
    async with stores:
        await store_documents(stores)


async def write_files(project: Path) -> None:
    async with PersistenceManager(PersistenceConfig(project_dir=project)) as stores:
        await store_documents(stores)


def main(directory: Path) -> None:
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        database = Path(scratch, "agents.db")
        asyncio.run(write(str(database), PersistenceManager.open(database)))
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("VACUUM")
        (directory / "agents.db.gz").write_bytes(gzip.compress(database.read_bytes(), mtime=0))
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(write_files(Path(scratch)))
        files = {
            path.relative_to(scratch).as_posix(): path.read_text("utf-8")
            for path in sorted(Path(scratch).rglob("*"))
            if path.is_file()
        }
    dump(directory / "files.json", files)
    with RedisServer() as server:
        asyncio.run(write(server.url, PersistenceManager.open(server.url)))
        dump(directory / "redis.json", read_keys(server.url))


def dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=0, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
