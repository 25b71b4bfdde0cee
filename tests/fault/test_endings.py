"""How runs end: deadlines, time limits, retries, steps that do not stop, loops that block."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._core import timeouts
from agent_runtime_core.errors import StepExecutionError
from agent_runtime_core.interfaces import ErrorInfo, RunResult
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import (
    KINDS,
    consistent,
    others,
    settings,
    status,
    store,
    terminal_events,
    until,
    until_status,
)

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def forever(*_: Any) -> None:
    await asyncio.get_running_loop().create_future()


async def fails(ctx: Any) -> Any:
    raise ValueError(f"attempt {ctx.attempt}")


# -- deadlines and time limits


async def test_a_deadline_stops_a_running_run(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", forever)
        runner = here.runner()
        deadline = here.clock.wall() + 0.1
        run_id = await runner.submit("a", deadline=deadline)
        assert await runner.run_once()
        result = await runner.wait(run_id, timeout=5)
        assert result.status is RunStatus.TIMED_OUT
        assert result.error is not None
        assert (result.error.type, result.error.retriable) == ("DeadlineExceeded", False)
        assert (await runner.event_bus.get_events(run_id))[-1].payload == {"deadline": deadline}
        assert not await runner.run_once()
        await consistent(runner, run_id)


async def test_a_deadline_stops_a_run_that_waits_in_place(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", lambda ctx: ctx.wait_for_signal("never"))
        runner = here.runner(settings(park_after=1e6))
        run_id = await runner.submit("a", deadline=here.clock.wall() + 0.1)
        async with asyncio.timeout(5):
            assert await runner.run_once()
        assert (await runner.get_run(run_id)).reason == "DeadlineExceeded"


async def test_a_deadline_ends_a_parked_run(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", lambda ctx: ctx.wait_for_signal("never", timeout=1000))
        runner = here.runner(settings(park_after=0))
        run_id = await runner.submit("a", deadline=clock.wall() + 60)
        assert await runner.run_once()
        assert await status(runner, run_id) == "waiting"
        clock.advance(59)
        assert not await runner.run_once()
        clock.advance(1)
        assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert (info.status.value, info.reason) == ("timed_out", "DeadlineExceeded")
        await consistent(runner, run_id)


async def test_a_run_past_its_deadline_or_expiry_is_not_begun(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        ran: list[int] = []

        async def code(ctx: Any) -> None:
            ran.append(1)

        here.agent("a", code)
        runner = here.runner()
        dead = await runner.submit("a", deadline=clock.wall() + 10)
        stale = await runner.submit("a", expires_in=10)
        fresh = await runner.submit("a", expires_in=100)
        clock.advance(11)
        while await runner.run_once():
            pass
        reasons = [(await runner.get_run(r)).reason for r in (dead, stale, fresh)]
        assert reasons == ["DeadlineExceeded", "Expired", ""]
        assert [await status(runner, r) for r in (dead, stale, fresh)] == ["timed_out", "timed_out", "succeeded"]
        assert len(ran) == 1


async def test_a_run_begun_in_time_does_not_expire(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", lambda ctx: ctx.wait_for_signal("go"))
        runner = here.runner(settings(park_after=0))
        run_id = await runner.submit("a", expires_in=10)
        assert await runner.run_once()
        clock.advance(1000)
        await runner.signal(run_id, "go")
        assert await runner.run_once()
        assert await status(runner, run_id) == "succeeded"


async def test_the_time_limit_of_a_step(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def code(ctx: Any) -> Any:
            with pytest.raises(StepExecutionError, match=r"timed out after 0\.02 s") as caught:
                await StepExecutor(ctx).run([Step("slow", forever, timeout=0.02, retries=1, retry_delay=0)])
            with pytest.raises(StepExecutionError, match=r"timed out after 0\.01 s"):
                await ctx.step("slow", forever, timeout=0.01)
            return caught.value.attempts

        here.agent("a", code)
        runner = here.runner()
        result = await runner.execute("a")
        assert result.final_output == {"value": 2}, result.error
        assert result.run_id is not None
        events = await runner.event_bus.get_events(result.run_id)
        assert [e.payload["error"] for e in events if e.event_type == "step.failed"] == [
            "timed out after 0.02 s",
            "timed out after 0.01 s",
        ]


# -- attempts


async def test_attempts_by_a_worker_are_further_and_further_apart(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", fails)
        runner = here.runner(settings(retry_backoff_base=3, retry_backoff_max=8))
        run_id = await runner.submit("a")
        assert await runner.run_once()
        for wait in (3, 8):
            info = await runner.get_run(run_id)
            assert info.status is RunStatus.PENDING
            assert info.scheduled_at is not None
            assert info.scheduled_at.timestamp() == clock.wall() + wait
            clock.advance(wait - 0.5)
            assert not await runner.run_once()
            clock.advance(0.5)
            assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert (info.status.value, info.reason) == ("failed", "ValueError")
        result = await runner.wait(run_id)
        assert result.error is not None
        assert result.error.message == "attempt 3"
        kinds = [e.event_type for e in await runner.event_bus.get_events(run_id)]
        assert kinds == ["run.started"] * 3 + ["run.failed"]
        await consistent(runner, run_id)


async def test_attempts_in_place_are_further_and_further_apart(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", fails)
        runner = here.runner(settings(retry_backoff_base=3))
        running = asyncio.ensure_future(runner.execute("a", "x"))
        for wait in (3, 9):
            await clock.until_sleeping()
            assert clock.next_due == wait
            clock.advance(wait)
        result = await running
        assert result.status is RunStatus.FAILED
        assert result.error is not None
        assert result.error.message == "attempt 3"
        assert await terminal_events(runner, "x") == ["run.failed"]


async def test_a_pause_between_attempts_is_cut_short_by_a_cancel(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", fails)
        runner = here.runner(settings(retry_backoff_base=100))
        running = asyncio.ensure_future(runner.execute("a", "x"))
        await clock.until_sleeping()
        async with asyncio.timeout(5):
            assert await runner.cancel("x", wait=True) is RunStatus.CANCELLED
            assert (await running).status is RunStatus.CANCELLED
        run_id = await runner.submit("a")
        assert await runner.run_once()
        assert await runner.cancel(run_id, wait=True) is RunStatus.CANCELLED


async def test_a_retried_step_waits_on_the_same_clock(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        tries: list[float] = []

        async def flaky() -> int:
            tries.append(clock.boot())
            if len(tries) < 3:
                raise ValueError("no")
            return len(tries)

        here.agent("a", lambda ctx: ctx.step("s", flaky, retries=2, retry_delay=40))
        runner = here.runner()
        running = asyncio.ensure_future(runner.execute("a"))
        for _ in range(2):
            await clock.until_sleeping()
            clock.advance(40)
        assert (await running).final_output == {"value": 3}
        assert tries == [0, 40, 80]


@pytest.mark.parametrize("worker", [True, False], ids=["worker", "in-place"])
async def test_an_agent_may_say_that_there_is_no_point(kind: str, worker: bool, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        asked: list[str] = []

        async def judge(ctx: Any, error: BaseException) -> ErrorInfo | None:
            asked.append(str(error))
            return ErrorInfo("Judged", "no point", retriable=False, details={"n": 1}) if len(asked) == 2 else None

        here.agent("a", fails, judge)
        runner = here.runner()
        if worker:
            run_id = await runner.submit("a")
            while await runner.run_once():
                pass
            result = await runner.wait(run_id)
        else:
            result = await runner.execute("a")
        assert asked == ["attempt 1", "attempt 2"]
        assert result.error is not None
        assert (result.error.type, result.error.details) == ("Judged", {"n": 1})


async def test_a_result_with_an_error_is_a_failure_that_is_retried(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def code(ctx: Any) -> RunResult:
            error = ErrorInfo("Busy", "later") if ctx.attempt < 3 else None
            return RunResult({"attempt": ctx.attempt}, error=error)

        here.agent("a", code)
        result = await here.runner().execute("a")
        assert result.final_output == {"attempt": 3}


async def test_what_a_failed_attempt_left_running_writes_nothing_beside_the_next(kind: str, tmp_path: Path) -> None:
    """A step whose siblings failed goes on: it is the next attempt's to record, once."""
    async with store(kind, tmp_path) as here:
        gate, ran = asyncio.Event(), list[int]()

        async def slow(attempt: int) -> int:
            ran.append(attempt)
            if attempt == 1:
                await gate.wait()
            return attempt

        async def boom() -> None:
            raise ValueError("boom")

        async def code(ctx: Any) -> Any:
            if ctx.attempt == 1:
                await asyncio.gather(ctx.step("slow", slow, 1, key="a"), ctx.step("boom", boom, key="b"))
            value = await ctx.step("slow", slow, ctx.attempt, key="a")
            gate.set()
            await asyncio.sleep(0.02)
            return value

        here.agent("a", code)
        runner = here.runner()
        before = others()
        result = await runner.execute("a", "x")
        assert result.final_output == {"value": 2}
        assert ran == [1, 2]
        await consistent(runner, "x")
        left = {task for task in others() - before if not task.get_name().startswith("agent-runtime-")}
        assert all(task.done() for task in left)


# -- what does not stop


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "GRACE", 0.05)


class Stubborn:
    """Code that takes no hint until it is let go."""

    def __init__(self) -> None:
        self.hints = 0
        self.gate = asyncio.Event()
        self.ended = False

    async def __call__(self, *_: Any) -> str:
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.hints += 1
        self.ended = True
        return "at last"


@pytest.mark.usefixtures("impatient")
async def test_a_step_that_does_not_stop_is_abandoned_and_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with store(kind, tmp_path) as here:
        stubborn = Stubborn()

        async def code(ctx: Any) -> Any:
            with pytest.raises(StepExecutionError, match="timed out"):
                await ctx.step("mule", stubborn.__call__, timeout=0.02)
            return "went on"

        here.agent("a", code)
        runner = here.runner()
        with caplog.at_level(logging.WARNING, "agent_runtime_core"):
            result = await runner.execute("a", "x")
        assert result.final_output == {"value": "went on"}
        assert "step 'mule' did not stop within 0.05 s of being cancelled: abandoned" in caplog.text
        stubborn.gate.set()
        await until(lambda: stubborn.ended)
        await consistent(runner, "x")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["cancel", "time limit"])
async def test_a_thread_that_goes_on_after_its_step_is_named(
    kind: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with store(kind, tmp_path) as here:
        begun, gate = threading.Event(), threading.Event()

        def digs() -> None:
            begun.set()
            gate.wait()

        async def code(ctx: Any) -> Any:
            await ctx.step("mole", digs, timeout=0.02 if how == "time limit" else None)

        here.agent("a", code)
        runner = here.runner()
        try:
            with caplog.at_level(logging.WARNING, "agent_runtime_core"):
                running = asyncio.ensure_future(runner.execute("a", "x"))
                await until(begun.is_set)
                if how == "cancel":
                    assert await runner.cancel("x")
                assert (await running).status == ("cancelled" if how == "cancel" else "failed")
                await until(lambda: "runs on" in caplog.text)
        finally:
            gate.set()
        assert "step 'mole' did not stop within 0.05 s of being cancelled: it runs on in its thread" in caplog.text
        await consistent(runner, "x")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["cancel", "time limit", "hand back"])
async def test_an_agent_that_does_not_stop_is_abandoned_and_named(
    kind: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with store(kind, tmp_path) as here:
        stubborn = Stubborn()

        async def code(ctx: Any) -> Any:
            await stubborn()
            await ctx.emit("late", {})

        here.agent("a", code)
        limit = 0.05 if how == "time limit" else 60.0
        runner = here.runner(settings(run_timeout_seconds=limit, grace_seconds=0))
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_loop(0.05, handle_signals=False))
        await until_status(runner, run_id, "running", "timed_out")
        with caplog.at_level(logging.WARNING, "agent_runtime_core"):
            if how == "cancel":
                await until_status(runner, run_id, "running")
                assert await runner.cancel(run_id)
                wanted = "cancelled"
            else:
                wanted = "timed_out" if how == "time limit" else "pending"
            if how == "hand back":
                runner.stop()
            assert await until_status(runner, run_id, wanted, seconds=5) == wanted
        assert "did not stop" in caplog.text
        assert str(run_id) in caplog.text
        assert (await runner.get_run(run_id)).attempt == 1
        runner.stop()
        await working
        stubborn.gate.set()
        await until(lambda: stubborn.ended)
        assert "late" not in [e.event_type for e in await runner.event_bus.get_events(run_id)]
        await consistent(runner, run_id)


# -- loops that block


async def test_a_blocked_loop_keeps_its_lease(kind: str, tmp_path: Path) -> None:
    """The heartbeat comes from a thread: a step that blocks the loop sees its lease extended again and again."""
    async with store(kind, tmp_path) as here:
        extended = threading.Event()

        async def look(run_id: UUID) -> None:
            ends: set[float] = set()
            while len(ends) < 4:
                ends.add((await other.queue.require(run_id)).lease_until)
                await asyncio.sleep(0.01)
            extended.set()

        async def blocks(ctx: Any) -> bool:
            thread = threading.Thread(target=lambda: asyncio.run(look(ctx.run_id)), daemon=True)
            thread.start()
            return extended.wait(30)

        here.agent("blocks", lambda ctx: ctx.step("block", lambda: blocks(ctx)))
        runner, other = here.runner(settings(heartbeat_interval_seconds=0.05)), here.runner()
        run_id = await runner.submit("blocks")
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": True}
        assert (await runner.get_run(run_id)).attempt == 1


async def test_a_heart_that_stopped_loses_the_lease(kind: str, tmp_path: Path) -> None:
    """What the test above would see without heartbeats."""
    async with store(kind, tmp_path) as here:
        began, gate = asyncio.Event(), asyncio.Event()

        async def code(ctx: Any) -> None:
            began.set()
            await gate.wait()

        here.agent("a", code)
        runner, thief = here.runner(settings(lease_ttl_seconds=0.1)), here.runner()
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())
        await began.wait()
        runner.heartbeat.drop(str(run_id))
        stolen: list[Any] = []
        async with asyncio.timeout(5):
            while not stolen:
                stolen = await thief.queue.claim_rows("thief", agent_keys=["a"])
                await asyncio.sleep(0.01)
        gate.set()
        await working
        row = await runner.queue.require(run_id)
        assert (row.status, row.claim_id, row.attempt) == ("running", stolen[0].claim_id, 2)
