"""What an answer costs."""

from __future__ import annotations

import itertools
import json
import logging
import random
from typing import Any

import pytest

from agent_runtime_core.config import RuntimeConfig
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.limits import Budget, RunLimits, sum_usd, usd_of, usd_text
from agent_runtime_core.llm import _anthropic_response, _openai_usage, _prices
from agent_runtime_core.llm._prices import cost_usd, price_of
from tests.support.cases import for_each

PRICES = {
    "gpt-4o": {"input": 2.5, "output": 10.0, "cached_input": 1.25},
    "gpt-4o-2024-05-13": {"input": 5.0, "output": 15.0},
    "gpt-4o-mini": {"input": 0.15, "output": 0.6},
    "claude-sonnet-5-5": {"input": 3.0, "output": 15.0, "cached_input": 0.3, "cache_write": 3.75},
    "openrouter/auto": {"input": 1.0, "output": 1.0},
    "amazon.nova-pro": {"input": 0.8, "output": 3.2},
}


@for_each(
    ("model", "key"),
    [
        ("gpt-4o", "gpt-4o"),
        ("gpt-4o-2024-05-13", "gpt-4o-2024-05-13"),
        ("gpt-4o-2024-08-06", "gpt-4o"),
        ("gpt-4o-mini-2024-07-18", "gpt-4o-mini"),
        ("gpt-4o-latest", "gpt-4o"),
        ("openai/gpt-4o", "gpt-4o"),
        ("openrouter/openai/gpt-4o-mini", "gpt-4o-mini"),
        ("openrouter/auto", "openrouter/auto"),
        ("claude-sonnet-5-5-20260801", "claude-sonnet-5-5"),
        ("claude-sonnet-5-5@20260801", "claude-sonnet-5-5"),
        ("bedrock/claude-sonnet-5-5-20260801-v1:0", "claude-sonnet-5-5"),
        *(
            (f"{way}{region}anthropic.claude-sonnet-5-5{version}", "claude-sonnet-5-5")
            for way in ("", "bedrock/", "bedrock/converse/", "bedrock/us-east-1/", "arn:aws:bedrock:eu-west-1:1:x/")
            for region in ("", "us.", "eu.", "apac.", "global.", "us-gov.")
            for version in ("", "-20260801-v1:0", "-20260801-v1:0:200k", "-v1", "-v1:0", "-20260801")
        ),
        ("openai.gpt-4o-mini-v1:0", "gpt-4o-mini"),
        ("amazon.nova-pro-v1", "amazon.nova-pro"),
        ("us.amazon.nova-pro-v1:0", "amazon.nova-pro"),
    ],
)
def test_a_price_is_found_by_name_without_date_and_prefix(model: str, key: str) -> None:
    assert price_of(model, PRICES) is PRICES[key]


@for_each(
    "model",
    [
        "gpt-4",
        "gpt-4o-audio",
        "gpt-4o2",
        "claude-sonnet-5-5-1",
        "gpt-4o/tuned",
        "",
        "/",
        "us.anthropic.claude-sonnet-5",
        "us.anthropic.claude-sonnet-5-5-mini-v1:0",
        "anthropic.",
        ".",
        "x1.gpt-4o",
        "gpt-4o-v2",
        "gpt-4o:free",
        "gpt-4o-2024-08-06:free",
        "us.openai.gpt-4o:free",
    ],
)
def test_another_model_has_another_price(model: str) -> None:
    assert price_of(model, PRICES) is None


def test_cached_and_written_tokens_have_their_own_price() -> None:
    usage = {"prompt_tokens": 1_000_000, "completion_tokens": 100_000, "cached_tokens": 400_000}
    assert cost_usd(usage, "gpt-4o", PRICES) == pytest.approx(0.6 * 2.5 + 0.4 * 1.25 + 0.1 * 10)
    assert cost_usd(usage, "gpt-4o-mini", PRICES) == pytest.approx(0.15 + 0.06)
    written = usage | {"cache_write_tokens": 100_000}
    assert cost_usd(written, "claude-sonnet-5-5", PRICES) == pytest.approx(0.5 * 3 + 0.4 * 0.3 + 0.1 * 3.75 + 0.1 * 15)


def test_nothing_used_costs_nothing_and_an_untold_usage_is_not_nothing() -> None:
    assert cost_usd({"prompt_tokens": 0, "completion_tokens": 0}, "gpt-4o", PRICES) == 0
    assert cost_usd({"prompt_tokens": 8, "completion_tokens": None}, "gpt-4o", PRICES) == pytest.approx(2e-5)
    assert cost_usd({}, "gpt-4o", PRICES) is None
    more_cached_than_read = {"prompt_tokens": 10, "cached_tokens": 20}
    assert cost_usd(more_cached_than_read, "gpt-4o", PRICES) == pytest.approx(20 * 1.25e-6)


def test_a_model_without_a_price_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_prices, "_logged", set())
    with caplog.at_level(logging.WARNING, logger="agent_runtime_core"):
        for model in ("unheard-of", "unheard-of", "another", "gpt-4o"):
            assert (cost_usd({"prompt_tokens": 1}, model, PRICES) is None) == (model != "gpt-4o")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "no price for model 'unheard-of'" in said[0]
    assert "configure(model_prices={'unheard-of': {'input'" in said[0]


CLAUDE = {"claude-x": {"input": 3.0, "output": 15.0, "cached_input": 0.3, "cache_write": 3.75}}
MILLION = 1_000_000


def anthropic_cost(reported: dict[str, Any], **more: float) -> float | None:
    usage = _anthropic_response.usage_of(reported, answered=True)
    return cost_usd(usage, "claude-x", {"claude-x": {**CLAUDE["claude-x"], **more}})


@for_each(
    ("reported", "more", "cost"),
    [
        ({"cache_creation": {"ephemeral_1h_input_tokens": MILLION}}, {}, 6.0),
        ({"cache_creation": {"ephemeral_1h_input_tokens": MILLION}}, {"cache_write_1h": 7.0}, 7.0),
        ({"cache_creation": {"ephemeral_5m_input_tokens": MILLION}}, {}, 3.75),
        (
            {"cache_creation": {"ephemeral_5m_input_tokens": MILLION, "ephemeral_1h_input_tokens": MILLION}},
            {"cache_write_1h": 5.0},
            8.75,
        ),
        ({"server_tool_use": {"web_search_requests": 3}}, {}, 0.03),
        ({"server_tool_use": {"web_search_requests": 3, "web_fetch_requests": 9}}, {"web_search": 5.0}, 0.015),
        ({"iterations": [{"type": "compaction", "input_tokens": MILLION, "output_tokens": MILLION}]}, {}, 18.0),
        (
            {
                "iterations": [
                    {"type": "compaction", "input_tokens": 0, "cache_read_input_tokens": MILLION, "output_tokens": 0},
                    {"type": "compaction", "cache_creation": {"ephemeral_1h_input_tokens": MILLION}},
                    {"type": "message", "input_tokens": MILLION, "output_tokens": MILLION},
                    {"input_tokens": MILLION, "output_tokens": MILLION},
                ]
            },
            {},
            6.3,
        ),
        ({"iterations": None, "server_tool_use": None, "cache_creation": None}, {}, 0.0),
        ({"iterations": "?", "server_tool_use": [1], "cache_creation": 7}, {}, 0.0),
    ],
)
def test_what_claude_reports_beside_its_tokens_is_paid_too(
    reported: dict[str, Any], more: dict[str, float], cost: float
) -> None:
    plain = {"input_tokens": 1000, "output_tokens": 1000}
    found, without = anthropic_cost({**plain, **reported}, **more), anthropic_cost(plain)
    assert found is not None
    assert without is not None
    assert sum_usd(found, -without) == cost


def test_a_summary_of_the_conversation_is_part_of_the_counts() -> None:
    first = {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3_500}
    last = {"type": "message", "input_tokens": 23_000, "output_tokens": 1_000}
    usage = _anthropic_response.usage_of({**last, "iterations": [first, last]})
    assert usage == {"prompt_tokens": 203_000, "completion_tokens": 4_500, "total_tokens": 207_500}


@pytest.mark.parametrize("place", ["cache_creation", "prompt_tokens_details"])
def test_a_gateway_passes_on_the_age_of_what_was_written(place: str) -> None:
    ages = {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 30}
    details = {"cache_creation": ages} if place == "cache_creation" else {place: {"cache_creation_token_details": ages}}
    usage = _openai_usage.usage_of({"prompt_tokens": 100, "completion_tokens": 1, **details})
    assert (usage["cache_write_tokens"], usage["cache_write_1h_tokens"], usage["prompt_tokens"]) == (40, 30, 100)


@for_each(
    ("reported", "cost"),
    [
        ({"cost": 0.00011018}, 0.00011018),
        ({"cost": 0}, 0.0),
        ({"cost": 0.0001, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.002}}, 0.0021),
        ({"cost": 0.002, "is_byok": False, "cost_details": {"upstream_inference_cost": 0.002}}, 0.002),
        ({"cost": 0.0001, "is_byok": True, "cost_details": None}, 0.0001),
        *(({"cost": wrong}, None) for wrong in (None, "much", -1, True, {"total": 1}, float("nan"), float("inf"))),
        ({}, None),
        (None, None),
    ],
)
def test_a_cost_that_the_server_reports_is_read(reported: Any, cost: float | None) -> None:
    assert _openai_usage.cost_of(reported) == cost


@pytest.mark.parametrize("name", ["cache_write_1h", "web_search", "cached_input", "cache_write"])
def test_a_price_has_one_of_these_names(name: str) -> None:
    assert RuntimeConfig(model_prices={"m": {"input": 1, "output": 2, name: 3}}).model_prices["m"][name] == 3
    with pytest.raises(InvalidArgument, match="'cached_input', 'cache_write', 'cache_write_1h' and 'web_search'"):
        RuntimeConfig(model_prices={"m": {"input": 1, "output": 2, f"{name}s": 3}})


def test_costs_are_the_same_in_any_order_and_in_their_text() -> None:
    generator = random.Random(7)
    for _ in range(200):
        costs = [generator.randint(0, 10**11) / 10**10 for _ in range(6)]
        sums = {sum_usd(*order) for order in itertools.permutations(costs)}
        for order in itertools.islice(itertools.permutations(costs), 60):
            budget = Budget(RunLimits())
            for cost in order:
                budget.used({}, usd_text(cost))
            sums.add(budget.reported_usage()["cost_usd"])
        assert len(sums) == 1
        total = sums.pop()
        assert usd_of(usd_text(total)) == total == round(total, 10)
        assert json.loads(usd_text(total) or "") == total
    assert [usd_text(each) for each in (0.1 + 0.2, 1e-8, 0.0, 100.0, None)] == ["0.3", "0.00000001", "0", "100", None]
    assert [usd_of(wrong) for wrong in ("", "1e3", "nan", "-1", "1,5", "9" * 99, None, [1])] == [None] * 8
