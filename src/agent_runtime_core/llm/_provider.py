"""What stands between the resilient client and a provider's SDK: one request, its answer whole or in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._core.settings import SettingType
from .._core.validation import is_number
from ..errors import NotSupported, ProviderError

_LIMIT = SettingType("a number of seconds above 0, or math.inf", lambda value: is_number(value) and value > 0)


@dataclass(frozen=True)
class Timeouts:
    """Seconds: to connect, until the first byte of an answer, between two pieces of one, and for all of it.

    math.inf is no limit.
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
    """What a model is asked. Messages and tools are in OpenAI's chat format; `extra` goes to the provider as it is."""

    messages: Sequence[dict[str, Any]]
    model: str
    tools: Sequence[dict[str, Any]] | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True)
class Completion:
    """A finished answer. `message` is an assistant message in OpenAI's format, to be sent back as it is.

    What only its provider understands (thinking blocks, signatures) stands in
    `message["provider_fields"][provider]`; other providers leave it out.
    """

    message: dict[str, Any]
    usage: dict[str, int]
    model: str
    finish_reason: str
    raw: Any = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: some text, or, once and last, the answer as it was finished."""

    text: str = ""
    answer: Completion | None = None


class ProviderAdapter(ABC):
    """One provider, asked once: no retries, no time limit but that for connecting, its own errors."""

    #: As it is named in errors and in the table of circuit breakers.
    provider: str
    #: Whether asking leaves this machine: False for an endpoint on loopback or an injected transport.
    remote: bool = True
    #: Where it asks: clients of one endpoint share a circuit breaker for each model; "" shares none.
    endpoint: str = ""

    @abstractmethod
    async def request(self, request: Request) -> Completion: ...

    @abstractmethod
    def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """An async generator that ends without a Piece that has an `answer` if the provider did not finish.

        A piece without text says that the provider is still at it. Closing it closes the connection.
        """

    @abstractmethod
    def translate(self, error: Exception, model: str) -> ProviderError | None:
        """What an error of the SDK or its transport means; None for one that is not the provider's."""

    async def embed(self, texts: Sequence[str], model: str | None, timeouts: Timeouts) -> list[list[float]]:
        raise self._cannot("embed")

    async def moderate(self, text: str, model: str | None, timeouts: Timeouts) -> dict[str, Any]:
        raise self._cannot("moderate")

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str, timeouts: Timeouts
    ) -> int:
        raise self._cannot("count_tokens")

    def _cannot(self, operation: str) -> NotSupported:
        return NotSupported(f"{self.provider} has no {operation}()")

    async def close(self) -> None:  # noqa: B027
        """Let go of connections."""
