"""What fault tests share: runners over one store and clock, agents from functions, and what holds of every run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from agent_runtime_core._core.clock import SYSTEM, Clock
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.interfaces import AgentRuntime, ErrorInfo, RunResult
from agent_runtime_core.queue import get_queue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.runner.backends import Backends
from agent_runtime_core.state import get_state_store
from tests.support.backends import backends

KINDS = backends(["memory", "sqlite", "redis", "postgres"], default=["sqlite"])
#: The URL of the server, and the prefix, that the present test has for itself; see conftest.
SERVER: dict[str, str] = {}
Code = Callable[[Any], Awaitable[Any]]
OnError = Callable[[Any, BaseException], Awaitable[ErrorInfo | None]]


class Agent(AgentRuntime):
    """An agent whose `run` is a function: what that returns is the final output's "value"."""

    def __init__(self, key: str, code: Code, on_error: OnError | None = None) -> None:
        self._key, self._code, self._on_error = key, code, on_error

    @property
    def key(self) -> str:
        return self._key

    async def run(self, ctx: Any) -> RunResult:
        value = await self._code(ctx)
        return value if isinstance(value, RunResult) else RunResult({"value": value})

    async def on_error(self, ctx: Any, error: BaseException) -> ErrorInfo | None:
        return await super().on_error(ctx, error) if self._on_error is None else await self._on_error(ctx, error)


def settings(**changes: Any) -> RunnerConfig:
    """Quick and plain: no back-off between attempts."""
    return RunnerConfig(**{"retry_backoff_base": 0, "grace_seconds": 0.5, **changes})


def opened(kind: str, path: Path, clock: Clock) -> Any:
    match kind:
        case "memory":
            return MemoryEngine(clock)
        case "redis" | "postgres":
            return get_queue(kind, url=SERVER["url"], clock=clock).commits
        case _:
            return SQLiteEngine.open(path / "runs.db", durability="normal", clock=clock)


class Store:
    """One store, and the runners on it, each as a worker process of its own would be."""

    def __init__(self, kind: str, path: Path, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self.agents = Registry()
        self.engine: Any = opened(kind, path, clock)
        self._runners: list[AgentRunner] = []
        self._backends: list[Backends] = []  # a test may give a runner others

    def agent(self, key: str, code: Code, on_error: OnError | None = None) -> Agent:
        agent = Agent(key, code, on_error)
        self.agents.register(agent)
        return agent

    def runner(self, config: RunnerConfig | None = None, **options: Any) -> AgentRunner:
        config = config or settings()
        engine, clock = self.engine, self.clock
        where: dict[str, Any] = {"backend": engine.kind, "engine": engine, "clock": clock}
        runner = AgentRunner(
            get_queue(**where, max_retries=config.max_retries),
            get_event_bus(**where),
            get_state_store(**where),
            config,
            registry=self.agents,
            **options,
        )
        self._runners.append(runner)
        self._backends.append(runner.backends)
        return runner

    async def close(self) -> None:
        for runner in self._runners:
            await runner.close()
        for backend in itertools.chain(*self._backends):
            await backend.close()
        await self.engine.close()


@asynccontextmanager
async def store(kind: str, path: Path, clock: Clock = SYSTEM) -> AsyncIterator[Store]:
    made = Store(kind, path, clock)
    try:
        yield made
    finally:
        await made.close()


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Let others run until `true()`; TimeoutError if it is not, though this process may have stood still meanwhile."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError
        await asyncio.sleep(0.001)


async def eventually(true: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """The same for what takes an await to know."""
    async with asyncio.timeout(seconds):
        while not await true():  # noqa: ASYNC110 - what it waits for may rest with other threads
            await asyncio.sleep(0.002)


async def status(runner: AgentRunner, run_id: UUID | str) -> str:
    return (await runner.get_run(run_id)).status.value


async def until_status(runner: AgentRunner, run_id: UUID | str, *wanted: str, seconds: float = 10.0) -> str:
    async def reached() -> bool:
        return await status(runner, run_id) in wanted

    await eventually(reached, seconds)
    return await status(runner, run_id)


async def drop(runner: AgentRunner, task: asyncio.Task[Any], run_id: UUID | str) -> None:
    """Make a worker as good as dead: its heart no longer beats for the run, and its code never goes on."""
    runner.heartbeat.drop(str(run_id))
    for drive in tuple(runner._worker._executions.values()):
        drive.control.close()
    task.add_done_callback(lambda each: each.cancelled() or each.exception())


def others() -> set[asyncio.Task[Any]]:
    """The tasks of this loop but for the one asking."""
    return asyncio.all_tasks() - {asyncio.current_task()}


async def no_task_left(before: Iterable[asyncio.Task[Any]], seconds: float = 10.0) -> None:
    known = set(before)
    with contextlib.suppress(TimeoutError):
        await until(lambda: not others() - known, seconds)
    assert not others() - known


async def consistent(runner: AgentRunner, run_id: UUID | str) -> None:
    """What holds of every run at rest, however it got there."""
    key = (await runner.get_run(run_id)).run_id
    journal = await runner.state_store.records(key)
    assert [r.seq for r in journal] == sorted({r.seq for r in journal})
    done = Counter((r.name, r.key) for r in journal if r.kind == "done")
    assert all(count == 1 for count in done.values()), f"recorded twice: {done}"
    ends = Counter(r.attempt for r in journal if r.kind == "ended")
    assert all(count == 1 for count in ends.values()), f"ended twice in one generation: {ends}"
    events = await runner.event_bus.get_events(key)
    assert [e.sequence for e in events] == list(range(len(events)))
    completed = Counter(e.payload["step_id"] for e in events if e.event_type == "step.completed")
    loud = sum(1 for r in journal if r.kind == "done" and r.nev)
    assert all(count == 1 for count in completed.values())
    assert sum(completed.values()) == loud
    begun: set[str] = set()
    for event in events:
        if event.event_type == "step.started":
            begun.add(event.payload["step_id"])
        elif event.event_type == "step.completed":
            assert event.payload["step_id"] in begun, "completed, and never started"


async def no_transaction_left(runner: AgentRunner) -> None:
    engine: Any = runner.queue.commits
    if isinstance(engine, SQLiteEngine):
        await engine.commit(None, [])
        await until(lambda: not engine.writer.committer.conn.in_transaction)


async def terminal_events(runner: AgentRunner, run_id: UUID | str) -> list[str]:
    ends = {"run.succeeded", "run.failed", "run.cancelled", "run.timed_out"}
    return [e.event_type for e in await runner.event_bus.get_events(run_id) if e.event_type in ends]
