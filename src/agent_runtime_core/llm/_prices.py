"""The cost of an answer, from the configured price table."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from .._core.log import log
from ..limits import usd_of

Price: TypeAlias = Mapping[str, float]
"""USD per million tokens: `input` and `output`, optionally `cached_input`, `cache_write` and `cache_write_1h`.

`web_search` is the price of 1,000 searches in USD.
"""

#: A cache write for an hour, as a multiple of `input`, if it has no price. Only Anthropic reports such writes.
_HOUR_WRITE: Final = 2.0
#: USD for 1,000 searches on the provider's side, if they have no price: that of Anthropic.
_SEARCHES: Final = 10.0

# Only these suffixes name the same model: gpt-4o-mini is not gpt-4o, nor is claude-sonnet-4-5 claude-sonnet-4.
_DATE: Final = r"[-@](\d{3,8}|\d{4}-\d{2}-\d{2}|latest)"
_VERSION: Final = re.compile(rf"{_DATE}(-v\d+)?(:\d\w*)*|-v\d+(:\d\w*)+")
#: Bedrock puts the region and the maker before the name, and writes some versions without a date.
_BEDROCK: Final = re.compile(r"(?:[a-z]+(?:-[a-z]+)*|ai21)\.(?=.)")
_BEDROCK_VERSION: Final = re.compile(rf"({_DATE})?(-v\d+)?(:\d\w*)*")

# Models without a price that were logged, so that each is logged once per process.
_logged: set[str] = set()


def price_of(model: str, prices: Mapping[str, Price]) -> Price | None:
    """Return the price of a model, or None.

    The name is looked up first as it is, then without a date; then the same without the provider before a slash, and
    without what Bedrock puts before it: `us.anthropic.claude-x-v1:0` has the price of `claude-x`.
    """
    version = _VERSION
    while True:
        if (before := _BEDROCK.match(model)) is not None:
            version = _BEDROCK_VERSION
        if model in prices:
            return prices[model]
        known = [key for key in prices if model.startswith(key) and version.fullmatch(model[len(key) :])]
        if known:
            return prices[max(known, key=len)]
        _, slash, rest = model.partition("/")
        if not slash and before is not None:
            rest = model[before.end() :]
        if not rest:
            return None
        model = rest


def cost_usd(usage: Mapping[str, Any], model: str, prices: Mapping[str, Price]) -> float | None:
    """Return the cost of a usage in USD, with ten digits after the point.

    None if the model has no price (logged once) or the usage is unknown.
    """
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
    prompt, completion, read, written, hour, searches = (
        int(usage.get(each) or 0)
        for each in (
            "prompt_tokens", "completion_tokens", "cached_tokens", "cache_write_tokens", "cache_write_1h_tokens",
            "web_search_requests",
        )
    )  # fmt: skip
    input_ = price["input"]
    millionths = (
        max(prompt - read - written, 0) * input_
        + read * price.get("cached_input", input_)
        + max(written - hour, 0) * price.get("cache_write", input_)
        + hour * price.get("cache_write_1h", _HOUR_WRITE * input_)
        + completion * price["output"]
        + searches * 1000 * price.get("web_search", _SEARCHES)
    )
    return usd_of(millionths / 1_000_000)
