"""Options of a step: retries, time limit, result, and what to do if the outcome of an earlier attempt is unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .._core.codec.json import MAX_RESULT
from .._core.codec.typed import codec_for
from .._core.log import log
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

#: Exceptions by which the code of a framework leaves a step on purpose, such as a question to a person. The step has
#: not failed: they are raised unchanged, without another attempt, and the step runs again when it is called again.
CONTROL_FLOW: Final[list[type[Exception]]] = []

#: The errors that a step retries by default.
_USUAL: Final = (Exception,)

#: Policies of a fork for a guarded step that another run of its lineage has done.
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
        result: The result that the step then has.
    """

    result: Any = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class StepOptions:
    """The options of a step, checked. `RunContext.step` and `Step` list them for users, with these defaults.

    Attributes:
        retries: Attempts after the first one.
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
