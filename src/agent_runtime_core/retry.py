"""Functions that say how long to wait before the next attempt."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from ._core.validation import is_number, must

__all__ = ["Backoff", "Chance", "Delay", "fixed", "run_backoff"]


class Chance(Protocol):
    """A source of random numbers in [0, 1), such as `Clock.random`."""

    def random(self) -> float:
        """Return a random number in [0, 1)."""


Delay: TypeAlias = Callable[[int, Chance], float]
"""Returns the seconds to wait after failure number `attempt`, counted from 1."""


def fixed(delay: float) -> Delay:
    """Return a `Delay` that is the same after every failure.

    Args:
        delay: Seconds, 0 or more.

    Raises:
        InvalidArgument: `delay` is negative, infinite or not a number.

    Examples:
        >>> import random
        >>> from agent_runtime_core.retry import fixed
        >>> fixed(1.5)(1, random.Random())
        1.5
    """
    seconds = at_least_zero("delay", delay)
    return lambda attempt, chance: seconds


@dataclass(frozen=True)
class Backoff:
    """Exponential delay: `base * factor ** (attempt - 1)` seconds, at most `maximum`.

    With `jitter="full"` the delay is a random part of that, from 0 to all of it, so that attempts that failed together
    are not retried together (AWS Architecture Blog, "Exponential Backoff And Jitter").

        Step("fetch", fetch, retries=5, backoff=Backoff(base=0.5, maximum=30))

    Args:
        base: Seconds after the first failure.
        factor: How much longer each delay is than the delay before; 1 or more.
        maximum: The longest delay, in seconds.
        jitter: "full" or "none".

    Raises:
        InvalidArgument: A value is out of range.

    Examples:
        >>> import random
        >>> from agent_runtime_core import Backoff
        >>> delay = Backoff(base=0.5, maximum=30, jitter="none")
        >>> [delay(attempt, random.Random()) for attempt in (1, 2, 3)]
        [0.5, 1.0, 2.0]
    """

    base: float = 1.0
    factor: float = 2.0
    maximum: float = 60.0
    jitter: Literal["full", "none"] = "full"

    def __post_init__(self) -> None:
        at_least_zero("base", self.base)
        at_least_zero("maximum", self.maximum)
        if at_least_zero("factor", self.factor) < 1:
            raise must("factor", "be at least 1", self.factor, "A smaller factor would shorten the delays")
        if self.jitter not in ("full", "none"):
            raise must("jitter", "be 'full' or 'none'", self.jitter)

    def __call__(self, attempt: int, chance: Chance) -> float:
        """Return the seconds to wait after attempt number `attempt`, which counts from 1."""
        if attempt < 1:
            raise must("attempt", "be at least 1", attempt)
        ceiling = min(self.base * _power(self.factor, attempt - 1), self.maximum) if self.base else 0.0
        return ceiling * chance.random() if self.jitter == "full" else ceiling


def run_backoff(base: float, attempt: int, maximum: float) -> float:
    """Return the seconds before run attempt number `attempt` is retried: `base ** attempt`, at most `maximum`.

    Args:
        base: The base of the power.
        attempt: The number of the attempt, from 0.
        maximum: The longest delay in seconds.

    Raises:
        InvalidArgument: An argument is negative.

    Examples:
        >>> from agent_runtime_core.retry import run_backoff
        >>> run_backoff(2, 3, 300)
        8.0
    """
    if attempt < 0:
        raise must("attempt", "be at least 0", attempt)
    return min(_power(at_least_zero("base", base), attempt), at_least_zero("maximum", maximum))


def _power(base: float, exponent: int) -> float:
    try:
        return float(base) ** exponent  # a power of large integers could take minutes
    except OverflowError:
        return math.inf


def at_least_zero(name: str, value: object) -> float:
    """Return `value` as a float; InvalidArgument unless it is a finite number of 0 or more."""
    if not is_number(value) or not 0 <= value < math.inf:
        raise must(name, "be a finite number of at least 0", value)
    return _power(value, 1)
