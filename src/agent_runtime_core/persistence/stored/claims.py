"""Tasks for workers: which are ready, and who has which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from ..._clock import TOO_LATE, aware
from ..._refusals import is_number
from ...errors import InvalidArgument, TaskNotHeld, brief
from ..base.tasks import TaskStore
from ..documents.base import Changed, Document, Entry
from ..forms import model_of, text_of
from ..kinds import TASK, TASK_LIST
from ..models import Scope, Task, TaskState, moment
from .base import Home
from .board import Card
from .choices import check_count
from .keys import id_text
from .task_form import settled
from .task_space import Change, TaskSpace


class Claims(Home, TaskStore):
    """What workers do with tasks. Each change compares and sets the task's document."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._spaces: dict[str, TaskSpace] = {}

    def _space(self, scope: Scope | None) -> TaskSpace:
        tasks = self.table(scope, TASK)
        if tasks.space not in self._spaces:
            self._spaces[tasks.space] = TaskSpace(self.table(scope, TASK_LIST), tasks)
        return self._spaces[tasks.space]

    def _task(self, space: TaskSpace, document: Document) -> Task:
        task = model_of(Task, document.text)
        space.seen.remember(task, text_of(task))
        return task

    def _entry(self, there: Document, task: Task) -> Entry:
        return Entry(there.key, text_of(task), there.group, there.rank)

    async def ready(
        self, task_list_id: UUID | None = None, scope: Scope | None = None, limit: int | None = None
    ) -> list[Task]:
        check_count(limit, "limit")
        space = self._space(scope)
        board = await space.board()
        group = None if task_list_id is None else id_text(task_list_id, "task list")
        found = board.ready(group, self.clock.wall())
        return [self._task(space, each.document) for each in found[:limit]]

    async def claim(
        self,
        worker: str,
        *,
        task_list_id: UUID | None = None,
        lease_seconds: float | None = None,
        scope: Scope | None = None,
    ) -> Task | None:
        if not isinstance(worker, str) or not worker:
            raise InvalidArgument(f"a worker has a name, not {brief(worker)}")
        _check_lease(lease_seconds)
        space = self._space(scope)
        group = None if task_list_id is None else id_text(task_list_id, "task list")
        while True:
            board = await space.board()
            first = board.take(group, self.clock.wall())
            if first is None:
                return None
            try:
                return await self._take(space, first, worker, lease_seconds)
            except Changed:
                continue  # somebody was faster
            except BaseException:
                board.offer(first)
                raise

    async def _take(self, space: TaskSpace, first: Card, worker: str, lease_seconds: float | None) -> Task:
        there = first.document
        task = settled(model_of(Task, there.text), {"state": TaskState.IN_PROGRESS}, self.clock.wall())
        task.attempts += 1
        task.claimed_by, task.claimed_until = worker, self._until(lease_seconds)
        return self._task(space, (await space.write(Change([(self._entry(there, task), there)])))[0])

    def _until(self, lease_seconds: float | None) -> Any:
        return None if lease_seconds is None else aware(self.clock.wall() + lease_seconds)

    async def renew(
        self, task: Task | UUID, worker: str | None = None, *, lease_seconds: float, scope: Scope | None = None
    ) -> Task:
        _check_lease(lease_seconds)
        return await self._held(task, worker, scope, {"claimed_until": self._until(lease_seconds)})

    async def checkpoint(
        self, task: Task | UUID, worker: str | None = None, data: Mapping[str, Any] | None = None, *,
        lease_seconds: float | None = None, scope: Scope | None = None,
    ) -> Task:  # fmt: skip
        _check_lease(lease_seconds)
        renewed = {} if lease_seconds is None else {"claimed_until": self._until(lease_seconds)}
        return await self._held(task, worker, scope, self._data(data or {}) | renewed)

    async def complete(
        self, task: Task | UUID, worker: str | None = None, data: Mapping[str, Any] | None = None, *,
        scope: Scope | None = None,
    ) -> Task:  # fmt: skip
        more = {} if data is None else self._data(data)
        return await self._held(task, worker, scope, {"state": TaskState.COMPLETE, **more})

    async def fail(
        self, task: Task | UUID, worker: str | None = None, error: object = None, retry: bool = True, *,
        scope: Scope | None = None,
    ) -> Task:  # fmt: skip
        state = TaskState.NOT_STARTED if retry else TaskState.CANCELLED
        return await self._held(task, worker, scope, {"state": state, "last_error": _said(error)})

    async def release(
        self, task: Task | UUID, worker: str | None = None, *, scope: Scope | None = None
    ) -> Task:  # fmt: skip
        return await self._held(task, worker, scope, {"state": TaskState.NOT_STARTED})

    def _data(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(data, Mapping):
            raise InvalidArgument(f"the data of a task's checkpoint is a dict, not {brief(data)}")
        return {"checkpoint_data": dict(data), "checkpoint_at": aware(self.clock.wall())}

    async def _held(
        self, claim: Task | UUID, worker: str | None, scope: Scope | None, fields: Mapping[str, Any]
    ) -> Task:
        """Change a task for whoever has it."""
        space = self._space(scope)
        key = id_text(claim.id if isinstance(claim, Task) else claim, "task")

        def changed(there: Document) -> Entry:
            task = model_of(Task, there.text)
            _refuse_others(task, claim, worker, self.clock.wall())
            return self._entry(there, settled(task, fields, self.clock.wall()))

        return self._task(space, await space.change(key, changed))


def _refuse_others(task: Task, claim: Task | UUID, worker: str | None, now: float) -> None:
    attempt = claim.attempts if isinstance(claim, Task) else task.attempts
    who = claim.claimed_by if worker is None and isinstance(claim, Task) else worker
    over = task.claimed_until is not None and moment(task.claimed_until) <= now
    held = task.state is TaskState.IN_PROGRESS and task.claimed_by == who and task.attempts == attempt
    if who is None or not held or over:
        state = f"it is {task.state.value}"
        if held:
            state = "its time was over, and it is ready for others"
        elif task.claimed_by is not None:
            state = f"{task.claimed_by!r} has it, at attempt {task.attempts}"
        raise TaskNotHeld(
            f"worker {brief(who)} does not have task {brief(task.name)} ({task.id}): {state}; nothing was written"
        )


def _said(error: object) -> str | None:
    if isinstance(error, BaseException):
        return f"{type(error).__name__}: {error}"
    return None if error is None else str(error)


def _check_lease(seconds: float | None) -> None:
    if seconds is not None and not (is_number(seconds) and 0 < seconds < TOO_LATE):
        raise InvalidArgument(f"lease_seconds is a number of seconds above 0, not {brief(seconds)}")
