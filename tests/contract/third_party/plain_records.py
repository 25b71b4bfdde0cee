"""Stores of tasks, knowledge and audit as somebody writes them: the abstract methods on plain dicts."""

from __future__ import annotations

import copy
from typing import Any
from uuid import UUID

from agent_runtime_core.persistence.base.tasks import TaskStore
from agent_runtime_core.persistence.models import Scope, Task, TaskList, TaskState, now


class _ByScope:
    def __init__(self, user: str = "alice") -> None:
        self.user = user
        self.kept: dict[Scope, dict[Any, Any]] = {scope: {} for scope in Scope}


class PlainTasks(_ByScope, TaskStore):
    async def save(self, task_list: TaskList, scope: Scope = Scope.PROJECT) -> None:
        task_list.updated_at = now()
        self.kept[scope][task_list.id] = copy.deepcopy(task_list)

    async def get(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        return copy.deepcopy(self.kept[scope].get(task_list_id))

    async def delete(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        return self.kept[scope].pop(task_list_id, None) is not None

    async def get_by_conversation(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        found = [each for each in self.kept[scope].values() if each.conversation_id == conversation_id]
        return copy.deepcopy(found[0]) if found else None

    async def update_task(
        self, task_list_id: UUID, task_id: UUID, state: TaskState | None = None, name: str | None = None,
        description: str | None = None, scope: Scope = Scope.PROJECT,
    ) -> None:  # fmt: skip
        task = self._task(task_list_id, task_id, scope)
        given = {"state": state, "name": name, "description": description}
        for field, value in given.items():
            if value is not None:
                setattr(task, field, value)

    def _task(self, task_list_id: UUID, task_id: UUID, scope: Scope) -> Task:
        if task_list_id not in self.kept[scope]:
            raise ValueError(f"Task list {task_list_id} not found")
        task: Task | None = next((task for task in self.kept[scope][task_list_id].tasks if task.id == task_id), None)
        if task is None:
            raise ValueError(f"Task {task_id} not found")
        return task


# -- what each of them may get wrong


class _ForgetsDependencies(PlainTasks):
    async def save(self, task_list: TaskList, scope: Scope = Scope.PROJECT) -> None:
        await super().save(task_list, scope)
        for task in self.kept[scope][task_list.id].tasks:
            task.dependencies = []


class _AnyConversation(PlainTasks):
    async def get_by_conversation(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        return next(iter(self.kept[scope].values()), None)


class _WritesNone(PlainTasks):
    async def update_task(
        self, task_list_id: UUID, task_id: UUID, state: TaskState | None = None, name: str | None = None,
        description: str | None = None, scope: Scope = Scope.PROJECT,
    ) -> None:  # fmt: skip
        task = self._task(task_list_id, task_id, scope)
        task.state, task.name, task.description = state, name, description  # type: ignore[assignment]


class _KeepsTheCallers(PlainTasks):
    async def save(self, task_list: TaskList, scope: Scope = Scope.PROJECT) -> None:
        task_list.updated_at = now()
        self.kept[scope][task_list.id] = task_list


class _PassesOverWhatIsUnknown(PlainTasks):
    async def update_task(self, *args: Any, **options: Any) -> None:
        try:
            await super().update_task(*args, **options)
        except ValueError:
            return


DEFECTS: dict[type[Any], list[type[Any]]] = {
    PlainTasks: [_ForgetsDependencies, _AnyConversation, _WritesNone, _KeepsTheCallers, _PassesOverWhatIsUnknown],
}
