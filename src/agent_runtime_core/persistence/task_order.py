"""Which tasks can be begun, in which order, and whether their dependencies go in a circle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .models import Task, TaskState, moment

Order = tuple[float, float, float]


def order(task: Task) -> Order:
    """Greater priority first, then what is due earlier (what is not due last), then what was created earlier."""
    due = math.inf if task.due_at is None else moment(task.due_at)
    return (-task.priority, due, moment(task.created_at))


def may_begin(task: Task, now: float) -> bool:
    """Whether nobody has it: it was not begun, or whoever claimed it has let its time pass."""
    if task.state is TaskState.IN_PROGRESS:
        return task.claimed_by is not None and task.claimed_until is not None and moment(task.claimed_until) <= now
    return task.state is TaskState.NOT_STARTED


def ready_of(tasks: Sequence[Task], now: float) -> list[Task]:
    """Those of a whole list that can be begun, in order; a dependency that is not in it blocks."""
    complete = {task.id for task in tasks if task.state is TaskState.COMPLETE}
    found = [task for task in tasks if may_begin(task, now) and complete.issuperset(task.dependencies)]
    return sorted(found, key=order)


def circle(starts: Iterable[str], dependencies: Callable[[str], Iterable[str]]) -> list[str]:
    """Keys of which each depends on the next one and the last on the first, reached from `starts`; or none."""
    done: set[str] = set()
    for start in starts:
        if start in done:
            continue
        path, on_path = [start], {start}
        waiting = [iter(dependencies(start))]
        while waiting:
            follower = next(waiting[-1], None)
            if follower is None:
                waiting.pop()
                done.add(path[-1])
                on_path.discard(path.pop())
            elif follower in on_path:
                return path[path.index(follower) :]
            elif follower not in done:
                path.append(follower)
                on_path.add(follower)
                waiting.append(iter(dependencies(follower)))
    return []
