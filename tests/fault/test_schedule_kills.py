"""Workers that are killed while a schedule ticks each second: each tick fires exactly once.

The long form: pytest tests/fault/test_schedule_kills.py -m slow
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import Schedule
from tests.support.backends import SERVERS
from tests.support.processes import Command

WORKERS = 2


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis),
                        pytest.param("postgres", marks=pytest.mark.postgres)])  # fmt: skip
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return str(tmp_path / "runs.db")


async def each_tick_fires_once(url: str, kills: int, pause: float) -> None:
    chance = Random(kills)
    async with AgentRunner.open(url, registry=Registry()) as runner:
        await runner.schedules.put("tick", "note", every=1, catch_up="all", overlap="queue")
        with ExitStack() as stack:
            workers = [stack.enter_context(worker(url)) for _ in range(WORKERS)]
            for _ in range(1200):  # the workers start
                if (await stored(runner)).last_tick is not None:
                    break
                await asyncio.sleep(0.05)
            for _ in range(kills):
                await asyncio.sleep(chance.uniform(0, pause))
                number = chance.randrange(WORKERS)
                workers[number].send(signal.SIGKILL)
                workers[number] = stack.enter_context(worker(url))
            await runner.schedules.pause("tick")
            for _ in range(600):
                runs = await runner.runs(agent="note", limit=10_000)
                if all(run.status.value == "succeeded" for run in runs):
                    break
                await asyncio.sleep(0.05)
        schedule = await stored(runner)
    assert schedule.last_tick is not None
    ticks = sorted(run.metadata["scheduled_at"] for run in runs)
    assert {run.status.value for run in runs} == {"succeeded"}
    assert len(ticks) == len(set(ticks))
    first, last = (int(datetime.fromisoformat(ticks[each]).timestamp()) for each in (0, -1))
    assert len(ticks) == last - first + 1, "no second is missing"
    assert last == int(schedule.last_tick.timestamp())


async def stored(runner: AgentRunner) -> Schedule:
    found = await runner.schedules.get("tick")
    assert found is not None
    return found


def worker(url: str) -> Command:
    return Command("tests.fault.schedule_program", url)


async def test_each_tick_fires_once(url: str) -> None:
    await each_tick_fires_once(url, kills=4, pause=1.0)


@pytest.mark.slow
async def test_each_tick_fires_once_through_many_kills(url: str) -> None:
    await each_tick_fires_once(url, kills=60, pause=2.0)
