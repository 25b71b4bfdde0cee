"""What the cases of the built-in stores share: hostile keys, values beyond JSON, and claims to write under."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

from agent_runtime_core._engines.base import INSTALL, Committer, Guard, Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.persistence.fencing import CURRENT_CLAIM, FencedWrites
from agent_runtime_core.testing.contracts.checks import refused, same
from agent_runtime_core.testing.contracts.persistence.fixtures import TREE

RUN = "0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b01"
OLD, NEW = "01HZX000000000000000000001", "01HZX000000000000000000002"

#: Values beyond JSON that the built-in stores keep.
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

#: Keys that name files, break patterns or cut texts; all of them are different keys.
HOSTILE = (
    "../../etc/passwd", "/etc/passwd", "..", ".", "a/b", "a_b", "a\\b", "A", "a", "con", "CON", "nul.json", " ", "a ",
    "a.", "\x00", "a\x00", "a\x00b", "\n", "\x1b", "\x1b0000", "é", "e\u0301", "\U0001f600", "\ud83d", "\ude00",
    "x" * 300, "x" * 299 + "y", "%", "_", "*", "?", "[a]", "{a}", "'; DROP TABLE", '"', "$", "~", "-", "--", "k:v",
    "агент", "\u202e",
)  # fmt: skip

Write = Callable[[], Awaitable[Any]]


@contextlib.contextmanager
def writing_as(claim: FencedWrites) -> Iterator[None]:
    """Under that claim, as code of a run writes."""
    token = CURRENT_CLAIM.set(claim)
    try:
        yield
    finally:
        CURRENT_CLAIM.reset(token)


async def fenced(target: Committer, writes: Mapping[str, Write], state: Callable[[], Awaitable[Any]]) -> None:
    """Once a later claim came to `target`, none of `writes` under the earlier one changes `state`.

    The queue, where claims are made, is on the same engine at first, and then on another one.
    """
    for home in (target, MemoryEngine()):
        old, new = (FencedWrites(functools.partial(Guard, RUN, token), home) for token in (OLD, NEW))
        await home.commit(None, [Op(INSTALL, (RUN, NEW))])
        await new.install(target)
        before = await state()
        for name, write in writes.items():
            with writing_as(old), refused(LeaseLost, f"{name} after the claim was superseded"):
                await write()
        same(await state(), before, "what is stored after that")
        with writing_as(new):
            await next(iter(writes.values()))()
