"""A simulated world: one store, hosts that live and die on it, and the clock and chance they share."""

from __future__ import annotations

import asyncio
import contextvars
import random
import shutil
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agent_runtime_core._engines.base import Op
from agent_runtime_core.backends import Backends
from agent_runtime_core.events.memory import InMemoryEventBus
from agent_runtime_core.events.sqlite import SQLiteEventBus
from agent_runtime_core.interfaces import AgentRuntime
from agent_runtime_core.queue.memory import InMemoryQueue
from agent_runtime_core.queue.sqlite import SQLiteQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.core import AgentRunner
from agent_runtime_core.runner.settings import RunnerConfig
from agent_runtime_core.state.memory import InMemoryStateStore
from agent_runtime_core.state.sqlite import SQLiteStateStore

from .loop import HOST, SimLoop
from .store import Faults, SimClock, SimMemoryEngine, SimSQLiteEngine
from .watch import Watch

TRACE_LINES = 400
SHARED_MEMORY = Path("/dev/shm")


class Host:
    """A process by its place; each start is a new incarnation with an engine and a runner of its own."""

    def __init__(self, world: World, name: str, main: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
        self.world, self.name, self._main = world, name, main
        self.incarnation = -1
        self.label = ""
        self.up_since: float | None = None
        self.engine: SimMemoryEngine | SimSQLiteEngine
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
        clock = SimClock(world.loop, world.chance.getrandbits(32), world.chance.uniform(-world.skew, world.skew))
        backends = self._backends(clock)
        config = RunnerConfig(
            worker_id=self.name,
            lease_ttl_seconds=world.lease,
            heartbeat_interval_seconds=world.lease / 3,
            max_retries=world.max_retries,
            retry_backoff_base=0.2,
            retry_backoff_max=0.5,
            park_after=world.park_after,
            grace_seconds=0.3,
            run_timeout_seconds=600,
        )
        registry = Registry()
        for agent in world.agents:
            registry.register(agent)
        self.runner = AgentRunner(*backends, config, registry=registry)
        world.loop.create_task(self._main(self)).add_done_callback(self._returned)

    def _returned(self, main: asyncio.Task[None]) -> None:
        if not main.cancelled() and (error := main.exception()) is not None:
            told = "".join(traceback.format_exception(error)[-3:])
            self.world.watch.wrong(f"{self.label} fell: {error!r}\n{told}")

    def _backends(self, clock: SimClock) -> Backends:
        if self.world.backend == "memory":
            memory = SimMemoryEngine(clock, self.world)
            self.engine = memory
            return Backends(
                InMemoryQueue(engine=memory, max_retries=self.world.max_retries),
                InMemoryEventBus(engine=memory),
                InMemoryStateStore(engine=memory),
            )
        sqlite = SimSQLiteEngine(str(self.world.path), clock, self.world)
        self.engine = sqlite
        backends = Backends(
            SQLiteQueue(engine=sqlite, max_retries=self.world.max_retries),
            SQLiteEventBus(engine=sqlite),
            SQLiteStateStore(engine=sqlite),
        )
        self.world.keep_template(sqlite)
        return backends

    @property
    def alive(self) -> bool:
        return self.up_since is not None


class World:
    """One seed's world."""

    _templates: ClassVar[dict[str, bytes]] = {}

    def __init__(
        self,
        seed: int,
        *,
        backend: str = "memory",
        faults: Faults = Faults(),  # noqa: B008 - frozen
        liveness: bool = True,
        lease: float = 2.5,
        poll: float = 2.0,
        park_after: float = 0.2,
        max_retries: int = 3,
        skew: float = 0.0,
        shuffle: bool = True,
        ablated: Sequence[str] = (),
    ) -> None:
        self.loop = SimLoop(seed, shuffle=shuffle)
        self.chance = random.Random(f"world {seed}")
        self.backend, self.faults, self.liveness = backend, faults, liveness
        self.lease, self.poll, self.park_after, self.max_retries = lease, poll, park_after, max_retries
        self.skew = skew
        self.ablated = frozenset(ablated)
        self.agents: list[AgentRuntime] = []
        self.tables: dict[str, dict[Any, Any]] = {}
        self.watch = Watch(self)
        self.hosts: dict[str, Host] = {}
        self.labels: dict[str, Host] = {}
        self.died: dict[str, float] = {}
        self.lines: deque[tuple[float, str, str, Any]] = deque(maxlen=TRACE_LINES)
        self.over = asyncio.Event()
        self.some_ended = asyncio.Event()
        self.calm = False
        self.unbreakable = "client"
        self.restart_after = 1.0
        self._faulty_claims: list[float] = []
        self._bells: dict[str, set[str]] = {}
        self.migrated = False
        if backend == "sqlite":
            home = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            self.directory = Path(tempfile.mkdtemp(prefix="sim-", dir=home))
            self.path = self.directory / "runs.db"
            self._from_template()

    def _from_template(self) -> None:
        """A file with its tables made: making them would be most of a short world's time."""
        template = self._templates.get("sqlite")
        if template is not None:
            self.path.write_bytes(template)
            self.migrated = True

    def keep_template(self, engine: SimSQLiteEngine) -> None:
        if not self.migrated:
            self._templates["sqlite"] = engine.writer.conn.serialize()
            self.migrated = True

    # -- trace

    def trace(self, what: str, about: Any = "") -> None:
        host = HOST.get()
        text = about if isinstance(about, str) else " ".join(op.name for op in about)
        self.lines.append((self.loop.now, host, what, about))
        self.loop.note(f"{self.loop.now!r} {host} {what} {text}")

    def last_lines(self, count: int = 40) -> list[str]:
        return [
            f"{at:9.4f} {host or '-':10} {what:10} {about if isinstance(about, str) else _ops(about)}"
            for at, host, what, about in list(self.lines)[-count:]
        ]

    # -- hosts

    def host(self, name: str, main: Callable[[Host], Coroutine[Any, Any, None]]) -> Host:
        host = self.hosts[name] = Host(self, name, main)
        host.start()
        return host

    def kill(self, label: str) -> None:
        """As `kill -9` does: nothing of it runs any more."""
        host = self.labels[label]
        if host.label != label or not host.alive:
            return
        self.trace("kill", label)
        self.loop.kill(label)
        host.up_since = None
        host.engine.die()
        self.died[label] = self.loop.now
        self.restart(host, self.chance.uniform(0.05, self.restart_after))

    def restart(self, host: Host, seconds: float) -> None:
        outside = contextvars.copy_context()
        outside.run(HOST.set, "")
        self.loop.call_later(seconds, host.start, context=outside)

    def pause(self, host: Host) -> None:
        """As SIGSTOP does."""
        if host.alive:
            self.trace("pause", host.label)
            self.loop.stop_host(host.label)

    def go_on(self, host: Host) -> None:
        if host.label in self.loop.stopped:
            self.trace("go on", host.label)
            self.loop.resume_host(host.label)
            if host.alive:
                host.up_since = self.loop.now

    def workers_since(self) -> float | None:
        """Since when some worker has been up without a break."""
        since = [
            host.up_since
            for host in self.hosts.values()
            if host.name.startswith("worker") and host.up_since is not None and host.label not in self.loop.stopped
        ]
        return min(since) if since else None

    # -- the way to the store

    def delay(self) -> float:
        return self.chance.random() * self.faults.latency

    def ring(self, engine: Any, topics: set[str]) -> None:
        if not topics:
            return
        engine.hear(topics)
        for host in self.hosts.values():
            if host.engine is engine or not host.alive or not topics & host.engine.listeners.keys():
                continue
            underway = self._bells.get(host.label)
            if underway is not None:
                underway |= topics
                continue
            self._bells[host.label] = set(topics)
            late = self.chance.random() < self.faults.late_bell
            seconds = 0.5 if late else self.delay()
            self.loop.call_later(seconds, self._heard, host, host.label, context=host.context)

    def _heard(self, host: Host, label: str) -> None:
        topics = self._bells.pop(label, set())
        if host.label == label and host.alive:
            host.engine.hear(topics)

    def unanswered(self, ops: Sequence[Op]) -> None:
        """A claim that nobody heard of is nobody's until its lease is over."""
        if any(op.name in ("queue.claim", "queue.take") for op in ops):
            self._faulty_claims.append(self.loop.now)

    def faulty_claims_since(self, at: float) -> int:
        return sum(1 for when in self._faulty_claims if when >= at)

    # -- the end

    def ended(self) -> None:
        self.some_ended.set()

    def end(self) -> None:
        self.over.set()

    def calm_down(self) -> None:
        """From here on nothing goes wrong any more."""
        self.calm = True
        self.faults = Faults(latency=self.faults.latency)

    def close(self) -> None:
        for host in self.hosts.values():
            host.engine.die()
        self.loop.bury()
        if self.backend == "sqlite":
            shutil.rmtree(self.directory, ignore_errors=True)


def _ops(ops: Sequence[Op]) -> str:
    return ", ".join(f"{op.name}({_short(op)})" for op in ops)


def _short(op: Op) -> str:
    match op.name, op.args:
        case "queue.claim", (want,):
            return f"{len(want.tickets)} at most"
        case "journal.append", (run, record):
            about = f"{record.kind} {record.name} {record.key} claim …{record.claim_id[-4:]}"
            return f"{run[:4]}[{record.seq}] {about}"
        case "queue.settle", (run, how):
            return f"{run[:4]} {how.status} failures={how.failures} crashes={how.crashes} stalls={how.stalls}"
        case "queue.insert" | "queue.take", (row, *_):
            return str(row.run_id)
    return f"{op.args!r:.80}"
