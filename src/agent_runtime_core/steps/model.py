"""A step, its result, and the state a list of steps carries along."""

from __future__ import annotations

import contextlib
import copy
import datetime as _dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, cast
from uuid import UUID

from .._core.clock import SYSTEM, aware
from .._core.codec.json import MAX_RESULT, encode
from .._core.codec.tagged import stored_as_dict
from .._core.codec.typed import codec_for
from .._core.ids import run_uuid, unbroken
from .._execution.step_function import StepFunction, cached_step_function, step_function
from .._execution.step_policy import DEFAULT_FIELDS, DEFAULT_POLICY, InDoubt, Policy, RetryOn
from .._execution.step_runner import IMMUTABLE
from ..errors import InvalidArgument, UnserialisableResult, brief
from ..retry import Delay
from ..status import StepStatus


@dataclass
class Step:
    """One named step of a list.

    `fn(ctx, state)` is a coroutine function, or a plain one that runs in a thread. It is tried
    `1 + retries` times, `retry_delay` seconds (or `backoff`) apart, each at most `timeout` seconds.
    With `checkpoint=False` its record commits with the next checkpointed step; until then it runs
    again on resume. `on_in_doubt` is asked when an earlier process began the step and never recorded
    its end: "retry", "fail", "review", or a function that answers None or AlreadyDone(result).
    `returns` names the type to rebuild, where the annotation of `fn` does not. A result has at most
    `max_result_bytes` as JSON (1 MiB; 16 MiB are the most).
    `depends_on` names the steps of the same list whose results it needs: a list in which any step has
    some is a graph, whose steps run side by side.
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

    # What was made of the fields, beside those it was made of: no fields themselves.
    _callee: ClassVar[tuple[Any, Any, int, StepFunction] | None] = None
    _policy: ClassVar[tuple[Any, Policy] | None] = None

    def __post_init__(self) -> None:
        self.name = unbroken("a step's name", self.name)
        if not callable(self.fn):
            raise InvalidArgument(f"step {brief(self.name)}: fn is a function of (ctx, state), not {brief(self.fn)}")
        if type(self.depends_on) is not tuple or self.depends_on:
            self.depends_on = self._names(self.depends_on)
        self.policy()
        if self.max_result_bytes != MAX_RESULT:
            codec_for(None, self.max_result_bytes)

    def _names(self, given: Any) -> tuple[str, ...]:
        names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else (None,)
        if not all(isinstance(name, str) for name in names):
            raise InvalidArgument(
                f"step {brief(self.name)}: depends_on is a list of names of steps, as in ['load'], not {brief(given)}"
            )
        return names

    def callee(self) -> StepFunction:
        """How its function is called, looked at once."""
        fn, returns, most = self.fn, self.returns, self.max_result_bytes
        if returns is None and most == MAX_RESULT:
            return cached_step_function(fn)
        known = self._callee
        if known is None or known[0] is not fn or known[1] is not returns or known[2] != most:
            known = self._callee = (fn, returns, most, step_function(fn, returns, most))  # type: ignore[misc]
        return known[3]

    def policy(self) -> Policy:
        """How this step is tried, as a checked value."""
        given = (self.retries, self.retry_delay, self.timeout, self.retry_on, self.backoff, self.on_in_doubt)
        if given == DEFAULT_FIELDS:
            return DEFAULT_POLICY
        known = self._policy
        if known is None or known[0] != given:
            known = self._policy = (given, Policy(*given))  # type: ignore[misc]
        return known[1]


@dataclass
class StepResult:
    """How a step ended."""

    name: str
    status: StepStatus
    result: Any = None
    error: str | None = None
    attempts: int = 1
    started_at: _dt.datetime | None = None
    completed_at: _dt.datetime | None = None
    duration_ms: float | None = None


class _LazyUuid:
    """A field with a UUID of its own for each object, made when somebody asks for it.

    Given as text it is a UUID too, so that a state is equal to what it was before `to_dict`; other text stays.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._kept: str = f"_{name}"

    def __get__(self, state: Any, owner: type) -> Any:
        if state is None:
            return None  # the default
        found = getattr(state, self._kept)
        if found is None:
            found = run_uuid(None, SYSTEM)[0]
            setattr(state, self._kept, found)
        return found

    def __set__(self, state: Any, given: Any) -> None:
        if given is not None and not isinstance(given, UUID):
            with contextlib.suppress(ValueError):
                given = UUID(str(given))
        setattr(state, self._kept, given)


@dataclass
class ExecutionState:
    """Where a list of steps stands. `custom_state` is what its steps see as `state`."""

    execution_id: UUID | str = cast("UUID", _LazyUuid())  # noqa: RUF009 - a descriptor is one for all
    current_step_index: int = 0
    completed_steps: list[str] = field(default_factory=list)
    step_results: dict[str, Any] = field(default_factory=dict)
    started_at: _dt.datetime = field(default_factory=lambda: aware(SYSTEM.wall()))
    custom_state: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        _ = self.execution_id  # made now, if nobody asked for it before: a copy is of the same execution
        return self.__dict__

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold, sharing nothing with this object's lists."""
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
        """The state that `to_dict` wrote; what is missing takes its default."""
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
    """What steps returned, by name. Each time it is a copy, so that a step changes nothing for others."""

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
    """What a step sees: values it may change, kept only if it succeeds, and `results` of earlier steps by name.

    Stored or copied, it is a plain dict of the values.
    """

    results: Mapping[str, Any]

    def __init__(self, values: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.results = results

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


@stored_as_dict
class ReadOnlyState(State):
    """State where more than one step may run at once: results carry data, this does not."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InvalidArgument("state is read-only where steps run side by side: return the value as the step's result")

    __setitem__: Callable[..., Any] = _refuse
    __delitem__: Callable[..., Any] = _refuse
    __ior__: Callable[..., Any] = _refuse
    clear: Callable[..., Any] = _refuse
    pop: Callable[..., Any] = _refuse
    popitem: Callable[..., Any] = _refuse
    setdefault: Callable[..., Any] = _refuse
    update: Callable[..., Any] = _refuse


def state_text(values: Mapping[str, Any], step: str | None = None) -> str:
    """The text of a state; what cannot be kept is refused by where it is in it, and by the step that left it there."""
    try:
        return encode(dict(values))
    except UnserialisableResult as error:
        where = f"state{error.path[1:]}"
        raise UnserialisableResult(where, error.reason, max_bytes=error.max_bytes, step_name=step) from None


def is_its_text(values: Mapping[str, Any]) -> bool:
    """Whether these values are as their text says, and nobody who holds on to them can change them."""
    return IMMUTABLE.issuperset(map(type, values.values())) and IMMUTABLE.issuperset(map(type, values))


name_of: Callable[[Any], str] = attrgetter("name")  # of a step


def unique(steps: Iterable[Step]) -> Sequence[Step]:
    """The steps as a list of their own; InvalidArgument for what is no step, and for a name that occurs twice."""
    if not isinstance(steps, Iterable):
        raise InvalidArgument(f"run() takes a list of steps, not {brief(steps)}")
    listed, seen = list(steps), set[str]()
    if len({step.name for step in listed if isinstance(step, Step)}) == len(listed):
        return listed
    for step in listed:
        if not isinstance(step, Step):
            raise InvalidArgument(f"a list of steps holds Step objects, not {brief(step)}")
        if step.name in seen:
            raise InvalidArgument(f"two steps are called {brief(step.name)}: names in one list are unique")
        seen.add(step.name)
    return listed
