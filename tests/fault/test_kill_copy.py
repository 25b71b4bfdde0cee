"""`agent-runtime copy` as a real process that gets SIGKILL at any moment, and is run again."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_runtime_core.errors import StorageMoved
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.runner.moving import move_store
from agent_runtime_core.status import RunStatus
from tests.support.processes import PATIENCE, Child, Command
from tests.support.reencryption import Place
from tests.support.runs import Script

RUNS, STEPS, KILLS = 60, 4, 3


async def talk(ctx: Any) -> Any:
    for n in range(STEPS):
        await ctx.step(f"s{n}", lambda n=n: f"result {n}")
        await ctx.emit("my.event", {"n": n})
    return await ctx.wait_for_signal("answer") if ctx.input["params"]["waits"] else "done"


def opened(url: str) -> AgentRunner:
    registry = Registry()
    registry.register(Script(talk, "talker"))
    return AgentRunner.open(url, config=RunnerConfig(park_after=0, max_retries=1), registry=registry)


async def fill(url: str) -> None:
    async with opened(url) as runner:
        for n in range(RUNS):
            await runner.submit("talker", {"params": {"waits": n % 2 == 1}}, run_id=f"run-{n}")
        while await runner.run_once():
            pass
        for n in range(RUNS):
            await runner.persistence.memory.set(f"k{n}", n)


async def check(runner: AgentRunner) -> None:
    """Read everything, and continue the waiting runs."""
    for n in range(1, RUNS, 2):
        await runner.signal(f"run-{n}", "answer", n)
    while await runner.run_once():
        pass
    for n in range(RUNS):
        run = await runner.get_run(f"run-{n}")
        assert run.status is RunStatus.SUCCEEDED
        assert (await runner.wait(f"run-{n}", timeout=PATIENCE)).final_output["value"] == (n if n % 2 else "done")
        events = await runner.event_bus.get_events(run.run_id)
        assert [event.sequence for event in events] == [*range(len(events))]
        assert sum(event.event_type == "step.completed" for event in events) >= STEPS
        assert [event.payload["n"] for event in events if event.event_type == "my.event"] == [*range(STEPS)]
        assert await runner.persistence.memory.get(f"k{n}") == n


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Place, Place]:
    """An old and a new store."""
    server = (request.getfixturevalue("redis_server"), request.getfixturevalue("redis_url"))
    file, redis = Place("sqlite", tmp_path), Place("redis", tmp_path, server)
    return (file, redis) if request.param == "sqlite" else (redis, file)


def command(old: Place, new: Place) -> Command:
    return Command("agent_runtime_core", "copy", old.url, new.url, "--json")


@pytest.mark.redis
@pytest.mark.parametrize("places", ["sqlite", "redis"], indirect=True)
async def test_it_is_killed_again_and_again_and_the_result_is_equal(places: tuple[Place, Place]) -> None:
    old, new = places
    await fill(old.url)
    random = Random(1)
    for _ in range(KILLS):
        # Others of the same moment are on their way when one stands still.
        with Child("copy_part", random.randint(2, RUNS // KILLS), old.url, new.url) as child:
            await asyncio.to_thread(child.expect, "stands still")
            assert child.kill()
        async with opened(old.url) as runner:
            with pytest.raises(StorageMoved):
                await runner.submit("talker")
            assert (await runner.get_run("run-1")).status is RunStatus.WAITING
    with command(old, new) as child:
        said = "".join(iter(partial(child.poll_line, PATIENCE), None))
        assert child.ended() == 0
    assert json.loads(said)["counts"]["runs"] == RUNS
    async with opened(new.url) as runner:
        await check(runner)


OPEN_BEFORE = """
import asyncio, sys
from agent_runtime_core import AgentRunner
from agent_runtime_core.errors import StorageMoved
from agent_runtime_core.registry import Registry

async def main():
    async with AgentRunner.open(sys.argv[1], registry=Registry()) as runner:
        await runner.submit("nobody", run_id="before")
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await runner.submit("nobody", run_id="after")
        except StorageMoved as error:
            print("refused", error.to, flush=True)
        print("reads", (await runner.get_run("before")).status, flush=True)

asyncio.run(main())
"""


@pytest.mark.redis
@pytest.mark.parametrize("places", ["sqlite", "redis"], indirect=True)
async def test_a_process_that_had_the_store_open_before_is_refused(places: tuple[Place, Place], tmp_path: Path) -> None:
    old, new = places
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OPEN_BEFORE, old.url, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        async with opened(old.url) as source, opened(new.url) as target:
            move = await move_store(source, target)
            assert move.counts["runs"] == 1
        process.stdin.write(b"\n")
        assert await process.stdout.readline() == f"refused {move.target}\n".encode()
        assert await process.stdout.readline() == b"reads pending\n"
    finally:
        process.stdin.close()
        await process.wait()
