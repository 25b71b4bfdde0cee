"""The interfaces of agents, contexts, model clients and trace sinks, and the values they exchange."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar
from uuid import UUID

from ._core.arguments import Message
from ._core.codec.json import MAX_RESULT
from ._core.codec.tagged import NOT_STORED, stored_as_dict
from ._core.context_vars import ACTIVE_RUN
from ._core.event_types import EventType
from ._core.typed_steps import typed_step
from ._core.validation import Shown, must
from .errors import LimitExceeded, NotSupported, OutputMismatch, RunFailed, deciding_error, shortened, text_of
from .limits import RateLimit
from .retry import Delay
from .status import RunStatus, status_words
from .tools.registry import ToolRegistry
from .tools.tool import Tool, ToolDefinition

__all__ = [
    "AgentRuntime",
    "ErrorInfo",
    "EventType",
    "LLMClient",
    "LLMResponse",
    "LLMStreamChunk",
    "Message",
    "RunContext",
    "RunResult",
    "Tool",
    "ToolCallDict",
    "ToolDefinition",
    "ToolRegistry",
    "TraceSink",
    "current_run",
]

T = TypeVar("T")


@dataclass
class ErrorInfo:
    """Why a run did not succeed.

    Attributes:
        type: The name of the error's class.
        message: The error message.
        stack: The traceback, or "".
        retriable: Whether the runner may execute the run again.
        details: More about the error, as JSON.

    Examples:
        >>> from agent_runtime_core import ErrorInfo
        >>> ErrorInfo("ValueError", "no city").retriable
        True
    """

    type: str
    message: str
    stack: str = ""
    retriable: bool = True
    details: dict[str, Any] = field(default_factory=dict)


def describe(error: BaseException) -> ErrorInfo:
    """Return the ErrorInfo of an error; for a group, the deciding error with the traceback of the whole group."""
    cause = deciding_error(error)
    stack = shortened("".join(traceback.format_exception(error)))
    details: dict[str, Any] = {}
    if isinstance(cause, OutputMismatch) and cause.finish_reason:
        details = {"finish_reason": cause.finish_reason}
    elif isinstance(cause, LimitExceeded):
        details = {"limit": cause.limit, "allowed": cause.allowed, "used": cause.used}
    return ErrorInfo(type(cause).__name__, text_of(cause), stack, details=details)


@dataclass
class RunResult:
    """The outcome of a run. An agent returns a RunResult; the runner sets `status`, `run_id` and `run_key`.

        return RunResult(final_output={"response": "done"})

    Attributes:
        final_output: The result of the run, as JSON.
        final_messages: The messages of the run, in OpenAI's format.
        usage: Tokens, cost, turns and tool calls.
        artifacts: Further values of the agent, as JSON.
        error: Why the run did not succeed, or None.
        status: The final status.
        run_id: The id of the run.
        run_key: The run id that you passed, if it was not a UUID.

    Examples:
        >>> from agent_runtime_core import RunResult
        >>> RunResult(final_output={"response": "done"}).final_output["response"]
        'done'
    """

    final_output: dict[str, Any] = field(default_factory=dict)
    final_messages: list[Any] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    error: ErrorInfo | None = None
    status: RunStatus | None = None
    run_id: UUID | None = None
    run_key: str | None = None

    def raise_for_status(self) -> RunResult:
        """Return this result if the run succeeded.

        Returns:
            This result.

        Raises:
            RunFailed: The run did not succeed; the message contains the type and message of its error.

        Examples:
            >>> from agent_runtime_core import RunFailed, RunResult, RunStatus
            >>> RunResult(status=RunStatus.SUCCEEDED).raise_for_status().status.value
            'succeeded'
            >>> try:
            ...     RunResult(status=RunStatus.CANCELLED, run_key="report-1").raise_for_status()
            ... except RunFailed as error:
            ...     print(error)
            run 'report-1' was cancelled
        """
        if self.error is None and self.status in (None, RunStatus.SUCCEEDED):
            return self
        status = (self.status or RunStatus.FAILED).value
        name = self.run_key or self.run_id
        subject = f"run {str(name)!r}" if name else "the run"
        words = status_words(status)
        reason = f": {self.error.type}: {self.error.message}" if self.error else ""
        failed = RunFailed(f"{subject} {words}{reason}", status, self.error)
        failed.result = self
        raise failed


@stored_as_dict
class ToolCallDict(dict[str, Any]):
    """A tool call in OpenAI's format, a dict with the properties `id`, `name` and `arguments`.

    `arguments` are as the model sent them, usually JSON text. The stored form is the plain dict.

    Examples:
        >>> from agent_runtime_core.interfaces import ToolCallDict
        >>> call = ToolCallDict(id="1", function={"name": "add", "arguments": '{"a": 1}'})
        >>> call.name, call.arguments
        ('add', '{"a": 1}')
    """

    @property
    def id(self) -> str:
        """The id of the call."""
        return str(self.get("id") or "")

    @property
    def name(self) -> str:
        """The name of the tool."""
        function = self.get("function")
        return str((function if type(function) is dict or isinstance(function, Mapping) else self).get("name") or "")

    @property
    def arguments(self) -> Any:
        """The arguments as the model sent them, usually JSON text."""
        function = self.get("function")
        return (function if type(function) is dict or isinstance(function, Mapping) else self).get("arguments")


@dataclass
class LLMResponse:
    """A model's answer.

    Attributes:
        message: The assistant message, in OpenAI's format.
        usage: prompt_tokens (including cached tokens), completion_tokens (including reasoning) and total_tokens; if the
            provider reports them, also cached_tokens, cache_write_tokens, cache_write_1h_tokens, reasoning_tokens and
            web_search_requests.
        model: The model that answered.
        finish_reason: Why the answer ended: "stop" or "tool_calls". An answer is not complete after "length"
            (truncated), "refusal" (`message["refusal"]` contains the words) and "content_filter" (blocked). Agent loops
            also accept the spellings of providers, such as "MAX_TOKENS".
        raw_response: The response of the provider's package. It is not stored.
        cost_usd: The cost in USD, or None for a model without a price.

    Examples:
        >>> from agent_runtime_core import LLMResponse
        >>> call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        >>> LLMResponse({"role": "assistant", "tool_calls": [call]}).tool_calls[0].name
        'add'
    """

    message: dict[str, Any]
    usage: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    finish_reason: str = ""
    raw_response: Any = field(default=None, metadata={NOT_STORED: True})
    cost_usd: float | None = None

    @property
    def tool_calls(self) -> list[ToolCallDict]:
        """The tool calls that the model requests, or an empty list."""
        return [ToolCallDict(call) for call in self.message.get("tool_calls") or ()]


@dataclass
class LLMStreamChunk:
    """A part of a streamed answer.

    Only the last chunk contains `finish_reason`, `usage`, `tool_calls` and `response`.

    Attributes:
        delta: Text to append to the answer.
        tool_calls: All tool calls of the answer.
        finish_reason: Why the answer ended.
        usage: The usage, as in `LLMResponse`.
        response: The complete answer.

    Examples:
        >>> from agent_runtime_core import LLMStreamChunk
        >>> "".join(chunk.delta for chunk in [LLMStreamChunk("Hel"), LLMStreamChunk("lo")])
        'Hello'
    """

    delta: str = ""
    tool_calls: list[Any] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    response: LLMResponse | None = None


class RunContext(Protocol):
    """An agent's interface to its run."""

    @property
    def run_id(self) -> UUID:
        """The id of the run."""

    @property
    def run_key(self) -> str | None:
        """The id that the caller passed as `run_id`, if it was not a UUID; else None."""

    @property
    def tenant(self) -> str | None:
        """Whose run it is; None for a run without a tenant."""

    @property
    def conversation_id(self) -> UUID | None:
        """The conversation that the run belongs to, if any."""

    @property
    def input_messages(self) -> list[Any]:
        """The messages of the run's input, in OpenAI's format."""

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the run's input."""

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that the caller stored with the run."""

    @property
    def scheduled_at(self) -> datetime | None:
        """The time of the schedule's tick that started the run, in UTC; None for other runs."""

    @property
    def tool_registry(self) -> ToolRegistry:
        """The tools of the run; the same as `tools`."""

    @property
    def tools(self) -> ToolRegistry:
        """The tools of the run."""

    @property
    def attempt(self) -> int:
        """The number of this run attempt, from 1; each failure or crash adds 1."""

    @property
    def traceparent(self) -> str | None:
        """The span of the step this code runs in, or of the run, as a W3C `traceparent`.

        None if no trace sink sends spans that others can continue, as `OpenTelemetrySink` does.
        """

    @property
    def trace_id(self) -> str:
        """The trace id of the run, as its events carry it."""

    @property
    def step_id(self) -> str | None:
        """The id of the step in which this code runs, or None between steps."""

    @property
    def idempotency_key(self) -> str | None:
        """A key that is the same on every attempt of this step; pass it to services that accept a key."""

    @property
    def persistence(self) -> Any:
        """The run's PersistenceManager: in a run of a tenant, with only the tenant's data.

        It rejects writes after the run loses its lease.
        """

    def charge(
        self, *, model: str = "", input_tokens: int = 0, output_tokens: int = 0, cost_usd: float | None = None,
        turns: int = 1, tool_calls: int = 0, trace: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Count, inside a step, a model call that this library did not make, against the limits of the run.

        Args:
            model: The model that was called.
            input_tokens: Tokens of the prompt.
            output_tokens: Tokens of the answer.
            cost_usd: The cost in USD. None means the configured price of the model.
            turns: How many model calls this counts as.
            tool_calls: How many tool calls this counts as.
            trace: Further fields of the trace: `provider`, `input` and `output` in OpenAI's chat format,
                `finish_reason`, `started_at` in seconds since 1970. They are not stored.

        Raises:
            LimitExceeded: A limit of the run is exceeded.
        """

    def check_limits(self) -> None:
        """Raise LimitExceeded if a limit of the run is reached, so that no further model call may begin."""

    def trace(self, kind: str, payload: dict[str, Any]) -> None:
        """Report something to the trace sinks that is no event of the run.

        Args:
            kind: The type of the report.
            payload: Its fields.
        """

    def own_conversation(self) -> None:
        """Declare, between steps, that the agent stores the conversation itself: the runner appends nothing."""

    async def emit(self, event_type: EventType | str, payload: dict[str, Any]) -> None:
        """Publish an event of this run; `payload` is JSON.

        Args:
            event_type: An `EventType`, or a custom name.
            payload: The fields of the event, which must be JSON-serializable.

        Raises:
            InvalidArgument: The type or the payload is invalid.
        """

    async def checkpoint(self, state: dict[str, Any]) -> None:
        """Save `state` (JSON) as the run's checkpoint, replacing the previous checkpoint.

        Args:
            state: A JSON-serializable dict. It replaces the last checkpoint.

        Raises:
            InvalidArgument: `state` is not a dict.

        Examples:
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Pages(AgentRuntime):
            ...     key = "pages"
            ...     async def run(self, ctx):
            ...         await ctx.checkpoint({"page": 3})
            ...         return RunResult(final_output=await ctx.get_state())
            >>> AgentRunner.open("memory://").execute_sync(Pages()).final_output
            {'page': 3}
        """

    async def get_state(self) -> dict[str, Any] | None:
        """Return the last checkpoint, or None."""

    def cancelled(self) -> bool:
        """Return whether the run is being cancelled."""

    def is_cancelled(self) -> bool:
        """Return whether the run is being cancelled; the same as `cancelled`."""

    @typed_step
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
        """Return the saved result of `fn(*args)`, or call it and save its result.

            total = await ctx.step("count", count_rows, path, retries=3)

        A step is identified by its name and how often the run used that name before, or by `key`.

        Args:
            name: Name of the step.
            fn: A function, or a coroutine function. A plain function runs in a thread.
            *args: Its arguments.
            key: Identifies the step instead of the number of its use. Steps of one name that run at the same time
                need keys.
            retries: Attempts after the first attempt.
            retry_delay: Seconds before each retry.
            timeout: Seconds that one attempt may take, None for no limit. After them, a step with another `on_in_doubt`
                than "retry" is in doubt.
            retry_on: Error types that are retried, or a function that decides for an error.
            backoff: Computes the delay instead of `retry_delay`: `Backoff(...)`, or a function of (attempt, random).
            on_in_doubt: What to do if a crash interrupted the step and its outcome is unknown: "retry", "fail",
                "review" (ask a person), or a check function that returns `AlreadyDone(result)` or None.
            returns: Type of the result, instead of the function's annotation.
            on_changed_input: "use" returns a saved result that was saved for other arguments, and publishes that in a
                STEP_SKIPPED event. "raise" raises JournalMismatch.
            description: Text for the step's events.
            max_result_bytes: Limit for the encoded result.

        Returns:
            The result, as it is decoded from the journal.

        Raises:
            JournalMismatch: The journal contains another step in this position, or other arguments for this step with
                `on_changed_input="raise"`. Steps of one name that ran concurrently need keys.
            StepExecutionError: The step failed after its last attempt.
            StepInDoubt: The outcome of the step is unknown and `on_in_doubt` is "fail".
            UnserialisableResult: The result cannot be stored.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Count(AgentRuntime):
            ...     key = "count"
            ...     async def run(self, ctx):
            ...         n = await ctx.step("count", len, ["a", "b"], retries=3)
            ...         return RunResult(final_output={"n": n})
            >>> AgentRunner.open("memory://").execute_sync(Count()).final_output
            {'n': 2}
        """

    def renamed(self, old: str, new: str) -> None:
        """Declare that the step recorded as `old` is now called `new`.

        Args:
            old: The recorded name.
            new: The name in the present code.
        """

    async def patched(self, name: str) -> bool:
        """Return whether this run takes the changed code: False if it went past this point before the change.

            if await ctx.patched("check-stock"):
                await ctx.step("check", check)

        Args:
            name: The name of the change.
        """

    async def sleep(self, seconds: float, *, key: str | None = None) -> None:
        """Wait `seconds`; the wait survives a restart. A long wait parks the run.

        Args:
            seconds: How long to wait.
            key: Identifies the wait instead of the number of its use, as for `step`.
        """

    async def wait_for_signal(self, name: str, *, timeout: float | None = None, key: str | None = None) -> Any:
        """Return the payload of the next signal with that name.

        Args:
            name: The name of the signal.
            timeout: Seconds to wait, or None for no limit.
            key: Distinguishes the wait from other waits of the same name.

        Returns:
            The payload.

        Raises:
            WaitTimeout: No signal arrived in time.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Order(AgentRuntime):
            ...     key = "order"
            ...     async def run(self, ctx):
            ...         return RunResult(final_output=await ctx.wait_for_signal("paid"))
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.submit(Order(), run_id="order-1")
            ...         await runner.signal("order-1", "paid", {"amount": 5})
            ...         return (await runner.execute(Order(), run_id="order-1")).final_output
            >>> asyncio.run(main())
            {'amount': 5}
        """

    async def approve(
        self,
        name: str,
        details: Any = None,
        *,
        schema: dict[str, Any] | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> Any:
        """Ask a person for a decision, and return the answer.

        Args:
            name: The name of the approval.
            details: What the person needs to know, as JSON.
            schema: A JSON Schema that the answer must match.
            timeout: Seconds to wait, or None for no limit.
            key: Distinguishes the wait from other waits of the same name.

        Returns:
            The answer, which matches `schema`.

        Raises:
            WaitTimeout: No answer arrived in time.
        """

    async def messages(self, timeout: float | None = 0, *, key: str | None = None) -> list[dict[str, Any]]:
        """Return the messages of `runner.send` for this run since the last call; an empty list if none arrived.

        Args:
            timeout: Seconds to wait for a first message, or None for no limit. 0 only looks.
            key: Distinguishes the call from other calls.
        """

    async def call(
        self, agent: AgentRuntime | str, input: Mapping[str, Any] | None = None, *, key: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> RunResult:  # fmt: skip
        """Run another agent as a child of this run, and return its result.

        Args:
            agent: An agent, or the key of a registered agent.
            input: The input of the child run.
            key: Distinguishes the child from other children of the same agent.
            params: Merged into the "params" of the input.

        Returns:
            The result of the child run, which succeeded.

        Raises:
            RunFailed: The child did not succeed.
            UnknownAgent: No agent with that key is registered.

        Examples:
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Double(AgentRuntime):
            ...     key = "double"
            ...     async def run(self, ctx):
            ...         return RunResult(final_output={"n": 2 * ctx.params["n"]})
            >>> class Four(AgentRuntime):
            ...     key = "four"
            ...     async def run(self, ctx):
            ...         twice = await ctx.call(Double(), params={"n": 2})
            ...         return RunResult(final_output=twice.final_output)
            >>> AgentRunner.open("memory://").execute_sync(Four()).final_output
            {'n': 4}
        """

    async def transaction(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """Run the plain function `fn(conn, *args)` as a step that commits together with its own record.

        Args:
            name: Name of the step.
            fn: A plain function, called as `fn(conn, *args)`.
            *args: Further arguments of `fn`.

        Returns:
            What `fn` returned.

        Raises:
            NotSupported: The state store is not on SQLite or PostgreSQL.
        """

    async def now(self, *, key: str | None = None) -> datetime:
        """Return the current time in UTC. It is recorded: a resumed run gets the same value.

        Args:
            key: Identifies the call instead of the number of its use, as for `step`.

        Examples:
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Clock(AgentRuntime):
            ...     key = "clock"
            ...     async def run(self, ctx):
            ...         now = await ctx.now()
            ...         return RunResult(final_output={"zone": str(now.tzinfo)})
            >>> AgentRunner.open("memory://").execute_sync(Clock()).final_output
            {'zone': 'UTC'}
        """

    async def random(self, *, key: str | None = None) -> float:
        """Return a random number in [0, 1). It is recorded: a resumed run gets the same value.

        Args:
            key: Identifies the call instead of the number of its use, as for `step`.
        """

    async def uuid4(self, *, key: str | None = None) -> UUID:
        """Return a random UUID. It is recorded: a resumed run gets the same value.

        Args:
            key: Identifies the call instead of the number of its use, as for `step`.
        """


class AgentRuntime(ABC):  # noqa: B024 - its abstract methods are inside `if`
    """Base class of agents. Subclass it, set `key` and implement `run`.

        class Greeter(AgentRuntime):
            key = "greeter"

            async def run(self, ctx: RunContext) -> RunResult:
                name = await ctx.step("name", find_name)
                return RunResult(final_output={"response": f"Hello, {name}!"})

    `key` identifies the agent in its registry. It may be a class attribute or a property. `run` may also be a plain
    function with a `SyncRunContext`, whose calls block; it is called in a separate thread.

    Attributes:
        code_version: Names the code of this agent. A run is continued only by code of the version that began it. If
            None, by any code.
        accepts_code_versions: Other versions whose runs this code continues.
        run_timeout_seconds: Time limit of an attempt in seconds, instead of the runner's, higher or lower;
            `float("inf")` is no limit.
        stall_timeout_seconds: Seconds after which an attempt that records nothing ends, instead of the runner's;
            `float("inf")` is no limit.
        rate_limit: How many runs of this agent start in a period, for runs that are submitted where the agent is
            registered; see `RateLimit`.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import AgentRuntime, RunResult, run_agent_test
        >>> class Greeter(AgentRuntime):
        ...     key = "greeter"
        ...     async def run(self, ctx):
        ...         name = await ctx.step("name", str.title, ctx.params["name"])
        ...         return RunResult(final_output={"response": f"Hello, {name}!"})
        >>> result, ctx = asyncio.run(run_agent_test(Greeter(), params={"name": "ada"}))
        >>> result.final_output
        {'response': 'Hello, Ada!'}
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise InvalidArgument for a class without `key` or `run`."""
        if missing := sorted(cls.__abstractmethods__):
            got, fix = Shown("a class without that"), 'Add key = "..."' if missing == ["key"] else ""
            raise must(cls.__name__, f"define {' and '.join(missing)}", got, fix)
        return super().__new__(cls)

    if TYPE_CHECKING:
        key: Any  # str; Any, so that a subclass may define an attribute or a property
    else:

        @property
        @abstractmethod
        def key(self) -> str:
            """The key of this agent, unique in its registry."""

    code_version: str | None = None
    accepts_code_versions: Collection[str] = ()
    run_timeout_seconds: float | None = None
    stall_timeout_seconds: float | None = None
    rate_limit: RateLimit | None = None

    #: Schedules that a worker with this agent stores: options of `runner.schedules.put`. See `schedule`.
    schedules: Sequence[Mapping[str, Any]] = ()

    def lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Return an async context manager around all runs of this agent in a process; does nothing by default.

            @asynccontextmanager
            async def lifespan(self):
                async with httpx.AsyncClient() as self.client:
                    yield

        A runner enters it before the agent's first run in an event loop, and leaves it when `run_loop` ends, when the
        runner is closed, or when the event loop ends. What entering raises is an error of the run.
        """
        return nullcontext()

    def _check_attributes(self) -> None:  # noqa: B027
        """Raise UnknownSetting for an attribute that would be ignored; called when the agent is registered."""

    if TYPE_CHECKING:
        # A subclass defines each of these with `async def`, or with `def` and a `SyncRunContext`: therefore Any.

        @abstractmethod
        def run(self, ctx: Any) -> Coroutine[Any, Any, RunResult] | Any:
            """Execute one run."""

        def cancel(self, ctx: Any) -> Coroutine[Any, Any, None] | Any:
            """Clean up after the run was cancelled."""

        def on_error(self, ctx: Any, error: BaseException) -> Coroutine[Any, Any, ErrorInfo | None] | Any:
            """Return what to record of an error."""
    else:

        @abstractmethod
        async def run(self, ctx: RunContext) -> RunResult:
            """Execute one run.

            When the run is resumed, this method is called again from its beginning; completed steps return their saved
            results. A plain `def run(self, ctx: SyncRunContext)` runs in a separate thread.

            Args:
                ctx: The context of the run.

            Returns:
                The result of the run.
            """

        async def cancel(self, ctx: RunContext) -> None:
            """Clean up after the run was cancelled, for at most the grace period; does nothing by default.

            Args:
                ctx: The context of the run.
            """

        async def on_error(self, ctx: RunContext, error: BaseException) -> ErrorInfo | None:
            """Return what to record of an error that `run` raised, and whether to retry; None for the default.

            The hook may use the rest of the attempt's time; once the run is stopping, at most the grace period.

            Args:
                ctx: The context of the run.
                error: What `run` raised. An ExceptionGroup of a `TaskGroup` is passed as it is.
            """
            return describe(error)


class LLMClient(ABC):
    """Base class of model clients. Messages and tools are in OpenAI's chat format.

    Example:
        ```python
        class Echo(LLMClient):
            async def generate(self, messages, **options):
                return LLMResponse({"role": "assistant", "content": messages[-1]["content"]})

            async def stream(self, messages, **options):
                response = await self.generate(messages)
                yield LLMStreamChunk(delta=response.message["content"], finish_reason="stop", response=response)
        ```
    """

    @abstractmethod
    async def generate(
        self,
        messages: list[Any],
        *,
        model: str | None = None,
        stream: bool = False,
        tools: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> LLMResponse:
        """Return the complete answer to a conversation.

        Args:
            messages: The conversation.
            model: The model; None for the client's default.
            stream: Whether to receive the answer as a stream; the complete answer is returned either way.
            tools: The tools that the model may call.
            temperature: Randomness of the answer; None for the provider's default.
            max_tokens: The most tokens of the answer; None for the client's default.
            **kwargs: Further options of the provider.

        Raises:
            ProviderError: The request failed.
        """

    @abstractmethod
    def stream(
        self, messages: list[Any], *, model: str | None = None, tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> AsyncIterator[LLMStreamChunk]:
        """Yield the answer in chunks, as an async generator; the last chunk contains the complete `response`.

        Args:
            messages: The conversation.
            model: The model; None for the client's default.
            tools: The tools that the model may call.
            **kwargs: Further options of the provider.

        Raises:
            ProviderError: The request failed, or the answer ended before it was complete.
        """

    async def embed(self, texts: Sequence[str], *, model: str | None = None) -> list[list[float]]:
        """Return one embedding vector for each text; NotSupported if the client offers none.

        Args:
            texts: The texts.
            model: The embedding model; None for the client's default.

        Raises:
            NotSupported: The client cannot make embeddings.
        """
        raise self._not_supported("embed")

    async def moderate(self, text: str, *, model: str | None = None) -> dict[str, Any]:
        """Return the provider's moderation result for a text; NotSupported if the client offers none.

        Args:
            text: The text.
            model: The moderation model; None for the client's default.

        Raises:
            NotSupported: The client cannot moderate.
        """
        raise self._not_supported("moderate")

    async def count_tokens(self, messages: list[Any], tools: list[dict[str, Any]] | None = None) -> int:
        """Return the number of tokens of a prompt; NotSupported if the client cannot count.

        Args:
            messages: The conversation.
            tools: The tools of the request.

        Raises:
            NotSupported: The client cannot count.
        """
        raise self._not_supported("count_tokens")

    def _not_supported(self, operation: str) -> NotSupported:
        return NotSupported(f"{type(self).__name__} does not support {operation}(). Use a client that does")


def current_run() -> RunContext | None:
    """Return the context of the run that the calling code belongs to, or None outside of runs.

        ctx = current_run()
        if ctx is not None:
            rows = await ctx.step("query", query, sql)

    Code that gets no context as an argument finds it here, for example code that a framework calls. It is found in
    steps and tools, in tasks that the run started, and in the threads of plain functions and of `asyncio.to_thread`. In
    a thread, call its coroutine functions with `portal.from_thread(ctx.step, ...)`.

    Examples:
        >>> from agent_runtime_core import current_run
        >>> current_run() is None
        True
    """
    active = ACTIVE_RUN.get()
    return None if active is None else active.context()


class TraceSink:
    """Base class of trace sinks. Every method does nothing by default; override the methods you need.

        class PrintSink(TraceSink):
            def log_event(self, run_id, event_type, payload):
                print(run_id, event_type)

        runner = AgentRunner(trace_sinks=[PrintSink()])

    Most methods are called by a thread of the tracer, not by the run itself.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult, TraceSink
        >>> class Kept(TraceSink):
        ...     outcomes = []
        ...     def end_run(self, run_id, outcome, metadata=None):
        ...         self.outcomes.append(outcome)
        >>> class Hello(AgentRuntime):
        ...     key = "hello"
        ...     async def run(self, ctx):
        ...         return RunResult()
        >>> async def main():
        ...     async with AgentRunner(trace_sinks=[Kept()]) as runner:
        ...         await runner.execute(Hello())
        >>> asyncio.run(main())
        >>> Kept.outcomes
        ['succeeded']
    """

    #: Whether the sink uses prompts and answers. If no sink does, the messages of frameworks are not converted for it.
    content: bool = True

    def start_run(self, run_id: UUID, metadata: dict[str, Any]) -> None:
        """A process began to execute the run; `metadata` contains `time` in seconds since 1970.

        Args:
            run_id: The run.
            metadata: About the execution; `time` is in seconds since 1970.
        """

    def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
        """An event of the run, a model call (`llm.call`) or a tool call (`tool.done`).

        Args:
            run_id: The run.
            event_type: The type of the event.
            payload: The fields of the event.
        """

    def end_run(self, run_id: UUID, outcome: str, metadata: dict[str, Any] | None = None) -> None:
        """The process stopped executing the run; `outcome` says why.

        Args:
            run_id: The run.
            outcome: Why the process stopped executing the run, such as "succeeded".
            metadata: About the execution; `time` is in seconds since 1970.
        """

    def flush(self) -> None:
        """Send what is buffered; called when the tracer closes."""

    def activate(self, traceparent: str) -> AbstractContextManager[object] | None:
        """Return a context manager that makes this span the current span, for code of the run.

        Unlike the other methods, it is called by the run: around each execution and each attempt of a step.

        Args:
            traceparent: The span of the execution or of the step, as in a W3C `traceparent` header.
        """

    def current_traceparent(self) -> str | None:
        """Return the span in which a run is being submitted, or None. Called by `submit` and `execute`."""

    async def trace(self, event: dict[str, Any]) -> None:
        """Handle any of these as one dict.

        Args:
            event: `type` ("start_run", "end_run" or the event type), `run_id`, `time` in seconds since 1970, and the
                payload.
        """
