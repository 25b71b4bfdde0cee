"""What every memory store must do; run each of `CASES` on your own with `await case(make)`, or `check(make)`.

`make()` gives a new and empty store each time. `OURS` holds what the stores of this package do beside that:
there `make(**options)` also takes their options, and `place="a name"` to open one place more than once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ....errors import InvalidArgument, UnserialisableResult
from ....persistence.base.memory import MemoryStore
from ....persistence.models import Scope
from ..checks import Cases, refused, same
from .rig import HOSTILE, TREE, TYPED, fenced, opened

Make = Callable[..., Any]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
OURS: Cases[Case] = Cases()
check: Callable[[Make], Awaitable[None]] = CASES.check


@CASES
async def a_value_is_kept_until_it_is_set_anew_or_deleted(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get("name"), None, "the value of an unknown key")
        await store.set("name", "Alice")
        await store.set("other", 1)
        await store.set("name", "Bob")
        same((await store.get("name"), await store.get("other")), ("Bob", 1), "the values of two keys")
        same((await store.delete("name"), await store.delete("name")), (True, False), "a key deleted twice")
        same((await store.get("name"), await store.get("other")), (None, 1), "the values after that")


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
        same(await store.list_keys(prefix="user"), ["user%", "userX", "user_", "user_name"], "those after one is gone")


@CASES
async def scopes_are_apart(make: Make) -> None:
    async with opened(make) as store:
        await store.set("key", "global", scope=Scope.GLOBAL)
        same(await store.get("key"), None, "a key of the global scope, asked for by default")
        await store.set("key", "project")
        same(await store.get("key", scope=Scope.PROJECT), "project", "a key set in the default scope")
        same(await store.get("key", scope=Scope.GLOBAL), "global", "the same key in the global scope")
        await store.clear()
        same(await store.list_keys(), [], "the keys after clear")
        same(await store.list_keys(Scope.GLOBAL), ["key"], "the keys of the other scope after clear")


@CASES
async def a_value_is_changed_by_what_it_is(make: Make) -> None:
    async with opened(make) as store:
        same(await store.change("n", lambda old: (old or 0) + 1), 1, "the answer of the first change")
        same(await store.change("n", lambda old: (old or 0) + 1, Scope.PROJECT), 2, "the answer of the second")
        same(await store.get("n"), 2, "the value")


@OURS
async def types_come_back_as_they_were(make: Make) -> None:
    async with opened(make) as store:
        await store.set("all", TYPED)
        found = await store.get("all")
        same(found, TYPED, "a value of many types")
        same([type(each) for each in found.values()], [type(each) for each in TYPED.values()], "their types")


@OURS
async def a_value_is_no_alias_of_the_callers(make: Make) -> None:
    async with opened(make) as store:
        mine = {"items": [1]}
        await store.set("key", mine)
        mine["items"].append(2)
        found = await store.get("key")
        same(found, {"items": [1]}, "the value after its writer changed its copy")
        found["items"].append(3)
        same(await store.get("key"), {"items": [1]}, "the value after a reader changed its copy")


@OURS
async def any_text_is_a_key_of_its_own(make: Make) -> None:
    async with opened(make) as store:
        for n, key in enumerate(HOSTILE):
            await store.set(key, n)
        for n, key in enumerate(HOSTILE):
            same(await store.get(key), n, f"the value of {key!a:.40}")
        same(await store.list_keys(), sorted(HOSTILE), "all keys")
        for key in HOSTILE:
            same(
                await store.list_keys(prefix=key),
                sorted(each for each in HOSTILE if each.startswith(key)),
                f"the keys that begin with {key!a:.40}",
            )
        for key in HOSTILE[::2]:
            same(await store.delete(key), True, f"deleting {key!a:.40}")
        same(await store.list_keys(), sorted(HOSTILE[1::2]), "the others")


@OURS
async def what_cannot_be_kept_is_refused_and_nothing_lost(make: Make) -> None:
    async with opened(make) as store:
        await store.set("key", 1)
        with refused(UnserialisableResult, "a value that has no JSON form"):
            await store.set("key", object())
        with refused(UnserialisableResult, "a change to one"):
            await store.change("key", lambda old: float("nan"))
        for bad in ("", None, 1, b"key"):
            with refused(InvalidArgument, f"setting the key {bad!r}"):
                await store.set(bad, 1)
            with refused(InvalidArgument, f"changing the key {bad!r}"):
                await store.change(bad, lambda old: 1)
            for name in ("get", "delete"):
                with refused(InvalidArgument, f"{name} of the key {bad!r}"):
                    await getattr(store, name)(bad)
        with refused(InvalidArgument, "a prefix that is no text"):
            await store.list_keys(prefix=1)
        with refused(InvalidArgument, "a scope that there is not"):
            await store.set("key", 2, scope="planet")
        same((await store.get("key"), await store.list_keys()), (1, ["key"]), "what is kept")


@OURS
async def racing_changes_lose_none(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        await asyncio.gather(*(_add(each, 8) for each in (store, beside) for _ in range(4)))
        same(await store.get("n"), 64, "the sum of 64 changes")


async def _add(store: MemoryStore, times: int) -> None:
    for _ in range(times):
        await store.change("n", lambda old: (old or 0) + 1)


@OURS
async def a_session_is_seen_by_those_who_know_its_id(make: Make) -> None:
    async with opened(make, place="one") as mine, opened(make, place="one") as another:
        await mine.set("key", 1, scope=Scope.SESSION)
        same(await mine.get("key", scope=Scope.SESSION), 1, "the value in its own session")
        same(await another.get("key", scope=Scope.SESSION), None, "the value in another session")
        same(await mine.get("key"), None, "the value in the project")
    async with opened(make, place="one", session_id="s") as one, opened(make, place="one", session_id="t") as other:
        await one.set("key", 2, scope=Scope.SESSION)
        same(await other.get("key", scope=Scope.SESSION), None, "the value in a session of another id")


@OURS
async def projects_are_apart(make: Make) -> None:
    async with opened(make, place="one", project="a") as a, opened(make, place="one", project="b") as b:
        await a.set("key", 1)
        await a.set("key", 2, scope=Scope.GLOBAL)
        same(await b.get("key"), None, "a key of another project")
        same(await b.get("key", scope=Scope.GLOBAL), 2, "a key of all projects")


@OURS
async def a_superseded_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as store:
        await store.set("key", 1)

        async def state() -> Any:
            return [(key, await store.get(key)) for key in await store.list_keys()]

        writes = {
            "set": lambda: store.set("key", 2),
            "change": lambda: store.change("key", lambda old: 3),
            "delete": lambda: store.delete("key"),
            "clear": store.clear,
        }
        await fenced(store.documents(Scope.PROJECT).commits, writes, state)
