"""The claims of workers on the tasks of one scope, and an index of the open tasks in the order of claims."""

from __future__ import annotations

import datetime as _dt
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from ..._core.clock import TOO_LATE, Clock, aware
from ..._core.validation import is_number, must
from ...errors import TaskNotHeld, brief
from ..documents.base import Document, Entry, VersionConflict
from ..model_codec import model_of, text_of
from ..models import Order, Task, TaskState, is_unclaimed, moment, order
from .base import TrackedIndex, id_text
from .task_collection import Change, TaskCollection, settled

Position = tuple[Order, float, str]


class ReadyTasks:
    """Open tasks, in order. Of complete tasks only the ids are kept, because other tasks depend on them."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Position, Task, Document]] = {}
        self._order: list[Position] = []
        self._complete: set[UUID] = set()

    async def load(self, documents: Sequence[Document]) -> None:
        for each in documents:
            task = model_of(Task, each.text)
            self.drop(each.key)
            if task.state is TaskState.COMPLETE:
                self._complete.add(task.id)
            elif task.state is not TaskState.CANCELLED:
                position = (order(task), each.rank, each.key)
                self._open[each.key] = (position, task, each)
                insort(self._order, position)

    add = load

    def drop(self, key: str) -> None:
        self._complete.discard(UUID(key))
        if key in self._open:
            position, _, _ = self._open.pop(key)
            del self._order[bisect_left(self._order, position)]

    def ready(self, group: str | None, now: float) -> Iterator[Document]:
        """Yield the ready tasks of a list, or of all lists, in order."""
        for _, _, key in self._order:
            _, task, document = self._open[key]
            if (
                group in (None, document.group)
                and is_unclaimed(task, now)
                and self._complete.issuperset(task.dependencies)
            ):
                yield document


class TaskClaims:
    """Claims on the tasks of one scope. Each change of a task is a compare-and-set of its document."""

    def __init__(self, collection: TaskCollection, clock: Clock) -> None:
        self.collection: TaskCollection = collection
        self._clock = clock
        self._index = TrackedIndex(collection.tasks, collection.log, ReadyTasks)
        self._claiming: set[str] = set()  # tasks that another coroutine of this process is claiming

    async def ready(self, group: str | None) -> Iterator[Document]:
        """Return the ready tasks of a list, or of all lists, in the order in which workers claim them."""
        return (await self._index.current()).ready(group, self._clock.wall())

    async def claim(self, worker: str, group: str | None, lease_seconds: float | None) -> Task | None:
        """Claim the first ready task of a list, or of all lists. None: no task is ready."""
        if not isinstance(worker, str) or not worker:
            raise must("worker", "be a non-empty string", worker)
        self.lease_end(lease_seconds)  # an invalid value must raise even if no task is ready
        conflicting: Document | None = None
        while True:
            index = await self._index.current()
            ready = index.ready(group, self._clock.wall())
            stored = next((each for each in ready if each.key not in self._claiming), None)
            if stored is None:
                return None
            if stored is conflicting:  # it has expired, which the change log does not contain
                await self._index.read(index, {stored.key})
                continue
            self._claiming.add(stored.key)
            try:
                return await self._claim(stored, worker, lease_seconds)
            except VersionConflict:
                conflicting = stored  # another process changed it, and the change log contains that
            finally:
                self._claiming.discard(stored.key)

    async def _claim(self, stored: Document, worker: str, lease_seconds: float | None) -> Task:
        task = settled(model_of(Task, stored.text), {"state": TaskState.IN_PROGRESS}, self._clock.wall())
        task.attempts += 1
        task.claimed_by, task.claimed_until = worker, self.lease_end(lease_seconds)
        entry = replaced(stored, task)
        await self.collection.write(Change([(entry, stored)]))
        return self.collection.task_of(entry.text)

    def lease_end(self, seconds: float | None) -> _dt.datetime | None:
        """Return the time at which a claim of so many seconds expires. None: it does not expire."""
        if seconds is None:
            return None
        if not (is_number(seconds) and 0 < seconds < TOO_LATE):
            raise must("lease_seconds", "be a number of seconds above 0", seconds)
        return aware(self._clock.wall() + seconds)

    async def change(self, claim: Task | UUID, worker: str | None, fields: Mapping[str, Any]) -> Task:
        """Set fields of a task that the worker has claimed.

        Raises:
            TaskNotHeld: The worker no longer has this claim.
        """

        def changed(stored: Document) -> Entry:
            task, now = model_of(Task, stored.text), self._clock.wall()
            _check_claim(task, claim, worker, now)
            return replaced(stored, settled(task, fields, now))

        return await self.collection.change(id_text(claim.id if isinstance(claim, Task) else claim, "task"), changed)


def replaced(stored: Document, task: Task) -> Entry:
    """Return the new document of a task, in the same list and with the same rank."""
    return Entry(stored.key, text_of(task), stored.group, stored.rank)


def _check_claim(task: Task, claim: Task | UUID, worker: str | None, now: float) -> None:
    attempt = claim.attempts if isinstance(claim, Task) else task.attempts
    claimant = claim.claimed_by if worker is None and isinstance(claim, Task) else worker
    expired = task.claimed_until is not None and moment(task.claimed_until) <= now
    is_owner = task.state is TaskState.IN_PROGRESS and task.claimed_by == claimant and task.attempts == attempt
    if claimant is None or not is_owner or expired:
        reason = f"it is {task.state.value}"
        if is_owner:
            reason = "the claim has expired, so other workers can claim the task"
        elif task.claimed_by is not None:
            reason = f"{task.claimed_by!r} has claimed it, with attempt {task.attempts}"
        raise TaskNotHeld(
            f"worker {brief(claimant)} has no claim on task {brief(task.name)} ({task.id}): {reason}. "
            "Nothing was written. Stop working on it, or claim a task again."
        )
