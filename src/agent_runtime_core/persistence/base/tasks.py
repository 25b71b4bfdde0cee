"""Tasks, in lists."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from ..._core.clock import SYSTEM
from ..._core.validation import nearest_name
from ...errors import InvalidArgument, NotSupported, brief
from ..models import Scope, Task, TaskList, TaskState
from ..task_order import ready_of

_LISTWISE = frozenset({"state", "name", "description"})
_FIELDS = frozenset(field.name for field in dataclasses.fields(Task)) - {"id"}


class TaskStore(ABC):
    """Lists of tasks.

    What is abstract is all that a store has to bring. `update`, `ready`, `list_of`, `find_task` and `save_task` are
    answered from that where they can be; claims need a store that can compare and set, as all of this package can.
    """

    @abstractmethod
    async def save(self, task_list: Any, scope: Scope = Scope.PROJECT) -> None:
        """Store a TaskList, and set its `updated_at`. Ours take a Task too, for the list of its conversation."""

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

    async def update(
        self, task_id: UUID, *, scope: Scope = Scope.PROJECT, task_list_id: UUID | None = None, **fields: Any
    ) -> None:
        """Change fields of a task by their names.

        InvalidArgument: there is no such task or field. NotSupported: this store cannot find a task without its
        list, or change other fields than its state, name and description.
        """
        check_fields(fields)
        if task_list_id is None or not fields.keys() <= _LISTWISE:
            raise NotSupported(
                f"{type(self).__name__} changes {', '.join(sorted(_LISTWISE))} of a task in a list that is named: "
                "update(task_id, task_list_id=..., state=...)"
            )
        await self.update_task(task_list_id, task_id, scope=scope, **fields)

    async def list_of(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> UUID | None:
        """The id of the list that `get_by_conversation` gives."""
        found = await self.get_by_conversation(conversation_id, scope)
        return None if found is None else found.id

    async def find_task(self, task_list_id: UUID, task_id: UUID, scope: Scope = Scope.PROJECT) -> Task | None:
        """The task of that id, where it is in that list."""
        found = await self.get(task_list_id, scope)
        return None if found is None else next((each for each in found.tasks if each.id == task_id), None)

    async def save_task(self, task_list: TaskList, task: Task, scope: Scope = Scope.PROJECT) -> None:
        """Store that task alone, at the end of its list if it is new there; the list is made where there is none."""
        found = await self.get(task_list.id, scope) or dataclasses.replace(task_list, tasks=[])
        places = [place for place, each in enumerate(found.tasks) if each.id == task.id]
        if places:
            found.tasks[places[0]] = task
        else:
            found.tasks.append(task)
        await self.save(found, scope)

    async def ready(
        self, task_list_id: UUID | None = None, scope: Scope = Scope.PROJECT, limit: int | None = None
    ) -> list[Task]:
        """Tasks that can be begun: nobody has them, and all their dependencies are complete.

        Greater priority first, then what is due earlier, then what was created earlier. A dependency that was
        cancelled, or that there is none of, blocks. A claim that has run out counts as none.
        """
        if task_list_id is None:
            raise self._cannot("look through all lists: ready(task_list_id)")
        found = await self.get(task_list_id, scope)
        return [] if found is None else ready_of(found.tasks, SYSTEM.wall())[:limit]

    async def claim(
        self,
        worker: str,
        *,
        task_list_id: UUID | None = None,
        lease_seconds: float | None = None,
        scope: Scope = Scope.PROJECT,
    ) -> Task | None:
        """The first of the ready tasks, in progress for that worker alone and one more attempt; None: there is none.

        It is the worker's for `lease_seconds`, or until it ends or gives back the task.
        """
        raise self._cannot("give a task to one worker only")

    async def renew(
        self, task: Task | UUID, worker: str | None = None, *, lease_seconds: float, scope: Scope = Scope.PROJECT
    ) -> Task:
        """Keep a claimed task for so many seconds from now on.

        This and the following take the task that `claim` gave, which stands for that claim and no later one, or its
        id and the worker. TaskNotHeld: somebody else has it, or nobody any more.
        """
        raise self._cannot("tell who has a task")

    async def checkpoint(
        self, task: Task | UUID, worker: str | None = None, data: Mapping[str, Any] | None = None, *,
        lease_seconds: float | None = None, scope: Scope = Scope.PROJECT,
    ) -> Task:  # fmt: skip
        """Keep `data` with the task for whoever goes on with it, and renew the claim where that is given."""
        raise self._cannot("tell who has a task")

    async def complete(
        self, task: Task | UUID, worker: str | None = None, data: Mapping[str, Any] | None = None, *,
        scope: Scope = Scope.PROJECT,
    ) -> Task:  # fmt: skip
        """The task is done; `data` takes the place of its checkpoint where that is given."""
        raise self._cannot("tell who has a task")

    async def fail(
        self, task: Task | UUID, worker: str | None = None, error: object = None, retry: bool = True, *,
        scope: Scope = Scope.PROJECT,
    ) -> Task:  # fmt: skip
        """It did not work, for the reason `error`: the task is ready again, or cancelled where `retry` is false."""
        raise self._cannot("tell who has a task")

    async def release(
        self, task: Task | UUID, worker: str | None = None, *, scope: Scope = Scope.PROJECT
    ) -> Task:  # fmt: skip
        """Give the task back; it is ready again."""
        raise self._cannot("tell who has a task")

    def _cannot(self, what: str) -> NotSupported:
        return NotSupported(f"{type(self).__name__} cannot {what}; the stores of agent_runtime_core.persistence can")

    async def close(self) -> None:  # noqa: B027 - many have nothing to let go of
        """Let go of what this store holds."""


def check_fields(fields: Mapping[str, Any]) -> None:
    """InvalidArgument: a task has no such field, or not one that can be changed."""
    for name in fields:
        if name not in _FIELDS:
            raise InvalidArgument(f"a task has no field {brief(name)} to be changed; {nearest_name(name, _FIELDS)}")
