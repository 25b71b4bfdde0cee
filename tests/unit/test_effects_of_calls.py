"""What a child run paid is found by the children of forks, whatever number the call of the child has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import AgentRuntimeError, RunFailed
from agent_runtime_core.runner import AgentRunner, reencrypt
from tests.support.reencryption import BOTH, MOSTLY_SQLITE, NEW, OLD, ON_EVERY_ENGINE, Place, place_of
from tests.support.runs import Body, Script
from tests.unit.test_effects_kept import discard_all, forked, refused, work

Call = Callable[[Any, str, dict[str, Any]], Awaitable[Any]]


@pytest.fixture(params=MOSTLY_SQLITE)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path)


class Office:
    """A desk that calls a payer until an order is paid. The payer refuses the first calls."""

    def __init__(self, *, refusals: int = 1, orders: int = 1, arguments: bool = True) -> None:
        self.refusals, self.orders, self.arguments = refusals, orders, arguments
        self.paid: list[Any] = []
        self.agent, self.former = "payer", ""
        self.step, self.former_step = "pay", ""
        self.inside = False  # each call is inside a step
        self.input: Callable[[int], dict[str, Any]] = lambda attempt: {"order": 5}
        self.attempts = 3  # for each order
        self.cut = False  # the desk fails after the first order

    async def payer(self, ctx: Any) -> Any:
        if self.former_step:
            ctx.renamed(self.former_step, self.step)
        await ctx.step("first", int)
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError("not paid")
        order = ctx.input["order"]

        async def pay(*_: Any) -> str:
            self.paid.append(order)
            return f"receipt {len(self.paid)}"

        return await ctx.step(self.step, pay, *([order] if self.arguments else []), on_in_doubt="fail")

    async def _call(self, ctx: Any, attempt: int) -> Any:
        return (await ctx.call(self.agent, self.input(attempt))).final_output["value"]

    async def desk(self, ctx: Any) -> Any:
        if self.former:
            ctx.renamed(self.former, self.agent)
        await ctx.step("first", int)
        return [await self._order(ctx, order) for order in range(self.orders)]

    async def _order(self, ctx: Any, order: int) -> Any:
        if order and self.cut:
            raise ValueError("cut")
        for attempt in range(self.attempts):
            try:
                if self.inside:
                    return await ctx.step("order", self._call, ctx, attempt)
                return await self._call(ctx, attempt)
            except AgentRuntimeError as error:
                failed = error
        raise failed

    @property
    def scripts(self) -> list[Script]:
        return [Script(self.desk, "desk"), *(Script(self.payer, each) for each in ("payer", "cashier"))]


async def paid_after_a_failure(runner: AgentRunner, run_id: str = "r") -> None:
    await runner.submit("desk", {}, run_id=run_id)
    await work(runner)


def has_refused(office: Office, result: Any, payments: int = 1) -> None:
    assert len(office.paid) == payments
    assert refused(result)


@pytest.mark.parametrize("codec", [None, OLD], ids=["plain", "codec"])
@pytest.mark.parametrize("arguments", [True, False])
async def test_a_fork_finds_what_a_later_call_has_paid(arguments: bool, codec: Any, place: Place) -> None:
    office = Office(arguments=arguments)
    async with place.runner(codec, *office.scripts) as runner:
        await paid_after_a_failure(runner)
        has_refused(office, await forked(runner, new_run_id="fork"))
        has_refused(office, await forked(runner, "fork"))
        assert (await forked(runner, effects="reuse")).final_output["value"] == ["receipt 1"]
        assert (await forked(runner, effects="repeat")).final_output["value"] == ["receipt 2"]
        await discard_all(runner, place)


@ON_EVERY_ENGINE
async def test_a_fork_finds_it_after_both_callers_and_children_were_deleted(place: Place) -> None:
    office = Office()
    async with place.runner(OLD, *office.scripts) as runner:
        await paid_after_a_failure(runner)
        await runner.fork("r", "first", new_run_id="fork")
        for run in await runner.runs(limit=10):
            if run.run_key != "fork":
                await runner.discard(run.run_id)
    async with place.runner(BOTH, *office.scripts) as runner:
        await reencrypt(runner)
    assert "arc1.old." not in place.stored()
    async with place.runner(NEW, *office.scripts) as runner:
        await work(runner)
        has_refused(office, await runner.wait("fork", timeout=0))
        await discard_all(runner, place)


async def test_a_fork_finds_it_under_the_former_names_of_child_and_step(place: Place) -> None:
    office = Office()
    async with place.runner(None, *office.scripts) as runner:
        await paid_after_a_failure(runner)
        office.agent, office.former = "cashier", "payer"
        office.step, office.former_step = "transfer", "pay"
        has_refused(office, await forked(runner, new_run_id="fork"))
        assert (await forked(runner, "fork", effects="reuse")).final_output["value"] == ["receipt 1"]


async def test_a_fork_finds_it_in_a_repeated_step_around_the_call(place: Place) -> None:
    office = Office()
    office.inside = True
    async with place.runner(None, *office.scripts) as runner:
        working = asyncio.ensure_future(runner.run_loop(0.01, concurrency=4, handle_signals=False))
        await runner.submit("desk", {}, run_id="r")
        assert (await runner.wait("r")).error is None
        fork = await runner.fork("r", "first")
        has_refused(office, await runner.wait(fork))
        runner.stop()
        await working


async def test_a_fork_finds_it_by_the_arguments_of_the_step_if_the_input_differs(place: Place) -> None:
    """The result is not reused: the input of its call was another one."""
    office = Office()
    office.input = lambda attempt: {"order": 5, "attempt": attempt}
    async with place.runner(None, *office.scripts) as runner:
        await paid_after_a_failure(runner)
        has_refused(office, await forked(runner))
        office.attempts = 1
        has_refused(office, await forked(runner, effects="reuse"))


async def test_the_first_run_finds_what_a_fork_has_paid_in_an_earlier_call(place: Place) -> None:
    office = Office(refusals=3)
    async with place.runner(None, *office.scripts) as runner:
        await paid_after_a_failure(runner)
        assert (await forked(runner)).error is None
        office.attempts = 4
        await runner.resume("r")
        await work(runner)
        has_refused(office, await runner.wait("r", timeout=0))


async def test_a_fork_that_was_refused_finds_it_in_each_further_call(place: Place) -> None:
    office = Office(refusals=0)
    async with place.runner(None, *office.scripts) as runner:
        await paid_after_a_failure(runner)
        has_refused(office, await forked(runner))


@pytest.mark.parametrize("effects", ["refuse", "reuse"])
async def test_a_fork_pays_what_its_run_has_not_paid_yet(effects: str, place: Place) -> None:
    """The code wants two equal payments. What the fork copied or reused is none of the other run alone."""
    office = Office(refusals=1, orders=2)
    office.cut = True
    async with place.runner(None, *office.scripts) as runner:
        await paid_after_a_failure(runner)
        assert office.paid == [5]
        office.cut = False
        after = None if effects == "refuse" else "first"
        fork = await runner.fork("r", after, effects=effects)
        await work(runner)
        assert (await runner.wait(fork, timeout=0)).final_output["value"] == ["receipt 1", "receipt 2"]
        await runner.resume("r")
        await work(runner)
        has_refused(office, await runner.wait("r", timeout=0), 2)


async def test_calls_with_other_inputs_are_other_effects_if_the_step_has_no_arguments(place: Place) -> None:
    paid: list[int] = []
    broken = {0}

    async def payer(ctx: Any) -> None:
        order = ctx.input["order"]
        if order in broken:
            raise ConnectionError("not paid")
        await ctx.step("pay", lambda: paid.append(order), on_in_doubt="fail")

    async def desk(ctx: Any) -> None:
        await ctx.step("first", int)
        calls = [ctx.call("payer", {"order": order}) for order in range(3)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        if any("EffectAlreadyDone" not in str(each) for each in found if isinstance(each, RunFailed)):
            raise ValueError(str(found))

    async with place.runner(None, Script(desk, "desk"), Script(payer, "payer")) as runner:
        await paid_after_a_failure(runner)
        broken.clear()
        await forked(runner)
        assert sorted(paid) == [0, 1, 2]


@ON_EVERY_ENGINE
async def test_children_with_keys_are_separate(place: Place) -> None:
    paid: list[str] = []

    async def payer(ctx: Any) -> None:
        await ctx.step("pay", paid.append, "x", on_in_doubt="fail")

    def desk(*keys: str) -> Body:
        async def body(ctx: Any) -> None:
            await ctx.step("first", int)
            for key in keys:
                await ctx.call("payer", {}, key=key)

        return body

    scripts = [Script(desk("a"), "desk"), Script(payer, "payer")]
    async with place.runner(None, *scripts) as runner:
        await paid_after_a_failure(runner)
        scripts[0].body = desk("b")
        assert (await forked(runner)).error is None
        assert paid == ["x", "x"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_caller_with_the_id_of_a_deleted_run_gets_the_child_that_is_stored(fails: bool, place: Place) -> None:
    """A child that has failed is resumed. A child with another input is a conflict."""
    runs, order = [0], [5]

    async def kid(ctx: Any) -> int:
        runs[0] += 1
        if fails and runs[0] == 1:
            raise ConnectionError("not yet")
        return runs[0]

    async def desk(ctx: Any) -> Any:
        return (await ctx.call("kid", {"order": order[0]})).final_output["value"]

    async with place.runner(None, Script(desk, "desk"), Script(kid, "kid")) as runner:
        await paid_after_a_failure(runner)
        await runner.discard("r")
        await paid_after_a_failure(runner)
        assert (await runner.wait("r", timeout=0)).final_output == {"value": 2 if fails else 1}
        await runner.discard("r")
        order[0] = 6
        await paid_after_a_failure(runner)
        result = await runner.wait("r", timeout=0)
        assert result.error is not None
        assert result.error.type == "IdempotencyConflict"
