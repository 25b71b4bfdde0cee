"""Counts that repeat on any machine with the same versions: Python calls, SQL statements, log pages, Redis commands.

`python -m benchmarks.counts` prints them as JSON; `tests/performance` compares them with their ceilings.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, cast

from agent_runtime_core._core.lazy_import import load
from agent_runtime_core._engines import commit_request
from agent_runtime_core.config import configure
from agent_runtime_core.errors import MissingDependency
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult, TraceSink
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.queue.sqlite_find import BATCH
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.steps import Step, StepExecutor

from .floor import Line, Size
from .loop import Instant, _tools
from .peers.server import NoServer, started
from .queue import NoOp

RUNS, CONCURRENCY = 160, 16
STEPS, TURNS = 300, 60
PACKAGE = "agent_runtime_core"
WARM = 20  # calls before each count: what is made once is not of each run


class Calls:
    """Count the Python calls of all threads, and how often another thread goes on, while a block is executed.

    The object must exist before the threads do.
    """

    def __init__(self) -> None:
        self.calls = self.changes = 0
        self.modules: set[str] = set()  # that run
        self._counts, self._thread = False, 0
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        if self._counts and event == "call":
            self.calls += 1
            self.modules.add(frame.f_globals.get("__name__", ""))
            if (thread := get_ident()) != self._thread:
                self.changes += 1
                self._thread = thread

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self.calls = self.changes = 0
        self.modules.clear()
        self._counts, self._thread = True, get_ident()
        try:
            yield
        finally:
            self._counts = False

    def close(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type, unused-ignore]  # an older typeshed does not know None


@contextlib.contextmanager
def _calls() -> Iterator[Calls]:
    calls = Calls()
    try:
        yield calls
    finally:
        calls.close()


async def _noop(url: str, calls: Calls) -> Iterator[tuple[str, float]]:
    agent = NoOp()
    async with AgentRunner.open(url) as runner:
        for n in range(WARM):
            await runner.execute(agent, f"warm-{n}")
        with calls.counted():
            for n in range(RUNS):
                await runner.execute(agent, f"run-{n}")
    return iter([("run without steps", calls.calls / RUNS)])


async def _drained(url: str, calls: Calls) -> Iterator[tuple[str, float]]:
    agent, registry = NoOp(), Registry()
    registry.register(agent)
    async with AgentRunner.open(url, registry=registry) as runner:
        for _ in range(WARM):
            await runner.submit(agent.key)
        with calls.counted():
            for _ in range(RUNS):
                await runner.submit(agent.key)
        submitted = calls.calls / RUNS
        agent.runner, agent.last = runner, WARM + RUNS
        with calls.counted():
            await runner.run_loop(concurrency=CONCURRENCY, handle_signals=False)
    return iter([("submit", submitted), (f"drained run at {CONCURRENCY}", calls.calls / (WARM + RUNS))])


async def _modules(url: str, calls: Calls) -> Iterator[tuple[str, float]]:
    """Modules of the library that run from the call of `submit` to the code of the agent, in a worker that waits."""

    class Begins(AgentRuntime):
        key = "begins"

        async def run(self, ctx: RunContext) -> RunResult:
            counted.close()
            begun.set()
            return RunResult()

    agent, registry, begun = Begins(), Registry(), asyncio.Event()
    registry.register(agent)
    async with AgentRunner.open(url, registry=registry) as runner:
        working = asyncio.ensure_future(runner.run_loop(handle_signals=False))
        for _ in range(WARM):
            with contextlib.ExitStack() as counted:
                await runner.wait(await runner.submit(agent.key))
        begun.clear()
        with contextlib.ExitStack() as counted:
            counted.enter_context(calls.counted())
            await runner.submit(agent.key)
            await begun.wait()
        runner.stop()
        await working
    return iter([("modules from submit to user code", sum(each.split(".")[0] == PACKAGE for each in calls.modules))])


async def _value() -> int:
    return 1


def _closure(n: int) -> Callable[[], Awaitable[int]]:
    async def value():  # type: ignore[no-untyped-def]  # as most closures are written
        return n

    return value


async def _listed(ctx: Any, state: Any) -> int:
    return 1


async def _inside(url: str, calls: Calls) -> Iterator[tuple[str, float]]:
    found = []
    for name, step in (
        ("step, async function", lambda n: _value),
        ("step, lambda", lambda n: lambda: n),
        ("step, closure", _closure),
    ):
        async with open_run(url, f"count {name}") as ctx:
            for n in range(WARM):
                await ctx.step(f"warm-{n}", step(n))
            with calls.counted():
                for n in range(STEPS):
                    await ctx.step(f"step-{n}", step(n))
            # Of these calls, one makes the function.
            found.append((name, calls.calls / STEPS - 1))
    async with open_run(url, "count list") as ctx:
        await StepExecutor(ctx).run([Step(f"warm-{n}", _listed) for n in range(WARM)])
        executor = StepExecutor(ctx, checkpoint_key="counted")
        with calls.counted():
            await executor.run([Step(f"step-{n}", _listed) for n in range(STEPS)])
        found.append(("step of a list", calls.calls / STEPS))
    async with open_run(url, "count emit") as ctx:
        for n in range(WARM):
            await ctx.emit("custom.event", {"n": n})
        with calls.counted():
            for n in range(STEPS):
                await ctx.emit("custom.event", {"n": n})
        found.append(("emit", calls.calls / STEPS))
    return iter(found)


async def _turn(url: str, calls: Calls) -> Iterator[tuple[str, float]]:
    async with open_run(url, "warm turns") as ctx:
        await run_turn_loop(ctx, Instant("_add", 5), _tools())
    async with open_run(url, "count turns") as ctx:
        client, tools = Instant("_add", TURNS), _tools()
        with calls.counted():
            await run_turn_loop(ctx, client, tools)
    return iter([("agent turn", calls.calls / TURNS), ("thread changes of an agent turn", calls.changes / TURNS)])


class _Ignores(TraceSink):
    def log_event(self, run_id: Any, event_type: str, payload: dict[str, Any]) -> None: ...


async def _traced(url: str, calls: Calls) -> Iterator[tuple[str, float]]:
    """A step with a trace sink that does nothing: what reports it, and passes it on."""

    class Steps(AgentRuntime):
        key = "traced"

        async def run(self, ctx: RunContext) -> RunResult:
            for n in range(WARM):
                await ctx.step(f"warm-{n}", _value)
            with calls.counted():
                for n in range(STEPS):
                    await ctx.step(f"step-{n}", _value)
                await asyncio.to_thread(tracer.close)
            return RunResult()

    async with AgentRunner.open(url, trace_sinks=[_Ignores()]) as runner:
        tracer: Any = runner.tracer
        await runner.execute(Steps())
    return iter([("step with a trace sink", calls.calls / STEPS)])


async def _statements(path: Path) -> Iterator[tuple[str, float]]:
    """SQL statements, transactions and pages of the log that a run without steps takes."""
    connect, executed, pages = sqlite3.connect, list[str](), 0

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.set_trace_callback(executed.append)
        return connection

    sqlite3.connect = traced  # type: ignore[assignment]
    try:
        agent, registry = NoOp(), Registry()
        registry.register(agent)
        async with AgentRunner.open(path, registry=registry) as runner:
            for n in range(WARM):
                await runner.execute(agent, f"warm-{n}")
            _log_pages(connect, path)
            executed.clear()
            for n in range(BATCH):  # one of these runs lists all of them
                await runner.execute(agent, f"run-{n}")
                if n % 32 == 31:  # before the engine empties the log
                    pages += _log_pages(connect, path)
            statements = list(executed)
            for _ in range(RUNS):
                await runner.submit(agent.key)
            _log_pages(connect, path)
            agent.runner, agent.last = runner, agent.runs + RUNS
            await runner.run_loop(concurrency=CONCURRENCY, handle_signals=False)
            drained = _log_pages(connect, path)
    finally:
        sqlite3.connect = connect
    commits = sum(each.startswith("COMMIT") for each in statements)
    return iter(
        [
            ("SQL statements of a run", len(statements) / BATCH),
            ("transactions of a run", commits / BATCH),
            ("log pages of a run", pages / BATCH),
            ("log pages of a drained run", drained / RUNS),
        ]
    )


def _log_pages(connect: Callable[..., sqlite3.Connection], path: Path) -> int:
    """Return how many pages the log has, and empty it."""
    with contextlib.closing(connect(path)) as connection:
        pages = int(connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return pages


async def _waiting(url: str) -> Iterator[tuple[str, float]]:
    """Objects that the collector tracks for a run that waits for a signal."""

    class Waits(AgentRuntime):
        key = "waits"

        async def run(self, ctx: RunContext) -> RunResult:
            ready.release()
            await ctx.wait_for_signal("go")
            return RunResult()

    ready, agent = asyncio.Semaphore(0), Waits()
    async with AgentRunner.open(url) as runner:
        tasks = []
        for count in (WARM, RUNS):
            gc.collect()
            before = len(gc.get_objects())
            tasks += [asyncio.ensure_future(runner.execute(agent)) for _ in range(count)]
            for _ in range(count):
                await ready.acquire()
            await asyncio.sleep(0)
        gc.collect()
        tracked = (len(gc.get_objects()) - before) / RUNS
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return iter([("tracked objects of a waiting run", tracked)])


async def _commands(url: str, client: Any) -> Iterator[tuple[str, float]]:
    """Commands that the Redis server executes for a submitted run, and calls of the script for an agent turn."""
    agent, registry = NoOp(), Registry()
    registry.register(agent)
    async with AgentRunner.open(url, registry=registry) as runner:
        client.config_resetstat()
        for _ in range(RUNS):
            await runner.submit(agent.key)
        agent.runner, agent.last = runner, RUNS
        await runner.run_loop(concurrency=CONCURRENCY, handle_signals=False)
    used = client.info("commandstats")
    commands = sum(each["calls"] for name, each in used.items() if name != "cmdstat_info")
    async with open_run(url, "count scripts") as ctx:
        client.config_resetstat()
        await run_turn_loop(ctx, Instant("_add", TURNS), _tools())
        used = client.info("commandstats")
    scripts = sum(used.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval", "fcall"))
    return iter([("Redis commands of a run", commands / RUNS), ("script calls of an agent turn", scripts / TURNS)])


SYSTEM_CALLS = "system calls of an agent turn, SQLite"  # counted only where strace is installed


def _system_calls(folder: Path) -> Iterator[tuple[str, float]]:
    """System calls of all threads for an agent turn: those of many turns without those of few."""
    if (strace := shutil.which("strace")) is None:
        return
    found = {}
    for turns in (WARM, WARM + TURNS):
        summary = folder / f"strace-{turns}"
        program = [sys.executable, "-m", "benchmarks.counts", str(folder / f"turns-{turns}.db"), str(turns)]
        subprocess.run([strace, "-f", "-c", "-o", str(summary), *program], check=True)
        *_, total = summary.read_text().splitlines()  # % time, seconds, microseconds a call, calls, errors, "total"
        found[turns] = int(total.split()[3])
    yield SYSTEM_CALLS, (found[WARM + TURNS] - found[WARM]) / TURNS


async def _turns(url: str, count: int) -> None:
    async with open_run(url, "turns") as ctx:
        await run_turn_loop(ctx, Instant("_add", count), _tools())


MEASURES = (_noop, _drained, _modules, _inside, _turn, _traced)


def counts(folder: Path) -> dict[str, float]:
    """Return all counts by name. Without a Redis server, the names with "Redis" are left out."""
    configure(durability="normal")
    # How many commits a task executes in its calls must depend on their number alone, not on the machine.
    commit_request.NOW_SECONDS = math.inf
    found: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        stores = {"memory": "memory://", "SQLite": str(folder / "counts.db")}
        client: Any = None
        with contextlib.suppress(NoServer, MissingDependency):
            stores["Redis"] = stack.enter_context(started())
            client = stack.enter_context(contextlib.closing(cast("Any", load("redis:Redis")).from_url(stores["Redis"])))
        for store, url in stores.items():
            for measure in MEASURES:
                if store == "Redis" and measure in (_inside, _traced):
                    continue
                with _calls() as calls:
                    for name, count in asyncio.run(measure(url, calls)):
                        found[f"{name}, {store}"] = count
        found.update(asyncio.run(_statements(folder / "statements.db")))
        found.update(_system_calls(folder))
        found.update(asyncio.run(_waiting("memory://")))
        if client is not None:
            client.flushall()
            found.update(asyncio.run(_commands(stores["Redis"], client)))
    return found


def rows(size: Size) -> Iterator[Line]:
    for name, count in counts(size.where).items():
        yield Line(name, count, "")


if __name__ == "__main__":
    if len(sys.argv) == 3:  # a program whose system calls are counted
        configure(durability="normal")
        asyncio.run(_turns(sys.argv[1], int(sys.argv[2])))
    else:
        with tempfile.TemporaryDirectory(prefix="counts-") as place:
            print(json.dumps(counts(Path(place)), indent=1))
