"""What the suites of the stores share: claims to write under, and values that show what a store loses."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Protocol, TypeVar
from uuid import UUID

from ...._engines.base import INSTALL, Commits, Guard, Op
from ...._engines.memory import MemoryEngine
from ....errors import LeaseLost
from ....persistence.claim import CLAIM, Claim
from ..checks import PATIENCE, refused, same

RUN = "0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b01"
OLD, NEW = "01HZX000000000000000000001", "01HZX000000000000000000002"

#: What JSON can say of itself.
TREE: dict[str, Any] = {"a": [1, 2.5, True, None, "é \U0001f600"], "$": "a dollar", "": {}, "deep": [[[[]]]]}

#: What our stores keep beside that.
TYPED: dict[str, Any] = {
    "tree": TREE,
    "uuid": UUID(RUN),
    "when": dt.datetime(2026, 11, 21, 12, 30, 1, 5, tzinfo=dt.UTC),
    "naive": dt.datetime(2026, 11, 21, 12, 30, tzinfo=dt.UTC).replace(tzinfo=None),
    "price": Decimal("1.10"),
    "raw": b"\x00\xff",
    "set": {1, 2},
    "pair": (1, "two"),
    "half a pair": "\ud800",
    "large": "x" * 300_000,
}

#: Keys that name files, break patterns or cut texts; no two of them are one.
HOSTILE = (
    "../../etc/passwd", "/etc/passwd", "..", ".", "a/b", "a_b", "a\\b", "A", "a", "con", "CON", "nul.json", " ", "a ",
    "a.", "\x00", "a\x00", "a\x00b", "\n", "\x1b", "\x1b0000", "é", "e\u0301", "\U0001f600", "\ud83d", "\ude00",
    "x" * 300, "x" * 299 + "y", "%", "_", "*", "?", "[a]", "{a}", "'; DROP TABLE", '"', "$", "~", "-", "--", "k:v",
    "агент", "\u202e",
)  # fmt: skip

S = TypeVar("S", bound="Closes")
Write = Callable[[], Awaitable[Any]]


class Closes(Protocol):
    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def opened(make: Callable[..., S], **options: Any) -> AsyncIterator[S]:
    store = make(**options)
    try:
        async with asyncio.timeout(PATIENCE):
            yield store
    finally:
        await store.close()


@contextlib.contextmanager
def writing_as(claim: Claim) -> Iterator[None]:
    """Under that claim, as code of a run writes."""
    token = CLAIM.set(claim)
    try:
        yield
    finally:
        CLAIM.reset(token)


async def fenced(target: Commits, writes: Mapping[str, Write], state: Callable[[], Awaitable[Any]]) -> None:
    """Once a later claim came to `target`, none of `writes` under the earlier one changes `state`.

    The queue, where claims are made, is on the same engine at first, and then on another one.
    """
    for home in (target, MemoryEngine()):
        old, new = (Claim(functools.partial(Guard, RUN, token), home) for token in (OLD, NEW))
        await home.commit(None, [Op(INSTALL, (RUN, NEW))])
        await new.install(target)
        before = await state()
        for name, write in writes.items():
            with writing_as(old), refused(LeaseLost, f"{name} after the claim was superseded"):
                await write()
        same(await state(), before, "what is stored after that")
        with writing_as(new):
            await next(iter(writes.values()))()
