"""The real engines without their threads: commits land as steps of the simulation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agent_runtime_core._core.clock import Clock
from agent_runtime_core._engines.base import Guard, Op, OperationSet, Outcome
from agent_runtime_core._engines.commit_request import CommitRequest, PendingCommits
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._engines.sqlite.group_commit import GroupCommitter
from agent_runtime_core._engines.sqlite.readers import answer, view
from agent_runtime_core._engines.sqlite.transaction import SQLiteTx
from agent_runtime_core._engines.sqlite.writer import Writer
from agent_runtime_core.errors import StorageClosed

from .ablations import weakened
from .wire import CRASHES, TOPICS, Bells, Wire, answer_of, nobody

if TYPE_CHECKING:
    from .world import World


async def outcome(request: CommitRequest, send: Callable[[CommitRequest], None]) -> list[Any]:
    """Send a commit and wait for its answer; a cancellation is raised once that is known."""
    request.loop = loop = asyncio.get_running_loop()
    request.future = loop.create_future()
    send(request)
    try:
        await request.future
    except asyncio.CancelledError:
        while request.result is None and request.error is None:
            request.future = loop.create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await request.future
        raise
    return answer_of(request)


class Tables(MemoryEngine):
    """Dicts at a place of a world, on which commits land under the eyes of its watch."""

    def __init__(self, clock: Clock, world: World, place: str) -> None:
        self.world, self.place = world, place
        super().__init__(clock)
        self.tables = world.tables.setdefault(place, {"fence": {}})
        self.add(CRASHES)
        # Others listen, whoever does here.
        self._listeners = {topic: [nobody] for topic in TOPICS}
        self._notified: set[str] = set()
        self._replayed = False
        self._dead = False

    def die(self) -> None:
        self._dead = True

    def apply(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self._alive()
        return super().apply(guard, ops)

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._alive()
        return await super().read(fn, *args)

    def _alive(self) -> None:
        if self._dead:
            raise StorageClosed(f"the host of {self.name} is dead")

    def add(self, operation_set: OperationSet) -> None:
        super().add(weakened(operation_set, self.world.ablated))

    def land(self, batch: list[CommitRequest]) -> None:
        for request in batch:
            self._replayed = False
            try:
                guard = request.guard if self.world.guards(self.place) else None
                request.result = self.apply(guard, request.ops)
            except Exception as error:  # noqa: BLE001 - it belongs to the caller of this request
                request.error = error
                self.world.trace("refused", request.ops)
            else:
                self.world.watch.landed(request, self._replayed, self.place)
        rung, self._notified = self._notified, set()
        self.world.ring(self, self.handed_over(batch, rung))

    def handed_over(self, batch: list[CommitRequest], rung: set[str]) -> set[str]:
        """What is still to be rung for, where claims that stood have taken what came."""
        return rung

    def _replay(self, tx: Any, guard: Guard, ops: Sequence[Op]) -> list[Any]:
        self._replayed = True
        return super()._replay(tx, guard, ops)

    def notify(self, topic: str) -> None:
        self._notified.add(topic)


class SimMemoryEngine(Bells, Tables):
    """One host's engine on the tables that all hosts share."""

    def __init__(self, clock: Clock, world: World, place: str) -> None:
        self.wire = Wire(world, place, self.land)
        super().__init__(clock, world, place)

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await outcome(CommitRequest(guard, ops), self.wire.send)

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return self.wire.at_once(CommitRequest(guard, ops))

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> Outcome:
        request = CommitRequest(guard, ops)
        self.wire.send(request)
        return request

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(self.world.delay())
        return await super().read(fn, *args)

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        return self.start_beat(fn, interval)


def _nothing(operation_set: OperationSet) -> None:
    """The file has its tables."""


class SimCommitter(GroupCommitter):
    """Applies what the wire brings, and notes what became of it."""

    world: World
    place: str

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.landed: dict[CommitRequest, bool] = {}
        self._replayed = False

    def apply(self, tx: SQLiteTx, request: CommitRequest) -> bool:
        self._replayed = False
        guard = request.guard
        if not self.world.guards(self.place):
            request.guard = None
        done = super().apply(tx, request)
        request.guard = guard
        self.landed[request] = self._replayed
        return done

    def replay(self, tx: SQLiteTx, guard: Guard, ops: Sequence[Op]) -> Any:
        self._replayed = True
        return super().replay(tx, guard, ops)


class SimWriter(Writer):
    """Commits what the wire brings, and leaves the answers to it."""

    wire: Wire

    def write(self, batch: list[CommitRequest], jobs: int = 0) -> None:
        """Commit a group. Its callers are not woken here: the wire brings each answer later."""
        loops = [request.loop for request in batch]
        for request in batch:
            request.loop = None
        self._queued += len(batch) + jobs
        try:
            super().write(batch, jobs)
        finally:
            for request, loop in zip(batch, loops, strict=True):
                request.loop = loop

    def commit_on_loop(self, batch: list[CommitRequest]) -> bool:
        """Never: all goes over the wire."""
        return False

    def read_on_loop(self, short: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Read at this moment, before what is under way, or leave it to a thread, which reads a little later."""
        wire = self.wire
        if not wire.world.reads_on_loop or (wire.world.reads_alone and wire.carries):
            return None
        found = super().read_on_loop(short, args)
        wire.world.loop.note(f"read {found}")
        return found


class SimSQLiteEngine(Bells, SQLiteEngine):
    """One host's engine on a real file, with connections and proof of life of its own."""

    def __init__(self, clock: Clock, world: World, place: str) -> None:
        self.world, self.place = world, place
        self.wire = Wire(world, place, self.land)
        self._reader: sqlite3.Connection | None = None
        super().__init__(str(world.file(place)), "normal", clock)
        if not world.liveness:
            self.process_id = ""
        self.add(CRASHES)

    def add(self, operation_set: OperationSet) -> None:
        super().add(weakened(operation_set, self.world.ablated))

    def _make_writer(self, flushes: bool) -> Writer:
        self.committer: SimCommitter = SimCommitter(self, self.file.writing, path=self.path, flushes=flushes)
        self.committer.world, self.committer.place = self.world, self.place
        writer = SimWriter(self.committer, self.file, self._commit_lock, self.log, self._ring)
        writer.wire = self.wire
        if self.world.migrated(self.place):
            self.file.migrate = _nothing  # type: ignore[method-assign]
        return writer

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        """Which tasks commit within their calls is up to the seed."""
        pending = super().pending(loop)
        pending.commit_now = lambda request: not pending.waiting and self.wire.now(request)
        return pending

    def submit(self, request: CommitRequest) -> None:
        self.wire.send(request)

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self._ensure_open()
        return self.wire.at_once(CommitRequest(guard, ops))

    def land(self, batch: list[CommitRequest]) -> None:
        self.committer.landed.clear()
        self.writer.write(batch)
        for request, replayed in self.committer.landed.items():
            if request.error is None:
                self.world.watch.landed(request, replayed, self.place)
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
            result, error = view(self._reader, fn, args), None
        except Exception as failure:  # noqa: BLE001 - it belongs to the caller of this read
            result, error = None, failure
        answer(future, result, error)

    def _ring(self, topics: set[str]) -> None:
        self.world.ring(self, topics)

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        return self.start_beat(fn, interval)

    async def close(self) -> None:
        """Without a thread, which would come between at a moment of its own."""
        if self._release():
            await asyncio.get_running_loop().run_in_executor(None, self._close_now)

    def _close_now(self) -> None:
        self.wire.end()
        if self._reader is not None:
            self._reader.close()
        super()._close_now()

    def die(self) -> None:
        """What the kernel does: an open transaction is rolled back, locks are freed, files stay."""
        if self._closed:
            return
        self._closed = True
        if "rollback" in self.world.ablated and self.committer.conn.in_transaction:
            self.committer.conn.execute("COMMIT")
        for conn in (self.committer.conn, self._reader):
            if conn is not None:
                conn.close()
        os.close(self._liveness._lock_fd)
        self._liveness._lock_fd = -1
        self._commit_lock.close()
