"""The contract of stores for the memory of agents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..models import Scope


class MemoryStore(ABC):
    """Stores the values that an agent remembers, by key.

    A value is anything that a step may return: JSON, and the further types that the library encodes.
    """

    @abstractmethod
    async def get(self, key: str, scope: Scope = Scope.PROJECT) -> Any | None:
        """Return the value of a key, or None if there is none."""

    @abstractmethod
    async def set(self, key: str, value: Any, scope: Scope = Scope.PROJECT) -> None:
        """Store a value under a key. An earlier value is replaced."""

    @abstractmethod
    async def delete(self, key: str, scope: Scope = Scope.PROJECT) -> bool:
        """Delete a key, and return whether it existed."""

    @abstractmethod
    async def list_keys(self, scope: Scope = Scope.PROJECT, prefix: str | None = None) -> list[str]:
        """Return the keys that begin with `prefix`, sorted. None returns all keys."""

    @abstractmethod
    async def clear(self, scope: Scope = Scope.PROJECT) -> None:
        """Delete all keys of a scope."""

    async def change(self, key: str, fn: Callable[[Any | None], Any], scope: Scope = Scope.PROJECT) -> Any:
        """Replace the value of a key by `fn(value)`, and return the new value.

        The built-in stores compare and set. So no change of another writer is lost, and `fn` is called again after
        each conflict. Here it is a `get` and a `set`: a change between the two is lost.

        Args:
            key: The key to change.
            fn: Receives the present value, or None, and returns the new one. It must have no side effects.
            scope: The scope of the key.
        """
        value = fn(await self.get(key, scope))
        await self.set(key, value, scope)
        return value

    async def close(self) -> None:  # noqa: B027 - many stores have nothing to release
        """Release the connections and files of this store."""
