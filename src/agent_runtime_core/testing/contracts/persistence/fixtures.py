"""Fixtures for the cases of the persistence stores."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from ..checks import PATIENCE

#: A value of every type that JSON has.
TREE: dict[str, Any] = {"a": [1, 2.5, True, None, "é \U0001f600"], "$": "a dollar", "": {}, "deep": [[[[]]]]}

S = TypeVar("S", bound="Closes")


class Closes(Protocol):
    """A store that can be closed."""

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def opened(make: Callable[..., S], **options: Any) -> AsyncIterator[S]:
    store = make(**options)
    try:
        async with asyncio.timeout(PATIENCE):
            yield store
    finally:
        await store.close()
