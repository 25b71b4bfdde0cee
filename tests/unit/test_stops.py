"""Code that somebody else stops: it starts and writes nothing more, and the cause of the stop decides what follows."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from agent_runtime_core import AgentRuntime, RunResult
from agent_runtime_core._core.clock import Clock
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.errors import StepCancelledError, StorageClosed
from agent_runtime_core.runner import AgentRunner, RunnerConfig, guarded_calls, open_run
from agent_runtime_core.runner.guarded_calls import GuardedCalls
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import VirtualClock
from tests.support.runs import Rig, Script, soon, until

#: What a call of a stopped attempt may raise; the second only before a step of a cancelled run.
STOP = (asyncio.CancelledError, StepCancelledError)


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "agents.db"


class Stopped(AgentRuntime):
    """Waits until it is stopped, makes calls, and ends in its own way."""

    key = "stopped"

    def __init__(self, calls: Callable[[Any], list[tuple[str, Any]]], ends: str, inside: str) -> None:
        self.calls, self.ends, self.inside = calls, ends, inside
        self.entered = asyncio.Event()
        self.raised: dict[str, BaseException | None] = {}
        self.errors: list[BaseException] = []
        self.attempts: list[int] = []

    async def run(self, ctx: Any) -> RunResult:
        self.attempts.append(ctx.attempt)
        if len(self.attempts) > 1:
            return RunResult({"value": "second"})
        try:
            if self.inside == "step":
                await ctx.step("work", self.work, retries=3, on_in_doubt="retry")
            else:
                await self.work()
        except BaseException:
            for name, call in self.calls(ctx):
                self.raised[name] = await _raised(call)
            if self.ends == "own error":
                raise ConnectionError("the request was aborted") from None
            if self.ends == "result":
                return RunResult({"value": "late"})
            raise
        raise AssertionError("nobody stopped it")

    async def work(self) -> None:
        self.entered.set()
        if self.inside == "step" and self.ends == "own error":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise ConnectionError("the request was aborted") from error
        await asyncio.Event().wait()

    async def on_error(self, ctx: Any, error: BaseException) -> None:
        self.errors.append(error)


async def _raised(call: Callable[[], Awaitable[Any]]) -> BaseException | None:
    try:
        await call()
    except BaseException as error:  # noqa: BLE001 - whatever stops code
        return error
    return None


def every_call(ctx: Any) -> list[tuple[str, Any]]:
    def refund() -> str:
        return "refunded"

    def insert(conn: sqlite3.Connection) -> None:
        conn.execute("CREATE TABLE refunds (n)")

    async def made() -> int:
        return 1

    steps = StepExecutor(ctx)
    calls: list[tuple[str, Any]] = [
        ("step", lambda: ctx.step("refund", refund)),
        ("guarded step", lambda: ctx.step("refund", refund, on_in_doubt="fail")),
        ("keyed step", lambda: ctx.step("refund", refund, key="1")),
        ("list", lambda: StepExecutor(ctx).run([Step("refund", lambda ctx, state: refund())])),
        ("map", lambda: steps.map("refund", refund_item, [1, 2])),
        ("sleep", lambda: ctx.sleep(0)),
        ("signal", lambda: ctx.wait_for_signal("go", timeout=0)),
        ("approve", lambda: ctx.approve("go", timeout=0)),
        ("messages", lambda: ctx.messages()),
        ("call", lambda: ctx.call("stopped", {})),
        ("emit", lambda: ctx.emit("refunded", {})),
        ("checkpoint", lambda: ctx.checkpoint({"refunded": True})),
        ("now", lambda: ctx.now()),
        ("random", lambda: ctx.random()),
        ("value", lambda: ctx.recorded_value("refund", made)),
        ("patched", lambda: ctx.patched("refund")),
        ("transaction", lambda: ctx.transaction("refund", insert)),
    ]
    return calls


async def refund_item(item: int) -> int:
    return item


async def stop(rig: Rig, clock: VirtualClock, agent: Stopped, cause: str) -> None:
    """Execute run "r" until its code waits, stop it by this cause, and wait for the end of the execution."""
    runner = rig.runner
    rig.registry.register(agent)
    if cause in ("drain", "lost", "cancel", "time limit", "stalled", "deadline"):
        deadline = clock.wall() + 50 if cause == "deadline" else None
        await runner.submit("stopped", {}, run_id="r", deadline=deadline)
        executing: asyncio.Task[Any] = asyncio.ensure_future(runner.run_once())
    else:
        executing = asyncio.ensure_future(runner.execute(agent, "r"))
    await until(agent.entered)
    match cause:
        case "drain":
            draining = asyncio.ensure_future(runner._worker.drain())
            await asyncio.sleep(0)
            clock.advance(1000)  # the grace
            await draining
        case "close":
            closing = asyncio.ensure_future(runner.close())
            await asyncio.sleep(0)
            clock.advance(1000)
            await closing
        case "caller left":
            executing.cancel()
        case "lost":
            held = next(iter(runner.heartbeat._leased.values()))
            held.lose(held.row.claim_id)
        case "cancel":
            assert await runner.cancel("r", wait=True) is RunStatus.CANCELLED
        case _:
            clock.advance(1000)
            next(iter(runner.heartbeat._leased.values())).control.notify()  # what its timer does later
    await asyncio.wait({executing})
    if cause == "close":
        assert isinstance(executing.exception(), StorageClosed)


#: The status of the run after each cause.
CAUSES = {
    "drain": "pending",
    "close": "pending",
    "caller left": "pending",
    "time limit": "timed_out",
    "stalled": "timed_out",
    "deadline": "timed_out",
    "cancel": "cancelled",
    "lost": "running",
}


@pytest.mark.parametrize("inside", ["run", "step"])
@pytest.mark.parametrize("ends", ["stop", "own error", "result"])
@pytest.mark.parametrize("cause", CAUSES)
async def test_stopped_code_writes_nothing_and_the_cause_decides(
    place: Path | None, cause: str, ends: str, inside: str
) -> None:
    agent = Stopped(every_call, ends, inside)
    status = CAUSES[cause]
    limit = 100 if cause == "time limit" else 10_000
    clock = VirtualClock()
    stall = 100 if cause == "stalled" else None
    async with Rig(place, clock, run_timeout_seconds=limit, stall_timeout_seconds=stall, grace_seconds=1) as rig:
        reader = rig.another()
        await stop(rig, clock, agent, cause)
        info = await reader.get_run("r")
        assert {name: type(error) for name, error in agent.raised.items() if not isinstance(error, STOP)} == {}
        assert info.status.value == status
        assert agent.errors == []
        kinds = [record.kind for record in await reader.state_store.records(str(info.run_id))]
        assert set(kinds) <= {"attempt", "started", "ended"}
        assert not [event for event in await reader.event_bus.get_events("r") if event.event_type == "refunded"]
        assert await reader.state_store.get_checkpoint(str(info.run_id)) is None
        if status == "pending":
            if not await reader.run_once():  # an inline run, which only its caller resumes
                await reader.execute(agent, "r")
            assert (await reader.get_run("r")).status is RunStatus.SUCCEEDED
            assert agent.attempts == [1, 1]


@pytest.mark.parametrize("cause", ["drain", "caller left", "cancel", "lost"])
async def test_a_plain_run_that_is_stopped_writes_nothing(place: Path | None, cause: str) -> None:
    class Plain(Stopped):
        def run(self, ctx: Any) -> RunResult:  # type: ignore[override]
            loop.call_soon_threadsafe(self.entered.set)
            try:
                ctx.sleep(1e6)
            except BaseException:  # noqa: BLE001 - as code that compensates in the wrong place
                for name, call in every_call(ctx):
                    if name in ("list", "map"):  # their executor has no blocking form
                        continue
                    self.raised[name] = None
                    try:
                        call()
                    except BaseException as error:  # noqa: BLE001 - whatever stops code
                        self.raised[name] = error
                raise ConnectionError("the request was aborted") from None
            raise AssertionError("nobody stopped it")

    loop, agent, clock = asyncio.get_running_loop(), Plain(every_call, "", ""), VirtualClock()
    async with Rig(place, clock, grace_seconds=1, park_after=1e9) as rig:
        reader = rig.another()
        await stop(rig, clock, agent, cause)
        assert {name: type(error) for name, error in agent.raised.items() if not isinstance(error, STOP)} == {}
        assert len(agent.raised) > 10
        assert (await reader.get_run("r")).status.value == CAUSES[cause]
        assert agent.errors == []


async def test_writes_to_the_stores_of_a_stopped_attempt_are_refused(tmp_path: Path) -> None:
    raised: list[BaseException | None] = []

    async def body(ctx: Any) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            raised.append(await _raised(lambda: ctx.persistence.memory.set("refunded", True)))

    inside = asyncio.Event()
    async with AgentRunner.open(tmp_path / "a.db", config=RunnerConfig(grace_seconds=0)) as runner:
        executing = asyncio.ensure_future(runner.execute(Script(body), "r"))
        await until(inside)
        executing.cancel()
        await asyncio.wait({executing})
        assert [type(error) for error in raised] == [asyncio.CancelledError]

        async def reads(ctx: Any) -> Any:
            return await ctx.persistence.memory.get("refunded")

        assert (await runner.execute(Script(reads), "r2")).final_output == {"value": None}


async def test_a_result_that_was_returned_before_the_stop_counts(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> int:
            held = next(iter(rig.runner._inline_runs._runs))
            asyncio.get_running_loop().call_soon(held.execution.claim.request_release)
            return 7

        assert await rig.value(body) == 7


async def test_code_that_repeats_a_refused_call_forever_leaves_the_loop_to_others(place: Path | None) -> None:
    async def body(ctx: Any) -> None:
        entered.set()
        while not enough.is_set():
            with contextlib.suppress(BaseException):
                await ctx.step("again", lambda: None)
            if ctx.control.stopped is not None:
                calls.append(1)

    entered, enough = asyncio.Event(), asyncio.Event()
    calls: list[int] = []
    async with Rig(place) as rig:
        executing = asyncio.ensure_future(rig.go(body))
        await until(entered)
        executing.cancel()
        await soon(lambda: len(calls) > 50)
        enough.set()
        await asyncio.wait({executing})


async def test_a_run_that_is_released_between_two_attempts_begins_none(place: Path | None) -> None:
    async def fails_once(ctx: Any) -> str:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            raise ValueError("x")
        return "done"

    attempts: list[int] = []
    async with Rig(place, Clock(), grace_seconds=0, retry_backoff_base=1000, max_retries=2) as rig:
        reader = rig.another()
        executing = asyncio.ensure_future(rig.go(fails_once))
        await soon(lambda: any(each.execution.claim.row.failures for each in rig.runner._inline_runs._runs))
        await rig.runner.close()
        with pytest.raises(StorageClosed):
            await executing
        info = await reader.get_run("r")
        assert (info.status, attempts) == (RunStatus.PENDING, [1])
        assert [each.kind for each in await reader.state_store.records(str(info.run_id))] == ["attempt"]
        assert (await reader.execute(Script(fails_once), "r")).final_output == {"value": "done"}
        assert attempts == [1, 2]


# -- the `cancel` hook


class Compensates(AgentRuntime):
    """Books, and refunds in its `cancel` hook."""

    key = "compensates"

    def __init__(self, *, hangs: int = 0) -> None:
        self.entered, self.in_hook = asyncio.Event(), asyncio.Event()
        self.log: list[str] = []
        self.hangs = hangs  # how many executions of the hook do not end

    async def run(self, ctx: Any) -> RunResult:
        await ctx.step("book", self.log.append, "book")
        self.entered.set()
        if self.log.count("wait") == 0:
            self.log.append("wait")
            await asyncio.Event().wait()
        await ctx.step("send", self.log.append, "send")
        return RunResult()

    async def cancel(self, ctx: Any) -> None:
        assert not ctx.is_cancelled()
        await ctx.step("refund", self.log.append, "refund", on_in_doubt="fail")
        await StepExecutor(ctx).run([Step("mail", lambda ctx, state: self.log.append("mail"))])
        await ctx.emit("refunded", {"n": 1})
        await ctx.sleep(0.001)
        self.in_hook.set()
        if self.hangs > 0:
            self.hangs -= 1
            await asyncio.Event().wait()
        await ctx.step("note", self.log.append, "note")


async def cancelled_in(rig: Rig, agent: Compensates) -> None:
    """Execute a run, and cancel it."""
    rig.registry.register(agent)
    await rig.runner.submit("compensates", {}, run_id="r")
    working = asyncio.ensure_future(rig.runner.run_once())
    await until(agent.entered)
    assert await rig.runner.cancel("r", wait=True) is RunStatus.CANCELLED
    await working


async def test_steps_of_the_cancel_hook_are_recorded_and_not_part_of_the_run(place: Path | None) -> None:
    agent = Compensates()
    async with Rig(place) as rig:
        await cancelled_in(rig, agent)
        assert agent.log == ["book", "wait", "refund", "mail", "note"]
        assert await rig.told("refunded") == [("refunded", {"n": 1})]
        done = [record.name for record in await rig.records() if record.kind == "done"]
        assert done == ["book", "refund", "mail", "sleep", "note"]
        await rig.runner.resume("r")
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).status is RunStatus.SUCCEEDED
        assert agent.log == ["book", "wait", "refund", "mail", "note", "send"]


@pytest.mark.parametrize("how", ["drained", "lost"])
async def test_another_worker_calls_a_hook_that_was_cut_off_and_its_steps_are_not_repeated(
    place: Path | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_calls, "LEAVE_SECONDS", 0.01)
    agent = Compensates(hangs=1)
    async with Rig(place, Clock(), grace_seconds=60) as rig:
        rig.registry.register(agent)
        await rig.runner.submit("compensates", {}, run_id="r")
        working = asyncio.ensure_future(rig.runner.run_once())
        await until(agent.entered)
        assert await rig.runner.cancel("r")
        await until(agent.in_hook)
        [execution] = rig.runner._worker._executions.values()
        if how == "drained":
            execution.claim.request_release()
        else:
            await execution.claim.release()
            execution.claim.leaving = False
            execution.claim.lose(execution.claim.row.claim_id)
        await asyncio.wait({working})
        assert (await rig.runner.get_run("r")).status is not RunStatus.CANCELLED
        assert await rig.another().run_once()
        assert (await rig.runner.get_run("r")).status is RunStatus.CANCELLED
        assert agent.log == ["book", "wait", "refund", "mail", "note"]


class Calls(AgentRuntime):
    """Waits for a signal and calls a child run in its `cancel` hook."""

    key = "calls"

    def __init__(self) -> None:
        self.entered, self.in_hook = asyncio.Event(), asyncio.Event()
        self.received: list[Any] = []

    async def run(self, ctx: Any) -> None:
        self.entered.set()
        await asyncio.Event().wait()

    async def cancel(self, ctx: Any) -> None:
        self.in_hook.set()
        self.received.append(await ctx.wait_for_signal("go"))
        self.received.append((await ctx.call("script", {})).final_output["value"])


async def test_a_cancel_hook_receives_messages_and_calls_children_that_another_cancel_leaves_alone(
    place: Path | None,
) -> None:
    async def child(ctx: Any) -> str:
        child_began.set()
        await may_end.wait()
        return "refunded"

    agent, child_began, may_end = Calls(), asyncio.Event(), asyncio.Event()
    async with Rig(place, Clock(), grace_seconds=60) as rig, asyncio.timeout(30):
        runner = rig.runner
        rig.registry.register(agent)
        rig.registry.register(Script(child))
        await runner.submit("calls", {}, run_id="r")
        working = asyncio.ensure_future(runner.run_loop(handle_signals=False, concurrency=2))
        await until(agent.entered)
        assert await runner.cancel("r")
        await until(agent.in_hook)
        await runner.signal("r", "go", 1)
        await until(child_began)
        assert await runner.cancel("r")
        row = await runner.queue.require("r")
        await runner._abandoned().end_tree(row.run_id, waiting=True)  # what cancel(wait=True) repeats
        [called] = await runner.queue.children(row.run_id)
        assert (called.status, called.cancel_at) == ("running", None)
        may_end.set()
        assert (await runner.wait("r")).status is RunStatus.CANCELLED
        assert agent.received == [1, "refunded"]
        runner.stop()
        await working


@pytest.mark.parametrize("suspect", [False, True])
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_child_of_a_cancel_hook_runs_on_the_only_worker(concurrency: int, suspect: bool) -> None:
    """The hook uses no slot while it waits, also that of a run that may crash its worker."""

    async def child(ctx: Any) -> str:
        return "refunded"

    class Refunds(Calls):
        async def cancel(self, ctx: Any) -> None:
            self.received.append((await ctx.call("script", {})).final_output["value"])
            self.received.append(await ctx.step("note", lambda: "noted"))

    agent = Refunds()
    async with Rig(None, Clock(), grace_seconds=60, max_crashes=2) as rig, asyncio.timeout(30):
        rig.registry.register(agent)
        rig.registry.register(Script(child))
        await rig.runner.submit("calls", {}, run_id="r")
        if suspect:
            runs = cast(MemoryEngine, rig.runner.queue.commits).tables["runs"]
            runs |= {key: row.with_values(crashes=1, crashes_in_row=1) for key, row in runs.items()}
        working = asyncio.ensure_future(rig.runner.run_loop(0.01, handle_signals=False, concurrency=concurrency))
        await until(agent.entered)
        assert await rig.runner.cancel("r")
        assert (await rig.runner.wait("r")).status is RunStatus.CANCELLED
        assert agent.received == ["refunded", "noted"]
        rig.runner.stop()
        await working


@pytest.mark.parametrize("how", ["its time is up", "the caller leaves"])
async def test_a_cancel_hook_that_is_stopped_starts_and_records_nothing_more(
    place: Path | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Calls):
        async def cancel(self, ctx: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                for name, call in every_call(ctx):
                    raised[name] = await _raised(call)

    monkeypatch.setattr(guarded_calls, "LEAVE_SECONDS", 5.0)
    agent, raised = Late(), dict[str, BaseException | None]()
    async with Rig(place, Clock(), grace_seconds=60) as rig:
        rig.registry.register(agent)
        working = asyncio.ensure_future(rig.runner.execute(agent, "r"))
        await until(agent.entered)
        [held] = rig.runner._inline_runs._runs
        assert await rig.runner.cancel("r")
        await soon(lambda: held.execution.control.cancel_hook is not None)
        await asyncio.sleep(0)
        if how == "the caller leaves":
            working.cancel()
        else:
            monkeypatch.setattr(GuardedCalls, "time_allowed", lambda self, within: 0.0)
            held.execution.control.notify()
        await asyncio.wait({working})
        assert len(raised) > 10
        assert {name: type(error) for name, error in raised.items() if not isinstance(error, STOP)} == {}
        assert {each.kind for each in await rig.records()} <= {"attempt", "ended"}


# -- exceptions that are no Exception


def leaves() -> None:
    sys.exit(2)


async def leaves_here() -> None:
    sys.exit(2)


def interrupts() -> None:
    raise KeyboardInterrupt


class NotAnException(BaseException):
    """As a test framework raises."""


async def raises_here() -> None:
    raise NotAnException("skipped")


async def in_a_group() -> None:
    raise BaseExceptionGroup("both", [ValueError("x"), SystemExit(2)])


class Exits(AgentRuntime):
    key = "exits"

    def __init__(self, run: Callable[[Any], Awaitable[Any]]) -> None:
        self.body = run

    async def run(self, ctx: Any) -> RunResult:
        await self.body(ctx)
        return RunResult()


class ExitsInLifespan(Exits):
    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        sys.exit(2)
        yield


class ExitsInPlainRun(AgentRuntime):
    key = "exits"

    def run(self, ctx: Any) -> RunResult:
        sys.exit(2)


class ExitsInHook(Exits):
    async def on_error(self, ctx: Any, error: BaseException) -> None:
        sys.exit(2)


async def fails(ctx: Any) -> None:
    raise ValueError("x")


async def nothing(ctx: Any) -> None: ...


#: The agent, and the start of its error. Its attempts fail, and the worker executes the next run.
EXITS: dict[str, tuple[AgentRuntime, str]] = {
    "run": (Exits(lambda ctx: leaves_here()), "run() of agent 'exits' must not end the process, got SystemExit: 2. "),
    "a group": (
        Exits(lambda ctx: in_a_group()),
        "run() of agent 'exits' must not end the process, got SystemExit: 2. ",
    ),
    "plain run": (ExitsInPlainRun(), "run() of agent 'exits' must not end the process, got SystemExit: 2. "),
    "step": (Exits(lambda ctx: ctx.step("s", leaves_here)), "step 's' must not end the process, got SystemExit: 2. "),
    "step in a thread": (Exits(lambda ctx: ctx.step("s", leaves)), "step 's' must not end the process, got "),
    "step with a time limit": (
        Exits(lambda ctx: ctx.step("s", leaves_here, timeout=60)),
        "step 's' must not end the process, got ",
    ),
    "interrupt in a thread": (Exits(lambda ctx: ctx.step("s", interrupts)), "step 's' must not end the process, got "),
    "other": (Exits(lambda ctx: ctx.step("s", raises_here)), "step 's' must not end the process, got NotAnException: "),
    "list": (
        Exits(lambda ctx: StepExecutor(ctx).run([Step("s", lambda ctx, state: leaves())])),
        "step 's' must not end the process, got SystemExit: 2. ",
    ),
    "map": (
        Exits(lambda ctx: StepExecutor(ctx).map("s", lambda item: leaves(), [1])),
        "step 's' must not end the process, got SystemExit: 2. ",
    ),
    "on_error": (ExitsInHook(fails), "x"),
    "lifespan": (ExitsInLifespan(nothing), "lifespan() of agent 'exits' must not end the process, got SystemExit: 2. "),
}


@pytest.mark.parametrize("where", EXITS)
async def test_an_exit_in_code_is_a_failed_attempt_and_the_worker_goes_on(place: Path | None, where: str) -> None:
    agent, message = EXITS[where]
    async with Rig(place, max_retries=2, lease_ttl_seconds=1e6) as rig:
        rig.registry.register(agent)
        rig.registry.register(Script(nothing))
        await rig.runner.submit("exits", {}, run_id="r")
        await rig.runner.submit("script", {}, run_id="other")
        working = asyncio.ensure_future(rig.runner.run_loop(handle_signals=False, concurrency=2))
        result = await rig.runner.wait("r", timeout=10)
        assert (await rig.runner.wait("other", timeout=10)).status is RunStatus.SUCCEEDED
        assert not working.done()
        rig.runner.stop()
        await working
        assert result.error is not None
        assert (result.status, (await rig.runner.get_run("r")).attempt) == (RunStatus.FAILED, 2)
        assert message in result.error.message


async def test_a_cancel_hook_that_exits_does_not_end_the_worker(place: Path | None) -> None:
    class ExitsInCancel(Compensates):
        async def cancel(self, ctx: Any) -> None:
            sys.exit(2)

    async with Rig(place) as rig:
        await cancelled_in(rig, ExitsInCancel())


async def test_an_exit_in_the_block_of_open_run_is_the_callers_and_the_run_is_resumable(tmp_path: Path) -> None:
    async def block() -> None:
        async with open_run(tmp_path / "a.db", "r") as ctx:
            await ctx.step("one", lambda: 1)
            sys.exit(3)

    with pytest.raises(SystemExit):
        await block()
    async with open_run(tmp_path / "a.db", "r") as ctx:
        assert await ctx.step("one", lambda: 2) == 1


async def test_code_that_ignores_its_cancellation_is_given_up_and_the_log_names_the_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stubborn(ctx: Any) -> None:
        entered.set()
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()  # here

    monkeypatch.setattr("agent_runtime_core.runner.worker.SHUTDOWN_SECONDS", 0.05)
    entered, over = asyncio.Event(), asyncio.Event()
    async with Rig(tmp_path / "a.db", grace_seconds=0) as rig:
        rig.registry.register(Script(stubborn))
        await rig.runner.submit("script", {}, run_id="r")
        working = asyncio.ensure_future(rig.runner.run_loop(handle_signals=False))
        await until(entered)
        rig.runner.stop()
        await working
        assert (await rig.runner.get_run("r")).status is RunStatus.PENDING
        over.set()
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("await over.wait()  # here"))
    [text] = [each.getMessage() for each in caplog.records if "did not stop when it was cancelled" in each.getMessage()]
    assert f"{Path(__file__).name}:{line} in " in text
    assert "stubborn" in text
