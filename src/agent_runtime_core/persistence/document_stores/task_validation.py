"""What a task may hold, and what else changes with its state."""

from __future__ import annotations

import datetime as _dt
import math
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from ..._core.clock import aware
from ..._core.validation import is_number
from ...errors import InvalidArgument, brief
from ..models import Task, TaskList, TaskState
from .arguments import choice

_KINDS: dict[str, type] = {"dependencies": list, "metadata": dict, "checkpoint_data": dict, "attempts": int}


def check_list(task_list: TaskList) -> TaskList:
    """The list, without its tasks, as it may be stored; InvalidArgument names what it may not hold."""
    if not isinstance(task_list.name, str):
        raise InvalidArgument(f"the name of a task list is text, not {brief(task_list.name)}")
    if not isinstance(task_list.tasks, list | tuple):
        raise InvalidArgument(f"the tasks of list {brief(task_list.name)} are a list, not {brief(task_list.tasks)}")
    _check_times(task_list, ("created_at", "updated_at"), f"task list {brief(task_list.name)}")
    return task_list


def check_task(task: Task) -> Task:
    """The task as it may be stored; InvalidArgument names what it may not hold."""
    if not isinstance(task, Task):
        raise InvalidArgument(f"a list holds tasks, not {brief(task)}")
    what = f"task {brief(task.name)}"
    if not isinstance(task.name, str):
        raise InvalidArgument(f"the name of a task is text, not {brief(task.name)}")
    choice(TaskState, task.state, "state of a task")
    for name, kind in _KINDS.items():
        if not isinstance(getattr(task, name), kind):
            raise InvalidArgument(f"{what}: its {name} is a {kind.__name__}, not {brief(getattr(task, name))}")
    for each in (task.id, *task.dependencies):
        if not isinstance(each, UUID):
            raise InvalidArgument(f"{what}: tasks are named by their UUID, not by {brief(each)}")
    if not is_number(task.priority) or math.isnan(task.priority):
        raise InvalidArgument(f"{what}: its priority is a number, not {brief(task.priority)}")
    _check_times(task, ("created_at", "updated_at"), what)
    given = (
        name for name in ("due_at", "completed_at", "checkpoint_at", "claimed_until") if getattr(task, name) is not None
    )
    _check_times(task, given, what)
    return task


def _check_times(model: Any, names: Iterable[str], what: str) -> None:
    for name in names:
        when = getattr(model, name)
        if not isinstance(when, _dt.datetime):
            raise InvalidArgument(f"{what}: its {name} is a datetime, not {brief(when)}")


def now_like(wall: float, when: _dt.datetime) -> _dt.datetime:
    """That moment as the other time tells it: naive, or in its zone."""
    now = aware(wall)
    return now.replace(tzinfo=None) if when.tzinfo is None else now.astimezone(when.tzinfo)


def settled(task: Task, fields: Mapping[str, Any], now: float) -> Task:
    """The task with these fields, its claim and the time of its completion as its state then says."""
    for name, value in fields.items():
        setattr(task, name, choice(TaskState, value, "state of a task") if name == "state" else value)
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
