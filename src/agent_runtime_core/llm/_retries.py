"""How often a request to a provider is retried, and after how many seconds."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from .._core.clock import Clock
from .._core.log import log
from .._core.settings import POSITIVE, SECONDS
from ..errors import ProviderError
from ..retry import Backoff
from ._circuit_breaker import Breakers, Key
from ._provider import Partial, Timeouts


@dataclass(frozen=True, init=False)
class Retries:
    """How failed requests are retried.

    Each retry waits for the seconds that the provider asks for with Retry-After, plus a random delay from 0 to
    `base * 2 ** n` seconds, at most `cap`.

    Args:
        max_attempts: Requests for one answer, including the first.
        base: Seconds, the scale of the delays.
        cap: The longest random delay, in seconds.
        retry_after_cap: If the provider asks to wait more seconds than this, its error is raised at once.
        tries: The older name of `max_attempts`, which it replaces if it is not None.

    Raises:
        InvalidArgument: A value is out of range.
    """

    max_attempts: int = 4
    base: float = 0.5
    cap: float = 30.0
    retry_after_cap: float = 60.0

    # Written out, because a dataclass cannot have `tries` both as an argument and as a property.
    def __init__(
        self,
        max_attempts: int = 4,
        base: float = 0.5,
        cap: float = 30.0,
        retry_after_cap: float = 60.0,
        *,
        tries: int | None = None,
    ) -> None:
        if tries is not None:
            POSITIVE.check("tries", tries)
            max_attempts = tries
        POSITIVE.check("max_attempts", max_attempts)
        object.__setattr__(self, "max_attempts", max_attempts)
        for name, seconds in (("base", base), ("cap", cap), ("retry_after_cap", retry_after_cap)):
            SECONDS.check(name, seconds)
            object.__setattr__(self, name, seconds)

    @property
    def tries(self) -> int:
        """The older name of `max_attempts`."""
        return self.max_attempts


@dataclass
class RetryBudget:
    """How many retries a run has left, for all of its model calls."""

    left: int


RETRY_BUDGET: ContextVar[RetryBudget | None] = ContextVar("agent_runtime_core_retry_budget", default=None)


class Meter(Protocol):
    """Counts the answers that a call throws away, for the limits of a run."""

    def count(self, model: str, usage: Mapping[str, int], cost_usd: float | None) -> None:
        """Count an answer that began and cannot be used; `usage` is empty if the provider reported none."""

    def before_request(self) -> None:
        """Raise LimitExceeded if a limit in tokens or USD is reached, so that no further request may be sent."""


METER: ContextVar[Meter | None] = ContextVar("agent_runtime_core_meter", default=None)


class RetryState:
    """The attempts of one call: how many were made, and how much time is left."""

    def __init__(self, key: Key, timeouts: Timeouts, retries: Retries, breakers: Breakers, clock: Clock) -> None:
        self.key = key
        self.timeouts = timeouts
        self._retries, self._breakers, self._clock = retries, breakers, clock
        self._backoff = Backoff(retries.base, 2.0, retries.cap)
        self._failures = 0
        self._deadline = clock.monotonic() + timeouts.total
        #: What is known of the answer of this attempt.
        self.partial: Partial | None = None

    @property
    def left(self) -> float:
        """Seconds until `timeouts.total` has passed."""
        return self._deadline - self._clock.monotonic()

    async def wait(self, error: ProviderError) -> None:
        """Wait until the request may be retried; raise the error if it may not, or CircuitOpen."""
        self._failures += 1
        if not error.retriable or self._failures >= self._retries.max_attempts:
            raise error
        if refused := self._breakers.refusal(self.key):
            raise refused from error
        asked_for = error.retry_after or 0.0
        if asked_for > self._retries.retry_after_cap:
            error.args = (
                f"{error}. The provider asks to wait {asked_for:g} s, more than "
                f"retry_after_cap={self._retries.retry_after_cap:g}",
            )
            raise error
        wait = asked_for + self._backoff(self._failures, self._clock.random)
        budget = RETRY_BUDGET.get()
        if wait >= self.left or (budget is not None and budget.left <= 0):
            raise error
        if budget is not None:
            budget.left -= 1
        provider, _, model = self.key
        log.info(
            "%s, %s: %s; retrying in %.2f s (attempt %d of %d)",
            provider,
            model,
            type(error).__name__,
            wait,
            self._failures + 1,
            self._retries.max_attempts,
        )
        await self._clock.sleep_for(wait)
