"""What a run may use: limits as values, and the budget that is kept of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument, LimitExceeded
from agent_runtime_core.limits import Budget, RunLimits, named_limits, tokens_of
from tests.support.cases import for_each


@for_each("name", ["max_turns", "max_tool_calls", "max_tokens", "max_cost_usd", "turn_timeout", "run_timeout"])
@for_each("value", [-1, float("nan"), float("inf"), "3", True, [1]])
def test_a_limit_is_a_number(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} must be .*, got "):
        RunLimits.of({name: value})


@pytest.mark.parametrize("name", ["max_turns", "turn_timeout", "run_timeout"])
def test_some_limits_are_above_0(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"above 0|of at least 1"):
        RunLimits.of({name: 0})
    assert RunLimits(max_tool_calls=0, max_tokens=0, max_cost_usd=0).max_tokens == 0


def test_whole_limits_are_whole() -> None:
    with pytest.raises(InvalidArgument, match="max_turns must be an integer"):
        RunLimits(max_turns=1.5)  # type: ignore[arg-type]


def test_the_strictest_wins() -> None:
    mine = RunLimits(max_turns=5, max_tokens=100)
    assert mine.stricter({"max_turns": 7, "max_cost_usd": 1.5}) == RunLimits(5, None, 100, 1.5)
    assert mine.stricter(None) == mine
    assert mine.stricter(RunLimits(max_turns=2)).max_turns == 2


def test_a_limit_nobody_knows_is_refused_by_its_nearest_name() -> None:
    with pytest.raises(InvalidArgument, match=r"unknown limit 'max_turn'\. Did you mean 'max_turns'\?"):
        RunLimits.of({"max_turn": 1})
    with pytest.raises(InvalidArgument, match="limits must be RunLimits"):
        RunLimits.of(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [({"total_tokens": 7}, 7), ({"prompt_tokens": 3, "completion_tokens": 2}, 5), ({}, 0), ({"total_tokens": None}, 0)],
)
def test_tokens_are_told_in_two_ways(usage: dict[str, Any], tokens: int) -> None:
    assert tokens_of(usage) == tokens


def test_what_is_lent_is_held_back_until_it_is_back() -> None:
    budget = Budget(RunLimits(max_tokens=1000, max_cost_usd=1.0, max_tool_calls=10))
    budget.used({"total_tokens": 200}, 0.2)
    first = budget.reserve_for_child()
    assert first == RunLimits(max_tool_calls=10, max_tokens=800, max_cost_usd=0.8)
    second = budget.reserve_for_child()
    assert second == RunLimits(max_tool_calls=0, max_tokens=0, max_cost_usd=0)
    with pytest.raises(LimitExceeded, match="limit reached: max_tokens=1000, used 1000"):
        budget.before_call()
    budget.return_unused(first, {"total_tokens": 50, "cost_usd": 0.1, "tool_calls": 2})
    budget.return_unused(second, {})
    assert (budget.tokens, round(budget.cost, 6), budget.tool_calls) == (250, 0.3, 2)
    third = budget.reserve_for_child()
    assert (third.max_tool_calls, third.max_tokens) == (8, 750)
    assert third.max_cost_usd == pytest.approx(0.7)


def test_usage_adds_up_and_tells_the_cost_where_it_is_known() -> None:
    budget = Budget(RunLimits())
    budget.used({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 1}, None)
    assert "cost_usd" not in budget.reported_usage()
    budget.used({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}, 0.5)
    assert budget.reported_usage() == {
        "prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "cached_tokens": 1, "cost_usd": 0.5, "turns": 0,
        "tool_calls": 0,
    }  # fmt: skip


async def test_what_stands_beside_others_holds_its_turn_and_its_reserve_until_it_has_ended() -> None:
    run = Budget(RunLimits(max_turns=4))
    budget = Budget(RunLimits(max_tokens=100), run)
    begun: list[str] = []
    ends = {name: asyncio.Event() for name in "abcd"}

    async def call(name: str) -> None:
        async with budget.concurrent({"tokens": 80, "usd": 0.5}):
            begun.append(name)
            await ends[name].wait()
            if name == "b":
                raise OSError("down")
            budget.used({"total_tokens": 40}, None)

    async def seen() -> list[str]:
        for _ in range(20):
            await asyncio.sleep(0)
        return begun

    calls = [asyncio.ensure_future(call(name)) for name in "abcd"]
    assert await seen() == ["a", "b"], "the third waits for what the others turn out to use"
    assert (budget.reserved_tokens, run.reserved_tokens, run.reserved_turns) == (160, 160, 2)
    ends["b"].set()
    assert await seen() == ["a", "b", "c"], "what failed holds nothing"
    ends["a"].set()
    assert await seen() == ["a", "b", "c"]
    ends["c"].set()
    assert await seen() == ["a", "b", "c", "d"]
    ends["d"].set()
    told = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in told] == [type(None), OSError, type(None), type(None)]
    assert (budget.tokens, run.turns, run.tokens) == (120, 3, 120)
    assert (run.reserved_tokens, run.reserved_turns, run.reserved_cost) == (0, 0, 0.0)
    with pytest.raises(LimitExceeded, match="limit reached: max_tokens=100, used 1"):
        await call("a")


async def test_the_estimate_of_a_call_that_was_cut_off_is_its_reserve_and_no_turn() -> None:
    budget = Budget(RunLimits(max_tokens=100))
    with pytest.raises(asyncio.CancelledError):
        async with budget.concurrent({"tokens": 60}):
            raise asyncio.CancelledError
    assert (budget.tokens, budget.turns, budget.reserved_tokens) == (0, 0, 0)
    assert budget.reported_usage() == {"turns": 0, "tool_calls": 0, "estimated_tokens": 60}


@pytest.mark.parametrize("counts", [False, True])
def test_estimates_count_where_the_limits_say_so(counts: bool) -> None:
    budget = Budget(RunLimits(max_tokens=100, max_cost_usd=1.0, count_estimates=counts))
    budget.used({"total_tokens": 40}, 0.4)
    budget.count_in_doubt({"tokens": 60, "usd": 0.1})
    rest = budget.reserve_for_child()
    assert (rest.max_tokens, rest.count_estimates) == (0 if counts else 60, counts)
    budget.return_unused(rest, {"total_tokens": 10, "estimated_tokens": 5, "estimated_cost_usd": 0.2})
    assert (budget.tokens, budget.estimated_tokens, round(budget.estimated_cost, 6)) == (50, 65, 0.3)
    if counts:
        assert budget.newly_doubtful() is None
        with pytest.raises(LimitExceeded, match="limit reached: max_tokens=100, used 1"):
            budget.before_call()
    else:
        budget.before_call()
        doubt = budget.newly_doubtful()
        assert doubt is not None
        assert (doubt.limit, doubt.used) == ("max_tokens", 115)
        assert budget.newly_doubtful() is None, "it is reported once"


def test_overrides_replace_the_named_limits_of_all_loops() -> None:
    run = Budget(RunLimits(max_tokens=10, max_turns=3), overrides={"max_tokens": 20, "max_cost_usd": None})
    loop = Budget(RunLimits(max_tokens=5, max_cost_usd=0.1, max_turns=2), run)
    assert run.limits == RunLimits(max_tokens=20, max_turns=3)
    assert loop.limits == RunLimits(max_tokens=20, max_turns=2)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, {}),
        ({"max_tokens": None, "count_estimates": False}, {"max_tokens": None, "count_estimates": False}),
        (RunLimits(max_tool_calls=0, count_estimates=True), {"max_tool_calls": 0, "count_estimates": True}),
    ],
)
def test_named_limits_are_those_that_were_given(given: Any, named: dict[str, Any]) -> None:
    assert named_limits(given) == named


def test_the_text_of_a_limit_contains_no_advice() -> None:
    budget = Budget(RunLimits(max_cost_usd=0.01))
    budget.used({}, 0.012)
    with pytest.raises(LimitExceeded) as caught:
        budget.before_call()
    assert str(caught.value) == "limit reached: max_cost_usd=0.01, used 0.012"


def test_count_estimates_is_a_bool() -> None:
    with pytest.raises(InvalidArgument, match="count_estimates must be true or false, got 1"):
        RunLimits(count_estimates=1)  # type: ignore[arg-type]
    assert RunLimits(count_estimates=True).stricter({"max_turns": 1}) == RunLimits(max_turns=1, count_estimates=True)
    assert RunLimits().as_dict() == {}


async def test_a_call_beside_others_may_be_no_turn() -> None:
    budget = Budget(RunLimits(max_turns=1))
    async with budget.concurrent(None), budget.concurrent(None, turn=False):
        pass
    assert budget.turns == 1
