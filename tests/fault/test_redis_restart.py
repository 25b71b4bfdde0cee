"""A Redis that is killed and started again under load: what was acknowledged is there, and work goes on.

The long form, 10 times: pytest tests/fault/test_redis_restart.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import logging
import time
from random import Random
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.errors import UnknownRun
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.backends import open_url
from tests.support.fault_runs import Agent, settings, until
from tests.support.outage_load import SLOTS, Load
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.redis

log = logging.getLogger("fault")


async def restarted(times: int, **options: str) -> None:
    random, slowest = Random(times), 0.0
    with RedisServer(appendonly="yes", **options) as server:
        load = Load(server.url, server.url)
        working = [
            asyncio.create_task(each.run_loop(0.2, concurrency=SLOTS, handle_signals=False)) for each in load.runners
        ]
        submitting = asyncio.create_task(load.submit())
        for _ in range(times):
            before = len(load.acknowledged)
            await until(lambda: len(load.acknowledged) > before + 20)  # noqa: B023
            await asyncio.sleep(random.random() * 0.05)
            await asyncio.to_thread(server.write_out)
            server.kill()
            await asyncio.sleep(random.random() * 0.2)
            await asyncio.to_thread(server.restart)
            back, before = time.monotonic(), len(load.acknowledged)
            await until(lambda: len(load.acknowledged) > before)  # noqa: B023
            slowest = max(slowest, time.monotonic() - back)
        load.over = True
        await submitting
        await load.check()
        for each in load.runners:
            each.stop()
        await asyncio.gather(*working)
        attempts = [(await load.runners[0].get_run(run)).attempt for run in load.runs]
        for each in load.runners:
            await each.close()
    log.info(
        "%d x kill -9 of Redis (%s): %d runs, %d steps acknowledged, 0 lost, 0 ran again, %d attempts used, "
        "%d in flight ran again; work went on after at most %.0f ms",
        times, options, len(load.runs), len(load.acknowledged), sum(attempts) - len(attempts),
        sum(load.ran.values()) - len(load.ran), slowest * 1000,
    )  # fmt: skip
    assert slowest <= 5.0


FSYNC = pytest.mark.parametrize("appendfsync", ["always", "everysec"])


@FSYNC
async def test_what_was_acknowledged_outlives_a_kill_of_redis(appendfsync: str) -> None:
    await restarted(2, appendfsync=appendfsync)


@pytest.mark.slow
@FSYNC
async def test_10_kills_of_redis(appendfsync: str) -> None:
    await restarted(10, appendfsync=appendfsync)


async def test_claims_are_looked_at_when_redis_comes_back_without_them() -> None:
    """Nothing was kept on disk: those who held runs let go of them, long before their lease or a beat."""
    with RedisServer() as server:
        begun, stopped = asyncio.Event(), asyncio.Event()

        async def code(ctx: Any) -> None:
            begun.set()
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                stopped.set()
                raise

        agents = Registry()
        agents.register(Agent("a", code))
        queue, bus, state = open_url(server.url)
        runner = AgentRunner(queue, bus, state, settings(lease_ttl_seconds=60.0), registry=agents)
        run_id = await runner.submit("a")
        working = asyncio.create_task(runner.run_loop(60.0, handle_signals=False))
        await begun.wait()
        server.kill()
        await asyncio.to_thread(server.restart)
        began = time.monotonic()
        async with asyncio.timeout(5):
            await stopped.wait()
        log.info("a claim that was lost with its server was let go after %.0f ms", (time.monotonic() - began) * 1000)
        with pytest.raises(UnknownRun):
            await runner.get_run(run_id)
        runner.stop()
        await working
        await runner.close()


async def test_claims_that_redis_still_has_are_kept_through_its_restart() -> None:
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        gate = asyncio.Event()
        agents = Registry()
        agents.register(Agent("a", lambda ctx: ctx.step("wait", gate.wait)))
        queue, bus, state = open_url(server.url)
        runner = AgentRunner(queue, bus, state, settings(lease_ttl_seconds=60.0), registry=agents)
        run_id = await runner.submit("a")
        working = asyncio.create_task(runner.run_loop(0.2, handle_signals=False))
        await until(lambda: bool(runner.heartbeat._leased))
        await asyncio.to_thread(server.restart)
        gate.set()
        result = await runner.wait(run_id, timeout=10)
        assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": True})
        assert (await runner.get_run(run_id)).attempt == 1
        runner.stop()
        await working
        await runner.close()
