"""A worker is stopped past the end of its lease and wakes up: whatever it still writes is refused, on every engine.

More arrangements with Redis: pytest tests/fault/test_stopped_worker.py -m slow
"""

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
from agent_runtime_core._engines.redis.url import redis_place
from agent_runtime_core._execution.context import Context
from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.queue.records import RunRow, RunUpdate
from tests.fault.jobs.agents import open_runner
from tests.fault.jobs.fenced import context, writes
from tests.support.processes import Child, committing, lines, until
from tests.support.redis_protocol import Link

TABLES = (
    "arc_runs",
    "arc_mail",
    "arc_journal",
    "arc_journal_numbers",
    "arc_head",
    "arc_events",
    "arc_state",
    "arc_carried",
    "effects",
)

ON_SQLITE = {
    "one engine": ("all", "all", "all"),
    "queue apart": ("queue", "rest", "rest"),
    "events apart": ("most", "events", "most"),
    "three engines": ("queue", "events", "state"),
}
WITH_REDIS = {
    "redis": ("redis", "redis", "redis"),
    "queue on redis": ("redis", "rest", "rest"),
    "queue on sqlite": ("queue", "redis", "redis"),
}
MORE_WITH_REDIS = {
    "events on redis": ("most", "redis", "most"),
    "state on redis": ("most", "most", "redis"),
    "three of redis": ("redis", "redis-1", "redis-2"),
}
ENGINES = pytest.mark.parametrize(
    "files",
    [
        *(pytest.param(files, id=name) for name, files in ON_SQLITE.items()),
        *(pytest.param(files, id=name, marks=pytest.mark.redis) for name, files in WITH_REDIS.items()),
        *(
            pytest.param(files, id=name, marks=[pytest.mark.redis, pytest.mark.slow])
            for name, files in MORE_WITH_REDIS.items()
        ),
    ],
)


@pytest.fixture
def places(files: tuple[str, str, str], tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    """The files and URLs of those names."""

    def place(name: str) -> str:
        if name.startswith("redis"):
            return f"{request.getfixturevalue('redis_url')}-{name}"
        return str(tmp_path / f"{name}.db")

    return [place(name) for name in files]


def kept(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """What is under each key of that prefix."""
    place = redis_place(url)
    with Link(place.port) as link:
        return {
            f"{url} {key.decode().rpartition('}:')[2]}": [(link.ask("DUMP", key),)]
            for key in link.ask("KEYS", f"{place.tag}:*")
        }


def stored(places: list[str]) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table in every file, and every key on every server."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for place in sorted(set(places)):
        if place.startswith("redis://"):
            found |= kept(place)
            continue
        conn = sqlite3.connect(place)
        for table in TABLES:
            if conn.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                found[f"{place} {table}"] = conn.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
        conn.close()
    return found


async def taken_over(runner: AgentRunner, agent: str) -> RunRow:
    """The claim of another worker on the run, once its lease is over."""
    [run] = await runner.runs(agent=agent)
    over = (await runner.queue.require(run.run_id)).lease_until
    end = time.monotonic() + 10
    while time.monotonic() < end:
        rows = await runner.queue.claim_rows("new", 60, agent_keys=[agent])
        if rows:
            # Leases on Redis go by its server's time, which is that of this machine.
            assert (runner.queue.lease_now() or time.time()) >= over, "a stopped process holds its lease"
            return rows[0]
        await asyncio.sleep(0.05)
    raise AssertionError("the lease of a stopped worker does not run out")


def refused(child: Child, places: list[str]) -> None:
    """Let it try every write, and find nothing changed."""
    before = stored(places)
    child.tell("go")
    became = json.loads(child.line())
    after = stored(places)
    changed = [table for table in before if before[table] != after.get(table)] + sorted(after.keys() - before.keys())
    assert changed == [], "a superseded claim changed something"
    answers = {"extend_lease": "False", "requeue": "False", "note": "'queued'", "status": "'queued'"}
    if places[2].startswith("redis://"):
        assert became.pop("transaction").startswith("NotSupported")
        became["transaction"] = "LeaseLost"
    assert became == {name: answers.get(name, "LeaseLost") for name in became}
    assert len(became) == 19


@ENGINES
async def test_every_write_of_a_worker_that_wakes_after_its_lease_is_refused(places: list[str]) -> None:
    async with open_runner(places) as runner:
        await runner.submit("steps", {"params": {"n": 1}}, run_id=UUID(int=1))
        with Child("fenced", json.dumps(places)) as child:
            assert await child.aline() == "ready"
            child.stop()
            row = await taken_over(runner, "steps")
            ctx: Context = await context(runner, row)
            assert {name for name, _ in ctx.journal.view.completed} == {"first"}
            await ctx.step("first", lambda: 1)
            await ctx.step("second", lambda: 2)
            child.send(signal.SIGCONT)
            await asyncio.to_thread(refused, child, places)
            await ctx.journal.writer.update_run(RunUpdate(row.claim_id, "succeeded", runner.queue.clock.wall()))
            await asyncio.to_thread(refused, child, places)
        assert await runner.queue.children(row.run_id) == []


@ENGINES
async def test_the_same_writes_are_taken_from_the_claim_that_holds(places: list[str]) -> None:
    # So that the refusals above are due to the fence and to nothing else.
    ends = {"park", "approve", "settle", "end", "release", "requeue", "child"}
    if places[0] == places[2] and not places[0].startswith("redis://"):
        ends.add("status")  # the row of the run has it
    async with open_runner(places) as runner:
        await runner.submit("steps", {"params": {"n": 1}}, run_id=UUID(int=1))
        [row] = await runner.queue.claim_rows("old", 60, agent_keys=["steps"])
        ctx = await context(runner, row)
        for name, write in writes(runner, row, ctx).items():
            if name not in ends and not (name == "transaction" and places[2].startswith("redis://")):
                before = stored(places)
                await write()
                await runner.queue.commits.commit(None, [])
                for backend in runner.backends:
                    await backend.commits.commit(None, [])
                assert stored(places) != before, name
        await writes(runner, row, ctx)["end"]()
        assert (await runner.get_run(UUID(int=1))).status is RunStatus.FAILED


@ENGINES
async def test_a_worker_that_wakes_after_its_lease_stops_its_run(places: list[str], tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    how = {"places": places, "config": {"lease_ttl_seconds": 1.5, "worker_id": "old"}}
    async with open_runner(places) as runner:
        run = await runner.submit("writer", {"params": {"effects": str(effects)}})
        with Child("worker", json.dumps(how)) as child:
            child.expect("ready")
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 1, "the run to write")
            child.stop_between_commits(*places)
            row = await taken_over(runner, "writer")
            ctx = await context(runner, row)
            assert ctx.journal.view.completed
            before = stored(places)
            child.send(signal.SIGCONT)
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 2, "the run to be stopped")
            child.process.terminate()
            assert await child.aended() == 0
        after = stored(places)
        assert [words[0] for words in lines(effects)] == ["writing", "stopped"]
        for table in before:
            if not table.endswith(("arc_carried", " fence", "processes", " present")):
                assert after[table] == before[table], table
        await ctx.journal.writer.update_run(RunUpdate(row.claim_id, "succeeded", runner.queue.clock.wall()))
        assert (await runner.get_run(run)).worker == "new"


async def test_a_worker_stopped_inside_a_commit_costs_others_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, effects = [str(tmp_path / "all.db")] * 3, tmp_path / "effects"
    async with open_runner(places) as runner:
        run = await runner.submit("writer", {"params": {"effects": str(effects)}})
        with Child("worker", json.dumps({"places": places})) as child:
            child.expect("ready")
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 1, "the run to write")
            monkeypatch.setattr(runner.queue.commits.writer.committer, "timeout", 0.3)  # type: ignore[attr-defined]
            while True:
                child.stop()
                if committing(places):
                    break
                child.send(signal.SIGCONT)
                await asyncio.sleep(0.003)
            with pytest.raises(StorageBusy):
                await runner.submit("noop", {}, run_id="again")
            events = await runner.event_bus.get_events(run)
            assert len(events) > 3, "reading goes on"
            monkeypatch.undo()
            assert child.kill()
        await runner.submit("noop", {}, run_id="again")
        assert len(await runner.runs(agent="noop")) == 1, "repeating what was not answered is safe"
        assert (await runner.queue.claim_rows("new", 60, agent_keys=["writer"]))[0].run_id == str(run)


async def test_a_process_that_stands_still_in_a_commit_makes_others_busy_until_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "all.db"
    monkeypatch.setattr("agent_runtime_core._engines.sqlite.engine.COMMIT_TIMEOUT", 0.5)
    here = open_runner([str(db)] * 3)
    run_id = await here.submit("noop", {})
    with Child("standing", db) as child:
        assert child.line() == "inside"
        engine: Any = here.queue.commits
        engine.writer.committer.timeout = 0.5
        async with asyncio.timeout(20):
            with pytest.raises(StorageBusy):
                await here.submit("noop", {})
            assert (await here.get_run(run_id)).status == RunStatus.PENDING, "it can be read"
            await here.close()
        with pytest.raises(StorageBusy, match="whether it is suspended"):
            open_runner([str(db)] * 3)
        child.process.kill()
        child.process.wait()
    # `close` left the connection to a thread that was in a commit. Python 3.13 reports connections that are not closed.
    await asyncio.to_thread(engine.writer._thread.join)
    engine.file.writing.close()
    async with open_runner([str(db)] * 3) as again:
        await again.submit("noop", {})
        assert await again.run_once()
        assert await again.run_once()
