"""A worker is stopped past the end of its lease and wakes up: whatever it still writes is refused, on every engine."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.context import Context
from agent_runtime_core.queue.row import RunRow, Settle
from tests.fault.children import Child, lines, until
from tests.fault.jobs.agents import open_runner
from tests.fault.jobs.fenced import context, writes

TABLES = ("arc_runs", "arc_mail", "arc_journal", "arc_head", "arc_events", "arc_state", "arc_fence", "effects")
ENGINES = pytest.mark.parametrize(
    "files",
    [("all", "all", "all"), ("queue", "rest", "rest"), ("most", "events", "most"), ("queue", "events", "state")],
    ids=["one engine", "queue apart", "events apart", "three engines"],
)


def stored(places: list[str]) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table in every file."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for place in sorted(set(places)):
        conn = sqlite3.connect(place)
        for table in TABLES:
            if conn.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                found[f"{place} {table}"] = conn.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
        conn.close()
    return found


async def taken_over(runner: AgentRunner, agent: str) -> RunRow:
    """The claim of another worker on the run, once its lease is over."""
    assert await runner.queue.claim_rows("new", 60, agent_keys=[agent]) == [], "a stopped process holds its lease"
    end = time.monotonic() + 10
    while time.monotonic() < end:
        rows = await runner.queue.claim_rows("new", 60, agent_keys=[agent])
        if rows:
            return rows[0]
        await asyncio.sleep(0.05)
    raise AssertionError("the lease of a stopped worker does not run out")


async def superseded(runner: AgentRunner, places: list[str], *, ended: bool) -> tuple[dict[str, str], str]:
    """What became of each write of a claim that lost its run while its process stood still."""
    await runner.submit("steps", {"params": {"n": 1}}, run_id=UUID(int=1))
    with Child("fenced", json.dumps(places)) as child:
        assert await child.aline() == "ready"
        child.stop()
        row = await taken_over(runner, "steps")
        ctx: Context = await context(runner, row)
        assert {name for name, _ in ctx.book.done} == {"first"}
        await ctx.step("first", lambda: 1)
        await ctx.step("second", lambda: 2)
        if ended:
            await ctx.book.ledger.settle(Settle(row.claim_id, "succeeded", runner.queue.clock.wall()))
        before = stored(places)
        child.send(signal.SIGCONT)
        child.tell("go")
        became = json.loads(await child.aline())
        assert await child.aended() == 0
    after = stored(places)
    changed = [table for table in before if before[table] != after.get(table)] + sorted(after.keys() - before.keys())
    assert changed == [], "a superseded claim changed something"
    return became, row.run_id


@ENGINES
@pytest.mark.parametrize("ended", [False, True], ids=["still held", "ended"])
async def test_every_write_of_a_worker_that_wakes_after_its_lease_is_refused(
    files: tuple[str, str, str], ended: bool, tmp_path: Path
) -> None:
    places = [str(tmp_path / f"{name}.db") for name in files]
    async with open_runner(places) as runner:
        became, run_id = await superseded(runner, places, ended=ended)
        answers = {"extend_lease": "False", "requeue": "False", "note": "'queued'", "status": "'queued'"}
        assert became == {name: answers.get(name, "LeaseLost") for name in became}
        assert len(became) == 19
        assert await runner.queue.children(run_id) == []


@ENGINES
async def test_the_same_writes_are_taken_from_the_claim_that_holds(files: tuple[str, str, str], tmp_path: Path) -> None:
    # So that the refusals above are due to the fence and to nothing else.
    places = [str(tmp_path / f"{name}.db") for name in files]
    ends = {"park", "approve", "settle", "end", "release", "requeue", "child"}
    async with open_runner(places) as runner:
        await runner.submit("steps", {"params": {"n": 1}}, run_id=UUID(int=1))
        [row] = await runner.queue.claim_rows("old", 60, agent_keys=["steps"])
        ctx = await context(runner, row)
        for name, write in writes(runner, row, ctx).items():
            if name not in ends:
                before = stored(places)
                await write()
                await runner.queue.commits.commit(None, [])
                for backend in runner.backends:
                    await backend.commits.commit(None, [])
                assert stored(places) != before, name
        await writes(runner, row, ctx)["end"]()
        assert (await runner.get_run(UUID(int=1))).status is RunStatus.FAILED


@ENGINES
async def test_a_worker_that_wakes_after_its_lease_stops_its_run(files: tuple[str, str, str], tmp_path: Path) -> None:
    places, effects = [str(tmp_path / f"{name}.db") for name in files], tmp_path / "effects"
    how = {"places": places, "config": {"lease_ttl_seconds": 1.0, "worker_id": "old"}}
    async with open_runner(places) as runner:
        run = await runner.submit("writer", {"params": {"effects": str(effects)}})
        with Child("worker", json.dumps(how)) as child:
            child.expect("ready")
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 1, "the run to write")
            child.stop()
            row = await taken_over(runner, "writer")
            ctx = await context(runner, row)
            assert ctx.book.done
            before = stored(places)
            child.send(signal.SIGCONT)
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 2, "the run to be stopped")
            child.process.terminate()
            assert await child.aended() == 0
        after = stored(places)
        assert [words[0] for words in lines(effects)] == ["writing", "stopped"]
        for table in before:
            if not table.endswith("arc_fence"):
                assert after[table] == before[table], table
        await ctx.book.ledger.settle(Settle(row.claim_id, "succeeded", runner.queue.clock.wall()))
        assert (await runner.get_run(run)).worker == "new"
