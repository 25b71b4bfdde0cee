"""Fixtures for the cases of the persistence stores."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ..checks import S, opened, same

#: A value of every type that JSON has.
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
