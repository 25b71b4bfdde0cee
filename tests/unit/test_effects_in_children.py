"""A child run that failed with a step in doubt is the same child if its caller calls it again with equal input."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import RunFailed
from tests.support.backends import backends
from tests.support.random_payments import History, Node, numbered
from tests.support.reencryption import MOSTLY_SQLITE, ON_EVERY_ENGINE, Place, place_of
from tests.support.runs import Script


@pytest.fixture(params=MOSTLY_SQLITE)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path)


class Shop:
    """Calls a child for each order, twice if it fails. The child pays, and the first answer of the bank is unusable."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.paid: Counter[int] = Counter()
        self.outcomes: list[list[Any]] = []  # of each attempt

    async def kid(self, ctx: Any) -> Any:
        order = ctx.input["order"]

        async def pay(order: int) -> Any:
            self.paid[order] += 1
            return math.nan if order == 5 and self.paid[order] == 1 else "paid"

        return await ctx.step("pay", pay, order, on_in_doubt=self.policy)

    async def root(self, ctx: Any) -> Any:
        outcomes: list[Any] = []
        self.outcomes.append(outcomes)

        for order in (5, 5, 6):
            try:
                outcomes.append((await ctx.call("kid", {"order": order})).final_output["value"])
            except RunFailed:
                outcomes.append("failed")
            await ctx.approve("next")
        return outcomes

    async def work(self, place: Place) -> None:
        """Execute what can be executed in a new process, and answer the questions."""
        async with self.process(place) as runner:
            while await runner.run_once():
                pass
            for each in await runner.approvals():
                await runner.approve(each.run_id, each.name, True, request_id=each.request_id)

    def process(self, place: Place) -> Any:
        return place.runner(None, Script(self.root, "root"), Script(self.kid, "kid"))


@ON_EVERY_ENGINE
@pytest.mark.parametrize("policy", ["fail", "review"])
async def test_a_child_in_doubt_that_is_called_again_does_not_pay_again(policy: str, place: Place) -> None:
    shop = Shop(policy)
    async with shop.process(place) as runner:
        await runner.submit("root", run_id="r")
    for _ in range(8):
        await shop.work(place)
    async with shop.process(place) as runner:
        result = await runner.wait("r", timeout=0)
        assert result.final_output == {"value": ["failed", "failed", "paid"]}, result.error
        assert sum(each.parent_run_id is not None for each in await runner.runs(limit=100)) == 2
    assert shop.paid == {5: 1, 6: 1}


@pytest.mark.parametrize("ending", ["kill", "drain", "leave"])
@pytest.mark.parametrize("policy", ["fail", "review", "check"])
@pytest.mark.parametrize("kind", backends(["memory", "sqlite"], default=["memory"]))
async def test_it_does_not_pay_again_wherever_a_process_ends(
    kind: str, policy: str, ending: str, tmp_path: Path
) -> None:
    how = {
        "acts": ["nan"], "policy": policy, "way": "args", "cut": False, "limit": False, "retries": 0, "catch": "raise",
    }  # fmt: skip
    again = (("catch", "again"),)
    child = Node("child", "a", inside=(Node("pay", "a", how=tuple(how.items())),), how=again)
    program = numbered([child, Node("approve", "a"), Node("outer", "a", inside=(child,), how=again)])
    for call in (3, 5) if kind == "memory" else (4,):
        folder = tmp_path / str(call)
        folder.mkdir()
        history = History(Place(kind, folder), program)
        await history.play([("work", call, ending), ("work", 3, ending)])
        assert max(history.world.bank.paid.values()) == 1
