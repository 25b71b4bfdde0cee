"""How a step is tried: how often, for how long, and what to do when nobody knows how an earlier try ended."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from .._core.validation import is_number
from ..errors import (
    EffectAlreadyDone,
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    NotSupported,
    PortalMisuse,
    StepCancelledError,
    StepInDoubt,
    UnserialisableResult,
    brief,
    holds,
    leaves_of,
)
from ..retry import Delay, at_least_zero

log: logging.Logger = logging.getLogger("agent_runtime_core")

#: Trying these again would only do the same, or harm.
NEVER_RETRIED = (
    LeaseLost,
    JournalMismatch,
    InvalidArgument,
    UnserialisableResult,
    StepInDoubt,
    EffectAlreadyDone,
    StepCancelledError,
    NotSupported,
    PortalMisuse,
)

#: What a fork does at a guarded step that another run of its lineage did.
EFFECTS: Final = ("refuse", "reuse", "ask", "repeat")

RetryOn = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
#: "retry", "fail", "review", or a function asked what became of the step.
InDoubt = str | Callable[..., Any]


@dataclass(frozen=True)
class AlreadyDone:
    """What a check function for a step in doubt answers when the effect is there: the step's result."""

    result: Any = None


@dataclass(frozen=True, repr=False, eq=False)
class Policy:
    """How a step is tried: `retries` after the first try, seconds for `timeout` and `retry_delay`."""

    retries: int = 0
    retry_delay: float = 1.0
    timeout: float | None = None
    retry_on: RetryOn = Exception
    backoff: Delay | None = None
    on_in_doubt: InDoubt = "retry"

    def __post_init__(self) -> None:
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or not 0 <= self.retries < 2**31:
            raise InvalidArgument(f"retries is a count of at least 0, not {brief(self.retries)}")
        if self.timeout is not None and not (is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise InvalidArgument(
                f"timeout is a number of seconds above 0, or None for no limit, not {brief(self.timeout)}"
            )
        at_least_zero("retry_delay", self.retry_delay)
        kinds = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        if callable(self.retry_on) and not isinstance(self.retry_on, type):
            kinds = ()  # a function that is asked
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise InvalidArgument(
                f"retry_on is a class of errors, a tuple of them or a function of the error, not {brief(self.retry_on)}"
            )
        if self.backoff is not None and not callable(self.backoff):
            raise InvalidArgument(
                f"backoff is Backoff(...) or a function of (attempt, random), not {brief(self.backoff)}"
            )
        if not callable(self.on_in_doubt) and self.on_in_doubt not in ("retry", "fail", "review"):
            raise InvalidArgument(
                f"on_in_doubt is 'retry', 'fail', 'review' or a check function, not {brief(self.on_in_doubt)}"
            )

    def delay(self, error: BaseException, attempt: int, random: Any) -> float | None:
        """Return the seconds until the next attempt after `error` in attempt number `attempt`; None for no other one.

        A group is retried if `retry_on` wants it, or each error inside it.
        """
        if attempt > self.retries or holds(error, NEVER_RETRIED):
            return None
        try:
            if not self._retries_on(error) and not all(map(self._retries_on, leaves_of(error))):
                return None
            if self.backoff is None:
                return self.retry_delay
            return at_least_zero("what backoff gives", self.backoff(attempt, random))
        except Exception:  # a mistake in what was to help must not take the place of the step's own error
            log.exception("retry_on or backoff failed after %s: no other try", type(error).__name__)
            return None

    def _retries_on(self, error: BaseException) -> bool:
        if isinstance(self.retry_on, (type, tuple)):
            return isinstance(error, self.retry_on)
        return bool(self.retry_on(error))


DEFAULT_FIELDS = (0, 1.0, None, Exception, None, "retry")  # the fields of a step of which nothing is said
DEFAULT_POLICY = Policy()
