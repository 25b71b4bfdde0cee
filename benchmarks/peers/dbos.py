"""DBOS: workflows and steps that are recorded in PostgreSQL, and queues that are polled."""

from __future__ import annotations

import asyncio
import time

import psycopg
from dbos import DBOS, DBOSClient, DBOSConfig, EnqueueOptions, run_dbos_database_migrations

from . import base


@DBOS.workflow()
def nothing() -> int:
    return base.nothing()


@DBOS.workflow()
def tell() -> int:
    return base.tell()


@DBOS.step()
def _step(n: int) -> int:
    return n


@DBOS.workflow()
def _chain(count: int) -> float:
    since = time.perf_counter()
    for n in range(count):
        _step(n)
    return time.perf_counter() - since


JOBS = {"nothing": nothing, "tell": tell}


class Queue(base.Queue):
    """A worker starts as many jobs as are free at each poll, so it polls 50 times as often as it does by default."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._client: DBOSClient | None = None

    async def _launch(self, concurrency: int) -> None:
        config: DBOSConfig = {
            "name": "bench", "system_database_url": self.where, "application_version": "1", "log_level": "ERROR",
            "run_admin_server": False,
        }  # fmt: skip
        DBOS(config=config)
        DBOS.launch()
        await DBOS.register_queue_async("bench", worker_concurrency=concurrency, polling_interval_sec=0.02)

    async def open(self) -> None:
        run_dbos_database_migrations(self.where)
        self._client = DBOSClient(system_database_url=self.where)

    async def enqueue(self, job: str) -> None:
        assert self._client is not None
        options: EnqueueOptions = {"workflow_name": job, "queue_name": "bench", "app_version": "1"}
        await self._client.enqueue_async(options)

    async def left(self, at_most: int) -> int:
        with psycopg.connect(self.where, autocommit=True) as conn:
            row = conn.execute("SELECT count(*) FROM dbos.workflow_status WHERE status <> 'SUCCESS'").fetchone()
        return 0 if row is None else int(row[0])

    async def work(self, concurrency: int) -> None:
        await self._launch(concurrency)
        await base.for_ever()

    async def chain(self, count: int) -> float:
        await self._launch(1)
        return await asyncio.to_thread(_chain, count)

    async def close(self) -> None:
        if self._client is not None:
            self._client.destroy()
