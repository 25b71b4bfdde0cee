"""A simulated world: its stores, the hosts that live and die on them, and the clock and chance they share."""

from __future__ import annotations

import asyncio
import contextvars
import random
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agent_runtime_core._engines.base import Op
from agent_runtime_core.interfaces import AgentRuntime
from agent_runtime_core.queue.live_claims import DEFERRED_INTERVALS
from tests.simulation.checks import Watch

from .hosts import Host
from .loop import HOST, SimLoop
from .remote import Server, SimRemoteEngine
from .stores import SimSQLiteEngine
from .wire import Faults, SimClock

TRACE_LINES = 400
SHARED_MEMORY = Path("/dev/shm")


class World:
    """One seed's world; `layout` names the places of queue, events and state, the same name for the same place."""

    _templates: ClassVar[dict[str, bytes]] = {}

    def __init__(
        self,
        seed: int,
        *,
        layout: tuple[str, str, str] = ("memory-a", "memory-a", "memory-a"),
        faults: Faults = Faults(),  # noqa: B008 - frozen
        liveness: bool = True,
        lease: float = 2.5,
        poll: float = 2.0,
        park_after: float = 0.2,
        max_retries: int = 3,
        skew: float = 0.0,
        hours: int = 0,
        shuffle: bool = True,
        decodes: bool = False,
        ablated: Sequence[str] = (),
    ) -> None:
        self.loop = SimLoop(seed, shuffle=shuffle)
        self.chance = random.Random(f"world {seed}")
        self.layout, self.faults, self.liveness = layout, faults, liveness
        self.lease, self.poll, self.park_after, self.max_retries = lease, poll, park_after, max_retries
        self.skew, self.hours = skew, hours
        self.decodes, self.encrypts = decodes, False  # whether hosts have a codec, and whether it encrypts
        self.stands = bool(seed % 2)  # whether claims of idle workers stand, where the store can have them do so
        # Whether short reads take no time, where a store reads on the event loop; and whether only without a commit.
        self.reads_on_loop, self.reads_alone = seed % 4 < 2, seed % 8 < 4
        self.ablated = frozenset(ablated)
        self.agents: list[AgentRuntime] = []
        self.tables: dict[str, dict[str, dict[Any, Any]]] = {}
        self.watch = Watch(self)
        self.hosts: dict[str, Host] = {}
        self.labels: dict[str, Host] = {}
        self.died: dict[str, float] = {}
        self.woke: dict[str, float] = {}
        self.naps: dict[str, tuple[float, float]] = {}  # of a host: when its machine last fell asleep, and woke up
        self.stepped: dict[str, float] = {}  # when the wall clock of a host last jumped
        self.reachable: dict[str, float] = {}
        self.away: dict[str, float] = {}  # when a call of a host last failed at a store
        self.busy: dict[str, float] = {}  # the same at the store of the queue
        self.outside = contextvars.copy_context()
        self.outside.run(HOST.set, "")
        self.lines: deque[tuple[float, str, str, Any]] = deque(maxlen=TRACE_LINES)
        self.over = asyncio.Event()
        self.some_ended = asyncio.Event()
        self.calm = False
        self.restart_after = 1.0
        self._machines: dict[str, tuple[float, float]] = {}
        self._servers: dict[str, Server] = {}
        self._faulty_claims: list[float] = []
        self._bells: dict[tuple[str, str], set[str]] = {}
        self._files: dict[str, Path] = {}
        self._migrated: set[str] = set()
        self.directory: Path | None = None

    # -- its stores

    @property
    def kind(self) -> str:
        """Of the queue's engine."""
        return self.layout[0].partition("-")[0]

    @property
    def undoes_claims(self) -> bool:
        return "sqlite" in self.kind

    def guards(self, place: str) -> bool:
        """Whether the fence of that engine stands."""
        return "fence" not in self.ablated and ("install" not in self.ablated or place == self.layout[0])

    def server(self, place: str) -> Server:
        """The server at that place, which has a clock of its own."""
        server = self._servers.get(place)
        if server is None:
            server = self._servers[place] = Server(self.machine_clock(place), self, place)
        return server

    def file(self, place: str) -> Path:
        """The database file of that place, with its tables made: making them would be most of a short world's time."""
        path = self._files.get(place)
        if path is None:
            if self.directory is None:
                home = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
                self.directory = Path(tempfile.mkdtemp(prefix="sim-", dir=home))
            path = self._files[place] = self.directory / f"{place}.db"
            template = self._templates.get("sqlite")
            if template is not None:
                path.write_bytes(template)
                self._migrated.add(place)
        return path

    def migrated(self, place: str) -> bool:
        return place in self._migrated

    def keep_template(self, engine: SimSQLiteEngine) -> None:
        self._templates["sqlite"] = engine.writer.committer.conn.serialize()
        self._migrated.add(engine.place)

    def machine_clock(self, name: str) -> SimClock:
        """Each host of a remote store is a machine of its own; all others share one, and differ in what they see."""
        if name not in self._machines:
            skew = self.chance.uniform(-self.skew, self.skew) + 3600 * self.hours * self.chance.choice((-1, 0, 1))
            self._machines[name] = skew, self.chance.uniform(0, 1e6) if self.kind == "remote" else 0.0
        skew, booted = self._machines[name]
        return SimClock(self.loop, self.chance.getrandbits(32), skew, booted)

    # -- trace

    def trace(self, what: str, about: Any = "") -> None:
        host = HOST.get()
        text = about if isinstance(about, str) else " ".join(op.name for op in about)
        if not self.over.is_set():  # what went wrong is the last that is told
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

    def unbreakable(self, label: str) -> bool:
        """Clients are driven from outside, and live on."""
        return label.startswith("client")

    def kill(self, label: str) -> None:
        """As `kill -9` does: nothing of it runs any more."""
        host = self.labels[label]
        if host.label != label or not host.alive:
            return
        self.trace("kill", label)
        self.loop.kill(label)
        host.die()
        self.died[label] = self.loop.now
        self.restart(host, self.chance.uniform(0.05, self.restart_after))

    def restart(self, host: Host, seconds: float) -> None:
        self.loop.call_later(seconds, host.start, context=self.outside.copy())

    def pause(self, host: Host) -> None:
        """As SIGSTOP does."""
        if host.alive:
            self.trace("pause", host.label)
            self.loop.stop_host(host.label)

    def suspend(self, host: Host) -> None:
        """The machine sleeps: on one that all share, everybody does, but for the world outside."""
        for each in [host] if self.kind == "remote" else self.hosts.values():
            if each.alive:
                self.trace("suspend", each.label)
                self.loop.suspend(each.label)

    def go_on(self, host: Host) -> None:
        if host.label in self.loop.stopped and host.label not in self.loop.asleep:
            self._resume(host)

    def wake(self, host: Host) -> None:
        """The machine wakes up."""
        for each in [host] if self.kind == "remote" else self.hosts.values():
            if each.label in self.loop.asleep:
                self._resume(each)

    def step(self, host: Host, seconds: float) -> None:
        """Somebody sets the wall clock of the machine."""
        for each in [host] if self.kind == "remote" else self.hosts.values():
            self.trace("clock", f"{each.label} {seconds:g}")
            each.clock.skew += seconds
            skew, booted = self._machines[each.name]
            self._machines[each.name] = skew + seconds, booted
            self.stepped[each.label] = self.loop.now

    def _resume(self, host: Host) -> None:
        self.trace("go on", host.label)
        if (since := self.loop.asleep.get(host.label)) is not None:
            host.clock.slept += self.loop.now - since
            self.naps[host.label] = since, self.loop.now
        self.loop.resume_host(host.label)
        self.woke[host.label] = self.loop.now
        if host.label in self.busy:  # perhaps what failed while it was stopped fails for it now
            self.busy[host.label] = self.loop.now
        host.up_since = self.loop.now

    def cut(self, host: Host, seconds: float) -> None:
        """Nothing gets from this host to any remote store, or back, for so long."""
        for engine in host.engines.values():
            if isinstance(engine, SimRemoteEngine) and host.alive:
                self.trace("cut off", host.label)
                engine.cut(seconds)
                # A shorter cut does not end a longer one.
                self.reachable[host.label] = max(self.reachable.get(host.label, 0.0), self.loop.now + seconds)

    def workers_since(self, *, take_over: bool) -> float | None:
        """Since when some worker has been up, and able to get to its store, without a break.

        With `take_over`, since when it may take over leases. It may not for `DEFERRED_INTERVALS` after it has found
        that the store answers again, and it calls the store once in an interval at least.
        """
        deferred = (1 + DEFERRED_INTERVALS) * self.lease / 3
        since = [
            max(
                host.up_since,
                self.reachable.get(host.label, 0.0),
                self.busy[host.label] + deferred if take_over and host.label in self.busy else 0.0,
            )
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
        place = engine.place
        if not isinstance(engine, Server):
            engine.hear(topics)
        for host in self.hosts.values():
            peer = host.engines.get(place)
            if peer is None or peer is engine or not host.alive or not topics & peer.listeners.keys():
                continue
            if isinstance(peer, SimRemoteEngine) and peer.deaf:
                continue  # it will look when it can again
            underway = self._bells.get((host.label, place))
            if underway is not None:
                underway |= topics
                continue
            self._bells[host.label, place] = set(topics)
            late = self.chance.random() < self.faults.late_bell
            seconds = 0.5 if late else self.delay()
            self.loop.call_later(seconds, self._heard, host, host.label, place, context=host.context)

    def _heard(self, host: Host, label: str, place: str) -> None:
        topics = self._bells.pop((label, place), set())
        if host.label == label and host.alive:
            host.engines[place].hear(topics)

    def failed(self, label: str, place: str) -> None:
        """A call of a host has failed at that place, as during an outage."""
        self.away[label] = self.loop.now
        if place == self.layout[0]:
            self.busy[label] = self.loop.now

    def unanswered(self, ops: Sequence[Op]) -> None:
        """A claim that never came costs a poll, one that nobody heard of is nobody's until its lease is over."""
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
        """From here on nothing goes wrong any more, and clocks that were hours apart agree on the latest."""
        self.calm = True
        self.faults = Faults(latency=self.faults.latency)
        if self.hours:
            latest = 3600.0 * self.hours + 60
            self._machines = {name: (latest, booted) for name, (_, booted) in self._machines.items()}
            for host in self.hosts.values():
                host.clock.skew = latest
                self.stepped[host.label] = self.loop.now

    def close(self) -> None:
        for host in self.hosts.values():
            host.die()
        self.loop.bury()
        if self.directory is not None:
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
            return f"{run[:4]} {how.status} failures={how.failures} crashes={how.crashes} stalls={how.crashes_in_row}"
        case "queue.insert" | "queue.take", (row, *_):
            return str(row.run_id)
    return f"{op.args!r:.80}"
