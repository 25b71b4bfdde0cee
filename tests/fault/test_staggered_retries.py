"""Runs that one outage puts off together do not come back together.

They come back in a window that begins when they may and lasts a fifth of the time until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import ProviderUnavailable, RateLimited, UnknownEncryptionKey
from agent_runtime_core.llm._retries import Breakers, Key
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.runner.claim import OUTAGE_DELAY
from agent_runtime_core.runner.execution import RunExecution
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import settings, store

RUNS = 300
SLICES = 10
KEY: Key = ("openai", "https://api.example/v1", "gpt-4o")


class Outage:
    """A provider that is down until it is `over`, as those notice who ask it."""

    over = False

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def error(self) -> Exception:
        return ProviderUnavailable("down", status=503)

    def ask(self) -> None:
        if not self.over:
            raise self.error()


class Circuit(Outage):
    """That of a client opened before any of the runs asked."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.breakers = Breakers(clock)
        for _ in range(5):
            self.breakers.enter(KEY).failed(self.error())

    def ask(self) -> None:
        self.breakers.enter(KEY).answered()


class Limit(Outage):
    def error(self) -> Exception:
        return RateLimited("slow down", status=429, retry_after=90.0)


OUTAGES = [
    pytest.param(Circuit, settings(max_retries=1), 30.0, id="an open circuit"),
    pytest.param(Limit, settings(max_retries=1), 90.0, id="a rate limit"),
]


def apart(waits: Sequence[float], least: float) -> None:
    """These waits are spread over their whole window, and nowhere crowded."""
    window = least * 0.2
    late = sorted(wait - least for wait in waits)
    assert late[0] >= -1e-6, "too early"
    assert late[-1] <= window + 1e-6
    assert late[-1] - late[0] >= window * 0.8
    shares = [sum(n <= each / window * SLICES < n + 1 for each in late) for n in range(SLICES)]
    assert min(shares) > 0
    assert max(shares) <= 3 * len(waits) / SLICES


async def worked_off(runner: AgentRunner) -> int:
    """How many runs could be claimed now, and were."""
    count = 0
    while await runner.run_once():
        count += 1
    return count


@pytest.mark.parametrize(("kind", "config", "least"), OUTAGES)
async def test_runs_that_workers_put_off(
    kind: type[Outage], config: RunnerConfig, least: float, tmp_path: Path
) -> None:
    clock = VirtualClock()
    outage = kind(clock)

    async def code(ctx: Any) -> None:
        outage.ask()

    async with store("memory", tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner(config)
        ids = [await runner.submit("a") for _ in range(RUNS)]
        assert await worked_off(runner) == RUNS
        apart([(await runner.queue.require(each)).due_at - clock.wall() for each in ids], least)
        outage.over = True
        clock.advance(least * 0.999)
        assert await worked_off(runner) == 0
        came = []
        for _ in range(SLICES + 1):
            clock.advance(least * 0.2 / SLICES)
            came.append(await worked_off(runner))
        assert sum(came) == RUNS
        assert max(came) <= 3 * RUNS / SLICES
        assert {(await runner.get_run(each)).status.value for each in ids} == {"succeeded"}


async def test_runs_that_this_process_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(drive: RunExecution) -> Any:
        raise UnknownEncryptionKey("k1", "journal of a run")

    async def code(ctx: Any) -> None: ...

    clock = VirtualClock()
    async with store("memory", tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner()
        ids = [await runner.submit("a") for _ in range(RUNS)]
        monkeypatch.setattr(RunExecution, "_run", away)
        for _ in ids:
            with pytest.raises(UnknownEncryptionKey):
                await runner.run_once()
        apart([(await runner.queue.require(each)).due_at - clock.wall() for each in ids], OUTAGE_DELAY)


class Noting(VirtualClock):
    """Has a list of the pauses that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await super().sleep(seconds)


@pytest.mark.parametrize(("kind", "config", "least"), OUTAGES)
async def test_runs_that_wait_in_place(kind: type[Outage], config: RunnerConfig, least: float, tmp_path: Path) -> None:
    clock = Noting()
    outage = kind(clock)

    async def code(ctx: Any) -> None:
        outage.ask()

    async with store("memory", tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner(config)
        going = [asyncio.ensure_future(runner.execute("a", f"r{n}")) for n in range(RUNS)]
        await clock.until_sleeping(RUNS)
        apart(clock.pauses, least)
        outage.over = True
        clock.advance(least * 1.21)
        assert {result.status for result in await asyncio.gather(*going)} == {"succeeded"}
