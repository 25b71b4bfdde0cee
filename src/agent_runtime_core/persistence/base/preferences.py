"""The contract of stores for preferences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..models import Scope


class PreferencesStore(ABC):
    """Stores the preferences of a user by key. The default scope is that of the user in all projects."""

    @abstractmethod
    async def get(self, key: str, scope: Scope = Scope.GLOBAL) -> Any | None:
        """Return the value of a key, or None if there is none."""

    @abstractmethod
    async def set(self, key: str, value: Any, scope: Scope = Scope.GLOBAL) -> None:
        """Store a value under a key. An earlier value is replaced."""

    @abstractmethod
    async def delete(self, key: str, scope: Scope = Scope.GLOBAL) -> bool:
        """Delete a key, and return whether it existed."""

    @abstractmethod
    async def get_all(self, scope: Scope = Scope.GLOBAL) -> dict[str, Any]:
        """Return all values by their keys."""

    async def close(self) -> None:  # noqa: B027 - many stores have nothing to release
        """Release the connections and files of this store."""
