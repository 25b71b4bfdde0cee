"""Fixtures for the cases of a state store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

from ..._engines.base import INSTALL, Guard, Op
from ..._journal.record import DONE, Record
from ...state.base import StateStore
from ..clock import VirtualClock
from .checks import PATIENCE

Make = Callable[..., StateStore]
Case = Callable[[Make], Awaitable[None]]

RUN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b01")
OTHER = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b02")
OLD, NEW, NEWER, NEWEST = (f"01HZX00000000000000000000{n}" for n in (1, 2, 3, 4))


@contextlib.asynccontextmanager
async def opened(make: Make) -> AsyncIterator[StateStore]:
    store = make(clock=VirtualClock())
    try:
        async with asyncio.timeout(PATIENCE):
            yield store
    finally:
        await store.close()


def record(seq: int, name: str = "", *, kind: str = DONE, claim: str = OLD, **more: Any) -> Record:
    return Record(seq, kind, name or f"step{seq}", "c:0", 1, claim, 1_800_000_000.0 + max(seq, 0), **more)


async def append(store: StateStore, *records: Record, claim: str | None = None, run: UUID = RUN) -> list[Any]:
    guard = None if claim is None else Guard(str(run), claim)
    return await store.commits.commit(guard, [Op("journal.append", (str(run), each)) for each in records])


async def install(store: StateStore, claim: str, run: UUID = RUN) -> None:
    await store.commits.commit(None, [Op(INSTALL, (str(run), claim))])
