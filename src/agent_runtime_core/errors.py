"""Every error that this library raises on purpose, as one tree.

AgentRuntimeError
├── InvalidArgument (ValueError)      an invalid value; nothing was written
│   ├── UnknownSetting (TypeError)    a configuration name that does not exist
│   ├── InvalidTurn                   an invalid turn, or an invalid event of a turn
│   └── BadArguments                  a tool was called with invalid arguments
├── UnknownAgent (KeyError)           no agent with that key is registered
├── UnknownRun (KeyError)             no run with that id is stored
│   └── RunNotFound (ValueError)      the orchestrator has no run with that id
├── UnknownTool (KeyError)            no tool with that name is registered
├── ToolTimeout (TimeoutError)        a tool returned no result within its own time limit
├── ToolFailed                        a tool reported that it did not succeed
├── PlanningError                     no plan, or no valid plan, could be made from a prompt
├── PortalMisuse                      a blocking call that would deadlock its own event loop
├── NotSupported                      this backend or client has no such operation
│   └── TooManyVectors                more embeddings than a store can search
├── MissingDependency (ImportError)   an optional package is not installed
├── IllegalTransition                 a run cannot change from one status to the other
├── IdempotencyConflict               the same id or key was used with other content
├── RunBusy                           the run, or its concurrency key, is in use by another process
├── RunFailed                         a run that did not succeed, from raise_for_status()
├── LeaseLost                         the claim is no longer valid; nothing was written
├── TaskNotHeld                       the worker does not own the claim of a task
├── JournalMismatch                   the code no longer matches the journal
├── UnserialisableResult (TypeError, ValueError)   a value that cannot be stored as JSON
├── RedactionFailed                   the `redact` hook failed for a value; nothing was stored
├── StepExecutionError                a step failed after its last retry
│   ├── StepInDoubt                   a step was interrupted; its outcome is unknown
│   └── EffectAlreadyDone             another fork of the run did the step, or used its approval
├── StepCancelledError                the run was cancelled before the step
├── WaitTimeout (TimeoutError)        a signal or an approval did not arrive in time
├── LimitExceeded                     a limit of the run was reached
├── OutputMismatch                    a model's answer does not have the requested type, or was truncated
│   └── AnswerRefused                 the model refused to answer, or the provider blocked its answer
├── UnknownPrice                      a limit in USD for a model without a price
├── Postponed                         the run is deferred, without using an attempt
├── ProviderError                     a request to a model provider failed
│   ├── NotConfigured (ValueError)    no API key, or no model
│   ├── AuthenticationFailed          the provider rejected the API key
│   ├── ModelNotFound                 the provider has no such model
│   ├── ContextOverflow               the messages exceed the model's context window
│   ├── RequestRefused                the provider rejected the request
│   ├── RateLimited                   too many requests; `retry_after` says how long to wait
│   ├── ProviderUnavailable           the provider failed or cannot be reached
│   ├── ProviderTimeout (TimeoutError)   the provider did not answer in time
│   ├── StreamCut                     the answer ended before it was complete
│   └── CircuitOpen (Postponed)       the request was not sent: the provider failed too often
└── StorageError
    ├── StorageBusy (TimeoutError)    no reply before the deadline; the outcome is unknown
    ├── StorageFull                   no space left; acknowledged writes are kept
    ├── StorageCorrupt                the store cannot be read; it is not modified
    ├── UnknownEncryptionKey          contents are encrypted with a key that this process does not have
    ├── StorageTooNew                 the store was written by a later version of this library
    ├── StorageOutdated               the store was written by an earlier version and must be migrated
    ├── StorageMoved                  the store was moved to another one, or is not copied completely yet
    ├── UnsafeRedis                   the Redis settings would lose runs; nothing was written
    ├── UnsafePostgres                the PostgreSQL database would lose or mix up runs; nothing was written
    └── StorageClosed                 the store was used after close, or in a forked child process
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, cast


class AgentRuntimeError(Exception):
    """Base class of all errors of this library."""

    def __str__(self) -> str:
        # KeyError.__str__ would return the repr of the message.
        return str(self.args[0]) if self.args else (type(self).__doc__ or "").strip().partition("\n")[0]

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle and copy would pass `args`, the message, to constructors that take other arguments.
        _, args, *state = cast("tuple[Any, ...]", super().__reduce__())
        return (_rebuild, (type(self), args), *state)


def _rebuild(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class InvalidArgument(AgentRuntimeError, ValueError):
    """A value is invalid; nothing was written."""


class UnknownSetting(InvalidArgument, TypeError):
    """A configuration name does not exist."""


class InvalidTurn(InvalidArgument):
    """A turn, or an event of a turn, is invalid: `field` names what is wrong. Over HTTP this is status 422.

    Args:
        field: The name of the field that is wrong.
        message: What is wrong with it.
    """

    status_code = 422

    def __init__(self, field: str, message: str) -> None:
        self.field: str = field
        super().__init__(f"{field}{'' if message.startswith('must ') else ':'} {message}")


class BadArguments(InvalidArgument):
    """The tool named `tool` was called with invalid arguments; it did not run.

    Args:
        message: What is wrong with the arguments.
        tool: The name of the tool, or "".
    """

    def __init__(self, message: str, tool: str = "") -> None:
        self.tool: str = tool
        super().__init__(f"tool {tool!r}: {message}" if tool else message)


class UnknownAgent(AgentRuntimeError, KeyError):
    """No agent with that key is registered in this process."""


class UnknownRun(AgentRuntimeError, KeyError):
    """No run with that id is stored."""


class RunNotFound(UnknownRun, ValueError):
    """The orchestrator has no run with that id."""


class UnknownTool(AgentRuntimeError, KeyError):
    """No tool with that name is registered."""


class ToolTimeout(AgentRuntimeError, TimeoutError):
    """The tool named `tool` returned no result within its own time limit of `seconds`.

    Args:
        tool: The name of the tool.
        seconds: The time limit of the tool in seconds.
        more: Text to append to the message.

    Examples:
        >>> from agent_runtime_core import ToolTimeout
        >>> print(ToolTimeout("search", 5))
        tool 'search' took longer than 5 s
    """

    def __init__(self, tool: str, seconds: float, more: str = "") -> None:
        self.tool: str = tool
        self.seconds: float = seconds
        super().__init__(f"tool {tool!r} took longer than {seconds:g} s{more}")


class ToolFailed(AgentRuntimeError):
    """The tool named `tool` reported that it did not succeed; `error` is its reason.

    Args:
        tool: The name of the tool.
        error: The reason that the tool reported.
    """

    def __init__(self, tool: str, error: str) -> None:
        self.tool: str = tool
        self.error: str = error
        super().__init__(f"tool {tool!r} did not succeed: {error}")


class PlanningError(AgentRuntimeError):
    """No plan, or no valid plan, could be made from a prompt.

    Args:
        message: The error message.
        problems: What is wrong with the plan.
        answer: The last answer of the planning model, or None.
    """

    def __init__(self, message: str, problems: Sequence[str] = (), answer: str | None = None) -> None:
        self.problems: list[str] = list(problems)
        self.answer: str | None = answer
        super().__init__(message)


class PortalMisuse(AgentRuntimeError):
    """A blocking call would deadlock its own event loop, or its argument is not a function."""


class NotSupported(AgentRuntimeError):
    """This backend or client does not support the operation."""


class TooManyVectors(NotSupported):
    """There are more embeddings than a store can search."""


class MissingDependency(AgentRuntimeError, ImportError):
    """An optional package is not installed."""


class IllegalTransition(AgentRuntimeError):
    """A run cannot change from one status to the other."""


class IdempotencyConflict(AgentRuntimeError):
    """The same run id or idempotency key was used for another run, or the same message id for another message."""


class RunBusy(AgentRuntimeError):
    """The run, or another run with its concurrency key, is already executing.

    Args:
        ago: How long ago the claim was, as text for the message.

    Attributes:
        run_id: The run that is executing. With `concurrency_key` set, that is the other run.
        worker: The worker that owns the run, or None if it is unknown.
        since: Wall-clock time of its claim, in seconds since 1970, or None.
        concurrency_key: The concurrency key that is in use, or None.
    """

    def __init__(
        self, run_id: str, worker: str | None, since: float | None, concurrency_key: str | None = None, *, ago: str = ""
    ) -> None:
        self.run_id: str = run_id
        self.worker: str | None = worker
        self.since: float | None = since
        self.concurrency_key: str | None = concurrency_key
        where = f"in {worker}" if worker else "in another process"
        what = f"run {run_id!r} is already running {where}"
        if concurrency_key is not None:
            what = f"concurrency key {concurrency_key!r} is in use by run {run_id!r} {where}"
        if since is not None:
            how_long = f", {ago} ago" if ago else ""
            what += time.strftime(f" (since %Y-%m-%d %H:%M UTC{how_long})", time.gmtime(since))
        super().__init__(
            f"{what}. Wait for it with runner.wait({run_id!r}), or cancel it with runner.cancel({run_id!r})"
        )


class RunFailed(AgentRuntimeError):
    """A run did not succeed.

    Args:
        message: The error message.

    Attributes:
        status: The final status of the run.
        error: The `ErrorInfo` of the run, or None.
        result: The `RunResult` of the run, or None.

    Examples:
        >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunFailed
        >>> class Broken(AgentRuntime):
        ...     key = "broken"
        ...     async def run(self, ctx):
        ...         raise ValueError("no city")
        >>> result = AgentRunner.open("memory://").execute_sync(Broken())
        >>> try:
        ...     result.raise_for_status()
        ... except RunFailed as error:
        ...     print(error.status, error.error.message)
        failed no city
    """

    def __init__(self, message: str, status: str, error: object | None = None) -> None:
        self.status: str = status
        self.error: object | None = error
        self.result: object | None = None
        super().__init__(message)


class LeaseLost(AgentRuntimeError):
    """The claim of a run is no longer valid; nothing was written.

    Another worker claimed the run, or the run is finished.

    Args:
        name: The run id as the caller wrote it.

    Attributes:
        key: The run id.
        token: The claim token of the write that was rejected, or None.
    """

    def __init__(self, key: str, token: str | None = None, name: str | None = None) -> None:
        self.key: str = key
        self.token: str | None = token
        printable = isinstance(token, str) and token.isprintable()
        claim = "(none)" if not token else token[:80] if printable else brief(token)
        super().__init__(
            f"claim {claim} of run {name or key!r} is no longer valid: another worker claimed the run, or it has "
            f"finished. Nothing was written. Wait for the run with runner.wait({name or key!r})"
        )


class TaskNotHeld(AgentRuntimeError):
    """The worker does not own the claim of this task; nothing was written."""


class JournalMismatch(AgentRuntimeError):
    """The code no longer matches the journal: `recorded` is in the journal, `found` is what the code does.

    Args:
        message: The error message.
        recorded: What the journal contains, or None.
        found: What the code does, or None.
    """

    def __init__(self, message: str, *, recorded: str | None = None, found: str | None = None) -> None:
        self.recorded: str | None = recorded
        self.found: str | None = found
        super().__init__(message)


class UnserialisableResult(AgentRuntimeError, TypeError, ValueError):
    """A value cannot be stored exactly as JSON.

    Attributes:
        path: Where in the value, as in `$.items[3].when`.
        reason: Why it cannot be stored.
        max_bytes: The size limit in bytes, if the value is too large.
        step_name: The step that returned the value, if it is the result of a step.

    Examples:
        >>> from agent_runtime_core import UnserialisableResult
        >>> UnserialisableResult("$.items[3]", "a set", step_name="load").path
        '$.items[3]'
    """

    def __init__(self, path: str, reason: str, *, max_bytes: int | None = None, step_name: str | None = None) -> None:
        self.path: str = path
        self.reason: str = reason
        self.max_bytes: int | None = max_bytes
        self.step_name: str | None = step_name
        super().__init__(
            f"{path}: {reason}"
            if step_name is None
            else f"step {step_name!r} returned a value that cannot be stored, at {path}: {reason}"
        )


class RedactionFailed(AgentRuntimeError):
    """The `redact` hook failed for a value of `kind`, which `owner` was to store; nothing was stored.

    Args:
        kind: The kind of the value, as the hook gets it.
        owner: What was to store the value.
        reason: What the hook did, for the message.
    """

    def __init__(self, kind: str, owner: str, reason: str) -> None:
        self.kind: str = kind
        self.owner: str = owner
        super().__init__(f"the redact hook {reason} for the {kind} of {owner}. Nothing was stored. Correct the hook")


class StepExecutionError(AgentRuntimeError):
    """A step failed after its last attempt.

    The error of the step's function is the `__cause__`. It is None if the class of that error cannot be rebuilt.

    Attributes:
        step_name: The name of the step.
        message: The message of the last failure.
        attempts: The number of attempts.
        error_type: The class of the function's error as a traceback prints it, such as `ValueError`; "" if unknown.
        error_args: The arguments of that error.
        error_attributes: The attributes of that error by name, without those that cannot be stored.
    """

    def __init__(self, step_name: str, message: str, attempts: int = 1) -> None:
        self.step_name: str = step_name
        self.message: str = message
        self.attempts: int = attempts
        self.error_type: str = ""
        self.error_args: tuple[Any, ...] = ()
        self.error_attributes: dict[str, Any] = {}
        #: The description of the function's error, for the record of a step around this step.
        self.recorded_cause: dict[str, Any] = {}
        super().__init__(f"step {step_name!r} failed after {attempts} attempt{'s' * (attempts != 1)}: {message}")


class StepInDoubt(StepExecutionError):
    """A step was interrupted, so its outcome is unknown; `message` begins with "it was".

    Args:
        step_name: The name of the step.
        message: What happened; begins with "it was".
        attempts: The number of attempts.
    """

    def __init__(self, step_name: str, message: str, attempts: int = 1) -> None:
        super().__init__(step_name, message, attempts)
        self.args: tuple[Any, ...] = (f"step {step_name!r} {message.removeprefix('it ')}",)


class EffectAlreadyDone(StepExecutionError):
    """A step was not run, because another fork of the run already did it or used its approval.

    `run_id` is the other run; `status` is "done", "begun" (its outcome is unknown) or "approved".

    Args:
        step_name: The name of the step.
        message: The error message.
        run_id: The other run.
        status: "done", "begun" (its outcome is unknown) or "approved".
    """

    def __init__(self, step_name: str, message: str, run_id: str, status: str) -> None:
        super().__init__(step_name, message)
        self.run_id: str = run_id
        self.status: str = status
        self.args: tuple[Any, ...] = (message,)


class StepCancelledError(AgentRuntimeError):
    """The run was cancelled before this step.

    Args:
        step_name: The name of the step.
    """

    def __init__(self, step_name: str) -> None:
        self.step_name = step_name
        super().__init__(f"the run was cancelled before step {step_name!r}. Let this error end run()")


class WaitTimeout(AgentRuntimeError, TimeoutError):
    """A signal or an approval did not arrive in time."""


class LimitExceeded(AgentRuntimeError):
    """A limit of the run was reached.

    Its text reaches the model and the customers of the run, so it contains no advice for operators. The command
    `agent-runtime show` prints how to raise the limit.

    Args:
        what: More about the use, for the message.

    Attributes:
        limit: The name of the limit in `RunLimits`.
        allowed: The value of the limit.
        used: What the run used, in the unit of the limit.
        result: A `RunResult` with the output so far, or None.

    Examples:
        >>> from agent_runtime_core import LimitExceeded
        >>> print(LimitExceeded("max_turns", 3, 3))
        limit reached: max_turns=3, used 3
    """

    def __init__(self, limit: str, allowed: float, used: float, what: str = "") -> None:
        self.limit: str = limit
        self.allowed: float = allowed
        self.used: float = used
        self.result: object | None = None
        about = what and f" ({what})"
        super().__init__(f"limit reached: {limit}={allowed:g}, used {used:g}{about}")


class OutputMismatch(AgentRuntimeError):
    """A model's answer does not have the requested type, or was truncated.

    Args:
        message: The error message.

    Attributes:
        text: The last answer.
        finish_reason: Why the answer is not complete: "length", "refusal", "content_filter" or
            "malformed_tool_call"; "" for a complete answer.
        result: A `RunResult` with the output so far, or None.
    """

    def __init__(self, message: str, text: str, *, finish_reason: str = "") -> None:
        self.text: str = text
        self.finish_reason: str = finish_reason
        self.result: object | None = None
        super().__init__(message)


class AnswerRefused(OutputMismatch):
    """The model refused to answer, or the provider blocked its answer; `text` contains the words of the refusal."""


class UnknownPrice(AgentRuntimeError):
    """A limit in USD applies to a model without a price, so its cost is unknown."""


class Postponed(AgentRuntimeError):
    """The run is deferred: it resumes after `after` seconds, released to the queue and without using an attempt.

    If `is_wait`, the run waits for something that comes at that time, and the time counts against no limit.
    """

    after: float = 0.0
    is_wait: bool = False


class ProviderError(AgentRuntimeError):
    """A request to a model provider failed.

    Args:
        message: The error message.

    Attributes:
        provider: The name of the provider.
        model: The name of the model.
        status: The HTTP status, or None.
        code: The provider's error code, or "".
        retry_after: Seconds that the provider asks to wait, or None.
        usage: The usage that the provider reported for an answer that could not be used, as in `LLMResponse`.
        cost_usd: The cost that it reported for that answer, or None.
        retriable: Whether the same request may succeed later.
    """

    retriable: bool = False

    def __init__(
        self, message: str = "", *, provider: str = "", model: str = "", status: int | None = None, code: str = "",
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        self.provider: str = provider
        self.model: str = model
        self.status: int | None = status
        self.code: str = code
        self.retry_after: float | None = retry_after
        self.usage: dict[str, int] = {}
        self.cost_usd: float | None = None
        super().__init__(*([message] if message else []))


class NotConfigured(ProviderError, ValueError):
    """The client lacks an API key or a model, so it cannot send a request."""


class AuthenticationFailed(ProviderError):
    """The provider rejected the API key."""


class ModelNotFound(ProviderError):
    """The provider does not offer such a model."""


class ContextOverflow(ProviderError):
    """The messages exceed the model's context window."""


class RequestRefused(ProviderError):
    """The provider rejected the request."""


class RateLimited(ProviderError):
    """The provider received too many requests."""

    retriable = True


class ProviderUnavailable(ProviderError):
    """The provider failed or cannot be reached."""

    retriable = True


class ProviderTimeout(ProviderError, TimeoutError):
    """The provider did not answer in time."""

    retriable = True


class StreamCut(ProviderError):
    """The answer ended before it was complete; the partial answer is discarded."""

    retriable = True


class CircuitOpen(ProviderError, Postponed):
    """The request was not sent, because this provider failed too often for this model. Retry after `after` seconds.

    Args:
        message: The error message.
        after: Seconds until the next request may be sent.
        provider: The name of the provider.
        model: The name of the model.
    """

    def __init__(self, message: str = "", *, after: float, provider: str = "", model: str = "") -> None:
        self.after: float = after
        super().__init__(message, provider=provider, model=model)


class StorageError(AgentRuntimeError):
    """An operation of a store failed."""


class StorageBusy(StorageError, TimeoutError):
    """No reply before the deadline: the outcome of the write is unknown, and repeating it is safe."""

    #: How often the write was attempted.
    tries: int = 1


class StorageFull(StorageError):
    """There is no space left in the store; acknowledged writes are kept."""


class StorageCorrupt(StorageError):
    """The store cannot be read; it is not modified."""


class UnknownEncryptionKey(StorageError):
    """Stored contents are encrypted with a key that the codec does not have.

    Args:
        has_codec: Whether a payload codec is set.

    Attributes:
        key_id: The id of that key.
        place: Whose contents these are, such as "input of run" and its id.
    """

    def __init__(self, key_id: str, place: str, *, has_codec: bool = True) -> None:
        self.key_id: str = key_id
        self.place: str = place
        reason = "which is none of the keys of the codec. Add that key"
        if not has_codec:
            reason = "and no payload codec is set. Set payload_codec"
        super().__init__(f"{place} is encrypted with key {brief(key_id)}, {reason}")


class StorageTooNew(StorageError):
    """The store was written by a later version of this library."""


class StorageOutdated(StorageError):
    """The store was written by an earlier version of this library and must be migrated before use."""


class StorageMoved(StorageError):
    """The store was moved to another store, or is not copied completely yet; nothing was written. Reads are possible.

    `to` names the other store. It is None for a store that is not copied completely.

    Args:
        message: The error message.
        to: The other store, or None for a store that is not copied completely.
    """

    def __init__(self, message: str, to: str | None = None) -> None:
        self.to: str | None = to
        super().__init__(message)


class UnsafeRedis(StorageError):
    """The Redis settings would lose runs; nothing was written. `refused` contains the unsafe settings by name.

    Args:
        message: The error message.
        refused: The unsafe settings by name, with the reason.
    """

    def __init__(self, message: str, refused: Mapping[str, str]) -> None:
        self.refused: dict[str, str] = dict(refused)
        super().__init__(message)


class UnsafePostgres(StorageError):
    """The PostgreSQL database would lose or mix up runs; nothing was written. `refused` lists what is unsafe, by name.

    Args:
        message: The error message.
        refused: The unsafe settings by name, with the reason.
    """

    def __init__(self, message: str, refused: Mapping[str, str]) -> None:
        self.refused: dict[str, str] = dict(refused)
        super().__init__(message)


class StorageClosed(StorageError):
    """The store was closed, or it was opened by the parent of this forked process."""


#: Which error of a group decides what the group means, in order of precedence. An error that forbids another attempt
#: precedes an error that allows it, and a failure precedes a deferral: the code has to be corrected in any case.
_PRECEDENCE: Final[tuple[tuple[type[BaseException], ...], ...]] = (
    (KeyboardInterrupt, SystemExit),
    (LeaseLost,),
    (JournalMismatch, StepInDoubt, EffectAlreadyDone),
    (LimitExceeded, UnknownPrice, OutputMismatch),
    (UnserialisableResult, RedactionFailed, InvalidArgument, NotSupported, MissingDependency, IdempotencyConflict),
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
    """Return the precedence of an error, and its order within equal precedence; the least value decides."""
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


# How errors and values are printed in messages and records: cut off, and without a failing __str__ or __repr__.

_SUSPENDED: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

MOST_NAMED = 5  # errors of a group that its message lists
LONGEST = 16_384  # characters kept of an error message or a traceback, so that it fits into a journal record


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error may be a Ctrl-C, which only the main thread receives.

    A future may bring the main thread an error that another thread raised: a frame of it is not below the main thread's
    first frame. A coroutine that ended does not know who called it.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    first = _first(sys._getframe())
    starts = (_first(frame) for frame, _ in traceback.walk_tb(error.__traceback__))
    return all(each is first or each.f_code.co_flags & _SUSPENDED for each in starts)


def _first(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


@contextmanager
def described() -> Iterator[None]:
    """Suppress what the methods of a foreign class raise while it is described, even SystemExit, but no Ctrl-C."""
    try:
        yield
    except BaseException as error:
        if is_interrupt(error):
            raise


def shortened(text: str) -> str:
    """Return `text`, without its middle if it is more than twice as long as `LONGEST` characters."""
    if len(text) <= 2 * LONGEST:  # a shortened text, with a few words added, is not shortened again
        return text
    half = LONGEST // 2
    return f"{text[:half]}… ({len(text) - 2 * half} characters left out) …{text[-half:]}"


def text_of(error: BaseException) -> str:
    """Return an error's message, or its class name without a message; for a group, also the errors inside it."""
    with described():
        text = shortened(str(error)) or type(error).__name__
        return text if not isinstance(error, BaseExceptionGroup) else shortened(f"{text}: {_contained(error)}")
    return f"{type(error).__name__} (its message is not available)"


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the errors of a group in order, including those inside groups; for any other error, the error itself."""
    found: list[BaseException] = []
    pending = [error]
    while pending:
        each = pending.pop()
        if isinstance(each, BaseExceptionGroup):
            pending += reversed(each.exceptions)
        else:
            found.append(each)
    return found


def _contained(group: BaseExceptionGroup[BaseException]) -> str:
    errors = leaves_of(group)
    more = [f"{len(errors) - MOST_NAMED} more"] if len(errors) > MOST_NAMED else []
    return "; ".join([*(f"{type(each).__name__}: {text_of(each)}" for each in errors[:MOST_NAMED]), *more])


def brief(value: object, most: int = 80) -> str:
    """Return the repr of a value for an error message, cut at `most` characters; its type name if repr() fails."""
    kind = type(value)
    if kind is int and cast("int", value).bit_length() > 256:
        return f"<int of {cast('int', value).bit_length()} bits>"  # repr() raises for more than 4,300 digits
    if kind in (str, bytes):
        value = cast("str", value)[: most + 1]
    text = f"<{kind.__name__}>"
    with described():
        text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def brief_kind(value: object) -> str:
    """Return a number as `brief` does, but only type and length of a text: a stored text may be of a user."""
    if isinstance(value, str):
        return f"a string of {len(value):,} characters"
    if isinstance(value, bytes):
        return f"bytes of length {len(value):,}"
    return brief(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"
