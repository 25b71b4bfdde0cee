"""The working loop: claims as slots free, waits for the bell, drains when told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._core.clock import Clock
from agent_runtime_core._core.codec.tagged import REGISTRY
from agent_runtime_core._core.context_vars import start_soon
from agent_runtime_core._execution.run_control import RunControl
from agent_runtime_core.errors import (
    InvalidArgument,
    StorageBusy,
    StorageClosed,
    StorageCorrupt,
    StorageFull,
    UnserialisableResult,
)
from agent_runtime_core.interfaces import TraceSink
from agent_runtime_core.persistence import PersistenceManager
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.queue.records import RunRow, RunUpdate
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.runner import worker as worker_module
from agent_runtime_core.runner.claim import ISOLATION_TIMEOUT
from agent_runtime_core.runner.execution import RunExecution
from agent_runtime_core.runner.heartbeat import Heartbeat, LeasedRun
from agent_runtime_core.runner.worker import Worker
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import register_type
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.tracing.tracer import Tracer
from tests.contract.third_party.their_queue import TheirQueue
from tests.support.runs import Rig, Script, no_thread, soon, until


async def working(runner: AgentRunner, **options: Any) -> asyncio.Task[None]:
    task = asyncio.ensure_future(runner.run_loop(**{"handle_signals": False, **options}))
    await soon(lambda: runner._worker._wake_event is not None)
    return task


async def stopped(runner: AgentRunner, task: asyncio.Task[None]) -> None:
    runner.stop()
    async with asyncio.timeout(20):
        await task


async def test_slots_without_end_are_claimed_for_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed: list[int] = []
    claim_rows = InMemoryQueue.claim_rows

    async def counted(queue: InMemoryQueue, *args: Any, limit: int = 1, **options: Any) -> list[RunRow]:
        claimed.append(limit)
        return await claim_rows(queue, *args, limit=min(limit, 1000), **options)

    async def body(ctx: Any) -> None:
        return None

    monkeypatch.setattr(InMemoryQueue, "claim_rows", counted)
    async with Rig(None, Clock()) as rig:
        rig.register(body)
        run_ids = [await rig.runner.submit("script") for _ in range(3)]
        loop = await working(rig.runner, concurrency=10**15)
        for run_id in run_ids:
            assert (await rig.runner.wait(run_id, 10)).status is RunStatus.SUCCEEDED
        await stopped(rig.runner, loop)
    assert max(claimed) <= 1000


async def test_the_loop_works_off_what_is_submitted(place: Path | None) -> None:
    async def body(ctx: Any) -> int:
        return int(ctx.params["n"])

    async with Rig(place, Clock()) as rig:
        rig.register(body)
        before = await rig.runner.submit("script", {"params": {"n": 1}})
        # An hour between polls: only the bell can wake it.
        loop = await working(rig.runner, poll_interval=3600)
        after = await rig.another().submit("script", {"params": {"n": 2}})
        values = [(await rig.runner.wait(run_id, 10)).final_output["value"] for run_id in (before, after)]
        assert values == [1, 2]
        await stopped(rig.runner, loop)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_run_leaves_nothing_to_the_garbage_collector(place: Path | None, waits: bool) -> None:
    seen: list[weakref.ref[Any]] = []

    async def body(ctx: Any) -> None:
        await ctx.step("a", lambda: 1)
        if waits:
            await ctx.sleep(1)
        seen.extend((weakref.ref(ctx), weakref.ref(ctx.journal), weakref.ref(asyncio.current_task())))

    async with Rig(place) as rig:
        rig.register(body)
        await rig.runner.submit("script")
        gc.disable()
        try:
            assert await rig.runner.run_once()
            await asyncio.sleep(0)
            assert [each() for each in seen] == [None, None, None]
        finally:
            gc.enable()


async def test_the_loop_claims_nothing_while_the_end_of_each_run_claims_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    claim_for_free_slots = Worker.claim_for_free_slots

    async def counted(worker: Worker) -> bool:
        nonlocal looks
        looks += 1
        return await claim_for_free_slots(worker)

    monkeypatch.setattr(Worker, "claim_for_free_slots", counted)

    async def body(ctx: Any) -> None: ...

    async with Rig(None, Clock()) as rig:
        rig.register(body)
        run_ids = [await rig.runner.submit("script") for _ in range(20)]
        loop = await working(rig.runner, poll_interval=3600, concurrency=1)
        for run_id in run_ids:
            assert (await rig.runner.wait(run_id, 10)).status is RunStatus.SUCCEEDED
        assert looks < len(run_ids)
        await stopped(rig.runner, loop)


async def test_a_run_that_ends_wakes_the_loop_unless_its_slot_is_filled() -> None:
    """Also while a claim is being made: it may not see a run whose arrival found all slots busy."""
    async with Rig(None, Clock()) as rig:
        worker = rig.runner._worker
        worker._wake_event = woken = asyncio.Event()
        for slots, wakes in ((1, False), (2, True)):
            worker.slots.resize(slots)
            ending, following = RunControl(), RunControl()
            worker.slots.take(ending)
            with worker.slots.reserve(slots - 1):
                worker.slots.take(following)
                worker.slots.release(ending)
                assert woken.is_set() is wakes
            woken.clear()
            worker.slots.release(following)
            assert woken.is_set(), "a slot is free"
            woken.clear()
        worker._wake_event = None


async def test_no_more_run_at_once_than_slots(place: Path | None) -> None:
    now, most, leave = 0, 0, asyncio.Event()

    async def body(ctx: Any) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await leave.wait()
        now -= 1

    async with Rig(place, Clock()) as rig:
        rig.register(body)
        ids = [await rig.runner.submit("script") for _ in range(5)]
        loop = await working(rig.runner, concurrency=2)
        await soon(lambda: now == 2)
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert most == 2
        leave.set()
        for run_id in ids:
            assert (await rig.runner.wait(run_id, 10)).status == RunStatus.SUCCEEDED
        assert most == 2
        await stopped(rig.runner, loop)


async def test_a_loop_that_is_cancelled_gives_back_what_runs_and_claims_no_more(place: Path | None) -> None:
    inside = asyncio.Event()

    async def body(ctx: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig(place, Clock()) as rig:
        rig.register(body)
        ids = [await rig.runner.submit("script") for _ in range(2)]
        loop = await working(rig.runner, concurrency=1)
        await until(inside)
        loop.cancel()
        await asyncio.wait({loop})
        assert loop.cancelled()
        assert rig.runner._worker._executions == {}
        told = [await rig.runner.get_run(each) for each in ids]
        assert [(each.status, each.attempt) for each in told] == [(RunStatus.PENDING, 1)] * 2


@pytest.mark.parametrize("how", ["run_loop", "run_once"])
async def test_a_run_whose_task_is_cancelled_before_its_first_step_is_given_back(
    place: Path | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(ctx: Any) -> int:
        return 1

    def cancelled(worker: Worker, row: RunRow) -> asyncio.Task[Any]:
        task = start(worker, row)
        for each in (task, loop):  # as `asyncio.run` does at its end
            each.cancel()
        return task

    start = Worker._start
    async with Rig(place, Clock()) as rig:
        rig.register(body)
        run_id = await rig.runner.submit("script")
        runner = rig.another()
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "_start", cancelled)
            work = runner.run_loop(handle_signals=False) if how == "run_loop" else runner.run_once()
            loop = start_soon(work)
            await asyncio.wait({loop}, timeout=10)
        assert loop.cancelled()
        assert (await rig.runner.get_run(run_id)).status == RunStatus.PENDING
        # Nothing of it is left to the worker that gave it back.
        assert (runner._worker._executions, runner._worker.slots.busy) == ({}, 0)
        assert await rig.runner.run_once()
        told = await rig.runner.get_run(run_id)
        assert (told.status, told.attempt) == (RunStatus.SUCCEEDED, 1)


def test_a_run_that_was_claimed_when_its_event_loop_ended_is_pending(tmp_path: Path) -> None:
    async def body(ctx: Any) -> int:
        return 1

    async def leave() -> UUID:
        """Submit a run, and return in the turn of the loop in which it was claimed."""
        rig = Rig(tmp_path / "a.db", Clock())
        rig.register(body)
        run_id = await rig.runner.submit("script")
        claimed, worker = asyncio.Event(), rig.runner._worker
        starts = worker._start

        def start(row: RunRow) -> asyncio.Task[Any]:
            task = starts(row)
            task.cancel()
            claimed.set()
            return task

        worker._start = start  # type: ignore[method-assign]
        loops.append(asyncio.ensure_future(rig.runner.run_loop(handle_signals=False)))
        await claimed.wait()
        return run_id

    async def look(run_id: UUID) -> RunStatus:
        async with Rig(tmp_path / "a.db", Clock()) as rig:
            return (await rig.runner.get_run(run_id)).status

    loops: list[asyncio.Task[None]] = []
    run_id = asyncio.run(leave())
    assert loops[0].cancelled()
    assert asyncio.run(look(run_id)) is RunStatus.PENDING


async def test_closing_a_runner_ends_its_loop(place: Path | None) -> None:
    async with Rig(place, Clock()) as rig:
        runner = rig.another()
        loop = await working(runner)
        await runner.close()
        await asyncio.wait({loop}, timeout=5)
        assert loop.done()
        assert loop.exception() is None


async def test_a_runner_has_one_loop(place: Path | None) -> None:
    async with Rig(place, Clock()) as rig:
        loop = await working(rig.runner)
        with pytest.raises(InvalidArgument, match="Raise its concurrency, or create another runner"):
            await rig.runner.run_loop()
        await stopped(rig.runner, loop)
        await stopped(rig.runner, await working(rig.runner))


async def test_a_run_that_waits_in_place_leaves_its_slot(place: Path | None) -> None:
    async def waits(ctx: Any) -> Any:
        return await ctx.wait_for_signal("go")

    async def quick(ctx: Any) -> int:
        return 1

    async with Rig(place, Clock(), park_after=3600) as rig:
        rig.register(waits, "waits")
        rig.register(quick, "quick")
        loop = await working(rig.runner, concurrency=1)
        held = await rig.runner.submit("waits", run_id="held")
        await rig.begun("held")
        free = await rig.runner.submit("quick")
        assert (await rig.runner.wait(free, 10)).final_output == {"value": 1}
        assert (await rig.runner.get_run(held)).status == RunStatus.RUNNING
        await rig.runner.signal(held, "go", 7)
        assert (await rig.runner.wait(held, 10)).final_output == {"value": 7}
        await stopped(rig.runner, loop)


async def test_a_timer_that_is_due_wakes_the_loop(place: Path | None) -> None:
    clock = VirtualClock()

    async def body(ctx: Any) -> int:
        return 1

    async with Rig(place, clock, heartbeat_interval_seconds=7200, lease_ttl_seconds=30_000) as rig:
        rig.register(body)
        run_id = await rig.runner.submit("script", delay=50)
        loop = await working(rig.runner, poll_interval=3600)
        await soon(lambda: clock.next_due is not None)
        assert clock.next_due == pytest.approx(50)
        clock.advance(50)
        assert (await rig.runner.wait(run_id, 10)).status == RunStatus.SUCCEEDED
        await stopped(rig.runner, loop)


async def test_a_claim_that_fails_is_tried_again_at_the_next_poll_whatever_is_due(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, failed = VirtualClock(), asyncio.Event()

    async def body(ctx: Any) -> int:
        return 1

    async def damaged(*args: Any, **options: Any) -> list[RunRow]:
        failed.set()
        raise StorageCorrupt("somebody else was here")

    async with Rig(place, clock, heartbeat_interval_seconds=7200, lease_ttl_seconds=30_000) as rig:
        rig.register(body)
        run_id = await rig.runner.submit("script", delay=50)
        loop = await working(rig.runner, poll_interval=3600)
        await soon(lambda: clock.next_due is not None)
        with monkeypatch.context() as patched:
            patched.setattr(rig.runner.queue, "claim_rows", damaged)
            clock.advance(50)
            await until(failed)
            await soon(lambda: clock.next_due is not None)
            assert clock.next_due == pytest.approx(3600)
        clock.advance(3600)
        assert (await rig.runner.wait(run_id, 10)).status == RunStatus.SUCCEEDED
        await stopped(rig.runner, loop)


async def test_stopping_lets_running_work_finish(place: Path | None) -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> str:
        inside.set()
        await leave.wait()
        return "finished"

    async with Rig(place, Clock(), grace_seconds=20) as rig:
        rig.register(body)
        run_id = await rig.runner.submit("script")
        later = await rig.runner.submit("script")
        loop = await working(rig.runner)
        await until(inside)
        rig.runner.stop()
        await asyncio.sleep(0.01)
        assert not loop.done()
        leave.set()
        await loop
        assert (await rig.runner.wait(run_id)).final_output == {"value": "finished"}
        assert (await rig.runner.get_run(later)).status == RunStatus.PENDING


async def test_a_stop_said_before_the_first_step_of_the_loop_is_heard_once(place: Path | None) -> None:
    async with Rig(place, Clock()) as rig:

        async def body(ctx: Any) -> str:
            return "done"

        rig.register(body)
        run_id = await rig.runner.submit("script")
        rig.runner.stop()
        await asyncio.wait_for(rig.runner.run_loop(handle_signals=False), 10)
        assert (await rig.runner.get_run(run_id)).status == RunStatus.PENDING
        loop = await working(rig.runner)
        assert (await rig.runner.wait(run_id, timeout=10)).final_output == {"value": "done"}
        await stopped(rig.runner, loop)


async def test_a_worker_hears_of_new_runs_while_it_asks_what_is_due_next(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def no_answer() -> None:
        await never.wait()

    async def body(ctx: Any) -> str:
        return "done"

    async with Rig(place, Clock()) as rig:
        rig.register(body)
        monkeypatch.setattr(rig.runner.queue, "next_due", no_answer)
        loop = await working(rig.runner, poll_interval=3600)
        for _ in range(2):
            run_id = await rig.runner.submit("script")
            assert (await rig.runner.wait(run_id, timeout=10)).final_output == {"value": "done"}
        await stopped(rig.runner, loop)


async def test_what_is_wrong_with_the_look_at_what_is_due_next_ends_the_loop(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    async def body(ctx: Any) -> None: ...

    async with Rig(place, Clock()) as rig:
        rig.register(body)
        monkeypatch.setattr(rig.runner.queue, "next_due", broken)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(rig.runner.run_loop(poll_interval=3600, handle_signals=False), 10)


async def test_what_does_not_finish_in_its_grace_is_given_back_unused(place: Path | None) -> None:
    inside, calls = asyncio.Event(), list[int]()

    async def body(ctx: Any) -> int:
        await ctx.step("once", lambda: calls.append(1))
        if not inside.is_set():
            inside.set()
            await asyncio.Event().wait()
        return int(ctx.attempt)

    async with Rig(place, Clock(), grace_seconds=0, max_retries=3) as rig:
        rig.register(body)
        run_id = await rig.runner.submit("script", run_id="r")
        loop = await working(rig.runner)
        await until(inside)
        await stopped(rig.runner, loop)
        info = await rig.runner.get_run(run_id)
        assert (info.status, info.attempt, info.reason) == (RunStatus.PENDING, 1, "handed back")
        assert await rig.runner.run_once()
        assert (await rig.runner.wait(run_id)).final_output == {"value": 1}
        assert calls == [1]
        assert [kind for kind, _ in await rig.told("run.")] == ["run.started", "run.resumed", "run.succeeded"]


async def test_a_second_stop_skips_the_wait(place: Path | None) -> None:
    inside = asyncio.Event()

    async def body(ctx: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig(place, Clock(), grace_seconds=3600) as rig:
        rig.register(body)
        run_id = await rig.runner.submit("script")
        loop = await working(rig.runner)
        await until(inside)
        rig.runner.stop()
        await asyncio.sleep(0.01)
        assert not loop.done()
        await stopped(rig.runner, loop)
        assert (await rig.runner.get_run(run_id)).status == RunStatus.PENDING


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_loop_and_the_handlers_are_taken_away(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM)
    async with Rig(None, Clock()) as rig:
        loop = await working(rig.runner, handle_signals=True)
        os.kill(os.getpid(), number)
        async with asyncio.timeout(10):
            await loop
    assert signal.getsignal(signal.SIGTERM) == before


async def test_signal_handlers_are_put_back_when_the_loop_ends() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)

    def mine(*_: object) -> None:
        return

    before = [signal.signal(number, mine) for number in numbers]
    try:
        async with Rig() as rig:
            loop = await working(rig.runner, handle_signals=True)
            assert mine not in [signal.getsignal(number) for number in numbers]
            await stopped(rig.runner, loop)
        assert [signal.getsignal(number) for number in numbers] == [mine, mine]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_loop_in_another_thread_takes_no_signals() -> None:
    seen: list[Any] = []

    async def work() -> None:
        async with Rig(None, Clock()) as rig:
            task = await working(rig.runner, handle_signals=True)
            seen.append(signal.getsignal(signal.SIGTERM))
            await stopped(rig.runner, task)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    thread.join(20)
    assert seen == [before]


async def test_a_claim_that_fails_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(ctx: Any) -> int:
        return 1

    async with Rig(None, Clock()) as rig:
        rig.register(body)
        real: Callable[..., Awaitable[Any]] = rig.runner.queue.claim_rows
        failures = iter([StorageBusy("no answer"), StorageBusy("no answer")])

        async def flaky(*args: Any, **kwargs: Any) -> Any:
            for error in failures:
                raise error
            return await real(*args, **kwargs)

        monkeypatch.setattr(rig.runner.queue, "claim_rows", flaky)
        run_id = await rig.runner.submit("script")
        loop = await working(rig.runner, poll_interval=0.001)
        assert (await rig.runner.wait(run_id, 10)).status == RunStatus.SUCCEEDED
        await stopped(rig.runner, loop)
        assert caplog.text.count("is not available, and its runs wait for it: no answer") == 1
        assert [each.exc_info is None for each in caplog.records if "available" in each.getMessage()] == [False]


@pytest.mark.parametrize("knows", [True, False], ids=["no claim", "no agent"])
async def test_what_is_due_and_cannot_be_claimed_is_looked_for_at_the_next_poll(
    knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    async def body(ctx: Any) -> None: ...

    async with Rig() as rig:
        if knows:
            rig.register(body)
        await rig.runner.submit("script", delay=1)
        rig.clock.advance(2)  # type: ignore[attr-defined]

        async def claim(*args: Any, **options: Any) -> list[Any]:
            looks.append(rig.clock.boot())
            if knows:
                raise StorageFull("no space")
            return []

        monkeypatch.setattr(rig.runner.queue, "claim_rows", claim)
        loop = await working(rig.runner, poll_interval=10)
        await soon(lambda: len(looks) > 3)
        await stopped(rig.runner, loop)
    assert looks[3] - looks[0] >= 30


async def test_a_run_that_cannot_be_driven_does_not_stop_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(ctx: Any) -> int:
        return 1

    caplog.set_level(logging.ERROR)
    async with Rig(None, Clock()) as rig:
        rig.register(body)
        real = RunExecution._run
        broken = iter([True])

        async def breaks(drive: RunExecution) -> Any:
            for _ in broken:
                raise StorageBusy("the journal is away")
            return await real(drive)

        monkeypatch.setattr(RunExecution, "_run", breaks)
        bad = await rig.runner.submit("script")
        loop = await working(rig.runner)
        await soon(lambda: "is not available" in caplog.text)
        good = await rig.runner.submit("script")
        assert (await rig.runner.wait(good, 10)).status == RunStatus.SUCCEEDED
        # That a store was away is no crash of the run.
        assert (await rig.runner.wait(bad, 10)).status == RunStatus.SUCCEEDED
        assert (await rig.runner.get_run(bad)).attempt == 1
        await stopped(rig.runner, loop)


@register_type
@dataclass
class Money:
    cents: int


@contextmanager
def unknown_here() -> Iterator[None]:
    """`Money` is a type that only other workers have registered."""
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.delitem(REGISTRY.types, f"{__name__}.Money")
        yield


async def spends(ctx: Any) -> int:
    return int(ctx.input["money"].cents)


def watched(rig: Rig, watch: str) -> AgentRunner:
    """The rig's runner, with a trace sink, or with stores, or with nothing beside it."""
    rig.register(spends)
    if watch == "traced":
        rig.runner.tracer = Tracer([TraceSink()])
    if watch == "kept":
        rig.runner._stores = PersistenceManager.open("memory://")
    return rig.runner


WATCHES = pytest.mark.parametrize("watch", ["alone", "traced", "kept"])


@WATCHES
async def test_a_run_whose_input_cannot_be_read_here_is_left_to_a_worker_that_can(
    place: Path | None, watch: str
) -> None:
    async with Rig(place, max_retries=3) as rig:
        runner = watched(rig, watch)
        run_id = await runner.submit("script", {"money": Money(5)})
        with unknown_here():
            assert await runner.run_once()
            info = await runner.get_run(run_id)
            assert (info.status, info.attempt, runner.heartbeat._leased) == (RunStatus.PENDING, 2, {})
            assert info.input == {"money": {"$": f"{__name__}.Money", "v": {"cents": 5}}}
            assert not await runner.run_once(), "only after a pause"
        await rig.clock.sleep(60)
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": 5}


@WATCHES
async def test_a_run_whose_input_nobody_can_read_fails_after_its_attempts(place: Path | None, watch: str) -> None:
    async with Rig(place, max_retries=3) as rig:
        runner = watched(rig, watch)
        run_id = await runner.submit("script", {"money": Money(5)})
        with unknown_here():
            for _ in range(3):
                assert await runner.run_once()
                await rig.clock.sleep(60)
            result = await runner.wait(run_id)
        assert result.error is not None
        assert (result.status, result.error.type) == (RunStatus.FAILED, "UnserialisableResult")
        assert "register_type(Money)" in result.error.message


@WATCHES
async def test_a_run_that_cannot_be_read_here_is_not_executed_in_place(place: Path | None, watch: str) -> None:
    async with Rig(place) as rig:
        runner = watched(rig, watch)
        await runner.submit("script", run_id="one", metadata={"money": Money(5)})
        with unknown_here(), pytest.raises(UnserialisableResult, match="Money"):
            await runner.execute("script", "one")
        info = await runner.get_run("one")
        assert (info.status, info.attempt, runner.heartbeat._leased) == (RunStatus.PENDING, 1, {})


async def test_a_damaged_store_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(ctx: Any) -> int:
        return 1

    async def damaged(drive: RunExecution) -> Any:
        raise StorageCorrupt("the journal is damaged")

    async with Rig() as rig:
        rig.register(body)
        monkeypatch.setattr(RunExecution, "_run", damaged)
        run_id = await rig.runner.submit("script")
        with pytest.raises(StorageCorrupt):
            await rig.runner.run_once()
        assert (await rig.runner.get_run(run_id)).status == RunStatus.RUNNING, "its lease runs out, which is a crash"


async def test_a_store_that_is_away_for_long_makes_no_run_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(ctx: Any) -> int:
        return int(await ctx.step("one", lambda: 1))

    async with Rig() as rig:
        rig.register(body)
        read, failures = rig.runner.state_store.read, [StorageBusy("the journal is away")] * 10

        async def flaky(what: str, *args: Any) -> Any:
            if failures:
                raise failures.pop()
            return await read(what, *args)

        monkeypatch.setattr(rig.runner.state_store, "read", flaky)
        run_id = await rig.runner.submit("script")
        row = (await rig.runner.queue.claim_rows("w", 60))[0]
        rig.clock.advance(61)  # type: ignore[attr-defined] # that worker is gone: from now on there is a journal to read
        assert await rig.runner.run_once()
        assert not failures
        result = await rig.runner.wait(run_id, 10)
        assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": 1})
        assert (await rig.runner.get_run(run_id)).attempt == row.attempt + 1, "only the first one was a crash"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"poll_interval": 0}, "poll_interval.*got 0"),
        ({"poll_interval": -1}, "got -1"),
        ({"poll_interval": "1"}, "got '1'"),
        ({"concurrency": 0}, "concurrency must be an integer of at least 1, got 0"),
        ({"concurrency": "4"}, "concurrency must be an integer of at least 1, got '4'"),
        ({"concurrency": 1.5}, r"concurrency must be an integer of at least 1, got 1\.5"),
    ],
)
async def test_a_bad_argument_of_the_loop_is_named(options: dict[str, Any], said: str) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match=said):
            await rig.runner.run_loop(**options)


async def test_a_runner_works_in_one_loop_at_a_time(place: Path | None) -> None:
    async with Rig(place, Clock()) as rig:
        loop = await working(rig.runner)
        with pytest.raises(InvalidArgument, match="run_loop must run once per runner, got a second call"):
            await rig.runner.run_loop()
        await stopped(rig.runner, loop)
        again = await working(rig.runner)
        await stopped(rig.runner, again)


async def test_closing_a_runner_ends_its_loop_and_nothing_is_claimed_after(place: Path | None) -> None:
    async def body(ctx: Any) -> None: ...

    async with Rig(place, Clock(), grace_seconds=0) as rig:
        rig.register(body)
        loop, other = await working(rig.runner, poll_interval=3600), rig.another()
        await rig.runner.close()
        assert loop.done()
        assert loop.exception() is None
        run_id = await other.submit("script")
        with pytest.raises(StorageClosed, match="this runner was closed"):
            await rig.runner.run_loop()
        assert (await other.get_run(run_id)).status == RunStatus.PENDING


async def test_a_run_whose_agent_is_unregistered_while_it_is_claimed_goes_back(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = asyncio.Event()

    async def body(ctx: Any) -> None:
        ran.set()

    async with Rig(place, Clock(), grace_seconds=0) as rig:
        rig.register(body, "gone")
        rig.register(body, "here")
        for key in ("gone", "here"):
            await rig.runner.submit(key, run_id=key)
        claim = rig.runner.queue.claim_rows

        async def claimed(*args: Any, **options: Any) -> Any:
            rows = await claim(*args, **options)
            rig.registry.unregister("gone")
            return rows

        monkeypatch.setattr(rig.runner.queue, "claim_rows", claimed)
        loop = await working(rig.runner, concurrency=2)
        await until(ran)
        await rig.runner.wait("here", timeout=10)
        rig.runner.stop()
        await loop
        info = await rig.runner.get_run("gone")
        assert (info.status, info.attempt) == (RunStatus.PENDING, 1)
        monkeypatch.undo()
        rig.register(body, "gone")
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("gone")).status == RunStatus.SUCCEEDED


async def test_closing_a_runner_ends_its_loop_in_another_thread(place: Path | None) -> None:
    ended: list[BaseException | None] = []

    def work() -> None:
        try:
            asyncio.run(rig.runner.run_loop(3600, handle_signals=False))
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            ended.append(error)
        else:
            ended.append(None)

    async with Rig(place, Clock(), grace_seconds=0) as rig:
        thread = threading.Thread(target=work)
        thread.start()
        await soon(lambda: rig.runner._worker._wake_event is not None)
        await rig.runner.close()
        assert rig.runner._worker._wake_event is None
        await asyncio.to_thread(thread.join, 10)
    assert ended == [None]


async def test_closing_from_another_thread_leaves_runs_to_the_thread_they_are_in(place: Path | None) -> None:
    """In debug mode a loop says so where another thread touches what is its own."""
    inside, stopped = threading.Event(), list[int]()

    async def body(ctx: Any) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(threading.get_ident())

    def work() -> None:
        asyncio.run(rig.runner.run_loop(3600, handle_signals=False), debug=True)

    async with Rig(place, Clock(), grace_seconds=0) as rig:
        rig.register(body)
        other = rig.another()
        await other.submit("script", run_id="r")
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        await asyncio.to_thread(inside.wait, 10)
        await rig.runner.close()
        await asyncio.to_thread(thread.join, 10)
        assert stopped == [thread.ident]
        assert (await other.get_run("r")).status == RunStatus.PENDING


async def test_a_loop_whose_store_was_closed_ends_with_that_error(tmp_path: Path) -> None:
    async def body(ctx: Any) -> None: ...

    async with Rig(tmp_path / "a.db", Clock(), grace_seconds=0) as rig:
        rig.register(body)
        loop = await working(rig.runner, poll_interval=0.01)
        rig.runner.queue.engine.close_now()  # type: ignore[attr-defined]
        rig.runner.event_bus.engine.close_now()  # type: ignore[attr-defined]
        rig.runner.state_store.engine.close_now()  # type: ignore[attr-defined]
        async with asyncio.timeout(20):
            with pytest.raises(StorageClosed):
                await loop


async def test_a_loop_without_a_free_slot_ends_too_if_its_store_was_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inside, more = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> None:
        inside.set()
        await more.wait()

    async with Rig(tmp_path / "a.db", Clock(), grace_seconds=0) as rig:
        rig.register(body)
        await rig.runner.submit("script")
        loop = await working(rig.runner, poll_interval=0.01, concurrency=1)
        await until(inside)
        rig.runner.queue.engine.close_now()  # type: ignore[attr-defined]
        rig.runner.event_bus.engine.close_now()  # type: ignore[attr-defined]
        rig.runner.state_store.engine.close_now()  # type: ignore[attr-defined]
        async with asyncio.timeout(20):
            with pytest.raises(StorageClosed):
                await loop
        more.set()
    assert "claiming" not in caplog.text


async def test_closing_does_not_cut_the_grace_short(place: Path | None) -> None:
    inside, more = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> int:
        inside.set()
        await more.wait()
        return 1

    async with Rig(place, Clock(), grace_seconds=20) as rig:
        rig.register(body)
        loop, other = await working(rig.runner), rig.another()
        run_id = await other.submit("script")
        await until(inside)
        rig.runner.stop()
        closing = asyncio.ensure_future(rig.runner.close())
        await asyncio.sleep(0)
        assert not rig.runner._worker._hurry
        more.set()
        await closing
        await loop
        assert (await other.get_run(run_id)).status == RunStatus.SUCCEEDED


async def test_closing_a_runner_that_works_gives_its_runs_back(place: Path | None) -> None:
    inside = asyncio.Event()

    async def body(ctx: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig(place, Clock(), grace_seconds=0) as rig:
        rig.register(body)
        other = rig.another()
        run_id = await rig.runner.submit("script")
        going = asyncio.ensure_future(other.run_once())
        await until(inside)
        await other.close()
        assert await going
        assert (await rig.runner.get_run(run_id)).status == RunStatus.PENDING


@pytest.mark.parametrize("which", ["listen", "blocking_claims"])
async def test_a_loop_that_could_not_begin_leaves_the_runner_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    def refused(*args: Any) -> Any:
        raise StorageBusy("can't start new thread")

    async def body(ctx: Any) -> int:
        return 1

    async with Rig() as rig:
        rig.register(body)
        with monkeypatch.context() as patch:
            patch.setattr(rig.runner.queue, which, refused)
            with pytest.raises(StorageBusy):
                await rig.runner.run_loop(handle_signals=False)
        run_id = await rig.runner.submit("script")
        loop = asyncio.ensure_future(rig.runner.run_loop(handle_signals=False))
        assert (await rig.runner.wait(run_id, 10)).final_output == {"value": 1}
        rig.runner.stop()
        await loop


async def test_what_does_not_stop_is_given_back_by_the_worker_and_closing_does_not_begin_anew(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "SHUTDOWN_SECONDS", 0.01)
    inside, leave = asyncio.Event(), asyncio.Event()

    async def stubborn(ctx: Any) -> int:
        inside.set()
        while not leave.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await leave.wait()
        return 1

    async with Rig(place, VirtualClock(), grace_seconds=1e9, max_retries=3) as rig:
        rig.register(stubborn)
        runner, other = rig.another(), rig.runner
        run_id = await other.submit("script")
        loop = asyncio.ensure_future(runner.run_loop(handle_signals=False))
        await until(inside)
        tasks = list(runner._worker._executions)
        runner.stop()
        runner.stop()  # without the grace
        await soon(loop.done)
        await loop
        info = await other.get_run(run_id)
        assert (info.status, info.attempt, info.reason) == (RunStatus.PENDING, 1, "handed back")
        assert (runner._worker.slots.busy, runner.heartbeat._leased) == (0, {})
        async with asyncio.timeout(10):
            await runner.close()
        leave.set()
        await asyncio.wait(tasks, timeout=10)
        assert runner._worker._unstopped == set()
        assert (await other.get_run(run_id)).status is RunStatus.PENDING, "what it came to is not told any more"


async def test_what_cannot_be_given_back_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "SHUTDOWN_SECONDS", 0.01)
    monkeypatch.setattr(worker_module, "RELEASE_SECONDS", 0.01)
    inside = asyncio.Event()

    async def never(*args: Any) -> Any:
        await asyncio.Event().wait()

    async def body(ctx: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig(None, VirtualClock(), grace_seconds=0) as rig:
        rig.register(body)
        await rig.runner.submit("script")
        loop = asyncio.ensure_future(rig.runner.run_loop(handle_signals=False))
        await until(inside)
        with monkeypatch.context() as patch:
            patch.setattr(rig.runner.queue.commits, "commit", never)
            rig.runner.stop()
            await soon(loop.done)
            await loop
            await soon(lambda: not rig.runner._worker._unstopped)


# -- runs that may be what ends their process


async def crashed(
    rig: Rig, clock: VirtualClock, agent: str = "script", times: int = RunnerConfig.max_crashes - 1
) -> None:
    """Processes that died held all that is pending: by default its next crash is its last."""
    for _ in range(times):
        assert await rig.runner.queue.claim_rows("died", 1, agent_keys=[agent], limit=10)
        clock.advance(2)


async def pass_by(clock: VirtualClock, seconds: float) -> None:
    """A little more than that, for which the worker sleeps."""
    await soon(lambda: clock.next_due == seconds)
    clock.advance(seconds + 1)


class Crew:
    """Runs that say when they are in flight, and end when they may."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.leave: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def body(self, ctx: Any) -> None:
        name = ctx.run_key
        self.inside.append(name)
        await self.leave[name].wait()
        self.inside.remove(name)

    async def becomes(self, *names: str) -> None:
        """Just these are in flight, and stay the only ones."""
        await soon(lambda: self.inside == [*names])
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert self.inside == [*names]


@pytest.mark.parametrize(("limit", "alone"), [(1, False), (2, True), (4, False)])
async def test_runs_are_executed_alone_before_their_last_crash_by_max_crashes(limit: int, alone: bool) -> None:
    clock, crew = VirtualClock(), Crew()
    async with Rig(None, clock, max_crashes=limit) as rig:
        rig.register(crew.body)
        for name in "ab":
            await rig.runner.submit("script", run_id=name)
        await crashed(rig, clock, times=min(limit - 1, 1))
        loop = asyncio.ensure_future(rig.runner.run_loop(concurrency=2))
        await crew.becomes(*("a" if alone else "ab"))
        for name in "ab":
            crew.leave[name].set()
        await soon(lambda: not crew.inside)
        rig.runner.stop()
        await loop


async def test_runs_whose_next_crash_is_their_last_go_one_by_one_and_it_costs_them_nothing(place: Path | None) -> None:
    clock, crew = VirtualClock(), Crew()
    async with Rig(place, clock) as rig:
        rig.register(crew.body)
        ids = [str(await rig.runner.submit("script", run_id=name)) for name in "abc"]
        await crashed(rig, clock)
        loop = await working(rig.runner, poll_interval=3600, concurrency=4)
        for n, name in enumerate("abc"):
            await crew.becomes(name)
            rows = [await rig.runner.queue.require(each) for each in ids[n:]]
            assert [row.status for row in rows] == ["running"] + ["pending"] * (2 - n), "none is held and not run"
            assert {(row.crashes_in_row, row.crashes, row.parked, row.due_at) for row in rows} == {(2, 2, 0, 0.0)}
            crew.leave[name].set()
        assert [(await rig.runner.wait(each, 10)).status for each in ids] == [RunStatus.SUCCEEDED] * 3
        await stopped(rig.runner, loop)


async def test_a_suspect_and_others_do_not_begin_beside_each_other(place: Path | None) -> None:
    clock, crew = VirtualClock(), Crew()
    async with Rig(place, clock, lease_ttl_seconds=600) as rig:
        rig.register(crew.body)
        loop = await working(rig.runner, concurrency=4)
        await rig.runner.submit("other", run_id="suspect")
        await crashed(rig, clock, "other")
        await rig.runner.submit("script", run_id="before")
        await crew.becomes("before")
        rig.register(crew.body, "other")
        await rig.runner.submit("script", run_id="with it")
        await crew.becomes("before", "with it")
        await rig.runner.submit("script", run_id="after")
        await crew.becomes("before", "with it")
        assert (await rig.runner.get_run("suspect")).status is RunStatus.PENDING
        crew.leave["before"].set()
        await crew.becomes("with it")
        crew.leave["with it"].set()
        await crew.becomes("suspect")
        crew.leave["suspect"].set()
        await crew.becomes("after")
        crew.leave["after"].set()
        await crew.becomes()
        await stopped(rig.runner, loop)


async def test_what_does_not_end_keeps_a_suspect_waiting_for_a_while_only_and_so_does_a_suspect(
    place: Path | None,
) -> None:
    clock, crew = VirtualClock(), Crew()
    async with Rig(place, clock, lease_ttl_seconds=600) as rig:
        rig.register(crew.body)
        loop = await working(rig.runner, poll_interval=3600, concurrency=4)
        await rig.runner.submit("script", run_id="endless")
        await crew.becomes("endless")
        for name in ("suspect", "second"):
            await rig.runner.submit("other", run_id=name)
        await crashed(rig, clock, "other")
        rig.register(crew.body, "other")
        await rig.runner.submit("script", run_id="late", delay=1)  # rings
        await crew.becomes("endless")
        await pass_by(clock, ISOLATION_TIMEOUT)
        await crew.becomes("endless", "suspect")
        await pass_by(clock, ISOLATION_TIMEOUT)
        await crew.becomes("endless", "suspect", "late")
        crew.leave["suspect"].set()
        await crew.becomes("endless", "late")
        await pass_by(clock, ISOLATION_TIMEOUT)
        await crew.becomes("endless", "late", "second")
        for name in ("endless", "late", "second"):
            crew.leave[name].set()
        await crew.becomes()
        await stopped(rig.runner, loop)


async def test_a_run_that_got_further_before_it_crashed_is_no_suspect(place: Path | None) -> None:
    clock, crew = VirtualClock(), Crew()

    async def further(ctx: Any) -> None:
        await ctx.step("a", lambda: 1)
        crew.inside.append(ctx.run_key)
        await asyncio.Event().wait()

    async with Rig(place, clock, grace_seconds=0, lease_ttl_seconds=600, run_timeout_seconds=1e6) as rig:
        rig.register(further)
        dies = rig.another(lease_ttl_seconds=1)
        ids = [str(await rig.runner.submit("script", run_id=name)) for name in "abc"]
        left = [asyncio.ensure_future(dies.run_once()) for _ in ids]
        await soon(lambda: sorted(crew.inside) == ["a", "b", "c"])
        crew.inside.clear()
        dies.heartbeat.stop()
        clock.advance(2)
        await crashed(rig, clock, times=RunnerConfig.max_crashes - 2)
        rig.register(crew.body)
        loop = await working(rig.runner, concurrency=4)

        def together() -> bool:
            clock.advance(0.01)  # to the next poll
            return sorted(crew.inside) == ["a", "b", "c"]

        await soon(together)
        rows = [await rig.runner.queue.require(each) for each in ids]
        assert {(row.crashes, row.crashes_in_row) for row in rows} == {(RunnerConfig.max_crashes - 1, 1)}
        for name in "abc":
            crew.leave[name].set()
        await stopped(rig.runner, loop)
        await dies.close()
        await asyncio.gather(*left)


async def test_where_several_are_driven_by_hand_a_suspect_is_alone_too(place: Path | None) -> None:
    clock, crew = VirtualClock(), Crew()
    async with Rig(place, clock) as rig:
        rig.register(crew.body)
        for name in "ab":
            await rig.runner.submit("script", run_id=name)
        await crashed(rig, clock)
        going = asyncio.ensure_future(rig.runner.run_once())
        await crew.becomes("a")
        assert not await rig.runner.run_once(), "there is none that may begin"
        crew.leave["a"].set()
        assert await going
        crew.leave["b"].set()
        assert await rig.runner.run_once()
        assert not await rig.runner.run_once()


# -- the heart


async def test_a_beat_extends_every_lease_and_hears_a_cancel(place: Path | None) -> None:
    clock, inside = VirtualClock(), asyncio.Event()

    async def body(ctx: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig(place, clock, lease_ttl_seconds=60, run_timeout_seconds=1e6) as rig:
        going = asyncio.ensure_future(rig.go(body))
        await until(inside)
        key = str((await rig.runner.get_run("r")).run_id)
        before = (await rig.runner.queue.require(key)).lease_until
        clock.advance(40)
        await asyncio.to_thread(rig.runner.heartbeat.beat)
        assert (await rig.runner.queue.require(key)).lease_until == before + 40
        await rig.runner.cancel("r")
        await asyncio.to_thread(rig.runner.heartbeat.beat)
        assert (await going).status == RunStatus.CANCELLED
        await asyncio.to_thread(rig.runner.heartbeat.beat)


async def test_a_worker_that_lost_its_run_stops_and_writes_nothing(place: Path | None) -> None:
    clock, inside, ended = VirtualClock(), asyncio.Event(), list[str]()

    async def body(ctx: Any) -> str:
        if ctx.attempt == 1:
            inside.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("stopped")
        return "second"

    async with Rig(place, clock, max_retries=3, run_timeout_seconds=1e6, lease_ttl_seconds=30) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        zombie = asyncio.ensure_future(rig.runner.run_once())
        await until(inside)
        clock.advance(31)
        other = rig.another(worker_id="w2")
        assert await other.run_once()
        await asyncio.to_thread(rig.runner.heartbeat.beat)
        assert await zombie
        assert ended == ["stopped"]
        assert (await other.wait("r")).final_output == {"value": "second"}
        started = [payload["attempt"] for _, payload in await rig.told("run.started")]
        assert started[-1] == 2
        assert len(await rig.told("run.succeeded")) == 1


async def test_a_heart_that_is_not_answered_lets_its_runs_go_before_their_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has taken the run over when the store answers, so its worker continues it as the same attempt."""
    clock, inside, ended = VirtualClock(), asyncio.Event(), list[str]()

    async def body(ctx: Any) -> None:
        if ended:
            return
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("stopped")

    async with Rig(None, clock, lease_ttl_seconds=60, run_timeout_seconds=1e6) as rig:
        rig.register(body)
        run_id = await rig.runner.submit("script")
        going = asyncio.ensure_future(rig.runner.run_once())
        await until(inside)

        def silent(*_: Any) -> Any:
            raise StorageBusy("no answer")

        monkeypatch.setattr(rig.runner.queue.commits, "commit_from_thread", silent)
        clock.advance(20)
        await asyncio.to_thread(rig.runner.heartbeat.beat)
        assert not going.done()
        clock.advance(21)
        await asyncio.to_thread(rig.runner.heartbeat.beat)
        assert await going
        assert ended == ["stopped"]
        row = await rig.runner.queue.require(run_id)
        assert (row.status, row.attempt, row.failures, row.crashes) == ("succeeded", 1, 0, 0)
        assert caplog.text.count("is not available, and its runs wait for it: no answer") == 1


@pytest.mark.parametrize("beside", [False, True])
async def test_one_failed_heartbeat_does_not_end_a_run_that_was_claimed_a_moment_ago(
    monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """The store has answered about it with its claim, whatever it did before."""
    clock, inside, ends, ended = VirtualClock(), dict[str, asyncio.Event](), asyncio.Event(), list[str]()

    async def body(ctx: Any) -> None:
        inside[ctx.run_key].set()
        try:
            await ends.wait()
        finally:
            ended.append(ctx.run_key)

    async def begun(key: str) -> asyncio.Task[Any]:
        inside[key] = asyncio.Event()
        await rig.runner.submit("script", run_id=key)
        going = asyncio.ensure_future(rig.runner.run_once())
        await until(inside[key])
        return going

    def silent(*_: Any) -> Any:
        raise StorageBusy("no answer")

    async with Rig(None, clock, lease_ttl_seconds=60, run_timeout_seconds=1e6) as rig:
        rig.register(body)
        going = [await begun("old")]
        if not beside:
            ends.set()
            await going.pop()
            ended.clear()
            ends.clear()
        clock.advance(41)
        going.append(await begun("new"))
        monkeypatch.setattr(rig.runner.queue.commits, "commit_from_thread", silent)
        await asyncio.to_thread(rig.runner.heartbeat.beat)
        if beside:
            await soon(lambda: ended == ["old"])
        assert ended == (["old"] if beside else [])
        ends.set()
        await asyncio.gather(*going)
        assert (await rig.runner.wait("new")).status is RunStatus.SUCCEEDED


async def test_a_stalled_loop_is_not_kept_alive(place: Path | None) -> None:
    clock, inside = VirtualClock(), asyncio.Event()

    async def body(ctx: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig(place, clock, run_timeout_seconds=1e6) as rig:
        going = asyncio.ensure_future(rig.go(body))
        await until(inside)
        assert len(rig.runner.heartbeat._alive()) == 1
        clock.advance(61)
        assert rig.runner.heartbeat._alive() == []
        rig.runner.heartbeat.beat()
        going.cancel()
        await asyncio.wait({going})


class Lease(LeasedRun):
    """A claim that nothing executes."""

    def __init__(self, row: RunRow) -> None:
        self.row, self.control, self.owner, self.seen = row, RunControl(), None, row.mail_seq
        self.loop = asyncio.get_running_loop()
        self.ends, self.reported_at, self.extended_at, self.answered_at = float("inf"), 0.0, 0.0, 0.0

    def cancel(self) -> None:
        return

    def lose(self, claim_id: str) -> None:
        return

    def stop_for_outage(self, claim_id: str) -> None:
        return

    def publish_heartbeat(self) -> None:
        return

    def unchanged_release(self) -> RunUpdate:
        return InMemoryQueue().unchanged_update(self.row, self.row.claim_id)


async def test_a_claim_that_ends_leaves_a_later_one_of_its_run_in_the_heart() -> None:
    """A run that is parked and claimed anew here at once: its old drive ends after the new one has begun."""
    queue = InMemoryQueue()
    heart, row = Heartbeat(queue, RunnerConfig()), queue.new_row(None, "a", {}, None)

    old, new = (Lease(row.with_values(claim_id=claim)) for claim in ("old", "new"))
    heart.hold(old)
    heart.hold(new)
    heart.drop(row.run_id, old)
    assert [each.row.claim_id for each in heart._leased.values()] == ["new"]
    heart.drop(row.run_id, new)
    assert heart._leased == {}
    heart.stop()


async def test_an_answer_about_an_earlier_attempt_loses_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim gets a new id while the store is asked about the old one."""
    queue, lost = InMemoryQueue(), list[str]()

    class Renewed(Lease):
        def lose(self, claim_id: str) -> None:
            lost.append(claim_id)

        def renew(self) -> None:
            self.row = self.row.with_values(claim_id="new")

    async def snapshots(run_ids: Any) -> dict[str, Any]:
        looked.renew()
        return {}

    def commit(guard: Any, ops: Any) -> list[Any]:
        beaten.renew()
        return [[(False, False)], *ops[1:]]

    row = queue.new_row(None, "a", {}, None).with_values(claim_id="old")
    heart, looked, beaten = Heartbeat(queue, RunnerConfig()), Renewed(row), Renewed(row)
    monkeypatch.setattr(queue, "snapshots", snapshots)
    monkeypatch.setattr(queue.engine, "commit_from_thread", commit)
    await heart._look([looked])
    heart._leased[row.run_id] = beaten
    heart.beat()
    await soon(lambda: len(lost) == 2)
    assert (lost, beaten.row.claim_id) == (["old", "old"], "new")


class Interrupted(Lease):
    """A claim beside which another loop drops one, from its thread, whenever somebody asks whose it is."""

    held: dict[str, LeasedRun]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:  # type: ignore[override]
        self.held.popitem()
        return asyncio.get_running_loop()


@pytest.mark.parametrize("which", ["agent-runtime-beat", "agent-runtime-bell"])
async def test_a_heart_without_a_thread_beats_and_listens_with_the_next_claim(tmp_path: Path, which: str) -> None:
    async def body(ctx: Any) -> int:
        return 1

    async with Rig(tmp_path / "a.db") as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        heart = rig.runner.heartbeat
        with no_thread(which), pytest.raises(StorageBusy, match="can't start new thread"):
            await rig.runner.run_once()
        assert (heart._leased, heart._stop_timer, heart._stop_listening) == ({}, None, None)
        assert (await rig.runner.get_run("r")).attempt == 1
        await rig.clock.sleep(60)
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": 1}
        assert heart._stop_timer is not None
        assert heart._stop_listening is not None


async def test_a_heart_looks_at_its_claims_while_other_loops_change_them() -> None:
    queue = InMemoryQueue()
    heart, row = Heartbeat(queue, RunnerConfig()), queue.new_row(None, "a", {}, None)
    heart.stop()
    first = object.__new__(Interrupted)
    first.row, first.control = row, RunControl()
    heart._leased = first.held = {"first": first, "other": first, "third": first}
    await heart._follow(asyncio.get_running_loop(), asyncio.Event())
    assert heart._leased == {}


def test_a_queue_that_only_a_loop_reaches_is_beaten_in_every_loop() -> None:
    beats, heard = [0], [asyncio.Event()]

    class Counts(TheirQueue):
        async def commit(self, guard: Any, ops: Any) -> list[Any]:
            if any(op.name == "queue.beat" for op in ops):
                beats[-1] += 1
                if beats[-1] == 1:
                    raise ConnectionError("the driver's own error")
                heard[-1].set()
            return await super().commit(guard, ops)

    async def long(ctx: Any) -> None:
        async with asyncio.timeout(5):
            await heard[-1].wait()

    config = RunnerConfig(max_retries=1, lease_ttl_seconds=0.6, heartbeat_interval_seconds=0.02)
    runner = AgentRunner(Counts(), config=config)
    for name in ("first", "second"):
        beats.append(0)
        heard.append(asyncio.Event())
        assert asyncio.run(runner.execute(Script(long), name)).status == RunStatus.SUCCEEDED
    assert runner.heartbeat._beaters == {}


async def test_a_heart_stops_while_the_loop_of_another_thread_lets_go_of_it() -> None:
    heart, here = Heartbeat(InMemoryQueue(), RunnerConfig()), asyncio.get_running_loop()
    elsewhere = asyncio.new_event_loop()

    class Going(asyncio.Task[None]):
        """Its loop comes to its end at this moment."""

        def get_loop(self) -> asyncio.AbstractEventLoop:
            heart._watchers.pop(elsewhere, None)
            return here

    async def nothing() -> None:
        return

    tasks = [Going(nothing(), loop=here) for _ in range(2)]
    heart._watchers = {here: (asyncio.Event(), tasks[0]), elsewhere: (asyncio.Event(), tasks[1])}
    heart.stop()
    assert heart._watchers == {}
    await asyncio.wait(tasks)
    elsewhere.close()


async def test_a_watcher_counts_its_claims_while_another_thread_takes_one() -> None:
    queue = InMemoryQueue()
    heart, here = Heartbeat(queue, RunnerConfig()), asyncio.get_running_loop()
    row = queue.new_row(None, "a", {}, None)
    alone: list[bool] = []

    class Seen(Lease):
        """It tells whether others could be taken in while its watcher looks at it."""

        @property
        def loop(self) -> asyncio.AbstractEventLoop:
            alone.append(heart._lock.locked())
            return here

        @loop.setter
        def loop(self, loop: asyncio.AbstractEventLoop) -> None: ...

    heart.hold(Seen(row))
    alone.clear()
    await soon(lambda: bool(alone))
    assert all(alone)
    heart.stop()


async def _accepted(queue: object, backend: object, guard: object) -> None:
    """Take the engines of two backends as separate."""


@pytest.mark.parametrize("apart", [True, False], ids=["thread", "loop"])
async def test_a_beat_that_fails_in_any_way_is_not_the_last(
    apart: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beats: list[bool] = []
    inside, real = asyncio.Event(), InMemoryQueue.commit

    async def body(ctx: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    def beaten() -> None:
        beats.append(True)
        if len(beats) < 3:
            raise OSError("the driver of that queue says no")

    def commit_from_thread(guard: Any, ops: Any) -> list[Any]:
        beaten()
        return [[(True, False) for _ in ops[0].args[0]]]

    async def commit(self: Any, guard: Any, ops: Any) -> list[Any]:
        if ops[0].name == "queue.beat":
            beaten()
        return await real(self, guard, ops)

    async with Rig(None, Clock(), lease_ttl_seconds=0.06, grace_seconds=0) as rig:
        if apart:
            monkeypatch.setattr(rig.runner.queue.commits, "commit_from_thread", commit_from_thread)
        else:
            # Its fences are still those of the engine that all three share.
            monkeypatch.setattr("agent_runtime_core._execution.claim_writer.require_separate_fences", _accepted)
            monkeypatch.setattr(InMemoryQueue, "commits", property(lambda self: self))
            monkeypatch.setattr(InMemoryQueue, "commit", commit)
        going = asyncio.ensure_future(rig.go(body))
        await until(inside)
        await soon(lambda: len(beats) > 3)
        assert "the driver of that queue says no" in caplog.text
        going.cancel()
        await asyncio.wait({going})


async def test_a_claim_without_an_answer_costs_one_wait_and_holds_nothing_for_long() -> None:
    """Whether it landed is looked up before the next claim, and not at a store that has just not answered."""
    clock = VirtualClock()
    away, asked = False, 0

    class Far(InMemoryQueue):
        @property
        def commits(self) -> Any:
            return self

        async def commit(self, guard: Any, ops: Any) -> list[Any]:
            nonlocal asked
            asked += 1
            results = await super().commit(guard, ops)
            return results if not away else self.unanswered()

        async def read(self, what: str, *args: Any) -> Any:
            nonlocal asked
            asked += 1
            return await super().read(what, *args) if not away else self.unanswered()

        def unanswered(self) -> Any:
            clock.advance(3)
            raise StorageBusy("no answer")

    queue = Far(clock=clock)
    run_id = (await queue.enqueue(None, "a", {})).run_id
    away, asked = True, 0
    with pytest.raises(StorageBusy):
        await queue.claim("w", 60)
    assert asked == 1
    assert (await InMemoryQueue.read(queue, "row", str(run_id))).status == "running", "it did land"
    with pytest.raises(StorageBusy):
        await queue.claim("w", 60)
    assert asked == 2
    away = False
    run = await queue.claim("w", 60)
    assert (run.run_id, run.attempt) == (run_id, 1)
    await queue.release(run_id, "w", True)


def unanswered(rig: Rig, monkeypatch: pytest.MonkeyPatch, which: Callable[[Any], bool]) -> list[Any]:
    """Have commits with such an operation land, and not be answered, as long as somebody repeats them."""
    engine = rig.runner.queue.commits
    commit, lost = engine.commit, list[Any]()

    async def unheard(guard: Any, ops: Any) -> Any:
        answers = await commit(guard, ops)
        if len(lost) < 3 and any(map(which, ops)):
            lost.append(ops)
            raise StorageBusy("did not answer")
        return answers

    monkeypatch.setattr(engine, "commit", unheard)
    return lost


async def test_a_run_that_was_claimed_with_an_end_nobody_heard_of_goes_back_at_once(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[UUID] = []

    async def body(ctx: Any) -> None:
        ran.append(ctx.run_id)

    async with Rig(place, Clock()) as rig:
        rig.register(body)
        runs = [await rig.runner.submit("script") for _ in range(2)]
        lost = unanswered(rig, monkeypatch, lambda op: op.name == "queue.claim" and len(ran) == 1)
        task = await working(rig.runner, concurrency=1)
        async with asyncio.timeout(10):  # its lease would be 60 s
            for run in runs:
                assert (await rig.runner.wait(run)).status is RunStatus.SUCCEEDED
        await stopped(rig.runner, task)
        assert (ran, len(lost)) == (runs, 3)


async def test_a_claim_that_was_renewed_and_nobody_heard_of_is_given_back(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    async def body(ctx: Any) -> str:
        tries.append(1)
        if len(tries) < 2:
            raise ValueError("once more")
        return "done"

    async with Rig(place, Clock(), max_retries=2, retry_backoff_base=0) as rig:
        lost = unanswered(rig, monkeypatch, lambda op: op.name == "queue.settle" and bool(op.args[1].renew))
        with pytest.raises(StorageBusy):
            await rig.go(body)
        assert len(lost) == 3
        assert (await rig.runner.get_run("r")).status is RunStatus.PENDING
        async with asyncio.timeout(10):  # its lease would be 60 s
            assert await rig.value(body) == "done"
