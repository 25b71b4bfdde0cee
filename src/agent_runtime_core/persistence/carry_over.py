"""Migrate the files of version 0.5.2 to documents.

The old files are not modified. A document that exists already is not modified either, so that an interrupted migration
can be repeated. The new store opens only after every old file was migrated.
"""

from __future__ import annotations

import dataclasses
import datetime as _dt
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast
from uuid import UUID, uuid5

from .._core.clock import SYSTEM, Clock, aware
from .._core.codec.json import encode
from .._core.codec.typed import Policy, as_text, build
from .._core.ids import new_ulid
from .._engines.base import Op
from ..config import get_config
from ..errors import InvalidArgument, StorageError, UnserialisableResult, brief
from .backends.files import CARRIED, PREFERENCES, home_directory, old_files, project_directory, root_of
from .document_stores.base import CONVERSATION, MEMORY, MESSAGE, PREFERENCE, TASK, TASK_LIST, stored_key
from .document_stores.conversations import Header, header_entry, message_entry
from .document_stores.task_collection import check_list, check_task
from .documents.base import Collection, Entry
from .documents.file_directory import LOCK, DurableDirectory, locked, storage_errors
from .documents.files import FileDocuments
from .model_codec import model_of, text_of
from .models import Conversation, Task, TaskList, find_cycle, moment

_MAX_BYTES: Final = 1 << 30  # bytes of a value. A value that version 0.5.2 wrote must not be rejected now
_BATCH: Final = 100  # documents in one commit
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, UnserialisableResult, InvalidArgument)

Put = tuple[str, Entry]  # a kind, and a document to add to it


@dataclass
class CarriedOver:
    """The result of migrating a directory.

    The counts are by kind of document: memory, preferences, conversations, messages, tasks and so on.
    """

    directory: str
    #: How many documents were added to the store.
    carried: dict[str, int] = field(default_factory=dict)
    #: How many documents existed already, and were not modified.
    kept: dict[str, int] = field(default_factory=dict)
    #: The reasons, by file, why a file or some of its tasks could not be read. The files are not modified.
    unreadable: dict[str, str] = field(default_factory=dict)
    #: Whether every file could be read, so that the store opens. It does not contain tasks that could not be read.
    opens: bool = True


async def carry_over(project_dir: str | os.PathLike[str] | None = None, *, clock: Clock = SYSTEM) -> CarriedOver:
    """Migrate the files of version 0.5.2 in `<project_dir>/.agent_runtime/`.

    The store opens afterwards, unless a file is unreadable. In that case repair the file or move it away, and call
    this function again. A task that is not valid is left out; another call adds it after it was repaired.

    Args:
        project_dir: The directory of the project. None is the current directory.
        clock: For tests.

    Returns:
        How many documents were added, and which files could not be read.

    Raises:
        InvalidArgument: There are no files of version 0.5.2.
    """
    directory = project_directory(project_dir)
    result = CarriedOver(directory)
    files = old_files(directory)
    if not files:
        raise InvalidArgument(
            f"no files of version 0.5.2 in {directory}. Pass the directory that contains {os.path.basename(directory)}."
        )
    spaces = ["project", "global"] if directory == home_directory() else ["project"]
    documents, old = FileDocuments(root_of(directory), clock=clock), DurableDirectory(directory)
    get_config().encode_contents(documents)
    try:
        for each in files:
            try:
                invalid = list[str]()
                puts = list(_puts(old, each, clock, invalid))
            except _UNREADABLE as error:
                result.unreadable[each] = f"{type(error).__name__}: {error}"
                result.opens = False
                continue
            if invalid:
                result.unreadable[each] = "; ".join(invalid)
            for space in spaces:
                await _put(documents, space, await _with_unique_ids(documents, space, puts), result)
    finally:
        await documents.close()
    if result.opens:
        _mark_as_migrated(directory, len(files), clock)
    return result


async def _with_unique_ids(documents: FileDocuments, space: str, puts: Sequence[Put]) -> list[Put]:
    """Give a new id to each task that another list contains too: a task is now in one list only."""
    lists = {entry.key: entry.group for kind, entry in puts if kind == TASK}
    stored = await Collection(documents, space, TASK).many(list(lists))
    new = {UUID(each.key): uuid5(UUID(lists[each.key]), each.key) for each in stored if each.group != lists[each.key]}
    return [(kind, _with_new_id(entry, new) if kind == TASK and new else entry) for kind, entry in puts]


def _with_new_id(entry: Entry, new: Mapping[UUID, UUID]) -> Entry:
    task = model_of(Task, entry.text)
    task.id = new.get(task.id, task.id)
    if task.parent_id is not None:
        task.parent_id = new.get(task.parent_id, task.parent_id)
    return entry._replace(key=str(task.id), text=text_of(task, max_bytes=_MAX_BYTES))


async def _put(documents: FileDocuments, space: str, puts: Sequence[Put], result: CarriedOver) -> None:
    for start in range(0, len(puts), _BATCH):
        part = puts[start : start + _BATCH]
        ops: list[Op] = [Collection(documents, space, kind).add(entry) for kind, entry in part]
        for (kind, _), rank in zip(part, await documents.commits.commit(None, ops), strict=True):
            counts = result.kept if rank is None else result.carried
            counts[kind] = counts.get(kind, 0) + 1


def _puts(old: DurableDirectory, name: str, clock: Clock, invalid: list[str]) -> Iterator[Put]:
    """Yield the documents of a file.

    A header comes after its parts, because readers do not find the parts without it. So an interrupted migration shows
    no incomplete conversation or list. The reasons why tasks are left out are added to `invalid`.
    """
    plain = _read(old, name)
    if name == PREFERENCES:
        for key, value in _items(plain):
            yield PREFERENCE, _value(key, value)
        return
    match name.partition("/")[0]:
        case "memory":
            found = dict(_items(plain))
            yield MEMORY, _value(found["key"], found["value"])
        case "conversations":
            yield from _conversation(plain, clock)
        case "tasks":
            yield from _task_list(plain, invalid)


def _read(old: DurableDirectory, name: str) -> Any:
    try:
        return json.loads(old.read(name, _MAX_BYTES))
    except (StorageError, FileNotFoundError) as error:
        raise ValueError(str(error)) from error


def _items(plain: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(plain, dict):
        raise TypeError(f"the file must contain a JSON object, got {brief(plain)}")
    yield from plain.items()


def _value(key: Any, value: Any) -> Entry:
    return Entry(stored_key(key), encode(value, max_bytes=_MAX_BYTES), rank=0.0)


def _conversation(plain: Any, clock: Clock) -> Iterator[Put]:
    found = conversation_of(plain)
    key = str(found.id)
    for message in found.messages:
        yield MESSAGE, message_entry(key, message, max_bytes=_MAX_BYTES)
    names = [each for each in vars(found) if each != "messages"]
    header = Header(**{name: getattr(found, name) for name in names}, born=new_ulid(clock))
    yield CONVERSATION, header_entry(key, header, moment(found.updated_at))


def _task_list(plain: Any, invalid: list[str]) -> Iterator[Put]:
    found, reasons = task_list_of(plain)
    invalid += reasons
    key = str(found.id)
    dependencies = {str(task.id): [str(each) for each in task.dependencies] for task in found.tasks}
    if find_cycle(list(dependencies), lambda each: dependencies.get(each, ())):
        raise ValueError("the dependencies of its tasks form a cycle")
    for task in found.tasks:
        try:
            yield TASK, Entry(str(task.id), text_of(task, max_bytes=_MAX_BYTES), key)
        except UnserialisableResult as error:
            invalid.append(f"task {brief(task.name)}: {error}")
    text = text_of(found, leave_out=frozenset({"tasks"}))
    yield TASK_LIST, Entry(key, text, str(found.conversation_id or ""), moment(found.updated_at))


def _mark_as_migrated(directory: str, files: int, clock: Clock) -> None:
    disk = DurableDirectory(root_of(directory))
    disk.make("")
    note = {"from": "0.5.2", "files": files, "at": aware(clock.wall()).isoformat()}
    with storage_errors(disk.root), locked(disk.path(LOCK)):
        draft = disk.draft(json.dumps(note).encode() + b"\n")
        disk.flush(draft)
        disk.rename(draft, CARRIED)
        disk.flush("")


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

    A part without an id, or with the id of an earlier part, gets a new id. It is the same each time the file is read,
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
    enums_by_value=True,
    special=as_text,
    adapt=_with_extra_in_metadata,
    strict={UUID: (UUID, str), _dt.datetime: (_dt.datetime, str), int: (int, float)},
)
