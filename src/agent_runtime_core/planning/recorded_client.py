"""Record each call of a model, so that a resumed run does not repeat it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from .._core.context_vars import restore
from .._core.lazy_import import load
from .._execution.recorded_calls import UNRECORDED, RecordedCalls
from ..config import get_config
from ..errors import NotSupported
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..limits import UNSEEN_TOKENS, Budget, reservation_of, usd_of
from ..llm._prices import CallMeter, cost_usd, recorded_form, require_price, traced
from ..llm._retries import METER

_CHARS_A_TOKEN = 3  # fewer than the average of any model, so that estimates are rather too high


class RecordedClient(LLMClient):
    """Records the calls of another client in a run. The key of the nth call is `name:n`.

    Call `count_recorded` first: then `budget` includes all earlier usage and rejects calls beyond its limits. The
    method `recalled(answer)` of the other client, if any, is called for each recorded answer. With a context without
    a journal, calls are not recorded.
    """

    def __init__(self, ctx: Any, client: LLMClient, name: str, budget: Budget) -> None:
        self.ctx = ctx
        self.client = client
        self.name = name
        self.budget = budget
        self._steps = RecordedCalls(ctx)
        self._calls = 0

    async def generate(
        self, messages: list[Any], *, model: str | None = None, stream: bool = False,
        tools: list[dict[str, Any]] | None = None, temperature: float | None = None, max_tokens: int | None = None,
        **kwargs: Any,
    ) -> LLMResponse:  # fmt: skip
        options = {"model": model, "tools": tools, "temperature": temperature, "max_tokens": max_tokens, **kwargs}
        passed = {name: value for name, value in options.items() if value is not None}
        key, self._calls = f"{self.name}:{self._calls}", self._calls + 1
        recorded = self._steps.recorded("model", key)
        if recorded is not UNRECORDED:
            answer = _response(recorded)
            recalled = getattr(self.client, "recalled", None)
            if recalled is not None:
                recalled(answer)
            return answer
        require_price(self.budget.strictest, self._model(passed), self._prices())
        in_doubt = self._steps.in_doubt("model", key)
        self.budget.count_in_doubt(in_doubt)
        self.budget.add_counted(self._steps.charged("model", key))

        async def call(attempt: int) -> dict[str, Any]:
            pending = self._generate(messages, passed)
            if getattr(self.ctx, "traced", False):
                pending = traced(self.ctx, self.client, messages, passed.get("model"), passed, pending)
            token = METER.set(meter)
            try:
                answer = await pending
            finally:
                restore(METER, token)
            return {**answer, "doubted": in_doubt} if in_doubt else answer

        pooled = self._steps.pooled(self.budget, self.client, lambda: self._model(passed))
        reserve = self.reserve(messages, passed, always=pooled is not None)
        prices = self._prices()
        meter = CallMeter(
            self._steps, self.budget, lambda usage, model: cost_usd(usage, model, prices), lambda: reserve
        )
        if pooled is None or reserve is None:
            return await self._within_budget(key, call, reserve)

        async def counted(attempt: int) -> dict[str, Any]:
            found = await call(attempt)
            pooled.used(key, found["usage"], found["cost_usd"])
            return found

        async with pooled.reserved(key, reserve, _awaited) as pools:
            return await self._within_budget(key, counted, reserve, pools)

    async def _within_budget(
        self, key: str, call: Callable[[int], Awaitable[Any]], reserve: dict[str, Any] | None, pools: Sequence[str] = ()
    ) -> LLMResponse:
        async with self.budget.concurrent(reserve):
            answer = _response(await self._steps.run("model", key, call, reserve=reserve, pools=pools))
            self.budget.used(answer.usage, answer.cost_usd)
        return answer

    def reserve(self, messages: list[Any], options: dict[str, Any], *, always: bool = False) -> dict[str, Any] | None:
        """Return the most tokens and USD that the call may use; None without such limits, unless `always`.

        They count against the limits if the outcome of the call stays unknown.
        """
        limits = self.budget.strictest
        if limits.max_tokens is None and limits.max_cost_usd is None and not always:
            return None
        answer = options.get("max_tokens") or UNSEEN_TOKENS
        prompt = sum(len(str(each.get("content"))) // _CHARS_A_TOKEN + 4 for each in messages)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer}
        cost = cost_usd(usage, self._model(options), self._prices())
        return reservation_of(prompt + answer, cost)

    def _prices(self) -> Mapping[str, Mapping[str, float]]:
        """Return the client's own prices, or the configured prices."""
        return getattr(self.client, "model_prices", None) or get_config().model_prices

    def _model(self, options: dict[str, Any]) -> str:
        return options.get("model") or getattr(self.client, "default_model", None) or get_config().default_model

    async def _generate(self, messages: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        response = await self.client.generate(messages, **options)
        cost, prices = response.cost_usd, self._prices()
        if cost is None and prices:
            cost = cost_usd(response.usage or {}, response.model or self._model(options), prices)
        return recorded_form(response, dict(response.message), cost)

    def stream(
        self, messages: list[Any], *, model: str | None = None, tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> AsyncIterator[LLMStreamChunk]:
        raise NotSupported("the model client of a plan does not support stream(). Use generate().")


async def _awaited(wait: Awaitable[Any]) -> Any:
    return await wait


def configured_client() -> LLMClient:
    """Return the configured client. Imports its provider at the first call."""
    make: Any = load("..llm:configured_client", package=__package__)
    client: LLMClient = make()
    return client


def count_recorded(ctx: Any, name: str, budget: Budget) -> None:
    """Count the usage of recorded calls of that name, but not of calls copied by a fork."""
    steps, calls = RecordedCalls(ctx), 0
    while (recorded := steps.replayed("model", key := f"{name}:{calls}")) is not UNRECORDED:
        calls += 1
        if not steps.from_fork("model", key):
            answer = _response(recorded)
            budget.turn()
            budget.used(answer.usage, answer.cost_usd)
            budget.count_in_doubt(recorded.get("doubted"))
        budget.add_counted(steps.charged("model", key))


def _response(recorded: dict[str, Any]) -> LLMResponse:
    return LLMResponse(
        recorded["message"],
        recorded["usage"],
        recorded["model"],
        recorded["finish_reason"],
        cost_usd=usd_of(recorded["cost_usd"]),
    )
