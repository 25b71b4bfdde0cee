"""What version 0.5.2 wrote into its files, as models of today: what is there is kept, what is not has its default."""

from __future__ import annotations

import dataclasses
import datetime as _dt
import types
import typing
from enum import Enum
from typing import Any, TypeVar
from uuid import UUID, uuid5

from .models import Conversation, TaskList

M = TypeVar("M")

EXTRA = "0.5.2"  # under which metadata keeps fields that no model has


def conversation_of(plain: Any) -> Conversation:
    """ValueError, KeyError, TypeError: it is none."""
    return _with_ids(plain, "messages", Conversation)


def task_list_of(plain: Any) -> TaskList:
    """ValueError, KeyError, TypeError: it is none."""
    return _with_ids(plain, "tasks", TaskList)


def _with_ids(plain: Any, parts: str, cls: type[M]) -> M:
    """The same id for a part each time, also where it has none, or that of one before it."""
    whole = UUID(_object(plain)["id"])
    known, given = set[str](), list[dict[str, Any]]()
    for number, part in enumerate(plain.get(parts) or []):
        each = dict(_object(part))
        if not each.get("id") or each["id"] in known:
            each["id"] = str(uuid5(whole, f"{parts} {number}"))
        known.add(each["id"])
        given.append(each)
    return built(cls, {**plain, parts: given})


def built(cls: type[M], plain: Any) -> M:
    """A model of JSON in which ids, times and enumerations are strings."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
    values = {name: _value(hints[name], value) for name, value in _object(plain).items() if name in names}
    extra = {name: value for name, value in plain.items() if name not in names}
    if extra and "metadata" in names:
        values["metadata"] = {**(values.get("metadata") or {}), EXTRA: extra}
    return cls(**values)


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(hint, types.UnionType):
        hints = [each for each in typing.get_args(hint) if each is not types.NoneType]
        return _value(hints[0], value) if len(hints) == 1 else value
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise TypeError(f"{value!r:.60} is no list")
        return [_value(typing.get_args(hint)[0], each) for each in value]
    if dataclasses.is_dataclass(hint):
        return built(typing.cast(Any, hint), value)
    if hint is UUID:
        return UUID(value)
    if hint is _dt.datetime:
        return _dt.datetime.fromisoformat(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    return value


def _object(plain: Any) -> dict[str, Any]:
    if not isinstance(plain, dict):
        raise TypeError(f"{plain!r:.60} is no object")
    return plain
