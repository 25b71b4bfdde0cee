"""The open tasks of one scope in memory, in the order in which workers claim them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from uuid import UUID

from ..documents.base import Document
from ..model_codec import model_of
from ..models import Task, TaskState
from ..task_order import Order, may_begin, order

Place = tuple[Order, float, str]


class ReadyTasks:
    """Tasks that have not ended, in order. Of complete tasks only the ids are kept."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Place, Task, Document]] = {}
        self._order: list[Place] = []
        self._complete: set[UUID] = set()

    async def load(self, documents: Sequence[Document]) -> None:
        for each in documents:
            task = model_of(Task, each.text)
            self.drop(each.key)
            if task.state is TaskState.COMPLETE:
                self._complete.add(task.id)
            elif task.state is not TaskState.CANCELLED:
                place = (order(task), each.rank, each.key)
                self._open[each.key] = (place, task, each)
                insort(self._order, place)

    add = load

    def drop(self, key: str) -> None:
        self._complete.discard(UUID(key))
        if key in self._open:
            place, _, _ = self._open.pop(key)
            del self._order[bisect_left(self._order, place)]

    def ready(self, group: str | None, now: float) -> Iterator[Document]:
        """Yield the ready tasks of a list, or of all lists, in order."""
        for _, _, key in self._order:
            _, task, document = self._open[key]
            if (
                group in (None, document.group)
                and may_begin(task, now)
                and self._complete.issuperset(task.dependencies)
            ):
                yield document
