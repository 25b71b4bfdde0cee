"""What an agent remembers by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..models import Scope


class MemoryStore(ABC):
    """Values by key; whatever has a JSON form, and the types beside JSON that steps may return."""

    @abstractmethod
    async def get(self, key: str, scope: Scope = Scope.PROJECT) -> Any | None:
        """The value, or None."""

    @abstractmethod
    async def set(self, key: str, value: Any, scope: Scope = Scope.PROJECT) -> None: ...

    @abstractmethod
    async def delete(self, key: str, scope: Scope = Scope.PROJECT) -> bool:
        """Whether there was one."""

    @abstractmethod
    async def list_keys(self, scope: Scope = Scope.PROJECT, prefix: str | None = None) -> list[str]:
        """The keys that begin so, in order."""

    @abstractmethod
    async def clear(self, scope: Scope = Scope.PROJECT) -> None: ...

    async def change(self, key: str, fn: Callable[[Any | None], Any], scope: Scope = Scope.PROJECT) -> Any:
        """Set a key to what `fn` makes of its value (None where there is none), and give that.

        Ours compare and set: no change of another's is lost, and `fn` is called again for each that came between,
        so it does nothing but decide. Here it is a get and a set, which others may come between.
        """
        made = fn(await self.get(key, scope))
        await self.set(key, made, scope)
        return made

    async def close(self) -> None:  # noqa: B027 - many have nothing to let go of
        """Let go of what this store holds."""
