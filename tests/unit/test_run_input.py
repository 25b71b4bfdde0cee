"""The input of a run: `input` wherever it is passed, `params` wherever a run is created, `input_data` as before."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agent_runtime_core
from agent_runtime_core import AgentRunner, AgentRuntime, InvalidArgument, RunResult, SyncRunContext
from agent_runtime_core._core.arguments import run_input
from agent_runtime_core._execution.context import Context
from agent_runtime_core.interfaces import RunContext
from agent_runtime_core.queue import RunQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import open_run, open_run_sync
from agent_runtime_core.testing import MockRunContext, crash_everywhere, create_test_context, run_agent_test
from tests.support.backends import POSTGRES
from tests.support.cases import for_each
from tests.support.runs import Rig, Script

INPUT = {"params": {"a": 1, "b": 1}, "topic": "x"}
PARAMS = {"b": 2}
MERGED = {"params": {"a": 1, "b": 2}, "topic": "x"}
#: What creates a run, in a store or for a test.
CREATE: list[Callable[..., Any]] = [
    AgentRunner.execute, AgentRunner.submit, AgentRunner.fork, RunQueue.enqueue, open_run, open_run_sync,
    RunContext.call, Context.call, SyncRunContext.call, MockRunContext.call,
    create_test_context, run_agent_test, crash_everywhere,
]  # fmt: skip


class Echo(AgentRuntime):
    key = "echo"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult({"input": ctx.input})  # type: ignore[attr-defined]


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], AgentRunner]:
    """Open a runner on each kind of store."""
    urls = {"memory": "memory://", "sqlite": str(tmp_path / "runs.db")}
    url = urls.get(request.param) or str(request.getfixturevalue(f"{request.param}_url"))
    registry = Registry()
    registry.register(Echo())
    return lambda: AgentRunner.open(url, registry=registry)


# -- the rule


def test_params_replace_those_of_the_input_and_nothing_is_changed_in_place() -> None:
    assert run_input(INPUT, PARAMS) == run_input(None, PARAMS, input_data=INPUT) == MERGED
    assert INPUT == {"params": {"a": 1, "b": 1}, "topic": "x"}
    assert run_input(None) == run_input(None, None) == run_input({}, {}) == {}
    assert run_input(None, {"a": 1}) == {"params": {"a": 1}}


@for_each(
    ("arguments", "named", "said"),
    [
        (({}, None), {"input_data": {}}, "input and input_data must not both be passed, got both. Pass input alone"),
        (([1],), {}, r"input must be a dict, got \[1\]"),
        ((None,), {"input_data": [1]}, r"input_data must be a dict, got \[1\]"),
        (({"params": 3}, {"a": 1}), {}, r"input\['params'\] must be a dict, got 3"),
        (({}, 3), {}, "params must be a dict, got 3"),
    ],
)
def test_an_input_that_cannot_be_merged_is_named(arguments: tuple[Any, ...], named: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        run_input(*arguments, **named)


# -- the signatures


def test_whatever_creates_a_run_takes_input_and_params() -> None:
    lacking = [
        (each.__qualname__, name)
        for each in CREATE
        for name in ("input", "params")
        if name not in inspect.signature(each).parameters
    ]
    assert lacking == []


def test_every_public_function_with_input_data_also_takes_input() -> None:
    found = {
        each.__qualname__: "input" in inspect.signature(each).parameters
        for each in public_functions()
        if "input_data" in inspect.signature(each).parameters
    }
    assert found == {"AgentRunner.execute": True}


def public_functions() -> Iterator[Callable[..., Any]]:
    names = [each.name for each in pkgutil.iter_modules(agent_runtime_core.__path__) if each.name[0] != "_"]
    for module in (agent_runtime_core, *(importlib.import_module(f"agent_runtime_core.{name}") for name in names)):
        for public in (getattr(module, name) for name in getattr(module, "__all__", ())):
            if inspect.isfunction(public):
                yield public
            elif inspect.isclass(public):
                yield from (each for name, each in inspect.getmembers(public, inspect.isfunction) if name[0] != "_")


# -- each of them


async def test_execute_takes_the_input_by_each_name_and_by_its_place(opened: Callable[[], AgentRunner]) -> None:
    async with opened() as runner:
        results = [
            await runner.execute("echo", input=INPUT, params=PARAMS),
            await runner.execute("echo", input_data=INPUT, params=PARAMS),
            await runner.execute("echo", None, INPUT, None, PARAMS),
        ]
        assert [each.final_output for each in results] == [{"input": MERGED}] * 3
        with pytest.raises(InvalidArgument, match="input and input_data must not both be passed"):
            await runner.execute("echo", input={}, input_data={})
        assert len(await runner.runs()) == 3


async def test_a_run_is_the_same_run_by_each_name(opened: Callable[[], AgentRunner]) -> None:
    async with opened() as runner:
        first = await runner.execute("echo", "r", input=MERGED)
        again = await runner.execute("echo", "r", input_data=INPUT, params=PARAMS)
        assert first.run_id == again.run_id
        assert await runner.submit("echo", input=INPUT, params=PARAMS, run_id="r") == first.run_id


async def test_a_run_that_is_submitted_enqueued_or_forked_has_the_params(opened: Callable[[], AgentRunner]) -> None:
    async with opened() as runner:
        submitted = await runner.submit("echo", INPUT, params=PARAMS)
        queued = await runner.queue.enqueue(None, "echo", INPUT, params=PARAMS)
        forked = await runner.fork(await runner.submit("echo", INPUT), params=PARAMS)
        other = await runner.fork(submitted, input={"params": {"c": 3}}, params=PARAMS)
        stored = [(await runner.get_run(each)).input for each in (submitted, queued.run_id, forked, other)]
        assert stored == [MERGED, MERGED, MERGED, {"params": {"c": 3, "b": 2}}]
        with pytest.raises(InvalidArgument, match="params must be a dict, got 3"):
            await runner.fork(submitted, params=3)  # type: ignore[arg-type]


async def test_an_open_run_has_the_params(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with open_run(path, "a", input=INPUT, params=PARAMS) as ctx:
        assert (ctx.input, ctx.params) == (MERGED, {"a": 1, "b": 2})
    with pytest.raises(InvalidArgument, match=r"input must be a dict, got \[1\]"):
        async with open_run(path, "b", input=[1]):  # type: ignore[arg-type]
            pass


def test_an_open_run_without_a_loop_has_the_params(tmp_path: Path) -> None:
    with open_run_sync(tmp_path / "runs.db", params=PARAMS) as run:
        assert run.ctx.input == {"params": PARAMS}


def test_execute_sync_and_submit_sync_take_them(tmp_path: Path) -> None:
    registry = Registry()
    registry.register(Echo())
    runner = AgentRunner.open(tmp_path / "runs.db", registry=registry)
    assert runner.execute_sync("echo", "r", input=INPUT, params=PARAMS).final_output == {"input": MERGED}
    assert runner.submit_sync("echo", input=INPUT, params=PARAMS, run_id="r") == runner.wait_sync("r").run_id


async def test_a_child_has_the_params_and_is_the_same_child(place: Path | None) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda ctx: ctx.call("echo", INPUT, params=PARAMS),
        lambda ctx: ctx.call("echo", input=MERGED),
    ]

    async def body(ctx: Any) -> Any:
        result = await calls.pop(0)(ctx)
        if calls:
            raise ConnectionError  # the next attempt calls the child in the other way
        return result.final_output

    async with Rig(place) as rig:
        rig.runner.registry.register(Echo())
        rig.runner.registry.register(Script(body))
        parent = await rig.runner.submit("script")
        while await rig.runner.run_once():
            pass
        assert (await rig.runner.wait(parent)).final_output == {"value": {"input": MERGED}}
        assert len(await rig.runner.runs(agent="echo")) == 1


async def test_a_child_without_an_input_has_an_empty_one(opened: Callable[[], AgentRunner]) -> None:
    async with opened() as runner:

        class Parent(AgentRuntime):
            key = "parent"

            def run(self, ctx: SyncRunContext) -> RunResult:
                return RunResult(
                    {"each": [ctx.call("echo").final_output, ctx.call("echo", params=PARAMS).final_output]}
                )

        done = await runner.execute(Parent())
        assert done.final_output == {"each": [{"input": {}}, {"input": {"params": PARAMS}}]}


# -- tests without a runner


async def test_a_context_of_a_test_takes_the_input_of_a_run() -> None:
    given = {**INPUT, "messages": [{"role": "user", "content": "hi"}], "limits": {"max_turns": 2}}
    ctx = create_test_context(input=given, params=PARAMS)
    assert (ctx.input_messages, ctx.params, ctx.input["topic"]) == (given["messages"], {"a": 1, "b": 2}, "x")
    assert ctx.budget is not None
    assert create_test_context("hi", input=INPUT).input == {**INPUT, "messages": given["messages"]}
    assert create_test_context("hi", params=PARAMS).input == {"messages": given["messages"], "params": PARAMS}
    with pytest.raises(InvalidArgument, match="input must have no messages if they are passed, got messages in both"):
        create_test_context("hi", input=given)


async def test_an_agent_of_a_test_takes_them() -> None:
    result, ctx = await run_agent_test(Echo(), input=INPUT, params=PARAMS)
    assert (result.final_output, ctx.params) == ({"input": MERGED}, {"a": 1, "b": 2})
    called = await MockRunContext().call(Echo(), INPUT, params=PARAMS)
    assert called.final_output == {"input": MERGED}
    with pytest.raises(InvalidArgument, match="params must be None if a context is passed"):
        await run_agent_test(Echo(), ctx, params=PARAMS)  # type: ignore[call-overload]


async def test_a_crash_test_takes_them() -> None:
    report = await crash_everywhere(Echo(), INPUT, params=PARAMS)
    assert report.outcome.final_output == {"input": MERGED}
