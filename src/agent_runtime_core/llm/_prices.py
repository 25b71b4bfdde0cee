"""The cost of an answer, and the recorded and traced form of a model call, which contains that cost."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

from .._core.log import log, step_position
from ..errors import LimitExceeded, UnknownPrice
from ..interfaces import LLMResponse
from ..limits import Budget, RunLimits, SpendPool, usd_of, usd_text
from ._finish_reasons import normal_reason

Price: TypeAlias = Mapping[str, float]
"""USD per million tokens: `input` and `output`, optionally `cached_input`, `cache_write` and `cache_write_1h`.

`web_search` is the price of 1,000 searches in USD.
"""

#: A cache write for an hour, as a multiple of `input`, if it has no price. Only Anthropic reports such writes.
_HOUR_WRITE: Final = 2.0
#: USD for 1,000 searches on the provider's side, if they have no price: the price of Anthropic.
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
    without what Bedrock puts before it: for `us.anthropic.claude-x-v1:0` the price of `claude-x` is used.
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

    None if there is no price for the model (logged once) or the usage is unknown.
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


def require_price(limits: RunLimits, model: str, prices: Mapping[str, Price]) -> None:
    """Raise UnknownPrice if a limit in USD is the only bound and there is no price for the model."""
    if (limits.max_cost_usd is None and not limits.pools) or price_of(model, prices) is not None:
        return
    if limits.max_cost_usd is not None and limits.max_tokens is None:
        raise UnknownPrice(
            f"max_cost_usd={limits.max_cost_usd:g} needs prices, but model {model!r} has no price. "
            f"Add it to configure(model_prices=...), or set max_tokens too"
        )
    for pool in limits.pools:
        if isinstance(pool, SpendPool) and pool.usd is not None and pool.tokens is None:
            raise UnknownPrice(
                f"SpendPool {pool.name!r} with usd={pool.usd:g} needs prices, but model {model!r} has no price. "
                f"Add it to configure(model_prices=...), or set its tokens too"
            )


def recorded_form(response: LLMResponse, message: Mapping[str, Any], cost: float | None) -> dict[str, Any]:
    """Return the form in which a step records an answer. Its cost is decimal text, which `usd_of` reads."""
    usage = {name: value for name, value in (response.usage or {}).items() if isinstance(value, (int, float))}
    return {
        "message": message, "usage": usage, "model": response.model, "finish_reason": response.finish_reason,
        "cost_usd": usd_text(cost) if cost is not None else None,
    }  # fmt: skip


class CallMeter:
    """Counts the answers that a client throws away, in the record of their model call and against the limits.

    Args:
        steps: The recorded calls of the run.
        budget: The limits.
        cost: Returns the cost of a usage for a model.
        reserve: Returns what is reserved for the call: the estimate for an answer without a usage.
    """

    def __init__(
        self, steps: Any, budget: Budget, cost: Callable[[Mapping[str, Any], str], float | None],
        reserve: Callable[[], Mapping[str, Any] | None],
    ) -> None:  # fmt: skip
        self._steps, self._budget, self._cost, self._reserve = steps, budget, cost, reserve
        #: The limit that the counted answers have reached.
        self.spent: LimitExceeded | None = None

    def count(self, model: str, usage: Mapping[str, Any], cost_usd: float | None) -> None:
        if usage:
            cost = self._cost(usage, model) if cost_usd is None else cost_usd
            self._steps.charge(model, usage if cost is None else {**usage, "cost_usd": cost})
            self._budget.used(usage, cost)
        elif reserve := self._reserve():
            estimates = {"estimated_tokens": reserve.get("tokens"), "estimated_cost_usd": reserve.get("usd")}
            self._steps.charge(model, estimates)
            self._budget.count_in_doubt(reserve)

    def before_request(self) -> None:
        self.spent = self._budget.spent()
        if self.spent is not None:
            raise self.spent


def provider_of(client: Any) -> str:
    """Return the name of a client's provider; the name of its class if the client names none."""
    return str(getattr(client, "provider", None) or type(client).__name__)


async def traced(
    ctx: Any, client: Any, messages: list[Any], model: str | None, options: Mapping[str, Any],
    request: Awaitable[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Await the recorded form of an answer, and trace the call. A failed call is traced too."""
    started, answer, failure, kind = ctx.clock.wall(), dict[str, Any](), None, None
    try:
        answer = await request
        return answer
    except BaseException as error:
        kind = type(error).__name__
        failure = f"{kind}: {error}"
        raise
    finally:
        ctx.trace(
            "llm.call",
            {
                **step_position(ctx.step_id),
                "model": answer.get("model") or model or getattr(client, "default_model", None),
                "provider": provider_of(client), "input": list(messages),
                "output": answer.get("message"), "finish_reason": normal_reason(answer.get("finish_reason")),
                "usage": answer.get("usage") or {},
                "cost_usd": usd_of(answer.get("cost_usd")), "started_at": started, "ended_at": ctx.clock.wall(),
                "error": failure, "error_type": kind,
                "model_parameters": {n: v for n, v in options.items() if n != "model"},
            },
        )  # fmt: skip
