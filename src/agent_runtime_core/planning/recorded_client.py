"""Calls of a model that are recorded one by one: a resumed run pays for none of them twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from .._core.lazy_import import load
from .._execution.recorded_calls import UNRECORDED, RecordedCalls
from ..config import get_config
from ..errors import NotSupported
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..limits import UNSEEN_TOKENS, Budget
from ..llm._prices import cost_usd
from ..llm._recording import recorded_form, require_price, traced

_CHARS_A_TOKEN = 3  # fewer than any model has on average, so that a guess is rather too large


class RecordedClient(LLMClient):
    """Another client within a run: call number n is known as `name` and n.

    `count_recorded` first; from then on `budget` has what was used, and refuses what is too much. A client with
    `recalled(answer)` hears of an answer that was recorded. Over a context without a journal the calls are just made.
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
        given = {name: value for name, value in options.items() if value is not None}
        key, self._calls = f"{self.name}:{self._calls}", self._calls + 1
        told = self._steps.recorded("model", key)
        if told is not UNRECORDED:
            answer = _response(told)
            recalled = getattr(self.client, "recalled", None)
            if recalled is not None:
                recalled(answer)
            return answer
        require_price(self.budget.strictest, self._model(given), self._prices())
        doubted = self._steps.in_doubt("model", key)
        self.budget.count_in_doubt(doubted)

        async def call(attempt: int) -> dict[str, Any]:
            asked = self._asked(messages, given)
            if getattr(self.ctx, "traced", False):
                asked = traced(self.ctx, self.client, messages, given.get("model"), given, asked)
            told = await asked
            return {**told, "doubted": doubted} if doubted else told

        reserve = self.reserve(messages, given)
        async with self.budget.concurrent(reserve):
            answer = _response(await self._steps.run("model", key, call, reserve=reserve))
            self.budget.used(answer.usage, answer.cost_usd)
        return answer

    def reserve(self, messages: list[Any], options: dict[str, Any]) -> dict[str, Any] | None:
        """What the call may use at most, which counts if nobody learns how it ended; nothing where nobody counts."""
        limits = self.budget.strictest
        if limits.max_tokens is None and limits.max_cost_usd is None:
            return None
        answer = options.get("max_tokens") or UNSEEN_TOKENS
        prompt = sum(len(str(each.get("content"))) // _CHARS_A_TOKEN + 4 for each in messages)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer}
        cost = cost_usd(usage, self._model(options), self._prices())
        return {"tokens": prompt + answer} | ({} if cost is None else {"usd": cost})

    def _prices(self) -> Mapping[str, Mapping[str, float]]:
        """Those of the client where it has its own."""
        return getattr(self.client, "model_prices", None) or get_config().model_prices

    def _model(self, options: dict[str, Any]) -> str:
        return options.get("model") or getattr(self.client, "default_model", None) or get_config().default_model

    async def _asked(self, messages: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        response = await self.client.generate(messages, **options)
        cost, prices = response.cost_usd, self._prices()
        if cost is None and prices:
            cost = cost_usd(response.usage or {}, response.model or self._model(options), prices)
        return recorded_form(response, dict(response.message), cost)

    def stream(
        self, messages: list[Any], *, model: str | None = None, tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> AsyncIterator[LLMStreamChunk]:
        raise NotSupported("a recorded call gives the whole answer: use generate()")


def configured_client() -> LLMClient:
    """Return the configured client; the import of its provider waits until it is needed."""
    make: Any = load("..llm:configured_client", package=__package__)
    client: LLMClient = make()
    return client


def count_recorded(ctx: Any, name: str, budget: Budget) -> None:
    """Count what earlier lives of the run used for the calls of that name, and nothing that it was forked with."""
    steps, calls = RecordedCalls(ctx), 0
    while (told := steps.replayed("model", key := f"{name}:{calls}")) is not UNRECORDED:
        calls += 1
        if not steps.from_fork("model", key):
            answer = _response(told)
            budget.turn()
            budget.used(answer.usage, answer.cost_usd)
            budget.count_in_doubt(told.get("doubted"))


def _response(told: dict[str, Any]) -> LLMResponse:
    return LLMResponse(told["message"], told["usage"], told["model"], told["finish_reason"], cost_usd=told["cost_usd"])
