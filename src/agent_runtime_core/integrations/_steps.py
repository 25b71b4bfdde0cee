"""Make a model call of a framework a step of the run, and number what a run uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from .._core.clock import SYSTEM
from .._core.log import log
from .._execution.step import NEVER_RETRIED
from .._execution.step_journal import RunJournal
from ..errors import LimitExceeded, StepExecutionError
from ..interfaces import RunContext
from ..limits import Budget

T = TypeVar("T")

_USES: WeakKeyDictionary[RunContext, Counter[str]] = WeakKeyDictionary()  # of contexts without a journal


def scope_id_of(run: RunContext) -> str:
    """Return the id of the step, or of the framework's task, that the calling code is in; "" outside of steps."""
    journal: RunJournal | None = getattr(run, "journal", None)  # a MockRunContext has no journal
    scope = None if journal is None else journal.keys.counting_scope()
    return "" if scope is None else scope.scope_id


def number_of_use(run: RunContext, *names: str) -> int:
    """Return how often this attempt of the current step or task already used these names.

    The next attempt counts from zero again, so it finds the records of the previous attempt.
    """
    journal: RunJournal | None = getattr(run, "journal", None)
    if journal is not None:
        return journal.keys.number_of_use("\0".join(names))
    uses = _USES.setdefault(run, Counter())
    uses["\0".join(names)] += 1
    return uses["\0".join(names)] - 1


class ModelUsage(NamedTuple):
    """What a model call used.

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
    trace: Callable[[T, bool], Mapping[str, Any]] | None = None, key: str | None = None, **options: Any,
) -> T:  # fmt: skip
    """Return the recorded answer of a model call, or make the call and record its answer and its usage.

    Args:
        ctx: The context of the run.
        name: Name of the step.
        call: Makes the call.
        usage: Returns what an answer used.
        trace: Returns the other fields of the trace of an answer, as in the argument `trace` of `ctx.charge`. If its
            second argument is False, no sink uses `input`, whose conversion takes time.
        key: Key of the step.
        **options: Further options of `ctx.step`.

    Raises:
        LimitExceeded: An earlier call reached a limit of the run. A resumed run stops at the same call, unless its
            limits were raised.
        StepExecutionError: The call failed.
    """
    ctx.check_limits()

    async def called() -> T:
        budget: Budget | None = getattr(ctx, "budget", None)
        if budget is not None and budget.strictest.pools and (pools := getattr(ctx, "pools", None)) is not None:
            await pools.admit(budget.strictest.pools)  # a MockRunContext has none
        clock, traced = getattr(ctx, "clock", SYSTEM), getattr(ctx, "traced", False)
        started = clock.wall() if traced else 0.0
        answer = await call()
        used = usage(answer)
        fields: Any = {"trace": {"started_at": started, **_fields(ctx, trace, answer)}} if traced else {}
        # As in our own loop, the call that exceeds a limit keeps its answer, and no other call begins.
        with suppress(LimitExceeded):
            ctx.charge(
                model=used.model,
                input_tokens=used.input_tokens,
                output_tokens=used.output_tokens,
                cost_usd=used.cost_usd,
                **fields,
            )
        return answer

    found: T = await ctx.step(name, called, key=key, **options)
    return found


async def unwrapped_step(
    fn: Callable[..., Awaitable[T]],
    step: Callable[[Callable[..., Awaitable[T]]], Awaitable[T]],
    ends_run: Callable[[Exception], None] = lambda error: None,
) -> T:
    """Return the result of a step, or raise the error of its function, as a framework would see it without a step.

    In the execution in which the function fails, that is the same object, with attributes that no record contains,
    such as the `response` of an API error. Later it is what the record describes, or if its class is not imported, its
    StepExecutionError.

    Args:
        fn: The function of the step.
        step: Makes the step of the function that it receives.
        ends_run: Gets an error of this library that ends the run, before it is raised.
    """
    raised: list[Exception] = []

    async def noted(*args: Any) -> T:
        try:
            return await fn(*args)
        except Exception as error:
            raised.append(error)
            raise

    try:
        return await step(noted)
    except (*NEVER_RETRIED, LimitExceeded) as error:
        ends_run(error)
        raise
    except StepExecutionError as error:
        failure: BaseException = error
        if type(error) is StepExecutionError:
            failure = raised[-1] if raised and type(raised[-1]) is not StepExecutionError else error.__cause__ or error
    raised.clear()
    # Outside of the `except` block, so that the error and its context do not refer to each other.
    raise failure


def _fields(ctx: RunContext, trace: Callable[[T, bool], Mapping[str, Any]] | None, answer: T) -> Mapping[str, Any]:
    try:
        return {} if trace is None else trace(answer, getattr(ctx, "traces_contents", False))
    except Exception as error:  # the answer counts nevertheless
        log.debug("the trace of a model call has no messages", exc_info=error)
        return {}
