"""Count the model calls of other libraries: what `ctx.charge` does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from .._core.clock import Clock
from .._core.settings import COUNT, number
from .._core.validation import Shown, must
from ..config import get_config
from ..limits import COUNTED, Budget
from ..llm._prices import cost_usd as price_in_usd
from ..portal import run_and_wait
from .run_control import RunControl
from .step_journal import RunJournal
from .step_scope import StepScope
from .usage import add_charge


class ChargedContext(Protocol):
    """What is used of the context of a run."""

    @property
    def journal(self) -> RunJournal: ...

    @property
    def control(self) -> RunControl: ...

    @property
    def budget(self) -> Budget: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def traced(self) -> bool: ...

    def trace(self, kind: str, payload: dict[str, Any]) -> None: ...


def charge_of(
    model: str, input_tokens: int, output_tokens: int, cost_usd: float | None, turns: int, tool_calls: int
) -> dict[str, Any]:
    """Return the usage that `ctx.charge` counts."""
    given = {"input_tokens": input_tokens, "output_tokens": output_tokens, "turns": turns, "tool_calls": tool_calls}
    for name, value in given.items():
        COUNT.check(name, value)
    number().or_none("").check("cost_usd", cost_usd)
    tokens = {
        "prompt_tokens": input_tokens, "completion_tokens": output_tokens, "total_tokens": input_tokens + output_tokens,
    }  # fmt: skip
    if cost_usd is None and model:
        cost_usd = price_in_usd(tokens, model, get_config().model_prices)
    usage = {**tokens, "turns": turns, "tool_calls": tool_calls, "cost_usd": cost_usd}
    return {name: value for name, value in usage.items() if value}


def charge_trace(step_id: str, model: str, charged: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the trace of a model call that `ctx.charge` counts. Only its usage is known."""
    return {
        "step_id": step_id, "parent_id": None, "attempt": None, "model": model, "provider": None,
        "input": None, "output": None,
        "usage": {name: value for name, value in charged.items() if name in COUNTED},
        "cost_usd": charged.get("cost_usd"), "started_at": now, "ended_at": now, "error": None, "model_parameters": {},
    }  # fmt: skip


def charge(ctx: ChargedContext, model: str, charged: dict[str, Any]) -> None:
    """Count `charged` against the limits of the run, as part of the step that the calling code is in.

    Raises:
        LimitExceeded: A limit of the run is exceeded now. What was charged stays counted.
        InvalidArgument: The calling code is in no step, or its step has ended.
    """
    scope, loop = ctx.journal.keys.scope(), ctx.control.loop
    if loop is None or not loop.is_running() or _on(loop):
        _count(ctx, scope, model, charged)
        return

    async def count() -> None:  # other code of the run counts on the event loop
        _count(ctx, scope, model, charged)

    run_and_wait(loop, count, (), {})


def _on(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _count(ctx: ChargedContext, scope: StepScope | None, model: str, charged: dict[str, Any]) -> None:
    if scope is None or scope.ended:
        got = "a call between steps" if scope is None else "a call after its step has ended"
        fix = "Move the model call and ctx.charge(...) into a ctx.step"
        raise must("ctx.charge()", "be called inside a step", Shown(got), fix)
    add_charge(scope, model, charged)
    ctx.budget.recalled(charged)
    if charged.get("turns") and ctx.traced:
        ctx.trace("llm.call", charge_trace(scope.step_id, model, charged, ctx.clock.wall()))
    if (error := ctx.budget.exceeded()) is not None:
        raise error
