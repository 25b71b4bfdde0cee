"""The writes of one claim: together on one engine, in a fixed order over several, refused once superseded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from agent_runtime_core._core.clock import Clock
from agent_runtime_core._engines.base import FORGET, INSTALL, Guard, Op
from agent_runtime_core._execution.claim_writer import BUSY_ATTEMPTS, ClaimWriter, WriteBuffer, derived_rows, publish_op
from agent_runtime_core._execution.step_journal import StepJournal
from agent_runtime_core._journal.record import Record
from agent_runtime_core.errors import LeaseLost, StorageBusy, StorageFull
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.queue.records import RowChanged, RunRow, RunUpdate
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.testing import VirtualClock


class Watched:
    """Three backends, on one engine or on three, whose commits are noted; the first `busy` ones go unanswered."""

    def __init__(self, apart: bool) -> None:
        clock = VirtualClock()
        self.queue = InMemoryQueue(clock=clock)
        engine = None if apart else self.queue.engine
        self.bus = InMemoryEventBus(engine=engine, clock=clock)
        self.state = InMemoryStateStore(engine=engine, clock=clock)
        self.seen: list[tuple[str, list[str]]] = []
        self.busy = 0
        names = {id(self.queue.engine): "queue", id(self.bus.engine): "bus", id(self.state.engine): "state"}
        for backend in (self.queue, self.bus, self.state):
            self.watcher(backend.engine, names[id(backend.engine)])

    def watcher(self, engine: Any, name: str) -> None:
        if "commit" in vars(engine):
            return
        commit, post = engine.commit, engine.commit_nowait

        async def watched(guard: Guard | None, ops: Sequence[Op]) -> Any:
            self.seen.append((name, [op.name for op in ops]))
            result = await commit(guard, ops)
            if self.busy:
                self.busy -= 1
                raise StorageBusy("no answer")
            return result

        def posted(guard: Guard | None, ops: Sequence[Op]) -> None:
            self.seen.append((f"{name}!", [op.name for op in ops]))
            post(guard, ops)

        engine.commit, engine.commit_nowait = watched, posted

    async def claimed(self, run_id: str = "r") -> ClaimWriter:
        await self.queue.enqueue(run_id, "agent", {})
        return await self.again()

    async def again(self) -> ClaimWriter:
        run: RunRow = (await self.queue.claim_rows("w", 60))[0]
        self.seen.clear()
        return ClaimWriter(run, self.queue, self.bus, self.state, self.queue.clock)

    async def kinds(self) -> list[str]:
        return [event.event_type for event in await self.bus.get_events("r")]


@pytest.fixture(params=[False, True], ids=["one engine", "three engines"])
def apart(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def record(writer: ClaimWriter, kind: str = "done", name: str = "a", **more: Any) -> Record:
    return Record(writer.next_seq(), kind, name, "s:0", 1, writer.claim_id, 1.0, result="1", nev=1, **more)


def ended(writer: ClaimWriter) -> tuple[RunUpdate, Record]:
    how = RunUpdate(writer.claim_id, "succeeded", 5.0)
    return how, Record(writer.next_seq(), "ended", "succeeded", "", 1, writer.claim_id, 5.0, "{}", info="{}", nev=1)


async def test_an_ending_is_one_commit_or_three_in_order(apart: bool) -> None:
    backends = Watched(apart)
    writer = await backends.claimed()
    assert await writer.open() == []
    backends.seen.clear()
    how, last = ended(writer)
    await writer.update_run(how, [last])
    state = ["journal.append", "state.status"]
    if apart:
        assert backends.seen == [
            ("state", [*state, INSTALL]),
            ("bus", ["events.publish", INSTALL]),
            ("queue", ["queue.settle"]),
        ]
    else:
        assert [ops for _, ops in backends.seen] == [[*state, "queue.settle"]]
    assert await backends.kinds() == ["run.succeeded"]
    assert await backends.state.get_run_status(writer.run_id) == "succeeded"
    assert (await backends.queue.require(writer.run_id)).status == "succeeded"


async def test_a_claim_is_carried_to_the_other_engines_before_the_first_read() -> None:
    backends = Watched(apart=True)
    writer = await backends.claimed()
    await writer.open()
    # The first claim of a process also checks that the engines have separate fences.
    assert backends.seen == [("state", [FORGET]), ("state", [INSTALL]), ("bus", [FORGET]), ("bus", [INSTALL])]
    backends.seen.clear()
    backends = Watched(apart=False)
    await (await backends.claimed()).open()
    assert backends.seen == []


async def test_a_superseded_claim_is_refused_everywhere(apart: bool) -> None:
    backends = Watched(apart)
    old = await backends.claimed()
    await old.open()
    backends.queue.clock.advance(61)  # type: ignore[attr-defined]
    new = await backends.again()
    await new.open()
    assert new.claim_id > old.claim_id
    row = ("e1", "late", "{}", 1.0)
    how, last = ended(old)
    for write in (
        old.append(record(old)),
        old.emit([row]),
        old.checkpoint("{}", "m", row),
        old.update_run(how, [last]),
    ):
        with pytest.raises(LeaseLost):
            await write
    await old.buffer(record(old))
    assert await backends.kinds() == []
    assert await backends.state.records(old.run_id) == []
    await new.append(record(new))
    assert await backends.kinds() == ["step.completed"]


async def test_an_unanswered_write_is_repeated_and_lands_once(apart: bool) -> None:
    backends = Watched(apart)
    writer = await backends.claimed()
    await writer.open()
    backends.busy = BUSY_ATTEMPTS
    await writer.append(record(writer))
    assert [each.name for each in await backends.state.records(writer.run_id)] == ["a"]
    assert await backends.kinds() == ["step.completed"]
    backends.busy = 99
    with pytest.raises(StorageBusy) as told:
        await writer.append(record(writer, name="b"))
    assert told.value.tries == BUSY_ATTEMPTS + 1
    backends.busy = 0


async def test_the_end_of_a_step_is_repeated_too_and_lands_once(apart: bool) -> None:
    backends = Watched(apart)
    writer = await backends.claimed()
    journal = StepJournal(writer, await writer.open())
    end = record(writer)

    def asked() -> int:
        return sum(name != "bus" and "journal.append" in ops for name, ops in backends.seen)

    backends.busy = 2
    await journal.write((end,), (), None)
    assert journal.view.completed[end.name, end.key] == end
    assert (asked(), await backends.kinds()) == (3, ["step.completed"])
    backends.seen.clear()
    backends.busy = 99
    with pytest.raises(StorageBusy) as told:
        await journal.write((record(writer, name="b"),), (), None)
    assert told.value.tries == asked() == (BUSY_ATTEMPTS + 1 if apart else BUSY_ATTEMPTS + 2)
    backends.busy = 0


async def test_what_a_crash_left_out_is_published_by_the_next_claim() -> None:
    backends = Watched(apart=True)
    writer = await backends.claimed()
    await writer.open()
    await writer.append(record(writer))
    # The journal got one more, the bus did not.
    lost = record(writer, name="b")
    await backends.state.engine.commit(writer.guard, [Op("journal.append", (writer.run_id, lost))])
    assert await backends.kinds() == ["step.completed"]
    backends.queue.clock.advance(61)  # type: ignore[attr-defined]
    again = await backends.again()
    assert [each.name for each in await again.open()] == ["a", "b"]
    names = [event.payload["step_name"] for event in await backends.bus.get_events("r")]
    assert names == ["a", "b"]
    assert again.next_seq() == 2


async def test_what_was_published_for_a_record_that_never_landed_hides_no_other() -> None:
    backends = Watched(apart=True)
    writer = await backends.claimed()
    await writer.open()
    lost = record(writer, name="lost")
    await writer.write(events=[publish_op(writer.run_id, derived_rows(writer.run_id, lost))])
    backends.queue.clock.advance(61)  # type: ignore[attr-defined]
    again = await backends.again()
    assert await again.open() == []
    how, last = ended(again)
    assert last.seq == lost.seq
    await again.update_run(how, [last])
    assert await backends.kinds() == ["step.completed", "run.succeeded"]


async def test_an_end_published_under_no_claim_is_not_published_again() -> None:
    backends = Watched(apart=True)
    writer = await backends.claimed()
    last = Record(-1, "ended", "cancelled", attempt=1, t=5.0, result="{}", info="{}", nev=1)
    await backends.state.engine.commit(None, [Op("journal.append", (writer.run_id, last))])
    await backends.bus.publish(writer.run_id, "run.cancelled", {}, event_id="end:1")
    await writer.open()
    assert await backends.kinds() == ["run.cancelled"]


async def test_an_end_publishes_what_an_interrupted_write_left_out() -> None:
    backends = Watched(apart=True)
    writer = await backends.claimed()
    await writer.open()
    publish, backends.bus.engine.commit = backends.bus.engine.commit, never  # type: ignore[method-assign]
    writing = asyncio.ensure_future(writer.append(record(writer)))
    while not await backends.state.records(writer.run_id):  # noqa: ASYNC110 - nobody rings for it
        await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing})
    backends.bus.engine.commit = publish  # type: ignore[method-assign]
    how, last = ended(writer)
    await writer.update_run(how, [last])
    assert await backends.kinds() == ["step.completed", "run.succeeded"]


async def never(guard: Guard | None, ops: Sequence[Op]) -> Any:
    await asyncio.Event().wait()


async def test_records_are_read_in_the_order_of_the_journal_however_late_they_came(apart: bool) -> None:
    backends = Watched(apart)
    writer = await backends.claimed()
    await writer.open()
    first, second = record(writer), record(writer, name="b")
    await writer.append(second)
    await writer.append(first)
    assert [each.name for each in await backends.state.records(writer.run_id)] == ["a", "b"]


async def test_a_moved_row_refuses_the_whole_commit_on_one_engine() -> None:
    backends = Watched(apart=False)
    writer = await backends.claimed()
    await writer.open()
    await backends.queue.post(writer.run_id, "signal", "go", "1")
    how, last = ended(writer)
    with pytest.raises(RowChanged):
        await writer.update_run(how._replace(cursor=0), [last])
    assert await backends.state.records(writer.run_id) == []
    assert (await backends.queue.require(writer.run_id)).status == "running"


async def test_a_revoked_writer_writes_nothing_more(apart: bool) -> None:
    backends = Watched(apart)
    writer = await backends.claimed()
    await writer.open()
    writer.revoke()
    with pytest.raises(LeaseLost):
        await writer.append(record(writer))


async def test_status_and_notes_do_not_wait(apart: bool) -> None:
    backends = Watched(apart)
    writer = await backends.claimed()
    await writer.open()
    await writer.status("running", record(writer, "started"))
    assert await backends.state.get_run_status(writer.run_id) == "running"
    await writer.buffer(record(writer))
    assert await backends.kinds() == ["step.started", "step.completed"]
    assert str(UUID(writer.run_id)) == writer.run_id


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside others"])
async def test_what_was_noted_is_not_lost_with_a_commit_that_is_refused(others: bool) -> None:
    backends = Watched(apart=False)
    backends.queue.engine.buffer_delay = 60.0
    writer = await backends.claimed()
    await writer.buffer(Record(writer.next_seq(), "attempt", "agent", "", 1, writer.claim_id, 1.0, nev=1))
    await backends.queue.post(writer.run_id, "signal", "go", "1")
    commit, told = backends.queue.engine.commit, asyncio.Event()

    async def told_late(guard: Guard | None, ops: Sequence[Op]) -> Any:
        try:
            return await commit(guard, ops)
        except RowChanged:
            await told.wait()
            raise

    backends.queue.engine.commit = told_late  # type: ignore[method-assign]
    parking = asyncio.ensure_future(writer.update_run(RunUpdate(writer.claim_id, "waiting", 5.0, cursor=0)))
    await asyncio.sleep(0)
    if others:
        await writer.append(record(writer, name="beside"))
    told.set()
    with pytest.raises(RowChanged):
        await parking
    await writer.append(record(writer))
    assert sorted(await backends.kinds()) == ["run.started", *["step.completed"] * (1 + others)]
    records = await backends.state.records(writer.run_id)
    assert [each.ev for each in records] == [*range(len(records))], "places and events grow together"


class _Sent:
    """The outcome of a write that nobody waited for."""

    result: list[Any] | None = None
    error: BaseException | None = None


@pytest.mark.parametrize("delay", [0.0, 60.0], ids=["sent immediately", "buffered"])
@pytest.mark.parametrize("known", ["before", "with the next commit"])
@pytest.mark.parametrize("error", [StorageFull("no space"), StorageBusy("no answer")])
async def test_what_an_outage_has_refused_is_not_lost(error: Exception, known: str, delay: float) -> None:
    """The first record of a run names the version of its code."""
    backends, sent = Watched(apart=False), _Sent()
    engine = backends.queue.engine
    engine.buffer_delay = delay
    writer = await backends.claimed()
    nowait, commit, refusals = engine.commit_nowait, engine.commit, [error]

    async def refused(guard: Guard | None, ops: Sequence[Op]) -> Any:
        sent.error = error
        if refusals and known != "before":
            raise refusals.pop()
        return await commit(guard, ops)

    vars(engine)["commit_nowait"] = lambda guard, ops: sent
    vars(engine)["commit"] = refused
    began = Record(writer.next_seq(), "attempt", "agent", "", 1, writer.claim_id, 1.0, nev=1)
    await writer.buffer(began)
    writer.flush()
    if known == "before":
        sent.error = error

    async def outlast(began: float) -> bool:
        return True

    writer.outlast = outlast
    await writer.append(done := record(writer))
    vars(engine)["commit_nowait"] = nowait
    records = await backends.state.records(writer.run_id)
    if isinstance(error, StorageFull):
        assert records == [began._replace(ev=0), done._replace(ev=1)], "in their order"
        assert writer.unconfirmed == []
    else:  # it was perhaps written
        assert [each.records for each in writer.unconfirmed] == [[began]]
    await writer.append(record(writer, name="b"))
    assert len(await backends.state.records(writer.run_id)) == len(records) + 1, "nothing is written twice"


# -- the timer of buffered writes


class _Timed(Clock):
    """Keeps the timers that are set, and fires them when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Any:
        self.timers.append((seconds, callback))

    async def fire(self) -> None:
        [(_, callback)], self.timers = self.timers, []
        callback()
        await asyncio.sleep(0)  # the flushes are callbacks of the loop


class _Queued:
    """An engine that takes writes nobody waits for."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        self.taken += [op.name for op in ops]


def _buffers(count: int) -> tuple[_Timed, _Queued, list[WriteBuffer]]:
    clock, engine = _Timed(), _Queued()
    return clock, engine, [WriteBuffer(Guard("r", "c"), cast(Any, engine), clock, 0.002) for _ in range(count)]


async def test_all_buffers_of_an_engine_share_a_timer_that_looks_twice() -> None:
    clock, engine, buffers = _buffers(3)
    for number, buffer in enumerate(buffers):
        buffer.add([Op(f"op-{number}", ())])
    assert [seconds for seconds, _ in clock.timers] == [0.001]
    await clock.fire()
    assert engine.taken == [], "they may have been buffered just now"
    await clock.fire()
    assert engine.taken == ["op-0", "op-1", "op-2"]
    assert clock.timers == []
    buffers[0].add([Op("later", ())])
    assert len(clock.timers) == 1


async def test_what_was_buffered_later_is_flushed_later() -> None:
    clock, engine, (first, second) = _buffers(2)
    first.add([Op("first", ())])
    await clock.fire()
    second.add([Op("second", ())])
    first.add([Op("of the first", ())])
    await clock.fire()
    assert engine.taken == ["first", "of the first"]
    await clock.fire()
    assert engine.taken == ["first", "of the first", "second"]


async def test_a_buffer_that_was_emptied_starts_anew() -> None:
    """Otherwise each step would sometimes meet the timer of an earlier one, and pay for a commit of its start."""
    clock, engine, [buffer] = _buffers(1)
    buffer.add([Op("first", ())])
    await clock.fire()
    buffer.take()
    buffer.add([Op("second", ())])
    await clock.fire()
    assert engine.taken == []
    buffer.take()
    await clock.fire()
    assert engine.taken == []
    assert clock.timers == []


async def test_an_engine_that_fails_keeps_no_other_buffer_waiting() -> None:
    clock, engine, buffers = _buffers(2)
    failing = WriteBuffer(Guard("r", "c"), cast(Any, engine), clock, 0.002)
    failing.flush = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context["exception"]))
    failed: list[BaseException] = []
    for buffer in (failing, *buffers):
        buffer.add([Op("op", ())])
    await clock.fire()
    await clock.fire()
    assert engine.taken == ["op", "op"]
    assert [type(each) for each in failed] == [ZeroDivisionError]
