"""SIGTERM under load: what runs is handed back at no cost, and another worker goes on with it at once.

The long form, 50 times: pytest tests/fault/test_sigterm.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from tests.fault.jobs.agents import open_runner
from tests.support.processes import Child, becomes, lines, until

log = logging.getLogger("fault")

SLOTS = 4


def worker(place: Path | str, grace: float, stack: ExitStack) -> Child:
    how = {"places": [str(place)] * 3, "concurrency": SLOTS, "config": {"grace_seconds": grace}}
    child = stack.enter_context(Child("worker", json.dumps(how)))
    child.expect("ready")
    return child


async def relay(where: Path, times: int, url: str = "") -> None:
    """Stop each of `times` workers while it is busy; the next worker then claims the runs that were released."""
    effects, place = where / "effects", url or where / "all.db"
    random = Random(times)
    runs: list[UUID] = []
    async with open_runner([place] * 3) as runner:

        async def top_up() -> None:
            waiting = len(await runner.runs(RunStatus.PENDING))
            for _ in range(3 * SLOTS - waiting):
                params = {"n": 4, "pause": 0.1, "effects": str(effects)}
                runs.append(await runner.submit("steps", {"params": params}))

        async def claimed(back: set[str]) -> bool:
            return all([(await runner.get_run(run)).status is not RunStatus.PENDING for run in back])

        slowest, handed = 0.0, 0
        await top_up()
        with ExitStack() as stack:
            now = await asyncio.to_thread(worker, place, 0.05, stack)
            for _ in range(times):
                await asyncio.to_thread(until, lambda: len(taken(effects, now)) >= SLOTS, "the worker to be busy")  # noqa: B023
                await asyncio.sleep(random.uniform(0, 0.3))
                now.process.terminate()
                assert await now.aended() == 0, "it stops by itself"
                statuses = {str(run): (await runner.get_run(run)).status for run in runs}
                assert RunStatus.RUNNING not in statuses.values(), "it holds nothing any more"
                back = {run for run in taken(effects, now) if statuses[run] is RunStatus.PENDING}
                handed += len(back)
                await top_up()
                now = await asyncio.to_thread(worker, place, 0.05, stack)
                ready = time.monotonic()
                # What was handed back came first, and so is claimed first.
                await becomes(lambda: claimed(back), "its successor to go on")  # noqa: B023
                slowest = max(slowest, time.monotonic() - ready)
            now.process.terminate()
            assert await now.aended() == 0
        await finish(runner, runs)
        for run in runs:
            info = await runner.get_run(run)
            assert (info.status, info.attempt) == (RunStatus.SUCCEEDED, 1), "no attempt is used"
            records = [r.name for r in await runner.state_store.records(run) if r.kind == "done"]
            assert records == ["s0", "s1", "s2", "s3"]
            assert (await runner.wait(run)).final_output == {"out": [0, 1, 4, 9]}
    log.info(
        "%d x SIGTERM: %d runs, %d handed back, 0 attempts used; the next worker had them after at most %.0f ms",
        times, len(runs), handed, slowest * 1000,
    )  # fmt: skip
    assert handed >= times


def taken(effects: Path, child: Child) -> dict[str, float]:
    """The runs a worker took, and when it began its first step of each."""
    found: dict[str, float] = {}
    for run, _, pid, at, _ in lines(effects):
        if pid == str(child.pid):
            found.setdefault(run, float(at))
    return found


async def finish(runner: AgentRunner, runs: list[UUID]) -> None:
    working = asyncio.create_task(runner.run_loop(concurrency=50, handle_signals=False))
    for run in runs:
        await runner.wait(run, timeout=30)
    runner.stop()
    await working


async def test_a_worker_told_to_stop_loses_nothing_and_uses_no_attempt(tmp_path: Path) -> None:
    await relay(tmp_path, 6)


@pytest.mark.redis
async def test_a_worker_on_redis_told_to_stop_loses_nothing_and_uses_no_attempt(tmp_path: Path, redis_url: str) -> None:
    await relay(tmp_path, 4, redis_url)


@pytest.mark.redis
@pytest.mark.slow
async def test_50_times_sigterm_on_redis(tmp_path: Path, redis_url: str) -> None:
    await relay(tmp_path, 50, redis_url)


@pytest.mark.slow
async def test_50_times_sigterm(tmp_path: Path) -> None:
    await relay(tmp_path, 50)


async def test_a_second_sigterm_skips_the_grace(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with open_runner([tmp_path / "all.db"] * 3) as runner:
        run = await runner.submit("sleeper", {"params": {"effects": str(effects)}})
        with ExitStack() as stack:
            child = worker(tmp_path / "all.db", 600.0, stack)
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 1, "the step to begin")
            child.process.terminate()
            assert child.poll_line(0.3) is None, "the first one waits for the running step"
            began = time.monotonic()
            assert await asyncio.to_thread(child.hurry) == 0
            log.info("the second SIGTERM ended it in %.0f ms", (time.monotonic() - began) * 1000)
        info = await runner.get_run(run)
    assert (info.status, info.attempt) == (RunStatus.PENDING, 1)
    assert [words[1] for words in lines(effects)] == ["in", "out"]


@pytest.mark.parametrize("where", ["claim_rows", "_next_claim"])
async def test_what_is_claimed_while_it_is_told_to_stop_is_not_left_lying(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_runner([tmp_path / "all.db"] * 3, grace_seconds=0) as runner:
        for _ in range(3):
            await runner.submit("steps", {"params": {"n": 1, "pause": 0.2 if where == "claim_rows" else 0}})
        claim: Callable[..., Any] = getattr(runner.queue if where == "claim_rows" else runner._worker, where)

        async def claimed(*args: Any, **kwargs: Any) -> Any:
            rows = await claim(*args, **kwargs)
            runner.stop()
            return rows

        def wanted() -> Any:
            want = claim()
            runner.stop()
            return want

        if where == "claim_rows":
            monkeypatch.setattr(runner.queue, where, claimed)
        else:
            monkeypatch.setattr(runner._worker, where, wanted)
        await runner.run_loop(handle_signals=False)
        infos = await runner.runs()
    ended = 0 if where == "claim_rows" else 1
    assert [(info.status.value, info.attempt) for info in infos] == [("succeeded", 1)] * ended + [("pending", 1)] * (
        3 - ended
    )
