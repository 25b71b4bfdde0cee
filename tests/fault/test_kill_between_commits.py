"""SIGKILL between each pair of commits of a run whose queue, events and state are on different engines.

The next claim closes what was left open: the run ends, followers end, no event is missing and none is there twice.

The long form, every arrangement and both sides of each commit: pytest tests/fault/test_kill_between_commits.py -m slow
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.events import Event
from tests.fault.jobs.agents import open_runner
from tests.support.processes import Child

log = logging.getLogger("fault")

STEPS = 3
AT_ONCE = 3
#: Commits there are at least: each step, the event in it and the one behind it, and each checkpoint is waited for.
FEWEST = 4 * STEPS
ONE_ENGINE = ("all", "all", "all")
THREE_ENGINES = ("queue", "events", "state")
RUN = UUID(int=7)


async def follow(runner: AgentRunner, run_id: UUID) -> list[Event]:
    return [event async for event in runner.stream(run_id)]


async def life_and_death(where: Path, files: tuple[str, str, str], when: str, n: int) -> int | None:
    """One run whose first process dies at its n-th commit; how many there were if it outlived them."""
    places = [str(where / f"{name}.db") for name in files]
    async with open_runner(places, park_after=0) as runner:
        await runner.submit("steps", {"params": {"n": STEPS, "say": True}}, run_id=RUN)
        following = asyncio.create_task(follow(runner, RUN))
        with Child("between", json.dumps(places), when, n) as child:
            assert await child.aline() == "ready"
            said = await asyncio.to_thread(child.poll_line, 30.0)
            assert await child.aended() in ((0, -9) if said is not None else (-9,))
        if said is None:
            await runner.run_once()
        result = await runner.wait(RUN, timeout=10)
        async with asyncio.timeout(10):
            seen = await following
        assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"out": [0, 1, 4]})
        assert await runner.state_store.get_run_status(RUN) == "succeeded"
        assert await runner.state_store.get_checkpoint(RUN) == {"i": STEPS - 1}
        stored = await runner.event_bus.get_events(RUN)
    check(stored, crashed=said is None)
    assert [e.sequence for e in seen] == [e.sequence for e in stored], "a follower saw it all, and its stream ended"
    return None if said is None else int(said)


def check(events: list[Event], *, crashed: bool) -> None:
    assert [event.sequence for event in events] == list(range(len(events)))
    once: Counter[tuple[Any, ...]] = Counter()
    attempts: Counter[tuple[Any, ...]] = Counter()
    for event in events:
        payload = event.payload
        if event.event_type in ("behind", "step.completed", "run.succeeded", "state.checkpoint"):
            about = payload.get("step_name", payload.get("i", payload.get("state", {}).get("i")))
            once[event.event_type, about] += 1
        elif event.event_type in ("step.started", "inside"):
            attempts[event.event_type, payload.get("step_name", payload.get("i"))] += 1
    kinds = {kind for kind, _ in once}
    assert {"behind", "step.completed", "run.succeeded"} < kinds
    assert set(once.values()) == {1}, f"there twice: {[k for k, n in once.items() if n > 1]}"
    assert len(once) == 3 * STEPS + 1, "one is missing"
    assert len(attempts) == 2 * STEPS
    assert sum(attempts.values()) <= 2 * STEPS + (2 if crashed else 0), "only the step in flight began again"
    started = sum(event.event_type == "run.started" for event in events)
    assert 1 <= started <= (2 if crashed else 1)
    assert events[-1].event_type == "run.succeeded"


async def at_each_commit(where: Path, files: tuple[str, str, str], whens: tuple[str, ...]) -> None:
    """A death at the first commit, the second, and so on, until there are none left to die at."""
    for when in whens:
        deaths, lived = 0, list[int | None]([None])
        # How many there are differs from life to life: what nobody waits for travels with others, or alone.
        for n in itertools.count(1, AT_ONCE):
            if None not in lived:
                break
            homes = [where / f"{when} {n + k}" for k in range(AT_ONCE)]
            for home in homes:
                home.mkdir()
            lived = await asyncio.gather(*(life_and_death(home, files, when, n + k) for k, home in enumerate(homes)))
            deaths += lived.count(None)
        log.info("%s: %d deaths %s a commit, of %s those who outlived it", "+".join(files), deaths, when, lived)
        assert deaths >= FEWEST


async def test_a_kill_between_commits_of_three_engines(tmp_path: Path) -> None:
    await at_each_commit(tmp_path, THREE_ENGINES, ("after",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "files",
    [ONE_ENGINE, ("queue", "rest", "rest"), ("most", "events", "most"), ("most", "most", "state"), THREE_ENGINES],
    ids="+".join,
)
async def test_a_kill_at_every_commit_of_every_arrangement(files: tuple[str, str, str], tmp_path: Path) -> None:
    await at_each_commit(tmp_path, files, ("before", "after"))
