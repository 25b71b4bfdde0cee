"""The recorded and the traced form of a model call, the price that a limit in USD needs, and what else is counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .._core.log import step_position
from ..errors import LimitExceeded, UnknownPrice
from ..interfaces import LLMResponse
from ..limits import Budget, RunLimits, usd_of, usd_text
from ._prices import Price, price_of


def require_price(limits: RunLimits, model: str, prices: Mapping[str, Price]) -> None:
    """Raise UnknownPrice if a limit in USD is the only bound and the model has no price."""
    if limits.max_cost_usd is None or limits.max_tokens is not None or price_of(model, prices) is not None:
        return
    raise UnknownPrice(
        f"max_cost_usd={limits.max_cost_usd:g} needs prices, but model {model!r} has no price. "
        f"Add it to configure(model_prices=...), or set max_tokens too"
    )


def recorded_form(response: LLMResponse, message: Mapping[str, Any], cost: float | None) -> dict[str, Any]:
    """Return the form in which a step records an answer. Its cost is decimal text, which `usd_of` reads."""
    usage = {name: value for name, value in (response.usage or {}).items() if isinstance(value, (int, float))}
    return {
        "message": message, "usage": usage, "model": response.model, "finish_reason": response.finish_reason,
        "cost_usd": usd_text(cost),
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
    """Await the recorded form of an answer, and trace the call, also if it fails."""
    started, answer, failure = ctx.clock.wall(), dict[str, Any](), None
    try:
        answer = await request
        return answer
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        ctx.trace(
            "llm.call",
            {
                **step_position(ctx.step_id),
                "model": answer.get("model") or model or getattr(client, "default_model", None),
                "provider": provider_of(client), "input": list(messages),
                "output": answer.get("message"), "usage": answer.get("usage") or {},
                "cost_usd": usd_of(answer.get("cost_usd")), "started_at": started, "ended_at": ctx.clock.wall(),
                "error": failure, "model_parameters": {n: v for n, v in options.items() if n != "model"},
            },
        )  # fmt: skip
