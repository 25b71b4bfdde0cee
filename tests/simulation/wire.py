"""How a host reaches a store, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_runtime_core._core.clock import Clock
from agent_runtime_core._engines.base import Op, OperationSet
from agent_runtime_core._engines.commit_request import CommitRequest, resolve
from agent_runtime_core.errors import StorageBusy

from .loop import HOST, SimLoop

if TYPE_CHECKING:
    from .world import World

EPOCH = 1_700_000_000.0
WALL_CHECK = 0.3  # seconds; the durations here are as short
CRASH = "sim.crash"
REPEATABLE = frozenset({"queue.insert", "queue.post", "queue.beat", "fence.install"})
TOPICS = frozenset({"work", "mail", "done", "events"})


class Killed(BaseException):
    """Raised inside a commit at the place where its host dies."""


def crash(tx: Any) -> None:
    raise Killed


CRASHES = OperationSet("sim", {CRASH: crash})


class SimClock(Clock):
    """Time as a machine has it.

    `skew` is how far its wall clock is off, `booted` what its boot clock counts from, and `slept` for how long its
    monotonic clock stood still.
    """

    wall_check = WALL_CHECK

    def __init__(self, loop: SimLoop, seed: int, skew: float, booted: float = 0.0) -> None:
        super().__init__(seed)
        self._context = copy_context()  # all hosts share one loop: the host of a callback is known by its context
        self.skew = skew
        self.booted = booted
        self.slept = 0.0
        self._loop = loop

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, callback, context=self._context)

    def wall(self) -> float:
        return EPOCH + self.skew + self._loop.now

    def boot(self) -> float:
        return self.booted + self._loop.now

    def monotonic(self) -> float:
        return self.booted + self._loop.now - self.slept


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
    cut: float = 0.0  # of a remote store: the connection breaks while the message or its answer is on the way


class Wire:
    """The way of one host's commits to the store and back, in order."""

    def __init__(self, world: World, place: str, land: Callable[[list[CommitRequest]], None]) -> None:
        self.world, self._place, self._land = world, place, land
        self._host = HOST.get()
        self._inbox: list[CommitRequest] = []
        self._replied = 0.0

    @property
    def carries(self) -> bool:
        """Whether a commit is on its way to the store."""
        return bool(self._inbox)

    def send(self, request: CommitRequest) -> None:
        self._inbox.append(request)
        if len(self._inbox) == 1:
            self.world.loop.call_later(self.world.delay(), self._turn)

    def at_once(self, request: CommitRequest) -> list[Any]:
        """For the beat, which has a thread of its own."""
        self._carry([request])
        if isinstance(request.error, StorageBusy):
            self.world.failed(self._host, self._place)
        return answer_of(request)

    def now(self, request: CommitRequest) -> bool:
        """Land a commit within the call that requests it; False if it must wait for others, or happens to."""
        if self._inbox or self.world.chance.random() < 0.5:
            return False
        try:
            if self.world.chance.random() < self.world.faults.crash and not self.world.unbreakable(self._host):
                crash_amid(self.world, [request], self._land)
            self._land([request])
        except Killed:
            self.world.kill(self._host)
            return False  # its task sends the commit over the wire, which takes nothing from a dead host
        self.world.trace("now", request.ops)
        return True

    def end(self) -> None:
        """The host lets go of the store in good order: what it has sent gets there before."""
        batch, self._inbox = self._inbox, []
        self._land(batch)
        resolve([request for request in batch if request.future is not None])

    def _turn(self) -> None:
        batch, self._inbox = self._inbox, []
        if not batch:
            return  # the host has let go since
        try:
            self._carry(batch)
        except Killed:
            self.world.kill(self._host)
            return
        loop = self.world.loop
        self._replied = max(loop.now + self.world.delay(), self._replied + 1e-6)
        waiting = [request for request in batch if request.future is not None]
        if waiting:
            loop.call_at(self._replied, resolve, waiting)

    def _carry(self, batch: list[CommitRequest]) -> None:
        world, chance, faults = self.world, self.world.chance.random, self.world.faults
        going: list[CommitRequest] = []
        mute: list[CommitRequest] = []
        for request in batch:
            waits = request.future is not None or request.done is not None
            dice = chance()
            if dice < (faults.lost if waits else faults.dropped):
                request.error = StorageBusy("the simulated store did not get it")
                if waits:
                    world.failed(self._host, self._place)
                world.trace("lost", request.ops)
                world.unanswered(request.ops)
                continue
            going.append(request)
            dice = chance()
            if waits and dice < faults.unanswered:
                mute.append(request)
            elif dice > 1 - faults.doubled and repeatable(request):
                world.trace("doubled", request.ops)
                going.append(CommitRequest(request.guard, request.ops))
        if chance() < faults.crash and going and not world.unbreakable(self._host):
            crash_amid(world, going, self._land)
        else:
            self._land(going)
        for request in mute:
            if request.error is None:
                world.trace("unanswered", request.ops)
                request.result, request.error = None, StorageBusy("the simulated store did not answer")
                world.failed(self._host, self._place)
                world.unanswered(request.ops)


def crash_amid(world: World, going: list[CommitRequest], land: Callable[[list[CommitRequest]], None]) -> None:
    """Land nothing, a part that is taken back, or all of it, and die."""
    chance, where = world.chance, world.chance.randrange(3)
    world.trace("crash", ("before", "amid", "after")[where])
    if where == 1:
        request = chance.choice(going)
        if any(op.name == "queue.claim" for op in request.ops) and not world.undoes_claims:
            raise Killed  # its hints of what is ready do not come back with the rows
        ops = list(request.ops)
        ops.insert(chance.randint(0, len(ops)), Op(CRASH))
        request.ops = ops
    if where > 0:
        land(going)
    raise Killed


def answer_of(request: CommitRequest) -> list[Any]:
    if request.error is not None:
        raise request.error
    assert request.result is not None
    return request.result


def repeatable(request: CommitRequest) -> bool:
    if request.guard is not None:
        return all(op.name != "journal.transact" for op in request.ops)
    return all(op.name in REPEATABLE for op in request.ops)


def nobody() -> None:
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
        stopped, late = "beat" in world.ablated, -1.0

        def turn() -> None:
            nonlocal late
            if stopped:
                return
            if world.woke.get(host) == loop.now != late:  # a process that goes on may run another thread first
                late = loop.now
                loop.call_later(world.chance.random() * 0.2, turn)
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
