"""The contract of stores for lists of tasks."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from ..._core.clock import SYSTEM
from ..._core.validation import unknown
from ...errors import InvalidArgument, NotSupported
from ..models import Scope, Task, TaskList, TaskState, ready_of

_CHANGED_IN_LIST = frozenset({"state", "name", "description"})
_FIELDS = frozenset(field.name for field in dataclasses.fields(Task)) - {"id"}


class TaskStore(ABC):
    """Stores lists of tasks.

    A store must implement the abstract methods. `update`, `ready`, `list_of`, `find_task` and `save_task` are built on
    those, with the limits that their docstrings name. Claims need a store that can compare and set, as all built-in
    stores can. In other stores they raise NotSupported.
    """

    @abstractmethod
    async def save(self, task_list: Any, scope: Scope = Scope.PROJECT) -> None:
        """Store a TaskList, and set its `updated_at`.

        The built-in stores also accept a Task. They store it in the list of its conversation.

        Args:
            task_list: The list. The built-in stores also accept a Task.
            scope: The scope.
        """

    @abstractmethod
    async def get(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        """Return a list with its tasks, or None if there is none.

        The built-in stores also accept the id of a task, and return the Task. For a typed Task, use `get_task`.

        Args:
            task_list_id: The id of the list.
            scope: The scope.
        """

    @abstractmethod
    async def delete(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Delete a list with its tasks, and return whether it existed.

        Args:
            task_list_id: The id of the list.
            scope: The scope.

        Returns:
            Whether the list existed.
        """

    @abstractmethod
    async def get_by_conversation(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        """Return the list of a conversation, or None if there is none.

        Args:
            conversation_id: The id of the conversation.
            scope: The scope.
        """

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
        """Change the fields of a task that are not None.

        Args:
            task_list_id: The id of the list.
            task_id: The id of the task.
            state: The new state.
            name: The new name.
            description: The new description.
            scope: The scope.

        Raises:
            InvalidArgument: The list or the task does not exist.
        """

    async def update(
        self, task_id: UUID, *, scope: Scope = Scope.PROJECT, task_list_id: UUID | None = None, **fields: Any
    ) -> None:
        """Change fields of a task.

        Args:
            task_id: The task to change.
            scope: The scope of the task.
            task_list_id: The list of the task. The built-in stores find the task without it.
            **fields: New values by the names of the fields of `Task`, except `id`.

        Raises:
            InvalidArgument: The task or the field does not exist.
            NotSupported: This store needs `task_list_id`, or can change only state, name and description.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import Task, TaskList
            >>> from agent_runtime_core.persistence import InMemoryTaskStore
            >>> async def main():
            ...     store, task = InMemoryTaskStore(), Task(name="Read")
            ...     plan = TaskList(name="plan", tasks=[task])
            ...     await store.save(plan)
            ...     await store.update(task.id, priority=5)
            ...     return (await store.find_task(plan.id, task.id)).priority
            >>> asyncio.run(main())
            5
        """
        check_fields(fields)
        if task_list_id is None or not fields.keys() <= _CHANGED_IN_LIST:
            raise NotSupported(
                f"{type(self).__name__} can change only {', '.join(sorted(_CHANGED_IN_LIST))}, "
                "and only with task_list_id. Use update(task_id, task_list_id=..., state=...)."
            )
        await self.update_task(task_list_id, task_id, scope=scope, **fields)

    async def list_of(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> UUID | None:
        """Return the id of the list that `get_by_conversation` returns, or None.

        Args:
            conversation_id: The id of the conversation.
            scope: The scope.
        """
        found = await self.get_by_conversation(conversation_id, scope)
        return None if found is None else found.id

    async def find_task(self, task_list_id: UUID, task_id: UUID, scope: Scope = Scope.PROJECT) -> Task | None:
        """Return a task of a list, or None if the list does not contain it.

        Args:
            task_list_id: The id of the list.
            task_id: The id of the task.
            scope: The scope.
        """
        found = await self.get(task_list_id, scope)
        return None if found is None else next((each for each in found.tasks if each.id == task_id), None)

    async def save_task(self, task_list: TaskList, task: Task, scope: Scope = Scope.PROJECT) -> None:
        """Store one task of a list.

        A new task is appended to the list. A list that does not exist is created without its other tasks.

        Args:
            task_list: The list.
            task: The task.
            scope: The scope.
        """
        found = await self.get(task_list.id, scope) or dataclasses.replace(task_list, tasks=[])
        indexes = [index for index, each in enumerate(found.tasks) if each.id == task.id]
        if indexes:
            found.tasks[indexes[0]] = task
        else:
            found.tasks.append(task)
        await self.save(found, scope)

    async def ready(
        self, task_list_id: UUID | None = None, scope: Scope = Scope.PROJECT, limit: int | None = None
    ) -> list[Task]:
        """Return the tasks that a worker can start: unclaimed, and with all dependencies complete.

        They are sorted by descending priority, then by `due_at`, then by `created_at`. A dependency that was cancelled
        or does not exist blocks its task. A task is unclaimed once its claim expires.

        Args:
            task_list_id: The list to read. None reads all lists.
            scope: The scope to read.
            limit: At most this many tasks. If None, all.

        Raises:
            NotSupported: This store needs `task_list_id`.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import Task, TaskList
            >>> from agent_runtime_core.persistence import InMemoryTaskStore
            >>> async def main():
            ...     store = InMemoryTaskStore()
            ...     await store.save(TaskList(name="plan", tasks=[Task(name="Read"), Task(name="Pay", priority=5)]))
            ...     return [task.name for task in await store.ready()]
            >>> asyncio.run(main())
            ['Pay', 'Read']
        """
        if task_list_id is None:
            raise self._unsupported("ready() without task_list_id")
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
        """Claim the first ready task for a worker.

        The task is then in progress and counts one more attempt. No other worker can claim it until the lease
        expires, or the worker completes, fails or releases the task.

        Args:
            worker: The name of the worker.
            task_list_id: Claim only from this list. None claims from all lists.
            lease_seconds: Seconds until the claim expires. If None, it does not expire.
            scope: The scope of the tasks.

        Returns:
            The task, or None if no task is ready.

        Raises:
            NotSupported: This store does not support claims.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import Task, TaskList
            >>> from agent_runtime_core.persistence import InMemoryTaskStore
            >>> async def main():
            ...     store = InMemoryTaskStore()
            ...     await store.save(TaskList(name="plan", tasks=[Task(name="Read")]))
            ...     task = await store.claim("worker-1", lease_seconds=60)
            ...     return task.name, (await store.complete(task)).state.value
            >>> asyncio.run(main())
            ('Read', 'complete')
        """
        raise self._unsupported("claim()")

    async def renew(
        self, task: Task | UUID, worker: str | None = None, *, lease_seconds: float, scope: Scope = Scope.PROJECT
    ) -> Task:
        """Extend the claim on a task to `lease_seconds` from now.

        Args:
            task: The task that `claim` returned, or its id. The returned task identifies that claim; an id also
                matches later claims of the same worker.
            worker: The name of the worker. Required with an id.
            lease_seconds: Seconds from now until the claim expires.
            scope: The scope of the task.

        Returns:
            The task as it is stored now.

        Raises:
            TaskNotHeld: The worker no longer holds this claim.
            NotSupported: This store does not support claims.
        """
        raise self._unsupported("renew()")

    async def checkpoint(
        self, task: Task | UUID, worker: str | None = None, data: Mapping[str, Any] | None = None, *,
        lease_seconds: float | None = None, scope: Scope = Scope.PROJECT,
    ) -> Task:  # fmt: skip
        """Store progress with a claimed task, for the worker that continues it.

        Args:
            task: The task that `claim` returned, or its id.
            worker: The name of the worker. Required with an id.
            data: Replaces the `checkpoint_data` of the task.
            lease_seconds: Also extend the claim to this many seconds from now. None leaves it as it is.
            scope: The scope of the task.

        Returns:
            The task as it is stored now.

        Raises:
            TaskNotHeld: The worker no longer holds this claim.
            NotSupported: This store does not support claims.
        """
        raise self._unsupported("checkpoint()")

    async def complete(
        self, task: Task | UUID, worker: str | None = None, data: Mapping[str, Any] | None = None, *,
        scope: Scope = Scope.PROJECT,
    ) -> Task:  # fmt: skip
        """Mark a claimed task as complete.

        Args:
            task: The task that `claim` returned, or its id.
            worker: The name of the worker. Required with an id.
            data: Replaces the `checkpoint_data` of the task. None leaves it as it is.
            scope: The scope of the task.

        Returns:
            The task as it is stored now.

        Raises:
            TaskNotHeld: The worker no longer holds this claim.
            NotSupported: This store does not support claims.
        """
        raise self._unsupported("complete()")

    async def fail(
        self, task: Task | UUID, worker: str | None = None, error: object = None, retry: bool = True, *,
        scope: Scope = Scope.PROJECT,
    ) -> Task:  # fmt: skip
        """Record that a claimed task failed.

        Args:
            task: The task that `claim` returned, or its id.
            worker: The name of the worker. Required with an id.
            error: The reason, an exception or a string. It is stored in `last_error`.
            retry: Make the task ready again. If False, it is cancelled.
            scope: The scope of the task.

        Returns:
            The task as it is stored now.

        Raises:
            TaskNotHeld: The worker no longer holds this claim.
            NotSupported: This store does not support claims.
        """
        raise self._unsupported("fail()")

    async def release(self, task: Task | UUID, worker: str | None = None, *, scope: Scope = Scope.PROJECT) -> Task:
        """Release a claimed task. It is ready again.

        Args:
            task: The task that `claim` returned, or its id.
            worker: The name of the worker. Required with an id.
            scope: The scope of the task.

        Returns:
            The task as it is stored now.

        Raises:
            TaskNotHeld: The worker no longer holds this claim.
            NotSupported: This store does not support claims.
        """
        raise self._unsupported("release()")

    def _unsupported(self, call: str) -> NotSupported:
        return NotSupported(
            f"{type(self).__name__} does not support {call}. Use a store of agent_runtime_core.persistence."
        )

    async def close(self) -> None:  # noqa: B027 - many stores have nothing to release
        """Release the connections and files of this store."""


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check the names of fields to change.

    Raises:
        InvalidArgument: A task has no such field, or the field cannot be changed.
    """
    for name in fields:
        if name not in _FIELDS:
            raise InvalidArgument(unknown("task field", name, _FIELDS))
