"""Fixtures for the cases of document stores and of the persistence stores."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ....persistence.documents.base import Collection, Document, DocumentStore
from ...clock import VirtualClock
from ..checks import S, opened, same

Make = Callable[..., DocumentStore]
Case = Callable[[Make], Awaitable[None]]

RUN, OTHER_RUN = "0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b01", "0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b02"
OLD, NEW = "01HZX000000000000000000001", "01HZX000000000000000000002"
WRITERS = 32

#: Different keys that a file system, a pattern, a separator or a script could misread.
HOSTILE = (
    "", " ", ".", "..", "../up", "/root", "a/b", "a_b", "a\\b", "con", "CON", "nul.txt", "key", "KEY", "Key", "%", "_",
    "*", "[", "[a-z]", "?", "'", '"', "`", ";--", "{arc}", "{}", ":", "a:b", "a|b", "0", "00", "-1", "1e3", "null",
    "\t", "\n", "\r\n", "\x01", "\x7f", "é", "e\u0301", "ß", "SS", "Ω", "\u2126", "\u202eabc", "\ufeff", "\uffff",
    "\U0010ffff", "👩‍👩‍👧", "🏳️‍🌈" * 20, "日本語", "x" * 300, "é" * 300, "x" * 299 + "y", "~", "a" * 64, "a" * 65,
)  # fmt: skip


@contextlib.asynccontextmanager
async def collection(make: Make) -> AsyncIterator[Collection]:
    """Open a collection of a new store with a virtual clock."""
    async with opened(make, clock=VirtualClock()) as store:
        yield Collection(store, "project", "thing")


def keys_of(documents: Sequence[Document]) -> list[str]:
    return [document.key for document in documents]


def advance(table: Collection, seconds: float) -> None:
    clock = table.documents.clock
    assert isinstance(clock, VirtualClock)
    clock.advance(seconds)


async def raised(writing: Awaitable[Any]) -> Exception | None:
    try:
        await writing
    except Exception as error:  # noqa: BLE001 - the caller compares it
        return error
    return None


#: A value of every JSON type.
TREE: dict[str, Any] = {"a": [1, 2.5, True, None, "é \U0001f600"], "$": "a dollar", "": {}, "deep": [[[[]]]]}

#: Names of tenants that a store could take for another tenant, or for a scope of another tenant.
TENANTS = ("a", "A", "a:project", "1:a", "project", "é" * 128, "é" * 127 + "e")


@contextlib.asynccontextmanager
async def stores_of_tenants(make: Callable[..., S]) -> AsyncIterator[dict[str | None, Any]]:
    """Yield the store of each tenant by its name; None is the store without a tenant.

    A store without a method `for_tenant` serves no tenants. Then there are no stores, and the case promises nothing.
    """
    async with opened(make) as store:
        of_tenant = getattr(store, "for_tenant", None)
        yield {} if of_tenant is None else {None: store, **{tenant: of_tenant(tenant) for tenant in TENANTS}}


async def deleted_once(delete: Callable[..., Awaitable[bool]], key: object) -> None:
    same((await delete(key), await delete(key)), (True, False), f"the results of deleting {key!r:.80} twice")
