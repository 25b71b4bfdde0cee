"""Hooks of agents and stores of runners: what becomes of a run when they hang, break or answer in their own way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core._core.clock import Clock
from agent_runtime_core.errors import StorageClosed
from agent_runtime_core.interfaces import AgentRuntime, ErrorInfo, RunResult
from agent_runtime_core.persistence import (
    InMemoryAuditStore,
    InMemoryConversationStore,
    PersistenceConfig,
    PersistenceManager,
)
from agent_runtime_core.persistence.fencing import CURRENT_CLAIM
from agent_runtime_core.runner import AgentRunner, RunInfo, RunnerConfig, guarded_calls
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.support.runs import Body, Rig, Script, soon, until

Hook = Callable[..., Any]


class Hooked(Script):
    """A script with hooks, which are functions of the context and, of an error, that."""

    def __init__(self, body: Body, *, on_error: Hook | None = None, cancel: Hook | None = None) -> None:
        super().__init__(body)
        if on_error is not None:
            self.on_error = on_error  # type: ignore[method-assign]
        if cancel is not None:
            self.cancel = cancel  # type: ignore[method-assign]


async def breaks(ctx: Any) -> None:
    raise ValueError("broken")


async def nothing(ctx: Any) -> None:
    return None


async def stays(ctx: Any) -> None:
    await asyncio.Event().wait()


async def for_ever(*_: Any) -> None:
    await asyncio.Event().wait()


async def breaks_off(*_: Any) -> None:
    """As a hook does that stops its helper task: cancel it, and await it."""
    helper = asyncio.ensure_future(for_ever())
    await asyncio.sleep(0)
    helper.cancel()
    await helper


class Odd(BaseException):
    pass


async def raises_oddly(*_: Any) -> None:
    raise Odd


def past(rig: Rig, seconds: float) -> Hook:
    """A hook that never ends, while so much time passes."""

    async def hook(ctx: Any, *_: Any) -> None:
        assert isinstance(rig.clock, VirtualClock)
        rig.clock.advance(seconds)
        ctx.control.notify()
        await asyncio.Event().wait()

    return hook


class HangingTalk(InMemoryConversationStore):
    """Conversations that do not answer when they are read, or when they are written."""

    def __init__(self, which: str, then: Callable[[], Awaitable[Any]]) -> None:
        super().__init__()
        self.which, self.then, self.inside = which, then, asyncio.Event()

    async def get(self, *args: Any, **options: Any) -> Any:
        if self.which == "load":
            self.inside.set()
            await self.then()
        return await super().get(*args, **options)

    async def append(self, *args: Any, **options: Any) -> Any:
        if self.which == "keep":
            self.inside.set()
            await self.then()
        return await super().append(*args, **options)


class HangingAudit(InMemoryAuditStore):
    then = staticmethod(for_ever)

    async def log_event(self, *args: Any, **options: Any) -> None:
        await self.then()


def with_stores(rig: Rig, **stores: Any) -> AgentRunner:
    persistence = PersistenceManager(PersistenceConfig(**stores))
    config = RunnerConfig(**rig.settings)
    runner = AgentRunner(*rig.runner.backends, config, persistence=persistence, registry=rig.registry)
    rig._opened.insert(0, runner)
    return runner


def talk() -> dict[str, Any]:
    return {"conversation_id": str(uuid4()), "messages": [{"role": "user", "content": "hi"}]}


async def worked(rig: Rig, agent: AgentRuntime, **options: Any) -> RunResult:
    """What a worker makes of one attempt of the agent."""
    rig.registry.register(agent)
    await rig.runner.submit(agent.key, run_id="r", **options)
    assert await rig.runner.run_once()
    return await rig.runner.wait("r")


async def drained(runner: AgentRunner, inside: asyncio.Event) -> RunInfo:
    """Where the run is after a worker has stopped in the middle of it."""
    loop = asyncio.ensure_future(runner.run_loop(handle_signals=False))
    await until(inside)
    runner.stop()
    async with asyncio.timeout(10):
        await loop
    return await runner.get_run("r")


# -- hooks that hang


async def test_on_error_has_what_is_left_of_the_attempts_time(
    place: Path | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(place, run_timeout_seconds=300) as rig:
        result = await rig.runner.execute(Hooked(breaks, on_error=past(rig, 301)), "r")
        assert (result.status, result.error and result.error.type) == (RunStatus.FAILED, "ValueError")
        assert "on_error() of agent 'script' took too long" in caplog.text


async def test_on_error_has_until_the_deadline(place: Path | None) -> None:
    async with Rig(place) as rig:
        deadline = rig.clock.wall() + 10
        result = await worked(rig, Hooked(breaks, on_error=past(rig, 11)), deadline=deadline)
        assert (result.status, result.error and result.error.type) == (RunStatus.FAILED, "ValueError")


async def test_a_cancelled_run_waits_for_its_hook_as_long_as_the_grace(place: Path | None) -> None:
    async with Rig(place, grace_seconds=25) as rig:
        rig.registry.register(Hooked(stays, cancel=past(rig, 26)))
        await rig.runner.submit("script", run_id="r")
        work = asyncio.ensure_future(rig.runner.run_once())
        await rig.begun()
        assert await rig.runner.cancel("r", wait=True) is RunStatus.CANCELLED
        await work


async def test_a_cancel_hook_has_a_moment_where_there_is_no_grace(place: Path | None) -> None:
    done: list[str] = []

    async def hook(ctx: Any) -> None:
        await asyncio.sleep(0)
        done.append("let go")

    async with Rig(place, grace_seconds=0) as rig:
        rig.registry.register(Hooked(stays, cancel=hook))
        await rig.runner.submit("script", run_id="r")
        work = asyncio.ensure_future(rig.runner.run_once())
        await rig.begun()
        assert await rig.runner.cancel("r", wait=True) is RunStatus.CANCELLED
        assert done == ["let go"]
        await work


async def test_a_run_that_is_cancelled_while_on_error_hangs_ends_as_cancelled(place: Path | None) -> None:
    contexts: list[Any] = []

    async def hangs(ctx: Any, error: BaseException) -> None:
        contexts.append(ctx)
        await asyncio.Event().wait()

    async with Rig(place, VirtualClock(), grace_seconds=25, max_retries=3) as rig:
        task = asyncio.ensure_future(rig.runner.execute(Hooked(breaks, on_error=hangs), "r"))
        await soon(lambda: bool(contexts))
        assert await rig.runner.cancel("r")
        await soon(lambda: contexts[0].control.cancel_requested)
        for _ in range(3):  # until the grace has begun
            await asyncio.sleep(0)
        assert not task.done()
        rig.clock.advance(26)  # type: ignore[attr-defined]
        contexts[0].control.notify()
        assert (await task).status is RunStatus.CANCELLED
        assert await rig.told("run.") == [("run.started", {"agent_key": "script", "attempt": 1}), ("run.cancelled", {})]


async def test_a_run_whose_hook_hangs_is_given_back_by_a_worker_that_stops(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_calls, "LEAVE_SECONDS", 0.01)
    inside = asyncio.Event()

    async def hangs(ctx: Any, error: BaseException) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig(place, Clock(), grace_seconds=0, max_retries=3) as rig:
        rig.registry.register(Hooked(breaks, on_error=hangs))
        await rig.runner.submit("script", run_id="r")
        for _ in range(4):  # more often than a run may crash
            inside.clear()
            info = await drained(rig.another(), inside)
            assert (info.status, info.attempt, info.reason) == (RunStatus.PENDING, 1, "handed back")


async def test_a_hook_that_listens_to_nothing_is_left_to_itself(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guarded_calls, "LEAVE_SECONDS", 0.01)
    leave, errors = asyncio.Event(), list[BaseException]()

    async with Rig(place, run_timeout_seconds=300) as rig:

        async def deaf(ctx: Any, error: BaseException) -> None:
            rig.clock.advance(301)  # type: ignore[attr-defined]
            ctx.control.notify()
            while not leave.is_set():
                try:
                    await leave.wait()
                except asyncio.CancelledError:
                    continue
            try:
                await ctx.emit("late")
            except StorageClosed as late:
                errors.append(late)

        result = await rig.runner.execute(Hooked(breaks, on_error=deaf), "r")
        assert result.status is RunStatus.FAILED
        assert "on_error() of agent 'script' did not stop within 0.01 s of being cancelled" in caplog.text
        leave.set()
        await soon(lambda: bool(errors))
        assert await rig.told("late") == []


# -- hooks that break, or answer in their own way


@pytest.mark.parametrize("hook", [breaks_off, raises_oddly])
async def test_what_comes_out_of_on_error_is_the_hooks_failure(
    place: Path | None, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(place) as rig:
        result = await rig.runner.execute(Hooked(breaks, on_error=hook), "r")
        assert (result.status, result.error and result.error.type) == (RunStatus.FAILED, "ValueError")
        assert "on_error() of agent 'script' failed" in caplog.text
        agent = Hooked(breaks, on_error=hook)
        rig.registry.register(agent)
        await rig.runner.submit("script", run_id="w")
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("w")).status is RunStatus.FAILED


@pytest.mark.parametrize("hook", [breaks_off, raises_oddly])
async def test_what_comes_out_of_cancel_is_the_hooks_failure(
    place: Path | None, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(place) as rig:
        task = asyncio.ensure_future(rig.runner.execute(Hooked(stays, cancel=hook), "r"))
        await rig.begun()
        async with asyncio.timeout(10):
            assert await rig.runner.cancel("r", wait=True) is RunStatus.CANCELLED
            assert (await task).status is RunStatus.CANCELLED
        assert "cancel() of agent 'script' failed" in caplog.text


async def test_whoever_cancels_execute_while_a_hook_goes_on_is_heard(place: Path | None) -> None:
    inside, ends = asyncio.Event(), list[str]()

    async def hook(ctx: Any, error: BaseException) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async with Rig(place) as rig:
        task = asyncio.ensure_future(rig.runner.execute(Hooked(breaks, on_error=hook), "r"))
        await until(inside)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == ["cancelled"]
        info = await rig.runner.get_run("r")
        assert (info.status, info.reason) == (RunStatus.PENDING, "handed back")


async def test_hooks_may_be_plain_functions(place: Path | None, caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    def on_error(ctx: Any, error: BaseException) -> ErrorInfo:
        return ErrorInfo("Own", "said", retriable=False)

    def cancel(ctx: Any) -> None:
        called.append("cancel")

    async with Rig(place, max_retries=3) as rig:
        result = await rig.runner.execute(Hooked(breaks, on_error=on_error), "r")
        assert (result.error and (result.error.type, result.error.message)) == ("Own", "said")
        task = asyncio.ensure_future(rig.runner.execute(Hooked(stays, cancel=cancel), "c"))
        await rig.begun("c")
        await rig.runner.cancel("c", wait=True)
        assert (await task).status is RunStatus.CANCELLED
        assert called == ["cancel"]
    assert not [each for each in caplog.records if each.levelno > logging.WARNING]


async def test_a_hook_writes_under_the_claim_of_its_run(place: Path | None) -> None:
    claims: list[Any] = []

    async def on_error(ctx: Any, error: BaseException) -> None:
        claims.append(CURRENT_CLAIM.get())

    async with Rig(place) as rig:
        await rig.runner.execute(Hooked(breaks, on_error=on_error), "r")
    assert claims != [None]
    assert CURRENT_CLAIM.get() is None


async def test_an_agent_without_hooks_of_its_own_pays_for_none(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(guarded_calls.GuardedCalls, "call", never)
    async with Rig(place) as rig:
        assert (await rig.go(nothing, "ok")).status is RunStatus.SUCCEEDED
        result = await rig.go(breaks, "r")
        assert (result.error and (result.error.type, result.error.message)) == ("ValueError", "broken")


# -- stores


@pytest.mark.parametrize("which", ["load", "keep"])
@pytest.mark.parametrize(("limit", "said"), [("timeout", "TimedOut"), ("deadline", "DeadlineExceeded")])
async def test_a_store_that_does_not_answer_is_waited_for_within_the_attempts_time(
    place: Path | None, which: str, limit: str, said: str
) -> None:
    async with Rig(place, run_timeout_seconds=300 if limit == "timeout" else 1e6) as rig:

        async def hangs() -> None:
            [held] = runner.heartbeat._leased.values()
            rig.clock.advance(301)  # type: ignore[attr-defined]
            held.control.notify()
            await asyncio.Event().wait()

        runner = with_stores(rig, conversation_store=HangingTalk(which, hangs))
        rig.registry.register(Script(nothing))
        deadline = rig.clock.wall() + 300 if limit == "deadline" else None
        await runner.submit("script", talk(), run_id="r", deadline=deadline)
        assert await runner.run_once()
        result = await runner.wait("r")
        assert (result.status, result.error and result.error.type) == (RunStatus.TIMED_OUT, said)


@pytest.mark.parametrize("which", ["load", "keep"])
async def test_a_run_is_cancelled_though_a_store_does_not_answer(
    place: Path | None, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_calls, "LEAVE_SECONDS", 0.01)
    async with Rig(place, Clock(), grace_seconds=0) as rig:
        store = HangingTalk(which, for_ever)
        runner = with_stores(rig, conversation_store=store)
        task = asyncio.ensure_future(runner.execute(Script(nothing), "r", talk()))
        await until(store.inside)
        async with asyncio.timeout(10):
            assert await runner.cancel("r", wait=True) is RunStatus.CANCELLED
            assert (await task).status is RunStatus.CANCELLED


@pytest.mark.parametrize("which", ["load", "keep"])
async def test_a_run_is_given_back_though_a_store_does_not_answer(
    place: Path | None, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_calls, "LEAVE_SECONDS", 0.01)
    async with Rig(place, Clock(), grace_seconds=0) as rig:
        store = HangingTalk(which, for_ever)
        runner = with_stores(rig, conversation_store=store)
        rig.registry.register(Script(nothing))
        await runner.submit("script", talk(), run_id="r")
        info = await drained(runner, store.inside)
        assert (info.status, info.attempt, info.reason) == (RunStatus.PENDING, 1, "handed back")


async def test_a_cancellation_out_of_a_store_fails_the_attempt(place: Path | None) -> None:
    async with Rig(place) as rig:
        runner = with_stores(rig, conversation_store=HangingTalk("load", breaks_off))
        result = await runner.execute(Script(nothing), "r", talk())
        assert result.status is RunStatus.FAILED
        assert result.error is not None
        assert "ended with CancelledError, and was not cancelled" in result.error.message


@pytest.mark.parametrize("then", [for_ever, breaks_off])
async def test_an_audit_store_keeps_no_run_from_returning(
    place: Path | None, then: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guarded_calls, "LEAVE_SECONDS", 0.01)
    monkeypatch.setattr(HangingAudit, "then", staticmethod(then))
    async with Rig(place, Clock(), grace_seconds=0) as rig:
        runner = with_stores(rig, audit_store=HangingAudit())
        async with asyncio.timeout(10):
            assert (await runner.execute(Script(nothing), "r")).status is RunStatus.SUCCEEDED
        assert "audit log of run" in caplog.text


@pytest.mark.parametrize("waits", [False, True])
async def test_only_an_agent_that_waits_costs_a_timer(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = 0
    wait = guarded_calls.GuardedCalls.wait

    async def counted(calls: guarded_calls.GuardedCalls, what: object, seconds: float) -> None:
        nonlocal timers
        timers += 1
        await wait(calls, what, seconds)

    monkeypatch.setattr(guarded_calls.GuardedCalls, "wait", counted)

    async def body(ctx: Any) -> None:
        for _ in range(3 if waits else 0):
            await asyncio.sleep(0)

    async with Rig() as rig:
        assert (await rig.runner.execute(Script(body), "job")).status is RunStatus.SUCCEEDED
    assert timers == waits
