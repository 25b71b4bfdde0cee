"""Circuit breakers: a provider that keeps failing is left alone for a while, then tried with one call."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TypeAlias

from .._core.clock import SYSTEM, Clock
from ..errors import CircuitOpen, NotConfigured, ProviderError, deciding_error

Key: TypeAlias = tuple[str, str, str]
"""Provider, endpoint, model."""

#: Seconds after which a call that found the one probe under way may come back.
RECHECK = 5.0


@dataclass
class _Circuit:
    faults: int = 0
    #: How long it is open at a time; 0 while it is closed.
    window: float = 0.0
    until: float = 0.0
    probe: CircuitPermit | None = None
    last: str = ""


class CircuitPermit:
    """Leave to ask once. Its first outcome counts: `answered`, `failed`, or `dropped` when nobody knows."""

    def __init__(self, breakers: Breakers, key: Key) -> None:
        self._breakers, self._key = breakers, key
        self._settled = False

    def answered(self) -> None:
        """The provider did its part, be it to refuse the request."""
        self._settle(None, known=True)

    def failed(self, error: BaseException) -> None:
        """It is the provider's fault if the error is worth a retry; other errors of a provider are answers."""
        error = deciding_error(error)
        if isinstance(error, ProviderError) and not isinstance(error, NotConfigured):
            self._settle(error if error.retriable else None, known=True)
        else:
            self.dropped()

    def dropped(self) -> None:
        """The call was cancelled or given up, or failed on this side: another one may be the probe."""
        self._settle(None, known=False)

    def _settle(self, fault: ProviderError | None, *, known: bool) -> None:
        if not self._settled:
            self._settled = True
            self._breakers.settle(self, self._key, fault, known=known)


class Breakers:
    """A table of breakers, one for each provider, endpoint and model; safe in threads.

    1. `after` faults in a row open one; a call then raises CircuitOpen without having asked.
    2. It is open for `window` seconds, then lets one call through, and no other until that one is settled.
    3. An answer closes it; a fault opens it again, for twice as long each time, up to `longest` seconds.
    4. Once it is open, calls that began before have no say.
    """

    def __init__(self, clock: Clock = SYSTEM, *, after: int = 5, window: float = 30.0, longest: float = 300.0) -> None:
        self._clock, self._after, self._window, self._longest = clock, after, window, longest
        self._lock = threading.Lock()
        self._circuits: dict[Key, _Circuit] = {}

    def enter(self, key: Key) -> CircuitPermit:
        """Leave to ask once; CircuitOpen if there is none now."""
        with self._lock:
            if refused := self._refusal(key):
                raise refused
            permit = CircuitPermit(self, key)
            circuit = self._circuits.get(key)
            if circuit is not None and circuit.window:
                circuit.probe = permit
                # A probe whose holder never comes back is not waited for longer than this.
                circuit.until = self._clock.boot() + self._longest
            return permit

    def refusal(self, key: Key) -> CircuitOpen | None:
        """Why `enter` would not let one ask now, or None."""
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
            when = "one call is trying it now"
        else:
            when = f"it is tried again in {left:.0f} s"
        return CircuitOpen(
            f"{provider} was not asked for {model!r}: it failed {circuit.faults} times in a row "
            f"(last: {circuit.last}); {when}",
            after=left,
            provider=provider,
            model=model,
        )

    def settle(self, permit: CircuitPermit, key: Key, fault: ProviderError | None, *, known: bool) -> None:
        """Count the outcome of a permit, which calls this itself."""
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


#: The one of this process, for clients that say where they ask.
SHARED = Breakers()
