"""procrastinate: a table of jobs, claimed by a function of the database; LISTEN wakes its workers."""

from __future__ import annotations

import psycopg
from procrastinate import App, PsycopgConnector

from . import base


class Queue(base.Queue):
    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._app = App(connector=PsycopgConnector(conninfo=where))
        self._tasks = {
            "nothing": self._app.task(name="nothing")(self._nothing),
            "tell": self._app.task(name="tell")(self._tell),
        }

    @staticmethod
    async def _nothing() -> int:
        return base.nothing()

    @staticmethod
    async def _tell() -> int:
        return base.tell()

    async def open(self) -> None:
        await self._app.open_async()
        with psycopg.connect(self.where, autocommit=True) as conn:
            row = conn.execute("SELECT to_regclass('procrastinate_jobs')").fetchone()
        if row is None or row[0] is None:
            await self._app.schema_manager.apply_schema_async()

    async def enqueue(self, job: str) -> None:
        await self._tasks[job].defer_async()

    async def left(self, at_most: int) -> int:
        with psycopg.connect(self.where, autocommit=True) as conn:
            row = conn.execute("SELECT count(*) FROM procrastinate_jobs WHERE status <> 'succeeded'").fetchone()
        return 0 if row is None else int(row[0])

    async def work(self, concurrency: int) -> None:
        await self._app.run_worker_async(concurrency=concurrency, install_signal_handlers=False)

    async def close(self) -> None:
        await self._app.close_async()
