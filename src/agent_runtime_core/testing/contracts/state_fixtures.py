"""Fixtures for the cases of a state store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any
from uuid import UUID

from ..._engines.base import INSTALL, Guard, Op
from ..._journal.record import DONE, Record
from ...state.base import StateStore
from ..clock import VirtualClock
from . import checks

Make = Callable[..., StateStore]
Case = Callable[[Make], Awaitable[None]]

RUN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b01")
OTHER = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b02")
OLD, NEW, NEWER, NEWEST = (f"01HZX00000000000000000000{n}" for n in (1, 2, 3, 4))


def opened(make: Make) -> AbstractAsyncContextManager[StateStore]:
    return checks.opened(make, clock=VirtualClock())


def record(seq: int, name: str = "", *, kind: str = DONE, claim: str = OLD, **more: Any) -> Record:
    return Record(seq, kind, name or f"step{seq}", "c:0", 1, claim, 1_800_000_000.0 + max(seq, 0), **more)


async def write(store: StateStore, *ops: Op, claim: str | None = None, run: UUID = RUN) -> list[Any]:
    return await store.commits.commit(None if claim is None else Guard(str(run), claim), ops)


async def append(store: StateStore, *records: Record, claim: str | None = None, run: UUID = RUN) -> list[Any]:
    return await write(store, *(Op("journal.append", (str(run), each)) for each in records), claim=claim, run=run)


async def install(store: StateStore, claim: str, run: UUID = RUN) -> None:
    await write(store, Op(INSTALL, (str(run), claim)))
