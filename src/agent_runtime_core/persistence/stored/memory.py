"""What an agent remembers, as one document to each key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._json import decode, encode
from ...errors import InvalidArgument, StorageBusy
from ..base.memory import MemoryStore
from ..documents.base import CHANGE_TRIES, Changed, Entry
from ..models import Scope
from .base import Home
from .keys import escaped, original, stored_key

MEMORY = "memory"


class StoredMemory(Home, MemoryStore):
    async def get(self, key: str, scope: Scope | None = None) -> Any | None:
        found = await self.table(scope, MEMORY).get(stored_key(key))
        return None if found is None else decode(found.text)

    async def set(self, key: str, value: Any, scope: Scope | None = None) -> None:
        table = self.table(scope, MEMORY)
        await table.write(table.put(_entry(stored_key(key), value)))

    async def change(self, key: str, fn: Callable[[Any | None], Any], scope: Scope | None = None) -> Any:
        table, at = self.table(scope, MEMORY), stored_key(key)
        for _ in range(CHANGE_TRIES):
            there = await table.get(at)
            made = fn(None if there is None else decode(there.text))
            # A put that finds its own text there takes it for done; two may write one text, and the rank says whose.
            mine = float(self.clock.random.getrandbits(52))
            entry = _entry(at, made)._replace(rank=mine)
            try:
                [(_, rank)] = await table.write(table.put(entry, 0 if there is None else there.version))
            except Changed:
                continue
            if rank == mine:
                return made
        raise StorageBusy(f"memory {key!a:.60} was changed by others {CHANGE_TRIES} times in a row; try again")

    async def delete(self, key: str, scope: Scope | None = None) -> bool:
        table = self.table(scope, MEMORY)
        [was_there] = await table.write(table.delete(stored_key(key)))
        return bool(was_there)

    async def list_keys(self, scope: Scope | None = None, prefix: str | None = None) -> list[str]:
        if not isinstance(prefix, str | None):
            raise InvalidArgument(f"a prefix is a string, not {prefix!r:.60}")
        found = await self.table(scope, MEMORY).find(prefix=escaped(prefix or ""))
        return sorted(original(each.key) for each in found)

    async def clear(self, scope: Scope | None = None) -> None:
        table = self.table(scope, MEMORY)
        await table.write(table.clear())


def _entry(key: str, value: Any) -> Entry:
    return Entry(key, encode(value), rank=0.0)
