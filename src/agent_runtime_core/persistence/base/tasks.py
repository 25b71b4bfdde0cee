"""Tasks, in lists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from uuid import UUID

from ..models import Scope, TaskList, TaskState


class TaskStore(ABC):
    """Lists of tasks."""

    @abstractmethod
    async def save(self, task_list: TaskList, scope: Scope = Scope.PROJECT) -> None:
        """Store a list, and set its `updated_at`."""

    @abstractmethod
    async def get(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None: ...

    @abstractmethod
    async def delete(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Whether there was one."""

    @abstractmethod
    async def get_by_conversation(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None: ...

    @abstractmethod
    async def update_task(
        self,
        task_list_id: UUID,
        task_id: UUID,
        state: TaskState | None = None,
        name: str | None = None,
        description: str | None = None,
        scope: Scope = Scope.PROJECT,
    ) -> None:
        """Change what is given. InvalidArgument: there is no such list or task."""

    async def close(self) -> None:  # noqa: B027 - many have nothing to let go of
        """Let go of what this store holds."""
