"""`ThreadedEngine` on a driver that fails where the test says so."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from agent_runtime_core._engines import threaded
from agent_runtime_core.engines import (
    Batch,
    CommitRequest,
    FunctionFailed,
    Guard,
    NotApplied,
    Op,
    OperationSet,
    ThreadedEngine,
)
from agent_runtime_core.errors import LeaseLost, NotSupported, StorageBusy, StorageClosed, StorageError
from tests.support.runs import soon

LONG = 20.0  # seconds after which a test that hangs fails


class DriverError(Exception):
    pass


class Gone(DriverError):
    """The server is gone."""


class Conflict(DriverError):
    """Another transaction is in the way."""


class Server:
    """What is committed, and what happens at the next transactions."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.fences: dict[str, str] = {}
        self.ends: list[str] = []  # what the next commits do: "before" or "after" the connection is lost, "conflict"
        self.begins: list[type[Exception]] = []  # errors of the next transactions
        self.connections: list[Connection] = []
        self.commits: list[int] = []  # how many rows each transaction has added
        self.always: type[Exception] | None = None


class Connection:
    def __init__(self, server: Server, writes: bool) -> None:
        self.server, self.writes = server, writes
        self.thread = threading.get_ident()
        self.log, self.fences = server.log, server.fences
        self.closed = False
        server.connections.append(self)

    def begin(self) -> None:
        assert self.thread == threading.get_ident()
        if self.server.always is not None:
            raise self.server.always("always")
        if self.server.begins:
            raise self.server.begins.pop(0)("begin")
        self.log, self.fences = copy.copy(self.server.log), dict(self.server.fences)

    def commit(self) -> None:
        how = self.server.ends.pop(0) if self.writes and self.server.ends else ""
        if how == "conflict":
            raise Conflict("serialization failure")
        if how == "before":
            raise Gone("before COMMIT")
        if self.writes:
            self.server.commits.append(len(self.log) - len(self.server.log))
            self.server.log, self.server.fences = self.log, self.fences
        if how == "after":
            raise Gone("after COMMIT")

    def rollback(self) -> None:
        self.log, self.fences = self.server.log, self.server.fences

    def close(self) -> None:
        self.closed = True


def put(tx: Any, value: Any) -> Any:
    """Store a value once."""
    if value not in tx.conn.log:
        tx.conn.log.append(value)
    tx.notify("things")
    return value


def was_put(tx: Any, value: Any) -> Any:
    if value not in tx.conn.log:
        raise NotApplied
    return value


def end_claim(tx: Any, key: str, value: Any) -> Any:
    tx.fence(key, None)
    return put(tx, value)


def fail(tx: Any, error: Exception) -> None:
    tx.conn.log.append("half")
    raise error


def call(tx: Any, fn: Callable[[], Any]) -> Any:
    try:
        return put(tx, fn())
    except Exception as error:
        raise FunctionFailed(error) from error


def wait(tx: Any, entered: threading.Event, event: threading.Event) -> None:
    entered.set()
    assert event.wait(LONG)


THINGS = OperationSet(
    "things",
    {
        "put": put, "end": end_claim, "fail": fail, "call": call, "wait": wait,
        "repeats": lambda tx: put(tx, f"repeats: {tx.repeats}"),
    },
    {"put": was_put, "end": lambda tx, key, value: was_put(tx, value)},
    not_repeatable=frozenset({"call"}),
)  # fmt: skip


class FakeEngine(ThreadedEngine):
    driver_errors = (DriverError,)

    def connect(self, *, writes: bool) -> Connection:
        return Connection(self.place, writes)

    def begin(self, conn: Connection, *, writes: bool) -> None:
        conn.begin()

    def stored_fence(self, conn: Connection, key: str, *, lock: bool) -> str | None:
        return conn.fences.get(key)

    def store_fence(self, tx: Any, key: str, token: str | None) -> None:
        tx.conn.fences.pop(key, None)
        if token is not None:
            tx.conn.fences[key] = token

    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, Gone | OSError)

    def is_conflict(self, error: BaseException) -> bool:
        return isinstance(error, Conflict)

    def notify_others(self, topics: set[str]) -> None:
        """There are none."""


class Time:
    """In place of the module `time`: it moves while the engine waits."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(threaded, "time", clock)
    return clock


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def engine(server: Server, clock: Time) -> Iterator[FakeEngine]:
    engine = FakeEngine.open(server)
    engine.add(THINGS)
    yield engine
    engine.close_now()


class Blocked:
    """Blocks the thread of the commits, so that all later commits wait together."""

    def __init__(self, engine: ThreadedEngine) -> None:
        self.entered, self.event = threading.Event(), threading.Event()
        engine.commit_nowait(None, [Op("wait", (self.entered, self.event))])

    async def begin(self) -> Blocked:
        assert await asyncio.to_thread(self.entered.wait, LONG)
        return self

    def end(self) -> None:
        self.event.set()


async def together(engine: ThreadedEngine, *commits: tuple[Guard | None, list[Op]]) -> list[Any]:
    """Return the outcomes of commits that wait together."""
    blocked = await Blocked(engine).begin()
    tasks = [asyncio.ensure_future(_of(engine, *each)) for each in commits]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    blocked.end()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def _of(engine: ThreadedEngine, guard: Guard | None, ops: list[Op]) -> list[Any]:
    return await engine.commit(guard, ops)


def put_op(value: Any) -> tuple[None, list[Op]]:
    return None, [Op("put", (value,))]


# -- the order


async def test_commits_are_applied_in_the_order_of_the_calls_and_in_few_transactions(
    engine: FakeEngine, server: Server
) -> None:
    assert await together(engine, *map(put_op, range(200))) == [[n] for n in range(200)]
    assert server.log == [*range(200)]
    assert server.commits == [0, 64, 64, 64, 8]


async def test_a_commit_of_a_thread_has_its_place_between_the_commits_of_a_loop(
    engine: FakeEngine, server: Server
) -> None:
    blocked = await Blocked(engine).begin()
    first = asyncio.ensure_future(_of(engine, *put_op("loop 1")))
    engine.commit_nowait(*put_op("not awaited"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    thread = asyncio.ensure_future(asyncio.to_thread(engine.commit_from_thread, *put_op("thread")))
    await soon(lambda: engine._inbox.qsize() == 3)
    second = asyncio.ensure_future(_of(engine, *put_op("loop 2")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    blocked.end()
    assert await asyncio.gather(first, thread, second) == [["loop 1"], ["thread"], ["loop 2"]]
    assert sorted(server.log[:2]) == ["loop 1", "not awaited"]
    assert server.log[2:] == ["thread", "loop 2"]


async def test_a_write_that_is_not_awaited_is_applied_before_later_ones(engine: FakeEngine, server: Server) -> None:
    engine.commit_nowait(*put_op("started"))
    await engine.commit(*put_op("done"))
    assert server.log == ["started", "done"]


def test_two_event_loops_get_their_outcomes_and_keep_their_order(engine: FakeEngine, server: Server) -> None:
    async def program(name: str) -> list[Any]:
        return await asyncio.gather(*(_of(engine, *put_op((name, n))) for n in range(50)))

    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: asyncio.run(program(name))})) for name in "ab"
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LONG)
    for name in "ab":
        assert found[name] == [[(name, n)] for n in range(50)]
        assert [n for of, n in server.log if of == name] == [*range(50)]


# -- connections that are lost


async def test_a_commit_is_repeated_if_the_connection_is_lost_before(engine: FakeEngine, server: Server) -> None:
    server.ends = ["before"]
    assert await engine.commit(None, [Op("put", (1,)), Op("repeats")]) == [1, "repeats: True"]
    assert server.log == [1, "repeats: True"]
    assert [each.closed for each in server.connections] == [True, False]


async def test_a_commit_whose_reply_was_lost_is_answered_from_what_is_stored(
    engine: FakeEngine, server: Server
) -> None:
    server.fences = {"run": "a"}
    server.ends = ["after"]
    assert await engine.commit(Guard("run", "a"), [Op("put", (1,)), Op("end", ("run", 2))]) == [1, 2]
    assert (server.log, server.fences) == ([1, 2], {})
    with pytest.raises(LeaseLost):
        await engine.commit(Guard("run", "a"), [Op("put", (3,))])


async def test_a_group_whose_reply_was_lost_is_stored_once(engine: FakeEngine, server: Server) -> None:
    server.ends = ["", "after"]
    assert await together(engine, *map(put_op, range(5))) == [[n] for n in range(5)]
    assert server.log == [*range(5)]


async def test_a_connection_lost_at_the_beginning_is_opened_again(
    engine: FakeEngine, server: Server, clock: Time
) -> None:
    server.begins = [Gone, Gone]
    # Nothing was sent, so nothing repeats.
    assert await engine.commit(None, [Op("put", (1,)), Op("repeats")]) == [1, "repeats: False"]
    assert clock.waits == [0.01, 0.02]
    assert len(server.connections) == 3


async def test_a_conflict_is_repeated_on_the_same_connection(engine: FakeEngine, server: Server, clock: Time) -> None:
    server.ends = ["conflict", "conflict"]
    assert await engine.commit(None, [Op("put", (1,)), Op("repeats")]) == [1, "repeats: False"]
    assert len(server.connections) == 1
    assert clock.waits == [0.01, 0.02]


async def test_a_group_in_conflict_is_applied_one_by_one(engine: FakeEngine, server: Server) -> None:
    server.ends = ["", "conflict"]
    assert await together(engine, *map(put_op, range(3))) == [[0], [1], [2]]
    assert server.commits == [0, 1, 1, 1]


# -- one request of a group


async def test_one_failing_request_does_not_fail_the_others(engine: FakeEngine, server: Server) -> None:
    wrong: tuple[None, list[Op]] = None, [Op("put", ("no",)), Op("fail", (ValueError("wrong"),))]
    first, error, last = await together(engine, put_op(1), wrong, put_op(2))
    assert (first, str(error), last) == ([1], "wrong", [2])
    assert server.log == [1, 2]


async def test_a_superseded_claim_in_a_group_fails_alone(engine: FakeEngine, server: Server) -> None:
    server.fences = {"run": "b"}
    lost, kept = await together(engine, (Guard("run", "a"), [Op("put", (1,))]), (Guard("run", "b"), [Op("put", (2,))]))
    assert isinstance(lost, LeaseLost)
    assert (kept, server.log) == ([2], [2])


async def test_a_function_of_a_user_is_not_called_again_for_another_request(engine: FakeEngine, server: Server) -> None:
    calls: list[int] = []

    def function() -> int:
        calls.append(1)
        return 7

    outcomes = await together(
        engine, (None, [Op("call", (function,))]), (None, [Op("fail", (ValueError("wrong"),))]), put_op(2)
    )
    assert [outcomes[0], outcomes[2]] == [[7], [2]]
    assert (calls, server.log) == ([1], [7, 2])


@pytest.mark.parametrize("error", [ConnectionError("another server"), Gone("of its own"), Conflict("of its own")])
async def test_an_error_of_a_function_is_its_outcome_and_no_reason_to_call_it_again(
    engine: FakeEngine, server: Server, error: Exception
) -> None:
    calls: list[int] = []

    def function() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error), match=str(error)):
        await engine.commit(None, [Op("call", (function,))])
    assert (calls, server.log, len(server.connections)) == ([1], [], 1)


async def test_an_error_of_the_driver_is_translated_and_others_are_not(engine: FakeEngine, server: Server) -> None:
    for error, kind in ((DriverError("no column"), StorageError), (LookupError("a bug"), LookupError)):
        with pytest.raises(kind, match=str(error)):
            await engine.commit(None, [Op("fail", (error,))])
    server.begins = [DriverError, LookupError]
    for kind in (StorageError, LookupError):
        with pytest.raises(kind, match="begin"):
            await engine.commit(*put_op(1))
    assert server.log == []


# -- batches


def put_many(engine: Any, requests: Sequence[CommitRequest]) -> Any:
    [stored] = yield [("put", [request.ops[0].args[0] for request in requests])]
    for request in requests:
        if request.ops[0].args[0] in stored:
            request.result = [request.ops[0].args[0]]
    return [request for request in requests if request.result is None]


BATCHED = dataclasses.replace(
    THINGS,
    batches={("put",): Batch(put_many, lambda request: request.ops[0].args[0] != "unusual", frozenset({"things"}))},
    lock=lambda tx, requests: tx.engine.locked.append([each.ops[0].name for each in requests]),
)


class BatchEngine(FakeEngine):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.statements: list[list[Any]] = []
        self.locked: list[list[str]] = []
        self.refused: Any = None

    def execute_batch(self, conn: Connection, statements: Any, keys: Sequence[str]) -> list[list[Any]]:
        conn.begin()
        found = []
        for _, values in statements:
            self.statements.append(values)
            found.append([value for value in values if value != self.refused])
            conn.log += found[-1]
        conn.commit()
        return found


@pytest.fixture
def batching(server: Server, clock: Time) -> Iterator[BatchEngine]:
    engine = BatchEngine.open(server)
    engine.add(BATCHED)
    yield engine
    engine.close_now()


async def test_batches_and_operations_keep_the_order_of_the_calls(batching: BatchEngine, server: Server) -> None:
    seen: list[list[Any]] = []
    batching.listen("things", lambda: seen.append(list(server.log)))
    outcomes = await together(batching, *map(put_op, (1, 2, "unusual", 3)))
    assert (outcomes, server.log) == ([[1], [2], ["unusual"], [3]], [1, 2, "unusual", 3])
    assert batching.statements == [[1, 2], [3]]
    assert batching.locked == [["wait"], ["put"]]
    assert seen == [server.log]


async def test_what_a_batch_leaves_is_applied_by_the_operations(batching: BatchEngine, server: Server) -> None:
    batching.refused = 2
    assert await together(batching, *map(put_op, (1, 2, 3))) == [[1], [2], [3]]
    assert server.log == [1, 3, 2]


async def test_a_part_of_a_group_names_each_run_once(batching: BatchEngine) -> None:
    await together(batching, *map(put_op, ("run-1", "run-2", "run-1")))
    assert batching.statements == [["run-1", "run-2"], ["run-1"]]


async def test_a_batch_whose_reply_was_lost_is_repeated_by_the_operations(
    batching: BatchEngine, server: Server
) -> None:
    server.ends = ["", "after"]
    assert await together(batching, *map(put_op, (1, 2))) == [[1], [2]]
    assert (server.log, batching.statements) == ([1, 2], [[1, 2]])


async def test_an_engine_without_execute_batch_says_so(engine: FakeEngine) -> None:
    engine.add(dataclasses.replace(BATCHED, name="batched", lock=None))
    with pytest.raises(NotSupported, match="FakeEngine does not define execute_batch"):
        await engine.commit(*put_op(1))


# -- time


@pytest.mark.parametrize(
    ("error", "what"), [(Gone, "did not answer"), (Conflict, "refused a transaction because of others")]
)
async def test_after_the_timeout_the_outcome_is_unknown(
    engine: FakeEngine, server: Server, clock: Time, error: type[Exception], what: str
) -> None:
    server.always = error
    with pytest.raises(StorageBusy, match=rf"{what} for 6 s \(always\). The outcome of the write is unknown. Repeat"):
        await engine.commit(*put_op(1))
    assert 5.0 < clock.now <= 6.0
    with pytest.raises(StorageBusy, match=rf"{what} for 6 s \(always\). Try again"):
        await engine.read(len)
    server.always = None
    assert await engine.commit(*put_op(2)) == [2]


async def test_a_commit_whose_caller_gave_up_before_its_turn_is_not_applied(
    engine: FakeEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, past = asyncio.get_running_loop(), [0.0]
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + past[0])
    blocked = await Blocked(engine).begin()
    late = asyncio.ensure_future(_of(engine, *put_op("late")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    while not late.done():
        past[0] += 2.0
        await asyncio.sleep(0)
    with pytest.raises(StorageBusy, match="The outcome of the write is unknown"):
        await late
    blocked.end()
    assert await engine.commit(*put_op("next")) == ["next"]
    assert server.log == ["next"]


async def test_a_commit_of_a_group_is_not_applied_alone_after_its_caller_gave_up(
    engine: FakeEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, past = asyncio.get_running_loop(), [0.0]
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + past[0])
    entered, event = threading.Event(), threading.Event()
    blocked = await Blocked(engine).begin()
    wrong = asyncio.ensure_future(_of(engine, None, [Op("fail", (ValueError("wrong"),))]))
    engine.commit_nowait(None, [Op("wait", (entered, event))])
    late = asyncio.ensure_future(_of(engine, *put_op("late")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    blocked.end()
    assert await asyncio.to_thread(entered.wait, LONG)
    while not late.done():
        past[0] += 2.0
        await asyncio.sleep(0)
    event.set()
    assert await engine.commit(*put_op("next")) == ["next"]
    assert server.log == ["next"]
    assert [type(each) for each in await asyncio.gather(wrong, late, return_exceptions=True)][1] is StorageBusy


async def test_a_cancelled_commit_is_finished_before_the_cancellation_is_raised(
    engine: FakeEngine, server: Server
) -> None:
    blocked = await Blocked(engine).begin()
    task = asyncio.ensure_future(_of(engine, *put_op(1)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    blocked.end()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.log == [1]


# -- reads


def first(conn: Connection) -> Any:
    return conn.log[0]


async def test_reads_see_what_is_committed_on_connections_that_only_read(engine: FakeEngine, server: Server) -> None:
    await engine.commit(*put_op(1))
    assert [await engine.read(first) for _ in range(3)] == [1] * 3
    assert [each.writes for each in server.connections] == [True, False]


async def test_a_read_is_repeated_if_its_connection_is_lost(engine: FakeEngine, server: Server) -> None:
    server.log = [1]
    server.begins = [Gone, Conflict]
    assert await engine.read(first) == 1
    assert [each.closed for each in server.connections] == [True, False]


async def test_a_read_that_fails_raises_its_error_and_the_next_one_works(engine: FakeEngine, server: Server) -> None:
    def wrong(conn: Connection) -> None:
        raise DriverError("no table")

    with pytest.raises(IndexError):
        await engine.read(first)
    with pytest.raises(StorageError, match="no table"):
        await engine.read(wrong)
    server.log = [1]
    assert await engine.read(first) == 1


async def test_a_long_read_does_not_keep_another_one_waiting(engine: FakeEngine, server: Server) -> None:
    server.log = [1]
    entered, event = threading.Event(), threading.Event()
    slow = asyncio.ensure_future(engine.read(lambda conn: (entered.set(), event.wait(LONG))))
    assert await asyncio.to_thread(entered.wait, LONG)
    assert await engine.read(first) == 1
    event.set()
    assert (await slow)[1] is True


async def test_a_cancelled_read_leaves_the_others_alone(engine: FakeEngine, server: Server) -> None:
    server.log = [1]
    event = threading.Event()
    slow = asyncio.ensure_future(engine.read(lambda conn: event.wait(LONG)))
    await asyncio.sleep(0)
    slow.cancel()
    event.set()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert await engine.read(first) == 1


# -- what a subclass gets wrong


async def test_an_error_of_the_subclass_itself_fails_its_callers_only(
    engine: FakeEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(error: BaseException) -> bool:
        raise RuntimeError("a bug of is_lost")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "is_lost", broken)
        server.begins = [Gone]
        with pytest.raises(RuntimeError, match="a bug of is_lost"):
            await engine.commit(*put_op(1))
        server.begins = [Gone]
        with pytest.raises(RuntimeError, match="a bug of is_lost"):
            await engine.read(first)
    assert await engine.commit(*put_op(2)) == [2]
    assert await engine.read(first) == 2


async def test_a_commit_is_done_if_others_cannot_be_notified(
    engine: FakeEngine, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(topics: set[str]) -> None:
        raise OSError("no route")

    monkeypatch.setattr(engine, "notify_others", broken)
    assert await engine.commit(*put_op(1)) == [1]
    assert await engine.commit(*put_op(2)) == [2]
    assert "listeners were not notified of a commit" in caplog.text


# -- listeners


async def test_listeners_are_woken_after_the_commit_and_until_they_are_removed(
    engine: FakeEngine, server: Server
) -> None:
    seen: list[list[Any]] = []
    stop = engine.listen("things", lambda: seen.append(list(server.log)))
    await engine.commit(*put_op(1))
    await engine.commit(None, [Op("fence.forget", ("run",))])
    engine.wake()
    stop()
    await engine.commit(*put_op(2))
    assert seen == [[1], [1]]


def test_without_notify_others_backends_poll() -> None:
    class Deaf(FakeEngine):
        notify_others = ThreadedEngine.notify_others

    engine = Deaf.open(Server())
    assert engine.listen("things", lambda: None) is None
    engine.close_now()


# -- the end


async def test_close_applies_what_was_requested_before(server: Server, clock: Time) -> None:
    engine = FakeEngine.open(server)
    engine.add(THINGS)
    blocked = await Blocked(engine).begin()
    entered, event = threading.Event(), threading.Event()
    commits = [asyncio.ensure_future(_of(engine, *put_op(n))) for n in range(3)]
    reads = [asyncio.ensure_future(engine.read(lambda conn: (entered.set(), event.wait(LONG)))) for _ in range(4)]
    assert await asyncio.to_thread(entered.wait, LONG)
    closing = asyncio.ensure_future(engine.close())
    await soon(lambda: engine._stopped)
    blocked.end()
    event.set()
    assert await asyncio.gather(*commits) == [[0], [1], [2]]
    assert [found[1] for found in await asyncio.gather(*reads)] == [True] * 4
    await closing
    assert server.log == [0, 1, 2]
    assert all(each.closed for each in server.connections)
    for use in (engine.commit(*put_op(3)), engine.read(first)):
        with pytest.raises(StorageClosed, match=r"was closed\. Open it again"):
            await use
    with pytest.raises(StorageClosed):
        engine.commit_from_thread(*put_op(3))
    with pytest.raises(StorageClosed):
        engine.commit_nowait(*put_op(3))


async def test_a_read_that_meets_the_end_of_the_engine_is_refused(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_ensure_open", engine.close_now)  # another thread closes it then
    with pytest.raises(StorageClosed):
        await engine.read(first)


async def test_close_does_not_wait_for_a_server_that_is_gone_and_callers_get_the_reason(
    server: Server, clock: Time
) -> None:
    engine = FakeEngine.open(server)
    engine.add(THINGS)
    server.always = Gone
    commit = asyncio.ensure_future(_of(engine, *put_op(1)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(StorageBusy, match="did not answer"):
        await commit


async def test_a_read_gives_up_when_the_engine_is_closed(engine: FakeEngine, server: Server, clock: Time) -> None:
    def close(seconds: float) -> None:
        clock.now += seconds
        engine._closed = True

    server.always = Gone
    clock.sleep = close  # type: ignore[method-assign]
    with pytest.raises(StorageBusy):
        await engine.read(first)
    engine._closed = False
    assert clock.now == 0.01


def test_the_users_of_one_place_share_an_engine_until_the_last_one_closes_it(server: Server) -> None:
    one, other = FakeEngine.open(server), FakeEngine.open(server)
    assert one is other
    one.close_now()
    assert FakeEngine.open(server) is one
    one.close_now()
    one.close_now()
    again = FakeEngine.open(server)
    assert again is not one
    again.close_now()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_child_process_must_open_the_store_again(engine: FakeEngine, server: Server) -> None:
    await engine.commit(*put_op(1))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                engine.commit_from_thread(*put_op(2))
                said = "committed"
            except StorageClosed as error:
                said = str(error)
            said += f"; the same engine: {FakeEngine.open(server) is engine}"
            engine.close_now()
            os.write(write_end, said.encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    assert text.endswith("was opened before a fork. Open it again in this process; the same engine: False")
    assert await engine.commit(*put_op(3)) == [3]
