"""Guarded steps whose arguments do not tell them apart: each call has its outcome again in every later attempt.

The code catches the error of a step in doubt, and calls another step of that name. It gets the key of the first one,
since it may be the same step.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agent_runtime_core.errors import AgentRuntimeError
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.steps import AlreadyDone
from tests.support.reencryption import MOSTLY_SQLITE, ON_EVERY_ENGINE, Place, place_of
from tests.support.runs import Script


@pytest.fixture(params=MOSTLY_SQLITE)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path)


class Order(NamedTuple):
    """One payment of a program.

    Attributes:
        ending: How the first request ends.
        booked: Whether the bank books the first request, if it is left without an answer.
        way: How the code calls the step: "direct", or inside another step.
        policy: What happens to the payment in doubt.
        tries: How often the code calls it before it continues with the next order.
        then: What follows: nothing, a wait that releases the run, or an error that ends the attempt.
    """

    ending: str
    booked: bool = True
    way: str = "direct"
    policy: str = "check"
    tries: int = 1
    then: str = "park"


class Program:
    """Pays its orders one after the other, all under one name and without arguments."""

    def __init__(self, *orders: Order) -> None:
        self.orders = orders
        self.paid: Counter[int] = Counter()
        self.requests: Counter[int] = Counter()
        self.stopped: set[int] = set()
        self.outcomes: list[list[Any]] = []  # of each attempt

    async def agent(self, ctx: Any) -> Any:
        outcomes: list[Any] = []
        self.outcomes.append(outcomes)
        await ctx.step("first", int)
        for number, order in enumerate(self.orders):
            for _ in range(order.tries):
                try:
                    outcomes.append(await self._call(ctx, number, order))
                except Exception as error:
                    if type(error).__name__ == "JournalMismatch":
                        raise
                    outcomes.append(type(error).__name__)
                else:
                    break
            if order.then == "park":
                await ctx.approve(f"plan {number}")
            elif order.then == "stop" and number not in self.stopped:
                self.stopped.add(number)
                raise LookupError("between steps")
        return outcomes

    async def _call(self, ctx: Any, number: int, order: Order) -> Any:
        async def pay() -> Any:
            self.requests[number] += 1
            if self.requests[number] > 1 or order.ending == "ok":
                self.paid[number] += 1
                return f"order {number}"
            if order.ending == "error":
                raise ConnectionError("not paid")
            self.paid[number] += order.booked or order.ending == "no result"
            if order.ending == "no result":
                return math.nan
            limit.reschedule(asyncio.get_running_loop().time())
            return await asyncio.get_running_loop().create_future()

        async def check() -> Any:
            return AlreadyDone(f"order {number}") if self.paid[number] else None

        async def paying() -> Any:
            return await ctx.step("pay", pay, on_in_doubt=check if order.policy == "check" else "fail")

        async with asyncio.timeout(None) as limit:
            return await (paying() if order.way == "direct" else ctx.step("order", paying))

    async def play(self, place: Place) -> RunResult:
        """Execute the run to its end, with a new process for each attempt, and then forks of it."""
        async with self._process(place) as runner:
            await runner.submit("script", run_id="r")
        for _ in range(4 * len(self.orders) + 4):
            async with self._process(place) as runner:
                while await runner.run_once():
                    pass
                self.check()
                for each in await runner.approvals():
                    await runner.approve(each.run_id, each.name, True, request_id=each.request_id)
                if not await runner.approvals() and (await runner.get_run("r")).status.value == "failed":
                    await runner.resume("r")
        async with self._process(place) as runner:
            result: RunResult = await runner.wait("r", timeout=0)
            # After an ordinary error, a fork would reuse the result of the next call: they have equal arguments.
            fails = any(order.ending == "error" for order in self.orders)
            for effects in ("refuse",) if fails else ("refuse", "reuse"):
                for after in ("first", None):
                    with contextlib.suppress(AgentRuntimeError):  # the run has not finished
                        await runner.fork("r", after, effects=effects)
                await self._finish(runner)
        return result

    async def _finish(self, runner: AgentRunner) -> None:
        while await runner.run_once() or await runner.approvals():
            for each in await runner.approvals():
                await runner.approve(each.run_id, each.name, True, request_id=each.request_id)
        self.check()

    def _process(self, place: Place) -> Any:
        return place.runner(None, Script(self.agent))

    def check(self) -> None:
        assert not self.paid or max(self.paid.values()) <= 1, f"paid too often: {self.paid}"


ENDINGS = ("no result", "cut off")


@pytest.mark.parametrize("way", ["direct", "inside"])
@pytest.mark.parametrize("booked", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_payment_with_the_key_of_a_payment_in_doubt_is_made_once(
    ending: str, booked: bool, way: str, place: Place
) -> None:
    program = Program(Order(ending, booked, way, then=""), Order("ok", way=way))
    result = await program.play(place)
    assert result.status == "succeeded", result.error
    first, *later = program.outcomes[:2]
    assert [first] == later, "the resumed attempt sees what the first one saw"
    assert first[1] == "order 1"
    assert program.paid[1] == 1


@ON_EVERY_ENGINE
@pytest.mark.parametrize("way", ["direct", "inside"])
async def test_the_next_payment_has_the_next_key(way: str, place: Place) -> None:
    """Also after the resumed attempt has received the result of the second one."""
    program = Program(
        Order("cut off", way=way, then=""), Order("ok", way=way), Order("ok", way=way), Order("no result", way=way),
        Order("ok", way=way, then="stop"), Order("ok", way=way),
    )  # fmt: skip
    result = await program.play(place)
    assert result.status == "succeeded", result.error
    assert program.paid == dict.fromkeys(range(6), 1)
    assert result.final_output["value"][-2:] == ["order 4", "order 5"]


orders = st.builds(
    Order, ending=st.sampled_from(["ok", "error", *ENDINGS]), booked=st.booleans(),
    way=st.sampled_from(["direct", "direct", "inside"]), policy=st.sampled_from(["check", "check", "fail"]),
    tries=st.sampled_from([1, 1, 2]), then=st.sampled_from(["", "", "park", "stop"]),
)  # fmt: skip


def played(kind: str, examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(orders, min_size=2, max_size=5))
    def holds(program: list[Order]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(Program(*program).play(Place(kind, Path(folder))))

    holds()


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        ("memory", 20),
        ("sqlite", 4),
        pytest.param("memory", 200, marks=pytest.mark.slow),
        pytest.param("sqlite", 40, marks=pytest.mark.slow),
    ],
)
def test_no_payment_is_made_twice(kind: str, examples: int) -> None:
    played(kind, examples)
