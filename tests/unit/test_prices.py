"""What an answer costs."""

from __future__ import annotations

import logging

import pytest

from agent_runtime_core.llm import _prices
from agent_runtime_core.llm._prices import cost_usd, price_of

PRICES = {
    "gpt-4o": {"input": 2.5, "output": 10.0, "cached_input": 1.25},
    "gpt-4o-2024-05-13": {"input": 5.0, "output": 15.0},
    "gpt-4o-mini": {"input": 0.15, "output": 0.6},
    "claude-sonnet-5-5": {"input": 3.0, "output": 15.0, "cached_input": 0.3, "cache_write": 3.75},
    "openrouter/auto": {"input": 1.0, "output": 1.0},
}


@pytest.mark.parametrize(
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
    ],
)
def test_a_price_is_found_by_name_without_date_and_prefix(model: str, key: str) -> None:
    assert price_of(model, PRICES) is PRICES[key]


@pytest.mark.parametrize("model", ["gpt-4", "gpt-4o-audio", "gpt-4o2", "claude-sonnet-5-5-1", "gpt-4o/tuned", "", "/"])
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
