"""How long to wait before trying again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from ._core.validation import is_number
from .errors import InvalidArgument, brief

__all__ = ["Backoff", "Chance", "Delay", "fixed", "run_backoff"]


class Chance(Protocol):
    """A source of numbers in [0, 1), such as `Clock.random`."""

    def random(self) -> float: ...


Delay: TypeAlias = Callable[[int, Chance], float]
"""Seconds to wait after failure number `attempt`, counted from 1."""


def fixed(delay: float) -> Delay:
    """The same `delay` in seconds after every failure."""
    seconds = at_least_zero("delay", delay)
    return lambda attempt, chance: seconds


@dataclass(frozen=True)
class Backoff:
    """`base * factor ** (attempt - 1)` seconds, at most `maximum`.

    With `jitter="full"` a random part of that, from 0 to all of it, so that failures that came
    together do not return together (AWS Architecture Blog, "Exponential Backoff And Jitter").
    """

    base: float = 1.0
    factor: float = 2.0
    maximum: float = 60.0
    jitter: Literal["full", "none"] = "full"

    def __post_init__(self) -> None:
        at_least_zero("base", self.base)
        at_least_zero("maximum", self.maximum)
        if at_least_zero("factor", self.factor) < 1:
            raise InvalidArgument(f"factor={brief(self.factor)} would make the waits shorter: give 1 or more")
        if self.jitter not in ("full", "none"):
            raise InvalidArgument(f"jitter={brief(self.jitter)} is neither 'full' nor 'none'")

    def __call__(self, attempt: int, chance: Chance) -> float:
        if attempt < 1:
            raise InvalidArgument(f"attempt={brief(attempt)}: attempts count from 1")
        ceiling = min(self.base * _power(self.factor, attempt - 1), self.maximum) if self.base else 0.0
        return ceiling * chance.random() if self.jitter == "full" else ceiling


def run_backoff(base: float, attempt: int, maximum: float) -> float:
    """Seconds before attempt number `attempt` of a run is retried: `base ** attempt`, at most `maximum`."""
    if attempt < 0:
        raise InvalidArgument(f"attempt={brief(attempt)} is negative")
    return min(_power(at_least_zero("base", base), attempt), at_least_zero("maximum", maximum))


def _power(base: float, exponent: int) -> float:
    try:
        return float(base) ** exponent  # a power of whole numbers could take minutes
    except OverflowError:
        return math.inf


def at_least_zero(name: str, value: object) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise InvalidArgument(f"{name}={brief(value)} is not a number of 0 or more")
    return _power(value, 1)
