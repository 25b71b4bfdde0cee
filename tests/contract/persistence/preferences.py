"""Cases for what the preferences stores of this package do in addition to the contract."""

from __future__ import annotations

from agent_runtime_core.errors import InvalidArgument, UnserialisableResult
from agent_runtime_core.persistence.models import Scope
from agent_runtime_core.testing.contracts.checks import Cases, opened, refused, same
from agent_runtime_core.testing.contracts.persistence.preferences import Case, Make
from tests.contract.persistence.fixtures import HOSTILE, TYPED, fenced

BUILT_IN: Cases[Case] = Cases()


@BUILT_IN
async def types_come_back_as_they_were(make: Make) -> None:
    async with opened(make) as store:
        await store.set("all", TYPED)
        for found in (await store.get("all"), (await store.get_all())["all"]):
            same(found, TYPED, "a value of many types")
            same([type(each) for each in found.values()], [type(each) for each in TYPED.values()], "their types")
            found["tree"] = "changed by its reader"
        same(await store.get("all"), TYPED, "the value after its reader changed it")


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
async def a_superseded_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as store:
        await store.set("key", 1)
        writes = {"set": lambda: store.set("key", 2), "delete": lambda: store.delete("key")}
        await fenced(store.documents(Scope.GLOBAL).commits, writes, store.get_all)
