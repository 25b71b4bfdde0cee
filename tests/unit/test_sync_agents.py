"""Agents whose `run` is a plain function: it runs in a thread, and its context blocks."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import inspect
import logging
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    ErrorInfo,
    RunContext,
    RunResult,
    RunStatus,
    StepExecutor,
    SyncRunContext,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
    create_test_context,
    open_run_sync,
    run_agent_test,
)
from agent_runtime_core._core import timeouts
from agent_runtime_core._core.clock import Clock
from agent_runtime_core._engines.base import Op
from agent_runtime_core._execution.context import Context
from agent_runtime_core.errors import InvalidArgument, PortalMisuse, StepExecutionError, StorageClosed, WaitTimeout
from agent_runtime_core.portal import call, from_thread
from agent_runtime_core.queue.records import RunFilter
from agent_runtime_core.steps import Step
from agent_runtime_core.testing import MockLLMClient, crash_everywhere
from tests.support.runs import Rig, Script, soon
from tests.support.scripted_model import Scripted, asks
from tests.support.scripted_model import call as model_call

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="")
WAIT = 10.0  # seconds a thread of a test may take for anything


class Plain(AgentRuntime):
    """An agent that does what a plain function says."""

    key = "plain"

    def __init__(self, body: Callable[[SyncRunContext], Any], key: str = "plain") -> None:
        self.body = body
        self.key = key

    def run(self, ctx: SyncRunContext) -> RunResult:
        value = self.body(ctx)
        return value if isinstance(value, RunResult) else RunResult({"value": value})


async def go(rig: Rig, body: Callable[[SyncRunContext], Any], run_id: str = "r", **options: Any) -> RunResult:
    return await rig.runner.execute(Plain(body), run_id, **options)


async def value(rig: Rig, body: Callable[[SyncRunContext], Any], run_id: str = "r", **options: Any) -> Any:
    return (await go(rig, body, run_id, **options)).raise_for_status().final_output["value"]


class Gate:
    """Where a thread of a test waits until the test lets it continue."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT)


# -- the context


def _methods(cls: type) -> dict[str, Any]:
    return {name: each for name, each in vars(cls).items() if inspect.isfunction(each) and not name.startswith("_")}


def test_the_blocking_context_has_every_method_of_the_context_with_its_arguments() -> None:
    blocking, async_form = _methods(SyncRunContext), _methods(Context)
    assert async_form.keys() - blocking.keys() == set()
    assert blocking.keys() - async_form.keys() <= {"call_on_loop", "for_thread", "runs_on", "messages"}
    for name, method in async_form.items():
        theirs, ours = inspect.signature(method), inspect.signature(blocking[name])
        assert list(ours.parameters) == list(theirs.parameters), name
        for parameter in theirs.parameters.values():
            mine = ours.parameters[parameter.name]
            assert (mine.kind, mine.default) == (parameter.kind, parameter.default), (name, parameter)
        assert not inspect.iscoroutinefunction(blocking[name])
        if name != "recorded_value":
            assert ours.return_annotation == theirs.return_annotation


def test_the_blocking_context_has_every_member_of_the_protocol_with_its_text() -> None:
    for name, member in vars(RunContext).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert getattr(SyncRunContext, name).__doc__ == member.__doc__, name


async def test_a_plain_run_uses_all_of_its_context(place: Path | None) -> None:
    def body(ctx: SyncRunContext) -> Any:
        async def add(a: int, b: int) -> int:
            return a + b

        made: dict[str, Any] = {"sum": ctx.step("add", add, 1, 2), "plain": ctx.step("plain", lambda: 7)}
        ctx.emit("note", {"n": 1})
        ctx.checkpoint({"at": 3})
        made["state"] = ctx.get_state()
        ctx.sleep(0.5)
        made["signal"] = ctx.wait_for_signal("go")
        made["approved"] = ctx.approve("deploy", {"to": "production"})
        made["child"] = ctx.call(Script(_greets, "child"), {"params": {"name": "Ada"}}).final_output
        made["again"] = [0 <= ctx.random() < 1, ctx.uuid4().version]
        made["made"] = ctx.recorded_value("made", lambda: 5)
        made["params"] = [ctx.params, ctx.input["params"], ctx.attempt, ctx.cancelled(), ctx.step_id]
        return made

    async with Rig(place) as rig:
        await rig.runner.submit("plain", {"params": {"a": 1}}, run_id="r")
        await rig.runner.signal("r", "go", "now")
        await rig.runner.approve("r", "deploy", {"ok": True})
        made = await value(rig, body, params={"a": 1})
        assert made == {
            "sum": 3, "plain": 7, "state": {"at": 3}, "signal": "now", "approved": {"ok": True},
            "child": {"value": "Hello, Ada"}, "again": [True, 4], "made": 5,
            "params": [{"a": 1}, {"a": 1}, 1, False, None],
        }  # fmt: skip
        assert await rig.told("note") == [("note", {"n": 1})]
        assert await value(rig, lambda ctx: 1 / 0, params={"a": 1}) == made, (
            "a run that succeeded is not executed again"
        )


async def _greets(ctx: Any) -> str:
    return f"Hello, {ctx.params['name']}"


async def test_a_transaction_of_a_plain_run_commits_with_its_record(tmp_path: Path) -> None:
    def insert(conn: Any, n: int) -> int:
        conn.execute("CREATE TABLE IF NOT EXISTS mine (n INTEGER)")
        conn.execute("INSERT INTO mine VALUES (?)", (n,))
        return n

    async with Rig(tmp_path / "runs.db") as rig:
        assert await value(rig, lambda ctx: ctx.transaction("insert", insert, 4)) == 4


async def test_each_plain_run_has_a_thread_so_that_many_wait_at_once() -> None:
    barrier = threading.Barrier(20)

    def body(ctx: SyncRunContext) -> bool:
        barrier.wait(WAIT)
        return threading.current_thread().daemon

    async with Rig() as rig:
        assert await asyncio.gather(*(value(rig, body, f"r{i}") for i in range(20))) == [True] * 20


async def test_context_variables_are_seen_in_the_thread_and_in_what_it_calls(place: Path | None) -> None:
    async def name() -> str:
        return NAME.get()

    def body(ctx: SyncRunContext) -> list[Any]:
        before = NAME.get()
        NAME.set("of the run")
        inside = ctx.step("outer", lambda: [ctx.step_id is not None, ctx.step("inner", name)])
        return [before, ctx.step("a", name), ctx.step("b", NAME.get), inside]

    async with Rig(place) as rig:
        token = NAME.set("of the caller")
        try:
            made = await value(rig, body)
        finally:
            NAME.reset(token)
        assert made == ["of the caller", "of the run", "of the run", [True, "of the run"]]


async def test_functions_with_a_context_parameter_get_the_form_that_fits(place: Path | None) -> None:
    def plain(ctx: SyncRunContext, n: int) -> list[Any]:
        ctx.emit("plain", {"n": n})
        return [type(ctx).__name__, n]

    async def on_the_loop(n: int, ctx: RunContext) -> list[Any]:
        await ctx.emit("async", {"n": n})
        return [type(ctx).__name__, n]

    async with Rig(place) as rig:
        made = await value(rig, lambda ctx: [ctx.step("a", plain, 1), ctx.step("b", on_the_loop, 2)])
        assert made == [["SyncRunContext", 1], ["Context", 2]]
        assert [kind for kind, _ in await rig.told() if kind in ("plain", "async")] == ["plain", "async"]


async def test_a_plain_function_of_an_async_agent_gets_the_context_that_it_names(place: Path | None) -> None:
    """With the other form, its calls would return coroutines that no code awaits."""

    def work(ctx: SyncRunContext, n: int) -> int:
        ctx.emit("working", {"n": n})
        return int(ctx.step("double", lambda: 2 * n))

    async def body(ctx: Any) -> RunResult:
        tools = ToolRegistry()
        tools.register(Tool.from_function(work))
        assert [*tools.to_openai_format()[0]["function"]["parameters"]["properties"]] == ["n"]
        listed = await StepExecutor(ctx).run([Step("listed", lambda ctx, state: 4)])
        return RunResult(
            {"step": await ctx.step("s", work, 1), "tool": await tools.execute("work", {"n": 3}, ctx), **listed}
        )

    async with Rig(place) as rig:
        result = await rig.runner.execute(Script(body), "r")
        assert result.final_output == {"step": 2, "tool": 6, "listed": 4}, result.error
        assert [payload["n"] for kind, payload in await rig.told() if kind == "working"] == [1, 3]
    assert (await run_agent_test(Script(body), create_test_context("hello"))).final_output["tool"] == 6


async def test_step_lists_and_maps_run_in_a_plain_run(place: Path | None) -> None:
    calls: list[str] = []

    def load(ctx: SyncRunContext, state: Any) -> list[int]:
        ctx.emit("loading", {})
        calls.append("load")
        return [1, 2, 3]

    async def total(ctx: RunContext, state: Any) -> int:
        calls.append("total")
        return sum(state.results["load"])

    def body(ctx: SyncRunContext) -> Any:
        executor = StepExecutor(ctx)
        results = executor.run_sync([Step("load", load), Step("total", total)])
        return [results, executor.map_sync("double", lambda n: 2 * n, results["load"]), from_thread(twice, ctx)]

    async def twice(ctx: SyncRunContext) -> int:
        return 2 * int(await ctx.async_context.step("six", lambda: 6))

    async with Rig(place, max_retries=2) as rig:
        assert await value(rig, _failing_first(body)) == [{"load": [1, 2, 3], "total": 6}, [2, 4, 6], 12]
        assert calls == ["load", "total"]


def _failing_first(body: Callable[[SyncRunContext], Any]) -> Callable[[SyncRunContext], Any]:
    def run(ctx: SyncRunContext) -> Any:
        made = body(ctx)
        if ctx.attempt == 1:
            raise ConnectionError("cut")
        return made

    return run


async def test_a_retried_plain_run_uses_its_saved_results(place: Path | None) -> None:
    calls: list[str] = []

    def body(ctx: SyncRunContext) -> list[Any]:
        return [ctx.step("s", lambda: calls.append("s")), ctx.now().isoformat(), ctx.random(), str(ctx.uuid4())]

    made: list[Any] = []

    def noted(ctx: SyncRunContext) -> Any:
        made.append(body(ctx))
        return made[-1]

    async with Rig(place, max_retries=2) as rig:
        await value(rig, _failing_first(noted))
        assert calls == ["s"]
        assert made[0] == made[1]


# -- errors


async def test_errors_keep_their_class_and_their_traceback(place: Path | None) -> None:
    def fails() -> None:
        raise ConnectionError("no network")

    def body(ctx: SyncRunContext) -> Any:
        with pytest.raises(StepExecutionError) as failed:
            ctx.step("fails", fails)
        assert isinstance(failed.value.__cause__, ConnectionError)
        frames = [frame.name for frame in traceback.extract_tb(failed.value.__cause__.__traceback__)]
        assert frames[-1] == "fails"
        with pytest.raises(WaitTimeout):
            ctx.wait_for_signal("never", timeout=0)
        raise LookupError("of the agent")

    seen: list[BaseException] = []

    class Hooked(Plain):
        def on_error(self, ctx: SyncRunContext, error: BaseException) -> ErrorInfo:
            seen.append(error)
            ctx.emit("failed", {"thread": threading.current_thread().name})
            return ErrorInfo("Seen", str(error))

    async with Rig(place) as rig:
        result = await rig.runner.execute(Hooked(body), "r")
        assert (result.status, result.error and result.error.type) == (RunStatus.FAILED, "Seen")
        assert [frame.name for frame in traceback.extract_tb(seen[0].__traceback__)] == ["run", "body"]
        assert await rig.told("failed") == [("failed", {"thread": "agent-runtime-step"})]


async def test_sys_exit_in_a_plain_run_is_a_failed_attempt() -> None:
    def body(ctx: SyncRunContext) -> None:
        raise SystemExit(3)

    async with Rig(max_retries=1) as rig:
        result = await rig.runner.execute(Plain(body), "r")
    assert result.error is not None
    text = "run() of agent 'plain' must not end the process, got SystemExit: 3. Handle it in the code"
    assert result.error.message == text


@pytest.mark.parametrize("kind", ["generator", "async generator"])
async def test_a_generator_as_run_is_refused(kind: str, place: Path | None) -> None:
    class Yields(AgentRuntime):
        key = "yields"

        def run(self, ctx: SyncRunContext) -> Any:
            yield RunResult()

    class YieldsAsync(AgentRuntime):
        key = "yields"

        async def run(self, ctx: RunContext) -> Any:
            yield RunResult()

    async with Rig(place) as rig:
        result = await rig.runner.execute(Yields() if kind == "generator" else YieldsAsync(), "r")
        assert result.error is not None
        assert "must return its result, got a generator. Remove `yield`" in result.error.message


async def test_a_plain_run_must_return_a_result(place: Path | None) -> None:
    class Wrong(AgentRuntime):
        key = "wrong"

        def run(self, ctx: SyncRunContext) -> Any:
            return 5

    async with Rig(place) as rig:
        result = await rig.runner.execute(Wrong(), "r")
        assert result.error is not None
        assert result.error.message == (
            "run() of agent 'wrong' must return a RunResult, got 5. Return RunResult(final_output={...})"
        )


async def test_a_call_on_the_event_loop_is_refused(place: Path | None) -> None:
    def body(ctx: SyncRunContext) -> str:
        async def closes_over_it() -> None:
            ctx.emit("x", {})

        try:
            from_thread(closes_over_it)
        except PortalMisuse as error:
            return str(error)
        return ""

    async with Rig(place) as rig:
        assert "emit of a plain run() must not be called on the event loop" in await value(rig, body)
        assert "ctx.async_context" in await value(rig, body, "again")


# -- functions that return an awaitable


async def test_a_plain_wrapper_of_a_coroutine_function_works_as_before(place: Path | None) -> None:
    class Inner(AgentRuntime):
        key = "inner"

        async def run(self, ctx: RunContext) -> RunResult:
            results = await StepExecutor(ctx).run([Step("b", _steps)])
            assert isinstance(ctx, Context), "model calls are recorded for a context with a journal"
            return RunResult({"a": await ctx.step("a", lambda: 1), **results, "loop": _on_loop()})

    def wrapped(run: Callable[..., Awaitable[RunResult]]) -> Callable[..., Any]:
        return lambda self, ctx: run(self, ctx)

    def wrapped_by_functools(run: Callable[..., Awaitable[RunResult]]) -> Callable[..., Any]:
        @functools.wraps(run)
        def wrapper(self: Any, ctx: Any) -> Any:
            assert _on_loop()
            return run(self, ctx)

        return wrapper

    async with Rig(place) as rig:
        for number, wrapper in enumerate((wrapped, wrapped_by_functools)):
            agent = type("Outer", (Inner,), {"run": wrapper(Inner.run)})()
            result = await rig.runner.execute(agent, f"r{number}")
            assert result.raise_for_status().final_output == {"a": 1, "b": 2, "loop": True}


async def _steps(ctx: RunContext, state: Any) -> int:
    return int(await ctx.step("two", lambda: 2))


def _on_loop() -> bool:
    try:
        return asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


async def test_a_plain_override_of_a_tool_agent_may_return_its_run(place: Path | None) -> None:
    class Chatty(ToolCallingAgent):
        key = "chatty"
        system_prompt = "Be brief"
        tools = ToolRegistry()

        def run(self, ctx: Any) -> Any:
            return super().run(ctx)

        def get_llm_client(self) -> Any:
            return MockLLMClient(["Hello!"])

    class Blocking(Chatty):
        key = "blocking"

        def run(self, ctx: SyncRunContext) -> RunResult:  # type: ignore[override]
            result: RunResult = from_thread(super().run, ctx.async_context)
            return RunResult({"said": result.final_output["response"]})

    async with Rig(place) as rig:
        question = {"messages": [{"role": "user", "content": "Hi"}]}
        result = await rig.runner.execute(Chatty(), "r", question)
        assert result.raise_for_status().final_output["response"] == "Hello!"
        result = await rig.runner.execute(Blocking(), "s", question)
        assert result.raise_for_status().final_output == {"said": "Hello!"}


async def test_the_hooks_of_a_tool_agent_may_be_plain(place: Path | None) -> None:
    main, seen = threading.get_ident(), []

    def note(ctx: SyncRunContext, what: Any) -> None:
        assert threading.get_ident() != main
        seen.append(what)
        ctx.emit("seen", {"what": what})

    def weather(city: str) -> dict[str, Any]:
        return {"city": city, "degrees": 21}

    class Hooked(ToolCallingAgent):
        key = "hooked"
        system_prompt = "Be brief"
        tools = ToolRegistry()
        tools.register(Tool.from_function(weather))

        def before_run(self, ctx: SyncRunContext) -> None:
            note(ctx, ctx.step("before", lambda: "before"))

        def after_run(self, ctx: SyncRunContext, result: RunResult) -> RunResult:
            note(ctx, "after")
            return RunResult({"said": result.final_output["response"]})

        def on_tool_call(self, ctx: SyncRunContext, tool_name: str, tool_args: dict[str, Any]) -> None:
            tool_args["city"] = "Oslo"
            note(ctx, tool_name)

        def on_tool_result(self, ctx: SyncRunContext, tool_name: str, result: Any) -> Any:
            note(ctx, result["city"])
            return "warm"

        def get_llm_client(self) -> Any:
            return Scripted(asks(model_call("weather", {"city": "Ulm"}, "c1")), "It is warm.")

    class Wrapped(Hooked):
        key = "wrapped"

        def run(self, ctx: Any) -> Any:
            return super().run(ctx)

    async with Rig(place) as rig:
        for agent in (Hooked(), Wrapped()):
            result = await rig.runner.execute(agent, agent.key, {"messages": [{"role": "user", "content": "Hi"}]})
            assert result.raise_for_status().final_output == {"said": "It is warm."}
    assert seen == ["before", "weather", "Oslo", "after"] * 2


# -- cancellation, time limits, parking


@pytest.mark.parametrize("inside", ["a call", "code"])
async def test_a_cancelled_run_is_unwound_by_its_open_or_next_call(inside: str, place: Path | None) -> None:
    gate, unwound = Gate(), list[str]()

    def body(ctx: SyncRunContext) -> None:
        try:
            if inside == "code":
                gate()
                while True:  # it has a moment to see ctx.cancelled()
                    ctx.emit("working", {})
            else:
                gate.opened.set()
                gate()
                ctx.wait_for_signal("never")
        except Exception as error:  # noqa: BLE001 - what must not be caught
            unwound.append(f"caught {error!r}")
        except BaseException as error:
            unwound.append(type(error).__name__)
            raise
        finally:
            unwound.append("finally")

    async with Rig(place) as rig:
        task = asyncio.ensure_future(go(rig, body))
        await soon(gate.reached.is_set)
        await rig.runner.cancel("r")
        gate.opened.set()
        result = await task
        assert (result.status, unwound) == (RunStatus.CANCELLED, ["CancelledError", "finally"])


async def test_a_plain_run_may_return_when_it_is_cancelled_and_its_hook_may_block(place: Path | None) -> None:
    gate = Gate()

    class Polite(Plain):
        def cancel(self, ctx: SyncRunContext) -> None:
            ctx.emit("cleaned", {"thread": not _on_loop()})

    def body(ctx: SyncRunContext) -> Any:
        gate()
        return ctx.is_cancelled()

    async with Rig(place) as rig:
        task = asyncio.ensure_future(rig.runner.execute(Polite(body), "r"))
        await soon(gate.reached.is_set)
        await rig.runner.cancel("r")
        gate.opened.set()
        result = await task
        assert (result.status, result.final_output) == (RunStatus.CANCELLED, {"value": True})
        assert await rig.told("cleaned") == [("cleaned", {"thread": True})]


async def test_a_run_that_does_not_stop_is_left_after_its_grace(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, ended = Gate(), threading.Event()
    later: list[str] = []
    monkeypatch.setattr(timeouts, "GRACE", 0.05)

    def body(ctx: SyncRunContext) -> None:
        try:
            gate()
            ctx.step("late", lambda: later.append("late"))
        except BaseException as error:
            later.append(type(error).__name__)
            raise
        finally:
            ended.set()

    async with Rig(place) as rig:
        task = asyncio.ensure_future(go(rig, body))
        await soon(gate.reached.is_set)
        await rig.runner.cancel("r")
        with caplog.at_level(logging.WARNING, "agent_runtime_core"):
            assert (await task).status == RunStatus.CANCELLED
        assert "did not stop within 0.05 s" in caplog.text
        gate.opened.set()
        await soon(ended.is_set)
        assert later == ["CancelledError"]


@pytest.mark.parametrize("how", ["cancelled", "left to the end of the loop"])
async def test_a_loop_ends_though_a_plain_run_computes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, ended = Gate(), threading.Event()
    seen: list[str] = []
    monkeypatch.setattr(timeouts, "GRACE", 0.05)

    def body(ctx: SyncRunContext) -> None:
        try:
            gate()
            ctx.emit("late", {})
        except BaseException as error:
            seen.append(type(error).__name__)
            raise
        finally:
            ended.set()

    async def main() -> None:
        runner = AgentRunner.open("memory://")
        task = asyncio.ensure_future(runner.execute(Plain(body), "r"))
        await soon(gate.reached.is_set)
        if how == "cancelled":
            task.cancel()
            await asyncio.wait({task})

    await asyncio.to_thread(asyncio.run, main())
    gate.opened.set()
    await soon(ended.is_set)
    assert seen == ["CancelledError"]


async def test_a_plain_run_has_its_time_limit(place: Path | None) -> None:
    async with Rig(place, Clock(), run_timeout_seconds=0.05) as rig:
        result = await go(rig, lambda ctx: ctx.step("stays", asyncio.Event().wait))
        assert result.status == RunStatus.TIMED_OUT


async def test_a_step_of_a_plain_run_has_its_time_limit(place: Path | None) -> None:
    async with Rig(place) as rig:
        result = await go(rig, lambda ctx: ctx.step("stays", asyncio.Event().wait, timeout=0.02))
        assert result.error is not None
        assert result.error.type == "StepExecutionError"
        assert "timed out after 0.02 s" in result.error.message


async def test_a_plain_run_that_waits_is_parked_and_resumes(place: Path | None) -> None:
    seen: list[str] = []

    def body(ctx: SyncRunContext) -> Any:
        ctx.step("first", lambda: seen.append("first"))
        try:
            return ctx.wait_for_signal("go")
        except Exception as error:  # noqa: BLE001 - what must not be caught
            return repr(error)
        finally:
            seen.append("left")

    async with Rig(place, park_after=0.0) as rig:
        rig.registry.register(Plain(body))
        await rig.runner.submit("plain", run_id="r")
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).status == "waiting"
        assert seen == ["first", "left"]
        await rig.runner.signal("r", "go", 8)
        other = rig.another(park_after=0.0)
        assert await other.run_once()
        assert (await other.wait("r", 0)).final_output == {"value": 8}
        assert seen == ["first", "left", "left"]


async def test_a_finally_block_of_a_parked_run_cannot_write(place: Path | None) -> None:
    seen: list[str] = []

    def body(ctx: SyncRunContext) -> Any:
        try:
            return ctx.wait_for_signal("go")
        finally:
            if not seen:
                try:
                    ctx.emit("left", {})
                except BaseException as error:
                    seen.append(type(error).__name__)
                    raise

    async with Rig(place, park_after=0.0) as rig:
        rig.registry.register(Plain(body))
        await rig.runner.submit("plain", run_id="r")
        assert await rig.runner.run_once()
        assert seen == ["CancelledError"]
        assert await rig.told("left") == []


async def test_a_worker_with_one_slot_runs_another_plain_run_while_one_waits(place: Path | None) -> None:
    async with Rig(place, Clock(), park_after=600) as rig:
        rig.registry.register(Plain(lambda ctx: ctx.wait_for_signal("go"), "waits"))
        rig.registry.register(Plain(lambda ctx: ctx.step("s", lambda: 1), "works"))
        await rig.runner.submit("waits", run_id="w")
        await rig.runner.submit("works", run_id="x")
        loop = asyncio.ensure_future(rig.runner.run_loop(concurrency=1, handle_signals=False))
        assert (await rig.runner.wait("x", 10)).final_output == {"value": 1}
        await rig.runner.signal("w", "go", 2)
        assert (await rig.runner.wait("w", 10)).raise_for_status().final_output == {"value": 2}
        loop.cancel()
        await asyncio.wait({loop})


async def test_a_plain_run_whose_lease_was_lost_writes_nothing(tmp_path: Path) -> None:
    gate, seen = Gate(), list[str]()

    def body(ctx: SyncRunContext) -> Any:
        if gate.reached.is_set():
            return ctx.step("s", lambda: "second")
        gate()
        try:
            return ctx.step("s", lambda: "first")
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    async with Rig(tmp_path / "runs.db", lease_ttl_seconds=30.0) as rig:
        rig.registry.register(Plain(body))
        await rig.runner.submit("plain", run_id="r")
        first = asyncio.ensure_future(rig.runner.run_once())
        await soon(gate.reached.is_set)
        claims = tuple((row.run_id, row.claim_id) for row in await rig.runner.queue.find(RunFilter(("running",))))
        await rig.runner.queue.commits.commit(None, [Op("queue.beat", (claims, -1.0))])
        other = rig.another()
        assert await other.run_once()
        gate.opened.set()
        await first
        assert (await other.wait("r", 0)).final_output == {"value": "second"}
        assert set(seen) <= {"CancelledError", "LeaseLost"}
        assert len(seen) == 1


# -- threads of the agent's own


async def test_other_threads_of_a_plain_run_may_call_its_context_with_keys(place: Path | None) -> None:
    calls: list[int] = []

    def fetch(page: int) -> int:
        calls.append(page)
        return 10 * page

    def body(ctx: SyncRunContext) -> list[Any]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda page: ctx.step("fetch", fetch, page, key=str(page)), range(4)))

    async with Rig(place, max_retries=2) as rig:
        assert await value(rig, _failing_first(body)) == [0, 10, 20, 30]
        assert sorted(calls) == [0, 1, 2, 3]


async def test_a_cancellation_reaches_the_calls_of_other_threads(place: Path | None) -> None:
    started, seen = threading.Event(), list[str]()

    def waits(ctx: SyncRunContext) -> None:
        started.set()
        try:
            ctx.wait_for_signal("never")
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    def body(ctx: SyncRunContext) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(waits, ctx).result()

    async with Rig(place) as rig:
        task = asyncio.ensure_future(go(rig, body))
        await soon(started.is_set)
        await rig.runner.cancel("r")
        assert (await task).status == RunStatus.CANCELLED
        assert seen == ["CancelledError"]


async def test_a_call_after_the_run_has_ended_is_refused(place: Path | None) -> None:
    kept: list[SyncRunContext] = []
    async with Rig(place) as rig:
        await go(rig, kept.append)
        with pytest.raises(
            StorageClosed, match=r"run 'r' has finished\. Await all its tasks before run\(\) returns, and use"
        ):
            await asyncio.to_thread(kept[0].emit, "late", {})


async def test_a_finished_plain_run_is_freed_without_the_garbage_collector(place: Path | None) -> None:
    kept: list[weakref.ref[Any]] = []

    def body(ctx: SyncRunContext) -> None:
        kept.extend((weakref.ref(ctx), weakref.ref(ctx.async_context)))
        ctx.step("s", lambda: 1)

    async with Rig(place) as rig:
        gc.collect()
        gc.disable()
        try:
            await go(rig, body)
            await soon(lambda: [each() for each in kept] == [None, None])
        finally:
            gc.enable()


# -- other places where agents run


async def test_the_testing_kit_runs_a_plain_agent() -> None:
    def body(ctx: SyncRunContext) -> Any:
        def plain(ctx: SyncRunContext) -> int:
            ctx.emit("inside", {})
            return 4

        ctx.sleep(60)
        return [ctx.step("plain", plain), ctx.call(Plain(lambda child: child.params, "c"), {"params": {"a": 1}})]

    result, ctx = await run_agent_test(Plain(lambda ctx: body(ctx)[0]), "hi")
    assert result.final_output == {"value": 4}
    assert (ctx.get_events(), ctx.sleeps) == ([("inside", {})], [60])
    mock = create_test_context("hi")
    assert (await run_agent_test(Plain(lambda ctx: body(ctx)[1]), mock)).final_output == {"value": {"a": 1}}
    assert call(run_agent_test, Plain(body), "hi")[1].sleeps == [60]


async def test_a_cancelled_test_of_a_plain_agent_does_not_wait_for_its_thread() -> None:
    gate, seen = Gate(), list[str]()

    def body(ctx: SyncRunContext) -> None:
        gate()
        try:
            ctx.sleep(1)
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    task = asyncio.ensure_future(run_agent_test(Plain(body), "hi"))
    await soon(gate.reached.is_set)
    task.cancel()
    await asyncio.wait({task})
    gate.opened.set()
    await soon(lambda: bool(seen))
    assert seen == ["CancelledError"]


async def test_a_crash_test_of_a_plain_agent_kills_it_everywhere() -> None:
    class Pays(AgentRuntime):
        key = "pays"

        def run(self, ctx: SyncRunContext) -> RunResult:
            total = ctx.step("total", lambda: 5) + ctx.step("more", lambda: 6)
            ctx.sleep(60)
            return RunResult({"total": total, "answer": ctx.wait_for_signal("go")})

    await crash_everywhere(Pays, signals={"go": "yes"}, compare=lambda result: result.final_output)


async def test_a_child_of_either_form_runs_in_a_run_of_either_form(place: Path | None) -> None:
    async def of_async(ctx: Any) -> Any:
        return (await ctx.call(Plain(lambda child: child.step("s", lambda: 3), "p"), {})).final_output["value"]

    async def steps_back(ctx: Any) -> Any:
        return await ctx.step("s", lambda: from_thread(_add_one, 3))

    async with Rig(place) as rig:
        assert await rig.value(of_async) == 3
        assert await value(rig, lambda ctx: ctx.call(Script(steps_back, "a"), {}).final_output["value"], "s") == 4


async def _add_one(n: int) -> int:
    return n + 1


async def test_a_runner_in_a_plain_run_has_a_loop_of_its_own(place: Path | None) -> None:
    async def steps_back(ctx: Any) -> Any:
        return await ctx.step("s", lambda: from_thread(_add_one, 4))

    def body(ctx: SyncRunContext) -> Any:
        async def inner() -> RunResult:
            async with AgentRunner.open("memory://") as runner:
                return await runner.execute(Script(steps_back), "inner")

        return [asyncio.run(inner()).final_output["value"], call(inner).final_output["value"]]

    async with Rig(place) as rig:
        assert await value(rig, body) == [5, 5]


def test_an_open_run_has_a_blocking_context(tmp_path: Path) -> None:
    def notes(ctx: SyncRunContext) -> str:
        ctx.emit("inside", {})
        return type(ctx).__name__

    for _ in range(2):
        with open_run_sync(tmp_path / "runs.db", "r") as run:
            assert run.sync_ctx.step("one", lambda: 1) == 1
            assert run.sync_ctx.step("notes", notes) == "SyncRunContext"
            assert StepExecutor(run.sync_ctx).run_sync([Step("a", lambda ctx, state: type(ctx).__name__)]) == {
                "a": "SyncRunContext"
            }
            with pytest.raises(WaitTimeout):
                run.sync_ctx.wait_for_signal("never", timeout=0)
    with open_run_sync(tmp_path / "runs.db", "other") as run:
        assert StepExecutor(run.ctx).run_sync([]) == {}
        with pytest.raises(InvalidArgument, match="name"):
            run.sync_ctx.step("", lambda: 1)


async def test_a_plain_agent_is_executed_by_the_sync_form_of_the_runner(tmp_path: Path) -> None:
    runner = AgentRunner.open(tmp_path / "runs.db")
    result = runner.execute_sync(Plain(lambda ctx: ctx.step("s", lambda: 9)), "r")
    assert result.final_output == {"value": 9}
    call(runner.close)


async def test_a_plain_run_can_be_forked(tmp_path: Path) -> None:
    calls: list[str] = []

    def called(name: str) -> str:
        calls.append(name)
        return name

    def body(ctx: SyncRunContext) -> Any:
        return [ctx.step(name, called, name) for name in ("a", "b", "c")]

    async with Rig(tmp_path / "runs.db") as rig:
        rig.registry.register(Plain(body))
        await value(rig, body)
        forked = await rig.runner.fork("r", "a")
        assert await rig.runner.run_once()
        assert (await rig.runner.wait(forked, 0)).final_output == {"value": ["a", "b", "c"]}
        assert calls == ["a", "b", "c", "b", "c"]
