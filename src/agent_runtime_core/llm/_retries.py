"""How often a request to a provider is retried, and circuit breakers: a provider that keeps failing gets a probe."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from .._core.clock import SYSTEM, Clock
from .._core.log import log
from .._core.settings import POSITIVE, SECONDS
from ..errors import CircuitOpen, NotConfigured, ProviderError, RequestRefused, deciding_error
from ..retry import Backoff
from ._provider import Partial, Timeouts

Key: TypeAlias = tuple[str, str, str]
"""Provider, endpoint, model."""

#: Seconds after which a call that was rejected because of an active probe may be retried.
RECHECK = 5.0


@dataclass
class _Circuit:
    faults: int = 0
    #: Seconds that the circuit stays open; 0 while it is closed.
    window: float = 0.0
    until: float = 0.0
    probe: CircuitPermit | None = None
    last: str = ""


class CircuitPermit:
    """Permission for one request. Its first outcome counts: `answered`, `failed`, or `dropped` if it is unknown."""

    def __init__(self, breakers: Breakers, key: Key) -> None:
        self._breakers, self._key = breakers, key
        self._used = False

    def answered(self) -> None:
        """Record that the provider answered; a rejected request is an answer too."""
        self._settle(None, known=True)

    def failed(self, error: BaseException) -> None:
        """Record an error. A retriable ProviderError counts as a failure; other errors of a provider are answers.

        RequestRefused is an answer too: the provider works, even if the model wrote something unreadable.
        """
        error = deciding_error(error)
        if isinstance(error, ProviderError) and not isinstance(error, NotConfigured):
            is_failure = error.retriable and not isinstance(error, RequestRefused)
            self._settle(error if is_failure else None, known=True)
        else:
            self.dropped()

    def dropped(self) -> None:
        """Record that the call was cancelled or failed on this side; another call may be the probe."""
        self._settle(None, known=False)

    def _settle(self, fault: ProviderError | None, *, known: bool) -> None:
        if not self._used:
            self._used = True
            self._breakers.settle(self, self._key, fault, known=known)


class Breakers:
    """Circuit breakers, one for each provider, endpoint and model. Thread-safe.

    1. `after` failures in a row open a circuit. Calls then raise CircuitOpen without sending a request.
    2. The circuit stays open for `window` seconds. Then it allows one call as a probe, and no other until the probe
       ends.
    3. An answer closes the circuit. A failure opens it again, each time for twice as long, up to `longest` seconds.
    4. The outcome of a call that started before the circuit opened is ignored.
    """

    def __init__(self, clock: Clock = SYSTEM, *, after: int = 5, window: float = 30.0, longest: float = 300.0) -> None:
        self._clock, self._after, self._window, self._longest = clock, after, window, longest
        self._lock = threading.Lock()
        self._circuits: dict[Key, _Circuit] = {}

    def enter(self, key: Key) -> CircuitPermit:
        """Return the permission for one request; raise CircuitOpen if the circuit is open."""
        with self._lock:
            if refused := self._refusal(key):
                raise refused
            permit = CircuitPermit(self, key)
            circuit = self._circuits.get(key)
            if circuit is not None and circuit.window:
                circuit.probe = permit
                # A probe that never reports its outcome must not keep the circuit open forever.
                circuit.until = self._clock.boot() + self._longest
            return permit

    def refusal(self, key: Key) -> CircuitOpen | None:
        """Return the error that `enter` would raise now, or None."""
        with self._lock:
            return self._refusal(key)

    def _refusal(self, key: Key) -> CircuitOpen | None:
        circuit = self._circuits.get(key)
        if circuit is None or not circuit.window:
            return None
        left = circuit.until - self._clock.boot()
        if left <= 0:
            return None
        provider, _, model = key
        if circuit.probe is not None:
            left = min(left, RECHECK)
            when = "One call is probing it now"
        else:
            when = f"Retry in {left:.0f} s"
        return CircuitOpen(
            f"circuit breaker open for {provider}, model {model!r}: "
            f"{circuit.faults} failure{'s' * (circuit.faults != 1)} in a row (last: {circuit.last}). {when}",
            after=left,
            provider=provider,
            model=model,
        )

    def settle(self, permit: CircuitPermit, key: Key, fault: ProviderError | None, *, known: bool) -> None:
        """Record the outcome of a permission; called by the permission itself."""
        with self._lock:
            circuit = self._circuits.get(key)
            if circuit is not None and circuit.window and circuit.probe is not permit:
                return
            if not known:
                if circuit is not None and circuit.probe is permit:
                    circuit.probe, circuit.until = None, self._clock.boot()
            elif fault is None:
                self._circuits.pop(key, None)
            else:
                self._count(self._circuits.setdefault(key, _Circuit()), fault)

    def _count(self, circuit: _Circuit, fault: ProviderError) -> None:
        circuit.faults += 1
        circuit.probe = None
        circuit.last = type(fault).__name__ + (f" {fault.status}" if fault.status else "")
        if circuit.window:
            circuit.window = min(circuit.window * 2, self._longest)
        elif circuit.faults >= self._after:
            circuit.window = self._window
        circuit.until = self._clock.boot() + circuit.window


#: The circuit breakers of this process, for clients with a known endpoint.
SHARED = Breakers()


@dataclass(frozen=True, init=False)
class Retries:
    """How failed requests are retried.

    Each retry waits for the seconds that the provider asks for with Retry-After, plus a random delay from 0 to
    `base * 2 ** n` seconds, at most `cap`.

    Args:
        max_attempts: Requests for one answer, including the first.
        base: Seconds, the scale of the delays.
        cap: The longest random delay, in seconds.
        retry_after_cap: If the provider asks to wait more seconds than this, its error is raised immediately.
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
    """How many retries are left in a run, for all of its model calls."""

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
        """Seconds until `timeouts.total` ends."""
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
