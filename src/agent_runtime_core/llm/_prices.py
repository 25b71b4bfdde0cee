"""The cost of an answer, from the configured price table."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from .._core.log import log

Price: TypeAlias = Mapping[str, float]
"""USD per million tokens: `input` and `output`, optionally `cached_input` and `cache_write` (default: `input`)."""

# Only these suffixes name the same model: gpt-4o-mini is not gpt-4o, nor is claude-sonnet-4-5 claude-sonnet-4.
_VERSION = re.compile(r"[-@](\d{3,8}|\d{4}-\d{2}-\d{2}|latest)(-v\d+)?(:\d+)?")

# Models without a price that were logged, so that each is logged once per process.
_logged: set[str] = set()


def price_of(model: str, prices: Mapping[str, Price]) -> Price | None:
    """Return the price of a model, or None.

    The name is looked up first as it is, then without a date; then the same without the provider before a slash.
    """
    while True:
        if model in prices:
            return prices[model]
        known = [key for key in prices if model.startswith(key) and _VERSION.fullmatch(model[len(key) :])]
        if known:
            return prices[max(known, key=len)]
        _, slash, model = model.partition("/")
        if not slash:
            return None


def cost_usd(usage: Mapping[str, Any], model: str, prices: Mapping[str, Price]) -> float | None:
    """Return the cost of a usage in USD; None if the model has no price (logged once) or the usage is unknown."""
    price = price_of(model, prices)
    if price is None:
        if model not in _logged:
            _logged.add(model)
            # Without any price, costs are probably not wanted: no warning.
            log.log(
                logging.WARNING if prices else logging.INFO,
                "no price for model %r, so cost_usd is None: "
                "configure(model_prices={%r: {'input': ..., 'output': ...}}), in USD per million tokens",
                model,
                model,
            )
        return None
    if "prompt_tokens" not in usage and "completion_tokens" not in usage:
        return None
    read, written, prompt, completion = (
        int(usage.get(each) or 0)
        for each in ("cached_tokens", "cache_write_tokens", "prompt_tokens", "completion_tokens")
    )
    millionths = (
        max(prompt - read - written, 0) * price["input"]
        + read * price.get("cached_input", price["input"])
        + written * price.get("cache_write", price["input"])
        + completion * price["output"]
    )
    return millionths / 1_000_000
