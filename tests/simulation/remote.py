"""A store behind a network, as Redis is one: commits and reads are messages, and the server has its own clock.

Messages of one connection arrive in order, and so do their answers. A connection that breaks loses
requests or answers; what was under way then fails with StorageBusy. A request that had left before may
arrive all the same, also after those of the next connection. The server carries out a commit at once
and as a whole, and takes no record behind which others have landed, as the scripts for Redis do. Times
of leases travel as seconds from now and are the server's on arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agent_runtime_core._core.clock import Clock
from agent_runtime_core._engines.base import Engine, Guard, Op, OperationSet, Outcome
from agent_runtime_core._engines.commit_request import CommitRequest, resolve
from agent_runtime_core._engines.memory import MemoryTx
from agent_runtime_core._engines.sqlite.readers import answer
from agent_runtime_core._journal.memory import CONCERN as JOURNAL
from agent_runtime_core._journal.memory import append, applied
from agent_runtime_core._journal.record import Record
from agent_runtime_core.errors import StorageBusy, StorageClosed
from agent_runtime_core.queue.blocking_claims import BlockingClaims
from agent_runtime_core.queue.memory import InMemoryQueue
from agent_runtime_core.queue.payload_fields import decode_committed
from agent_runtime_core.queue.records import ClaimRequest, RunRow

from .loop import HOST
from .stores import Tables, outcome
from .wire import TOPICS, Bells, answer_of, repeatable

if TYPE_CHECKING:
    from .world import World

[QUEUE] = InMemoryQueue.operation_sets
LATE = 0.5  # of what had left before its connection broke arrives all the same
RECONNECT = 0.3  # seconds, at most, until there is another connection
UNKNOWN = "the connection to the simulated server broke: whether the write landed is unknown"


class Server(Tables):
    """The far end: outlives every host."""

    def __init__(self, *args: Any) -> None:
        self.standing: dict[
            str, tuple[float, ClaimRequest]
        ] = {}  # claims that found nothing, and until when they stand
        self.letters: dict[str, SimLetters] = {}  # those that are followed, as far as is known here
        super().__init__(*args)

    def add(self, operation_set: OperationSet) -> None:
        if operation_set is JOURNAL:
            operation_set = replace(operation_set, operations={**operation_set.operations, "journal.append": _in_order})
        if operation_set is QUEUE:
            operation_set = replace(
                operation_set,
                operations={**operation_set.operations, "queue.claim": self._claim, "queue.sit": self._sit},
            )
        super().add(operation_set)

    def _sit(self, tx: MemoryTx, name: str) -> bool:
        return self.standing.pop(name, None) is not None

    def _claim(self, tx: MemoryTx, want: ClaimRequest) -> list[RunRow]:
        rows: list[RunRow] = QUEUE.operations["queue.claim"](tx, want)
        if not rows and want.wait_name is not None:
            now = self.clock.boot()
            self.standing[want.wait_name] = now + want.wait_seconds, want._replace(lease_now=now)
        return rows

    def handed_over(self, batch: list[CommitRequest], rung: set[str]) -> set[str]:
        now = self.clock.boot()
        for name in [*reversed(self.standing)] if "work" in rung else ():
            until, want = self.standing[name]
            letters = self.letters.get(name)
            if until <= now or letters is None:
                del self.standing[name]
                continue
            want = want._replace(lease_until=now + want.lease_until - want.lease_now, lease_now=now, ready_only=True)
            given = CommitRequest(None, [Op("queue.claim", (want._replace(wait_name=None),))])
            token = HOST.set(letters.engine.host)
            try:
                given.result = self.apply(None, given.ops)
                self.world.watch.landed(given, False, self.place)
            finally:
                HOST.reset(token)
            if rows := given.result[0]:
                del self.standing[name]
                letters.send(rows)
                if [op.name for request in batch for op in request.ops] == ["queue.insert"]:
                    return rung - {"work"}
        return rung

    def arrive(self, host: str, request: CommitRequest) -> None:
        """Carry out a commit with the server's time."""
        request.ops = [self.timed(op) for op in request.ops]
        token = HOST.set(host)
        try:
            self.land([request])
        finally:
            HOST.reset(token)

    def look(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        try:
            return fn(MemoryTx(self.tables), *args), None
        except Exception as error:  # noqa: BLE001 - it belongs to the caller of this read
            return None, error

    def timed(self, op: Op) -> Op:
        now = self.clock.boot()
        match op:
            case Op("queue.claim", (want,)):
                return Op(op.name, (self._wanted(want, now),))
            case Op("queue.take", (row, insert, reopen, want, wait)):
                return Op(op.name, (row, insert, reopen, self._wanted(want, now), wait))
            case Op("queue.beat", (claims, seconds)):
                return Op(op.name, (claims, now + seconds))
        return op

    @staticmethod
    def _wanted(want: ClaimRequest, now: float) -> ClaimRequest:
        return want._replace(lease_until=now + want.lease_until, lease_now=now + want.lease_now)


def _in_order(tx: MemoryTx, run_id: str, record: Record) -> int:
    last = max(tx.tables["journal"].get(run_id, ()), default=-1)
    return applied(tx, run_id, record) if 0 <= record.seq <= last else append(tx, run_id, record)


class SimLetters:
    """What the server sends to one host, in order, until the connection that it goes over breaks."""

    def __init__(
        self, engine: SimRemoteEngine, name: str, take: Callable[[Any], None], lost: Callable[[], None]
    ) -> None:
        self.engine, self.name = engine, name
        self._take, self._lost = take, lost
        self._over = False
        self._at = 0.0

    async def follow(self) -> None:
        world = self.engine.world
        await asyncio.sleep(world.delay())
        if self.engine.deaf:
            raise OSError("the simulated server was not reached")
        self.engine.server.letters[self.name] = self
        self.engine.letters.append(self)

    def send(self, rows: list[RunRow]) -> None:
        world = self.engine.world
        self._at = max(world.loop.now + world.delay(), self._at + 1e-6)
        world.loop.call_at(self._at, self._told, rows, context=self.engine.context)

    def _told(self, rows: list[RunRow]) -> None:
        if self._over:
            self.engine.world.trace("letter lost", rows[0].run_id)
            self.engine.world.unanswered((Op("queue.claim"),))
        else:
            self._take(rows)

    def close(self) -> None:
        self._over = True
        self.engine.server.letters.pop(self.name, None)

    def break_off(self) -> None:
        """What is on its way is lost, and so is what the server sends until it notices."""
        self._over = True
        world, server = self.engine.world, self.engine.server
        world.loop.call_later(world.delay(), server.letters.pop, self.name, None, context=world.outside)
        world.loop.call_soon(self._lost, context=self.engine.context)


class SimRemoteQueue(InMemoryQueue):
    """Over a remote store, where claims can stand."""

    engine: Any

    def blocking_claims(self, given: Callable[[list[RunRow]], None]) -> BlockingClaims | None:
        if not self.engine.world.stands:
            return None
        return BlockingClaims(self, partial(SimLetters, self.engine), self._decoded, given)

    def _decoded(self, rows: Any) -> list[RunRow]:
        """Decode what a claim that waited has got, as the queue on Redis does."""
        return [decode_committed(self.payloads, row) for row in rows]


class Message:
    """A commit or a read on its way; `answer` or `fail` is called on its host, unless that is gone."""

    def __init__(
        self, carry: Callable[[], None], answer: Callable[[], None], fail: Callable[[], None], ops: Sequence[Op] = ()
    ) -> None:
        self.carry, self.answer, self.fail, self.ops = carry, answer, fail, ops
        self.arrived = self.told = False


class Connection:
    """In order there and back; once it broke, only what was already on its way may still arrive."""

    def __init__(self, world: World, engine: SimRemoteEngine) -> None:
        self.world, self.engine = world, engine
        self.under_way: list[Message] = []
        self.broken = False
        self._arrives = self._answers = 0.0

    def send(self, message: Message) -> None:
        world = self.world
        self.under_way.append(message)
        self._arrives = max(world.loop.now + world.delay(), self._arrives + 1e-6)
        world.loop.call_at(self._arrives, self._arrive, message, context=world.outside)

    def _arrive(self, message: Message) -> None:
        if message.told or self.broken:
            return
        message.carry()
        message.arrived = True
        if self.world.chance.random() < self.world.faults.cut:
            self.world.trace("cut", "the answer is lost")
            self.engine.cut()
            return
        self._answers = max(self.world.loop.now + self.world.delay(), self._answers + 1e-6)
        self.world.loop.call_at(self._answers, self._answer, message, context=self.engine.context)

    def _answer(self, message: Message) -> None:
        if not message.told:
            message.told = True
            self.under_way.remove(message)
            message.answer()

    def break_off(self) -> None:
        """All that is under way fails; what has not arrived is lost, or late."""
        self.broken = True
        world, failed = self.world, [message for message in self.under_way if not message.told]
        self.under_way.clear()
        for message in failed:
            message.told = True
            if not message.arrived and message.ops and self.engine.late and world.chance.random() < LATE:
                world.loop.call_later(world.chance.random() * 0.5, self._late, message, context=world.outside)
            world.unanswered(message.ops)
            world.loop.call_soon(message.fail, context=self.engine.context)

    def _late(self, message: Message) -> None:
        self.world.trace("late", message.ops)
        self.world.unanswered(message.ops)
        message.carry()


class SimRemoteEngine(Bells, Engine):
    """One host's way to a server of its world."""

    kind = "remote"

    def __init__(self, clock: Clock, world: World, place: str) -> None:
        self.world, self.place, self.clock = world, place, clock
        super().__init__()
        self.server: Server = world.server(place)
        self.host = HOST.get()
        self.context = world.labels[self.host].context
        # What `execute` gives up in its last attempt may land between its last look at the journal and its end, and
        # where the log is elsewhere the event of such a record is not told: see "What is not promised".
        self.late = not self.host.startswith("executor")
        self._closed = False
        self._up_at = 0.0
        self._connection: Connection | None = None
        self.letters: list[SimLetters] = []

    def add(self, operation_set: OperationSet) -> None:
        self.server.add(operation_set)

    async def fence_of(self, key: str) -> str | None:
        token: str | None = await self.read(MemoryTx.fenced, key)
        return token

    # -- the connection

    @property
    def deaf(self) -> bool:
        return self._closed or self.world.loop.now < self._up_at

    def cut(self, seconds: float | None = None) -> None:
        """Break the connection; another one can be made after so many seconds."""
        broken, self._connection = self._connection, None
        wait = self.world.chance.random() * RECONNECT if seconds is None else seconds
        self._up_at = max(self._up_at, self.world.loop.now + wait)
        self.world.loop.call_at(self._up_at, self._back, context=self.context)
        if broken is not None:
            broken.break_off()
        letters, self.letters = self.letters, []
        for each in letters:
            each.break_off()

    def _back(self) -> None:
        # Whatever was rung meanwhile was not heard.
        if not self._closed and self.world.loop.now >= self._up_at:
            self.hear({*TOPICS})

    def _send(self, message: Message) -> None:
        world = self.world
        if world.loop.now < self._up_at:
            world.trace("no way", self.host)
            world.loop.call_later(world.delay(), message.fail)
            return
        if self._connection is None:
            self._connection = Connection(world, self)
        self._connection.send(message)
        if world.chance.random() < world.faults.cut:
            world.trace("cut", "the request is lost or late")
            self.cut()

    # -- writing

    def _relative(self, op: Op) -> Op:
        now = self.clock.boot()
        match op:
            case Op("queue.claim", (want,)):
                return Op(op.name, (self._seconds(want, now),))
            case Op("queue.take", (row, insert, reopen, want, wait)):
                return Op(op.name, (row, insert, reopen, self._seconds(want, now), wait))
            case Op("queue.beat", (claims, until)):
                return Op(op.name, (claims, until - now))
        return op

    @staticmethod
    def _seconds(want: ClaimRequest, now: float) -> ClaimRequest:
        return want._replace(lease_until=want.lease_until - now, lease_now=want.lease_now - now)

    def _submit(self, request: CommitRequest) -> None:
        world = self.world
        request.ops = [self._relative(op) for op in request.ops]
        message = self._message(request)
        if world.chance.random() < world.faults.crash and not world.unbreakable(self.host):
            self._die_at(message)
            return
        self._send(message)
        if repeatable(request) and world.chance.random() < world.faults.doubled:
            world.trace("doubled", request.ops)
            again = CommitRequest(request.guard, request.ops)
            self._send(Message(partial(self.server.arrive, self.host, again), _nothing, _nothing))

    def _message(self, request: CommitRequest) -> Message:
        # What arrives late has an answer of its own: its sender has got one already.
        there = CommitRequest(request.guard, request.ops)
        return Message(
            partial(self.server.arrive, self.host, there),
            lambda: _tell(request, there.result, there.error),
            lambda: self._fail(request),
            request.ops,
        )

    def _fail(self, request: CommitRequest) -> None:
        if request.future is not None or request.done is not None:
            self.world.failed(self.host, self.place)
        _tell(request, None, StorageBusy(UNKNOWN))

    def _die_at(self, message: Message) -> None:
        """The host dies before it has sent this, once it has, or when it hears of the outcome."""
        world, where = self.world, self.world.chance.randrange(3)
        world.trace("crash", ("before sending", "after sending", "answered")[where])

        def die() -> None:
            world.loop.call_soon(world.kill, self.host, context=world.outside)

        if where == 2:
            message.answer = message.fail = die
        if where:
            self._send(message)
        if where < 2:
            die()

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self._ensure_open()
        return await outcome(CommitRequest(guard, ops), self._submit)

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """For the beat, which has a thread and a connection of its own."""
        world, faults = self.world, self.world.faults
        if self._closed or world.loop.now < self._up_at or world.chance.random() < faults.lost + faults.cut:
            world.failed(self.host, self.place)
            raise StorageBusy("the simulated server was not reached")
        request = CommitRequest(guard, [self._relative(op) for op in ops])
        self.server.arrive(self.host, request)
        if world.chance.random() < faults.unanswered + faults.cut:
            world.failed(self.host, self.place)
            raise StorageBusy(UNKNOWN)
        return answer_of(request)

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> Outcome:
        self._ensure_open()
        request = CommitRequest(guard, ops)
        self._submit(request)
        return request

    # -- the rest

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._ensure_open()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        seen: list[Any] = []

        def fail() -> None:
            self.world.failed(self.host, self.place)
            answer(future, None, StorageBusy("the connection to the simulated server broke"))

        self._send(Message(lambda: seen.append(self.server.look(fn, args)), lambda: answer(future, *seen[0]), fail))
        return await future

    def lease_now(self) -> float:
        return self.clock.boot()

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        return self.start_beat(fn, interval)

    def _ensure_open(self) -> None:
        if self._closed:
            raise StorageClosed(f"the way to {self.place} was closed")

    async def close(self) -> None:
        self._closed = True

    def die(self) -> None:
        """What left the host is on its way; no answer will be heard, and no letter."""
        self._closed = True
        for each in self.letters:
            each.close()


def _tell(request: CommitRequest, result: list[Any] | None, error: BaseException | None) -> None:
    request.result, request.error = result, error
    resolve([request])


def _nothing() -> None:
    """Nobody waits for it."""
