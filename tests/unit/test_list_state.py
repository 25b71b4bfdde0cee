"""The state of step lists: whose it is, what a list begins with, and that a resumed run sees the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument, StepExecutionError
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import MockRunContext, crash_everywhere
from tests.support.runs import Body, Rig


async def sees(ctx: Any, state: Any) -> dict[str, Any]:
    return dict(state)


def sets(**values: Any) -> Any:
    async def step(ctx: Any, state: Any) -> dict[str, Any]:
        state.update(values)
        return dict(state)

    return step


async def survives(body: Body) -> Any:
    """What the run comes to, wherever it is killed."""

    class Agent(AgentRuntime):
        key = "agent"

        async def run(self, ctx: RunContext) -> RunResult:
            return RunResult({"value": await body(ctx)})

    report = await crash_everywhere(Agent)
    return report.outcome.final_output["value"]


async def test_lists_in_tasks_side_by_side_have_each_its_own() -> None:
    async def body(ctx: Any) -> Any:
        async def slow(ctx: Any, state: Any) -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return dict(state)

        async def quick(ctx: Any, state: Any) -> dict[str, Any]:
            await asyncio.sleep(0.005)
            state["mine"] = "quick"
            return dict(state)

        return await asyncio.gather(
            StepExecutor(ctx).run([Step("quick", quick)]), StepExecutor(ctx).run([Step("slow", slow)])
        )

    assert await survives(body) == [{"quick": {"mine": "quick"}}, {"slow": {}}]


async def test_lists_side_by_side_in_a_step_have_each_its_own() -> None:
    def claims(name: str, pause: float) -> Step:
        async def step(ctx: Any, state: Any) -> str:
            await asyncio.sleep(pause)
            return str(state.setdefault("by", name))

        return Step(name, step)

    async def body(ctx: Any) -> Any:
        async def outer() -> Any:
            return await asyncio.gather(
                StepExecutor(ctx).run([claims("a1", 0.002), claims("a2", 0.01)]),
                StepExecutor(ctx).run([claims("b1", 0.005), claims("b2", 0.01)]),
            )

        return await ctx.step("outer", outer)

    assert await survives(body) == [{"a1": "a1", "a2": "a1"}, {"b1": "b1", "b2": "b1"}]


async def test_a_list_that_is_skipped_has_the_state_it_had() -> None:
    async def body(ctx: Any) -> Any:
        executor = StepExecutor(ctx)
        await executor.run([Step("one", sets(n=1))])
        seen = executor.state.custom_state["n"]
        await executor.run([Step("two", sets(n=2))])
        return seen

    assert await survives(body) == 1


async def test_a_list_that_failed_goes_on_with_its_own_and_not_with_a_later_ones() -> None:
    seen: list[int] = []

    async def body(ctx: Any) -> None:
        async def fails(ctx: Any, state: Any) -> None:
            seen.append(state["n"])
            raise ValueError("no")

        with pytest.raises(StepExecutionError):
            await StepExecutor(ctx).run([Step("a", sets(n=1)), Step("b", fails)])
        await StepExecutor(ctx).run([Step("c", sets(n=2))])
        await ctx.step("end", int)

    await survives(body)
    assert set(seen) == {1}


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("journal", [False, True])
async def test_what_was_added_between_two_lists_is_seen_and_kept(journal: bool, changed: bool) -> None:
    first = {"n": 1} if changed else {}

    async def body(ctx: Any) -> Any:
        executor = StepExecutor(ctx)
        await executor.run([Step("a", sets(**first))])
        executor.update_custom_state({"u": 1})
        second = await executor.run([Step("b", sees)], initial_state={"i": 1})
        return [second["b"], (await StepExecutor(ctx).run([Step("c", sees)]))["c"]]

    wanted = {**first, "u": 1, "i": 1}
    assert await (survives(body) if journal else body(MockRunContext())) == [wanted, wanted]


async def test_what_was_added_waits_for_the_next_step_that_succeeds() -> None:
    tries: list[dict[str, Any]] = []

    async def fails(ctx: Any, state: Any) -> None:
        tries.append(dict(state))
        if len(tries) == 1:
            raise ValueError("no")

    async def body(ctx: Any) -> None:
        executor = StepExecutor(ctx)
        await executor.run([Step("a", sets(n=1))])
        executor.update_custom_state({"u": 1})
        with pytest.raises(StepExecutionError):
            await executor.run([Step("b", fails)])
        await executor.run([Step("b", fails)])

    async with Rig() as rig:
        await rig.value(body)
    assert tries == [{"n": 1, "u": 1}] * 2


@pytest.mark.parametrize("journal", [False, True])
async def test_nothing_is_added_while_steps_run_side_by_side(journal: bool) -> None:
    async def body(ctx: Any) -> Any:
        executor = StepExecutor(ctx)

        async def adds(ctx: Any, state: Any) -> dict[str, Any]:
            with pytest.raises(
                InvalidArgument, match="state must not be changed while steps run concurrently, got a change"
            ):
                executor.update_custom_state({"k": 1})
            return dict(executor.state.custom_state)

        graph = await executor.run([Step("a", adds), Step("b", sees, depends_on=["a"])], initial_state={"n": 1})
        executor.update_custom_state({"u": 2})
        return [*graph.values(), *(await executor.run([Step("c", sees)])).values()]

    wanted = [{"n": 1}, {"n": 1}, {"n": 1, "u": 2}]
    assert await (survives(body) if journal else body(MockRunContext())) == wanted


async def test_a_fallback_may_begin_with_steps_side_by_side() -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def body(ctx: Any) -> str:
        try:
            await ctx.step("a", fails)
        except StepExecutionError:
            await asyncio.gather(ctx.step("x", int), ctx.step("y", int))
        await ctx.step("z", int)
        return "there"

    assert await survives(body) == "there"


async def test_a_failure_beside_other_tasks_counts_where_the_run_went_on() -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def body(ctx: Any) -> str:
        async def slow() -> None:
            await asyncio.sleep(0.005)

        beside = asyncio.ensure_future(ctx.step("slow", slow))
        await asyncio.sleep(0)
        try:
            await ctx.step("a", fails)
        except StepExecutionError:
            await beside
            await ctx.step("instead", int)
        return "there"

    assert await survives(body) == "there"
