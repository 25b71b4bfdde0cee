"""Conformance tests for memory stores. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

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
async def a_value_is_kept_until_it_is_set_anew_or_deleted(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get("name"), None, "the value of an unknown key")
        await store.set("name", "Alice")
        await store.set("other", 1)
        await store.set("name", "Bob")
        same((await store.get("name"), await store.get("other")), ("Bob", 1), "the values of two keys")
        await deleted_once(store.delete, "name")
        same((await store.get("name"), await store.get("other")), (None, 1), "the values of two keys after the delete")


@CASES
async def trees_come_back_as_they_were(make: Make) -> None:
    async with opened(make) as store:
        for key, value in {**TREE, "tree": TREE, "no": False, "zero": 0, "empty": ""}.items():
            await store.set(f"k{key}", value)
            same(await store.get(f"k{key}"), value, f"the value of {key!r}")


@CASES
async def keys_are_listed_in_order_by_their_exact_beginning(make: Make) -> None:
    async with opened(make) as store:
        same(await store.list_keys(), [], "the keys of an empty store")
        keys = ["user_name", "user%", "user", "userX", "User", "a", "us", "user_", "użytkownik"]
        for key in keys:
            await store.set(key, 1)
        same(await store.list_keys(), sorted(keys), "all keys")
        for prefix in ("user", "user_", "user%", "us", "_", "%", "use*", "users", ""):
            expected = sorted(key for key in keys if key.startswith(prefix))
            same(await store.list_keys(prefix=prefix), expected, f"the keys that begin with {prefix!r}")
        await store.delete("user")
        left = await store.list_keys(prefix="user")
        same(left, ["user%", "userX", "user_", "user_name"], "the keys that begin with 'user' after one was deleted")


@CASES
async def scopes_are_apart(make: Make) -> None:
    async with opened(make) as store:
        await store.set("key", "global", scope=Scope.GLOBAL)
        same(await store.get("key"), None, "a key of the global scope, read in the default scope")
        await store.set("key", "project")
        same(await store.get("key", scope=Scope.PROJECT), "project", "a key set in the default scope")
        same(await store.get("key", scope=Scope.GLOBAL), "global", "the same key in the global scope")
        await store.clear()
        same(await store.list_keys(), [], "the keys after clear")
        same(await store.list_keys(Scope.GLOBAL), ["key"], "the keys of the other scope after clear")


@CASES
async def a_value_is_changed_by_what_it_is(make: Make) -> None:
    async with opened(make) as store:
        same(await store.change("n", lambda old: (old or 0) + 1), 1, "the result of the first change")
        same(await store.change("n", lambda old: (old or 0) + 1, Scope.PROJECT), 2, "the result of the second change")
        same(await store.get("n"), 2, "the value")


@CASES
async def tenants_use_the_same_keys_apart(make: Make) -> None:
    async with stores_of_tenants(make) as stores:
        for scope in Scope:
            for tenant, store in stores.items():
                same(await store.get("key", scope=scope), None, f"the key of tenant {tenant!r} before it is set")
                await store.set("key", [tenant, scope.value], scope=scope)
        for scope in Scope:
            for tenant, store in stores.items():
                same(await store.get("key", scope=scope), [tenant, scope.value], f"the key of tenant {tenant!r}")
                same(await store.list_keys(scope), ["key"], f"the keys of tenant {tenant!r}")
        for number, store in enumerate(stores.values()):
            await store.clear()
            kept = [await each.list_keys() for each in stores.values()]
            expected: list[list[str]] = [[]] * (number + 1) + [["key"]] * (len(stores) - number - 1)
            same(kept, expected, f"the keys of all tenants after {number + 1} were cleared")
