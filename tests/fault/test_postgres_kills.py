"""Four worker processes pay, while they and their PostgreSQL are killed at random: each payment once, or in doubt.

The long form, 60 kills: pytest tests/fault/test_postgres_kills.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import signal
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.queue.records import LIVE
from tests.fault.jobs.agents import open_runner
from tests.support.postgres_servers import PostgresServer
from tests.support.processes import Child, lines

pytestmark = pytest.mark.postgres

log = logging.getLogger("fault")

WORKERS = 4
POLICIES = ("fail", "check", "retry")
#: A worker that is killed is found by its lease.
CONFIG = {"lease_ttl_seconds": 1.5, "max_crashes": 1000}


class Payments:
    """Runs that pay, four worker processes, and a server."""

    def __init__(self, server: PostgresServer, where: Path, kills: int) -> None:
        self.server, self.bank, self.kills = server, where / "bank", kills
        self.random = Random(kills)
        self.how = json.dumps({"places": [server.url] * 3, "concurrency": 4, "poll": 0.2, "config": CONFIG})
        self.orders: dict[str, str] = {}
        self.killed = Counter[str]()
        self.over = False

    def worker(self) -> Child:
        child = Child("worker", self.how)
        child.expect("ready")
        return child

    async def submit(self, runner: AgentRunner) -> None:
        for number in itertools.count():
            if self.over:
                return
            order, policy = f"order{number}", POLICIES[number % 3]
            params = {"bank": str(self.bank), "order": order, "policy": policy}
            while True:
                with contextlib.suppress(StorageBusy):
                    await runner.submit("pays", {"params": params}, run_id=order)
                    break
            self.orders[order] = policy
            await asyncio.sleep(0.02)

    async def go(self) -> None:
        async with open_runner([self.server.url] * 3, **CONFIG) as runner, contextlib.AsyncExitStack() as stack:
            workers = [stack.enter_context(await asyncio.to_thread(self.worker)) for _ in range(WORKERS)]
            submitting = asyncio.create_task(self.submit(runner))
            while self.killed.total() < self.kills:
                await asyncio.sleep(self.random.uniform(0.05, 0.5))
                assert [each.process.poll() for each in workers] == [None] * WORKERS, "a worker has died"
                if self.random.random() < 0.3:
                    self.killed["server"] += 1
                    self.server.kill()
                    await asyncio.sleep(self.random.random() * 0.5)
                    await asyncio.to_thread(self.server.start)
                else:
                    self.killed["worker"] += 1
                    number = self.random.randrange(WORKERS)
                    workers[number].kill()
                    workers[number] = stack.enter_context(await asyncio.to_thread(self.worker))
            self.over = True
            await submitting
            infos = [await runner.wait(order, timeout=60) for order in self.orders]
            rows = [await runner.queue.require(order) for order in self.orders]
            for each in workers:
                each.send(signal.SIGTERM)
            assert [await each.aended() for each in workers] == [0] * WORKERS
        self.check(infos, rows)

    def check(self, results: list[Any], rows: list[Any]) -> None:
        paid = Counter(word for (word,) in lines(self.bank))
        found = Counter[str]()
        assert set(paid) <= set(self.orders)
        for (order, policy), result, row in zip(self.orders.items(), results, rows, strict=True):
            status = result.status.value
            assert row.status not in LIVE
            found[f"{policy} {status} paid {paid[order]}"] += 1
            if policy == "fail":
                assert paid[order] == 1 if status == "succeeded" else paid[order] <= 1, f"{order} {status}"
                assert status == "succeeded" or "in doubt" in result.error.message or "unknown" in result.error.message
            else:
                assert status == "succeeded"
                assert paid[order] == 1 or (policy == "retry" and paid[order] > 1)
            assert status != "succeeded" or row.failures == 0, "an outage has used an attempt"
        log.info("%s: %s", dict(self.killed), dict(sorted(found.items())))
        assert found["fail succeeded paid 1"] > 0


async def test_payments_are_made_once_or_in_doubt(tmp_path: Path) -> None:
    with PostgresServer(fsync="on") as server:
        await Payments(server, tmp_path, 6).go()


@pytest.mark.slow
async def test_payments_are_made_once_or_in_doubt_after_60_kills(tmp_path: Path) -> None:
    with PostgresServer(fsync="on") as server:
        await Payments(server, tmp_path, 60).go()
