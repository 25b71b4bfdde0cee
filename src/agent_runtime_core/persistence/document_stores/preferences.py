"""Preferences as documents, one for each key."""

from __future__ import annotations

from typing import Any

from ..._core.codec.json import decode, encode
from ..base.preferences import PreferencesStore
from ..documents.base import Collection, Entry
from ..models import Scope
from .arguments import original, stored_key
from .base import PREFERENCE, DocumentBackedStore


class StoredPreferences(DocumentBackedStore, PreferencesStore):
    """Stores preferences by key. A value is encoded as JSON text."""

    async def get(self, key: str, scope: Scope | None = None) -> Any | None:
        found = await self._table(scope).get(stored_key(key))
        return None if found is None else decode(found.text)

    async def set(self, key: str, value: Any, scope: Scope | None = None) -> None:
        table = self._table(scope)
        await table.write(table.put(Entry(stored_key(key), encode(value), rank=0.0)))

    async def delete(self, key: str, scope: Scope | None = None) -> bool:
        table = self._table(scope)
        [existed] = await table.write(table.delete(stored_key(key)))
        return bool(existed)

    async def get_all(self, scope: Scope | None = None) -> dict[str, Any]:
        found = await self._table(scope).find()
        return {key: decode(text) for key, text in sorted((original(each.key), each.text) for each in found)}

    def _table(self, scope: Scope | None) -> Collection:
        return self.home.table(scope, PREFERENCE, Scope.GLOBAL)
