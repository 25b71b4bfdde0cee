"""Several processes on one file at once: each run claimed once, no writer turned away, a WAL that stays small.

The long forms: pytest tests/fault/test_many_processes.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_runtime_core import RunStatus
from tests.fault.jobs.agents import open_runner
from tests.support.processes import Child

log = logging.getLogger("fault")


async def claimed_once(where: Path, processes: int, count: int, place: str = "") -> None:
    places, effects = [place or str(where / "all.db")] * 3, where / "effects"
    how = json.dumps({"places": places, "concurrency": 4})
    async with open_runner(places) as runner:
        with ExitStack() as stack:
            children = [stack.enter_context(Child("worker", how)) for _ in range(processes)]
            for child in children:
                await child.aline()
            began = time.monotonic()
            runs = await asyncio.gather(
                *(runner.submit("noop", {"params": {"effects": str(effects)}}) for _ in range(count))
            )
            for run in runs:
                await runner.wait(run, timeout=60)
            took = time.monotonic() - began
            for child in children:
                child.process.terminate()
            assert [await child.aended() for child in children] == [0] * processes
        infos = await runner.runs(limit=count + 1)
    ran = [line.split() for line in effects.read_text().splitlines()]
    per_process = Counter(pid for _, pid in ran)
    log.info("%d runs by %d processes in %.1f s, shared as %s", count, processes, took, sorted(per_process.values()))
    assert Counter(run for run, _ in ran) == {str(run): 1 for run in runs}, "each exactly once"
    assert len(infos) == count
    assert {(info.status, info.attempt) for info in infos} == {(RunStatus.SUCCEEDED, 1)}


async def written_together(where: Path, processes: int, seconds: float) -> None:
    db = where / "all.db"
    wal = Path(f"{db}-wal")
    largest = 0
    with ExitStack() as stack:
        children = [stack.enter_context(Child("writes", db, number, seconds)) for number in range(processes)]
        for child in children:
            child.expect("ready")
        for child in children:
            child.tell("go")
        while any(child.process.poll() is None for child in children):
            if wal.exists():
                largest = max(largest, wal.stat().st_size)
            await asyncio.sleep(0.02)
        told = [json.loads(child.expect("wrote")) for child in children]
    counts = [each["writes"] for each in told]
    log.info(
        "%d processes wrote for %g s: %d commits (each %d to %d), slowest %.2f s, WAL at most %.1f MB",
        processes, seconds, sum(counts), min(counts), max(counts), max(t["slowest"] for t in told), largest / 2**20,
    )  # fmt: skip
    assert [each["errors"] for each in told] == [{}] * processes
    assert largest <= 64 << 20
    assert min(counts) > 0
    async with open_runner([db] * 3) as runner:
        for number, count in enumerate(counts):
            run = f"run {number}"
            assert await runner.state_store.get_checkpoint((await runner.get_run(run)).run_id) is not None
            events = await runner.event_bus.get_events(run)
            assert [event.sequence for event in events] == list(range(len(events)))
            assert sum(event.event_type == "tick" for event in events) == count // 4


async def test_each_of_many_runs_is_claimed_once(tmp_path: Path) -> None:
    await claimed_once(tmp_path, 4, 400)


async def test_many_processes_write_and_none_is_turned_away(tmp_path: Path) -> None:
    await written_together(tmp_path, 4, 2.0)


@pytest.mark.slow
async def test_8_processes_claim_10000_runs(tmp_path: Path) -> None:
    await claimed_once(tmp_path, 8, 10_000)


@pytest.mark.redis
async def test_each_of_many_runs_on_redis_is_claimed_once(tmp_path: Path, redis_url: str) -> None:
    await claimed_once(tmp_path, 4, 800, redis_url)


@pytest.mark.redis
@pytest.mark.slow
async def test_8_processes_claim_10000_runs_on_redis(tmp_path: Path, redis_url: str) -> None:
    await claimed_once(tmp_path, 8, 10_000, redis_url)


@pytest.mark.slow
async def test_8_processes_write_for_a_minute(tmp_path: Path) -> None:
    await written_together(tmp_path, 8, 60.0)
