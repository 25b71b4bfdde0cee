"""What version 0.5.2 wrote into its files, as models of today: what is there is kept, what is not has its default."""

from __future__ import annotations

import dataclasses
import datetime as _dt
import types
import typing
from enum import Enum
from typing import Any, TypeVar
from uuid import UUID, uuid5

from ..errors import InvalidArgument, brief
from .document_stores.task_validation import check_list, check_task
from .models import Conversation, Task, TaskList

M = TypeVar("M")

EXTRA = "0.5.2"  # under which metadata keeps fields that no model has


def conversation_of(plain: Any) -> Conversation:
    """ValueError, KeyError, TypeError: it is none."""
    return built(Conversation, {**_object(plain), "messages": _with_ids(plain, "messages")})


def task_list_of(plain: Any) -> tuple[TaskList, list[str]]:
    """Return the list with the tasks that a store may hold, and why it may not hold the others.

    Raises:
        ValueError, KeyError, TypeError, InvalidArgument: It is no task list.
    """
    found, wrong = check_list(built(TaskList, {**_object(plain), "tasks": []})), []
    for each in _with_ids(plain, "tasks"):
        try:
            found.tasks.append(check_task(built(Task, each)))
        except (ValueError, KeyError, TypeError, InvalidArgument) as error:
            wrong.append(f"task {brief(each.get('name'))}: {error}")
    return found, wrong


def _with_ids(plain: Any, parts: str) -> list[dict[str, Any]]:
    """The same id for a part each time, also where it has none, or that of one before it."""
    whole = UUID(_object(plain)["id"])
    known, given = set[str](), list[dict[str, Any]]()
    for number, part in enumerate(_value(list[dict[str, Any]], plain.get(parts) or [], parts)):
        each = dict(part)
        if not each.get("id") or str(each["id"]) in known:
            each["id"] = str(uuid5(whole, f"{parts} {number}"))
        known.add(str(each["id"]))
        given.append(each)
    return given


def built(cls: type[M], plain: Any) -> M:
    """A model of JSON in which ids, times and enumerations are strings."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
    values = {name: _value(hints[name], value, name) for name, value in _object(plain).items() if name in names}
    extra = {name: value for name, value in plain.items() if name not in names}
    if extra and "metadata" in names:
        values["metadata"] = {**(values.get("metadata") or {}), EXTRA: extra}
    return cls(**values)


def _value(hint: Any, value: Any, name: str) -> Any:
    """Return the value of a field in the type that its annotation says. TypeError, ValueError: it has another type."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in options:
        return None
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is Any:
            return value
        if kind is list and isinstance(value, list):
            [part] = typing.get_args(option)
            return [_value(part, each, name) for each in value]
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return built(typing.cast(Any, option), value)
        if isinstance(value, str) and kind in (UUID, _dt.datetime):
            return UUID(value) if kind is UUID else _dt.datetime.fromisoformat(value)
        if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, Enum):
            return kind(value)
        # A priority may have a fraction, as in `save`.
        fitting = (int, float) if kind is int else kind
        if isinstance(kind, type) and isinstance(value, fitting) and not (kind is int and isinstance(value, bool)):
            return value
    wanted = " or ".join(getattr(typing.get_origin(each) or each, "__name__", str(each)) for each in options)
    raise TypeError(f"{name} must be {wanted}, got {brief(value)}")


def _object(plain: Any) -> dict[str, Any]:
    if not isinstance(plain, dict):
        raise TypeError(f"a JSON object is expected, got {brief(plain)}")
    return plain
