"""What version 0.5.2 wrote into its files, as models of today: what is there is kept, what is not has its default."""

from __future__ import annotations

import dataclasses
import datetime as _dt
from typing import Any, Final, cast
from uuid import UUID, uuid5

from .._core.codec.typed import Policy, as_text, build
from ..errors import InvalidArgument, brief
from .document_stores.task_validation import check_list, check_task
from .models import Conversation, Task, TaskList

EXTRA = "0.5.2"  # under which metadata keeps fields that no model has


def conversation_of(plain: Any) -> Conversation:
    """ValueError, KeyError, TypeError: it is none."""
    whole, messages = _parts(plain, "messages")
    return cast(Conversation, build({**whole, "messages": messages}, Conversation, _OLD))


def task_list_of(plain: Any) -> tuple[TaskList, list[str]]:
    """Return the list with the tasks that a store may hold, and why it may not hold the others.

    Raises:
        ValueError, KeyError, TypeError, InvalidArgument: It is no task list.
    """
    whole, tasks = _parts(plain, "tasks")
    found, wrong = check_list(cast(TaskList, build({**whole, "tasks": []}, TaskList, _OLD))), []
    for each in tasks:
        try:
            found.tasks.append(check_task(cast(Task, build(each, Task, _OLD))))
        except (ValueError, KeyError, TypeError, InvalidArgument) as error:
            wrong.append(f"task {brief(each.get('name'))}: {error}")
    return found, wrong


def _parts(plain: Any, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the object and its parts, each with an id of its own.

    A part without an id, or with that of an earlier part, has the same new id each time that the file is read.
    """
    whole = cast("dict[str, Any]", build(plain, dict[str, Any], _OLD))
    known, parts = set[str](), list[dict[str, Any]]()
    for number, part in enumerate(cast(Any, build(whole.get(name) or [], list[dict[str, Any]], _OLD))):
        each = dict(part)
        if not each.get("id") or str(each["id"]) in known:
            each["id"] = str(uuid5(UUID(whole["id"]), f"{name} {number}"))
        known.add(str(each["id"]))
        parts.append(each)
    return whole, parts


def _known(cls: type, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the model `cls`, with all others in its metadata."""
    names = [field.name for field in dataclasses.fields(cls)]
    extra = {name: value for name, value in tree.items() if name not in names}
    if extra and "metadata" in names:
        return {**tree, "metadata": {**(tree.get("metadata") or {}), EXTRA: extra}}
    return tree


#: Ids, times and enumerations are strings. A priority may have a fraction, as in `save`.
_OLD: Final = Policy(
    enums_by_value=True, special=as_text, adapt=_known,
    strict={UUID: (UUID, str), _dt.datetime: (_dt.datetime, str), int: (int, float)},
)  # fmt: skip
