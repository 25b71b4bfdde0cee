"""What an agent remembers, as one document to each key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._core.codec.json import MAX_WHOLE, decode, encode
from ...errors import InvalidArgument, brief
from ..base.memory import MemoryStore
from ..documents.base import Document, Entry
from ..models import Scope
from .arguments import escaped, original, stored_key
from .base import MEMORY, DocumentBackedStore


class StoredMemory(DocumentBackedStore, MemoryStore):
    async def get(self, key: str, scope: Scope | None = None) -> Any | None:
        found = await self.home.table(scope, MEMORY).get(stored_key(key))
        return None if found is None else decode(found.text)

    async def set(self, key: str, value: Any, scope: Scope | None = None) -> None:
        table = self.home.table(scope, MEMORY)
        await table.write(table.put(_entry(stored_key(key), value)))

    async def change(self, key: str, fn: Callable[[Any | None], Any], scope: Scope | None = None) -> Any:
        at, made = stored_key(key), None

        def changed(there: Document | None) -> Entry:
            nonlocal made
            made = fn(None if there is None else decode(there.text))
            return _entry(at, made)

        await self.home.table(scope, MEMORY).change(at, changed)
        return made

    async def delete(self, key: str, scope: Scope | None = None) -> bool:
        table = self.home.table(scope, MEMORY)
        [was_there] = await table.write(table.delete(stored_key(key)))
        return bool(was_there)

    async def list_keys(self, scope: Scope | None = None, prefix: str | None = None) -> list[str]:
        if not isinstance(prefix, str | None):
            raise InvalidArgument(f"a prefix is a string, not {brief(prefix)}")
        found = await self.home.table(scope, MEMORY).find(prefix=escaped(prefix or ""))
        return sorted(original(each.key) for each in found)

    async def clear(self, scope: Scope | None = None) -> None:
        table = self.home.table(scope, MEMORY)
        await table.write(table.clear())


def _entry(key: str, value: Any) -> Entry:
    return Entry(key, encode(value, max_bytes=MAX_WHOLE), rank=0.0)
