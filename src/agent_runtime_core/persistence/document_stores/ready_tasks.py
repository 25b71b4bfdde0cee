"""The open tasks of one scope in memory, and which of them are ready."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from ..documents.base import Document
from ..forms import model_of
from ..models import Task, TaskState
from ..readiness import Order, may_begin, order


class ReadyTasks:
    """Tasks that have not ended, by key. Of complete ones only the ids are kept."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[tuple[Order, float, str], Task, Document]] = {}
        self._complete: set[UUID] = set()

    async def load(self, documents: Sequence[Document]) -> None:
        for each in documents:
            task = model_of(Task, each.text)
            self.drop(each.key)
            if task.state is TaskState.COMPLETE:
                self._complete.add(task.id)
            elif task.state is not TaskState.CANCELLED:
                self._open[each.key] = ((order(task), each.rank, each.key), task, each)

    add = load

    def drop(self, key: str) -> None:
        self._open.pop(key, None)
        self._complete.discard(UUID(key))

    def ready(self, group: str | None, now: float) -> list[Document]:
        """Return the ready tasks of a list, or of all lists, in the order in which they are claimed."""
        found = [
            place
            for place, task, document in self._open.values()
            if group in (None, document.group) and may_begin(task, now) and self._complete.issuperset(task.dependencies)
        ]
        return [self._open[key][2] for _, _, key in sorted(found)]
