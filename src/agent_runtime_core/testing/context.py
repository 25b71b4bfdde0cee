"""A run context in memory that notes what an agent does with it, gone with the test."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar, cast, overload
from uuid import UUID

from .._core.clock import SYSTEM, Clock, aware
from .._core.codec.json import MAX_RESULT, decode, encode
from .._core.event_types import EventType
from .._core.ids import run_uuid, trace_id, unbroken
from .._core.validation import MAX_DEPTH
from ..errors import (
    InvalidArgument,
    NotSupported,
    UnknownAgent,
    UnserialisableResult,
    WaitTimeout,
    brief,
    deciding_error,
    text_of,
)
from ..events.base import agent_event_type, checked_event_name
from ..interfaces import AgentRuntime, ErrorInfo, RunContext, RunResult
from ..limits import Budget, RunLimits
from ..llm import _override, use_llm_client
from ..llm._client import forbid_remote
from ..persistence.manager import PersistenceManager
from ..registry import get_runtime
from ..retry import Delay
from ..tools.registry import ToolRegistry
from ..tools.schema import place_context
from ..tools.tool import Tool
from .models import latest_mock

__all__ = ["MockRunContext", "create_test_context", "run_agent_test"]

T = TypeVar("T")


class MockRunContext:
    """A run context that keeps everything in lists: `events` as (type, payload), `checkpoints`, `sleeps`.

    Steps run once and at once, sleeping takes no time, and a wait is answered by an earlier `signal`.
    """

    def __init__(
        self,
        input_messages: list[Any] | None = None,
        params: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        run_id: UUID | str | None = None,
        conversation_id: UUID | None = None,
        tool_registry: ToolRegistry | None = None,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self.input_messages: list[Any] = [] if input_messages is None else input_messages
        self.params: dict[str, Any] = {} if params is None else params
        self.metadata: dict[str, Any] = {} if metadata is None else metadata
        self.run_id: UUID
        self.run_key: str | None
        self.run_id, self.run_key = run_uuid(run_id, clock)
        self.conversation_id = conversation_id
        self.tool_registry: ToolRegistry = ToolRegistry() if tool_registry is None else tool_registry
        self.trace_id: str = trace_id(self.run_id)
        self.attempt = 1
        self.step_id: str | None = None
        self.idempotency_key: str | None = None
        #: What all agent loops over this context may use together, where a caller said so.
        self.budget: Budget | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.sleeps: list[float] = []
        #: Whether the agent called `own_conversation()`.
        self.owns_conversation: bool = False
        self._clock = clock
        self._signals: dict[str, deque[Any]] = {}
        self._cancelled = False
        self._persistence: PersistenceManager | None = None

    @property
    def tools(self) -> ToolRegistry:
        return self.tool_registry

    @property
    def persistence(self) -> PersistenceManager:
        """Stores in memory, gone with this context; set another manager if the test needs it."""
        if self._persistence is None:
            self._persistence = PersistenceManager.open("memory://")
        return self._persistence

    @persistence.setter
    def persistence(self, manager: PersistenceManager) -> None:
        self._persistence = manager

    def own_conversation(self) -> None:
        """Set `owns_conversation`. This context has no runner that appends to a conversation."""
        self.owns_conversation = True

    async def emit(self, event_type: EventType | str, payload: dict[str, Any]) -> None:
        if not isinstance(payload, Mapping):
            raise InvalidArgument(f"an event's payload is a dict, not {type(payload).__name__}")
        self.events.append((agent_event_type(event_type), _copied(dict(payload))))

    async def checkpoint(self, state: dict[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise InvalidArgument(f"a checkpoint is a dict, not {type(state).__name__}: {brief(state)}")
        self.checkpoints.append(_copied(state))

    async def get_state(self) -> dict[str, Any] | None:
        return copy.deepcopy(self.checkpoints[-1]) if self.checkpoints else None

    def cancelled(self) -> bool:
        return self._cancelled

    def is_cancelled(self) -> bool:
        return self._cancelled

    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        key: str | None = None,
        retries: int = 0,
        retry_delay: float = 1.0,
        timeout: float | None = None,
        retry_on: type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool] = Exception,
        backoff: Delay | None = None,
        on_in_doubt: str | Callable[..., Any] = "retry",
        returns: Any = None,
        on_changed_input: str = "use",
        description: str | None = None,
        max_result_bytes: int = MAX_RESULT,
    ) -> Any:
        """`fn(*args)`, once: retries, times and records are the real context's business."""
        if not callable(fn):
            raise InvalidArgument(f"a step function is callable, not {brief(fn)}")
        result = fn(*place_context(fn, self, args))
        return await result if inspect.isawaitable(result) else result

    def renamed(self, old: str, new: str) -> None:
        """Nothing is recorded here that could have another name."""

    async def sleep(self, seconds: float, *, key: str | None = None) -> None:
        self.sleeps.append(seconds)

    async def wait_for_signal(self, name: str, *, timeout: float | None = None, key: str | None = None) -> Any:
        """The payload of the earliest `signal` of that name not yet taken; WaitTimeout if there is none."""
        waiting = self._signals.get(unbroken("a signal's name", name))
        if not waiting:
            said = brief(name)
            raise WaitTimeout(f"no signal {said} is there: call ctx.signal({said}, payload) before the agent runs")
        return waiting.popleft()

    async def approve(
        self,
        name: str,
        details: Any = None,
        *,
        schema: dict[str, Any] | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> Any:
        """The same as `wait_for_signal`: answer with `signal`."""
        return await self.wait_for_signal(name, timeout=timeout)

    async def call(self, agent: AgentRuntime | str, input: dict[str, Any], *, key: str | None = None) -> RunResult:
        """Run the agent now, in a MockRunContext of its own; RunFailed if it fails, as in a real run."""
        found = get_runtime(agent) if isinstance(agent, str) else agent
        if found is None:
            raise UnknownAgent(f"no agent {brief(agent)} is registered: register_runtime(...) first")
        if not isinstance(input, Mapping):
            raise InvalidArgument(f"the input of a run is a dict, not {type(input).__name__}: {brief(input)}")
        child = MockRunContext(
            input.get("messages"),
            input.get("params"),
            conversation_id=input.get("conversation_id"),
            tool_registry=_tools_of(found),
            clock=self._clock,
        )
        if input.get("limits") is not None:
            child.budget = Budget(RunLimits.of(input["limits"]))
        try:
            result = await found.run(child)
        except Exception as error:  # noqa: BLE001 - it is what ends the child, as in a real run
            cause = deciding_error(error)
            partial = getattr(cause, "result", None)
            result = partial if isinstance(partial, RunResult) else RunResult()
            result.error = ErrorInfo(type(cause).__name__, text_of(cause), retriable=False)
            return result.raise_for_status()
        return result.raise_for_status()

    async def transaction(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        raise NotSupported("MockRunContext has no database: test a transaction with a runner on a SQLite file")

    async def now(self, *, key: str | None = None) -> datetime:
        return aware(self._clock.wall())

    async def random(self, *, key: str | None = None) -> float:
        return self._clock.random.random()

    async def uuid4(self, *, key: str | None = None) -> UUID:
        return UUID(int=self._clock.random.getrandbits(128), version=4)

    def get_events(self, type: EventType | str | None = None) -> list[tuple[str, dict[str, Any]]]:
        """What was emitted, as (type, payload); of one type only if given."""
        wanted = None if type is None else checked_event_name("event_type", type)
        return [event for event in self.events if wanted in (None, event[0])]

    def get_checkpoints(self) -> list[dict[str, Any]]:
        return list(self.checkpoints)

    def signal(self, name: str, payload: Any = None) -> None:
        """Answer a coming `wait_for_signal` or `approve` of that name."""
        self._signals.setdefault(unbroken("a signal's name", name), deque()).append(payload)

    def cancel(self) -> None:
        """From now on the run reads as cancelled."""
        self._cancelled = True

    def clear(self) -> None:
        """Forget events, checkpoints, sleeps and signals, the cancellation and the call of `own_conversation()`."""
        for noted in (self.events, self.checkpoints, self.sleeps, self._signals):
            noted.clear()
        self._cancelled = False
        self.owns_conversation = False


def create_test_context(
    message: str | None = None,
    *,
    input_messages: list[Any] | None = None,
    tools: Iterable[Tool] | ToolRegistry | None = None,
    metadata: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
) -> MockRunContext:
    """A context whose input is one user message, or `input_messages`."""
    if message is not None and input_messages is not None:
        raise InvalidArgument("give a message or input_messages=, not both")
    messages = input_messages if message is None else [{"role": "user", "content": message}]
    return MockRunContext(messages, params, metadata, tool_registry=_registry(tools))


@overload
async def run_agent_test(
    agent: AgentRuntime,
    message: str,
    *,
    tools: Iterable[Tool] | ToolRegistry | None = None,
    metadata: dict[str, Any] | None = None,
) -> tuple[RunResult, MockRunContext]: ...


@overload
async def run_agent_test(agent: AgentRuntime, message: RunContext) -> RunResult: ...


async def run_agent_test(
    agent: AgentRuntime,
    message: str | RunContext,
    *,
    tools: Iterable[Tool] | ToolRegistry | None = None,
    metadata: dict[str, Any] | None = None,
) -> RunResult | tuple[RunResult, MockRunContext]:
    """Run an agent once: on a text it gives (result, context), on a context the result alone.

    `get_llm_client()` gives it the client of a `use_llm_client` around this call, or else the MockLLMClient made
    last that is still referred to. Where there is neither, a client that asks beyond this machine is refused.
    """
    if isinstance(message, str):
        registry = _tools_of(agent) if tools is None else tools
        ctx = create_test_context(message, tools=registry, metadata=metadata)
        with _model():
            return await agent.run(ctx), ctx
    if tools is not None or metadata is not None:
        raise InvalidArgument("tools= and metadata= belong to the context: give them to create_test_context")
    with _model():
        return await agent.run(message)


@contextlib.contextmanager
def _model() -> Iterator[None]:
    if _override.get() is not None:
        yield
    elif (mock := latest_mock()) is not None:
        with use_llm_client(mock):
            yield
    else:
        with _refusal:
            yield


class _Refusal:
    """Refuses real clients from the first who enters to the last who leaves: tests may run side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = forbid_remote(
                    "run_agent_test asks no real model: make a MockLLMClient and keep it, "
                    "or choose a client with `with use_llm_client(client):` around the call"
                )
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                forbid_remote(self._before)


_refusal = _Refusal()


def _tools_of(agent: Any) -> ToolRegistry | None:
    tools = getattr(agent, "tools", None)
    return tools if isinstance(tools, ToolRegistry) else None


def _registry(tools: Iterable[Tool] | ToolRegistry | None) -> ToolRegistry:
    if isinstance(tools, ToolRegistry):
        return tools
    registry = ToolRegistry()
    for tool in tools or ():
        registry.register(tool)
    return registry


def _copied(value: T) -> T:
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise UnserialisableResult("$", f"nested deeper than {MAX_DEPTH} levels: give a flatter value") from None
    except TypeError:
        return cast("T", decode(encode(value)))  # or the reason why a real run would refuse it too
