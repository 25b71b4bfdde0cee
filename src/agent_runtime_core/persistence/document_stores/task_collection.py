"""The lists and tasks of one scope as documents."""

from __future__ import annotations

import datetime as _dt
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from ..._core.clock import aware
from ..._core.validation import Shown, is_number, must
from ..._engines.base import Op
from ...errors import InvalidArgument, brief
from ..documents.base import Collection, Document, Entry, retry_conflicts
from ..model_codec import model_of, text_of
from ..models import Task, TaskList, TaskState, find_cycle, new_id
from .base import ChangeLog, IdentityMap, choice, three_way_merge

_FIELD_TYPES: dict[str, type] = {"dependencies": list, "metadata": dict, "checkpoint_data": dict, "attempts": int}


def check_list(task_list: TaskList) -> TaskList:
    """Check a list, except its tasks, and return it.

    Raises:
        InvalidArgument: A field is not valid.
    """
    if not isinstance(task_list.name, str):
        raise must("the name of a task list", "be a string", task_list.name)
    if not isinstance(task_list.tasks, list | tuple):
        raise must(f"the tasks of task list {brief(task_list.name)}", "be a list", task_list.tasks)
    _check_times(task_list, ("created_at", "updated_at"), f"task list {brief(task_list.name)}")
    return task_list


def check_task(task: Task) -> Task:
    """Check a task, and return it.

    Raises:
        InvalidArgument: A field is not valid.
    """
    if not isinstance(task, Task):
        raise must("a task", "be a Task", task)
    what = f"task {brief(task.name)}"
    if not isinstance(task.name, str):
        raise must("the name of a task", "be a string", task.name)
    choice(TaskState, task.state, "state")
    for name, field_type in _FIELD_TYPES.items():
        if not isinstance(getattr(task, name), field_type):
            raise must(f"{what}: {name}", f"be a {field_type.__name__}", getattr(task, name))
    for each in (task.id, *task.dependencies):
        if not isinstance(each, UUID):
            raise must(f"{what}: its id and its dependencies", "be UUIDs", each)
    if not is_number(task.priority) or math.isnan(task.priority):
        raise must(f"{what}: priority", "be a number", task.priority)
    _check_times(task, ("created_at", "updated_at"), what)
    set_times = (
        name for name in ("due_at", "completed_at", "checkpoint_at", "claimed_until") if getattr(task, name) is not None
    )
    _check_times(task, set_times, what)
    return task


def _check_times(model: Any, names: Iterable[str], what: str) -> None:
    for name in names:
        when = getattr(model, name)
        if not isinstance(when, _dt.datetime):
            raise must(f"{what}: {name}", "be a datetime", when)


def now_like(wall: float, when: _dt.datetime) -> _dt.datetime:
    """Return a time in the time zone of `when`, or naive if `when` is naive."""
    now = aware(wall)
    return now.replace(tzinfo=None) if when.tzinfo is None else now.astimezone(when.tzinfo)


def settled(task: Task, fields: Mapping[str, Any], now: float) -> Task:
    """Set fields of a task, and return it.

    A change of the state also sets `completed_at`, and clears the claim of a task that is no longer in progress.
    """
    for name, value in fields.items():
        setattr(task, name, choice(TaskState, value, "state") if name == "state" else value)
    if "updated_at" not in fields:
        task.updated_at = now_like(now, task.updated_at)
    if "state" in fields:
        if task.state is not TaskState.COMPLETE:
            task.completed_at = fields.get("completed_at")
        elif task.completed_at is None:
            task.completed_at = aware(now)
        if task.state is not TaskState.IN_PROGRESS:
            task.claimed_by = task.claimed_until = None
    return check_task(task)


@dataclass
class Change:
    """One commit: tasks to put, each with the document it replaces, keys of tasks to delete, and other operations."""

    puts: list[tuple[Entry, Document | None]] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    more: list[Op] = field(default_factory=list)


class TaskCollection:
    """Reads and writes the task lists of one scope, and rejects cycles of dependencies."""

    def __init__(self, lists: Collection, tasks: Collection) -> None:
        self.lists: Collection = lists
        self.tasks: Collection = tasks
        #: The text of each task object as it was last read or saved. For a list also the keys of its tasks.
        self.read_tasks: IdentityMap[str] = IdentityMap()
        self.read_lists: IdentityMap[tuple[str, frozenset[str]]] = IdentityMap()
        self.log: ChangeLog = ChangeLog(tasks)
        self._graph = replace(tasks, kind="task_graph")

    def task_of(self, text: str) -> Task:
        """Decode a stored task, and remember the state in which it was read."""
        task = model_of(Task, text)
        self.read_tasks.remember(task, text_of(task))
        return task

    def merged(self, task: Task, text: str, stored: Document | None) -> str:
        """Return the stored text with the fields that the caller changed since the task was read.

        `text` is the caller's version of the task.
        """
        return three_way_merge(text, self.read_tasks.of(task), stored and stored.text)

    async def write(self, change: Change) -> list[Any]:
        """Commit a change as a whole, and return the results of its operations.

        Raises:
            VersionConflict: The version of a replaced document is different now.
            InvalidArgument: Dependencies would form a cycle.
        """
        ops = [self.tasks.put(entry, 0 if stored is None else stored.version) for entry, stored in change.puts]
        ops += [*map(self.tasks.delete, change.drops), *change.more]
        if any(_adds_dependencies(entry, stored) for entry, stored in change.puts):
            # Two concurrent commits could each add one half of a cycle. So commits that add dependencies replace one
            # common document, and one of the two conflicts.
            graph = await self._graph.get("edges")
            await self._reject_cycles(change)
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
            stored = await self.tasks.find(group)
            if found and (not stored or await self.lists.get(group) is not None):
                return True  # the present tasks were saved after the deletion
            results = await self.write(Change(drops=[each.key for each in stored], more=[self.lists.delete(group)]))
            if not (found or results[len(stored)]):
                return False
            found = True

    async def _reject_cycles(self, change: Change) -> None:
        known = {entry.key: model_of(Task, entry.text) for entry, _ in change.puts}
        starts = tuple(known)
        absent = set(change.drops)
        unvisited = list(known.values())
        while wanted := {str(each) for task in unvisited for each in task.dependencies} - known.keys() - absent:
            unvisited = [model_of(Task, each.text) for each in await self.tasks.many(sorted(wanted))]
            known.update((str(task.id), task) for task in unvisited)
            absent |= wanted - known.keys()

        def dependencies(key: str) -> Sequence[str]:
            return [str(each) for each in known[key].dependencies] if key in known else ()

        if found := find_cycle(starts, dependencies):
            names = [known[key].name for key in [*found, found[0]]]
            if len(names) > 6:
                names[4:-1] = ["…"]
            raise must("task dependencies", "not form a cycle", Shown(" -> ".join(names)), "Remove one of them")

    async def change(self, key: str, decide: Callable[[Document], Entry]) -> Task:
        """Replace a task by the document that `decide` returns for the stored task, and return it.

        `decide` is called again after a conflict, so it must have no side effects.

        Raises:
            InvalidArgument: The task does not exist.
        """

        async def attempt() -> Task:
            stored = await self.tasks.get(key)
            if stored is None:
                raise InvalidArgument(f"task {key} not found in this scope. Save it first.")
            entry = decide(stored)
            await self.write(Change([(entry, stored)]))
            return self.task_of(entry.text)

        return await retry_conflicts(f"task {key}", attempt)


def _adds_dependencies(entry: Entry, stored: Document | None) -> bool:
    def dependencies(text: str) -> set[UUID]:
        return set(model_of(Task, text).dependencies)

    new = dependencies(entry.text)
    return bool(new) and (stored is None or not new <= dependencies(stored.text))
