"""Runs through a queue on SQLite: how fast a worker drains it, and that a claim costs the same at any length."""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from agent_runtime_core._engines.base import Op
from agent_runtime_core.config import configure
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.queue import get_queue
from agent_runtime_core.queue.base import RunQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner

from .floor import GroupCommit, Line, Size, connect, in_turns

DRAIN = {1: 1_800.0, 16: 5_000.0}  # runs a second at that concurrency
FLAT = 1.2
MANY, FEW = 100_000, 100
PROCESSES = 4


class NoOp(AgentRuntime):
    key = "no-op"

    def __init__(self) -> None:
        self.runs, self.last, self.runner = 0, 0, None

    async def run(self, ctx: RunContext) -> RunResult:
        self.runs += 1
        if self.runs == self.last and self.runner is not None:
            self.runner.stop()
        return RunResult()

    runner: AgentRunner | None


async def _enqueue(queue: RunQueue, agent: str, count: int, priority: int = 0) -> None:
    commits = queue.commits
    for start in range(0, count, 1000):
        new = [queue.new_row(None, agent, {}, priority=priority) for _ in range(min(1000, count - start))]
        await commits.commit(None, [Op("queue.insert", (row,)) for row in new])


async def _drain(path: Path, concurrency: int, count: int) -> float:
    agent, registry = NoOp(), Registry()
    registry.register(agent)
    async with AgentRunner.open(path, registry=registry) as runner:
        agent.runner, agent.last = runner, count
        await _enqueue(runner.queue, agent.key, count)
        since = time.perf_counter()
        await runner.run_loop(concurrency=concurrency, handle_signals=False)
        took = time.perf_counter() - since
        left = [info for info in await runner.runs(limit=count + 1) if info.status != "succeeded"]
        if left or agent.runs != count:
            raise AssertionError(f"{agent.runs} of {count} ran, {len(left)} did not succeed: {left[:1]}")
    return count / took


_CLAIM = (
    "UPDATE run SET status = 'running', claim = ? WHERE n = "
    "(SELECT n FROM run WHERE status = 'pending' ORDER BY n LIMIT 1) RETURNING n"
)
_DONE = "UPDATE run SET status = 'succeeded' WHERE n = ? AND claim = ?"


def _fill(path: Path, count: int) -> sqlite3.Connection:
    """A table of bare runs that wait."""
    conn = connect(path, "FULL")
    conn.execute("CREATE TABLE run (n INTEGER PRIMARY KEY, status TEXT, claim TEXT)")
    conn.execute("CREATE INDEX ready ON run (n) WHERE status = 'pending'")
    conn.execute("BEGIN")
    conn.executemany("INSERT INTO run VALUES (NULL, 'pending', '')", [()] * count)
    conn.execute("COMMIT")
    return conn


def _one_by_one(path: Path, count: int) -> float:
    """Runs a second of a bare claim and a fenced end, one commit each."""
    conn = _fill(path, count)
    since = time.perf_counter()
    for number in range(count):
        claim = f"claim-{number}"
        n = conn.execute(_CLAIM, (claim,)).fetchone()[0]
        conn.execute(_DONE, (n, claim))
    took = time.perf_counter() - since
    conn.close()
    return count / took


async def _in_groups(path: Path, count: int, tasks: int) -> float:
    """The same by so many tasks at once, through one writing thread."""
    _fill(path, count).close()
    commits = GroupCommit(path, "FULL")

    async def work(number: int) -> None:
        claim = f"claim-{number}"
        while run := await commits.execute(_CLAIM, claim):
            await commits.execute(_DONE, *run, claim)

    since = time.perf_counter()
    await asyncio.gather(*map(work, range(tasks)))
    took = time.perf_counter() - since
    commits.close()
    return count / took


def drain(size: Size) -> Iterator[Line]:
    configure(durability="full")
    count = size.of(2000, 20)

    def ours(concurrency: int) -> float:
        with size.file() as path:
            return asyncio.run(_drain(path, concurrency, count))

    def floor(concurrency: int) -> float:
        with size.file() as path:
            return _one_by_one(path, count) if concurrency == 1 else asyncio.run(_in_groups(path, count, concurrency))

    found = in_turns(size.rounds(5), *(lambda of=of, c=c: of(c) for c in DRAIN for of in (ours, floor)))
    for (concurrency, bar), rate, bare in zip(DRAIN.items(), found[::2], found[1::2], strict=True):
        how = "one at a time" if concurrency == 1 else f"{concurrency} at once in groups"
        note = f"beside: a bare claim and end, two commits, {how}"
        least = None if size.tiny else bar
        yield Line(f"drain FULL, concurrency {concurrency}", rate, "runs/s", least=least, beside=bare, note=note)


_WORKER = """
import asyncio, sys, time
from agent_runtime_core.interfaces import AgentRuntime, RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner

class NoOp(AgentRuntime):
    key = "no-op"
    async def run(self, ctx):
        return RunResult()

async def main(path):
    registry = Registry()
    registry.register(NoOp())
    async with AgentRunner.open(path, registry=registry) as runner:
        print("ready", flush=True)
        sys.stdin.readline()
        await runner.run_loop(concurrency=16)

asyncio.run(main(sys.argv[1]))
"""


def _until_drained(path: Path) -> None:
    conn = sqlite3.connect(path)
    while conn.execute("SELECT count(*) FROM arc_runs WHERE status <> 'succeeded'").fetchone()[0]:
        time.sleep(0.01)
    conn.close()


def _drain_with(path: Path, processes: int, count: int) -> float:
    async def fill_and_watch() -> float:
        queue = get_queue("sqlite", path=path)
        try:
            await _enqueue(queue, "no-op", count)
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write(b"go\n")
                worker.stdin.flush()
            since = time.perf_counter()
            await asyncio.to_thread(_until_drained, path)
            return count / (time.perf_counter() - since)
        finally:
            await queue.close()

    workers = [
        subprocess.Popen([sys.executable, "-c", _WORKER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            if worker.stdout.readline() != b"ready\n":
                raise AssertionError(f"a worker did not start: {worker.wait()}")
        return asyncio.run(fill_and_watch())
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.communicate()


def processes(size: Size) -> Iterator[Line]:
    configure(durability="full")
    count, many = size.of(4000, 20), size.of(PROCESSES, 2)

    def with_(number: int) -> float:
        with size.file() as path:
            return _drain_with(path, number, count)

    one, more = in_turns(size.rounds(3), lambda: with_(1), lambda: with_(many))
    yield Line(f"drain FULL by {many} processes of 16 against one", more, "runs/s", one, least=1.0)


async def _claims(short: Path, long: Path, size: Size, *, unknown: bool) -> tuple[float, float]:
    """Median milliseconds of a claim on each file, in turns."""
    few, many = size.of(FEW, 20), size.of(MANY, 40)
    a, b = (get_queue("sqlite", path=path, durability="normal") for path in (short, long))
    try:
        taken: dict[RunQueue, list[float]] = {a: [], b: []}
        await _enqueue(a, "ours", few)
        if unknown:
            # Of greater priority, so that a claim that walks the queue meets them all first.
            await _enqueue(b, "theirs", many, priority=5)
            await _enqueue(b, "ours", few)
        else:
            await _enqueue(b, "ours", many)
        for number in range(few - 5):
            for queue in (a, b) if number % 2 else (b, a):
                since = time.perf_counter()
                run = await queue.claim("bench", agent_keys=["ours"])
                taken[queue].append(time.perf_counter() - since)
                assert run is not None
                await queue.release(run.run_id, "bench", True)
                await _enqueue(queue, "ours", 1)
        return statistics.median(taken[a]) * 1000, statistics.median(taken[b]) * 1000
    finally:
        await a.close()
        await b.close()


def claims(size: Size) -> Iterator[Line]:
    for unknown in (False, True):
        with size.file() as short, size.file() as long:
            few, many = asyncio.run(_claims(short, long, size, unknown=unknown))
        what = f"{size.of(MANY, 40)} queued{' of an agent unknown here' if unknown else ''}"
        yield Line(f"claim with {what}, against {size.of(FEW, 20)}", many, "ms", few, most=FLAT)


def rows(size: Size) -> Iterator[Line]:
    yield from drain(size)
    yield from processes(size)
    yield from claims(size)
