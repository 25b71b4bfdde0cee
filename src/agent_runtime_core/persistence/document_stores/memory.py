"""The memory of agents as documents, one for each key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._core.codec.json import MAX_WHOLE, decode, encode
from ..._core.validation import must
from ..base.memory import MemoryStore
from ..documents.base import Document, Entry
from ..models import Scope
from .arguments import escaped, original, stored_key
from .base import MEMORY, DocumentBackedStore


class StoredMemory(DocumentBackedStore, MemoryStore):
    """Stores values by key. A value is encoded as JSON text."""

    async def get(self, key: str, scope: Scope | None = None) -> Any | None:
        found = await self.home.table(scope, MEMORY).get(stored_key(key))
        return None if found is None else decode(found.text)

    async def set(self, key: str, value: Any, scope: Scope | None = None) -> None:
        table = self.home.table(scope, MEMORY)
        await table.write(table.put(_entry(stored_key(key), value)))

    async def change(self, key: str, fn: Callable[[Any | None], Any], scope: Scope | None = None) -> Any:
        document_key, new_value = stored_key(key), None

        def changed(stored: Document | None) -> Entry:
            nonlocal new_value
            new_value = fn(None if stored is None else decode(stored.text))
            return _entry(document_key, new_value)

        await self.home.table(scope, MEMORY).change(document_key, changed)
        return new_value

    async def delete(self, key: str, scope: Scope | None = None) -> bool:
        table = self.home.table(scope, MEMORY)
        [existed] = await table.write(table.delete(stored_key(key)))
        return bool(existed)

    async def list_keys(self, scope: Scope | None = None, prefix: str | None = None) -> list[str]:
        if not isinstance(prefix, str | None):
            raise must("prefix", "be a string or None", prefix)
        found = await self.home.table(scope, MEMORY).find(prefix=escaped(prefix or ""))
        return sorted(original(each.key) for each in found)

    async def clear(self, scope: Scope | None = None) -> None:
        table = self.home.table(scope, MEMORY)
        await table.write(table.clear())


def _entry(key: str, value: Any) -> Entry:
    return Entry(key, encode(value, max_bytes=MAX_WHOLE), rank=0.0)
