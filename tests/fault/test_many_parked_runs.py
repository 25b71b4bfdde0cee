"""Runs parked by the hundred on one slot, their process killed: each goes on once, from where it was.

The long form, 1,000 runs: pytest tests/fault/test_many_parked_runs.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_runtime_core import RunStatus
from tests.fault.jobs.agents import open_runner
from tests.support.processes import Child, becomes, lines, until

log = logging.getLogger("fault")

HOUR = 3600.0


async def parked_and_killed(where: Path, count: int) -> None:
    places, effects = [str(where / "all.db")] * 3, where / "effects"
    how = {"places": places, "concurrency": 1, "poll": 0.2, "config": {"park_after": 0}}
    began = time.monotonic()
    async with open_runner(places) as runner:

        async def parked() -> bool:
            return len(await runner.runs(RunStatus.WAITING)) == count

        waits = ["sleep", "signal"] * (count // 2)
        runs = [
            await runner.submit(
                "parks", {"params": {"wait": wait, "seconds": HOUR, "effects": str(effects)}}, run_id=f"{wait} {i}"
            )
            for i, wait in enumerate(waits)
        ]
        with Child("worker", json.dumps(how)) as child:
            child.expect("ready")
            await asyncio.to_thread(until, left(effects, "before", count // 2), "half of the runs to begin")
            assert child.kill()
        with Child("worker", json.dumps(how)) as child:
            child.expect("ready")
            await becomes(parked, "all runs to be parked")
            assert child.kill()
        before = Counter(run for run, word in lines(effects))
        assert set(before) == {str(run) for run in runs}
        assert sum(before.values()) <= count + 1, "one slot, one kill: one step in flight may have run again"
        assert not any(word == "after" for _, word in lines(effects))

        # The same hour later for all of them.
        with Child("worker", json.dumps({**how, "ahead": HOUR + 60})) as child:
            child.expect("ready")
            for run, wait in zip(runs, waits, strict=True):
                if wait == "signal":
                    assert await runner.signal(run, "go", {"to": str(run)})
            await asyncio.to_thread(until, left(effects, "after", count), "all runs to go on", 120.0)
            for run, wait in zip(runs, waits, strict=True):
                result = await runner.wait(run, timeout=30)
                assert result.status is RunStatus.SUCCEEDED
                assert result.final_output["told"] == (None if wait == "sleep" else {"to": str(run)})
            child.process.terminate()
            assert await child.aended() == 0
        assert Counter(run for run, word in lines(effects) if word == "before") == before, "a recorded step ran again"
        after = Counter(run for run, word in lines(effects) if word == "after")
        assert set(after.values()) == {1}
        assert len(after) == count
        crashes = sum(info.attempt - 1 for info in await runner.runs())
        assert crashes <= 1, "a wake-up uses no attempt, a kill that of the run in the one slot"
        for run in runs[:: max(1, count // 60)]:
            kinds = Counter(event.event_type for event in await runner.event_bus.get_events(run))
            assert (kinds["run.resumed"], kinds["run.succeeded"]) == (1, 1)
    log.info("%d runs parked, killed and resumed in %.1f s", count, time.monotonic() - began)


def left(effects: Path, word: str, count: int) -> Callable[[], bool]:
    return lambda: sum(words[1] == word for words in lines(effects)) >= count


async def test_parked_runs_outlive_their_process_and_each_goes_on_once(tmp_path: Path) -> None:
    await parked_and_killed(tmp_path, 60)


@pytest.mark.slow
async def test_a_thousand_parked_runs(tmp_path: Path) -> None:
    await parked_and_killed(tmp_path, 1000)
