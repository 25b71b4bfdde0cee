"""An index in memory of the open tasks of one scope, in the order in which workers claim them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from uuid import UUID

from ..documents.base import Document
from ..model_codec import model_of
from ..models import Task, TaskState
from ..task_order import Order, is_unclaimed, order

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
