"""What every preferences store must do; run each of `CASES` on your own with `await case(make)`, or `check(make)`.

`make()` gives a new and empty store each time. `OURS` holds what the stores of this package do beside that:
there `make(**options)` also takes their options, and `place="a name"` to open one place more than once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ....errors import InvalidArgument, UnserialisableResult
from ....persistence.models import Scope
from ..checks import Cases, refused, same
from .rig import HOSTILE, TREE, TYPED, fenced, opened

Make = Callable[..., Any]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
OURS: Cases[Case] = Cases()
check: Callable[[Make], Awaitable[None]] = CASES.check


@CASES
async def a_preference_is_kept_until_it_is_set_anew_or_deleted(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get("theme"), None, "an unknown preference")
        await store.set("theme", "light")
        await store.set("size", 12)
        await store.set("theme", "dark")
        same((await store.get("theme"), await store.get("size")), ("dark", 12), "two preferences")
        same((await store.delete("theme"), await store.delete("theme")), (True, False), "one deleted twice")
        same((await store.get("theme"), await store.get("size")), (None, 12), "the two after that")


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
        same(await store.get("theme", scope=Scope.GLOBAL), "dark", "a preference set by default, asked for globally")
        same(await store.get("theme", scope=Scope.PROJECT), None, "the same in the project")
        await store.set("theme", "light", scope=Scope.PROJECT)
        same(await store.get_all(Scope.PROJECT), {"theme": "light"}, "the preferences of the project")
        same(await store.get_all(), {"theme": "dark"}, "the preferences of the user")


@OURS
async def types_come_back_as_they_were(make: Make) -> None:
    async with opened(make) as store:
        await store.set("all", TYPED)
        for found in (await store.get("all"), (await store.get_all())["all"]):
            same(found, TYPED, "a value of many types")
            same([type(each) for each in found.values()], [type(each) for each in TYPED.values()], "their types")
            found["tree"] = "changed by its reader"
        same(await store.get("all"), TYPED, "the value after its reader changed it")


@OURS
async def any_text_is_a_key_of_its_own(make: Make) -> None:
    async with opened(make) as store:
        for n, key in enumerate(HOSTILE):
            await store.set(key, n)
        found = await store.get_all()
        same(found, {key: n for n, key in enumerate(HOSTILE)}, "all preferences")
        same(list(found), sorted(HOSTILE), "their order")
        for key in HOSTILE[::2]:
            same(await store.delete(key), True, f"deleting {key!a:.40}")
        same(sorted(await store.get_all()), sorted(HOSTILE[1::2]), "the others")


@OURS
async def what_cannot_be_kept_is_refused_and_nothing_lost(make: Make) -> None:
    async with opened(make) as store:
        await store.set("key", 1)
        with refused(UnserialisableResult, "a value that has no JSON form"):
            await store.set("key", object())
        for bad in ("", None, 1):
            with refused(InvalidArgument, f"the key {bad!r}"):
                await store.set(bad, 1)
        with refused(InvalidArgument, "a scope that there is not"):
            await store.set("key", 2, scope="planet")
        same(await store.get_all(), {"key": 1}, "what is kept")


@OURS
async def a_superseded_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as store:
        await store.set("key", 1)
        writes = {"set": lambda: store.set("key", 2), "delete": lambda: store.delete("key")}
        await fenced(store.documents(Scope.GLOBAL).commits, writes, store.get_all)
