"""Cancel against complete: one ending each, whoever comes first, and everybody is told the truth.

The long form, 10,000 races on each engine: pytest tests/fault/test_races.py -m slow
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import TERMINAL, RunStatus
from tests.support.fault_runs import KINDS, consistent, eventually, settings, store, terminal_events, until_status

#: Seconds: much less than until the next beat, which would tell of a cancel too, or the end of what is cancelled.
SOON = 15.0
RACES = {"memory": 1000, "sqlite": 300, "redis": 300, "postgres": 300}


async def pause(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def moment(runner: AgentRunner, run_id: Any, n: int, chance: random.Random) -> None:
    """Before the run, after it, and most often about as long as it takes."""
    if n % 10 == 0:
        return
    if n % 10 == 1:
        await runner.wait(run_id, timeout=20)
    elif runner.backends.durable:
        await asyncio.sleep(chance.random() * 0.03)
    else:
        await pause(chance.randrange(120))


async def ended_once(runner: AgentRunner, run_id: Any) -> str:
    row = await runner.queue.require(run_id)
    assert row.status in TERMINAL
    assert await terminal_events(runner, run_id) == [f"run.{row.status}"]
    assert await runner.state_store.get_run_status(row.run_id) == row.status
    result = await runner.wait(run_id, timeout=5)
    assert result.status == row.status
    await consistent(runner, run_id)
    return row.status


@pytest.mark.parametrize("kind", KINDS)
async def test_cancel_against_complete(kind: str, tmp_path: Path) -> None:
    await cancel_against_complete(kind, tmp_path, RACES[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_cancel_against_complete_10000_times(kind: str, tmp_path: Path) -> None:
    await cancel_against_complete(kind, tmp_path, 10_000)


async def cancel_against_complete(kind: str, tmp_path: Path, races: int) -> None:
    chance = random.Random(18)
    async with store(kind, tmp_path) as here:

        async def work(ctx: Any) -> Any:
            await ctx.step("one", pause, ctx.params["turns"])
            await pause(ctx.params["more"])
            return "done"

        here.agent("a", work)
        runner = here.runner()
        working = asyncio.ensure_future(runner.run_loop(0.05, concurrency=16, handle_signals=False))
        seen = Counter[tuple[str, bool]]()

        async def race(n: int) -> None:
            turns = {"turns": chance.randrange(20), "more": chance.randrange(10)}
            run_id = await runner.submit("a", {"params": turns})
            await moment(runner, run_id, n, chance)
            told = await runner.cancel(run_id)
            status = (await runner.wait(run_id, timeout=20)).status
            assert status is not None
            seen[status.value, bool(told)] += 1
            assert await ended_once(runner, run_id) == status

        for start in range(0, races, 20):
            await asyncio.gather(*(race(n) for n in range(start, start + 20)))
        runner.stop()
        await working
        assert sum(seen.values()) == races
        # Nobody is told "too late" of a run that was cancelled; a request may come just too late to be heard.
        assert set(seen) <= {("cancelled", True), ("succeeded", False), ("succeeded", True)}
        assert seen["cancelled", True] > 0
        assert seen["succeeded", False] >= races // 10


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_that_comes_after_the_end_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends between the look at its row and the request: nothing is recorded, and so it is told."""
    async with store(kind, tmp_path) as here:
        gate = asyncio.Event()

        async def work(ctx: Any) -> None:
            await gate.wait()

        here.agent("a", work)
        runner = here.runner()
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())
        await until_status(runner, run_id, "running")
        children = runner.queue.children

        async def late(key: str) -> Any:
            gate.set()
            await working
            return await children(key)

        monkeypatch.setattr(runner.queue, "children", late)
        assert await runner.cancel(run_id) is False
        assert await ended_once(runner, run_id) == "succeeded"


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_in_each_state(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        stopped: list[str] = []

        async def code(ctx: Any) -> Any:
            try:
                if ctx.params.get("wait"):
                    return await ctx.wait_for_signal("go")
                return await ctx.step("long", asyncio.sleep, 30 if ctx.params.get("long") else 0)
            except asyncio.CancelledError:
                stopped.append("cancelled" if ctx.is_cancelled() else "parked")
                raise

        here.agent("a", code)
        runner = here.runner(settings(park_after=0))
        pending = await runner.submit("a")
        assert await runner.cancel(pending) is True
        assert await ended_once(runner, pending) == "cancelled"
        assert not await runner.run_once(), "no code of it runs"

        waiting = await runner.submit("a", {"params": {"wait": True}})
        assert await runner.run_once()
        assert await runner.cancel(waiting, wait=True) is RunStatus.CANCELLED
        assert await ended_once(runner, waiting) == "cancelled"

        running = await runner.submit("a", {"params": {"long": True}})
        working = asyncio.ensure_future(runner.run_once())
        await until_status(runner, running, "running")
        async with asyncio.timeout(SOON):
            assert await runner.cancel(running, wait=True) is RunStatus.CANCELLED
        await working
        assert await ended_once(runner, running) == "cancelled"
        assert stopped == ["parked", "cancelled"]

        ended = await runner.submit("a")
        assert await runner.run_once()
        assert await runner.cancel(ended) is False
        assert await runner.cancel(ended, wait=True) is RunStatus.SUCCEEDED
        for run_id in (pending, waiting, running):
            assert await runner.cancel(run_id) is False
            assert await runner.cancel(run_id, wait=True) is RunStatus.CANCELLED


@pytest.mark.parametrize("kind", KINDS)
async def test_an_orphan_is_cancelled_without_running_its_code(kind: str, tmp_path: Path) -> None:
    """No process executes it when it is asked to stop: `cancel` or its next claim ends it."""
    async with store(kind, tmp_path) as here:
        ran: list[int] = []

        async def code(ctx: Any) -> None:
            ran.append(1)

        here.agent("a", code)
        runner = here.runner()
        run_id = await runner.submit("a")
        await runner.queue.claim("gone", 0.001, agent_keys=["a"])
        assert await runner.cancel(run_id) is True

        async def is_over() -> bool:
            await runner.run_once()
            return (await runner.get_run(run_id)).status is RunStatus.CANCELLED

        await eventually(is_over)
        assert await ended_once(runner, run_id) == "cancelled"
        assert ran == []


@pytest.mark.parametrize("kind", KINDS)
async def test_the_queues_own_cancel_is_heard_in_each_generation(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", lambda ctx: asyncio.sleep(30))
        runner = here.runner()
        run_id = await runner.submit("a")
        for _ in range(3):
            working = asyncio.ensure_future(runner.run_once())
            await until_status(runner, run_id, "running")
            assert await runner.queue.cancel(run_id)
            async with asyncio.timeout(SOON):
                await working
            assert (await runner.get_run(run_id)).status is RunStatus.CANCELLED
            assert not await runner.queue.cancel(run_id)
            await runner.resume(run_id)


@pytest.mark.parametrize("kind", KINDS)
async def test_many_workers_claim_each_run_once(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        ran = Counter[str]()

        async def code(ctx: Any) -> None:
            ran[str(ctx.run_id)] += 1
            await asyncio.sleep(0)

        here.agent("a", code)
        runners = [here.runner(settings(worker_id=f"w{n}")) for n in range(4)]
        runs = [await runners[0].submit("a") for _ in range(100)]
        loops = [asyncio.ensure_future(r.run_loop(0.05, concurrency=4, handle_signals=False)) for r in runners]
        for run_id in runs:
            await runners[0].wait(run_id, timeout=20)
        for each in runners:
            each.stop()
        await asyncio.gather(*loops)
        assert ran == Counter(map(str, runs))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_signal_races_the_end(kind: str, tmp_path: Path) -> None:
    """Told True, it is in the mailbox of a run that was live then; told False, it is nowhere."""
    async with store(kind, tmp_path) as here:
        here.agent("a", lambda ctx: pause(ctx.params["turns"]))
        runner = here.runner()
        working = asyncio.ensure_future(runner.run_loop(0.05, concurrency=8, handle_signals=False))
        chance, seen = random.Random(3), Counter[bool]()

        async def race(n: int) -> None:
            run_id = await runner.submit("a", {"params": {"turns": chance.randrange(30)}})
            await moment(runner, run_id, n, chance)
            told = await runner.signal(run_id, "go")
            await runner.wait(run_id, timeout=20)
            seen[told] += 1
            assert len(await runner.queue.mail(str(run_id))) == int(told)

        for _ in range(10):
            await asyncio.gather(*(race(n) for n in range(20)))
        runner.stop()
        await working
        assert min(seen[True], seen[False]) >= 20
