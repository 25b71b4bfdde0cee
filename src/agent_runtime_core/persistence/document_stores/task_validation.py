"""Validate tasks, and set the fields that depend on the state of a task."""

from __future__ import annotations

import datetime as _dt
import math
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from ..._core.clock import aware
from ..._core.validation import is_number, must
from ...errors import brief
from ..models import Task, TaskList, TaskState
from .arguments import choice

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
