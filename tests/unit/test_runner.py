"""The verbs of a runner: executing, submitting, watching, stopping and repairing runs."""

from __future__ import annotations

import asyncio
import datetime as dt
import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import configure, register_runtime
from agent_runtime_core._core.clock import Clock
from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._execution.claim_writer import ClaimWriter
from agent_runtime_core._execution.run_control import Stop
from agent_runtime_core.errors import (
    IdempotencyConflict,
    IllegalTransition,
    InvalidArgument,
    LeaseLost,
    NotSupported,
    RunBusy,
    RunFailed,
    StorageBusy,
    StorageCorrupt,
    UnknownAgent,
    UnknownRun,
    UnknownSetting,
    UnserialisableResult,
)
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.interfaces import AgentRuntime, ErrorInfo, RunContext, RunResult, TraceSink
from agent_runtime_core.queue import InMemoryQueue, QueuedRun
from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunInfo, RunnerConfig, run_watcher
from agent_runtime_core.runner import runner as runner_core
from agent_runtime_core.runner.backends import Backends
from agent_runtime_core.runner.execution import RunExecution
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.support.cases import for_each
from tests.support.runs import Rig, Script, soon, until


class Echo(AgentRuntime):
    key = "my-agent"

    async def run(self, ctx: RunContext) -> RunResult:
        await ctx.emit("assistant.message", {"content": "hi"})
        return RunResult(
            final_output={"response": ctx.input_messages[-1]["content"]},
            final_messages=[{"role": "assistant", "content": "hi"}],
            usage={"total_tokens": 3},
            artifacts={"file": b"1"},
        )


async def answer(ctx: Any) -> int:
    return 42


async def breaks(ctx: Any) -> None:
    raise ValueError("broken")


# -- execute


async def test_execute_as_the_readme_writes_it() -> None:
    register_runtime(Echo())
    runner = AgentRunner(config=RunnerConfig(run_timeout_seconds=300, max_retries=3))
    result = await runner.execute(
        agent="my-agent", run_id="run-123", input_data={"messages": [{"role": "user", "content": "Hello!"}]}
    )
    assert result.final_output == {"response": "Hello!"}
    assert (result.status, result.error) == (RunStatus.SUCCEEDED, None)
    assert result.raise_for_status() is result
    assert isinstance(result.run_id, UUID)
    again = await runner.execute(
        agent="my-agent", run_id="run-123", input_data={"messages": [{"role": "user", "content": "Hello!"}]}
    )
    assert again == result
    info = await runner.get_run("run-123")
    assert (info.run_key, info.run_id, info.agent_key) == ("run-123", result.run_id, "my-agent")
    await runner.close()


async def test_the_events_of_a_success(place: Path | None) -> None:
    async with Rig(place) as rig:
        await rig.runner.execute(Echo(), "r", {"messages": [{"content": "Q"}]})
        assert await rig.told() == [
            ("run.started", {"agent_key": "my-agent", "attempt": 1}),
            ("assistant.message", {"content": "hi"}),
            ("run.succeeded", {"final_output": {"response": "Q"}, "usage": {"total_tokens": 3}}),
        ]
        assert await rig.runner.state_store.get_run_status((await rig.runner.get_run("r")).run_id) == "succeeded"


async def test_a_failing_run_is_tried_as_often_as_allowed(place: Path | None) -> None:
    async with Rig(place, max_retries=3, retry_backoff_base=2) as rig:
        result = await rig.go(breaks)
        assert result.status == RunStatus.FAILED
        assert result.error is not None
        assert (result.error.type, result.error.message, result.error.retriable) == ("ValueError", "broken", True)
        assert "breaks" in result.error.stack
        assert "drive.py" not in result.error.stack, "it begins in the agent's own code"
        told = await rig.told()
        assert [kind for kind, _ in told] == ["run.started"] * 3 + ["run.failed"]
        assert [payload["attempt"] for _, payload in told[:3]] == [1, 2, 3]
        assert set(told[3][1]) == {"type", "message", "stack", "retriable", "details"}
        assert rig.clock.boot() == 2 + 4
        with pytest.raises(RunFailed, match="ValueError: broken") as caught:
            result.raise_for_status()
        assert caught.value.status == "failed"
        assert await rig.runner.state_store.get_run_status(str(result.run_id)) == "failed"


async def test_raise_on_error_raises() -> None:
    async with Rig() as rig:
        with pytest.raises(RunFailed, match="broken"):
            await rig.go(breaks, raise_on_error=True)
        assert (await rig.go(answer, "ok", raise_on_error=True)).final_output == {"value": 42}


async def test_an_error_in_the_result_is_a_failure_and_keeps_the_result() -> None:
    async with Rig() as rig:

        async def partly(ctx: Any) -> RunResult:
            return RunResult({"part": 1}, error=ErrorInfo("Quota", "used up", retriable=False))

        result = await rig.go(partly)
        assert (result.status, result.final_output) == ("failed", {"part": 1})
        assert result.error is not None
        assert result.error.message == "used up"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("text", "must return a RunResult, got 'text'"),
        (RunResult({"x": object()}), r"final_output\.x"),
        (RunResult({"x": object()}, error=ErrorInfo("Mine", "no", retriable=False)), "Mine: no"),
    ],
)
async def test_what_is_no_result_fails_the_run_for_good(place: Path | None, wrong: Any, said: str) -> None:
    class Wrong(Echo):
        async def run(self, ctx: RunContext) -> RunResult:
            return wrong  # type: ignore[no-any-return]

    async with Rig(place, max_retries=3) as rig:
        result = await rig.runner.execute(Wrong(), "r")
        assert result.status == RunStatus.FAILED
        assert result.error is not None
        assert result.error.retriable is False
        with pytest.raises(RunFailed, match=said):
            result.raise_for_status()
        assert len(await rig.told("run.started")) == 1
        # What went wrong left no hole: the run can be opened again and cancelled.
        await rig.runner.resume("r")
        assert await rig.runner.cancel("r", wait=True) == RunStatus.CANCELLED


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Mute(), r"Mute \(its message is not available\)"),
        (ValueError("a" + "x" * 3_000_000 + "z"), r"ax+… \(29\d{5} characters left out\) …x+z"),
    ],
)
async def test_a_failure_is_recorded_whatever_its_error_says(place: Path | None, error: Exception, said: str) -> None:
    async with Rig(place) as rig:

        async def fails(ctx: Any) -> None:
            raise error

        async def step_fails(ctx: Any) -> None:
            await ctx.step("step", fails, None)

        for name, body in (("r", fails), ("s", step_fails)):
            result = await rig.go(body, name)
            assert result.status == RunStatus.FAILED
            assert result.error is not None
            assert re.search(said, result.error.message)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (ErrorInfo("Own", "said", details={"x": object()}), ("Own", "said")),
        (ErrorInfo("Own", "y" * 3_000_000), ("Own", "y" * 10)),
        ({"type": "Own"}, ("ValueError", "no")),
        ("text", ("ValueError", "no")),
    ],
)
async def test_a_failure_is_recorded_whatever_on_error_makes_of_it(
    place: Path | None, told: Any, kept: tuple[str, str]
) -> None:
    class Hooked(Echo):
        async def run(self, ctx: RunContext) -> RunResult:
            raise ValueError("no")

        async def on_error(self, ctx: RunContext, error: BaseException) -> ErrorInfo | None:
            return told  # type: ignore[no-any-return]

    async with Rig(place, max_retries=2) as rig:
        result = await rig.runner.execute(Hooked(), "r")
        assert result.error is not None
        assert (result.status, result.error.type, result.error.message[:10]) == (RunStatus.FAILED, *kept)
        assert len(await rig.told("run.started")) == 2


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (RunResult({"x": object()}, error=ErrorInfo("Own", "said", retriable=False)), "said"),
        (RunResult(error="text"), "must be an ErrorInfo, got 'text'"),  # type: ignore[arg-type]
    ],
)
async def test_a_result_that_is_a_failure_ends_the_run(place: Path | None, result: RunResult, said: str) -> None:
    class Failed(Echo):
        async def run(self, ctx: RunContext) -> RunResult:
            return result

    async with Rig(place, max_retries=2) as rig:
        with pytest.raises(RunFailed, match=said):
            await rig.runner.execute(Failed(), "r", raise_on_error=True)
        assert (await rig.runner.get_run("r")).status == RunStatus.FAILED


def cancelled_with(given: Any) -> Callable[[Any], Any]:
    async def body(ctx: Any) -> Any:
        while not ctx.is_cancelled():  # noqa: ASYNC110 - what the guide says
            await asyncio.sleep(0)
        return given

    return body


HALF = RunResult({"so_far": 7}, [{"role": "assistant", "content": "half"}], {"total_tokens": 3})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (HALF, HALF),
        (RunResult({"so_far": 7}, error=ErrorInfo("Own", "stopped")), RunResult({"so_far": 7})),
        (RunResult({"x": object()}), RunResult()),
        (RunResult(final_messages=5), RunResult()),  # type: ignore[arg-type]
        (None, RunResult({"value": None})),
    ],
)
async def test_what_an_agent_gives_when_it_sees_the_cancel_is_kept(
    place: Path | None, given: Any, kept: RunResult
) -> None:
    async with Rig(place) as rig:
        task = asyncio.ensure_future(rig.runner.execute(Script(cancelled_with(given)), "r"))
        await rig.begun()
        assert await rig.runner.cancel("r", wait=True) is RunStatus.CANCELLED
        result = await task
        assert (result.status, result.error) == (RunStatus.CANCELLED, None)
        for told in (result, await rig.another().wait("r")):
            assert (told.final_output, told.final_messages) == (kept.final_output, kept.final_messages)
            assert (told.status, told.usage) == (RunStatus.CANCELLED, kept.usage)
        assert await rig.told("run.cancelled") == [("run.cancelled", {})]


async def test_what_is_no_result_is_nothing_to_keep_of_a_cancelled_run() -> None:
    class Wrong(AgentRuntime):
        key = "wrong"

        async def run(self, ctx: RunContext) -> RunResult:
            return await cancelled_with(7)(ctx)  # type: ignore[no-any-return]

    async with Rig() as rig:
        task = asyncio.ensure_future(rig.runner.execute(Wrong(), "r"))
        await rig.begun()
        await rig.runner.cancel("r", wait=True)
        assert ((await task).status, (await task).final_output) == (RunStatus.CANCELLED, {})


async def test_an_attempt_that_takes_too_long_is_timed_out_for_good(place: Path | None) -> None:
    async with Rig(place, Clock(), run_timeout_seconds=0.06, max_retries=3) as rig:

        async def stays(ctx: Any) -> None:
            await asyncio.Event().wait()

        result = await rig.go(stays)
        assert result.status == RunStatus.TIMED_OUT
        assert await rig.told("run.timed") == [("run.timed_out", {"timeout_seconds": 0.06})]
        assert len(await rig.told("run.started")) == 1


async def test_no_pause_between_attempts_goes_beyond_the_deadline(place: Path | None) -> None:
    async with Rig(place, max_retries=3, retry_backoff_base=60) as rig:
        begun, deadline = rig.clock.wall(), rig.clock.wall() + 10.1
        await rig.runner.submit("script", run_id="r", deadline=deadline)
        result = await rig.runner.execute(Script(breaks), "r")
        assert (result.status, result.error and result.error.type) == (RunStatus.TIMED_OUT, "DeadlineExceeded")
        assert rig.clock.wall() - begun == pytest.approx(10.1)
        assert len(await rig.told("run.started")) == 1


async def test_a_deadline_stops_a_run_before_and_while_it_runs(place: Path | None) -> None:
    clock = Clock()
    async with Rig(place, clock) as rig:

        async def stays(ctx: Any) -> None:
            await asyncio.Event().wait()

        rig.register(stays)
        await rig.runner.submit("script", run_id="in", deadline=clock.wall() + 0.1)
        await rig.runner.submit("script", run_id="before", deadline=dt.datetime.fromtimestamp(clock.wall() - 1, dt.UTC))
        assert await rig.runner.run_once()
        assert await rig.runner.run_once()
        for run_id in ("in", "before"):
            result = await rig.runner.wait(run_id)
            assert result.status == RunStatus.TIMED_OUT
        result = await rig.runner.wait("before")
        assert result.error is not None
        assert result.error.type == "DeadlineExceeded"


async def test_a_run_not_begun_in_time_is_not_begun(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig:
        rig.register(answer)
        await rig.runner.submit("script", run_id="r", expires_in=5)
        clock.advance(6)
        assert await rig.runner.run_once()
        result = await rig.runner.wait("r")
        assert result.error is not None
        assert (result.status, result.error.type) == (RunStatus.TIMED_OUT, "Expired")
        assert await rig.told("run.started") == []


async def test_the_agents_hooks_are_asked(place: Path | None, caplog: pytest.LogCaptureFixture) -> None:
    class Hooked(Script):
        async def on_error(self, ctx: RunContext, error: BaseException) -> ErrorInfo | None:
            if str(error) == "hook":
                raise RuntimeError("the hook is broken")
            return None if str(error) == "none" else ErrorInfo("Mine", f"<{error}>", retriable=False)

        async def cancel(self, ctx: RunContext) -> None:
            await ctx.emit("bye", {})
            raise RuntimeError("the hook is broken")

    async with Rig(place) as rig:

        def says(text: str) -> Any:
            async def body(ctx: Any) -> None:
                raise ValueError(text)

            return body

        kinds = []
        for text in ("mine", "none", "hook"):
            result = await rig.runner.execute(Hooked(says(text)), text)
            assert result.error is not None
            kinds.append(result.error.type)
        assert kinds == ["Mine", "ValueError", "ValueError"]
        assert "on_error() of agent 'script' failed" in caplog.text

        async def cancelled(ctx: Any) -> None:
            ctx.control.stop(Stop.CANCEL)
            ctx.control.task.cancel()
            await asyncio.sleep(0)

        assert (await rig.runner.execute(Hooked(cancelled), "r")).status == RunStatus.CANCELLED
        assert [kind for kind, _ in await rig.told()] == ["run.started", "bye", "run.cancelled"]
        assert "cancel() of agent 'script' failed" in caplog.text


async def test_an_agent_that_cancels_itself_has_failed() -> None:
    async def body(ctx: Any) -> None:
        raise asyncio.CancelledError

    async with Rig() as rig:
        result = await rig.go(body)
        assert result.error is not None
        assert (result.status, result.error.type) == (RunStatus.FAILED, "CancelledError")


async def test_cancelling_execute_gives_the_run_back_unused(place: Path | None) -> None:
    inside = asyncio.Event()
    attempts: list[int] = []

    async def body(ctx: Any) -> int:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            inside.set()
            await asyncio.Event().wait()
        return 1

    async with Rig(place, max_retries=3) as rig:
        await rig.cut(body, inside)
        assert (await rig.runner.get_run("r")).status == RunStatus.PENDING
        assert await rig.value(body) == 1
        assert attempts == [1, 1]
        assert [kind for kind, _ in await rig.told("run.")] == ["run.started", "run.resumed", "run.succeeded"]


async def test_another_agent_or_input_under_one_id_is_a_conflict(place: Path | None) -> None:
    async with Rig(place) as rig:
        await rig.go(answer, input_data={"n": 1})
        with pytest.raises(
            IdempotencyConflict, match=r"^run id 'r' was used before with another input\.n\. Use another run id"
        ):
            await rig.go(answer, input_data={"n": 2})
        with pytest.raises(IdempotencyConflict, match=r"with another agent_key\. Use"):
            await rig.runner.execute(Script(answer, "other"), "r", {"n": 1})


async def test_a_conflict_names_the_fields_that_differ_and_no_values(place: Path | None) -> None:
    first = {
        "messages": [{"content": "my card is 4111"}],
        "user": {"bob@example.org": 1},
        "n": 1,
        "same": {"a": 1, "b": 2},
    }
    other = {
        "messages": [{"content": "my card is 4222"}],
        "user": {"eve@example.org": 1},
        "n": True,
        "same": {"b": 2, "a": 1},
    }
    async with Rig(place) as rig:
        rig.register(answer)
        await rig.runner.submit("script", first, run_id="order-7", idempotency_key="k")
        for options, called in (
            ({"run_id": "order-7"}, "run id 'order-7'"),
            ({"idempotency_key": "k"}, "idempotency key 'k'"),
        ):
            with pytest.raises(IdempotencyConflict) as caught:
                await rig.runner.submit("script", other, **options)  # type: ignore[arg-type]
            what = called.partition(" '")[0]
            assert str(caught.value) == (
                f"{called} was used before with another input.messages, input.user, input.n. "
                f"Use another {what} for another run"
            )
        with pytest.raises(IdempotencyConflict, match=r"another input\.messages, .*, input\.x0 and 11 more\. Use"):
            await rig.runner.submit("script", {f"x{n}": n for n in range(12)}, run_id="order-7")


async def test_a_run_held_elsewhere_is_waited_for_or_refused(place: Path | None) -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> str:
        inside.set()
        await leave.wait()
        return "first"

    async with Rig(place) as rig:
        other = rig.another(worker_id="other")
        going = asyncio.ensure_future(other.execute(Script(body), "r"))
        await until(inside)
        with pytest.raises(RunBusy, match=r"^run 'r' is already running in other \(since ") as caught:
            await rig.go(body, if_running="raise")
        assert caught.value.worker == "other"
        waiting = asyncio.ensure_future(rig.value(body))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        leave.set()
        assert await waiting == "first"
        assert (await going).final_output == {"value": "first"}


async def test_a_claim_that_is_refused_though_nobody_else_has_the_run_ends_execute(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = "5bd5bb05-9e0c-4ac2-a1ba-9a2be0f8a1ce"

    async def refused(writer: ClaimWriter, *args: Any, **options: Any) -> Any:
        raise LeaseLost(*writer.guard)

    async with Rig(place) as rig:
        with monkeypatch.context() as patched:
            patched.setattr(ClaimWriter, "record", refused)
            with pytest.raises(StorageCorrupt, match=f"run '{run_id}': .*no other process"):
                async with asyncio.timeout(20):
                    await rig.go(answer_in_a_step, run_id)
        assert (await rig.runner.get_run(run_id)).status == "pending"
        assert await rig.value(answer_in_a_step, run_id) == 42


async def answer_in_a_step(ctx: Any) -> Any:
    return await ctx.step("answer", answer_step)


async def test_workers_leave_an_executed_run_alone_unless_told_otherwise(place: Path | None) -> None:
    inside = asyncio.Event()

    async def hangs(ctx: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    clock = VirtualClock()
    async with Rig(place, clock, lease_ttl_seconds=60, run_timeout_seconds=1e6) as rig:
        rig.register(answer)
        tasks = []
        for run_id, recover in (("mine", "inline"), ("theirs", "worker")):
            inside.clear()
            tasks.append(asyncio.ensure_future(rig.go(hangs, run_id, recover=recover)))
            await until(inside)
        clock.advance(61)
        worker = rig.another(worker_id="w2")
        assert await worker.run_once()
        assert (await worker.wait("theirs")).final_output == {"value": 42}
        assert not await worker.run_once()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@for_each(
    ("options", "said"),
    [
        ({"if_running": "hope"}, "got 'hope'"),
        ({"recover": "never"}, "got 'never'"),
        ({"run_id": ""}, r"run_id must not be empty, got ''\. Pass None for a new run id"),
        ({"run_id": "a\0b"}, r"run_id must not contain control characters or lone surrogates, got '\\x00'"),
        ({"input_data": {"x": object()}}, r"\.x: an object is not JSON-serializable"),
        ({"input_data": [1]}, r"input_data must be a dict, got \[1\]"),
        ({"metadata": [1]}, r"metadata must be a dict, got \[1\]"),
        ({"params": [1]}, r"params must be a dict, got \[1\]"),
        ({"input_data": {"params": 3}, "params": {"x": 1}}, r"input_data\['params'\] must be a dict, got 3"),
        ({"agent": 3}, "agent must be an AgentRuntime, got 3"),
        ({"agent": Echo}, r"Pass Echo\(\)"),
    ],
)
async def test_a_bad_argument_of_execute_is_named(options: dict[str, Any], said: str) -> None:
    async with Rig() as rig:
        with pytest.raises(ValueError, match=said):
            await rig.runner.execute(**{"agent": Script(answer), **options})
        assert await rig.runner.runs() == []


async def test_an_unknown_agent_names_the_nearest() -> None:
    async with Rig() as rig:
        rig.register(answer, "report")
        with pytest.raises(
            UnknownAgent, match=r"unknown agent 'raport'\. Did you mean 'report'\? Register agents with regi"
        ):
            await rig.runner.execute("raport")
        with pytest.raises(KeyError):
            await rig.runner.execute("zzz")


# -- through the queue


async def test_submit_merges_params_as_execute_does(place: Path | None) -> None:
    async def body(ctx: Any) -> Any:
        return dict(ctx.params)

    async with Rig(place) as rig:
        rig.register(body)
        given = {"params": {"a": 1, "b": 1}}
        run_id = await rig.runner.submit("script", given, params={"b": 2}, run_id="queued")
        assert await rig.runner.submit("script", given, params={"b": 2}, run_id="queued") == run_id
        with pytest.raises(IdempotencyConflict):
            await rig.runner.submit("script", given, params={"b": 3}, run_id="queued")
        assert given == {"params": {"a": 1, "b": 1}}
        await rig.runner.run_once()
        queued = await rig.runner.wait(run_id)
        here = await rig.runner.execute("script", None, given, params={"b": 2})
        alone = await rig.runner.execute("script", await rig.runner.submit("script", params={"b": 2}), params={"b": 2})
    assert queued.final_output == here.final_output == {"value": {"a": 1, "b": 2}}
    assert alone.final_output == {"value": {"b": 2}}


async def test_submit_names_the_argument_that_is_no_mapping() -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match="params must be"):
            await rig.runner.submit("script", params=[1])  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"^input\['params'\] must be"):
            await rig.runner.submit("script", {"params": 1}, params={"a": 1})
        with pytest.raises(InvalidArgument, match=r"^input must be"):
            await rig.runner.submit("script", [1], params={"a": 1})  # type: ignore[arg-type]


async def test_a_submitted_run_is_stored_claimed_and_waited_for(place: Path | None) -> None:
    async with Rig(place) as rig:
        agent = rig.register(answer)
        run_id = await rig.runner.submit(agent, {"n": 1}, run_id="r", metadata={"m": 1}, priority=3)
        info = await rig.runner.get_run(run_id)
        assert isinstance(info, RunInfo)
        assert (info.status, info.attempt, info.generation, info.priority) == (RunStatus.PENDING, 1, 1, 3)
        assert (info.input, info.metadata, info.worker, info.reason) == ({"n": 1}, {"m": 1}, None, "")
        assert info.created_at.tzinfo is not None
        assert await rig.runner.run_once() is True
        assert await rig.runner.run_once() is False
        result = await rig.runner.wait("r", timeout=5)
        assert (result.final_output, result.run_id) == ({"value": 42}, run_id)
        info = await rig.runner.get_run("r")
        assert info.worker == "worker-1"
        assert info.started_at is not None
        assert info.ended_at is not None


async def test_a_worker_retries_through_the_queue(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, max_retries=2, retry_backoff_base=3) as rig:
        rig.register(breaks)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        info = await rig.runner.get_run("r")
        assert (info.status, info.attempt) == (RunStatus.PENDING, 2)
        assert info.scheduled_at == dt.datetime.fromtimestamp(clock.wall() + 3, dt.UTC)
        assert await rig.runner.state_store.get_run_status(str(info.run_id)) == "pending"
        assert not await rig.runner.run_once()
        clock.advance(3)
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).status == RunStatus.FAILED
        assert (await rig.runner.get_run("r")).reason == "ValueError"


async def test_priority_then_arrival_and_delays(place: Path | None) -> None:
    clock, order = VirtualClock(), list[str]()

    async def notes(ctx: Any) -> None:
        order.append(ctx.run_key)

    async with Rig(place, clock) as rig:
        rig.register(notes)
        await rig.runner.submit("script", run_id="low")
        await rig.runner.submit("script", run_id="late", delay=10, priority=99)
        await rig.runner.submit("script", run_id="high", priority=5)
        await rig.runner.submit("script", run_id="high2", priority=5)
        while await rig.runner.run_once():
            pass
        assert order == ["high", "high2", "low"]
        clock.advance(10)
        assert await rig.runner.run_once()
        assert order[-1] == "late"


@pytest.mark.parametrize("how", ["execute", "wait", "wait_elsewhere", "execute_again", "cancel"])
async def test_a_failed_run_is_named_as_its_caller_named_it(place: Path | None, how: str) -> None:
    async def fails(ctx: Any) -> None:
        raise ValueError("no luck")

    async with Rig(place) as rig:
        rig.register(fails)
        if how.startswith("execute"):
            result = await rig.runner.execute("script", "order-7")
            if how == "execute_again":
                result = await rig.another().execute("script", "order-7")
        else:
            await rig.runner.submit("script", run_id="order-7")
            if how == "cancel":
                await rig.runner.cancel("order-7")
            else:
                assert await rig.runner.run_once()
            result = await (rig.another() if how == "wait_elsewhere" else rig.runner).wait("order-7")
        assert result.run_key == "order-7"
        with pytest.raises(RunFailed, match="run 'order-7'"):
            result.raise_for_status()
        unnamed = await rig.runner.execute("script")
        assert unnamed.run_key is None
        with pytest.raises(RunFailed, match=f"^run '{unnamed.run_id}' failed: "):
            unnamed.raise_for_status()


async def test_one_idempotency_key_is_one_run(place: Path | None) -> None:
    async with Rig(place) as rig:
        first = await rig.runner.submit("script", {"n": 1}, idempotency_key="k")
        assert await rig.runner.submit("script", {"n": 1}, idempotency_key="k") == first
        with pytest.raises(IdempotencyConflict, match="idempotency key 'k'"):
            await rig.runner.submit("script", {"n": 2}, idempotency_key="k")
        assert len(await rig.runner.runs()) == 1


async def test_an_agent_nobody_knows_stays_queued(place: Path | None) -> None:
    async with Rig(place) as rig:
        await rig.runner.submit("elsewhere", run_id="r")
        rig.register(answer)
        assert not await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).status == RunStatus.PENDING
        rig.register(answer, "elsewhere")
        assert await rig.runner.run_once()


async def test_runs_are_listed_by_status_agent_and_time(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig:
        rig.register(answer)
        await rig.runner.submit("script", run_id="a")
        await rig.runner.run_once()
        clock.advance(10)
        since = clock.wall()
        await rig.runner.submit("script", run_id="b")
        await rig.runner.submit("other", run_id="c")

        async def keys(**wanted: Any) -> list[str | None]:
            return [info.run_key for info in await rig.runner.runs(**wanted)]

        assert await keys() == ["a", "b", "c"]
        assert await keys(status="succeeded") == ["a"]
        assert await keys(status=RunStatus.PENDING) == ["b", "c"]
        assert await keys(agent="other") == ["c"]
        assert await keys(since=since) == await keys(since=dt.datetime.fromtimestamp(since, dt.UTC)) == ["b", "c"]
        assert await keys(limit=1) == ["a"]
        assert await keys(limit=10**20) == ["a", "b", "c"]
        assert await keys(agent="\udcff") == []
        with pytest.raises(ValueError, match="lost"):
            await keys(status="lost")


async def test_what_is_not_stored_is_unknown(place: Path | None) -> None:
    async with Rig(place) as rig:
        runner = rig.runner
        for call in (runner.get_run, runner.wait, runner.cancel, runner.resume):
            with pytest.raises(UnknownRun, match=r"List the stored runs with runner\.runs\(\)"):
                await call("nope")
        with pytest.raises(UnknownRun):
            await runner.signal("nope", "x")
        with pytest.raises(UnknownRun):
            await anext(aiter(runner.stream("nope")))
        with pytest.raises(InvalidArgument, match="signal name must be a non-empty string, got ''"):
            await runner.signal("nope", "")
        with pytest.raises(InvalidArgument, match=r"signal name must not contain a lone surrogate, got 'go\\ud800'"):
            await runner.signal("nope", "go\ud800")
        for message_id, said in ((5, "message_id must be a non-empty string, got 5"), ("\udc00", "a lone surrogate")):
            with pytest.raises(InvalidArgument, match=said):
                await runner.signal("nope", "go", message_id=message_id)  # type: ignore[arg-type]


async def test_a_result_that_an_agent_gives_twice_is_two_results() -> None:
    done = RunResult({"done": True})

    async def body(ctx: Any) -> RunResult:
        return done

    async with Rig() as rig:
        first, second = await rig.go(body, "a"), await rig.go(body, "b")
        assert first.run_id == (await rig.runner.get_run("a")).run_id
        assert second.run_id == (await rig.runner.get_run("b")).run_id
        assert (done.status, done.run_id) == (None, None)


async def test_wait_gives_up_after_its_time() -> None:
    async with Rig() as rig:
        await rig.runner.submit("script", run_id="r")
        with pytest.raises(TimeoutError, match=r"run 'r' has not finished within 0\.01 s"):
            await rig.runner.wait("r", timeout=0.01)


async def test_waiting_for_no_time_is_a_look(place: Path | None) -> None:
    async with Rig(place) as rig:
        rig.register(answer)
        await rig.runner.submit("script", run_id="r")
        with pytest.raises(TimeoutError):
            await rig.runner.wait("r", timeout=0)
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r", timeout=0)).final_output == {"value": 42}


async def test_a_stream_replays_follows_and_ends(place: Path | None) -> None:
    leave = asyncio.Event()

    async def talks(ctx: Any) -> None:
        await ctx.emit("one", {})
        await leave.wait()
        await ctx.emit("two", {})

    async with Rig(place) as rig:
        going = asyncio.ensure_future(rig.go(talks))
        await rig.begun()
        kinds = []
        async for event in rig.runner.stream("r"):
            kinds.append(event.event_type)
            if event.event_type == "one":
                leave.set()
        assert kinds == ["run.started", "one", "two", "run.succeeded"]
        assert [event.event_type async for event in rig.runner.stream("r", 2)] == ["two", "run.succeeded"]
        assert [event async for event in rig.runner.stream("r", 99)] == []
        await going


async def test_the_pages_of_a_run_replay_follow_and_end(place: Path | None) -> None:
    leave = asyncio.Event()

    async def talks(ctx: Any) -> None:
        await ctx.emit("one", {})
        await leave.wait()
        await ctx.emit("two", {})

    async def read(since: int = 0) -> list[str]:
        kinds = []
        async for page in rig.runner.event_pages("r", since):
            kinds += [event.event_type for event in page]
            if "one" in kinds:
                leave.set()
        return kinds

    async with Rig(place) as rig:
        going = asyncio.ensure_future(rig.go(talks))
        await rig.begun()
        assert await asyncio.gather(*(read() for _ in range(5))) == [["run.started", "one", "two", "run.succeeded"]] * 5
        assert await read(2) == ["two", "run.succeeded"]
        assert await read(99) == []
        await going
        assert rig.runner.event_bus._hubs == {}
        with pytest.raises(InvalidArgument, match="since_sequence"):
            await anext(rig.runner.event_pages("r", -1))
        with pytest.raises(UnknownRun):
            await anext(rig.runner.event_pages("nope"))


async def test_a_stream_left_early_lets_go() -> None:
    async with Rig() as rig:
        rig.register(answer)
        await rig.runner.submit("script", run_id="r")
        stream = rig.runner.stream("r")
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        await rig.runner.run_once()
        assert (await first).event_type == "run.started"
        await stream.aclose()
        assert rig.runner.event_bus._hubs == {}


# -- cancelling


async def test_a_waiting_or_pending_run_is_cancelled_at_once(place: Path | None) -> None:
    async with Rig(place) as rig:
        rig.register(answer)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.cancel("r") is True
        assert await rig.runner.cancel("r") is False
        assert not await rig.runner.run_once()
        result = await rig.runner.wait("r")
        assert result.status == RunStatus.CANCELLED
        assert await rig.told() == [("run.cancelled", {})]
        assert await rig.runner.cancel("r", wait=True) == RunStatus.CANCELLED


async def test_a_running_run_and_its_children_hear_of_a_cancel(place: Path | None) -> None:
    inside, hooked = asyncio.Event(), list[str]()

    async def child(ctx: Any) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            hooked.append("child stopped")

    async with Rig(place) as rig:
        rig.register(child, "child")
        going = asyncio.ensure_future(rig.go(lambda ctx: ctx.call("child", {})))
        await until(inside)
        assert await rig.another().cancel("r", wait=True) == RunStatus.CANCELLED
        result = await going
        assert result.status == RunStatus.CANCELLED
        assert hooked == ["child stopped"]
        assert [info.status for info in await rig.runner.runs(agent="child")] == [RunStatus.CANCELLED]
        assert (await rig.told())[-1] == ("run.cancelled", {})


@pytest.mark.parametrize("landed", [False, True])
async def test_a_cancel_between_two_attempts_in_place_is_heard_at_once(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    attempts: list[int] = []

    async def body(ctx: Any) -> Any:
        attempts.append(ctx.attempt)
        raise ConnectionError("down")

    async with Rig(place, VirtualClock(), max_retries=3, retry_backoff_base=60) as rig:
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def cancelled(guard: Any, ops: Any) -> Any:
            if not any(op.name == "queue.settle" and op.args[1].renew for op in ops):
                return await commit(guard, ops)
            results = await commit(guard, ops) if landed else None
            assert await rig.runner.cancel("r")
            for _ in range(5):
                await asyncio.sleep(0.01)  # and it is heard of while nobody can heed it
            return results if landed else await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", cancelled)
        async with asyncio.timeout(10):
            assert (await rig.go(body)).status is RunStatus.CANCELLED
        assert attempts == [1]


async def test_a_cancelled_run_can_be_resumed_and_keeps_its_steps(place: Path | None) -> None:
    calls: list[int] = []
    inside = asyncio.Event()

    async def body(ctx: Any) -> int:
        await ctx.step("once", lambda: calls.append(1))
        if not inside.is_set():
            inside.set()
            await asyncio.Event().wait()
        return 7

    async with Rig(place) as rig:
        rig.register(body)
        going = asyncio.ensure_future(rig.go(body))
        await until(inside)
        assert await rig.runner.cancel("r", wait=True) == "cancelled"
        await going
        info = await rig.runner.resume("r")
        assert (info.status, info.generation, info.attempt) == (RunStatus.PENDING, 2, 1)
        assert await rig.runner.state_store.get_run_status(str(info.run_id)) == "pending"
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": 7}
        assert calls == [1]
        with pytest.raises(IllegalTransition, match="cannot resume run 'r': it has succeeded"):
            await rig.runner.resume("r")


# -- parking, poison, dead letters


async def test_a_wait_is_parked_and_goes_on_where_it_was(place: Path | None) -> None:
    clock, calls = VirtualClock(), list[str]()

    async def body(ctx: Any) -> str:
        await ctx.step("before", lambda: calls.append("before"))
        await ctx.sleep(30 * 86400)
        answer = await ctx.wait_for_signal("go")
        return f"{answer} after {len(calls)}"

    async with Rig(place, clock, park_after=0) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        info = await rig.runner.get_run("r")
        assert (info.status, info.reason) == (RunStatus.WAITING, "sleep")
        assert not await rig.runner.run_once()
        clock.advance(30 * 86400)
        assert await rig.runner.run_once()
        info = await rig.runner.get_run("r")
        assert (info.status, info.reason, info.attempt) == (RunStatus.WAITING, "signal go", 1)
        assert await rig.runner.signal("r", "go", "yes")
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": "yes after 1"}
        kinds = [kind for kind, _ in await rig.told("run.")]
        assert kinds == ["run.started", "run.resumed", "run.resumed", "run.succeeded"]


async def test_a_parent_parks_until_its_child_has_ended(place: Path | None) -> None:
    async with Rig(place, park_after=0) as rig:
        rig.register(answer, "child")

        async def body(ctx: Any) -> Any:
            return (await ctx.call("child", {})).final_output["value"]

        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        for _ in range(3):
            assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": 42}


async def test_three_crashes_without_progress_are_a_dead_letter(place: Path | None) -> None:
    clock, alive = VirtualClock(), list[str]()

    async def hangs(ctx: Any) -> None:
        alive.append(str(ctx.attempt))
        if len(alive) < 4:
            await asyncio.Event().wait()

    async with Rig(place, clock, max_retries=9, run_timeout_seconds=1e6) as rig:
        rig.register(hangs)
        await rig.runner.submit("script", run_id="r")
        zombies = []
        for n in range(3):
            zombies.append(asyncio.ensure_future(rig.another(worker_id=f"w{n}").run_once()))
            await soon(lambda n=n: len(alive) == n + 1)  # type: ignore[misc]
            clock.advance(61)
        assert await rig.runner.run_once()
        assert alive == ["1", "2", "3"]
        result = await rig.runner.wait("r")
        assert result.error is not None
        assert (result.status, result.error.type) == (RunStatus.DEAD, "Poisoned")
        assert [info.run_key for info in await rig.runner.runs(status="dead")] == ["r"]
        assert (await rig.told())[-1][0] == "run.failed"
        await rig.runner.requeue("r")
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).status == RunStatus.SUCCEEDED
        for zombie in zombies:
            zombie.cancel()
        await asyncio.wait(zombies)


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_max_crashes_is_the_number_of_crashes_that_makes_a_run_dead(limit: int) -> None:
    clock = VirtualClock()

    async def returns(ctx: Any) -> int:
        return 1

    async with Rig(None, clock, max_crashes=limit) as rig:
        rig.register(returns)
        for run, crashes in (("dead", limit), ("alive", limit - 1)):
            await rig.runner.submit("script", run_id=run)
            for _ in range(crashes):
                assert await rig.runner.queue.claim_rows("died", 1, limit=1)
                clock.advance(2)
            assert await rig.runner.run_once()
        dead, alive = await rig.runner.wait("dead"), await rig.runner.wait("alive")
        assert dead.error is not None
        assert (dead.status, dead.error.type) == (RunStatus.DEAD, "Poisoned")
        assert dead.error.message == f"{limit} crash{'es' * (limit > 1)} in a row without progress"
        assert alive.status == RunStatus.SUCCEEDED


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_max_crashes_must_be_an_integer(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^max_crashes must be an integer of at least 1, got"):
        RunnerConfig(max_crashes=value)
    with pytest.raises(InvalidArgument, match=r"^max_crashes must be an integer of at least 1, got"):
        configure(max_crashes=value)


async def test_a_crash_before_a_park_is_not_one_of_those_in_a_row_after_it(place: Path | None) -> None:
    clock, lives = VirtualClock(), list[str]()

    async def body(ctx: Any) -> str:
        lives.append("begun")
        if len(lives) in (1, 3, 4):
            await asyncio.Event().wait()
        await ctx.step("a", answer_step)
        await ctx.wait_for_signal("go")
        return "through"

    async with Rig(place, clock, max_retries=9, park_after=0, run_timeout_seconds=1e6) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        zombies = []
        for life in range(1, 5):
            working = asyncio.ensure_future(rig.another(worker_id=f"w{life}").run_once())
            await soon(lambda life=life: len(lives) == life)  # type: ignore[misc]
            if life == 2:  # it gets through to the signal, and parks
                assert await working
                await rig.runner.signal("r", "go")
            else:
                zombies.append(working)
                clock.advance(61)
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": "through"}
        for zombie in zombies:
            zombie.cancel()
        await asyncio.wait(zombies)


async def answer_step() -> int:
    return 42


async def test_progress_between_crashes_keeps_a_run_alive(place: Path | None) -> None:
    """A zombie loses each time to the next worker, after one more step."""
    clock, inside = VirtualClock(), asyncio.Event()

    async def body(ctx: Any) -> int:
        for n in range(ctx.attempt):
            await ctx.step("s", lambda: 1, key=str(n))
        if ctx.attempt < 5:
            inside.set()
            await asyncio.Event().wait()
        return int(ctx.attempt)

    async with Rig(place, clock, max_retries=9, run_timeout_seconds=1e6) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        zombies = []
        for n in range(5):
            inside.clear()
            zombies.append(asyncio.ensure_future(rig.another(worker_id=f"w{n}").run_once()))
            await soon(lambda: inside.is_set() or zombies[-1].done())
            clock.advance(61)
        assert (await rig.runner.wait("r", timeout=5)).final_output == {"value": 5}
        for zombie in zombies:
            zombie.cancel()
        await asyncio.wait(zombies)


# -- retention


async def test_vacuum_gives_space_back_where_that_is_quick_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(ctx: Any) -> int:
        return 1

    clock = VirtualClock()
    async with Rig(tmp_path / "a.db", clock) as rig:
        asked: list[dict[str, Any]] = []

        async def compact(**options: Any) -> None:
            asked.append(options)

        monkeypatch.setattr(rig.runner.queue.commits, "compact", compact)
        # By itself without an argument: a store of somebody's own may take none.
        wanted: list[tuple[bool | None, list[dict[str, Any]]]] = [(None, [{}]), (False, []), (True, [{"always": True}])]
        for answer, heard in wanted:
            asked.clear()
            await rig.value(body, f"{answer}")
            clock.advance(1)
            assert await rig.runner.vacuum({"succeeded": 0}, compact=answer) == 1
            assert asked == heard
            await rig.runner.vacuum({"succeeded": 0}, compact=answer)
            assert asked == heard * (1 + (answer is True)), "of what was deleted before, too, where it is asked for"


async def test_vacuum_forgets_what_is_old_and_ended(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, retention={"succeeded": 100}) as rig:
        rig.register(answer)
        await rig.go(answer, "old")
        clock.advance(200)
        await rig.go(answer, "new")
        await rig.go(breaks, "failed")
        await rig.runner.submit("script", run_id="live")
        clock.advance(50)
        assert await rig.runner.vacuum() == 1
        assert [info.run_key for info in await rig.runner.runs()] == ["new", "failed", "live"]
        assert await rig.told(run_id="old") == []
        assert await rig.runner.vacuum({"failed": 0, "succeeded": 0}) == 2
        assert await rig.runner.vacuum() == 0
        with pytest.raises(InvalidArgument, match="retention: unknown final status 'pending'"):
            await rig.runner.vacuum({"pending": 0})
        # A forgotten id is a new run.
        assert await rig.value(answer, "old") == 42


# -- setting up


async def test_open_takes_a_path_a_url_and_memory(tmp_path: Path) -> None:
    for where in (tmp_path / "a.db", f"sqlite:///{tmp_path / 'b.db'}", "memory://"):
        async with AgentRunner.open(where, config=RunnerConfig(worker_id="w"), registry=Registry()) as runner:
            assert (await runner.execute(Script(answer), "r")).final_output == {"value": 42}
            assert runner.backends.durable is (where != "memory://")
    assert (tmp_path / "a.db").exists()
    assert (tmp_path / "b.db").exists()
    async with AgentRunner.open(tmp_path / "a.db") as runner:
        assert (await runner.get_run("r")).status == RunStatus.SUCCEEDED
    with pytest.raises(InvalidArgument, match="mysql://x"):
        AgentRunner.open("mysql://x")


async def test_the_memory_default_says_once_that_nothing_lasts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner_core, "_warned", set())
    caplog.set_level(logging.INFO, "agent_runtime_core")
    await AgentRunner.open(tmp_path / "a.db").close()
    assert "stored in memory" not in caplog.text
    for _ in range(2):
        await AgentRunner().close()
    assert caplog.text.count("runs are stored in memory and end with this process") == 1


async def test_settings_come_from_the_configuration() -> None:
    configure(run_timeout_seconds=7, max_retries=2, lease_ttl_seconds=9, heartbeat_interval_seconds=5)
    runner = AgentRunner()
    config = runner.config
    assert (config.run_timeout_seconds, config.max_retries, config.lease_ttl_seconds) == (7, 2, 9)
    assert config.heartbeat_interval == 3
    assert runner.queue.max_retries == 2
    await runner.close()
    queue = InMemoryQueue()
    runner = AgentRunner(queue)
    assert runner.queue is queue
    assert runner.state_store.commits is queue.engine
    await runner.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("run_id", "badly formed"),
        ("status", "succeedef"),
        ("created_at", 1e300),
        ("due_at", -1e300),
        ("ended_at", float("inf")),
        ("input", "{"),
        ("metadata", "[]"),
        ("parent_id", "nobody"),
    ],
)
def test_a_row_that_no_run_can_have_is_told_whatever_store_it_is_of(column: str, value: Any) -> None:
    whole = RunRow("5bd5bb05-9e0c-4ac2-a1ba-9a2be0f8a1ce", "agent")
    assert RunInfo.of(whole).agent_key == QueuedRun.of(whole).agent_key
    row = whole.with_values(**{column: value})
    kinds: list[Callable[[RunRow], object]] = [RunInfo.of]
    if column in ("run_id", "created_at"):
        kinds.append(QueuedRun.of)
    elif column in ("input", "metadata"):
        kinds.append(lambda row: getattr(QueuedRun.of(row), column))
    for made in kinds:
        with pytest.raises(StorageCorrupt, match=f"{row.run_id}.*: {column} .*backup"):
            made(row)


def test_an_input_of_a_type_that_is_not_registered_here_is_no_damage() -> None:
    row = RunRow("5bd5bb05-9e0c-4ac2-a1ba-9a2be0f8a1ce", "agent", input='{"a":{"$":"unheard.of","v":1}}')
    assert RunInfo.of(row).input == {"a": {"$": "unheard.of", "v": 1}}
    with pytest.raises(UnserialisableResult):
        _ = QueuedRun.of(row).input


def test_the_defaults_of_a_runner_config() -> None:
    config = RunnerConfig()
    assert (config.worker_id, config.run_timeout_seconds, config.heartbeat_interval_seconds) == ("worker-1", 300, 30)
    assert (config.lease_ttl_seconds, config.max_retries) == (60, 3)
    assert (config.retry_backoff_base, config.retry_backoff_max) == (2, 300)
    assert (config.park_after, config.heartbeat_interval) == (5, 20)


@for_each(
    ("options", "said"),
    [
        ({"worker_id": ""}, " must be a string of 1 to 512 characters, got ''"),
        ({"worker_id": 3}, "worker_id must be a string of 1 to 512 characters, got 3"),
        ({"run_timeout_seconds": 0}, "run_timeout_seconds.*got 0"),
        ({"max_unsent_bytes": 0}, "max_unsent_bytes.*got 0"),
        ({"heartbeat_interval_seconds": -1}, "heartbeat_interval_seconds.*got -1"),
        ({"lease_ttl_seconds": float("inf")}, "lease_ttl_seconds.*got inf"),
        ({"lease_ttl_seconds": True}, "lease_ttl_seconds.*got True"),
        ({"retry_backoff_base": -2}, "retry_backoff_base.*got -2"),
        ({"retry_backoff_max": "x"}, "retry_backoff_max.*got 'x'"),
        ({"park_after": float("nan")}, "park_after.*got nan"),
        ({"grace_seconds": -1}, "grace_seconds.*got -1"),
        ({"max_retries": 0}, "max_retries.*got 0"),
        ({"max_retries": True}, "got True"),
        ({"max_retries": 1.0}, r"got 1\.0"),
        ({"retention": {"running": 1}}, "retention: unknown final status 'running'"),
        ({"retention": {"failed": -1}}, "retention: failed.*got -1"),
        ({"retention": {"failed": "1"}}, "retention: failed.*got '1'"),
        ({"retention": 60}, "retention.*got 60"),
    ],
)
def test_a_bad_setting_of_a_runner_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        RunnerConfig(**options)


def test_an_unknown_setting_of_a_runner_names_the_nearest() -> None:
    with pytest.raises(
        UnknownSetting, match=r"unknown setting 'lease_seconds'\. Did you mean 'lease_ttl_seconds'\?"
    ) as caught:
        RunnerConfig(lease_seconds=1)  # type: ignore[call-arg]
    assert isinstance(caught.value, TypeError)
    assert [*inspect.signature(RunnerConfig).parameters] == [each.name for each in fields(RunnerConfig)]


@for_each(
    ("options", "said"),
    [
        ({"priority": 1.5}, r"got 1\.5"),
        ({"priority": 2**31}, "got 2147483648"),
        ({"delay": -1}, r"delay must be from 0 to 100,000,000,000 seconds, got -1"),
        ({"expires_in": float("nan")}, r"expires_in must be from 0 to 100,000,000,000 seconds,"),
        (
            {"deadline": dt.datetime(2026, 1, 1)},  # noqa: DTZ001
            r"deadline must be timezone-aware, got 2026-01-01 00:00\. Use datetime\.now\(",
        ),
        ({"deadline": float("inf")}, r"deadline must be from 0 to 100,000,000,000 seconds, got"),
        ({"idempotency_key": ""}, " must be a string of 1 to 512 characters, got ''"),
        ({"idempotency_key": "x" * 513}, r" must have at most 512 characters, got 513\. Pass a hash of the string"),
        ({"idempotency_key": b"k"}, "idempotency_key must be a string of 1 to 512 characters, got b'k'"),
        ({"idempotency_key": "a\0b"}, "idempotency_key must not contain control characters or lone surrogates,"),
        ({"idempotency_key": "a\ud800"}, r"contain control characters or lone surrogates, got '\\ud800' at"),
        ({"run_id": "x" * 513}, r" must have at most 512 characters, got 513\. Pass a hash of the string"),
        ({"run_id": 3}, r"run_id must be a UUID or a string, got 3\. Pass str\(run_id\)"),
        ({"input": [1]}, r"input must be a dict, got \[1\]"),
        ({"input": []}, r"input must be a dict, got \[\]"),
        ({"metadata": [1]}, r"metadata must be a dict, got \[1\]"),
        ({"agent_key": None}, r"get_runtime\(key\)"),
        ({"agent_key": ""}, " must be a string of 1 to 512 characters, got ''"),
        ({"agent_key": "a\udfff"}, r"contain control characters or lone surrogates, got '\\udfff' at"),
        ({"parent_run_id": ""}, r"run_id must not be empty, got ''\. Pass None for a new run id"),
    ],
)
async def test_a_bad_argument_of_submit_is_named(options: dict[str, Any], said: str) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match=said):
            await rig.runner.submit(**{"agent_key": "script", **options})
        assert await rig.runner.runs() == []


@for_each(
    ("verb", "options", "said"),
    [
        ("runs", {"status": "done"}, "Known: cancelled, dead, failed, pending, running and 3 more"),
        ("runs", {"since": "today"}, r"from 0 to 100,000,000,000 seconds, got"),
        ("runs", {"since": dt.datetime(2026, 1, 1)}, "since must be timezone-aware, got 2026-01-01 00:00"),  # noqa: DTZ001
        ("runs", {"agent": 3}, "got 3"),
        ("runs", {"limit": -1}, "limit must be an integer of at least 1"),
        ("wait", {"run_id": "r", "timeout": "1"}, r"from 0 to 100,000,000,000 seconds, got"),
        ("wait", {"run_id": "r", "timeout": -1}, "timeout must be from 0 to 100,000,000,000 seconds, got -1"),
        ("run_loop", {"concurrency": 1.5}, r"concurrency must be an integer of at least 1, got 1\.5"),
        ("run_loop", {"concurrency": "4"}, "concurrency must be an integer of at least 1, got '4'"),
        ("run_loop", {"poll_interval": None}, "got None"),
        ("vacuum", {"retention": {"failed": True}}, "got True"),
    ],
)
async def test_a_bad_argument_of_a_verb_is_named(verb: str, options: dict[str, Any], said: str) -> None:
    async with Rig() as rig:
        await rig.go(answer)
        with pytest.raises(InvalidArgument, match=said):
            await getattr(rig.runner, verb)(**options)


async def test_messages_that_are_no_list_are_refused_and_nothing_is_stored(place: Path | None) -> None:
    async with Rig(place) as rig:
        for doing in (rig.runner.submit("script", {"messages": "text"}), rig.go(answer, input_data={"messages": "x"})):
            with pytest.raises(InvalidArgument, match="a list of dicts"):
                await doing
        assert await rig.runner.runs() == []


@pytest.mark.parametrize("key", ["", 3])
async def test_a_key_of_a_step_that_is_no_text_is_refused(place: Path | None, key: Any) -> None:
    async def body(ctx: Any) -> None:
        await ctx.step("a", answer, None, key=key)

    async with Rig(place) as rig:
        error = (await rig.go(body)).error
        assert error is not None
        assert (error.type, "must be a non-empty string" in error.message) == ("InvalidArgument", True)
        assert [record.name for record in await rig.records() if record.kind == "done"] == []


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(
        InvalidArgument, match=r"config must be a RunnerConfig, got a RuntimeConfig\. Write RunnerConfig\("
    ):
        AgentRunner(config=configure())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"tools must be a ToolRegistry, got \[\]"):
        AgentRunner(tools=[])  # type: ignore[arg-type]


@for_each(
    ("options", "said"),
    [
        # What get_runtime(key) gives where nobody registered that key.
        ({"agent": None}, r"get_runtime\(key\)"),
        ({"agent": Echo}, r"Pass Echo\(\)"),
        ({"agent": 7}, "agent must be an AgentRuntime, got"),
        ({"input_data": [1]}, r"input_data must be a dict, got \[1\]"),
        ({"input_data": {"messages": "text"}}, r"input_data\['messages'\] must be a list of dicts, got 'text'"),
        ({"input_data": {"messages": {"role": "user"}}}, "a list of dicts.* got {'role': 'user'}"),
        ({"input_data": {"messages": 7}}, "a list of dicts.* got 7"),
        ({"input_data": {"params": 7}, "params": {"a": 1}}, r"input_data\['params'\] must be a dict, got 7"),
        ({"params": "a"}, "params must be a dict, got 'a'"),
        ({"metadata": "a"}, "metadata must be a dict, got 'a'"),
    ],
)
async def test_what_execute_cannot_run_is_named(options: dict[str, Any], said: str) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match=said):
            await rig.runner.execute(**{"agent": Echo(), **options})
        assert await rig.runner.runs() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"status": "done"}, "Known: cancelled, dead, failed, pending, running and 3 more"),
        ({"status": ["pending", ["dead"]]}, "unknown status"),
        ({"agent": 7}, "got 7"),
        ({"since": "yesterday"}, r"from 0 to 100,000,000,000 seconds, got"),
        ({"limit": 0}, "limit must be an integer of at least 1, got 0"),
        ({"limit": "5"}, "limit must be an integer of at least 1, got '5'"),
    ],
)
async def test_a_bad_argument_of_runs_is_named(options: dict[str, Any], said: str) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match=said):
            await rig.runner.runs(**options)


@pytest.mark.parametrize("since", [-1, None, "0", 1.5])
async def test_a_stream_begins_at_a_sequence(since: Any) -> None:
    async with Rig() as rig:
        await rig.value(answer)
        with pytest.raises(InvalidArgument, match="since_sequence"):
            await anext(rig.runner.stream("r", since))


@pytest.mark.parametrize(
    ("name", "said"), [("queue", "RunQueue"), ("event_bus", "EventBus"), ("state_store", "StateStore")]
)
def test_what_is_no_backend_is_told_what_it_lacks(name: str, said: str) -> None:
    class Legacy:
        async def close(self) -> None: ...

    for wrong in ("sqlite", Legacy()):
        with pytest.raises(InvalidArgument, match=f"{name} must be an? {said}"):
            AgentRunner(**{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["get_run", "wait", "cancel", "resume", "discard", "fork"])
async def test_no_id_is_told_as_that(verb: str) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match="run_id must be a UUID or a string, got None"):
            await getattr(rig.runner, verb)(None)
        with pytest.raises(InvalidArgument, match="got None"):
            await rig.runner.signal(None, "go")  # type: ignore[arg-type]
        with pytest.raises(UnknownRun, match="run 'nobody' not found in memory"):
            await getattr(rig.runner, verb)("nobody")


@pytest.mark.parametrize("by_worker", [False, True])
async def test_a_run_that_would_execute_itself_is_busy(by_worker: bool) -> None:
    async def body(ctx: Any) -> str:
        try:
            await rig.runner.execute("other", "other")
        except RunBusy as busy:
            return str(busy)
        return ""

    async def other(ctx: Any) -> Any:
        return (await rig.runner.execute("script", "r")).final_output

    async with Rig() as rig:
        rig.register(body)
        rig.register(other, "other")
        if by_worker:
            await rig.runner.submit("script", run_id="r")
            await rig.runner.run_once()
        result = await rig.runner.execute("script", "r")
        assert result.final_output is not None
        assert "'r' is already running in worker-1" in (await rig.runner.wait("other")).error.message  # type: ignore[union-attr]


async def test_a_transaction_says_where_it_works() -> None:
    async with Rig() as rig:
        result = await rig.go(lambda ctx: ctx.transaction("t", lambda conn: 1))
        assert result.error is not None
        assert (result.error.type, result.error.retriable) == (NotSupported.__name__, False)


async def test_a_runner_that_was_closed_is_not_used_again(tmp_path: Path) -> None:
    runner = AgentRunner.open(tmp_path / "a.db")
    await runner.close()
    await runner.close()
    with pytest.raises(Exception, match="closed"):
        await runner.submit("script")


async def test_a_stream_whose_queue_does_not_answer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watcher, "CHECK_INTERVAL", 0)
    async with Rig() as rig:
        await rig.runner.submit("script", run_id="r")
        await rig.runner.cancel("r")
        read = rig.runner.queue.engine.read  # type: ignore[attr-defined]
        looks = 0

        async def cut(fn: Any, *args: Any) -> Any:
            nonlocal looks
            looks += 1
            if 1 < looks < 5:
                raise StorageBusy("no answer")
            return await read(fn, *args)

        rig.runner.queue.read = lambda what, *args: cut(rig.runner.queue.reads[what], *args)  # type: ignore[attr-defined, method-assign]
        assert [event.event_type async for event in rig.runner.stream("r")] == ["run.cancelled"]
        assert looks == 5


async def test_no_heartbeat_comes_after_the_end() -> None:
    """On a bus of its own, whose fence stands, nothing else would refuse it."""
    engines = [MemoryEngine() for _ in range(3)]
    backends = Backends(
        InMemoryQueue(engine=engines[0]), InMemoryEventBus(engine=engines[1]), InMemoryStateStore(engine=engines[2])
    )
    drives: list[RunExecution] = []

    class Watched(AgentRunner):
        def new_execution(self, *args: Any, **options: Any) -> RunExecution:
            drives.append(super().new_execution(*args, **options))
            return drives[0]

    runner = Watched(*backends)
    settle = engines[0].commit

    async def beats_first(guard: Any, ops: Any) -> Any:
        if any(op.name == "queue.settle" for op in ops):
            drives[0].claim.publish_heartbeat()
        return await settle(guard, ops)

    engines[0].commit = beats_first  # type: ignore[method-assign]
    await runner.execute(Script(answer), "r")
    kinds = [event.event_type for event in await backends.bus.get_events("r")]
    assert kinds == ["run.started", "run.succeeded"]
    await runner.close()


async def test_a_long_run_tells_that_it_lives(place: Path | None) -> None:
    class Long(AgentRuntime):
        key = "long"

        async def run(self, ctx: RunContext) -> RunResult:
            async for event in runner.event_bus.subscribe(ctx.run_id, 0):
                if event.event_type == "run.heartbeat":
                    return RunResult(final_output={"told": sorted(event.payload)})
            raise AssertionError

    config = RunnerConfig(heartbeat_interval_seconds=0.03, lease_ttl_seconds=5)
    async with AgentRunner.open(place or "memory://", config=config) as runner:
        result = await runner.execute(Long(), "r")
        assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"told": ["timestamp"]})


async def test_each_attempt_of_execute_has_a_claim_of_its_own(tmp_path: Path) -> None:
    """So that what an attempt asked for, and got no answer to, cannot land in a later one."""
    writers: list[ClaimWriter] = []

    async def body(ctx: Any) -> int:
        writers.append(ctx.journal.writer)
        await ctx.step("one", lambda: 1)
        if len(writers) < 3:
            raise OSError("not yet")
        return len(writers)

    async with Rig(tmp_path / "runs.db", max_retries=3) as rig:
        assert await rig.value(body) == 3
        claims = [writer.claim_id for writer in writers]
        assert claims == sorted(set(claims)), "each above the one before"
        assert {record.claim_id for record in await rig.records()} == set(claims)
        done = [record for record in await rig.records() if record.kind == "done"]
        assert [record.name for record in done] == ["one"]
        late = Op("state.status", (writers[0].run_id, "running", 1.0))
        with pytest.raises(LeaseLost):
            await writers[0].state.commits.commit(Guard(writers[0].run_id, claims[0]), [late])
        assert (await rig.runner.get_run("r")).status == RunStatus.SUCCEEDED


async def test_a_run_that_executes_again_is_still_kept_alive_and_still_heard_of(tmp_path: Path) -> None:
    again = asyncio.Event()

    async def body(ctx: Any) -> int:
        if ctx.attempt == 1:
            raise OSError("not yet")
        again.set()
        await ctx.sleep(3600)
        return 1

    async with Rig(tmp_path / "runs.db", Clock(), max_retries=3, lease_ttl_seconds=0.6, retry_backoff_base=0) as rig:
        task = asyncio.ensure_future(rig.go(body))
        await until(again)
        row = await rig.runner.queue.require(str((await rig.runner.get_run("r")).run_id))
        async with asyncio.timeout(10):
            while (await rig.runner.queue.require(row.run_id)).lease_until <= row.lease_until:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await rig.runner.cancel("r")
        assert (await task).status == RunStatus.CANCELLED


async def test_a_trace_is_not_told_again_what_a_resumed_run_emits_again(place: Path | None) -> None:
    heard: list[str] = []

    class Heard(TraceSink):
        def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
            heard.append(event_type)

    async def body(ctx: Any) -> Any:
        await ctx.step("one", lambda: 1)
        await ctx.emit("mine", {"n": 1})
        await ctx.checkpoint({"n": 1})
        got = await ctx.wait_for_signal("go")
        await ctx.emit("mine.after", {"n": 2})
        return got

    agents, config = Registry(), RunnerConfig(park_after=0.0)
    agents.register(Script(body))
    url = "memory://" if place is None else place
    async with AgentRunner.open(url, config=config, registry=agents, trace_sinks=[Heard()]) as runner:
        run_id = await runner.submit("script")
        await runner.run_once()
        await runner.signal(run_id, "go", 1)
        await runner.run_once()
        stored = [event.event_type for event in await runner.event_bus.get_events(run_id)]
    assert heard == stored
    assert stored.count("mine") == stored.count("state.checkpoint") == 1
