"""`agent-runtime tenant set` as a real process that gets SIGKILL at any moment, and is run again."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_runtime_core.queue.records import LIVE, RunFilter
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from tests.support.backends import POSTGRES, SERVERS
from tests.support.processes import PATIENCE, Command
from tests.support.runs import Script

PLAIN, TREES, LANES, KILLS = 60, 6, 4, 4


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue(f"{request.param}_url") if request.param in SERVERS else str(tmp_path / "runs.db")


async def tree(ctx: Any) -> Any:
    return [await ctx.call("leaf", {"n": n}) for n in range(2)]


async def leaf(ctx: Any) -> Any:
    return await ctx.step("count", lambda: ctx.input)


async def ask(ctx: Any) -> Any:
    return await ctx.approve("plan")


def opened(url: str) -> AgentRunner:
    registry = Registry()
    for agent in (Script(tree, "tree"), Script(leaf, "leaf"), Script(ask, "asker")):
        registry.register(agent)
    config = RunnerConfig(park_after=0, max_retries=1)
    return AgentRunner.open(url, config=config, registry=registry, persistence=None)


async def work(runner: AgentRunner) -> None:
    while await runner.run_once():
        pass


async def fill(runner: AgentRunner) -> None:
    for n in range(TREES):
        await runner.submit("tree", {}, run_id=f"tree-{n}")
        if n % 2:
            await work(runner)
    for n in range(LANES):  # the first one of a key waits, the others are behind it
        for m in range(3):
            await runner.submit("asker", {}, run_id=f"lane-{n}-{m}", concurrency_key=f"account-{n}")
    await work(runner)
    for n in range(PLAIN):
        await runner.submit("leaf", {}, run_id=f"plain-{n}", idempotency_key=f"once-{n}")


async def moved(runner: AgentRunner) -> int:
    return sum((await runner.queue.counts("acme")).runs.values())


def command(url: str) -> Command:
    return Command("agent_runtime_core", "tenant", "set", "acme", "--yes", "--json", "--url", url)


async def finished(url: str) -> dict[str, Any]:
    def act() -> dict[str, Any]:
        with command(url) as child:
            said = b""
            while line := child.poll_line(PATIENCE):
                said += line.encode()
            assert child.ended() == 0
        result: dict[str, Any] = json.loads(said)
        return result

    return await asyncio.to_thread(act)


async def test_it_is_killed_again_and_again_and_goes_on(url: str) -> None:
    async with opened(url) as runner:
        await fill(runner)
        before = {each.run_id: each for each in await runner.queue.find(RunFilter())}
        random, killed, count = Random(7), 0, 0
        for _ in range(KILLS):
            wanted = count + random.randint(1, len(before) // KILLS)
            with command(url) as child:
                while await moved(runner) < wanted and child.process.poll() is None:
                    continue
                child.send(signal.SIGKILL)
                ended = await child.aended()
            assert ended in (0, -signal.SIGKILL)
            killed += ended != 0
            assert await moved(runner) >= count, "what was moved stays"
            count = await moved(runner)
            rows = await runner.queue.find(RunFilter(concurrency_key="account-0"))
            assert len([each for each in rows if each.status == "waiting"]) == 1
        assert killed, "it was in the middle"
        told = await finished(url)
        assert (told["skipped"], told["taken"]) == ({}, {})
        assert told["runs"] + told["child_runs"] <= len(before) - count, "what was moved is not moved again"
        rows = await runner.queue.find(RunFilter())
        assert {each.run_id: each.with_values(tenant="") for each in rows} == before, "nothing else has changed"
        assert {each.tenant for each in rows} == {"acme"}
        assert sum((await runner.queue.counts("acme")).runs.values()) == len(rows)
        for each in before.values():
            if each.run_key is not None:
                assert (await runner.queue.require(each.run_key, "acme")).run_id == each.run_id
                again = await runner.submit(each.agent, {}, run_id=each.run_key, tenant="acme")
                assert str(again) == each.run_id
        assert str(await runner.submit("leaf", {}, idempotency_key="once-0", tenant="acme")) in before
        for _ in range(3):
            await work(runner)
            for waits in await runner.queue.find(RunFilter(statuses=("waiting",))):
                await runner.approve(waits.run_id, "plan")
        await work(runner)
        rows = await runner.queue.find(RunFilter())
        assert [each for each in rows if each.status in LIVE or each.tenant != "acme"] == []
        assert [each.agent for each in rows].count("leaf") == PLAIN + 2 * TREES, "no child run is repeated"
