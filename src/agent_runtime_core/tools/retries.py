"""Retries of a tool: which errors are retried, and after how many seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

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
    Postponed,
    StepCancelledError,
    StepInDoubt,
    StorageError,
    UnserialisableResult,
    holds,
    leaves_of,
)

__all__ = ["RetryDelay", "RetryOn", "check_retries", "delay_before_retry", "is_retried"]


RetryOn: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
#: Seconds, or a function such as `Backoff()`, which gets the number of the failed attempt and a source of randomness.
RetryDelay: TypeAlias = float | Callable[[int, Any], float]

#: Errors after which another attempt would fail in the same way, or that end the run.
_NEVER_RETRIED: Final = (
    EffectAlreadyDone,
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    NotSupported,
    PortalMisuse,
    Postponed,
    StepCancelledError,
    StepInDoubt,
    StorageError,
    UnserialisableResult,
)


class Retried(Protocol):
    """The settings of a tool for its retries."""

    @property
    def name(self) -> str: ...
    @property
    def retries(self) -> int: ...
    @property
    def retry_delay(self) -> RetryDelay: ...
    @property
    def retry_on(self) -> RetryOn: ...


def check_retries(tool: Retried) -> None:
    """Raise InvalidArgument unless the settings are valid."""
    retries, delay, retry_on = tool.retries, tool.retry_delay, tool.retry_on
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries < 2**31:
        raise must(f"tool {tool.name!r}: retries", "be an integer of at least 0", retries)
    if not callable(delay) and not (is_number(delay) and 0 <= delay < math.inf):
        constraint = "be a number of seconds of at least 0, or a function such as Backoff()"
        raise must(f"tool {tool.name!r}: retry_delay", constraint, delay)
    kinds = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    are_classes = all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds)
    if not are_classes and (isinstance(retry_on, (type, tuple)) or not callable(retry_on)):
        constraint = "be an exception class, a tuple of them or a function of the error"
        raise must(f"tool {tool.name!r}: retry_on", constraint, retry_on)


def is_retried(tool: Retried, error: BaseException) -> bool:
    """Return whether another attempt may follow an attempt that failed with this error."""
    if holds(error, _NEVER_RETRIED):
        return False
    retry_on = tool.retry_on
    if isinstance(retry_on, (type, tuple)):
        return isinstance(error, retry_on) or all(isinstance(each, retry_on) for each in leaves_of(error))
    return bool(retry_on(error))


def delay_before_retry(tool: Retried, error: BaseException, attempt: int, random: Any) -> float | None:
    """Return the seconds before the next attempt, or None if there is none.

    Args:
        tool: The tool.
        error: What the last attempt raised.
        attempt: The number of that attempt, counted from 1.
        random: The source of random numbers for a delay that is a function.
    """
    if attempt > tool.retries:
        return None
    try:
        if not is_retried(tool, error):
            return None
        delay = tool.retry_delay
        return max(float(delay(attempt, random) if callable(delay) else delay), 0.0)
    except Exception:  # an error in retry_on or retry_delay must not replace the error of the tool
        log.exception("tool %r is not retried: its retry_on or retry_delay raised an error", tool.name)
        return None
