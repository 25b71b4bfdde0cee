"""What agents, contexts, model clients and trace sinks look like, and the values they exchange."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar
from uuid import UUID

from ._core.codec.tagged import NOT_STORED, stored_as_dict
from ._core.event_types import EventType
from .errors import InvalidArgument, NotSupported, RunFailed, brief, deciding_error, shortened, text_of
from .retry import Delay
from .status import RunStatus
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
]

T = TypeVar("T")


class Message(TypedDict, total=False):
    """A chat message in OpenAI's format."""

    role: str
    content: str | list[Any] | dict[str, Any] | None
    name: str
    tool_call_id: str
    tool_calls: list[dict[str, Any]]
    metadata: dict[str, Any]


def messages_in(given: Any) -> list[Any]:
    """The messages of a conversation in a list of their own; InvalidArgument if they are none."""
    no_list = isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable)
    messages = [] if no_list else list(given)
    if no_list or not all(isinstance(each, Mapping) for each in messages):
        raise InvalidArgument(
            f"messages are a list of dicts, as [{{'role': 'user', 'content': 'Hello!'}}], not {brief(given)}"
        )
    return messages


@dataclass
class ErrorInfo:
    """Why a run did not succeed; `type` is the name of the error's class."""

    type: str
    message: str
    stack: str = ""
    retriable: bool = True
    details: dict[str, Any] = field(default_factory=dict)


def describe(error: BaseException) -> ErrorInfo:
    """Return what is recorded of an error: of a group, the error that decides, with the traceback of the whole."""
    cause = deciding_error(error)
    return ErrorInfo(type(cause).__name__, text_of(cause), shortened("".join(traceback.format_exception(error))))


@dataclass
class RunResult:
    """What a run gave. `status` and `run_id` are filled in by the runner."""

    final_output: dict[str, Any] = field(default_factory=dict)
    final_messages: list[Any] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    error: ErrorInfo | None = None
    status: RunStatus | None = None
    run_id: UUID | None = None

    def raise_for_status(self) -> RunResult:
        """This result if the run succeeded; else RunFailed with the error's type and message."""
        if self.error is None and self.status in (None, RunStatus.SUCCEEDED):
            return self
        status = (self.status or RunStatus.FAILED).value
        what = f"run {self.run_id}" if self.run_id else "the run"
        why = f": {self.error.type}: {self.error.message}" if self.error else ""
        failed = RunFailed(f"{what} ended as {status}{why}", status, self.error)
        failed.result = self
        raise failed


@stored_as_dict
class ToolCallDict(dict[str, Any]):
    """A tool call in OpenAI's format that answers `.id`, `.name` and `.arguments` too.

    `arguments` are as the model sent them, mostly JSON text. Stored, it is the plain dict.
    """

    @property
    def id(self) -> str:
        return str(self.get("id") or "")

    @property
    def name(self) -> str:
        return str(self._function.get("name") or "")

    @property
    def arguments(self) -> Any:
        return self._function.get("arguments")

    @property
    def _function(self) -> Mapping[str, Any]:
        function = self.get("function")
        return function if type(function) is dict or isinstance(function, Mapping) else self


@dataclass
class LLMResponse:
    """A model's answer.

    `usage` has prompt_tokens (cached ones included), completion_tokens (reasoning included) and
    total_tokens, and where the provider tells them cached_tokens, cache_write_tokens and
    reasoning_tokens. `cost_usd` is None for a model without a price.
    """

    message: dict[str, Any]
    usage: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    finish_reason: str = ""
    #: What the provider's package gave; not stored.
    raw_response: Any = field(default=None, metadata={NOT_STORED: True})
    cost_usd: float | None = None

    @property
    def tool_calls(self) -> list[ToolCallDict]:
        """The calls the model asks for; empty when it asks for none."""
        return [ToolCallDict(call) for call in self.message.get("tool_calls") or ()]


@dataclass
class LLMStreamChunk:
    """A piece of a model's answer; only the last one has `finish_reason`, `usage`, `tool_calls` and `response`."""

    delta: str = ""
    tool_calls: list[Any] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    #: The whole answer.
    response: LLMResponse | None = None


class RunContext(Protocol):
    """An agent's view of its run."""

    @property
    def run_id(self) -> UUID: ...
    @property
    def run_key(self) -> str | None:
        """The caller's own id where that was no UUID."""

    @property
    def conversation_id(self) -> UUID | None: ...
    @property
    def input_messages(self) -> list[Any]: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def tool_registry(self) -> ToolRegistry: ...
    @property
    def tools(self) -> ToolRegistry: ...
    @property
    def attempt(self) -> int:
        """1, and one more for each failure or crash before."""

    @property
    def trace_id(self) -> str: ...
    @property
    def step_id(self) -> str | None:
        """The step this code runs in, or None between steps."""

    @property
    def idempotency_key(self) -> str | None:
        """The same on every attempt of this step: give it to services that know such keys."""

    @property
    def persistence(self) -> Any:
        """The run's PersistenceManager: what a run writes there is refused once it has lost its lease."""

    def own_conversation(self) -> None:
        """Declare, between steps, that the agent keeps the conversation itself: the runner appends nothing to it."""

    async def emit(self, event_type: EventType | str, payload: dict[str, Any]) -> None: ...
    async def checkpoint(self, state: dict[str, Any]) -> None: ...
    async def get_state(self) -> dict[str, Any] | None:
        """The last checkpoint, or None."""

    def cancelled(self) -> bool: ...
    def is_cancelled(self) -> bool: ...

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
        max_result_bytes: int = ...,
    ) -> Any:
        """The recorded result of `fn(*args)`, run only if there is no record of it yet."""

    def renamed(self, old: str, new: str) -> None:
        """The step called `old` when it was recorded is `new` now."""

    async def sleep(self, seconds: float, *, key: str | None = None) -> None: ...
    async def wait_for_signal(self, name: str, *, timeout: float | None = None, key: str | None = None) -> Any:
        """The payload of the next signal of that name; WaitTimeout after `timeout` seconds."""

    async def approve(
        self,
        name: str,
        details: Any = None,
        *,
        schema: dict[str, Any] | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> Any:
        """Ask for a decision and wait for its answer, which fits `schema`."""

    async def call(self, agent: AgentRuntime | str, input: dict[str, Any], *, key: str | None = None) -> RunResult:
        """Run another agent as a child of this run, and wait for its result; RunFailed unless it succeeds."""

    async def transaction(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """A step whose plain `fn(conn, *args)` commits together with its own record, on SQLite; else NotSupported."""

    async def now(self, *, key: str | None = None) -> datetime:
        """The time in UTC, recorded: a resumed run gets the same answer again."""

    async def random(self, *, key: str | None = None) -> float:
        """A number from 0 up to 1, recorded: a resumed run gets the same answer again."""

    async def uuid4(self, *, key: str | None = None) -> UUID:
        """A random UUID, recorded: a resumed run gets the same answer again."""


class AgentRuntime(ABC):
    """An agent. `key`, its name, is a property or a class attribute: `key = "x"`."""

    if TYPE_CHECKING:
        key: Any  # a text; checkers take it as that which a subclass makes of it, attribute or property
    else:

        @property
        @abstractmethod
        def key(self) -> str:
            """The name of this agent, unique in its registry."""

    @abstractmethod
    async def run(self, ctx: RunContext) -> RunResult:
        """Do the work of one run; called again from the top when the run is resumed."""

    async def cancel(self, ctx: RunContext) -> None:  # noqa: B027
        """Called when the run is cancelled, and waited for as long as the grace; does nothing unless overridden."""

    async def on_error(self, ctx: RunContext, error: BaseException) -> ErrorInfo | None:
        """What to record of an error that `run` raised, and whether a retry makes sense; None keeps the default.

        `error` is what `run` raised: an ExceptionGroup of a `TaskGroup` is passed as it is. The hook has what is left
        of the attempt's time, and no more than the grace once the run is to stop.
        """
        return describe(error)


class LLMClient(ABC):
    """A language model. Messages and tools are in OpenAI's chat format."""

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
        """The whole answer."""

    @abstractmethod
    def stream(
        self,
        messages: list[Any],
        *,
        model: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[LLMStreamChunk]:
        """The answer in pieces, as an async generator."""

    async def embed(self, texts: Sequence[str], *, model: str | None = None) -> list[list[float]]:
        """One vector for each text."""
        raise self._cannot("embed")

    async def moderate(self, text: str, *, model: str | None = None) -> dict[str, Any]:
        """The provider's verdict on a text."""
        raise self._cannot("moderate")

    async def count_tokens(self, messages: list[Any], tools: list[dict[str, Any]] | None = None) -> int:
        """How many tokens a prompt takes."""
        raise self._cannot("count_tokens")

    def _cannot(self, operation: str) -> NotSupported:
        return NotSupported(f"{type(self).__name__} has no {operation}()")


class TraceSink:
    """Where traces go. Every method does nothing unless overridden, so a sink overrides only what it needs."""

    def start_run(self, run_id: UUID, metadata: dict[str, Any]) -> None: ...
    def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None: ...
    def end_run(self, run_id: UUID, outcome: str, metadata: dict[str, Any] | None = None) -> None: ...
    def flush(self) -> None: ...

    async def trace(self, event: dict[str, Any]) -> None:
        """Every event of every run, as a dict."""
