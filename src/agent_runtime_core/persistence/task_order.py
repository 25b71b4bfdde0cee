"""The order of tasks, which of them are ready, and cycles in their dependencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .models import Task, TaskState, moment

Order = tuple[float, float, float]


def order(task: Task) -> Order:
    """Return the sort key of a task: descending priority, then `due_at` (tasks without one last), then `created_at`."""
    due = math.inf if task.due_at is None else moment(task.due_at)
    return (-task.priority, due, moment(task.created_at))


def is_unclaimed(task: Task, now: float) -> bool:
    """Return whether a task is unclaimed: it was not started, or its claim has expired."""
    if task.state is TaskState.IN_PROGRESS:
        return task.claimed_by is not None and task.claimed_until is not None and moment(task.claimed_until) <= now
    return task.state is TaskState.NOT_STARTED


def ready_of(tasks: Sequence[Task], now: float) -> list[Task]:
    """Return the ready tasks of a complete list, in order.

    A dependency that the list does not contain blocks its task.
    """
    complete = {task.id for task in tasks if task.state is TaskState.COMPLETE}
    found = [task for task in tasks if is_unclaimed(task, now) and complete.issuperset(task.dependencies)]
    return sorted(found, key=order)


def find_cycle(starts: Iterable[str], dependencies: Callable[[str], Iterable[str]]) -> list[str]:
    """Find a cycle of dependencies that is reachable from `starts`.

    Returns:
        Keys of which each depends on the next one, and the last one on the first. Empty if there is no cycle.
    """
    done: set[str] = set()
    for start in starts:
        if start in done:
            continue
        path, on_path = [start], {start}
        stack = [iter(dependencies(start))]
        while stack:
            dependency = next(stack[-1], None)
            if dependency is None:
                stack.pop()
                done.add(path[-1])
                on_path.discard(path.pop())
            elif dependency in on_path:
                return path[path.index(dependency) :]
            elif dependency not in done:
                path.append(dependency)
                on_path.add(dependency)
                stack.append(iter(dependencies(dependency)))
    return []
