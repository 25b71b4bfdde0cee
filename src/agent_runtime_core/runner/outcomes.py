"""Decide what the outcome of an attempt means for its run. Nothing here waits or writes.

`RunExecution` collects the `AttemptFacts`, calls one of these pure functions, and carries the decision out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from .._core.clock import aware
from .._core.codec.json import encode
from .._core.redaction import Redaction
from .._core.validation import must
from .._execution.result_codec import error_payload, redacted_error, redacted_run_result
from .._execution.run_control import Stop
from ..errors import (
    EffectAlreadyDone,
    IdempotencyConflict,
    InvalidArgument,
    JournalMismatch,
    LimitExceeded,
    MissingDependency,
    NotSupported,
    OutputMismatch,
    Postponed,
    ProviderError,
    RateLimited,
    RedactionFailed,
    StepInDoubt,
    UnknownPrice,
    UnserialisableResult,
    deciding_error,
    shortened,
    text_of,
)
from ..interfaces import ErrorInfo, RunResult
from ..queue.records import RunRow
from ..retry import run_backoff
from ..status import RunStatus
from .settings import RunnerConfig

_DEFERRED = "deferred_seconds"
JITTER = 0.2  # the largest share that is added to a delay

#: Another attempt would fail in the same way.
FINAL_ERRORS = (
    JournalMismatch, StepInDoubt, EffectAlreadyDone, UnserialisableResult, InvalidArgument, NotSupported,
    LimitExceeded, UnknownPrice, OutputMismatch, MissingDependency, IdempotencyConflict, RedactionFailed,
)  # fmt: skip


#: Sums of the same costs in another order differ by less.
_ROUNDING: Final = 1 + 1e-9


class NotSaved(Exception):
    """The messages of a run were not appended to its conversation; `reason` is the error."""

    def __init__(self, reason: Exception) -> None:
        super().__init__()
        self.reason: Exception = reason


class TimeLimitReached(Exception):
    """A call under the run's time limit was not awaited any longer."""


def no_usage() -> dict[str, Any]:
    """Return the usage of a run without a context."""
    return {}


def _no_jitter() -> float:
    return 0.0


class AttemptFacts(NamedTuple):
    """What is known about an attempt when its outcome is decided. Times are in seconds.

    Attributes:
        now: Wall time.
        config: Settings of the runner, with the time limits of the agent.
        time_left: What is left of `run_timeout_seconds`. Time that the run waited in memory does not count.
        progressed: The run recorded a step, wait or value during this attempt.
        deferred_seconds: The part of `run_timeout_seconds` that earlier deferrals have used.
        inline: The next attempt takes place in the same process, and is not queued.
        jitter: Returns a random share between 0 and `JITTER`, by which a deferral grows.
        usage: Returns what the run used. It reads the whole journal, so it is called only for a partial result.
        stop: Why the attempt was stopped before its code ended; None if it was not.
        parked: The run is parked.
        stall_left: What is left of `stall_timeout_seconds`.
        own_limits: The names of the settings that are the agent's, and not the runner's.
    """

    row: RunRow
    now: float
    config: RunnerConfig
    time_left: float = float("inf")
    progressed: bool = False
    deferred_seconds: float = 0.0
    inline: bool = False
    jitter: Callable[[], float] = _no_jitter
    usage: Callable[[], dict[str, Any]] = no_usage
    stop: Stop | None = None
    parked: bool = False
    stall_left: float = math.inf
    own_limits: Collection[str] = ()


@dataclass(frozen=True)
class End:
    """The run finishes. `event` is the payload of its last event; for a success it is the result itself."""

    status: RunStatus
    result: RunResult
    event: dict[str, Any] | None = None


@dataclass(frozen=True)
class Cancelled:
    """The run finishes as cancelled, after the agent's `cancel` hook. `returned` is what the agent returned, if any."""

    returned: RunResult | None = None


@dataclass(frozen=True)
class AskAgent:
    """The agent's `on_error` hook is asked first; `of_failure` decides with its answer."""

    error: BaseException


@dataclass(frozen=True)
class Retry:
    """Another attempt follows after `delay` seconds. A deferred run resumes without using an attempt."""

    delay: float
    error: ErrorInfo
    failures: int
    deferred: bool = False

    @property
    def error_text(self) -> str:
        """The error as the row stores it."""
        return encode(error_payload(self.error))


class RetryHere(Retry):
    """The next attempt takes place in this process."""


class RetryLater(Retry):
    """The next attempt is queued."""


@dataclass(frozen=True)
class Released:
    """The claim is released as if the run had not been claimed."""


@dataclass(frozen=True)
class Left:
    """The run is left to another worker: this worker lacks a key, or its code does not have the journal's version."""

    cause: Stop


@dataclass(frozen=True)
class NothingToDo:
    """Another worker claimed the run, or the run is parked: this claim writes nothing more."""


@dataclass(frozen=True)
class StoreAway:
    """The attempt resumes in this process as soon as its store answers. No attempt is used. `error` is of the store."""

    error: Exception | None = None


Decision = End | Cancelled | AskAgent | Retry | Released | Left | NothingToDo | StoreAway


def before_start(facts: AttemptFacts, crashes: int, recorded: int) -> End | Cancelled | None:
    """Return how the run finishes without an attempt, or None if it may start.

    Args:
        facts: The run.
        crashes: Crashes in a row without a new record.
        recorded: Records in the journal.
    """
    row = facts.row
    if crashes >= facts.config.max_crashes and not facts.inline:
        if row.cancel_at is not None:  # its hook perhaps crashed the workers
            return End(RunStatus.CANCELLED, RunResult(), {})
        message = f"{crashes} crash{'es' * (crashes != 1)} in a row without progress"
        error = ErrorInfo("Poisoned", message, retriable=False)
        return End(RunStatus.DEAD, RunResult(usage=facts.usage(), error=error), error_payload(error) or {})
    if row.cancel_at is not None or facts.stop is Stop.CANCEL:
        return Cancelled() if recorded else End(RunStatus.CANCELLED, RunResult(), {})
    if row.expires_at is not None and facts.now > row.expires_at and not recorded:
        message = f"the run did not start within {row.expires_at - row.created_at:g} s"
        return _timed_out(facts._replace(usage=no_usage), "Expired", message, {})
    if row.deadline is not None and facts.now >= row.deadline:
        return _past_deadline(facts._replace(usage=no_usage), row.deadline)
    return None


def of_result(result: Any, facts: AttemptFacts) -> Decision:
    """Decide what follows from what the agent's `run` returned."""
    if not isinstance(result, RunResult):
        fix = "Return RunResult(final_output={...})"
        return AskAgent(must(f"run() of agent {facts.row.agent!r}", "return a RunResult", result, fix))
    result = with_counted_usage(result, facts.usage())
    if result.error is None:
        return End(RunStatus.SUCCEEDED, result)
    if not isinstance(result.error, ErrorInfo):
        where = f"error of the RunResult of agent {facts.row.agent!r}"
        return AskAgent(must(where, "be an ErrorInfo", result.error, "Write ErrorInfo(type, message)"))
    return failed(result, result.error, facts)


def of_error(error: BaseException, facts: AttemptFacts) -> Decision:
    """Decide what follows from an exception of the agent's code, of a store, or of a time limit."""
    if isinstance(error, TimeLimitReached):
        return of_stop(passed_limit(facts), facts)
    cause = deciding_error(error)
    if isinstance(cause, Postponed):
        return _deferred(cause, cause.after, facts, is_wait=cause.is_wait)
    if isinstance(cause, RateLimited) and cause.retriable:
        # If the provider asks for longer than the longest delay, it is a failure: `execute` would wait for it.
        after = cause.retry_after or 0.0
        if 0 < after <= facts.config.retry_backoff_max:
            return _deferred(cause, after, facts)
    return AskAgent(error)


def of_failure(error: BaseException, info: ErrorInfo, facts: AttemptFacts) -> Decision:
    """Decide what follows from an exception, as `info` describes it."""
    cause = deciding_error(error)
    if isinstance(cause, FINAL_ERRORS) or (isinstance(cause, ProviderError) and not cause.retriable):
        info.retriable = False
    partial = cause.result if isinstance(cause, LimitExceeded | OutputMismatch) else None
    partial = partial if isinstance(partial, RunResult) else RunResult()
    return failed(with_counted_usage(partial, facts.usage()), info, facts)


def of_stop(stop: Stop, facts: AttemptFacts, returned: RunResult | None = None) -> Decision:
    """Decide what follows from a stop. The cause alone decides, whatever the code raised.

    Args:
        stop: Why the attempt was stopped.
        facts: The attempt.
        returned: What the code of a cancelled run returned in time.
    """
    match stop:
        case Stop.LOST:
            return NothingToDo()
        case Stop.RELEASE:
            return Released()
        case Stop.CANCEL:
            return Cancelled(returned)
        case Stop.OTHER_CODE | Stop.MISSING_KEY:
            return Left(stop)
        case Stop.OUTAGE:
            return StoreAway()
        case Stop.DEADLINE:
            return _past_deadline(facts, facts.row.deadline or facts.now)
        case Stop.TIME_LIMIT:
            return _past_time_limit(facts)
        case Stop.STALLED:
            return _stalled(facts)


def passed_limit(facts: AttemptFacts) -> Stop:
    """Return which limit of time was reached by an attempt that is not awaited any longer, unless it was stopped."""
    if facts.stop is not None:
        return facts.stop
    is_past_deadline = facts.row.deadline is not None and facts.now >= facts.row.deadline
    if is_past_deadline:
        return Stop.DEADLINE
    return Stop.STALLED if facts.stall_left < facts.time_left else Stop.TIME_LIMIT


def _past_time_limit(facts: AttemptFacts) -> End:
    limit, name = facts.config.run_timeout_seconds, "run_timeout_seconds"
    message = f"the attempt took more than {limit:g} s ({name} of the {_owner(name, facts)})"
    if facts.deferred_seconds:
        cause = deferral(facts.row)
        message += f", {facts.deferred_seconds:.3g} s of which it was deferred by {cause['type']}: {cause['message']}"
    return _timed_out(facts, "TimedOut", message, {"timeout_seconds": limit})


def _stalled(facts: AttemptFacts) -> End:
    limit, name = facts.config.stall_timeout_seconds, "stall_timeout_seconds"
    assert limit is not None
    message = (
        f"agent {facts.row.agent!r} recorded nothing for {limit:g} s ({name} of the {_owner(name, facts)}). "
        "Divide its work into shorter steps, call ctx.emit in a long step, or raise the limit"
    )
    return _timed_out(facts, "Stalled", message, {name: limit})


def _owner(limit: str, facts: AttemptFacts) -> str:
    return "agent" if limit in facts.own_limits else "runner"


def failed(result: RunResult, error: ErrorInfo, facts: AttemptFacts) -> Decision:
    """Decide what follows from an attempt that failed with `error`: another attempt, or the end of the run."""
    error, row = recordable(error), facts.row
    if not error.retriable or row.failures + 1 >= facts.config.max_retries:
        result.error = error
        return End(RunStatus.FAILED, result, error_payload(error) or {})
    delay = run_backoff(facts.config.retry_backoff_base, row.attempt, facts.config.retry_backoff_max)
    return (RetryHere if facts.inline else RetryLater)(delay, error, row.failures + 1)


def _deferred(error: BaseException, seconds: float, facts: AttemptFacts, *, is_wait: bool = False) -> Decision:
    """Defer the run without using an attempt, or end it if it could not resume within its limits of time.

    Time deferred and time worked since the last recorded step count together against `run_timeout_seconds`. A wait does
    not count, and ends at its time: what the run waits for is there then.
    """
    limit, name = facts.config.run_timeout_seconds, "run_timeout_seconds"
    cause, kind = text_of(error), type(error).__name__
    deadline = facts.row.deadline
    left = limit if facts.progressed else facts.time_left
    at_most = left if deadline is None else min(left, deadline - facts.now)
    if deadline is not None and (at_most < left or is_wait) and seconds >= deadline - facts.now:
        message = (
            f"the run cannot resume before its deadline, {aware(deadline):%Y-%m-%d %H:%M:%S} UTC: {kind} defers it "
            f"for {seconds:.3g} s ({cause})"
        )
        return _timed_out(facts, "DeadlineExceeded", message, {"deadline": deadline}, cause=kind)
    if seconds >= left and not is_wait:
        message = (
            f"the run cannot resume within {name}={limit:g} of the {_owner(name, facts)}: {kind} defers it for "
            f"{seconds:.3g} s, and {max(left, 0):.3g} s are left ({cause})"
        )
        return _timed_out(facts, "TimedOut", message, {"timeout_seconds": limit}, cause=kind)
    delay = seconds if is_wait else seconds * (1 + facts.jitter())
    delay = delay if delay < at_most else seconds
    used = 0.0 if math.isinf(limit) else limit - left  # without a limit nothing needs to be counted
    info = recordable(ErrorInfo(kind, cause, details={_DEFERRED: used if is_wait else used + delay}))
    return (RetryHere if facts.inline else RetryLater)(delay, info, facts.row.failures, deferred=True)


def _past_deadline(facts: AttemptFacts, deadline: float) -> End:
    return _timed_out(facts, "DeadlineExceeded", "the run's deadline has passed", {"deadline": deadline})


def _timed_out(facts: AttemptFacts, kind: str, message: str, event: dict[str, Any], **details: Any) -> End:
    error = ErrorInfo(kind, message, retriable=False, details=details)
    return End(RunStatus.TIMED_OUT, RunResult(usage=facts.usage(), error=error), event)


def with_counted_usage(result: RunResult, counted: dict[str, Any]) -> RunResult:
    """Return the result of a run with what the run counted.

    The usage of one loop leaves out what tools have charged, and other loops. A usage that says more is kept.
    """
    reported = result.usage
    if not counted or (isinstance(reported, dict) and any(_is_more(*each, counted) for each in reported.items())):
        return result
    result = copy(result)
    result.usage = {**(reported or {}), **counted}
    return result


def _is_more(name: str, value: Any, counted: dict[str, Any]) -> bool:
    return isinstance(value, (int, float)) and name in counted and value > counted[name] * _ROUNDING


def redacted_retry(redaction: Redaction | None, retry: Retry) -> Retry:
    """Return when the run is tried again, with the error that may be stored."""
    return retry if redaction is None else replace(retry, error=redacted_error(redaction, retry.error))


def redacted_end(redaction: Redaction | None, end: End, run_id: str) -> End:
    """Return how the run finishes, with the result that may be stored.

    Raises:
        RedactionFailed: The hook failed for the result.
    """
    if redaction is None:
        return end
    result = redacted_run_result(redaction, end.result, run_id)
    is_error = end.event is not None and "type" in end.event
    return End(end.status, result, error_payload(result.error) if is_error else end.event)


def without_result(end: End, refusal: UnserialisableResult | RedactionFailed) -> End:
    """Return a failed `end` without the agent's result, which cannot be stored: that the run failed is recorded."""
    error = copy(end.result.error)
    assert error is not None
    error.details = {**error.details, "left_out": str(refusal)}
    return End(end.status, RunResult(error=error), error_payload(error) or {})


def stored_details(row: RunRow) -> dict[str, Any]:
    """Return the details of the last error of a run that goes on; empty if there are none."""
    error = row.decoded("error", json.loads) if row.error else {}
    details = error.get("details") if isinstance(error, dict) else None
    return details if isinstance(details, dict) else {}


def deferral(row: RunRow) -> dict[str, Any]:
    """Return the error that deferred the run since its last recorded step, as it is stored; empty if none did."""
    return row.decoded("error", json.loads) if _DEFERRED in stored_details(row) else {}


def deferred_seconds(row: RunRow) -> float:
    """Return the part of `run_timeout_seconds` that deferrals and the attempts between them have used."""
    return float(found["details"][_DEFERRED]) if (found := deferral(row)) else 0.0


def recordable(error: ErrorInfo) -> ErrorInfo:
    """Return the error as a record can hold it, without what is not JSON-serializable or too long."""
    try:
        encode(error_payload(error))
    except UnserialisableResult as refusal:
        kind, message, stack = (shortened(str(each)) for each in (error.type, error.message, error.stack))
        return ErrorInfo(kind, message, stack, bool(error.retriable), {"left_out": str(refusal)})
    return error
