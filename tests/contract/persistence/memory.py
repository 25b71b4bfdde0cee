"""Cases for what the memory stores of this package do in addition to the contract."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_runtime_core.errors import InvalidArgument, UnserialisableResult
from agent_runtime_core.persistence.base.knowledge import MemoryStore
from agent_runtime_core.persistence.models import Scope
from agent_runtime_core.testing.contracts.checks import Cases, opened, refused, same
from agent_runtime_core.testing.contracts.persistence.memory import Case, Make
from tests.contract.persistence.fixtures import HOSTILE, TYPED, fenced

BUILT_IN: Cases[Case] = Cases()


@BUILT_IN
async def types_come_back_as_they_were(make: Make) -> None:
    async with opened(make) as store:
        await store.set("all", TYPED)
        found = await store.get("all")
        same(found, TYPED, "a value of many types")
        same([type(each) for each in found.values()], [type(each) for each in TYPED.values()], "their types")


@BUILT_IN
async def a_value_is_no_alias_of_the_callers(make: Make) -> None:
    async with opened(make) as store:
        mine = {"items": [1]}
        await store.set("key", mine)
        mine["items"].append(2)
        found = await store.get("key")
        same(found, {"items": [1]}, "the value after its writer changed its copy")
        found["items"].append(3)
        same(await store.get("key"), {"items": [1]}, "the value after a reader changed its copy")


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
async def racing_changes_lose_none(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        await asyncio.gather(*(_add(each, 8) for each in (store, beside) for _ in range(4)))
        same(await store.get("n"), 64, "the sum of 64 changes")


async def _add(store: MemoryStore, times: int) -> None:
    for _ in range(times):
        await store.change("n", lambda old: (old or 0) + 1)


@BUILT_IN
async def a_session_is_seen_by_those_who_know_its_id(make: Make) -> None:
    async with opened(make, place="one") as mine, opened(make, place="one") as another:
        await mine.set("key", 1, scope=Scope.SESSION)
        same(await mine.get("key", scope=Scope.SESSION), 1, "the value in its own session")
        same(await another.get("key", scope=Scope.SESSION), None, "the value in another session")
        same(await mine.get("key"), None, "the value in the project")
    async with opened(make, place="one", session_id="s") as one, opened(make, place="one", session_id="t") as other:
        await one.set("key", 2, scope=Scope.SESSION)
        same(await other.get("key", scope=Scope.SESSION), None, "the value in a session of another id")


@BUILT_IN
async def projects_are_apart(make: Make) -> None:
    async with opened(make, place="one", project="a") as a, opened(make, place="one", project="b") as b:
        await a.set("key", 1)
        await a.set("key", 2, scope=Scope.GLOBAL)
        same(await b.get("key"), None, "a key of another project")
        same(await b.get("key", scope=Scope.GLOBAL), 2, "a key of all projects")


@BUILT_IN
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
