"""What a user prefers, by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..models import Scope


class PreferencesStore(ABC):
    """Settings by key, by default those of the user in all projects."""

    @abstractmethod
    async def get(self, key: str, scope: Scope = Scope.GLOBAL) -> Any | None:
        """The value, or None."""

    @abstractmethod
    async def set(self, key: str, value: Any, scope: Scope = Scope.GLOBAL) -> None: ...

    @abstractmethod
    async def delete(self, key: str, scope: Scope = Scope.GLOBAL) -> bool:
        """Whether there was one."""

    @abstractmethod
    async def get_all(self, scope: Scope = Scope.GLOBAL) -> dict[str, Any]: ...

    async def close(self) -> None:  # noqa: B027 - many have nothing to let go of
        """Let go of what this store holds."""
