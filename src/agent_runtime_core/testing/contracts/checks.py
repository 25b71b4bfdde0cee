"""What the contract suites share: checks that say what they expected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

PATIENCE = 20.0  # seconds after which what should have come counts as missing
TRIES = 5  # a machine that stands still for a moment breaks no promise

C = TypeVar("C", bound=Callable[..., Awaitable[None]])


class Cases(list[C]):
    """The cases of a contract; one is taken in by decorating it."""

    def __call__(self, case: C) -> C:
        self.append(case)
        return case

    async def check(self, make: Any) -> None:
        """Run every case."""
        for case in self:
            await case(make)


def same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: expected {expected!r:.400}, found {found!r:.400}")


@contextlib.contextmanager
def refused(error: type[Exception], what: str) -> Iterator[None]:
    try:
        yield
    except error:
        return
    except Exception as other:
        raise AssertionError(f"{what}: {error.__name__} was expected, not {other!r:.400}") from other
    raise AssertionError(f"{what}: {error.__name__} was not raised")


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
