"""Decide what an error means for a run, also if it is a group of errors."""

from __future__ import annotations

from typing import Final

from ..errors import (
    EffectAlreadyDone,
    IdempotencyConflict,
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    MissingDependency,
    NotSupported,
    OutputMismatch,
    PortalMisuse,
    Postponed,
    ProviderError,
    RateLimited,
    StepCancelledError,
    StepInDoubt,
    StorageError,
    UnknownPrice,
    UnserialisableResult,
    leaves_of,
)

#: Which error of a group decides what the group means, in order of precedence. An error that forbids another attempt
#: precedes one that allows it, and a failure precedes a deferral: the code has to be corrected in any case.
_PRECEDENCE: Final[tuple[tuple[type[BaseException], ...], ...]] = (
    (KeyboardInterrupt, SystemExit),
    (LeaseLost,),
    (JournalMismatch, StepInDoubt, EffectAlreadyDone),
    (LimitExceeded, UnknownPrice, OutputMismatch),
    (UnserialisableResult, InvalidArgument, NotSupported, MissingDependency, IdempotencyConflict),
    (StepCancelledError, PortalMisuse),
)


def holds(error: BaseException, kinds: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
    """Return whether the error, or an error inside the group, is an instance of `kinds`."""
    if not isinstance(error, BaseExceptionGroup):
        return isinstance(error, kinds)
    return any(isinstance(each, kinds) for each in leaves_of(error))


def deciding_error(error: BaseException) -> BaseException:
    """Return the error that decides what happens after `error`.

    For a group (`asyncio.TaskGroup`, anyio) this is the error with the highest precedence: first by `_PRECEDENCE`, then
    a request that a provider rejected, an error of a store, any other error, the longest deferral, an outage of a
    provider, and last a cancellation. If several other errors share the highest precedence, it is the group of them. An
    error that is not a group decides itself.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = leaves_of(error)
    first = min(leaves, key=_rank)
    if _rank(first)[0] != _OTHER or sum(_rank(each)[0] == _OTHER for each in leaves) == 1:
        return first
    return error.subgroup(Exception) or first


_REFUSED: Final = len(_PRECEDENCE)
_STORAGE, _OTHER, _DEFERRED, _OUTAGE, _CANCELLED = range(_REFUSED + 1, _REFUSED + 6)


def _rank(error: BaseException) -> tuple[int, float]:
    """Return the precedence of an error, and its order among errors with the same one; the least value decides."""
    for precedence, kinds in enumerate(_PRECEDENCE):
        if isinstance(error, kinds):
            return precedence, 0.0
    if isinstance(error, Postponed):
        return _DEFERRED, -error.after
    if isinstance(error, RateLimited) and error.retriable and error.retry_after:
        return _DEFERRED, -error.retry_after
    if isinstance(error, ProviderError):
        return _OUTAGE if error.retriable else _REFUSED, 0.0
    if isinstance(error, StorageError):
        return _STORAGE, 0.0
    if isinstance(error, RuntimeError) and str(error).startswith("TaskGroup <") and "shutting down" in str(error):
        return _CANCELLED, 0.0  # create_task() on a TaskGroup that another error is cancelling
    return _OTHER if isinstance(error, Exception) else _CANCELLED, 0.0
