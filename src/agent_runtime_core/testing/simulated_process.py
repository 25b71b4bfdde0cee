"""A simulated process over an in-memory store: it ends at a chosen write, or when its run is finished."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from .._core.threads import AROUND, in_thread
from .._engines.memory import MemoryEngine
from .._execution.run_control import Services
from ..config import get_config
from ..errors import UnknownAgent, WaitTimeout
from ..events.memory import InMemoryEventBus
from ..interfaces import AgentRuntime
from ..persistence.manager import PersistenceConfig, PersistenceManager
from ..queue.memory import InMemoryQueue
from ..queue.records import LIVE, RunFilter, RunRow, open_questions
from ..registry import DEFAULT, Registry
from ..runner.runner import AgentRunner
from ..runner.settings import RunnerConfig
from ..state.memory import InMemoryStateStore
from ..tools.registry import ToolRegistry
from .clock import RunClock, VirtualClock
from .crash_points import CrashPoint, KillableEngine, OnWrite, ProcessKilled

RUN = UUID("c4a54e00-0000-5000-8000-000000000001")  # the id of every run, so that its steps always have the same ids
THREAD_GRACE = 0.5  # real seconds to wait for the threads of a killed process
STOP_TIMEOUT = 5.0  # real seconds in which a stopped event loop must return
MAX_CLOSES = 8


class _Runner(AgentRunner):
    """A runner whose runs draw the same random values in every process."""

    drawn: Callable[[str], Sequence[str]]
    row: str = ""

    def new_execution(self, row: RunRow, runtime: AgentRuntime, *, inline: bool) -> Any:
        self.row = row.run_id
        return super().new_execution(row, runtime, inline=inline)

    def services(self, *, inline: bool, agent: AgentRuntime | None = None) -> Services:
        services = super().services(inline=inline, agent=agent)
        return dataclasses.replace(services, clock=RunClock(services.clock, self.drawn(self.row)))


@dataclasses.dataclass(frozen=True)
class CrashSetting:
    """The settings of every process: a factory for its agents, and the options of its runner."""

    agents: Callable[[], Sequence[AgentRuntime]]
    config: RunnerConfig | None = None
    tools: ToolRegistry | None = None
    persistence: PersistenceManager | bool = False
    signals: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def registry(self) -> Registry:
        """New agents for a process, and those registered in the default registry."""
        registry = Registry()
        for agent in self.agents():
            registry.register(agent)
        for key in DEFAULT.keys():  # noqa: SIM118 - it is no dict
            known = DEFAULT.get(key)
            if known is not None and registry.get(key) is None:
                registry.register(known, **DEFAULT.time_limits(known))
        return registry

    def runner(self, engine: MemoryEngine, registry: Registry, drawn: Callable[[str], Sequence[str]]) -> AgentRunner:
        """Return the runner of this process."""
        config = self.config or dataclasses.replace(RunnerConfig.of(get_config()), park_after=0.0)
        # With a smaller limit of crashes, the crashes of the test would end the run.
        config = dataclasses.replace(config, max_crashes=max(config.max_crashes, RunnerConfig.max_crashes))
        stores: PersistenceManager | None
        if isinstance(self.persistence, bool):
            stores = PersistenceManager(PersistenceConfig.on(engine)) if self.persistence else None
        else:
            stores = self.persistence
        runner = _Runner(
            InMemoryQueue(engine=engine, max_retries=config.max_retries),
            InMemoryEventBus(engine=engine), InMemoryStateStore(engine=engine), config,
            tools=self.tools, persistence=stores, registry=registry,
        )  # fmt: skip
        runner.drawn = drawn
        runner.stores_at_url = True
        return runner


class _Threads:
    """Counts the running thread jobs of one process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0

    def around(self, job: Callable[[], Any]) -> Callable[[], Any]:
        with self._changed:
            self._running += 1

        def counted() -> Any:
            try:
                return job()
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        return counted

    def wait(self, seconds: float) -> None:
        """Wait until all jobs have finished, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0, seconds)


class SimulatedProcess:
    """One process: an event loop and a runner.

    After a kill the loop never runs again, so no `finally` block runs before `dispose`.
    """

    def __init__(
        self, store: MemoryEngine, client: AgentRunner, setting: CrashSetting, crash_point: CrashPoint | None,
        on_write: OnWrite, drawn: Callable[[str], Sequence[str]],
    ) -> None:  # fmt: skip
        self.client: AgentRunner = client
        self.setting: CrashSetting = setting
        self.engine: KillableEngine = KillableEngine(store, crash_point, on_write, self._stop)
        self._drawn = drawn
        self._sent: set[str] = set()  # questions that were answered
        self._tasks: list[tuple[asyncio.Task[Any], contextvars.Context]] = []
        self._stopped = threading.Event()
        self._threads = _Threads()
        self._loop = asyncio.new_event_loop()
        self._in_executor = self._loop.run_in_executor
        self._loop.run_in_executor = self._counted  # type: ignore[method-assign, assignment]
        self._loop.set_task_factory(self._task)

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        # Referenced until `dispose`: garbage collection would throw GeneratorExit into tasks of a killed process.
        context = options.pop("context", None) or contextvars.copy_context()
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context, **options)
        self._tasks.append((task, context))
        return task

    def _counted(self, executor: Any, fn: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return self._in_executor(executor, self._threads.around(functools.partial(fn, *args)))

    def _stop(self) -> None:
        self._loop.stop()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: None)  # wakes a loop that waits in its selector

    async def run(self) -> bool:
        """Execute until the run is finished. Returns False if the process was killed before that."""
        try:
            await in_thread(self._run_loop)
        except asyncio.CancelledError:
            self._stop()
            raise
        return self.engine.fatal is None

    def _run_loop(self) -> None:
        AROUND.set(self._threads.around)
        main = self._loop.create_task(self._main())
        main.add_done_callback(lambda _: self._loop.stop())
        try:
            self._loop.run_forever()
        finally:
            self._stopped.set()
        # A thread cannot be killed. Without this wait it would run concurrently with the next process.
        self._threads.wait(THREAD_GRACE)
        if main.done():
            main.result()

    async def _main(self) -> None:
        runner = self.setting.runner(self.engine, self.setting.registry(), self._drawn)
        while await self.client.queue.find(RunFilter(LIVE)):  # a child may outlive its parent
            if not await runner.run_once():
                await self._wait(runner)
        await runner.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)

    async def _wait(self, runner: AgentRunner) -> None:
        """No run can be claimed: send a signal that a run waits for, or move the clock."""
        client = self.client
        due, clock = await client.queue.next_due(), client.queue.clock
        rows = await client.queue.find(RunFilter(LIVE))
        for row in rows:
            # A question of an earlier process may be open although the code has not come to it yet.
            asked = {each.name: each.request_id for each in open_questions(row) if each.request_id not in self._sent}
            awaited = {await _awaited_signal(client, row), *asked}
            name = next((each for each in self.setting.signals if each in awaited), "")
            if row.status == "waiting" and name:
                self._sent.add(asked.get(name, ""))
                await client.signal(row.run_id, name, self.setting.signals[name])
                return
        if due is not None and isinstance(clock, VirtualClock):
            clock.advance(max(due - clock.wall(), 0.001))
            return
        raise _cannot_continue(rows, runner.registry)

    def dispose(self) -> None:
        """Close the remaining tasks and the loop. Call it in a thread without a running event loop."""
        if not self._stopped.wait(STOP_TIMEOUT):
            return  # the agent blocks its loop, so the loop cannot be closed
        for task, context in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coro: Any = task.get_coro()
                for _ in range(MAX_CLOSES):  # an await in a `finally` block makes close() raise
                    with contextlib.suppress(Exception, asyncio.CancelledError, ProcessKilled):  # no caller is left
                        context.run(coro.close)
                        break
            elif not task.cancelled():
                task.exception()
        self._tasks.clear()
        self._loop.close()


async def _awaited_signal(client: AgentRunner, row: RunRow) -> str:
    """The name of the signal that the run waits for, or ""."""
    kind, _, name = row.reason.partition(" ")
    if row.status != "waiting" or kind not in ("signal", "approval", "in_doubt"):
        return ""
    if kind != "in_doubt":
        return name
    in_doubt = [each for each in await client.event_bus.get_events(row.run_id) if each.event_type == "step.in_doubt"]
    return str(in_doubt[-1].payload["signal"])


def _cannot_continue(rows: Sequence[RunRow], registry: Registry) -> Exception:
    for row in rows:
        if row.status == "pending" and registry.get(row.agent) is None:
            return UnknownAgent(f"the run calls the unknown agent {row.agent!r}. Pass it in agents=[…]")
    reasons = sorted({f"{row.status}: {row.reason}" if row.reason else row.status for row in rows})
    return WaitTimeout(
        f"the run waits for a signal or an approval ({'; '.join(reasons)}). Pass its payload in "
        "signals={name: payload}"
    )
