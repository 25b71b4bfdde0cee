"""An in-memory run context that records what an agent does with it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Any, TypeVar, cast, overload
from uuid import UUID

from .._core.arguments import checked_tenant, run_input, scheduled_at
from .._core.clock import SYSTEM, Clock, aware
from .._core.codec.json import decode, encode
from .._core.event_types import RUNNER_TYPES, EventType
from .._core.ids import run_uuid, trace_id, unbroken
from .._core.per_loop import call_in_loop
from .._core.threads import AGENT_CONTEXT
from .._core.typed_steps import takes_options_of, typed_step
from .._core.validation import MAX_DEPTH, Shown, must
from .._execution.context import charge_of
from .._execution.mailbox import checked_when, interrupts, mailbox_payload, message_of, user_message
from .._execution.step import CURRENT_STEP, StepOptions, StepScope, call_in_thread
from .._execution.step_keys import StepKeys
from .._execution.sync_context import SyncRunContext, blocking_form, is_async, run_agent
from .._execution.usage import total
from ..errors import NotSupported, UnknownAgent, UnserialisableResult, WaitTimeout, brief, deciding_error, text_of
from ..events.base import checked_event_name
from ..events.event import warn_of_runner_type
from ..interfaces import AgentRuntime, ErrorInfo, RunContext, RunResult
from ..limits import Budget, RunLimits
from ..llm import _override, use_llm_client
from ..llm._client import forbid_remote
from ..persistence.manager import PersistenceManager
from ..queue.records import MESSAGE, MailboxMessage
from ..registry import get_runtime
from ..tools.confirmation import misfit_of_answer
from ..tools.registry import ToolRegistry
from ..tools.schema import place_context
from ..tools.tool import Tool
from .models import latest_mock

__all__ = ["MockRunContext", "create_test_context", "run_agent_test"]

T = TypeVar("T")


class SentMessages:
    """The messages of a test to its agent: what an agent loop uses of a real run's inbox."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unread: list[MailboxMessage] = []
        self._ids: set[str] = set()
        self._interrupted: set[int] = set()
        self._watching: set[asyncio.Future[None]] = set()

    def add(self, message: Mapping[str, Any], when: str, message_id: str | None) -> str:
        """Store a message, unless a message with this id is known; return its id."""
        sent_id = message_id or f"message-{len(self._ids) + 1}"
        if sent_id not in self._ids:
            self._ids.add(sent_id)
            payload = mailbox_payload(message, when)
            stored = MailboxMessage(MESSAGE, "", payload, sent_id, self._clock.wall(), len(self._ids))
            self._unread.append(stored)
            for each in tuple(self._watching):
                call_in_loop(each.get_loop(), partial(_resolve, each))
        return sent_id

    async def has_new(self) -> bool:
        return bool(self._unread)

    async def take(self) -> list[MailboxMessage]:
        taken, self._unread = self._unread, []
        return taken

    def put_back(self, messages: Iterable[MailboxMessage], step: object) -> None:
        self._unread[:0] = messages

    def on_arrival(self, notice: Callable[[], None]) -> Callable[[], None]:
        notice()  # `interrupted` waits for the messages
        return lambda: None

    async def interrupted(self) -> None:
        while True:
            for each in self._unread:
                if each.seq not in self._interrupted and interrupts(each):
                    self._interrupted.add(each.seq)
                    return
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watching.add(arrived)
            try:
                await arrived
            finally:
                self._watching.discard(arrived)


def _resolve(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


class MockRunContext:
    """A run context that records into lists: `events` as (type, payload), `checkpoints`, `sleeps`.

    Steps are executed once, without records or retries. They have the `step_id` and the `idempotency_key` of a run with
    this `run_id`. Sleeping takes no time. A wait returns the payload of an earlier `signal`.

    Args:
        input_messages: The messages of the input.
        params: The parameters of the input.
        metadata: The metadata of the run.
        run_id: The id of the run. None makes a new id.
        conversation_id: The conversation that the run belongs to.
        tool_registry: The tools of the run.
        tenant: Whose run it is.
        clock: Where `now`, `random` and `uuid4` get their values from.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import MockRunContext
        >>> ctx = MockRunContext(params={"city": "Ulm"})
        >>> asyncio.run(ctx.step("upper", str.upper, ctx.params["city"]))
        'ULM'
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
        tenant: str | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.input_messages: list[Any] = [] if input_messages is None else input_messages
        self.params: dict[str, Any] = {} if params is None else params
        pieces = {"messages": input_messages, "params": params, "conversation_id": conversation_id}
        self.input: dict[str, Any] = {name: value for name, value in pieces.items() if value is not None}
        self.metadata: dict[str, Any] = {} if metadata is None else metadata
        self.run_id: UUID
        self.run_key: str | None
        self.tenant: str | None = checked_tenant(tenant) or None
        self.run_id, self.run_key = run_uuid(run_id, clock, self.tenant or "")
        self.conversation_id = conversation_id
        self.tool_registry: ToolRegistry = ToolRegistry() if tool_registry is None else tool_registry
        self.trace_id: str = trace_id(self.run_id)
        self.attempt = 1
        self._step_id: str | None = None
        self._idempotency_key: str | None = None
        #: The keys of steps, including the model calls and tool calls of agent loops.
        self.step_keys: StepKeys = StepKeys(str(self.run_id))
        self.traceparent: str | None = None
        #: The budget shared by all agent loops of this context, if the caller set limits.
        self.budget: Budget | None = None
        #: What `charge` counted.
        self.usage: dict[str, Any] = {}
        #: What `trace` reported.
        self.traces: list[tuple[str, dict[str, Any]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.sleeps: list[float] = []
        #: Whether the agent called `own_conversation()`.
        self.owns_conversation: bool = False
        self._clock = clock
        self._signals: dict[str, deque[Any]] = {}
        #: The messages of `send` that neither `messages` nor an agent loop took.
        self.inbox: SentMessages = SentMessages(clock)
        self._cancelled = False
        self._warned = False
        self._persistence: PersistenceManager | None = None

    @property
    def blocking_form(self) -> Any:
        """This context for a plain function in a thread: a `SyncRunContext`."""
        return blocking_form(self)

    @property
    def scheduled_at(self) -> datetime | None:
        return scheduled_at(self.metadata)

    @property
    def tools(self) -> ToolRegistry:
        return self.tool_registry

    @property
    def step_id(self) -> str | None:
        """The step that this code runs in, or None between steps; a value that a test assigns replaces it."""
        scope = CURRENT_STEP.get()
        while scope is not None and scope.token.run_id != str(self.run_id):
            scope = scope.outer
        return self._step_id or (None if scope is None else scope.step_id)

    @step_id.setter
    def step_id(self, value: str | None) -> None:
        self._step_id = value

    @property
    def idempotency_key(self) -> str | None:
        """`run_id:step_id`, or None between steps; a value that a test assigns replaces it."""
        step = self.step_id
        return self._idempotency_key or (None if step is None else f"{self.run_id}:{step}")

    @idempotency_key.setter
    def idempotency_key(self, value: str | None) -> None:
        self._idempotency_key = value

    @property
    def persistence(self) -> PersistenceManager:
        """In-memory stores of this context. Assign another manager to replace them."""
        if self._persistence is None:
            self._persistence = PersistenceManager.open("memory://")
        return self._persistence.for_tenant(self.tenant)

    @persistence.setter
    def persistence(self, manager: PersistenceManager) -> None:
        self._persistence = manager

    def charge(
        self, *, model: str = "", input_tokens: int = 0, output_tokens: int = 0, cost_usd: float | None = None,
        turns: int = 1, tool_calls: int = 0, trace: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Count the call in `usage`, and against the limits of `budget`, if any.

        Args:
            model: The model that was called.
            input_tokens: Tokens of the prompt.
            output_tokens: Tokens of the answer.
            cost_usd: The cost in USD. None means the configured price of the model.
            turns: How many model calls this counts as.
            tool_calls: How many tool calls this counts as.
            trace: Further fields of the trace, which is kept in `traces`.

        Raises:
            LimitExceeded: A limit of the run is exceeded.
        """
        charged = charge_of(model, input_tokens, output_tokens, cost_usd, turns, tool_calls)
        self.usage = total([self.usage, charged])
        if trace is not None:
            self.trace("llm.call", {"model": model, **trace})
        if self.budget is not None:
            self.budget.recalled(charged)
            if (error := self.budget.exceeded()) is not None:
                raise error

    def check_limits(self) -> None:
        """Raise LimitExceeded if a limit of `budget` is reached; do nothing without a budget."""
        if self.budget is not None:
            self.budget.before_turn()

    def trace(self, kind: str, payload: dict[str, Any]) -> None:
        """Keep the trace in `traces`.

        Args:
            kind: The type of the report.
            payload: Its fields.
        """
        self.traces.append((kind, _copied(payload)))

    def own_conversation(self) -> None:
        """Set `owns_conversation`. There is no runner that appends to a conversation here."""
        self.owns_conversation = True

    async def emit(self, event_type: EventType | str, payload: dict[str, Any]) -> None:
        """Keep the event in `events`.

        Args:
            event_type: An `EventType`, or a custom name.
            payload: The fields of the event, which must be JSON-serializable.

        Raises:
            InvalidArgument: The type or the payload is invalid.
        """
        if not isinstance(payload, Mapping):
            raise must("payload", "be a dict", payload)
        kind = checked_event_name("event_type", event_type)
        self.events.append((kind, _copied(dict(payload))))
        if kind in RUNNER_TYPES and not self._warned:
            self._warned = True
            warn_of_runner_type(kind, f"the agent of {type(self).__name__}")

    async def checkpoint(self, state: dict[str, Any]) -> None:
        """Keep the checkpoint in `checkpoints`.

        Args:
            state: A JSON-serializable dict. It replaces the last checkpoint.

        Raises:
            InvalidArgument: `state` is not a dict.
        """
        if not isinstance(state, Mapping):
            raise must("state", "be a dict", state)
        self.checkpoints.append(_copied(state))

    async def get_state(self) -> dict[str, Any] | None:
        """Return a copy of the last checkpoint, or None.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import MockRunContext
            >>> ctx = MockRunContext()
            >>> asyncio.run(ctx.checkpoint({"page": 3}))
            >>> asyncio.run(ctx.get_state())
            {'page': 3}
        """
        return copy.deepcopy(self.checkpoints[-1]) if self.checkpoints else None

    def cancelled(self) -> bool:
        """Return whether the test called `cancel`."""
        return self._cancelled

    def is_cancelled(self) -> bool:
        """Return whether the test called `cancel`."""
        return self._cancelled

    @typed_step
    @takes_options_of(RunContext.step)
    async def step(self, name: str, fn: Callable[..., Any], *args: Any, key: str | None = None, **options: Any) -> Any:
        """Call `fn(*args)` once. Retries, time limits and records exist only in the real context.

        Args:
            name: Name of the step.
            fn: A function, or a coroutine function.
            *args: Its arguments.
            key: Identifies the step, as in a real run.
            **options: The options of a real step, checked and not used: `retries`, `retry_delay` and `timeout` in
                seconds, `retry_on`, `backoff`, `on_in_doubt`, `returns`, `on_changed_input`, `description` and
                `max_result_bytes`.

        Returns:
            What `fn` returned.

        Raises:
            InvalidArgument: `fn` is not a function, or an option is invalid.
        """
        if not callable(fn):
            raise must("fn", "be a function", fn, f"Write ctx.step({brief(name)}, f), without calling f")
        StepOptions.of("step", options)
        args = place_context(fn, self, args)
        # Code of a plain run() may call its context, which must not happen on the event loop.
        blocks = AGENT_CONTEXT.get(None) is not None or any(isinstance(each, SyncRunContext) for each in args)
        plain = blocks and not is_async(fn)
        key = self.step_keys.next_key("s", name) if key is None else f"k:{key}"
        outer = CURRENT_STEP.set(StepScope(self.step_keys.token, name, key, 1, CURRENT_STEP.get()))
        try:
            result = await call_in_thread(fn, args) if plain else fn(*args)
            return await result if inspect.isawaitable(result) else result
        finally:
            CURRENT_STEP.reset(outer)

    def renamed(self, old: str, new: str) -> None:
        """Do nothing: there are no records that could have another name.

        Args:
            old: The recorded name.
            new: The name in the present code.
        """

    async def patched(self, name: str) -> bool:
        """Return True, as for a new run.

        Args:
            name: The name of the change.
        """
        return True

    async def sleep(self, seconds: float, *, key: str | None = None) -> None:
        """Keep the seconds in `sleeps` and return immediately.

        Args:
            seconds: How long to wait.
            key: Identifies the wait instead of the number of its use, as for `step`.
        """
        self.sleeps.append(seconds)

    async def wait_for_signal(self, name: str, *, timeout: float | None = None, key: str | None = None) -> Any:
        """Return the payload of the earliest unread `signal` of this name.

        Args:
            name: The name of the signal.
            timeout: Seconds, as in a real run. Not used, because this context never waits.
            key: Not used.

        Raises:
            WaitTimeout: There is no such signal.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import MockRunContext
            >>> ctx = MockRunContext()
            >>> ctx.signal("paid", {"amount": 5})
            >>> asyncio.run(ctx.wait_for_signal("paid"))
            {'amount': 5}
        """
        payloads = self._signals.get(unbroken("a signal's name", name))
        if not payloads:
            text = brief(name)
            raise WaitTimeout(f"no signal {text} was sent. Call ctx.signal({text}, payload) before the agent runs")
        return payloads.popleft()

    async def approve(
        self,
        name: str,
        details: Any = None,
        *,
        schema: dict[str, Any] | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> Any:
        """Same as `wait_for_signal`: send the answer with `signal`. It must match the schema.

        Args:
            name: The name of the approval.
            details: Not used.
            schema: A JSON Schema that the answer must match.
            timeout: Seconds, as in a real run. Not used, because this context never waits.
            key: Not used.

        Returns:
            The answer.

        Raises:
            InvalidArgument: It does not. In a real run, the question would stay open.
            WaitTimeout: No answer was sent.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import MockRunContext
            >>> ctx = MockRunContext()
            >>> ctx.signal("refund", True)
            >>> asyncio.run(ctx.approve("refund", schema={"type": "boolean"}))
            True
        """
        answer = await self.wait_for_signal(name, timeout=timeout)
        if (wrong := misfit_of_answer(answer, schema)) is not None:
            raise must(f"answer to approval {brief(name)}", "match the schema of the request", answer, wrong)
        return answer

    async def messages(self, timeout: float | None = 0, *, key: str | None = None) -> list[dict[str, Any]]:
        """Return the messages of `send` that were not taken yet. It never waits.

        Args:
            timeout: Seconds, as in a real run. Not used.
            key: Not used.
        """
        return [message_of(each) for each in await self.inbox.take()]

    async def call(
        self, agent: AgentRuntime | str, input: Mapping[str, Any] | None = None, *, key: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> RunResult:  # fmt: skip
        """Run the agent immediately, in a new MockRunContext.

        Args:
            agent: An agent, or the key of a registered agent.
            input: The input of the child run.
            key: Not used.
            params: Merged into the "params" of the input.

        Returns:
            The result of the agent.

        Raises:
            RunFailed: The agent failed, as in a real run.
            UnknownAgent: No agent with that key is registered.
        """
        found = get_runtime(agent) if isinstance(agent, str) else agent
        if found is None:
            raise UnknownAgent(f"unknown agent {brief(agent)}. Register it with register_runtime(...)")
        child = _context_of(run_input(input, params), tool_registry=_tools_of(found), clock=self._clock)
        try:
            result = cast("RunResult", await run_agent(found, child))
        except Exception as error:  # noqa: BLE001 - any error ends the child, as in a real run
            cause = deciding_error(error)
            partial = getattr(cause, "result", None)
            result = partial if isinstance(partial, RunResult) else RunResult()
            result.error = ErrorInfo(type(cause).__name__, text_of(cause), retriable=False)
            return result.raise_for_status()
        return result.raise_for_status()

    async def transaction(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """Raise NotSupported: this context uses no database.

        Args:
            name: Not used.
            fn: Not used.
            *args: Not used.

        Returns:
            Nothing.

        Raises:
            NotSupported: Always.
        """
        raise NotSupported("MockRunContext has no database. Test a transaction with a runner on a SQLite file")

    async def now(self, *, key: str | None = None) -> datetime:
        """Return the time of the clock of this context, in UTC.

        Args:
            key: Identifies the call instead of the number of its use, as for `step`.
        """
        return aware(self._clock.wall())

    async def random(self, *, key: str | None = None) -> float:
        """Return a random number in [0, 1).

        Args:
            key: Identifies the call instead of the number of its use, as for `step`.
        """
        return self._clock.random.random()

    async def uuid4(self, *, key: str | None = None) -> UUID:
        """Return a random UUID.

        Args:
            key: Identifies the call instead of the number of its use, as for `step`.
        """
        return UUID(int=self._clock.random.getrandbits(128), version=4)

    def get_events(self, type: EventType | str | None = None) -> list[tuple[str, dict[str, Any]]]:
        """Return the emitted events as (type, payload), all or of one type.

        Args:
            type: Only events of this type. None means all events.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import MockRunContext
            >>> ctx = MockRunContext()
            >>> asyncio.run(ctx.emit("page.read", {"page": 1}))
            >>> ctx.get_events("page.read")
            [('page.read', {'page': 1})]
        """
        wanted = None if type is None else checked_event_name("event_type", type)
        return [event for event in self.events if wanted in (None, event[0])]

    def get_checkpoints(self) -> list[dict[str, Any]]:
        """Return all checkpoints, in the order of the calls of `checkpoint`."""
        return list(self.checkpoints)

    def signal(self, name: str, payload: Any = None) -> None:
        """Send the payload that a later `wait_for_signal` or `approve` of this name returns.

        Args:
            name: The name of the signal or of the approval.
            payload: What the wait returns.
        """
        self._signals.setdefault(unbroken("a signal's name", name), deque()).append(payload)

    def send(self, message: str | Mapping[str, Any], *, when: str = "next_turn", message_id: str | None = None) -> str:
        """Send a message, as `runner.send` does: an agent loop or `messages` takes it. Return its id.

        Args:
            message: The text of a user message, or the message.
            when: "next_turn" or "interrupt", as in `runner.send`.
            message_id: Messages with the same id are delivered once.

        Returns:
            The id of the message.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import MockRunContext
            >>> ctx = MockRunContext()
            >>> _ = ctx.send("Stop after page 3")
            >>> [message["content"] for message in asyncio.run(ctx.messages())]
            ['Stop after page 3']
        """
        return self.inbox.add(user_message(message), checked_when(when), message_id)

    def cancel(self) -> None:
        """Make `is_cancelled()` return True.

        Examples:
            >>> from agent_runtime_core import MockRunContext
            >>> ctx = MockRunContext()
            >>> ctx.cancel()
            >>> ctx.cancelled()
            True
        """
        self._cancelled = True

    def clear(self) -> None:
        """Delete events, checkpoints, sleeps, signals and messages; reset the cancellation and `owns_conversation`."""
        for recorded in (self.events, self.checkpoints, self.sleeps, self._signals):
            recorded.clear()
        self.inbox = SentMessages(self._clock)
        self._cancelled = False
        self.owns_conversation = False


def create_test_context(
    message: str | None = None,
    *,
    input_messages: list[Any] | None = None,
    tools: Iterable[Tool] | ToolRegistry | None = None,
    metadata: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    input: Mapping[str, Any] | None = None,
) -> MockRunContext:
    """Return a context whose input is one user message, `input_messages`, or `input` as `execute` takes it.

    `params` are merged into the "params" of the input.

    Args:
        message: The text of the user message.
        input_messages: The messages of the input, instead of `message`.
        tools: The tools of the run.
        metadata: The metadata of the run.
        params: Merged into the "params" of the input.
        input: The input, as `execute` takes it.

    Raises:
        InvalidArgument: Messages are passed in two places.

    Examples:
        >>> from agent_runtime_core import create_test_context
        >>> create_test_context("Hi").input_messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    if message is not None and input_messages is not None:
        raise must("input_messages", "be None if message is passed", input_messages, "Pass one of them")
    messages = input_messages if message is None else [{"role": "user", "content": message}]
    given: dict[str, Any] = {} if params is None else {"params": params}
    if input is not None:
        given = run_input(input, params)
    if messages is not None and given.setdefault("messages", messages) is not messages:
        raise must("input", "have no messages if they are passed", Shown("messages in both"), "Pass them in one place")
    return _context_of(given, metadata=metadata, tool_registry=_registry(tools))


def _context_of(given: Mapping[str, Any], **options: Any) -> MockRunContext:
    """Return the context of a run with this input."""
    names = {"messages": "input_messages", "params": "params", "conversation_id": "conversation_id"}
    ctx = MockRunContext(**{names[each]: given[each] for each in names if each in given}, **options)
    ctx.input.update(given)
    if given.get("limits") is not None:
        ctx.budget = Budget(RunLimits.of(given["limits"]))
    return ctx


@overload
async def run_agent_test(
    agent: AgentRuntime,
    message: str | None = None,
    *,
    tools: Iterable[Tool] | ToolRegistry | None = None,
    metadata: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    input: Mapping[str, Any] | None = None,
) -> tuple[RunResult, MockRunContext]: ...


@overload
async def run_agent_test(agent: AgentRuntime, message: RunContext) -> RunResult: ...


async def run_agent_test(
    agent: AgentRuntime,
    message: str | RunContext | None = None,
    *,
    tools: Iterable[Tool] | ToolRegistry | None = None,
    metadata: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    input: Mapping[str, Any] | None = None,
) -> RunResult | tuple[RunResult, MockRunContext]:
    """Run an agent once.

    In the agent, `get_llm_client()` returns the client of a `use_llm_client` around this call, else the latest
    MockLLMClient that is still referenced. Without either, clients that would call a remote model raise NotConfigured.

    Args:
        agent: The agent.
        message: The user message, or a context.
        tools: Tools of the new context; by default the tools of the agent.
        metadata: Metadata of the new context.
        params: Merged into the "params" of the input of the new context.
        input: The input of the new context.

    Returns:
        The result alone for a context, otherwise the result and the new context.

    Raises:
        InvalidArgument: A context is passed together with another argument.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import AgentRuntime, RunResult, run_agent_test
        >>> class Echo(AgentRuntime):
        ...     key = "echo"
        ...     async def run(self, ctx):
        ...         await ctx.emit("echo.done", {})
        ...         return RunResult(final_output={"response": ctx.input_messages[-1]["content"]})
        >>> result, ctx = asyncio.run(run_agent_test(Echo(), "Hi"))
        >>> result.final_output, ctx.get_events()
        ({'response': 'Hi'}, [('echo.done', {})])
    """
    if message is None or isinstance(message, str):
        registry = _tools_of(agent) if tools is None else tools
        ctx = create_test_context(message, tools=registry, metadata=metadata, params=params, input=input)
        with _llm_client():
            return await run_agent(agent, ctx), ctx
    for name, value in (("tools", tools), ("metadata", metadata), ("params", params), ("input", input)):
        if value is not None:
            raise must(name, "be None if a context is passed", value, "Pass it to create_test_context")
    with _llm_client():
        return cast("RunResult", await run_agent(agent, message))


@contextlib.contextmanager
def _llm_client() -> Iterator[None]:
    if _override.get() is not None:
        yield
    elif (mock := latest_mock()) is not None:
        with use_llm_client(mock):
            yield
    else:
        with _remote_block:
            yield


class _RemoteBlock:
    """Blocks remote clients while at least one caller is inside: tests may run concurrently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = forbid_remote(
                    "run_agent_test must not call a remote model. Create a MockLLMClient and keep a reference to it, "
                    "or choose a client with `with use_llm_client(client):` around the call"
                )
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                forbid_remote(self._before)


_remote_block = _RemoteBlock()


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
        raise UnserialisableResult("$", f"nested deeper than {MAX_DEPTH} levels. Use a flatter value") from None
    except TypeError:
        return cast("T", decode(encode(value)))  # raises the error of a real run if the value cannot be stored
