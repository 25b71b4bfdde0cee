"""Make a model call of a framework a step of the run, and number what a run uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from .._execution.step_scope import CURRENT_STEP
from ..errors import LimitExceeded
from ..interfaces import RunContext

T = TypeVar("T")

_USES: WeakKeyDictionary[RunContext, Counter[tuple[str, ...]]] = WeakKeyDictionary()


def number_of_use(run: RunContext, *names: str) -> int:
    """Return how often this execution of the run has used these names before, in the current step."""
    scope = None if run.step_id is None else CURRENT_STEP.get()
    # Each attempt of a step counts its own uses, and so finds the records of the attempt before, as a resumed run does.
    where = () if scope is None else (scope.scope_id, str(scope.attempt))
    uses = _USES.setdefault(run, Counter())
    uses[*where, *names] += 1
    return uses[*where, *names] - 1


class ModelUsage(NamedTuple):
    """What a model call has used.

    Attributes:
        model: The model, "" if it is unknown.
        input_tokens: Tokens of the prompt.
        output_tokens: Tokens of the answer.
        cost_usd: The cost in USD; None computes it from `model_prices`.
    """

    model: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None


async def model_step(
    ctx: RunContext, name: str, call: Callable[[], Awaitable[T]], *, usage: Callable[[T], ModelUsage],
    key: str | None = None, **options: Any,
) -> T:  # fmt: skip
    """Return the recorded answer of a model call, or make the call and record its answer and its usage.

    Args:
        ctx: The context of the run.
        name: Name of the step.
        call: Makes the call.
        usage: Returns what an answer has used.
        key: Key of the step.
        **options: Further options of `ctx.step`.

    Raises:
        LimitExceeded: An earlier call has reached a limit of the run. A resumed run stops at the same call, unless its
            limits were raised.
        StepExecutionError: The call failed.
    """
    ctx.check_limits()

    async def called() -> T:
        answer = await call()
        used = usage(answer)
        # As in our own loop, the call that exceeds a limit keeps its answer, and no other call begins.
        with suppress(LimitExceeded):
            ctx.charge(
                model=used.model, input_tokens=used.input_tokens, output_tokens=used.output_tokens,
                cost_usd=used.cost_usd,
            )  # fmt: skip
        return answer

    found: T = await ctx.step(name, called, key=key, **options)
    return found
