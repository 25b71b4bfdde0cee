"""Workers that are killed inside model calls: a pool has spent in the end what the recorded calls cost.

The long form: pytest tests/fault/test_pool_kills.py -m slow
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core.queue.records import LIVE
from agent_runtime_core.registry import Registry
from tests.fault.pool_program import CALLS, MOST
from tests.support.backends import SERVERS
from tests.support.processes import Command

WORKERS = 3


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis),
                        pytest.param("postgres", marks=pytest.mark.postgres)])  # fmt: skip
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return str(tmp_path / "runs.db")


async def the_pool_is_exact(url: str, runs: int, kills: int) -> None:
    chance, expected = Random(kills), sum(3 + 10 + (7 * each + n) % 50 for n in range(runs) for each in range(CALLS))
    limit = expected + 4 * MOST  # the last calls have to wait for each other's reservations
    async with AgentRunner.open(url, registry=Registry()) as runner:
        with ExitStack() as stack:
            workers = [stack.enter_context(worker(url, limit)) for _ in range(WORKERS)]
            for n in range(runs):
                await runner.submit("spends", {"params": {"n": n}}, run_id=f"run {n}")
            for _ in range(kills):
                await until_spent(runner)
                await asyncio.sleep(chance.uniform(0, 0.4))
                number = chance.randrange(WORKERS)
                workers[number].send(signal.SIGKILL)
                workers[number] = stack.enter_context(worker(url, limit))
            async with asyncio.timeout(120):
                while await live(runner):
                    for pool in await runner.pools():
                        assert pool.left["tokens"] >= 0
                    await asyncio.sleep(0.05)
        results = [await runner.wait(f"run {n}") for n in range(runs)]
        [pool] = await runner.pools()
    assert {result.error and result.error.type for result in results} == {None}
    assert sum(result.usage["total_tokens"] for result in results) == expected == pool.spent["tokens"]
    assert pool.spent["requests"] == runs * CALLS
    assert pool.spent["usd"] == pytest.approx(sum(result.usage["cost_usd"] for result in results), abs=1e-7)
    assert pool.reserved == {"usd": 0, "tokens": 0, "requests": 0}


async def live(runner: AgentRunner) -> bool:
    return any(status in LIVE for status, _ in (await runner.queue.counts()).runs)


async def until_spent(runner: AgentRunner) -> None:
    """Until the workers make calls, or have made all of them."""
    async with asyncio.timeout(60):
        while not any(pool.reserved["requests"] for pool in await runner.pools()):
            if not await live(runner):
                return
            await asyncio.sleep(0.02)


def worker(url: str, tokens: int) -> Command:
    return Command("tests.fault.pool_program", url, tokens)


async def test_a_pool_is_exact_after_kills(url: str) -> None:
    await the_pool_is_exact(url, runs=12, kills=5)


@pytest.mark.slow
async def test_a_pool_is_exact_after_many_kills(url: str) -> None:
    await the_pool_is_exact(url, runs=100, kills=60)
