"""Conformance tests for preferences stores. Run one of `CASES` with `await case(make)`, or all with `check(make)`.

`make()` returns a new and empty store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ....persistence.models import Scope
from ..checks import Cases, opened, same
from .fixtures import TREE, deleted_once, stores_of_tenants

Make = Callable[..., Any]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
check: Callable[[Make], Awaitable[None]] = CASES.check


@CASES
async def a_preference_is_kept_until_it_is_set_anew_or_deleted(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get("theme"), None, "an unknown preference")
        await store.set("theme", "light")
        await store.set("size", 12)
        await store.set("theme", "dark")
        same((await store.get("theme"), await store.get("size")), ("dark", 12), "two preferences")
        await deleted_once(store.delete, "theme")
        same((await store.get("theme"), await store.get("size")), (None, 12), "two preferences after the delete")


@CASES
async def all_are_given_by_key(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get_all(), {}, "the preferences of an empty store")
        expected = {"theme": "dark", "tree": TREE, "none": 0, "empty": "", "off": False}
        for key, value in expected.items():
            await store.set(key, value)
        same(await store.get_all(), expected, "all preferences")


@CASES
async def they_are_the_users_in_all_projects(make: Make) -> None:
    async with opened(make) as store:
        await store.set("theme", "dark")
        same(await store.get("theme", scope=Scope.GLOBAL), "dark", "a preference of the default scope, read globally")
        same(await store.get("theme", scope=Scope.PROJECT), None, "the same preference in the project scope")
        await store.set("theme", "light", scope=Scope.PROJECT)
        same(await store.get_all(Scope.PROJECT), {"theme": "light"}, "the preferences of the project")
        same(await store.get_all(), {"theme": "dark"}, "the preferences of the user")


@CASES
async def tenants_use_the_same_preferences_apart(make: Make) -> None:
    async with stores_of_tenants(make) as stores:
        for scope in Scope:
            for tenant, store in stores.items():
                same(await store.get_all(scope), {}, f"the preferences of tenant {tenant!r} before one is set")
                await store.set("theme", [tenant, scope.value], scope=scope)
        for number, store in enumerate(stores.values()):
            await store.delete("theme")
            kept = [await each.get_all() for each in stores.values()]
            left = [{"theme": [tenant, Scope.GLOBAL.value]} for tenant in [*stores][number + 1 :]]
            same(kept, [{}] * (number + 1) + left, f"the preferences of all tenants after {number + 1} deletes")
