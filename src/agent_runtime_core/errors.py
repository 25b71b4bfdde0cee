"""Every error this library raises on purpose, in one tree.

AgentRuntimeError
├── InvalidArgument (ValueError)      a value that cannot be used; nothing was written
│   ├── UnknownSetting (TypeError)    a configuration name nobody reads
│   ├── InvalidTurn                   a turn, or an event of one, that cannot be understood
│   └── BadArguments                  a tool was called with what it does not take
├── UnknownAgent (KeyError)           no agent of that key is registered here
├── UnknownRun (KeyError)             no run of that id is stored here
│   └── RunNotFound (ValueError)      the orchestrator has no run of that id
├── UnknownTool (KeyError)            no tool of that name is registered here
├── ToolTimeout (TimeoutError)        a tool gave no answer within its own time limit
├── ToolFailed                        a tool told that it did not succeed
├── PlanningError                     no plan could be made of a prompt, or one that cannot be carried out
├── PortalMisuse                      a blocking call from the loop that would have to answer it
├── NotSupported                      this backend or client has no such operation
│   └── TooManyVectors                more embeddings than a store can search one by one
├── MissingDependency (ImportError)   an optional package is not installed
├── IllegalTransition                 a run may not go from that status to this one
├── IdempotencyConflict               the same id or key with another agent or input
├── RunBusy                           another live process holds the run
├── RunFailed                         raise_for_status() of a run that did not succeed
├── LeaseLost                         the claim was superseded; nothing was written
├── TaskNotHeld                       a worker does not, or no longer, have the claim of a task
├── JournalMismatch                   the code no longer matches what was recorded
├── UnserialisableResult (TypeError, ValueError)
├── StepExecutionError                a step failed after its last retry
│   ├── StepInDoubt                   a step began in an earlier life and nobody knows how it ended
│   └── EffectAlreadyDone             another run of the same lineage of forks did the step, or spent its approval
├── StepCancelledError                the run was cancelled before the step
├── WaitTimeout (TimeoutError)        a signal or an approval did not come in time
├── LimitExceeded                     a limit of the run was reached
├── OutputMismatch                    a model's answer is not of the type that was asked for, or was cut
├── UnknownPrice                      a limit in USD, and a model that has no price
├── Postponed                         not now: the run is taken up again later, at no cost to it
├── ProviderError                     a model's provider did not do what was asked
│   ├── NotConfigured (ValueError)    no key, or no model
│   ├── AuthenticationFailed          the provider does not accept the key
│   ├── ModelNotFound                 the provider has no such model
│   ├── ContextOverflow               the messages are longer than the model can read
│   ├── RequestRefused                the provider does not accept the request
│   ├── RateLimited                   too many requests; `retry_after` says when there are few enough
│   ├── ProviderUnavailable           the provider failed, or cannot be reached
│   ├── ProviderTimeout (TimeoutError)
│   ├── StreamCut                     the answer broke off before its end
│   └── CircuitOpen (Postponed)       not asked: the provider failed too often lately
└── StorageError
    ├── StorageBusy (TimeoutError)    no answer before the deadline; the outcome is unknown
    ├── StorageFull                   no space; nothing acknowledged is lost
    ├── StorageCorrupt                the store cannot be read; it is left as it is
    ├── StorageTooNew                 written by a later version of this library
    ├── StorageOutdated               written by an earlier one, and not carried over yet
    ├── UnsafeRedis                   a Redis that would lose runs; nothing was written
    └── StorageClosed                 used after close, or in a forked child
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast


class AgentRuntimeError(Exception):
    """Something this library knows about went wrong."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return str(self.args[0]) if self.args else (type(self).__doc__ or "").strip()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, be it in another process, is made of the text: what most constructors take is something else.
        _, args, *state = cast("tuple[Any, ...]", super().__reduce__())
        return (_again, (type(self), args), *state)


MOST_NAMED = 5  # errors of a group that its text names
LONGEST = 16_384  # characters kept of a long text of an error, or of its stack: it has to fit into a record


def shortened(text: str) -> str:
    """The text, or its beginning and its end where it is more than twice as long as what is kept."""
    if len(text) <= 2 * LONGEST:  # what was shortened before stays so with a few words around it
        return text
    half = LONGEST // 2
    return f"{text[:half]}… ({len(text) - 2 * half} characters left out) …{text[-half:]}"


def text_of(error: BaseException) -> str:
    """What an error says, or its class where it says nothing, or cannot; of a group also the errors in it."""
    try:
        text = shortened(str(error)) or type(error).__name__
        return text if not isinstance(error, BaseExceptionGroup) else shortened(f"{text}: {_contained(error)}")
    except Exception:  # noqa: BLE001 - somebody else's __str__ may raise anything
        return f"{type(error).__name__}, whose text cannot be told"


def _contained(group: BaseExceptionGroup[BaseException]) -> str:
    errors = leaves_of(group)
    more = [f"{len(errors) - MOST_NAMED} more"] if len(errors) > MOST_NAMED else []
    return "; ".join([*(f"{type(each).__name__}: {text_of(each)}" for each in errors[:MOST_NAMED]), *more])


def brief(value: object, most: int = 80) -> str:
    """Somebody's value in the text of an error: at most so many characters of its repr, which may not be had at all."""
    kind = type(value)
    if kind is int and cast("int", value).bit_length() > 256:
        return f"<int of {cast('int', value).bit_length()} bits>"  # Python writes none of more than 4,300 digits
    if kind in (str, bytes):
        value = cast("str", value)[: most + 1]
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - somebody else's __repr__ may raise anything
        return f"<{kind.__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _again(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class InvalidArgument(AgentRuntimeError, ValueError):
    """A value that cannot be used."""


class UnknownSetting(InvalidArgument, TypeError):
    """A configuration name nobody reads."""


class InvalidTurn(InvalidArgument):
    """A turn, or an event of one, that cannot be understood: `field` is what is wrong with it; over HTTP a 422."""

    status_code = 422

    def __init__(self, field: str, message: str) -> None:
        self.field: str = field
        super().__init__(f"{field}: {message}")


class BadArguments(InvalidArgument):
    """The arguments of a call are not what the tool takes; it was not called. `tool` is its name."""

    def __init__(self, message: str, tool: str = "") -> None:
        self.tool: str = tool
        super().__init__(f"tool {tool!r}: {message}" if tool else message)


class UnknownAgent(AgentRuntimeError, KeyError):
    """No agent of that key is registered here."""


class UnknownRun(AgentRuntimeError, KeyError):
    """No run of that id is stored here."""


class RunNotFound(UnknownRun, ValueError):
    """The orchestrator has no run of that id."""


class UnknownTool(AgentRuntimeError, KeyError):
    """No tool of that name is registered here."""


class ToolTimeout(AgentRuntimeError, TimeoutError):
    """A tool gave no answer within its own time limit. `tool` is its name, `seconds` the limit."""

    def __init__(self, tool: str, seconds: float, more: str = "") -> None:
        self.tool: str = tool
        self.seconds: float = seconds
        super().__init__(f"tool {tool!r} gave no answer within {seconds:g} s{more}")


class ToolFailed(AgentRuntimeError):
    """A tool told that it did not succeed. `tool` is its name, `error` what it said."""

    def __init__(self, tool: str, error: str) -> None:
        self.tool: str = tool
        self.error: str = error
        super().__init__(f"tool {tool!r} did not succeed: {error}")


class PlanningError(AgentRuntimeError):
    """No plan could be made of a prompt, or one that cannot be carried out.

    `problems` are what is wrong with it, `answer` is the last answer of a model that was asked for it.
    """

    def __init__(self, message: str, problems: Sequence[str] = (), answer: str | None = None) -> None:
        self.problems: list[str] = list(problems)
        self.answer: str | None = answer
        super().__init__(message)


class PortalMisuse(AgentRuntimeError):
    """A blocking call that its loop could never answer, or an argument that is not a function."""


class NotSupported(AgentRuntimeError):
    """This backend or client has no such operation."""


class TooManyVectors(NotSupported):
    """More embeddings than a store can search one by one."""


class MissingDependency(AgentRuntimeError, ImportError):
    """An optional package is not installed."""


class IllegalTransition(AgentRuntimeError):
    """A run may not go from that status to this one."""


class IdempotencyConflict(AgentRuntimeError):
    """The same run id or idempotency key was used with another agent or input."""


class RunBusy(AgentRuntimeError):
    """Another live process holds the run, or `run_id` is another run, which has the turn of `concurrency_key`.

    `worker` names who holds it; `since` is the wall time of its claim in seconds, or None.
    """

    def __init__(
        self, run_id: str, worker: str | None, since: float | None, concurrency_key: str | None = None
    ) -> None:
        self.run_id: str = run_id
        self.worker: str | None = worker
        self.since: float | None = since
        self.concurrency_key: str | None = concurrency_key
        what = f"run {run_id} is held by {worker or 'another process'}"
        if concurrency_key is not None:
            by = f", held by {worker}" if worker else ""
            what = f"concurrency key {concurrency_key!r} is busy with run {run_id}{by}"
        super().__init__(
            what
            + (f" since {since:.3f}" if since is not None else "")
            + "; wait for it with runner.wait(run_id), or cancel it"
        )


class RunFailed(AgentRuntimeError):
    """A run that did not succeed. `status` is its final status, `error` its ErrorInfo or None."""

    def __init__(self, message: str, status: str, error: object | None = None) -> None:
        self.status: str = status
        self.error: object | None = error
        #: The whole RunResult, where there is one.
        self.result: object | None = None
        super().__init__(message)


class LeaseLost(AgentRuntimeError):
    """The claim was superseded or its run has ended; nothing was written."""

    def __init__(self, key: str, token: str | None = None) -> None:
        self.key: str = key
        self.token: str | None = token
        plain = isinstance(token, str) and token.isprintable()
        claim = "(none)" if not token else token[:80] if plain else brief(token)
        super().__init__(
            f"claim {claim} no longer holds run {key}: another worker took over, "
            "or the run has ended; nothing was written"
        )


class TaskNotHeld(AgentRuntimeError):
    """The worker does not, or no longer, have the claim of this task; nothing was written."""


class JournalMismatch(AgentRuntimeError):
    """The code no longer matches what was recorded. `recorded` and `found` name both."""

    def __init__(self, message: str, *, recorded: str | None = None, found: str | None = None) -> None:
        self.recorded: str | None = recorded
        self.found: str | None = found
        super().__init__(message)


class UnserialisableResult(AgentRuntimeError, TypeError, ValueError):
    """A value that has no exact JSON form here. `path` says where, as in `$.items[3].when`, `max_bytes` what it may
    have if it is too large, and `step_name` which step gave it, if it is the result of one.
    """

    def __init__(self, path: str, reason: str, *, max_bytes: int | None = None, step_name: str | None = None) -> None:
        self.path: str = path
        self.reason: str = reason
        self.max_bytes: int | None = max_bytes
        self.step_name: str | None = step_name
        super().__init__(f"{path}: {reason}" if step_name is None else f"step {step_name!r}: {path}: {reason}")


class StepExecutionError(AgentRuntimeError):
    """A step failed after its last retry."""

    def __init__(self, step_name: str, message: str, attempts: int = 1) -> None:
        self.step_name: str = step_name
        self.message: str = message
        self.attempts: int = attempts
        super().__init__(f"step {step_name!r} failed after {attempts} attempt(s): {message}")


class StepInDoubt(StepExecutionError):
    """A step began in an earlier life of the run and nobody knows how it ended."""


class EffectAlreadyDone(StepExecutionError):
    """A step was not run, because another run of the same lineage of forks did it or spent its approval.

    `run_id` is that run, and `status` what it did: "done", "begun" (its outcome is unknown) or "approved".
    """

    def __init__(self, step_name: str, message: str, run_id: str, status: str) -> None:
        super().__init__(step_name, message)
        self.run_id: str = run_id
        self.status: str = status
        self.args: tuple[Any, ...] = (message,)


class StepCancelledError(AgentRuntimeError):
    """The run was cancelled before this step."""

    def __init__(self, step_name: str) -> None:
        self.step_name = step_name
        super().__init__(f"the run was cancelled before step {step_name!r}")


class WaitTimeout(AgentRuntimeError, TimeoutError):
    """A signal or an approval did not come in time."""


class LimitExceeded(AgentRuntimeError):
    """A limit of the run was reached. `limit` is its name in RunLimits, `allowed` its value, `used` what there was."""

    def __init__(self, limit: str, allowed: float, used: float, what: str = "", *, fix: str = "") -> None:
        self.limit: str = limit
        self.allowed: float = allowed
        self.used: float = used
        #: A RunResult with what there was until then, where there is one.
        self.result: object | None = None
        super().__init__(f"{limit}={allowed:g} is reached ({used:g} used){what and f': {what}'}{fix and f'. {fix}'}")


class OutputMismatch(AgentRuntimeError):
    """A model's answer is still not of the type that was asked for, or was cut before it said anything.

    `text` is the last one.
    """

    def __init__(self, message: str, text: str) -> None:
        self.text: str = text
        #: A RunResult with what there was until then, where there is one.
        self.result: object | None = None
        super().__init__(message)


class UnknownPrice(AgentRuntimeError):
    """A limit in USD and a model without a price: what it spends could not be known."""


class Postponed(AgentRuntimeError):
    """Not now: the run is given back and taken up again after `after` seconds, which costs it no attempt."""

    after: float = 0.0


class ProviderError(AgentRuntimeError):
    """A model's provider did not do what was asked.

    `status` is the HTTP status, `code` the provider's own word for it, `retry_after` seconds it asked to wait.
    """

    #: Whether asking again may help.
    retriable: bool = False

    def __init__(
        self,
        message: str = "",
        *,
        provider: str = "",
        model: str = "",
        status: int | None = None,
        code: str = "",
        retry_after: float | None = None,
    ) -> None:
        self.provider: str = provider
        self.model: str = model
        self.status: int | None = status
        self.code: str = code
        self.retry_after: float | None = retry_after
        super().__init__(*([message] if message else []))


class NotConfigured(ProviderError, ValueError):
    """No key, or no model: the client cannot ask anybody."""


class AuthenticationFailed(ProviderError):
    """The provider does not accept the key."""


class ModelNotFound(ProviderError):
    """The provider has no such model."""


class ContextOverflow(ProviderError):
    """The messages are longer than the model can read."""


class RequestRefused(ProviderError):
    """The provider does not accept the request."""


class RateLimited(ProviderError):
    """Too many requests."""

    retriable = True


class ProviderUnavailable(ProviderError):
    """The provider failed, or cannot be reached."""

    retriable = True


class ProviderTimeout(ProviderError, TimeoutError):
    """The provider did not answer in time."""

    retriable = True


class StreamCut(ProviderError):
    """The answer broke off before its end; nothing of it counts."""

    retriable = True


class CircuitOpen(ProviderError, Postponed):
    """Not asked: this provider failed too often lately for this model."""

    def __init__(self, message: str = "", *, after: float, provider: str = "", model: str = "") -> None:
        self.after: float = after
        super().__init__(message, provider=provider, model=model)


class StorageError(AgentRuntimeError):
    """A store could not do what was asked."""


class StorageBusy(StorageError, TimeoutError):
    """No answer before the deadline; whether the write landed is unknown, repeating it is safe."""

    #: How often the write of a run was tried before this was said.
    tries: int = 1


class StorageFull(StorageError):
    """No space left; nothing acknowledged is lost."""


class StorageCorrupt(StorageError):
    """The store cannot be read; it is left as it is."""


class StorageTooNew(StorageError):
    """The store was written by a later version of this library."""


class StorageOutdated(StorageError):
    """The store was written by an earlier version of this library and has to be carried over before it is used."""


class UnsafeRedis(StorageError):
    """A Redis whose settings would lose runs; nothing was written. `refused` is their values by name."""

    def __init__(self, message: str, refused: Mapping[str, str]) -> None:
        self.refused: dict[str, str] = dict(refused)
        super().__init__(message)


class StorageClosed(StorageError):
    """The store was closed, or belongs to the process this one was forked from."""


#: Which error of a group decides what the group means, the first one first. An error that forbids another attempt
#: stands before one that allows it, and a failure before a deferral: the code has to be corrected in any case.
_PRECEDENCE: Final[tuple[tuple[type[BaseException], ...], ...]] = (
    (KeyboardInterrupt, SystemExit),
    (LeaseLost,),
    (JournalMismatch, StepInDoubt, EffectAlreadyDone),
    (LimitExceeded, UnknownPrice, OutputMismatch),
    (UnserialisableResult, InvalidArgument, NotSupported, MissingDependency, IdempotencyConflict),
    (StepCancelledError, PortalMisuse),
)


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the errors of a group, those of groups inside it too, in their order; of another error, itself."""
    found: list[BaseException] = []
    ahead = [error]
    while ahead:
        each = ahead.pop()
        if isinstance(each, BaseExceptionGroup):
            ahead += reversed(each.exceptions)
        else:
            found.append(each)
    return found


def holds(error: BaseException, kinds: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
    """Return whether the error, or one inside the group that it is, is of these kinds."""
    if not isinstance(error, BaseExceptionGroup):
        return isinstance(error, kinds)
    return any(isinstance(each, kinds) for each in leaves_of(error))


def deciding_error(error: BaseException) -> BaseException:
    """Return the error that decides what happens after `error`.

    Of a group (`asyncio.TaskGroup`, anyio) that is one of the errors inside it: the first by `_PRECEDENCE`, then a
    provider's refusal, a store's error, any other error, the longest deferral, an outage of a provider and last a
    cancellation. If several other errors decide together, it is the group of them. Any other error decides itself.
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
    """The place of an error among those of a group, and among those of the same place; the least decides."""
    for place, kinds in enumerate(_PRECEDENCE):
        if isinstance(error, kinds):
            return place, 0.0
    if isinstance(error, Postponed):
        return _DEFERRED, -error.after
    if isinstance(error, RateLimited) and error.retriable and error.retry_after:
        return _DEFERRED, -error.retry_after
    if isinstance(error, ProviderError):
        return _OUTAGE if error.retriable else _REFUSED, 0.0
    if isinstance(error, StorageError):
        return _STORAGE, 0.0
    if isinstance(error, RuntimeError) and str(error).startswith("TaskGroup <") and "shutting down" in str(error):
        return _CANCELLED, 0.0  # of a TaskGroup that another error is ending, when the code starts one more task
    return _OTHER if isinstance(error, Exception) else _CANCELLED, 0.0
