"""What the tests of steps, contexts and runners stand on: an agent made of a function, and a runner to drive it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.clock import Clock
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._journal.record import Record
from agent_runtime_core.events import InMemoryEventBus, SQLiteEventBus
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.queue import InMemoryQueue, SQLiteQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.state import InMemoryStateStore, SQLiteStateStore
from agent_runtime_core.testing import VirtualClock

Body = Callable[[Any], Awaitable[Any]]
Told = tuple[str, dict[str, Any]]


class Script(AgentRuntime):
    """An agent that does what a function says; what it returns is the run's output."""

    key = "script"

    def __init__(self, body: Body, key: str = "script") -> None:
        self.body = body
        self.key = key

    async def run(self, ctx: RunContext) -> RunResult:
        value = await self.body(ctx)
        return value if isinstance(value, RunResult) else RunResult({"value": value})


PATIENT = 60.0


class Hurried(VirtualClock):
    """A clock that every sleep takes along, so that no sleep takes time."""

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.advance(seconds)
        await asyncio.sleep(0)


class Rig:
    """Runners over the backends of one engine, with a clock whose sleeps take no time.

    In a file, notes wait `linger` real seconds for a commit to go with: a test that counts on it gives them `PATIENT`,
    as a machine that holds the loop up for longer than usual has them go by themselves.
    """

    def __init__(
        self, path: Path | None = None, clock: Clock | None = None, *, linger: float | None = None, **config: Any
    ) -> None:
        self.clock = clock or Hurried()
        self.path = path
        self.linger = linger
        self.settings: dict[str, Any] = {"max_retries": 1, **config}
        self.registry = Registry()
        self._memory = MemoryEngine(self.clock)
        self._opened: list[AgentRunner] = []
        self.runner = self.another()

    def another(self, **config: Any) -> AgentRunner:
        """One more runner on the same place, as another process would have."""
        settings = RunnerConfig(**{**self.settings, **config})
        places: tuple[Any, Any, Any]
        if self.path is None:
            engine = self._memory
            places = (
                InMemoryQueue(engine=engine, max_retries=settings.max_retries),
                InMemoryEventBus(engine=engine),
                InMemoryStateStore(engine=engine),
            )
        else:
            file = SQLiteEngine.open(self.path, clock=self.clock)
            if self.linger is not None:
                file.buffer_delay = self.linger
            places = (
                SQLiteQueue(engine=file, max_retries=settings.max_retries),
                SQLiteEventBus(engine=file),
                SQLiteStateStore(engine=file),
            )
            file._users -= 1  # the backends hold it now
        queue, bus, state = places
        runner = AgentRunner(queue, bus, state, settings, registry=self.registry)
        self._opened.append(runner)
        return runner

    async def close(self) -> None:
        for runner in self._opened:
            await runner.close()

    async def __aenter__(self) -> Rig:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def register(self, body: Body, key: str = "script") -> Script:
        agent = Script(body, key)
        self.registry.unregister(key)
        self.registry.register(agent)
        return agent

    async def go(self, body: Body, run_id: str = "r", **options: Any) -> RunResult:
        """Execute the body as run `run_id`; once more resumes it."""
        return await self.runner.execute(Script(body), run_id, **options)

    async def value(self, body: Body, run_id: str = "r", **options: Any) -> Any:
        result = (await self.go(body, run_id, **options)).raise_for_status()
        return result.final_output["value"]

    async def cut(self, body: Body, inside: asyncio.Event, run_id: str = "r") -> None:
        """Execute until `inside` is set, then take the run away: what was begun is in doubt."""
        task = asyncio.ensure_future(self.go(body, run_id))
        await until(inside)
        task.cancel()
        await asyncio.wait({task})

    async def begun(self, run_id: str = "r") -> None:
        """Until the run has told that it started."""
        async with asyncio.timeout(10):
            while not await self.runner.event_bus.head(run_id):  # noqa: ASYNC110 - nobody rings for it yet
                await asyncio.sleep(0.001)

    async def told(self, kind: str | None = None, run_id: str = "r") -> list[Told]:
        """The run's events as (type, payload), without the ids that every step event carries."""
        events = await self.runner.event_bus.get_events(run_id)
        plain = [(e.event_type, _without_ids(e.payload)) for e in events]
        return [each for each in plain if kind is None or each[0].startswith(kind)]

    async def records(self, run_id: str = "r") -> list[Record]:
        return await self.runner.state_store.records(str((await self.runner.get_run(run_id)).run_id))


def _without_ids(payload: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in payload.items() if name not in ("step_id", "trace_id")}


@contextmanager
def no_thread(name: str = "") -> Iterator[None]:
    """The system has no thread to give, for those whose name begins so."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield


async def until(event: asyncio.Event, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        await event.wait()


async def soon(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Let the loop and the threads turn until it is so."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is looked at has no event to wait for
            await asyncio.sleep(0.001)


async def interrupted(runner: AgentRunner, refused: list[Any]) -> None:
    """Have a worker execute a run until the store has refused some commits, which it lists, and end the worker."""
    going = asyncio.ensure_future(runner.run_once())
    await soon(lambda: len(refused) > 3)
    going.cancel()
    await asyncio.wait([going])


async def twice(rig: Rig, body: Any, run_id: str = "r", **options: Any) -> tuple[Any, Any]:
    """What the body returns in a life that fails right after it, and in the next one."""
    made: list[Any] = []

    async def run(ctx: Any) -> Any:
        made.append(await body(ctx))
        if len(made) == 1:
            raise ConnectionError("cut")
        return made[-1]

    await rig.go(run, run_id, **options)
    assert made, await rig.go(run, run_id, **options)
    await rig.value(run, run_id, **options)
    return made[0], made[1]


async def twice_values(rig: Rig, body: Any) -> tuple[Any, Any]:
    """`twice` for values that are not the run's output."""
    made: list[Any] = []

    async def run(ctx: Any) -> None:
        made.append(await body(ctx))
        if len(made) == 1:
            raise ConnectionError("cut")

    await rig.go(run)
    await rig.value(run)
    return made[0], made[1]
