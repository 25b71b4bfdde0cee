"""Step keys for agents of OpenAI Agents that run one inside another, or at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar
from weakref import WeakKeyDictionary

from ..interfaces import RunContext
from ..interfaces import current_run as current_run
from ._steps import number_of_use, scope_id_of, unwrapped_step

T = TypeVar("T")


class Scope:
    """Numbers the model calls of one agent loop.

    The calls of a loop are sequential, so their numbers are the same when the run resumes. Loops that run at the same
    time have a scope each.

    Args:
        prefix: The start of all step keys of this scope.
        root: The scope of the whole run, or None if this scope is the root.
    """

    def __init__(self, prefix: str = "", root: Scope | None = None) -> None:
        self.prefix: str = prefix
        self.root: Scope = root or self
        self.calls: int = 0
        self._failures: int = 0
        self._failed: object = None  # the input of the last model call, if that failed
        #: The error of a step of this loop that ends the run. The SDK reports it to the model of an outer loop.
        self.fatal: Exception | None = None
        #: How often the run asked people about calls of the current answer.
        self.questions: int = 0
        self._children: dict[str, Scope] = {}
        self._uses: Counter[str] = Counter()

    def next_call(self, given: object) -> str:
        """Return the step key of the next model call.

        If the last call failed or was cancelled, a call with the same input repeats it and is the same step. A call
        with another input shows that the code continued. Its key, and all later keys, then contain the number of
        failures: if the failed call succeeds when the run resumes, it is not followed by answers of another agent.

        Args:
            given: The input of the call.
        """
        if self._failed is not None and self._failed is not given:
            self._failures += 1
        self._failed = None
        self.calls += 1
        self.questions = 0
        return f"{self.prefix}{self._number()}"

    def failed(self, given: object) -> None:
        """Note that the last model call failed or was cancelled."""
        self.calls -= 1
        self._failed = given

    def key(self, name: str) -> str:
        """Return the step key of something that follows the last model call, such as a tool call.

        The number of the model call is part of it, because some servers repeat the ids of tool calls.
        """
        return f"{self.prefix}{self.name(name)}"

    def name(self, name: str) -> str:
        """Return the name of the scope of an agent that is the tool of that call."""
        return f"{self._number()}:{name}"

    def _number(self) -> str:
        return f"{self.calls}~{self._failures}" if self._failures else str(self.calls)

    def next_use(self, name: str) -> str | None:
        """Return the step key of the next use of a name, None if the name and the number of its use identify it."""
        if self.root is self:
            return None
        self._uses[name] += 1
        return f"{self.prefix}{self._uses[name]}"

    def child(self, name: str, *, new: bool = False) -> Scope:
        """Return the scope of a loop inside this scope, the same for the same name unless it must be new."""
        if new or name not in self._children:
            self._children[name] = Scope(f"{self.prefix}{name}/", self.root)
        return self._children[name]


_CURRENT: ContextVar[Scope | None] = ContextVar("agent_runtime_core_openai_scope", default=None)
_ROOTS: WeakKeyDictionary[RunContext, Scope] = WeakKeyDictionary()


def scope_of(ctx: RunContext) -> Scope:
    """Return the scope of the calling code."""
    root = _ROOTS.setdefault(ctx, Scope())
    scope = _CURRENT.get()
    # A run that another run executes inherits its context variables.
    return scope if scope is not None and scope.root is root else root


@contextmanager
def inside(ctx: RunContext, name: str, *, new: bool = False) -> Iterator[Scope]:
    """Let the code of a block have the child scope of that name."""
    scope = scope_of(ctx).child(name, new=new)
    token = _CURRENT.set(scope)
    try:
        yield scope
    finally:
        _CURRENT.reset(token)


@contextmanager
def inside_agent(ctx: RunContext, agent: str, key: str | None) -> Iterator[Scope]:
    """Let the code of a block have the scope of a run of an agent, by the number of its run or by its key.

    Other agents are not counted, so if new code adds an agent, the others keep their answers. A step that is attempted
    again, and a node of a graph that a resumed run begins with, find the answers of the attempt before.
    """
    number = number_of_use(ctx, "agent", scope_of(ctx).prefix, agent if key is None else f"key {key}")
    name = f"{agent}.{number}" if key is None else key
    where = scope_id_of(ctx)
    with inside(ctx, f"{where}/{name}" if where else name, new=key is None or number == 0) as scope:
        yield scope


async def original(
    scope: Scope, fn: Callable[..., Awaitable[T]], step: Callable[[Callable[..., Awaitable[T]]], Awaitable[T]]
) -> T:
    """Return the result of a step, or raise the error of its function. An error that ends the run is kept in the scope.

    See `unwrapped_step`.
    """

    def ends_run(error: Exception) -> None:
        scope.fatal = error

    return await unwrapped_step(fn, step, ends_run)
