"""Hosts of a simulated world: processes by their place, each start a new incarnation with a runner of its own."""

from __future__ import annotations

import asyncio
import contextvars
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any
from zlib import crc32

from agent_runtime_core._engines.payloads import Payloads
from agent_runtime_core.events.memory import InMemoryEventBus
from agent_runtime_core.events.sqlite import SQLiteEventBus
from agent_runtime_core.queue.memory import InMemoryQueue
from agent_runtime_core.queue.sqlite import SQLiteQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.backends import Backends
from agent_runtime_core.runner.runner import AgentRunner
from agent_runtime_core.runner.settings import RunnerConfig
from agent_runtime_core.state.memory import InMemoryStateStore
from agent_runtime_core.state.sqlite import SQLiteStateStore

from .loop import HOST
from .remote import SimRemoteEngine, SimRemoteQueue
from .stores import SimMemoryEngine, SimSQLiteEngine
from .wire import SimClock

if TYPE_CHECKING:
    from .world import World

SimEngine = SimMemoryEngine | SimSQLiteEngine | SimRemoteEngine
ENGINES: dict[str, Callable[[SimClock, World, str], SimEngine]] = {
    "memory": SimMemoryEngine,
    "sqlite": SimSQLiteEngine,
    "remote": SimRemoteEngine,
}
#: Queue, events and state, over the operations of dicts and over those of a SQLite file.
ON_DICTS: tuple[Any, Any, Any] = (InMemoryQueue, InMemoryEventBus, InMemoryStateStore)
ON_SQLITE: tuple[Any, Any, Any] = (SQLiteQueue, SQLiteEventBus, SQLiteStateStore)
#: The same over a server.
REMOTE: tuple[Any, Any, Any] = (SimRemoteQueue, *ON_DICTS[1:])
SEAL = "sealed for "
BACKENDS = {"memory": ON_DICTS, "sqlite": ON_SQLITE, "remote": REMOTE}


class Opened:
    """The codec of a process that reads what others encrypt already."""

    def encode(self, text: str, *, context: str) -> str:
        return text

    def decode(self, text: str, *, context: str) -> str:
        if not text.startswith(SEAL):
            return text
        seal, _, plain = text.partition("\n")
        assert seal == f"{SEAL}{context}"
        return plain


class Sealed(Opened):
    """The codec of a process that encrypts."""

    def encode(self, text: str, *, context: str) -> str:
        return f"{SEAL}{context}\n{text}"

    def digest(self, text: str) -> str:
        return f"{crc32(text.encode()):x}"


class Host:
    """A process by its place in the world."""

    def __init__(self, world: World, name: str, main: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
        self.world, self.name, self._main = world, name, main
        self.incarnation = -1
        self.label = ""
        self.up_since: float | None = None
        self.engines: dict[str, SimEngine] = {}
        self.clock: SimClock
        self.runner: AgentRunner
        self.context: contextvars.Context

    def start(self) -> None:
        self.incarnation += 1
        self.label = f"{self.name}.{self.incarnation}"
        self.up_since = self.world.loop.now
        self.world.labels[self.label] = self
        self.context = contextvars.copy_context()
        self.context.run(self._start)

    def _start(self) -> None:
        HOST.set(self.label)
        world = self.world
        world.trace("start", self.label)
        self.clock = world.machine_clock(self.name)
        config = RunnerConfig(
            worker_id=self.name,
            lease_ttl_seconds=world.lease,
            heartbeat_interval_seconds=world.lease / 3,
            max_retries=world.max_retries,
            retry_backoff_base=0.2,
            retry_backoff_max=0.5,
            park_after=world.park_after,
            grace_seconds=0.3,
            other_code_timeout_seconds=10,  # a worker that was killed may come back until then
            run_timeout_seconds=600,
        )
        registry = Registry()
        for agent in world.agents:
            registry.register(agent)
        self.runner = AgentRunner(*self._backends(), config, registry=registry)
        world.loop.create_task(self._main(self)).add_done_callback(self._returned)

    def _returned(self, main: asyncio.Task[None]) -> None:
        if not main.cancelled() and (error := main.exception()) is not None:
            told = "".join(traceback.format_exception(error)[-3:])
            self.world.watch.wrong(f"{self.label} fell: {error!r}\n{told}")

    def _backends(self) -> Backends:
        """One engine for each place of the world's layout, and the three backends on them."""
        self.engines = {}
        made = []
        for which, place in enumerate(self.world.layout):
            kind = place.partition("-")[0]
            engine = self.engines.get(place)
            if engine is None:
                engine = self.engines[place] = ENGINES[kind](self.clock, self.world, place)
            backend = BACKENDS[kind][which]
            made.append(backend(engine=engine, **({"max_retries": self.world.max_retries} if which == 0 else {})))
        for place, engine in self.engines.items():
            if isinstance(engine, SimSQLiteEngine) and not self.world.migrated(place):
                for backend in ON_SQLITE:
                    for concern in backend.operation_sets:
                        engine.add(concern)
                self.world.keep_template(engine)
        if self.world.decodes:
            payloads = Payloads(Sealed() if self.world.encrypts else Opened())
            for each in made:
                each.payloads = payloads
        return Backends(*made)

    @property
    def engine(self) -> SimEngine:
        """That of the queue."""
        return self.engines[self.world.layout[0]]

    @property
    def alive(self) -> bool:
        return self.up_since is not None

    def die(self) -> None:
        self.up_since = None
        for engine in self.engines.values():
            engine.die()
