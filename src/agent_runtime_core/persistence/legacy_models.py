"""Convert the files of version 0.5.2 to the present models. A field that is missing gets its default."""

from __future__ import annotations

import dataclasses
import datetime as _dt
from typing import Any, Final, cast
from uuid import UUID, uuid5

from .._core.codec.typed import Policy, as_text, build
from ..errors import InvalidArgument, brief
from .document_stores.task_validation import check_list, check_task
from .models import Conversation, Task, TaskList

EXTRA = "0.5.2"  # the key in `metadata` for fields that the present models do not have


def conversation_of(plain: Any) -> Conversation:
    """Return the conversation of a file.

    Raises:
        ValueError, KeyError, TypeError: The file holds no conversation.
    """
    whole, messages = _parts(plain, "messages")
    return cast(Conversation, build({**whole, "messages": messages}, Conversation, _OLD))


def task_list_of(plain: Any) -> tuple[TaskList, list[str]]:
    """Return the list with its valid tasks, and the reasons why other tasks are not valid.

    Raises:
        ValueError, KeyError, TypeError, InvalidArgument: The file holds no task list.
    """
    whole, tasks = _parts(plain, "tasks")
    found, reasons = check_list(cast(TaskList, build({**whole, "tasks": []}, TaskList, _OLD))), []
    for each in tasks:
        try:
            found.tasks.append(check_task(cast(Task, build(each, Task, _OLD))))
        except (ValueError, KeyError, TypeError, InvalidArgument) as error:
            reasons.append(f"task {brief(each.get('name'))}: {error}")
    return found, reasons


def _parts(plain: Any, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the object and its parts, each with a unique id.

    A part without an id, or with the id of an earlier part, gets a new one. It is the same each time the file is read,
    so that a repeated migration adds no part twice.
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


def _with_extra_in_metadata(cls: type, tree: dict[str, Any]) -> dict[str, Any]:
    """Move the fields that the model `cls` does not have into its metadata."""
    names = [field.name for field in dataclasses.fields(cls)]
    extra = {name: value for name, value in tree.items() if name not in names}
    if extra and "metadata" in names:
        return {**tree, "metadata": {**(tree.get("metadata") or {}), EXTRA: extra}}
    return tree


#: Ids, times and enumerations are strings. A priority may be a float, as in `TaskStore.save`.
_OLD: Final = Policy(
    enums_by_value=True, special=as_text, adapt=_with_extra_in_metadata,
    strict={UUID: (UUID, str), _dt.datetime: (_dt.datetime, str), int: (int, float)},
)  # fmt: skip
