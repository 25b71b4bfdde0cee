"""A step, its result, and the state of a step list."""

from __future__ import annotations

import contextlib
import copy
import datetime as _dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter, is_
from typing import Any, ClassVar, Final, cast
from uuid import UUID

from .._core.clock import SYSTEM, aware
from .._core.codec.json import MAX_BYTES, MAX_RESULT, encode
from .._core.codec.tagged import stored_as_dict
from .._core.ids import run_uuid, unbroken
from .._core.redaction import Redaction
from .._core.validation import Shown, must
from .._execution.journal_view import StateText
from .._execution.step import (
    DEFAULT_OPTIONS,
    InDoubt,
    RetryOn,
    StepFunction,
    StepOptions,
    cached_step_function,
    step_function,
)
from .._execution.step_runner import IMMUTABLE
from ..errors import UnserialisableResult, brief
from ..retry import Delay
from ..status import StepStatus


@dataclass
class Step:
    """One named step of a list.

        async def load(ctx, state):
            state["rows"] = 3
            return "loaded"

        Step("load", load, retries=2, timeout=30)

    Args:
        name: Name of the step, unique in its list.
        fn: A function of (ctx, state), or a coroutine function. A plain function runs in a thread.
        retries: Attempts after the first attempt.
        retry_delay: Seconds before each retry.
        timeout: Seconds that one attempt may take, None for no limit. After them, a step with another `on_in_doubt`
            than "retry" is in doubt.
        description: Text for the step's events.
        checkpoint: False saves the result with the next step whose `checkpoint` is True. Until then a resumed run runs
            the step again.
        depends_on: Names of steps of the same list whose results this step needs. If any step of a list declares some,
            the list is a DAG and its steps run concurrently.
        retry_on: Error types that are retried, or a function that decides for an error.
        backoff: Computes the delay instead of `retry_delay`: `Backoff(...)`, or a function of (attempt, random).
        on_in_doubt: What to do if the step was interrupted and its outcome is unknown: "retry", "fail", "review" (ask a
            person), or a check function that returns `AlreadyDone(result)` or None.
        returns: Type of the result, instead of the function's annotation.
        max_result_bytes: Limit for the result as JSON: 1 MiB by default, at most 16 MiB.

    Raises:
        InvalidArgument: A value is out of range.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import MockRunContext, Step, StepExecutor
        >>> async def load(ctx, state):
        ...     state["rows"] = 3
        ...     return "loaded"
        >>> async def report(ctx, state):
        ...     return f"{state['rows']} rows"
        >>> executor = StepExecutor(MockRunContext())
        >>> asyncio.run(executor.run([Step("load", load, retries=2), Step("report", report)]))
        {'load': 'loaded', 'report': '3 rows'}
    """

    name: str
    fn: Callable[..., Any]
    retries: int = 0
    retry_delay: float = 1.0
    timeout: float | None = None
    description: str | None = None
    checkpoint: bool = True
    depends_on: Sequence[str] = field(default=(), kw_only=True)
    retry_on: RetryOn = field(default=Exception, kw_only=True)
    backoff: Delay | None = field(default=None, kw_only=True)
    on_in_doubt: InDoubt = field(default="retry", kw_only=True)
    returns: Any = field(default=None, kw_only=True)
    max_result_bytes: int = field(default=MAX_RESULT, kw_only=True)

    # Cached values with the fields they were computed from. ClassVar keeps them from being fields.
    _function: ClassVar[tuple[Any, Any, int, StepFunction] | None] = None
    _options: ClassVar[tuple[Any, StepOptions] | None] = None

    def __post_init__(self) -> None:
        self.name = unbroken("step name", self.name)
        if not callable(self.fn):
            raise must(f"step {brief(self.name)}: fn", "be a function of (ctx, state)", self.fn)
        if type(self.depends_on) is not tuple or self.depends_on:
            self.depends_on = self._checked_names(self.depends_on)
        self.options()

    def _checked_names(self, given: Any) -> tuple[str, ...]:
        names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else (None,)
        if not all(isinstance(name, str) for name in names):
            raise must(f"step {brief(self.name)}: depends_on", "be a list of step names, such as ['load']", given)
        return names

    def function(self) -> StepFunction:
        """Return how to call the function of this step. It is inspected once."""
        fn, returns, max_bytes = self.fn, self.returns, self.max_result_bytes
        if returns is None and max_bytes == MAX_RESULT:
            return cached_step_function(fn)
        known = self._function
        if known is None or known[0] is not fn or known[1] is not returns or known[2] != max_bytes:
            known = self._function = (fn, returns, max_bytes, step_function(fn, returns, max_bytes))  # type: ignore[misc]
        return known[3]

    def options(self) -> StepOptions:
        """Return the options of this step, checked."""
        given = _fields_of(self)
        if given == _DEFAULTS:
            return DEFAULT_OPTIONS
        known = self._options
        if known is None or known[0] != given:
            known = self._options = (given, StepOptions(*given))  # type: ignore[misc]
        return known[1]


_fields_of: Callable[[Any], tuple[Any, ...]] = attrgetter(*StepOptions.__slots__[:-1])  # all but `on_changed_input`
_DEFAULTS: Final = _fields_of(DEFAULT_OPTIONS)


@dataclass
class StepResult:
    """The outcome of a step.

    Attributes:
        name: Name of the step.
        status: Status of the step.
        result: What the function returned.
        error: The error message, if it failed.
        attempts: Number of attempts, including the first.
        started_at: When the step started.
        completed_at: When it finished.
        duration_ms: Duration in milliseconds.

    Examples:
        >>> from agent_runtime_core import StepResult, StepStatus
        >>> StepResult("load", StepStatus.COMPLETED, result=3).attempts
        1
    """

    name: str
    status: StepStatus
    result: Any = None
    error: str | None = None
    attempts: int = 1
    started_at: _dt.datetime | None = None
    completed_at: _dt.datetime | None = None
    duration_ms: float | None = None


class _LazyUuid:
    """A field that is a new UUID for each object, created when it is first read.

    A string that is a UUID is converted to a UUID, so that a state equals the state before `to_dict`. Other strings
    stay.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute: str = f"_{name}"

    def __get__(self, state: Any, owner: type) -> Any:
        if state is None:
            return None  # the default
        found = getattr(state, self._attribute)
        if found is None:
            found = run_uuid(None, SYSTEM)[0]
            setattr(state, self._attribute, found)
        return found

    def __set__(self, state: Any, given: Any) -> None:
        if given is not None and not isinstance(given, UUID):
            with contextlib.suppress(ValueError):
                given = UUID(str(given))
        setattr(state, self._attribute, given)


@dataclass
class ExecutionState:
    """Progress of a step list.

    Attributes:
        execution_id: Identifies the execution of the list.
        current_step_index: How many steps are completed.
        completed_steps: Their names.
        step_results: Results by name of the step.
        started_at: When the list started, in UTC.
        custom_state: What the steps see as `state`.
    """

    execution_id: UUID | str = cast("UUID", _LazyUuid())  # noqa: RUF009 - one descriptor serves all objects
    current_step_index: int = 0
    completed_steps: list[str] = field(default_factory=list)
    step_results: dict[str, Any] = field(default_factory=dict)
    started_at: _dt.datetime = field(default_factory=lambda: aware(SYSTEM.wall()))
    custom_state: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        _ = self.execution_id  # create it now, so that a copy gets the same id
        return self.__dict__

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values. The lists and dicts are copies.

        Examples:
            >>> from agent_runtime_core import ExecutionState
            >>> state = ExecutionState(completed_steps=["load"])
            >>> ExecutionState.from_dict(state.to_dict()).completed_steps
            ['load']
        """
        return {
            "execution_id": str(self.execution_id),
            "current_step_index": self.current_step_index,
            "completed_steps": list(self.completed_steps),
            "step_results": dict(self.step_results),
            "started_at": self.started_at.isoformat(),
            "custom_state": dict(self.custom_state),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExecutionState:
        """Return the state that `to_dict` was called on. Missing fields get their defaults.

        Args:
            data: What `to_dict` returned.

        Raises:
            TypeError, ValueError: The type of a value is wrong.
        """
        state = cls()
        state.execution_id = data.get("execution_id", state.execution_id)
        state.current_step_index = int(data.get("current_step_index", 0))
        state.completed_steps = list(data.get("completed_steps", ()))
        state.step_results = dict(data.get("step_results", {}))
        state.custom_state = dict(data.get("custom_state", {}))
        if (started := data.get("started_at")) is not None:
            state.started_at = started if isinstance(started, _dt.datetime) else _dt.datetime.fromisoformat(started)
        return state


@stored_as_dict
class Results(Mapping[str, Any]):
    """Results of steps by name. Each read returns a copy, so that a step cannot change what another step reads."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        self._results: Mapping[str, Any] = results

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, name: str) -> Any:
        return copy.deepcopy(self._results[name])

    def __contains__(self, name: object) -> bool:
        return name in self._results

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)


@stored_as_dict
class State(dict[str, Any]):
    """The state that a step sees: a dict whose changes are saved if the step succeeds.

    Encoded, copied or pickled it is a plain dict of the values.

    Args:
        values: The values by name.

    Attributes:
        results: Results of earlier steps by name.
    """

    results: Mapping[str, Any]

    def __init__(self, values: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.results = results

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


@stored_as_dict
class ReadOnlyState(State):
    """The state of a list whose steps run concurrently. Steps pass data by their results instead."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        fix = "Return the value as the step's result"
        raise must("state", "not be changed while steps run concurrently", Shown("a change"), fix)

    __setitem__: Callable[..., Any] = _refuse
    __delitem__: Callable[..., Any] = _refuse
    __ior__: Callable[..., Any] = _refuse
    clear: Callable[..., Any] = _refuse
    pop: Callable[..., Any] = _refuse
    popitem: Callable[..., Any] = _refuse
    setdefault: Callable[..., Any] = _refuse
    update: Callable[..., Any] = _refuse


def state_text(
    values: Mapping[str, Any], step: str | None = None, redaction: Redaction | None = None, owner: str = ""
) -> str:
    """Encode a state, and redact it.

    Raises:
        RedactionFailed: The hook failed for the state, which `owner` was to store.
        UnserialisableResult: A value cannot be stored. The error contains its path in the state, and the step that set
            it.
    """
    try:
        text = encode(dict(values))
        return text if redaction is None else redaction.stored_dict("state", text, owner)
    except UnserialisableResult as error:
        where = f"state{error.path[1:]}"
        raise UnserialisableResult(where, error.reason, max_bytes=error.max_bytes, step_name=step) from None


def extended_text(text: StateText, known: Mapping[str, Any], values: Mapping[str, Any]) -> StateText | None:
    """Return the text of a state to which a step only added. Only what it added is encoded.

    To encode a large state takes many times as long as a step.

    Args:
        text: The text of the state before.
        known: The state before, if `is_plain_state` holds for it; else an empty dict.
        values: The state. Immutable values that are the same objects have the same text.

    Returns:
        The text; None if the state must be encoded as a whole.
    """
    same = known and all(map(is_, known, values)) and all(map(is_, known.values(), values.values()))
    if not same or len(values) < len(known):
        return None
    if len(values) == len(known):
        return text
    new = dict(islice(values.items(), len(known), None))
    try:
        added = encode(new)
    except UnserialisableResult:
        return None
    # Far below the limits of the size and of the weight, which `encode` checks for a whole state.
    is_small = text.size + len(added) + _MOST_AROUND * len(values) <= MAX_BYTES
    return text.extended(added) if is_small and is_plain_state(new, added) else None


def is_plain_state(values: Mapping[str, Any], text: str) -> bool:
    """Return whether all values are immutable, and the text is a JSON object with these values as they are."""
    return '"$"' not in text and is_immutable_state(values)


def is_immutable_state(values: Mapping[str, Any]) -> bool:
    """Return whether all keys and values are immutable and equal to their decoded JSON."""
    return IMMUTABLE.issuperset(map(type, values.values())) and IMMUTABLE.issuperset(map(type, values))


_MOST_AROUND: Final = 128  # of the weight of a value: what is around it

name_of: Callable[[Any], str] = attrgetter("name")  # of a step


def unique(steps: Iterable[Step]) -> Sequence[Step]:
    """Return the steps as a new list.

    Raises:
        InvalidArgument: An item is not a Step, or a name occurs twice.
    """
    if not isinstance(steps, Iterable):
        raise must("steps", "be a list of Step objects", steps)
    listed, seen = list(steps), set[str]()
    if len({step.name for step in listed if isinstance(step, Step)}) == len(listed):
        return listed
    for step in listed:
        if not isinstance(step, Step):
            raise must("steps", "be Step objects", step)
        if step.name in seen:
            raise must("step names", "be unique in a list", Shown(f"{brief(step.name)} twice"))
        seen.add(step.name)
    return listed
