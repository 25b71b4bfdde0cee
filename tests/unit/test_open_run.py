"""A run of one's own code: succeeded, failed, taken up again, held, cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._execution.claim_writer import ClaimWriter
from agent_runtime_core._execution.context import Context
from agent_runtime_core.errors import (
    IdempotencyConflict,
    IllegalTransition,
    LeaseLost,
    PortalMisuse,
    RunBusy,
    RunFailed,
    StorageClosed,
)
from agent_runtime_core.runner import AgentRunner, RunInfo, RunnerConfig, open_run, open_run_sync
from agent_runtime_core.runner.heartbeat import Heartbeat, LeasedRun
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.runs import Script


class Counted:
    """Steps `a`, `b`, `c`, and how often each ran."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.ran = broken, list[str]()

    def steps(self, names: str = "abc") -> list[Step]:
        return [Step(name, self._step(name)) for name in names]

    def _step(self, name: str) -> Any:
        async def fn(ctx: Any, state: Any) -> str:
            self.ran.append(name)
            if name == self.broken:
                raise ConnectionError(name)
            return name.upper()

        return fn


async def look(path: Path, run_id: str = "r") -> tuple[RunInfo, list[str]]:
    async with AgentRunner.open(path) as runner:
        events = await runner.event_bus.get_events(run_id)
        return await runner.get_run(run_id), [event.event_type for event in events]


async def test_a_clean_exit_is_a_success(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    counted = Counted()
    async with open_run(path, run_id="r", input={"n": 1}, metadata={"m": 2}) as ctx:
        assert (ctx.run_key, ctx.input, ctx.metadata) == ("r", {"n": 1}, {"m": 2})
        assert await StepExecutor(ctx).run(counted.steps()) == {"a": "A", "b": "B", "c": "C"}
    info, kinds = await look(path)
    assert (info.status, info.agent_key) == ("succeeded", "open_run")
    assert (kinds[0], kinds[-1]) == ("run.started", "run.succeeded")
    assert counted.ran == ["a", "b", "c"]


async def test_an_exception_is_recorded_comes_through_and_the_rest_goes_on_next_time(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    counted = Counted("c")
    with pytest.raises(Exception, match="step 'c' failed"):
        async with open_run(path, "r") as ctx:
            await StepExecutor(ctx).run(counted.steps())
    info, kinds = await look(path)
    assert (info.status, info.reason) == ("failed", "StepExecutionError")
    assert kinds[-1] == "run.failed"
    counted.broken = ""
    async with open_run(path, "r") as ctx:
        assert await StepExecutor(ctx).run(counted.steps()) == {"a": "A", "b": "B", "c": "C"}
    assert counted.ran == ["a", "b", "c", "c"]
    info, kinds = await look(path)
    assert (info.status, info.generation) == ("succeeded", 2)
    assert kinds.count("step.skipped") == 2


async def test_after_a_success_the_record_answers_and_nothing_is_added(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    counted = Counted()

    async def body(ctx: Context) -> Any:
        value = await StepExecutor(ctx).run(counted.steps())
        await ctx.emit("note", {"n": 1})
        await ctx.checkpoint({"at": 1})
        return [value, await ctx.step("d", lambda: 4), await ctx.random()]

    async with open_run(path, "r") as ctx:
        first = await body(ctx)
    before = await look(path)
    async with open_run(path, "r") as ctx:
        assert await body(ctx) == first
        assert await ctx.get_state() == {"at": 1}
        with pytest.raises(IllegalTransition, match="'extra'"):
            await ctx.step("extra", lambda: 5)
        with pytest.raises(IllegalTransition, match="Use another run_id"):
            await ctx.transaction("tx", lambda conn: 5)
        with pytest.raises(IllegalTransition, match="'random'"):
            await ctx.random()
    assert await look(path) == before
    assert counted.ran == ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError):
        async with open_run(path, "r"):
            raise ZeroDivisionError
    assert await look(path) == before


async def test_a_held_run_is_busy_and_says_by_whom(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with open_run(path, "r", config=RunnerConfig(worker_id="first", run_timeout_seconds=1e9)):
        with pytest.raises(RunBusy, match="run 'r' is already running in first") as caught:
            async with open_run(path, "r"):
                raise AssertionError
        assert caught.value.worker == "first"
        assert isinstance(caught.value.since, float)
    async with open_run(path, "r"):
        pass


async def test_another_input_is_a_conflict(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with open_run(path, "r", input={"n": 1}):
        pass
    with pytest.raises(IdempotencyConflict, match=r"another input\.n\."):
        async with open_run(path, "r", input={"n": 2}):
            raise AssertionError


async def test_cancelling_the_caller_gives_the_run_back(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    inside = asyncio.Event()

    async def job() -> None:
        async with open_run(path, "r"):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(job())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    info, _ = await look(path)
    assert (info.status, info.attempt) == ("pending", 1)
    async with open_run(path, "r") as ctx:
        assert ctx.attempt == 1
    info, kinds = await look(path)
    assert (info.status, kinds) == ("succeeded", ["run.started", "run.resumed", "run.succeeded"])


async def test_a_cancel_from_outside_stops_the_block(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    async def job() -> None:
        async with open_run(path, "r") as ctx:
            inside.set()
            await ctx.sleep(3600)

    inside = asyncio.Event()
    task = asyncio.ensure_future(job())
    await inside.wait()
    async with AgentRunner.open(path) as runner:
        assert await runner.cancel("r")
        with pytest.raises(RunFailed, match=r"^run 'r' was cancelled") as caught:
            await task
        assert caught.value.status == "cancelled"
        assert (await runner.get_run("r")).status == "cancelled"
    assert not task.cancelled()


async def test_a_run_cancelled_before_it_is_opened_says_so(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    inside = asyncio.Event()

    async def job() -> None:
        async with open_run(path, "r"):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(job())
    await inside.wait()
    task.cancel()
    await asyncio.wait({task})
    async with AgentRunner.open(path) as runner:
        assert await runner.cancel("r", wait=True) == "cancelled"
    async with open_run(path, "r") as ctx:
        await ctx.step("a", lambda: 1)
    assert (await look(path))[0].generation == 2


async def test_losing_the_run_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    async def loses() -> None:
        async with open_run(path, "r") as ctx:
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                # As a process would that took this one for dead.
                other.execute("UPDATE arc_runs SET claim_id = ?", ("7" + "Z" * 25,))
            await ctx.step("late", lambda: 1)

    with pytest.raises(LeaseLost, match="Nothing was written"):
        await loses()
    info, kinds = await look(path)
    assert info.status == "running"
    assert "step.completed" not in kinds
    assert "run.failed" not in kinds


def _take_over(path: Path) -> None:
    """As a process would that took this one for dead."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("UPDATE arc_runs SET claim_id = ?", ("7" + "Z" * 25,))


QUICK = RunnerConfig(lease_ttl_seconds=0.3, heartbeat_interval_seconds=0.1)


async def test_what_a_block_does_last_is_told_that_the_run_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    async def loses() -> None:
        async with open_run(path, "r", config=QUICK) as ctx:
            try:
                _take_over(path)
                await asyncio.Event().wait()
            finally:
                await ctx.emit("late", {})

    async with asyncio.timeout(10):
        with pytest.raises(LeaseLost, match="another worker claimed the run"):
            await loses()
    assert "late" not in (await look(path))[1]


def test_a_run_that_was_lost_between_two_calls_says_so(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    told: list[BaseException] = []

    async def late(ctx: Context) -> None:
        try:
            async with asyncio.timeout(5):
                await ctx.emit("late", {})
        except Exception as error:
            told.append(error)
            raise

    def loses() -> None:
        with open_run_sync(path, "r", config=QUICK) as run:
            _take_over(path)
            for _ in range(1000):
                if run.ctx.control.closed:
                    break
                threading.Event().wait(0.01)
            run.call(late, run.ctx)

    with pytest.raises(LeaseLost):
        loses()
    assert [type(error) for error in told] == [LeaseLost]
    assert "late" not in asyncio.run(look(path))[1]


@pytest.mark.parametrize("broken", [False, True])
async def test_a_context_whose_block_was_left_refuses_what_it_is_asked_for(tmp_path: Path, broken: bool) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with open_run(tmp_path / "jobs.db", "nightly") as ctx:
            1 // (not broken)
    async with asyncio.timeout(10):
        for late in (
            lambda: ctx.emit("late", {}), lambda: ctx.checkpoint({}), ctx.get_state, lambda: ctx.step("a", str),
            ctx.now, lambda: ctx.sleep(0), lambda: ctx.wait_for_signal("a"), lambda: ctx.transaction("t", str),
        ):  # fmt: skip
            with pytest.raises(StorageClosed, match="Use ctx inside the block, or open the run again"):
                await late()


async def test_the_files_are_let_go(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with open_run(path) as ctx:
        kept = ctx
    assert sorted(each.name for each in (tmp_path / "jobs.db.live").iterdir()) == ["commit.lock"]
    with pytest.raises(StorageClosed):
        await kept._writer.state.records(str(kept.run_id))


def test_without_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    counted = Counted("b")
    with pytest.raises(Exception, match="step 'b' failed"), open_run_sync(path, "r") as run:
        run.call(StepExecutor(run.ctx).run, counted.steps())
    counted.broken = ""
    with open_run_sync(path, "r", input={}) as run:
        assert run.call(StepExecutor(run.ctx).run, counted.steps())["c"] == "C"
        run.call(run.ctx.emit, "done", {})
    assert counted.ran == ["a", "b", "b", "c"]
    info, kinds = asyncio.run(look(path))
    assert info.status == "succeeded"
    assert "done" in kinds


def test_a_coroutine_in_place_of_the_function_is_refused_and_shows_the_call() -> None:
    shown = r"run\.call\(StepExecutor\.run, \.\.\.\), not run\.call\(StepExecutor\.run\(\.\.\.\)\)"
    with open_run_sync("memory://") as run:
        with pytest.raises(PortalMisuse, match=shown):
            run.call(StepExecutor(run.ctx).run([Step("a", print)]))  # type: ignore[arg-type]
        assert run.call(run.ctx.step, "a", lambda: 1) == 1


async def test_without_await_beside_a_running_loop(tmp_path: Path) -> None:
    with open_run_sync(tmp_path / "jobs.db", "r") as run:
        assert run.call(run.ctx.step, "a", lambda: 1) == 1


def test_a_cancel_from_outside_stops_a_blocking_caller(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    async def cancels_soon(ctx: Context) -> None:
        async with AgentRunner.open(path) as runner:
            await runner.cancel(ctx.run_id)
            await ctx.sleep(3600)

    with pytest.raises(RunFailed, match="cancelled"), open_run_sync(path, "r") as run:
        run.call(cancels_soon, run.ctx)
    assert asyncio.run(look(path))[0].status == "cancelled"


async def test_hearing_of_its_own_end_does_not_cancel_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row has ended before this task is told so: whoever looks at it then must not take it for a loss."""
    held: list[tuple[Heartbeat, LeasedRun]] = []
    hold, settle = Heartbeat.hold, ClaimWriter.update_run

    def noted(self: Heartbeat, each: LeasedRun) -> None:
        held.append((self, each))
        hold(self, each)

    async def looked_at(self: ClaimWriter, *args: Any, **events: Any) -> list[Any]:
        answers = await settle(self, *args, **events)
        for heart, each in held:
            await heart._look([each])
        return answers

    monkeypatch.setattr(Heartbeat, "hold", noted)
    monkeypatch.setattr(ClaimWriter, "update_run", looked_at)
    async with open_run(tmp_path / "a.db", "r") as ctx:
        assert await ctx.step("a", lambda: 1) == 1
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert held


@pytest.mark.parametrize("fails", [True, False])
async def test_the_end_of_the_block_ends_the_waits_that_it_leaves(fails: bool, tmp_path: Path) -> None:
    left = list[asyncio.Task[Any]]()
    with contextlib.suppress(ValueError):
        async with open_run(tmp_path / "a.db", run_id="r") as ctx:
            left.append(asyncio.create_task(ctx.wait_for_signal("never")))
            await ctx.sleep(0.001)
            if fails:
                raise ValueError("no")
    assert left[0].cancelled()


async def test_a_block_has_the_slots_of_its_key_and_tags(tmp_path: Path) -> None:
    path, options = tmp_path / "runs.db", dict[str, Any](concurrency_key="k", concurrency_limit=2)
    async with open_run(path, "first", **options), open_run(path, "second", tags=["slow"], **options):
        with pytest.raises(RunBusy):
            async with open_run(path, "third", **options):
                pass
    async with AgentRunner.open(path) as runner:
        assert (await runner.get_run("second")).tags == ("slow",)
        await runner.execute(Script(_returns), "fourth", tags=["fast"])
        assert (await runner.get_run("fourth")).tags == ("fast",)


async def _returns(ctx: Any) -> Any:
    return 1
