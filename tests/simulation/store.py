"""The real engines without their threads: commits land as steps of the simulation, and things go wrong on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_runtime_core._clock import Clock
from agent_runtime_core._engines.base import Concern, Guard, Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._engines.requests import Request, settle
from agent_runtime_core._engines.sqlite import SQLiteEngine, _answer
from agent_runtime_core._engines.sqlite_tx import SQLiteTx
from agent_runtime_core._engines.sqlite_writer import Writer
from agent_runtime_core.errors import StorageBusy

from .loop import HOST, SimLoop

if TYPE_CHECKING:
    from .world import World

EPOCH = 1_700_000_000.0
CRASH = "sim.crash"
REPEATABLE = frozenset({"queue.insert", "queue.post", "queue.beat", "fence.install"})


class Killed(BaseException):
    """Raised inside a commit at the place where its host dies."""


def crash(tx: Any) -> None:
    raise Killed


CRASHES = Concern("sim", {CRASH: crash})


class SimClock(Clock):
    """Time as the loop has it; `skew` is how far this host's wall clock is off."""

    def __init__(self, loop: SimLoop, seed: int, skew: float) -> None:
        super().__init__(seed)
        self.skew = skew
        self._loop = loop

    def wall(self) -> float:
        return EPOCH + self.skew + self._loop.now

    def boot(self) -> float:
        return self._loop.now


@dataclass(frozen=True)
class Faults:
    """Chances per commit; `latency` is the longest way in seconds."""

    latency: float = 0.01
    lost: float = 0.0  # never arrives, and the caller is told so late
    unanswered: float = 0.0  # lands, but the caller hears nothing
    doubled: float = 0.0  # arrives twice
    dropped: float = 0.0  # for commits nobody waits for
    crash: float = 0.0  # the host dies before, in the middle of, or right after it
    late_bell: float = 0.0


class Wire:
    """The way of one host's commits to the store and back, in order."""

    def __init__(self, world: World, land: Callable[[list[Request]], None]) -> None:
        self.world, self._land = world, land
        self._host = HOST.get()
        self._inbox: list[Request] = []
        self._replied = 0.0

    def send(self, request: Request) -> None:
        self._inbox.append(request)
        if len(self._inbox) == 1:
            self.world.loop.call_later(self.world.delay(), self._turn)

    def at_once(self, request: Request) -> list[Any]:
        """For the beat, which has a thread of its own."""
        self._carry([request])
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def _turn(self) -> None:
        batch, self._inbox = self._inbox, []
        try:
            self._carry(batch)
        except Killed:
            self.world.kill(self._host)
            return
        loop = self.world.loop
        self._replied = max(loop.now + self.world.delay(), self._replied + 1e-6)
        waiting = [request for request in batch if request.future is not None]
        if waiting:
            loop.call_at(self._replied, settle, waiting)

    def _carry(self, batch: list[Request]) -> None:
        world, chance, faults = self.world, self.world.chance.random, self.world.faults
        going: list[Request] = []
        mute: list[Request] = []
        for request in batch:
            waits = request.future is not None or request.done is not None
            dice = chance()
            if dice < (faults.lost if waits else faults.dropped):
                request.error = StorageBusy("the simulated store did not get it")
                world.trace("lost", request.ops)
                continue
            going.append(request)
            dice = chance()
            if waits and dice < faults.unanswered:
                mute.append(request)
            elif dice > 1 - faults.doubled and _repeatable(request):
                world.trace("doubled", request.ops)
                going.append(Request(request.guard, request.ops))
        if chance() < faults.crash and going and self._host.partition(".")[0] != world.unbreakable:
            self._crash(going)
        else:
            self._land(going)
        for request in mute:
            if request.error is None:
                world.trace("unanswered", request.ops)
                request.result, request.error = None, StorageBusy("the simulated store did not answer")
                world.unanswered(request.ops)

    def _crash(self, going: list[Request]) -> None:
        chance, where = self.world.chance, self.world.chance.randrange(3)
        self.world.trace("crash", ("before", "amid", "after")[where])
        if where == 1:
            request = chance.choice(going)
            if any(op.name == "queue.claim" for op in request.ops) and self.world.backend == "memory":
                raise Killed  # its hints of what is ready do not come back with the rows
            ops = list(request.ops)
            ops.insert(chance.randint(0, len(ops)), Op(CRASH))
            request.ops = ops
        if where > 0:
            self._land(going)
        raise Killed


def _repeatable(request: Request) -> bool:
    if request.guard is not None:
        return all(op.name != "journal.transact" for op in request.ops)
    return all(op.name in REPEATABLE for op in request.ops)


def _nobody() -> None:
    """Listens to everything."""


class Bells:
    """Listening without threads; what other hosts ring comes a little later."""

    world: World

    def __init__(self, *args: Any) -> None:
        self.listeners: dict[str, list[Callable[[], None]]] = {}
        super().__init__(*args)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        listeners = self.listeners.setdefault(topic, [])
        listeners.append(wake)

        def stop() -> None:
            if wake in listeners:
                listeners.remove(wake)

        return stop

    def hear(self, topics: set[str]) -> None:
        for topic in sorted(topics):
            for wake in tuple(self.listeners.get(topic, ())):
                wake()

    def start_beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        loop, world, host = self.world.loop, self.world, HOST.get()
        stopped = False

        def turn() -> None:
            if stopped:
                return
            try:
                fn()
            except Killed:
                world.kill(host)
                return
            loop.call_later(interval, turn)

        def stop() -> None:
            nonlocal stopped
            stopped = True

        loop.call_later(interval, turn)
        return stop


class SimMemoryEngine(Bells, MemoryEngine):
    """One host's engine on the tables that all hosts share."""

    def __init__(self, clock: Clock, world: World) -> None:
        self.world = world
        self.wire = Wire(world, self.land)
        super().__init__(clock)
        self.tables = world.tables
        self.tables.setdefault("fence", {})
        self.add(CRASHES)
        # Others listen, whoever does here.
        self._listeners = {topic: [_nobody] for topic in ("work", "mail", "done", "events")}
        self._rung: set[str] = set()
        self._replayed = False

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        request = Request(guard, ops)
        request.loop = loop = asyncio.get_running_loop()
        request.future = loop.create_future()
        self.wire.send(request)
        try:
            await request.future
        except asyncio.CancelledError:
            while request.result is None and request.error is None:
                request.future = loop.create_future()
                with contextlib.suppress(asyncio.CancelledError):
                    await request.future
            raise
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return self.wire.at_once(Request(guard, ops))

    def post(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        self.wire.send(Request(guard, ops))

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(self.world.delay())
        return await super().read(fn, *args)

    def land(self, batch: list[Request]) -> None:
        for request in batch:
            self._replayed = False
            try:
                guard = None if "fence" in self.world.ablated else request.guard
                request.result = self.apply(guard, request.ops)
            except Exception as error:  # noqa: BLE001 - it belongs to the caller of this request
                request.error = error
                self.world.trace("refused", request.ops)
            else:
                self.world.watch.landed(request, self._replayed)
        rung, self._rung = self._rung, set()
        self.world.ring(self, rung)

    def _replay(self, tx: Any, guard: Guard, ops: Sequence[Op]) -> list[Any]:
        self._replayed = True
        return super()._replay(tx, guard, ops)

    def ring(self, topic: str) -> None:
        self._rung.add(topic)

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        return self.start_beat(fn, interval)

    def die(self) -> None:
        self._closed = True


def _nothing(concern: Concern) -> None:
    """The file has its tables."""


class SimWriter(Writer):
    """Carries out what the wire brings, and notes what became of it."""

    world: World

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.landed: dict[Request, bool] = {}
        self._replayed = False

    def apply(self, tx: SQLiteTx, request: Request) -> bool:
        self._replayed = False
        guard = request.guard
        if "fence" in self.world.ablated:
            request.guard = None
        done = super().apply(tx, request)
        request.guard = guard
        self.landed[request] = self._replayed
        return done

    def replay(self, tx: SQLiteTx, guard: Guard, ops: Sequence[Op]) -> Any:
        self._replayed = True
        return super().replay(tx, guard, ops)

    def now(self, batch: list[Request]) -> bool:
        """Never: all goes over the wire."""
        return False

    def deliver(self, batch: list[Request]) -> None:
        """The wire brings the answers."""


class SimSQLiteEngine(Bells, SQLiteEngine):
    """One host's engine on a real file, with connections and proof of life of its own."""

    def __init__(self, path: str, clock: Clock, world: World) -> None:
        self.world = world
        self.wire = Wire(world, self.land)
        self._reader: sqlite3.Connection | None = None
        super().__init__(path, "normal", clock)
        if not world.liveness:
            self.holder = ""
        self.add(CRASHES)

    def _make_writer(self, flushes: bool) -> Writer:
        writer = SimWriter(
            self, self.file.writing, self._commit_lock, self.log, self._ring, path=self.path, flushes=flushes
        )
        writer.world = self.world
        self.writer: SimWriter = writer
        if self.world.migrated:
            self.file.migrate = _nothing  # type: ignore[method-assign]
        return writer

    def submit(self, request: Request) -> None:
        self.wire.send(request)

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self._usable()
        return self.wire.at_once(Request(guard, ops))

    def land(self, batch: list[Request]) -> None:
        self.writer.landed.clear()
        self.writer.write(batch)
        for request, replayed in self.writer.landed.items():
            if request.error is None:
                self.world.watch.landed(request, replayed)
            else:
                self.world.trace("refused", request.ops)

    def submit_read(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        loop.call_later(self.world.delay(), self._look, fn, args, future)

    def _look(self, fn: Callable[..., Any], args: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        self._reader = self._reader or self.file.connect()
        try:
            result, error = self.view(self._reader, fn, args), None
        except Exception as failure:  # noqa: BLE001 - it belongs to the caller of this read
            result, error = None, failure
        _answer(future, result, error)

    def _ring(self, topics: set[str]) -> None:
        self.world.ring(self, topics)

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        return self.start_beat(fn, interval)

    def _shut(self) -> None:
        if self._reader is not None:
            self._reader.close()
        super()._shut()

    def die(self) -> None:
        """What the kernel does: an open transaction is rolled back, locks are freed, files stay."""
        if self._closed:
            return
        self._closed = True
        if "rollback" in self.world.ablated and self.writer.conn.in_transaction:
            self.writer.conn.execute("COMMIT")
        for conn in (self.writer.conn, self._reader):
            if conn is not None:
                conn.close()
        os.close(self._presence._lock_fd)
        self._presence._lock_fd = -1
        self._commit_lock.close()
