"""The interface between the client and a provider's SDK: one request, and its answer complete or in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from .._core.clock import SYSTEM, Clock
from .._core.settings import SettingType
from .._core.validation import is_number
from ..errors import NotSupported, ProviderError

_LIMIT = SettingType("a number of seconds above 0, or math.inf", lambda value: is_number(value) and value > 0)


@dataclass(frozen=True)
class Timeouts:
    """Time limits of a model call, in seconds. math.inf means no limit.

    Args:
        connect: To connect.
        first_byte: Until the answer begins.
        between_chunks: Between two chunks of a stream.
        total: For the whole call, with all retries and delays.

    Raises:
        InvalidArgument: A value is not a number above 0.
    """

    connect: float = 10.0
    first_byte: float = 120.0
    between_chunks: float = 60.0
    total: float = 600.0

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            _LIMIT.check(name, seconds)


@dataclass(frozen=True)
class Request:
    """A request to a model, in OpenAI's chat format; `extra` is passed to the provider unchanged.

    `changes` are the names of the fallbacks that changed it. `clock` measures the wait for the usage of a stream.
    `names` are the names that are sent for properties of the tools.
    """

    messages: Sequence[dict[str, Any]]
    model: str
    tools: Sequence[dict[str, Any]] | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeouts: Timeouts = field(default_factory=Timeouts)
    changes: frozenset[str] = frozenset()
    clock: Clock = field(default=SYSTEM, compare=False, repr=False)
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A complete answer. `message` is an assistant message in OpenAI's format, to be sent back unchanged.

    Fields that only its provider understands (thinking blocks, signatures) are in
    `message["provider_fields"][provider]`; other providers ignore them. `cost_usd` is the cost that the provider
    reported, if it did.
    """

    message: dict[str, Any]
    usage: dict[str, int]
    model: str
    finish_reason: str
    raw: Any = None
    cost_usd: float | None = None


class Partial(Protocol):
    """What is known of a streamed answer so far."""

    def answer(self) -> Completion | None:
        """Return the answer, or None if it is not complete."""

    def usage(self) -> dict[str, int]:
        """Return the usage that was reported so far."""

    def cost(self) -> float | None:
        """Return the cost in USD that was reported so far."""


@dataclass(frozen=True)
class Chunk:
    """A part of a streamed answer: text, or, in the last chunk, the complete answer.

    `partial` belongs to the whole stream. With it, a finished answer counts after a time limit, and a broken stream
    counts its usage.
    """

    text: str = ""
    answer: Completion | None = None
    partial: Partial | None = None


@contextmanager
def counted(usage: Callable[[], dict[str, int]], cost: Callable[[], float | None] = lambda: None) -> Iterator[None]:
    """Add the usage and the cost that were reported for an answer to the error that it ends with."""
    try:
        yield
    except ProviderError as error:
        if not error.usage:
            error.usage, error.cost_usd = usage(), cost()
        raise


class ProviderAdapter(ABC):
    """Sends single requests to one provider: no retries, no time limit except for connecting, raw SDK errors."""

    #: The name in errors and in the table of circuit breakers.
    provider: str
    #: Whether requests leave this machine: False for an endpoint on loopback or an injected transport.
    remote: bool = True
    #: The server. Clients of one endpoint share a circuit breaker for each model; "" shares none.
    endpoint: str = ""

    @abstractmethod
    async def request(self, request: Request) -> Completion:
        """Send a request and return the complete answer."""

    @abstractmethod
    def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Yield the answer as chunks, from an async generator.

        A chunk without text shows that the provider is still active. If the provider does not finish the answer, the
        generator ends without a chunk that contains an `answer`. Closing the generator closes the connection.
        """

    @abstractmethod
    def translate(self, error: Exception, model: str) -> ProviderError | None:
        """Return the ProviderError for an error of the SDK or its transport; None for any other error."""

    async def embed(self, texts: Sequence[str], model: str | None, timeouts: Timeouts) -> list[list[float]]:
        raise self._not_supported("embed")

    async def moderate(self, text: str, model: str | None, timeouts: Timeouts) -> dict[str, Any]:
        raise self._not_supported("moderate")

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str, timeouts: Timeouts
    ) -> int:
        raise self._not_supported("count_tokens")

    def _not_supported(self, operation: str) -> NotSupported:
        return NotSupported(f"{self.provider} does not support {operation}(). Use a client of another provider for it")

    async def close(self) -> None:  # noqa: B027
        """Close the connections."""
