"""Lives of a simulated process over one store in memory: each ends at a chosen write, or when its run has ended."""

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
from ..queue.records import LIVE, RunFilter, RunRow
from ..registry import DEFAULT, Registry
from ..runner.runner import AgentRunner
from ..runner.settings import RunnerConfig
from ..state.memory import InMemoryStateStore
from ..tools.registry import ToolRegistry
from .clock import RunClock, VirtualClock
from .crash_points import CrashPoint, KillableEngine, ProcessKilled, Watch

RUN = UUID("c4a54e00-0000-5000-8000-000000000001")  # of every run, so that its steps have the same ids each time
AFTERLIFE = 0.5  # real seconds that threads of the dead are waited for
STUCK = 5.0  # real seconds that a loop which was stopped has to come to that
CLOSES = 8


class _Runner(AgentRunner):
    """A runner whose runs draw the same chance in every life."""

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
    """What every life has: how to make its agents, and the options of its runner."""

    agents: Callable[[], Sequence[AgentRuntime]]
    config: RunnerConfig | None = None
    tools: ToolRegistry | None = None
    persistence: PersistenceManager | bool = False
    signals: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def registry(self) -> Registry:
        """The agents of a new life."""
        registry = Registry()
        for agent in self.agents():
            registry.register(agent)
        for key in DEFAULT.keys():  # noqa: SIM118 - it is no dict
            known = DEFAULT.get(key)
            if known is not None and registry.get(key) is None:
                registry.register(known)
        return registry

    def runner(self, engine: MemoryEngine, registry: Registry, drawn: Callable[[str], Sequence[str]]) -> AgentRunner:
        config = self.config or dataclasses.replace(RunnerConfig.of(get_config()), park_after=0.0)
        stores = self.persistence
        if isinstance(stores, bool):
            stores_ = PersistenceManager(PersistenceConfig.on(engine)) if stores else None
        else:
            stores_ = stores
        runner = _Runner(
            InMemoryQueue(engine=engine, max_retries=config.max_retries),
            InMemoryEventBus(engine=engine), InMemoryStateStore(engine=engine), config,
            tools=self.tools, persistence=stores_, registry=registry,
        )  # fmt: skip
        runner.drawn = drawn
        runner._has_store_url = True
        return runner


class _Threads:
    """What threads do for one life."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._going = 0

    def around(self, job: Callable[[], Any]) -> Callable[[], Any]:
        with self._changed:
            self._going += 1

        def counted() -> Any:
            try:
                return job()
            finally:
                with self._changed:
                    self._going -= 1
                    self._changed.notify_all()

        return counted

    def wait(self, seconds: float) -> None:
        """Until all is over, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._going == 0, seconds)


class SimulatedProcess:
    """One process: a loop and a runner of its own. When it is killed its loop never turns again, so that no `finally`
    of it runs before `bury`.
    """

    def __init__(
        self, store: MemoryEngine, client: AgentRunner, setting: CrashSetting, blow: CrashPoint | None, watch: Watch,
        drawn: Callable[[str], Sequence[str]],
    ) -> None:  # fmt: skip
        self.client: AgentRunner = client
        self.setting: CrashSetting = setting
        self.front: KillableEngine = KillableEngine(store, blow, watch, self._stop)
        self._drawn = drawn
        self._tasks: list[tuple[asyncio.Task[Any], contextvars.Context]] = []
        self._over = threading.Event()
        self._threads = _Threads()
        self._loop = asyncio.new_event_loop()
        self._in_executor = self._loop.run_in_executor
        self._loop.run_in_executor = self._counted  # type: ignore[method-assign, assignment]
        self._loop.set_task_factory(self._task)

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        # Held until it is buried: garbage collection would throw GeneratorExit into the tasks of the dead.
        context = options.pop("context", None) or contextvars.copy_context()
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context, **options)
        self._tasks.append((task, context))
        return task

    def _counted(self, executor: Any, fn: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return self._in_executor(executor, self._threads.around(functools.partial(fn, *args)))

    def _stop(self) -> None:
        self._loop.stop()
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(lambda: None)  # it may be asleep

    async def run(self) -> bool:
        """Live until the run has ended; False where it was killed before that."""
        try:
            await in_thread(self._live)
        except asyncio.CancelledError:
            self._stop()
            raise
        return self.front.fatal is None

    def _live(self) -> None:
        AROUND.set(self._threads.around)
        main = self._loop.create_task(self._main())
        main.add_done_callback(lambda _: self._loop.stop())
        try:
            self._loop.run_forever()
        finally:
            self._over.set()
        # A thread cannot be killed: what it does is done in this life still, and not beside the next one.
        self._threads.wait(AFTERLIFE)
        if main.done():
            main.result()

    async def _main(self) -> None:
        runner = self.setting.runner(self.front, self.setting.registry(), self._drawn)
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
        """Nothing can be claimed: let time pass, or answer what a run waits for."""
        client = self.client
        due, clock = await client.queue.next_due(), client.queue.clock
        rows = await client.queue.find(RunFilter(LIVE))
        for row in rows:
            name = await _asked(client, row)
            if name in self.setting.signals:
                await client.signal(row.run_id, name, self.setting.signals[name])
                return
        if due is not None and isinstance(clock, VirtualClock):
            clock.advance(max(due - clock.wall(), 0.001))
            return
        raise _stuck(rows, runner.registry)

    def dispose(self) -> None:
        """End what is left of its tasks, and close its loop; from a thread without one."""
        if not self._over.wait(STUCK):
            return  # it blocks, and cannot be ended
        for task, context in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coro: Any = task.get_coro()
                for _ in range(CLOSES):  # it may await in a `finally`
                    with contextlib.suppress(Exception, asyncio.CancelledError, ProcessKilled):  # whom could it tell?
                        context.run(coro.close)
                        break
            elif not task.cancelled():
                task.exception()
        self._tasks.clear()
        self._loop.close()


async def _asked(client: AgentRunner, row: RunRow) -> str:
    """The name of the signal that a run waits for; "" for none."""
    kind, _, name = row.reason.partition(" ")
    if row.status != "waiting" or kind not in ("signal", "approval", "in_doubt"):
        return ""
    if kind != "in_doubt":
        return name
    asked = [each for each in await client.event_bus.get_events(row.run_id) if each.event_type == "step.in_doubt"]
    return str(asked[-1].payload["signal"])


def _stuck(rows: Sequence[RunRow], registry: Registry) -> Exception:
    for row in rows:
        if row.status == "pending" and registry.get(row.agent) is None:
            return UnknownAgent(f"the run waits for agent {row.agent!r}, which is not known: agents=[…] brings it")
    reasons = sorted({f"{row.status}: {row.reason}" if row.reason else row.status for row in rows})
    return WaitTimeout(
        f"the run goes on by itself no more ({'; '.join(reasons)}): answer a signal or an approval with "
        "signals={name: payload}"
    )
