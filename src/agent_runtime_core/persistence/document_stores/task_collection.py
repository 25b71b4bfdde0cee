"""The lists and tasks of one scope as documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from ..._engines.base import Op
from ...errors import InvalidArgument
from ..documents.base import Collection, Document, Entry, retry_conflicts
from ..model_codec import model_of, text_of
from ..models import Task, new_id
from ..task_order import circle
from .change_log import ChangeLog
from .three_way_merge import IdentityMap, three_way_merge


@dataclass
class Change:
    """One commit: tasks to put, each with the document it replaces, keys of tasks to delete, and other operations."""

    puts: list[tuple[Entry, Document | None]] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    more: list[Op] = field(default_factory=list)


class TaskCollection:
    """Reads and writes the task lists of one scope, and keeps their dependencies free of circles."""

    def __init__(self, lists: Collection, tasks: Collection) -> None:
        self.lists: Collection = lists
        self.tasks: Collection = tasks
        #: The text of each task object as it was read or saved last; of each list also the keys of its tasks.
        self.read_tasks: IdentityMap[str] = IdentityMap()
        self.read_lists: IdentityMap[tuple[str, frozenset[str]]] = IdentityMap()
        self.log: ChangeLog = ChangeLog(tasks)
        self._graph = replace(tasks, kind="task_graph")

    def task_of(self, text: str) -> Task:
        """Return the task of a stored text, and remember what it was read with."""
        task = model_of(Task, text)
        self.read_tasks.remember(task, text_of(task))
        return task

    def merged(self, task: Task, text: str, there: Document | None) -> str:
        """Return the stored text with what the caller changed in the task since it was read; `text` is all of it."""
        return three_way_merge(text, self.read_tasks.of(task), there and there.text)

    async def write(self, change: Change) -> list[Any]:
        """Commit a change as a whole, and return the results of its operations.

        Raises:
            Changed: A replaced document has another version by now.
            InvalidArgument: Dependencies would form a circle.
        """
        ops = [self.tasks.put(entry, 0 if there is None else there.version) for entry, there in change.puts]
        ops += [*map(self.tasks.delete, change.drops), *change.more]
        if any(_adds_dependencies(entry, there) for entry, there in change.puts):
            # Two commits could each add half of a circle. So all that add a dependency replace one document.
            graph = await self._graph.get("edges")
            await self._refuse_circles(change)
            ops.append(self._graph.put(Entry("edges", f'"{new_id().hex}"'), 0 if graph is None else graph.version))
        results = await self.tasks.write(
            *ops, *self.log.note([*(entry.key for entry, _ in change.puts), *change.drops])
        )
        await self.log.trim(results[len(ops) :])
        return results

    async def delete(self, group: str) -> bool:
        """Delete a list and its tasks, and return whether the list existed."""
        found = False
        while True:
            there = await self.tasks.find(group)
            if found and (not there or await self.lists.get(group) is not None):
                return True  # the tasks that are there now were saved after the deletion
            results = await self.write(Change(drops=[each.key for each in there], more=[self.lists.delete(group)]))
            if not (found or results[len(there)]):
                return False
            found = True

    async def _refuse_circles(self, change: Change) -> None:
        known = {entry.key: model_of(Task, entry.text) for entry, _ in change.puts}
        starts = tuple(known)
        absent = set(change.drops)
        frontier = list(known.values())
        while wanted := {str(each) for task in frontier for each in task.dependencies} - known.keys() - absent:
            frontier = [model_of(Task, each.text) for each in await self.tasks.many(sorted(wanted))]
            known.update((str(task.id), task) for task in frontier)
            absent |= wanted - known.keys()

        def dependencies(key: str) -> Sequence[str]:
            return [str(each) for each in known[key].dependencies] if key in known else ()

        if found := circle(starts, dependencies):
            names = " -> ".join(known[key].name for key in [*found, found[0]])
            raise InvalidArgument(f"tasks would wait for each other in a circle: {names}; leave one out")

    async def change(self, key: str, decide: Callable[[Document], Entry]) -> Task:
        """Replace a task by what `decide` makes of its document, and return it. InvalidArgument: there is none."""

        async def attempt() -> Task:
            there = await self.tasks.get(key)
            if there is None:
                raise InvalidArgument(f"there is no task {key} here")
            entry = decide(there)
            await self.write(Change([(entry, there)]))
            return self.task_of(entry.text)

        return await retry_conflicts(f"task {key}", attempt)


def _adds_dependencies(entry: Entry, there: Document | None) -> bool:
    def dependencies(text: str) -> set[UUID]:
        return set(model_of(Task, text).dependencies)

    new = dependencies(entry.text)
    return bool(new) and (there is None or not new <= dependencies(there.text))
