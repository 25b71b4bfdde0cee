"""Claims and durations survive a machine that is suspended, an outage, and a wall clock that somebody sets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.clock import Clock, Duration
from agent_runtime_core._core.ids import run_uuid
from agent_runtime_core._engines.outages import StoreOutage
from agent_runtime_core._engines.payloads import Payloads
from agent_runtime_core.errors import RunBusy, StorageBusy, WaitTimeout
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.queue.live_claims import AGAIN, DEFERRED_INTERVALS, LATE
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.support.runs import Rig, Script, soon, until

NIGHT, LEASE = 600.0, 30.0
SETTINGS = {"lease_ttl_seconds": LEASE, "grace_seconds": 0.0}


class Work:
    """A step that lasts until it is told to end."""

    def __init__(self) -> None:
        self.began, self.inside, self.ends = 0, asyncio.Event(), asyncio.Event()

    async def step(self) -> str:
        self.began += 1
        self.inside.set()
        await self.ends.wait()
        return "done"

    async def body(self, ctx: Any) -> Any:
        return await ctx.step("work", self.step, on_in_doubt="fail")


async def claims(runner: AgentRunner) -> list[str]:
    """Claim whatever a worker of that runner would take, and return the run keys."""
    return [row.run_key or "" for row in await runner.queue.claim_rows("w", LEASE, agent_keys=["script"], limit=5)]


# -- claims


@pytest.mark.parametrize("inline", [False, True])
async def test_a_run_that_goes_on_after_suspends_is_not_taken_from_itself(place: Path | None, inline: bool) -> None:
    clock, work = VirtualClock(), Work()
    async with Rig(place, clock, **SETTINGS, run_timeout_seconds=NIGHT) as rig:
        rig.register(work.body)
        if inline:
            going: asyncio.Future[Any] = asyncio.ensure_future(rig.go(work.body, recover="worker"))
        else:
            await rig.runner.submit("script", run_id="r")
            going = asyncio.ensure_future(rig.runner.run_once())
        await until(work.inside)
        for _ in range(3):
            clock.suspend(NIGHT)
            assert await claims(rig.runner) == []
            clock.advance(LEASE / 3)
        work.ends.set()
        await going
        row = await rig.runner.queue.row("r")
        assert row is not None
        assert (row.status, row.crashes, row.crashes_in_row, work.began) == ("succeeded", 0, 0, 1)


@asynccontextmanager
async def executing(place: Path | None) -> AsyncIterator[tuple[Rig, VirtualClock, asyncio.Future[bool]]]:
    """A runner whose run "r" is inside its work, its clock, and its execution."""
    clock, work = VirtualClock(), Work()
    async with Rig(place, clock, **SETTINGS) as rig:
        rig.register(work.body)
        await rig.runner.submit("script", run_id="r")
        going = asyncio.ensure_future(rig.runner.run_once())
        await until(work.inside)
        yield rig, clock, going
        work.ends.set()
        await asyncio.wait({going})


async def test_a_process_that_was_stopped_for_longer_than_its_lease_keeps_its_claim_too(place: Path | None) -> None:
    async with executing(place) as (rig, clock, _):
        clock.advance(LEASE + 1)
        assert await claims(rig.runner) == []
        row = await rig.runner.queue.row("r")
        assert row is not None
        assert row.lease_until == clock.boot() + LEASE, "and the lease is extended in the same commit"


async def test_others_take_it_over_one_interval_after_the_suspend(place: Path | None) -> None:
    async with executing(place) as (rig, clock, going):
        other = rig.another(worker_id="other")
        clock.suspend(NIGHT)
        assert await claims(other) == []
        clock.advance(LEASE / 3)
        assert await claims(other) == []
        rig.runner.heartbeat.beat()
        clock.advance(LEASE / 3)
        assert await claims(other) == [], "its heartbeat has extended the lease since"
        rig.runner.heartbeat.stop()
        clock.suspend(NIGHT)
        assert await claims(other) == []
        clock.advance(DEFERRED_INTERVALS * LEASE / 3)
        assert await claims(other) == ["r"]
        going.cancel()


@pytest.mark.parametrize("left", [0.1, 5.0, 19.0])
@pytest.mark.parametrize("awake", [0.0, 3.0])
async def test_no_lease_that_was_valid_before_the_suspend_is_taken_over_in_that_time(
    place: Path | None, awake: float, left: float
) -> None:
    """However short its lease was, and however long after it woke up this process compares its clocks."""
    clock = VirtualClock()
    async with Rig(place, clock, **SETTINGS) as rig:
        await rig.runner.submit("script", run_id="r")
        assert await claims(rig.another(worker_id="other")) == ["r"]
        clock.advance(LEASE - left)
        assert await claims(rig.runner) == []
        for _ in range(2):  # a second suspend begins another interval
            clock.suspend(NIGHT)
            clock.advance(awake)
            assert await claims(rig.runner) == []
        clock.advance(DEFERRED_INTERVALS * LEASE / 3 - 0.1)
        assert await claims(rig.runner) == []
        clock.advance(0.2)
        assert await claims(rig.runner) == ["r"]


async def test_a_caller_takes_it_over_no_earlier() -> None:
    clock, work = VirtualClock(), Work()
    async with Rig(None, clock, **SETTINGS) as rig:
        going = asyncio.ensure_future(rig.go(work.body))
        await until(work.inside)
        other = rig.another(worker_id="other")
        clock.suspend(NIGHT)
        with pytest.raises(RunBusy):
            await other.execute(Script(work.body), "r", if_running="raise")
        work.ends.set()
        assert (await going).status is RunStatus.SUCCEEDED


async def test_a_lease_that_had_ended_before_the_suspend_is_taken_over_immediately() -> None:
    clock = VirtualClock()
    async with Rig(None, clock, **SETTINGS) as rig:
        await rig.runner.submit("script", run_id="r")
        assert await claims(rig.another()) == ["r"]
        clock.advance(LEASE * 4 / 3 + 1)  # nothing tells when in the last interval the machine fell asleep
        clock.suspend(NIGHT)
        assert await claims(rig.runner) == ["r"]


async def test_a_claim_of_a_dead_process_is_not_deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    async with Rig(tmp_path / "a.db", clock, **SETTINGS) as rig:
        engine: Any = rig.runner.queue.engine  # type: ignore[attr-defined]
        await rig.runner.submit("script", run_id="r")
        assert await claims(rig.another()) == ["r"]
        monkeypatch.setattr(engine, "dead_holders", lambda holders: tuple(holders))
        clock.advance(1)
        clock.suspend(NIGHT)
        assert await claims(rig.runner) == ["r"]


async def test_a_suspend_ends_neither_the_heartbeat_of_a_run_nor_its_time_limit() -> None:
    clock, work = VirtualClock(), Work()
    async with Rig(None, clock, **SETTINGS, run_timeout_seconds=100) as rig:
        going = asyncio.ensure_future(rig.go(work.body))
        await until(work.inside)
        clock.suspend(NIGHT)
        assert len(rig.runner.heartbeat._alive()) == 1
        work.ends.set()
        assert (await going).status is RunStatus.SUCCEEDED


async def test_a_claim_with_a_new_id_and_an_old_lease_is_not_taken_from_itself(place: Path | None) -> None:
    clock, work, attempts = VirtualClock(), Work(), list[int]()

    async def body(ctx: Any) -> Any:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            clock.advance(LEASE - 1)
            raise ConnectionError
        return await work.body(ctx)

    async with Rig(place, clock, **SETTINGS, max_retries=2, retry_backoff_base=0) as rig:
        rig.register(body)
        going = asyncio.ensure_future(rig.go(body, recover="worker"))
        await until(work.inside)
        clock.advance(2)
        assert await claims(rig.runner) == []
        row = await rig.runner.queue.row("r")
        assert row is not None
        assert (row.crashes, row.lease_until) == (0, clock.boot() + LEASE)
        work.ends.set()
        assert (await going).status is RunStatus.SUCCEEDED
        assert attempts == [1, 2]


@pytest.mark.parametrize("encoded", [False, True])
async def test_after_an_outage_no_lease_is_taken_over_for_an_interval(place: Path | None, encoded: bool) -> None:
    """It begins when the store is found to answer, also by a process that has no worker."""
    clock = VirtualClock()
    async with Rig(place, clock, **SETTINGS) as rig:
        queue, another = rig.runner.queue, rig.another(worker_id="other")
        if encoded:
            queue.payloads = another.queue.payloads = Payloads(Opened())
        rig.register(Work().body)
        await rig.runner.submit("script", run_id="r")
        assert await claims(another) == ["r"]
        clock.advance(LEASE + 1)
        StoreOutage.of(queue.commits, clock).noticed(StorageBusy("away"))
        clock.advance(LEASE)
        with pytest.raises(RunBusy):
            await rig.runner.execute("script", "r", if_running="raise")
        clock.advance(DEFERRED_INTERVALS * LEASE / 3 - 0.1)
        assert await claims(rig.runner) == []
        clock.advance(0.2)
        assert await claims(rig.runner) == ["r"]


class Opened:
    """A codec that changes nothing."""

    def encode(self, text: str, *, context: str) -> str:
        return text

    def decode(self, text: str, *, context: str) -> str:
        return text


@pytest.mark.parametrize("call", ["row of a worker", "execute"])
async def test_a_commit_without_a_heartbeat_ends_an_outage(call: str) -> None:
    async with executing(None) as (rig, clock, _):
        runner = rig.runner
        outage = StoreOutage.of(runner.queue.commits, clock)
        outage.noticed(StorageBusy("away"))
        assert outage.since is not None
        match call:
            case "row of a worker":
                await runner._process.renew()
            case "execute":
                with pytest.raises(RunBusy):
                    await runner.execute("script", "r", if_running="raise")
        assert outage.since is None


async def test_code_does_not_see_an_outage_that_outlasts_its_lease_between_two_heartbeats(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, caught = list[int](), list[BaseException]()
    failures = 0
    async with Rig(place, None, **SETTINGS) as rig:
        clock, engine = rig.clock, rig.runner.queue.commits
        commit = engine.commit

        async def slow(guard: Any, ops: Any) -> Any:
            nonlocal failures
            if failures and any(op.name == "journal.append" for op in ops):
                failures -= 1
                clock.advance(LEASE)  # type: ignore[attr-defined]
                raise StorageBusy("did not answer")
            return await commit(guard, ops)

        async def work() -> str:
            nonlocal failures
            failures = 0 if ran else 2
            ran.append(1)
            return "done"

        async def body(ctx: Any) -> Any:
            try:
                return await ctx.step("work", work)
            except Exception as error:  # noqa: BLE001 - as code of users does
                caught.append(error)
                raise RuntimeError("the step has failed") from None

        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        monkeypatch.setattr(engine, "commit", slow)
        assert await rig.runner.run_once()
        row = await rig.runner.queue.require("r")
        assert (row.status, row.failures, row.attempt) == ("succeeded", 0, 1)
        assert (len(ran), caught) == (2, [])


async def test_a_run_that_is_abandoned_can_be_cancelled_after_an_outage() -> None:
    """The process that cancels it has no worker, and executes nothing."""
    clock = VirtualClock()
    async with Rig(None, clock, **SETTINGS) as rig:
        runner = rig.runner
        await runner.submit("script", run_id="r")
        assert await claims(rig.another()) == ["r"]
        clock.advance(LEASE + 1)
        StoreOutage.of(runner.queue.commits, clock).noticed(StorageBusy("away"))
        await runner.cancel("r")
        assert (await runner.get_run("r")).status is RunStatus.RUNNING
        clock.advance(DEFERRED_INTERVALS * LEASE / 3)
        await runner.cancel("r")
        assert (await runner.get_run("r")).status is RunStatus.CANCELLED


# A program of its own: the code that is left behind would end in the middle of other tests.
LEFT = """
import asyncio, gc, sys
from agent_runtime_core import AgentRunner, AgentRuntime, RunResult, open_run

path, opens, collected = sys.argv[1], sys.argv[2] == "open_run", sys.argv[3] == "collected"
first = asyncio.new_event_loop()

class Left(AgentRuntime):
    key = "left"

    async def run(self, ctx):
        return RunResult({"attempt": await stay(ctx)})

async def stay(ctx):
    if asyncio.get_running_loop() is first:
        first.stop()
        await first.create_future()
    return ctx.attempt

async def opened():
    if opens:
        async with open_run(path, "r") as ctx:
            return await stay(ctx)
    async with AgentRunner.open(path) as runner:
        return (await runner.execute(Left(), "r")).final_output["attempt"]

async def again():
    attempt = await opened()
    async with AgentRunner.open(path) as runner:
        return attempt, (await runner.queue.row("r")).crashes

task = first.create_task(opened())
first.run_forever()
first.close()
if collected:
    del task
    gc.collect()
print(*asyncio.run(again()))
"""


@pytest.mark.parametrize("left", ["kept", "collected"])
@pytest.mark.parametrize("opened", ["open_run", "execute"])
def test_a_run_whose_event_loop_was_closed_is_free(tmp_path: Path, opened: str, left: str) -> None:
    program = [sys.executable, "-c", LEFT, str(tmp_path / "a.db"), opened, left]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "1 0\n", done.stderr


# Code that was left keeps its block open, which ends when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_block_whose_task_has_ended_may_be_opened_again(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.db", []

    async def cell() -> None:
        kept.append(open_run(path, "r"))
        await (await kept[-1].__aenter__()).step("a", lambda: 1)

    await asyncio.create_task(cell())
    async with open_run(path, "r") as ctx:
        assert await ctx.step("a", lambda: 2) == 1
    with pytest.raises(Exception, match="no longer valid"):
        await kept[0].__aexit__(None, None, None)


# -- durations


def times(clock: VirtualClock) -> list[tuple[str, Callable[[], None]]]:
    return [
        ("set back", lambda: clock.set_wall(clock.wall() - 3600)),
        ("suspended", lambda: clock.suspend(3600)),
        ("set forward", lambda: clock.set_wall(clock.wall() + 3600)),
    ]


async def _sleeps(ctx: Any) -> str:
    await ctx.sleep(25)
    return "over"


async def _waits(ctx: Any) -> str:
    with pytest.raises(WaitTimeout):
        await ctx.wait_for_signal("go", timeout=25)
    return "over"


async def _retries(ctx: Any) -> str:
    async def flaky() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError
        return "over"

    tries: list[int] = []
    value: str = await ctx.step("flaky", flaky, retries=1, retry_delay=25)
    return value


@pytest.mark.parametrize("what", ["set back", "suspended", "set forward"])
@pytest.mark.parametrize("body", [_sleeps, _waits, _retries])
async def test_a_duration_in_memory_ends_with_the_first_clock(body: Any, what: str) -> None:
    clock = VirtualClock()
    async with Rig(None, clock) as rig:
        going = asyncio.ensure_future(rig.value(body))
        await soon(lambda: clock.next_due is not None and clock.next_due >= 24)
        dict(times(clock))[what]()
        if what == "set back":
            clock.advance(20)
            await asyncio.sleep(0.01)
            assert not going.done()
            clock.advance(5.001)
        async with asyncio.timeout(10):
            assert await going == "over"


@pytest.mark.parametrize("body", [_sleeps, _waits])
async def test_a_parked_duration_ends_although_the_wall_clock_is_set_back(place: Path | None, body: Any) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, park_after=0) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        clock.set_wall(clock.wall() - 3600)
        clock.advance(24)
        assert not await rig.runner.run_once()
        assert 1 < rig.runner.queue.delayed_runs.seconds_left() < 2
        clock.advance(1 + LATE)
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": "over"}


async def test_a_retry_is_not_delayed_by_a_wall_clock_that_is_set_back(place: Path | None) -> None:
    clock, tries = VirtualClock(), list[int]()

    async def body(ctx: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError

    async with Rig(place, clock, max_retries=2, retry_backoff_base=8) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r", delay=5)
        clock.set_wall(clock.wall() - 3600)
        clock.advance(5 + LATE)
        assert await rig.runner.run_once()
        assert len(tries) == 1
        clock.set_wall(clock.wall() - 3600)
        clock.advance(100)
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).status is RunStatus.SUCCEEDED


DELAYS = ["delayed", "retried", "sleeps", "waits"]


@asynccontextmanager
async def delayed_by(
    place: Path | None, delay: str, monkeypatch: pytest.MonkeyPatch, disturb: Callable[[VirtualClock], None]
) -> AsyncIterator[tuple[Rig, VirtualClock]]:
    """A run that is due in 25 s. `disturb` is called when the commit that delayed it is stored, before the reply."""
    clock, tries = VirtualClock(), list[int]()

    async def body(ctx: Any) -> str:
        tries.append(1)
        if delay == "retried" and len(tries) == 1:
            raise ConnectionError
        return await _sleeps(ctx) if delay == "sleeps" else await _waits(ctx) if delay == "waits" else "over"

    async with Rig(place, clock, park_after=0, max_retries=2, retry_backoff_base=25) as rig:
        rig.register(body)
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def disturbed(guard: Any, ops: Any) -> Any:
            results = await commit(guard, ops)
            if any(getattr(op.args[-1], "due_at", 0) for op in ops if op.name in ("queue.insert", "queue.settle")):
                disturb(clock)
                await asyncio.sleep(0)
            return results

        with monkeypatch.context() as patch:
            patch.setattr(engine, "commit", disturbed)
            with suppress(asyncio.CancelledError):
                await rig.runner.submit("script", run_id="r", delay=25 if delay == "delayed" else 0)
                if delay != "delayed":
                    assert await asyncio.ensure_future(rig.runner.run_once())
        yield rig, clock


def _cancel(_: VirtualClock) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize("disturb", [lambda clock: clock.set_wall(clock.wall() - 3600), _cancel])
@pytest.mark.parametrize("delay", DELAYS)
async def test_a_delay_counts_from_before_its_commit(
    place: Path | None, delay: str, disturb: Callable[[VirtualClock], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process knows when the run is due, whatever happens between its commit and the reply."""
    async with delayed_by(place, delay, monkeypatch, disturb) as (rig, clock):
        clock.set_wall(clock.wall() - 3600)
        clock.advance(24)
        assert not await rig.runner.run_once()
        clock.advance(1 + LATE)
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": "over"}


@pytest.mark.parametrize("lost", ["queue.row", "queue.take"])
async def test_an_overdue_run_is_claimed_again_after_a_claim_that_failed(
    place: Path | None, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with delayed_by(place, "sleeps", monkeypatch, lambda clock: None) as (rig, clock):
        queue = rig.runner.queue
        commit, row = queue.commits.commit, queue.row

        async def unless_it_takes(guard: Any, ops: Any) -> Any:
            if any(op.name == lost for op in ops):
                raise StorageBusy("away")
            return await commit(guard, ops)

        async def unreadable(run_id: Any) -> Any:
            if lost == "queue.row":
                raise StorageBusy("away")
            return await row(run_id)

        clock.set_wall(clock.wall() - 3600)
        clock.advance(25 + LATE)
        with monkeypatch.context() as patch:
            patch.setattr(queue.commits, "commit", unless_it_takes)
            patch.setattr(queue, "row", unreadable)
            with pytest.raises(StorageBusy):
                await rig.runner.run_once()
        clock.advance(AGAIN + LATE)
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": "over"}


async def test_a_run_that_another_process_has_delayed_is_not_due_by_the_delay_of_this_one(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig:
        rig.register(_sleeps)
        await rig.another().submit("script", run_id="r", delay=25)
        clock.advance(1)
        await rig.runner.submit("script", run_id="r", delay=5)
        clock.set_wall(clock.wall() - 3600)
        clock.advance(5 + LATE)
        assert not await rig.runner.run_once()
        assert rig.runner.queue.delayed_runs.seconds_left() == float("inf")


async def test_a_run_that_is_stored_already_keeps_its_delay(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, park_after=0) as rig:
        rig.register(_sleeps)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        await rig.runner.submit("script", run_id="r", delay=5)
        clock.set_wall(clock.wall() - 3600)
        clock.advance(24)
        assert not await rig.runner.run_once()
        clock.advance(1 + LATE)
        assert await rig.runner.run_once()


async def test_an_overdue_run_waits_for_its_concurrency_slot() -> None:
    clock, work = VirtualClock(), Work()
    async with Rig(None, clock, **SETTINGS) as rig:
        rig.register(work.body)
        await rig.runner.submit("script", run_id="late", delay=5, concurrency_key="k")
        await rig.runner.submit("script", run_id="first", concurrency_key="k")
        going = asyncio.ensure_future(rig.runner.run_once())
        await until(work.inside)
        clock.set_wall(clock.wall() - 3600)
        clock.advance(5 + LATE)
        assert not await rig.runner.run_once()
        work.ends.set()
        assert await going
        clock.advance(AGAIN + LATE)
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("late")).status is RunStatus.SUCCEEDED


async def test_runs_that_others_resumed_or_that_are_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime_core.queue.live_claims.MOST", 2)
    clock = VirtualClock()
    queue = InMemoryQueue(clock=clock)
    for number in range(7):
        await queue.enqueue(f"r{number}", "a", {}, delay=5 + number)
    clock.set_wall(clock.wall() - 3600)
    clock.advance(60)
    found = [queue.delayed_runs.overdue() for _ in range(3)]
    assert [each and each.run_id for each in found] == [str(run_uuid(each, clock)[0]) for each in ("r5", "r6")] + [None]
    await queue.enqueue("other", "a", {}, delay=5)
    row = await queue.row("other")
    assert row is not None
    for run_id in (row.run_id, *(each.run_id for each in found if each)):
        queue.delayed_runs.forget(run_id)
    assert queue.delayed_runs.seconds_left() == float("inf")


async def test_a_deadline_follows_the_wall_clock_alone() -> None:
    class Read(VirtualClock):
        wall_check = 0.01

    clock, work = Read(), Work()
    async with Rig(None, clock, **SETTINGS) as rig:
        going = asyncio.ensure_future(rig.go(work.body, deadline=clock.wall() + 1000))
        await until(work.inside)
        clock.set_wall(clock.wall() + 2000)
        async with asyncio.timeout(10):
            assert (await going).status is RunStatus.TIMED_OUT


async def test_the_wall_clock_is_read_every_five_seconds() -> None:
    slept = list[float]()

    class Machine(Clock):
        now = 100.0

        def wall(self) -> float:
            return self.now

        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            self.now += 3600 if len(slept) == 3 else seconds

    await Machine().sleep_for(12)
    assert slept == [5, 5, 2]
    slept.clear()
    await Machine().sleep_for(30)
    assert slept == [5, 5, 5]


def test_a_clock_without_a_monotonic_time_never_shows_a_suspend() -> None:
    class Theirs(Clock):
        def boot(self) -> float:
            return 4711.0

    assert Theirs().monotonic() == 4711.0


def test_a_duration_that_began_earlier_does_not_get_longer() -> None:
    clock = VirtualClock()
    until_ = clock.wall() + 10
    clock.set_wall(clock.wall() - 3600)
    duration = Duration(clock, 10, until_)
    assert duration.left() == 10
    clock.suspend(3700)
    assert duration.left() <= 0
