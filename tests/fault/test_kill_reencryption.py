"""`agent-runtime reencrypt` as a real process that gets SIGKILL or SIGINT at any moment, and is run again."""

from __future__ import annotations

import asyncio
import json
import signal
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from tests.support.processes import PATIENCE, ROOT, Command, until
from tests.support.redis_servers import RedisServer
from tests.support.reencryption import BOTH, CANARY, NEW, OLD, Place
from tests.support.runs import Script

RUNS, STEPS = 16, 4
KILLS = 4


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("AGENT_RUNTIME_PAYLOAD_CODEC", "tests.support.reencryption:BOTH")
    if request.param == "sqlite":
        return Place("sqlite", tmp_path)
    server: RedisServer = request.getfixturevalue("redis_server")
    return Place("redis", tmp_path, (server, request.getfixturevalue("redis_url")))


async def talk(ctx: Any) -> Any:
    for n in range(STEPS):
        await ctx.step(f"s{n}", lambda: CANARY)
        await ctx.emit("my.event", {"text": CANARY, "n": n})
    await ctx.checkpoint({"at": CANARY})
    return await ctx.wait_for_signal("answer") if ctx.input["waits"] else CANARY


AGENT = Script(talk, "talker")


async def fill(place: Place) -> None:
    async with place.runner(OLD, AGENT) as runner:
        for n in range(RUNS):
            await runner.submit("talker", {"text": CANARY, "waits": n % 2 == 1}, run_id=f"run-{n}")
            await runner.run_once()
            await runner.persistence.memory.set(f"k{n}", CANARY)


async def check(runner: AgentRunner) -> None:
    """Read everything, which is partly encrypted with one key and partly with the other."""
    for n in range(RUNS):
        run = await runner.get_run(f"run-{n}")
        assert run.input["text"] == CANARY
        assert run.status is (RunStatus.WAITING if n % 2 else RunStatus.SUCCEEDED)
        events = await runner.event_bus.get_events(run.run_id)
        assert [event.sequence for event in events] == [*range(len(events))]
        assert [event.payload["n"] for event in events if event.event_type == "my.event"] == [*range(STEPS)]
        assert await runner.state_store.get_checkpoint(run.run_id) == {"at": CANARY}
        assert len(await runner.state_store.records(run.run_id)) >= STEPS
        assert await runner.persistence.memory.get(f"k{n}") == CANARY


def command(place: Place) -> Command:
    return Command("agent_runtime_core", "reencrypt", place.url, "--batch", 1, "--agent-path", ROOT, "--json")


def finished(place: Place) -> dict[str, Any]:
    with command(place) as child:
        said = b""
        while line := child.poll_line(PATIENCE):
            said += line.encode()
        assert child.ended() == 0
    result: dict[str, Any] = json.loads(said)
    return result


def reached(place: Place, child: Command, wanted: int) -> bool:
    return place.stored().count("arc1.new.") >= wanted or child.process.poll() is not None


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("sqlite", signal.SIGKILL),
        pytest.param("sqlite", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("redis", signal.SIGKILL, marks=[pytest.mark.redis, pytest.mark.slow]),
        pytest.param("redis", signal.SIGINT, marks=pytest.mark.redis),
    ],
    indirect=["place"],
)
async def test_it_is_killed_again_and_again_and_goes_on(place: Place, number: signal.Signals) -> None:
    await fill(place)
    total = place.stored().count("arc1.")
    random, killed = Random(int(number)), 0
    for kill in range(KILLS):
        before = place.stored().count("arc1.new.")
        if before == total:
            break  # a signal at the start of the interpreter has another exit code
        wanted = min(before + random.randint(1, total // (2 * KILLS)), total)
        with command(place) as child:
            await asyncio.to_thread(until, partial(reached, place, child, wanted), "it encrypts")
            child.send(number)
            ended = await child.aended()
        assert ended in (0, -number, 130 if number == signal.SIGINT else 0), (
            "a SIGINT may arrive outside of the command"
        )
        killed += ended != 0
        assert place.stored().count("arc1.") == total
        assert place.stored().count("arc1.new.") >= before, kill
        async with place.runner(BOTH, AGENT) as runner:
            await check(runner)
    assert killed, "it was in the middle"
    before = place.stored().count("arc1.old.")
    done = await asyncio.to_thread(finished, place)
    assert done["texts"] <= before, "what was encrypted is not encrypted again"
    assert (done["keys"], done["skipped"], done["runs"]) == ({"old": 0, "new": total}, [], RUNS)
    assert "arc1.old." not in place.stored()
    async with place.runner(NEW, AGENT) as runner:
        await check(runner)
        for n in range(1, RUNS, 2):
            await runner.signal(f"run-{n}", "answer", CANARY)
        while await runner.run_once():
            pass
        for n in range(RUNS):
            assert (await runner.wait(f"run-{n}", timeout=PATIENCE)).final_output["value"] == CANARY
