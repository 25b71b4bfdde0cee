"""Calls of a model that are recorded one by one: a resumed run pays for none of them twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

from .._json import decode
from ..config import get_config
from ..context import Context
from ..errors import NotSupported
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..journal.record import Record, is_copied
from ..limits import Budget
from ..llm._prices import cost_usd


class RecordedClient(LLMClient):
    """Another client within a run: call number n is known as `name` and n.

    `count_recorded` first; from then on `budget` has what was used, and refuses what is too much. Over a context
    without a journal the calls are just made.
    """

    def __init__(self, ctx: Any, client: LLMClient, name: str, budget: Budget) -> None:
        self.ctx = ctx
        self.client = client
        self.name = name
        self.budget = budget
        self._calls = 0

    async def generate(
        self, messages: list[Any], *, model: str | None = None, stream: bool = False,
        tools: list[dict[str, Any]] | None = None, temperature: float | None = None, max_tokens: int | None = None,
        **kwargs: Any,
    ) -> LLMResponse:  # fmt: skip
        options = {"model": model, "tools": tools, "temperature": temperature, "max_tokens": max_tokens, **kwargs}
        given = {name: value for name, value in options.items() if value is not None}
        key, self._calls = f"{self.name}:{self._calls}", self._calls + 1
        record = _recorded(self.ctx, key)
        if record is not None:
            return _response(record)
        self.budget.before_turn()
        answer = _response(await self._made(key, messages, given))
        self.budget.turn()
        self.budget.used(answer.usage, answer.cost_usd)
        return answer

    async def _made(self, key: str, messages: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        async def call(attempt: int) -> dict[str, Any]:
            return await self._traced(messages, options)

        if isinstance(self.ctx, Context):
            return cast("dict[str, Any]", await self.ctx.perform("model", key, call))
        return await call(1)

    async def _traced(self, messages: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        ctx, client = self.ctx, self.client
        if not getattr(ctx, "traced", False):
            return await self._asked(messages, options)
        began, answer, failure = ctx.clock.wall(), dict[str, Any](), None
        try:
            answer = await self._asked(messages, options)
            return answer
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            ctx.trace(
                "llm.call",
                {
                    "step_id": ctx.step_id, "parent_id": None, "model": answer.get("model") or options.get("model"),
                    "provider": getattr(client, "provider", type(client).__name__), "input": list(messages),
                    "output": answer.get("message"), "usage": answer.get("usage") or {},
                    "cost_usd": answer.get("cost_usd"), "started_at": began, "ended_at": ctx.clock.wall(),
                    "error": failure, "model_parameters": {n: v for n, v in options.items() if n != "model"},
                },
            )  # fmt: skip

    async def _asked(self, messages: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        response = await self.client.generate(messages, **options)
        usage = {name: value for name, value in response.usage.items() if isinstance(value, (int, float))}
        model = response.model or options.get("model") or getattr(self.client, "default_model", None) or ""
        cost, prices = response.cost_usd, get_config().model_prices
        if cost is None and prices:
            cost = cost_usd(usage, model, prices)
        return {
            "message": dict(response.message), "usage": usage, "model": response.model,
            "finish_reason": response.finish_reason, "cost_usd": cost,
        }  # fmt: skip

    def stream(
        self, messages: list[Any], *, model: str | None = None, tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> AsyncIterator[LLMStreamChunk]:
        raise NotSupported("a recorded call gives the whole answer: use generate()")


def count_recorded(ctx: Any, name: str, budget: Budget) -> None:
    """Count what earlier lives of the run used for the calls of that name, and nothing that it was forked with."""
    calls = 0
    while (record := _recorded(ctx, f"{name}:{calls}")) is not None:
        calls += 1
        if not is_copied(record):
            budget.turn()
            budget.used((answer := _response(record)).usage, answer.cost_usd)


def _recorded(ctx: Any, key: str) -> Record | None:
    return ctx.book.recorded("model", f"k:{key}") if isinstance(ctx, Context) else None


def _response(told: dict[str, Any] | Record) -> LLMResponse:
    plain = cast("dict[str, Any]", decode(told.result or "{}")) if isinstance(told, Record) else told
    return LLMResponse(
        plain["message"], plain["usage"], plain["model"], plain["finish_reason"], cost_usd=plain["cost_usd"]
    )
