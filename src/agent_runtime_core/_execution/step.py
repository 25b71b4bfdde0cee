"""One step: its options, its scope, and how to call its function."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import sys
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Final, NamedTuple, cast
from weakref import ReferenceType, ref

from .._core.codec.json import MAX_RESULT, digest
from .._core.codec.type_hints import returns_of
from .._core.codec.typed import codec_for
from .._core.ids import step_id
from .._core.log import CURRENT_STEP as LOGGED_STEP
from .._core.log import log
from .._core.threads import AGENT_CONTEXT, in_thread
from .._core.timeouts import log_abandoned_thread
from .._core.validation import is_number, must
from ..errors import (
    EffectAlreadyDone,
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    NotSupported,
    PortalMisuse,
    RedactionFailed,
    StepCancelledError,
    StepInDoubt,
    UnserialisableResult,
    holds,
    leaves_of,
)
from ..retry import Delay, at_least_zero
from ..tools.schema import context_parameter, place_context
from ..tools.tool import repeat_call

#: These errors are never retried: another attempt would fail in the same way, or do harm.
NEVER_RETRIED = (
    LeaseLost,
    JournalMismatch,
    InvalidArgument,
    UnserialisableResult,
    RedactionFailed,
    StepInDoubt,
    EffectAlreadyDone,
    StepCancelledError,
    NotSupported,
    PortalMisuse,
)

#: Exceptions by which the code of a framework leaves a step on purpose, such as a question to a person. The step did
#: not fail: they are raised unchanged, without another attempt, and the step runs again when it is called again.
CONTROL_FLOW: Final[list[type[Exception]]] = []

#: The errors that a step retries by default.
_USUAL: Final = (Exception,)

#: Policies of a fork for a guarded step that another run of its lineage completed.
EFFECTS: Final = ("refuse", "reuse", "ask", "repeat")

RetryOn = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
#: "retry", "fail", "review", or a check function that finds out whether the step took effect.
InDoubt = str | Callable[..., Any]


@dataclass(frozen=True)
class AlreadyDone:
    """Returned by a check function for a step in doubt whose effect took place.

        async def find_payment(ctx):
            payment = await bank.find(ctx.idempotency_key)
            return None if payment is None else AlreadyDone(payment)

        await ctx.step("pay", pay, on_in_doubt=find_payment)

    Attributes:
        result: The result of the step from then on.
    """

    result: Any = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class StepOptions:
    """The options of a step, checked. `RunContext.step` and `Step` list them for users, with these defaults.

    Attributes:
        retries: Attempts after the first attempt.
        retry_delay: Seconds before each retry, if there is no `backoff`.
        timeout: Seconds that one attempt may take; None for no limit.
        retry_on: Error types that are retried, or a function that decides for an error.
        backoff: Computes the delay instead of `retry_delay`.
        on_in_doubt: What happens if the outcome of an earlier attempt is unknown.
        returns: Type of the result, instead of the function's annotation.
        max_result_bytes: Limit for the encoded result.
        description: Text for the step's events.
        on_changed_input: "use" or "raise", for a saved result with other arguments. Only `RunContext.step` takes it.

    Raises:
        InvalidArgument: A value is out of range.
    """

    retries: int = 0
    retry_delay: float = 1.0
    timeout: float | None = None
    retry_on: RetryOn = Exception
    backoff: Delay | None = None
    on_in_doubt: InDoubt = "retry"
    returns: Any = None
    max_result_bytes: int = MAX_RESULT
    description: str | None = None
    on_changed_input: str = "use"

    def __post_init__(self) -> None:
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or not 0 <= self.retries < 2**31:
            raise must("retries", "be an integer of at least 0", self.retries)
        if self.timeout is not None and not (is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise must("timeout", "be a number of seconds above 0, or None for no limit", self.timeout)
        if type(self.retry_delay) is not float or not 0 <= self.retry_delay < math.inf:  # the usual type needs no call
            at_least_zero("retry_delay", self.retry_delay)
        kinds = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        if callable(self.retry_on) and not isinstance(self.retry_on, type):
            kinds = ()  # a function
        if kinds != _USUAL and not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            wanted = "be an exception class, a tuple of them or a function of the error"
            raise must("retry_on", wanted, self.retry_on)
        if self.backoff is not None and not callable(self.backoff):
            raise must("backoff", "be Backoff(...) or a function of (attempt, random)", self.backoff)
        if not callable(self.on_in_doubt) and self.on_in_doubt not in ("retry", "fail", "review"):
            raise must("on_in_doubt", "be 'retry', 'fail', 'review' or a check function", self.on_in_doubt)
        if self.max_result_bytes != MAX_RESULT:
            codec_for(None, self.max_result_bytes)
        if self.on_changed_input not in ("use", "raise"):
            raise must("on_changed_input", "be 'use' or 'raise'", self.on_changed_input)

    @staticmethod
    def of(method: str, given: Mapping[str, Any], without: Container[str] = ()) -> StepOptions:
        """Return the options that a call of `method` was given; it does not take the options in `without`.

        Raises:
            TypeError: The method takes no argument of that name.
            InvalidArgument: A value is out of range.
        """
        for name in given:
            if name in without or name not in _NAMES:
                raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        return StepOptions(**given)

    @property
    def repeats_doubt(self) -> bool:
        """Whether the run repeats an attempt with an unknown outcome. Other runs of its lineage may still not do so."""
        return self.on_in_doubt == "retry" or self.on_in_doubt is repeat_call

    def delay(self, error: BaseException, attempt: int, random: Any) -> float | None:
        """Return the seconds before the next attempt, or None if there is none.

        An exception group is retried if `retry_on` accepts the group, or each error inside it.

        Args:
            error: What the last attempt raised.
            attempt: The number of that attempt, counted from 1.
            random: The source of random numbers for `backoff`.
        """
        if attempt > self.retries or holds(error, (*NEVER_RETRIED, LimitExceeded)):
            return None
        try:
            if not self._retries_on(error) and not all(map(self._retries_on, leaves_of(error))):
                return None
            if self.backoff is None:
                return self.retry_delay
            return at_least_zero("the result of backoff", self.backoff(attempt, random))
        except Exception:  # an error in retry_on or backoff must not replace the error of the step
            log.exception("retry_on or backoff raised an error after %s: the step is not retried", type(error).__name__)
            return None

    def _retries_on(self, error: BaseException) -> bool:
        if isinstance(self.retry_on, (type, tuple)):
            return isinstance(error, self.retry_on)
        return bool(self.retry_on(error))


_NAMES: Final = frozenset(StepOptions.__slots__)
DEFAULT_OPTIONS: Final = StepOptions()


Identity = tuple[str, str]  # (name, key)


@dataclass(slots=True, eq=False, repr=False)
class JournalToken:
    """Identifies one `StepJournal`: compare with `is`.

    A child run may execute inside a step of its parent; the scopes of the two runs differ by their tokens. A scope
    that referred to the journal itself would keep it alive.
    """

    run_id: str


@dataclass(slots=True, eq=False, repr=False)
class StepScope:
    """One attempt of a step, as the code inside it sees it."""

    token: JournalToken
    name: str
    key: str
    attempt: int
    outer: StepScope | None = None
    emitted: int = 0
    counts: dict[tuple[str, str], int] | None = None  # calls of each name inside this step
    charged: dict[str, dict[str, Any]] | None = None  # what `ctx.charge` counted in this attempt, by model
    digest: str | None = None  # of the arguments
    position: int = 0
    ended: bool = False  # the record of the attempt is made: what code charges now would be in no record
    between_steps: bool = False  # a part of the run's own code that is counted like a step, but is none

    @property
    def step_id(self) -> str:
        return step_id(self.token.run_id, self.name, self.key)

    @property
    def scope_id(self) -> str:
        return scope_id(self.name, self.key)


def scope_id(name: str, key: str) -> str:
    """Return the id of this step that the keys of the steps inside it end with.

    It is unique in the run, and the same in the forks of the run.
    """
    return digest(f"{name}\0{key}")[:16]


#: Matches the id of the enclosing step in the key of a step.
SCOPE_SUFFIX: Final = re.compile("@([0-9a-f]{16})(?::|$)")

#: The scope of the step that code is running in.
CURRENT_STEP: Final = cast("ContextVar[StepScope | None]", LOGGED_STEP)


#: The scope in which the calls of an agent's `cancel` hook are counted. Set in the code of the hook.
CANCEL_HOOK: Final[ContextVar[StepScope | None]] = ContextVar("agent_runtime_core_cancel_hook", default=None)


async def run_body(scope: StepScope | None, body: Callable[[], Awaitable[Any]]) -> Any:
    """Run the body of a step in a task that was started for it, so that `in_own_flow` finds the scope."""
    return await body()


#: The functions that await the body of a step. In each of them the variable `scope` is the scope.
BODIES: Final[set[CodeType]] = {run_body.__code__}


def in_own_flow(scope: StepScope) -> bool:
    """Return whether the calling code runs in the body of this step, and not in a task that the body started.

    Only code that looks for guarded steps asks this, so the stack is searched. Each step would have to remember its
    task otherwise.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in BODIES:
            return frame.f_locals["scope"] is scope
        frame = frame.f_back
    return False


class FrameworkTask(NamedTuple):
    """A task of a framework that saves its own progress, and resumes a run in the middle of the run's code.

    The calls inside the task are counted separately, because a resumed run does not repeat the tasks before it.

    Attributes:
        key: Identifies the task in the run. It is the same after a resume.
        attempt: An object that differs in each attempt of the task.
        place: Where the task is in the code. It is the same in the forks of the run, and tasks may share it.
    """

    key: str
    attempt: object
    place: str


#: Functions of integrations. Each returns the task that the calling code is in, or None. Their arguments are the id of
#: the run, and the step of the run that the calling code is in.
FRAMEWORK_TASKS: Final[list[Callable[[str, StepScope | None], FrameworkTask | None]]] = []


@dataclass(repr=False, eq=False)
class StepFunction:
    """How to call a step function and to encode its result.

    Attributes:
        is_async: It is a coroutine function. Others run in a thread.
        encode: Encodes the result.
        decode: Decodes the result.
        takes_context: Whether it takes the context as a parameter. None until `call` needs to know: steps of a list get
            the context as their first argument, and many of them never run.
    """

    is_async: bool
    encode: Callable[[object], str]
    decode: Callable[[str], object]
    takes_context: bool | None = None

    def takes_context_arg(self, fn: Callable[..., Any]) -> bool:
        """Return whether `fn`, the function that this describes, takes the context as a parameter."""
        if self.takes_context is None:
            self.takes_context = context_parameter(fn) is not None
        return self.takes_context


#: For functions that contain nothing to inspect: neither annotations nor attributes.
_PLAIN, _PLAIN_ASYNC = (StepFunction(is_async, *codec_for(None), takes_context=False) for is_async in (False, True))
_known_functions: dict[ReferenceType[Any], StepFunction] = {}  # an entry is removed with its function


def step_function(fn: Callable[..., Any], returns: Any = None, max_result_bytes: int = MAX_RESULT) -> StepFunction:
    """Return how to call `fn`.

    Args:
        fn: The function.
        returns: The type of its result, instead of its annotation.
        max_result_bytes: The limit for its encoded result.
    """
    function = cached_step_function(fn)
    if returns is None and max_result_bytes == MAX_RESULT:
        return function
    to_text, from_text = codec_for(returns_of(fn) if returns is None else returns, max_result_bytes)
    # `takes_context` is computed first, so that it is cached for all copies.
    return replace(function, encode=to_text, decode=from_text, takes_context=function.takes_context_arg(fn))


def cached_step_function(fn: Callable[..., Any]) -> StepFunction:
    """Return how to call `fn`. Each function is inspected once."""
    key = fn.__func__ if type(fn) is MethodType else fn
    # Most are lambdas and closures, which are new functions in each call, so that no table contains them.
    if type(key) is FunctionType and not key.__annotations__ and not key.__dict__:
        return _PLAIN_ASYNC if key.__code__.co_flags & inspect.CO_COROUTINE else _PLAIN
    try:
        known = _known_functions.get(ref(key))
        if known is None:
            known = _known_functions[ref(key, _known_functions.pop)] = _inspect(fn)
    except TypeError:  # it supports no weak references, or is not hashable
        return _inspect(fn)
    return known


def _inspect(fn: Callable[..., Any]) -> StepFunction:
    if not callable(fn):
        fix = "Pass the function and its arguments without calling it, as in ctx.step('fetch', fetch, 1)"
        raise must("fn", "be a function", fn, fix)
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
    to_text, from_text = codec_for(returns_of(fn))
    return StepFunction(is_async, to_text, from_text)


def call(fn: Callable[..., Any], function: StepFunction, args: Sequence[Any], ctx: Any) -> Awaitable[Any]:
    """Call a step function once and return the awaitable of its result."""
    if function.takes_context is not False and function.takes_context_arg(fn):
        args = place_context(fn, ctx, args)
    if function.is_async:
        made: Awaitable[Any] = fn(*args)
        return made
    return call_in_thread(fn, args)


async def call_in_thread(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run a plain step function in a thread. If it returns an awaitable, await that on the event loop."""

    def abandoned() -> asyncio.Handle:
        scope = CURRENT_STEP.get()
        what = f"{getattr(fn, '__qualname__', 'a step')}()" if scope is None else f"step {scope.name!r}"
        return log_abandoned_thread(what)

    if (agent := AGENT_CONTEXT.get(None)) is not None:
        args = agent.for_thread(args)
    result = await in_thread(fn, *args, left=abandoned)
    return await result if inspect.isawaitable(result) else result
