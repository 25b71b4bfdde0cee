"""Which tasks of a scope are ready, and which worker holds which task."""

from __future__ import annotations

import datetime as _dt
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from ..._core.clock import TOO_LATE, Clock, aware
from ..._core.validation import is_number
from ...errors import InvalidArgument, TaskNotHeld, brief
from ..documents.base import Document, Entry, VersionConflict
from ..model_codec import model_of, text_of
from ..models import Task, TaskState, moment
from .arguments import id_text
from .change_log import TrackedIndex
from .ready_tasks import ReadyTasks
from .task_collection import Change, TaskCollection
from .task_validation import settled


class TaskClaims:
    """Claims on the tasks of one scope. Each change of a task compares and sets its document."""

    def __init__(self, collection: TaskCollection, clock: Clock) -> None:
        self.collection: TaskCollection = collection
        self._clock = clock
        self._index = TrackedIndex(collection.tasks, collection.log, ReadyTasks)
        self._claiming: set[str] = set()  # tasks that another coroutine of this process tries to claim

    async def ready(self, group: str | None) -> Iterator[Document]:
        """Return the ready tasks of a list, or of all lists, in the order in which they are claimed."""
        return (await self._index.current()).ready(group, self._clock.wall())

    async def claim(self, worker: str, group: str | None, lease_seconds: float | None) -> Task | None:
        if not isinstance(worker, str) or not worker:
            raise InvalidArgument(f"a worker has a name, not {brief(worker)}")
        self.lease_end(lease_seconds)  # checked before anything is read
        lost: Document | None = None
        while True:
            index = await self._index.current()
            ready = index.ready(group, self._clock.wall())
            there = next((each for each in ready if each.key not in self._claiming), None)
            if there is None:
                return None
            if there is lost:  # It has expired: the log of changes does not say so.
                await self._index.read(index, {there.key})
                continue
            self._claiming.add(there.key)
            try:
                return await self._claim(there, worker, lease_seconds)
            except VersionConflict:
                lost = there  # to another process, whose change is in the log
            finally:
                self._claiming.discard(there.key)

    async def _claim(self, there: Document, worker: str, lease_seconds: float | None) -> Task:
        task = settled(model_of(Task, there.text), {"state": TaskState.IN_PROGRESS}, self._clock.wall())
        task.attempts += 1
        task.claimed_by, task.claimed_until = worker, self.lease_end(lease_seconds)
        entry = replaced(there, task)
        await self.collection.write(Change([(entry, there)]))
        return self.collection.task_of(entry.text)

    def lease_end(self, seconds: float | None) -> _dt.datetime | None:
        if seconds is None:
            return None
        if not (is_number(seconds) and 0 < seconds < TOO_LATE):
            raise InvalidArgument(f"lease_seconds must be a number of seconds above 0, got {brief(seconds)}")
        return aware(self._clock.wall() + seconds)

    async def change(self, claim: Task | UUID, worker: str | None, fields: Mapping[str, Any]) -> Task:
        """Set fields of a task that the worker holds. TaskNotHeld: it does not hold the task."""

        def changed(there: Document) -> Entry:
            task, now = model_of(Task, there.text), self._clock.wall()
            _refuse_others(task, claim, worker, now)
            return replaced(there, settled(task, fields, now))

        return await self.collection.change(id_text(claim.id if isinstance(claim, Task) else claim, "task"), changed)


def replaced(there: Document, task: Task) -> Entry:
    """The task in the place of its document, in the same list and at the same position."""
    return Entry(there.key, text_of(task), there.group, there.rank)


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
