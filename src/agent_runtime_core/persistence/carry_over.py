"""The way from version 0.5.2: what its files hold, put into the documents of today beside them.

The old files stay as they are. What is in the new store already stays too, so that it may be interrupted and run
again. Only once every old file was carried over does the new store open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID, uuid5

from .._core.clock import SYSTEM, Clock, aware
from .._core.codec.json import encode
from .._core.ids import new_ulid
from .._engines.base import Op
from ..errors import InvalidArgument, StorageError, UnserialisableResult, brief
from .backends.files import home_directory, project_directory
from .document_stores.arguments import stored_key
from .document_stores.base import CONVERSATION, MEMORY, MESSAGE, PREFERENCE, TASK, TASK_LIST
from .document_stores.conversation_save import Header, header_entry, message_entry
from .documents.base import Collection, Entry
from .documents.file_directory import DurableDirectory, told
from .documents.file_lock import LOCK, locked
from .documents.files import FileDocuments
from .legacy_files import CARRIED, PREFERENCES, old_files, root_of
from .legacy_models import conversation_of, task_list_of
from .model_codec import model_of, text_of
from .models import Task, moment
from .task_order import circle

_LARGEST: Final = 1 << 30  # bytes of a value: what was written once is not refused now
_AT_ONCE: Final = 100  # documents in one commit
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, UnserialisableResult, InvalidArgument)

Put = tuple[str, Entry]  # a kind, and what is added to it


@dataclass
class CarriedOver:
    """What became of the files of a directory."""

    directory: str
    #: How many of each sort are new in the store: memory, preferences, conversations, messages, tasks ...
    carried: dict[str, int] = field(default_factory=dict)
    #: How many of each sort were there already, and were left alone.
    kept: dict[str, int] = field(default_factory=dict)
    #: Files that could not be read, or have tasks that could not, and why; they are left where they are.
    unreadable: dict[str, str] = field(default_factory=dict)
    #: Whether every file could be read, so that the store opens. Tasks that could not be read are not in it.
    opens: bool = True


async def carry_over(project_dir: str | os.PathLike[str] | None = None, *, clock: Clock = SYSTEM) -> CarriedOver:
    """Carry over `<project_dir>/.agent_runtime/`, by default that of the current directory.

    The store opens from then on, unless a file is unreadable: it does after another call, once the file is repaired
    or moved away. A task that a store may not hold is left out; another call adds it once it is repaired.

    Raises:
        InvalidArgument: There are no files of version 0.5.2.
    """
    directory = project_directory(project_dir)
    told_of = CarriedOver(directory)
    files = old_files(directory)
    if not files:
        raise InvalidArgument(f"{directory} has no files of version 0.5.2: name the directory that it lies in")
    spaces = ["project", "global"] if directory == home_directory() else ["project"]
    documents, old = FileDocuments(root_of(directory), clock=clock), DurableDirectory(directory)
    try:
        for each in files:
            try:
                left_out = list[str]()
                puts = list(_puts(old, each, clock, left_out))
            except _UNREADABLE as error:
                told_of.unreadable[each] = f"{type(error).__name__}: {error}"
                told_of.opens = False
                continue
            if left_out:
                told_of.unreadable[each] = "; ".join(left_out)
            for space in spaces:
                await _put(documents, space, await _apart(documents, space, puts), told_of)
    finally:
        await documents.close()
    if told_of.opens:
        _open_from_now_on(directory, len(files), clock)
    return told_of


async def _apart(documents: FileDocuments, space: str, puts: Sequence[Put]) -> list[Put]:
    """A task that another list has too, which is one of each from now on, has an id of its own in this one."""
    lists = {entry.key: entry.group for kind, entry in puts if kind == TASK}
    there = await Collection(documents, space, TASK).many(list(lists))
    new = {UUID(each.key): uuid5(UUID(lists[each.key]), each.key) for each in there if each.group != lists[each.key]}
    return [(kind, _renamed(entry, new) if kind == TASK and new else entry) for kind, entry in puts]


def _renamed(entry: Entry, new: Mapping[UUID, UUID]) -> Entry:
    task = model_of(Task, entry.text)
    task.id = new.get(task.id, task.id)
    if task.parent_id is not None:
        task.parent_id = new.get(task.parent_id, task.parent_id)
    return entry._replace(key=str(task.id), text=text_of(task, max_bytes=_LARGEST))


async def _put(documents: FileDocuments, space: str, puts: Sequence[Put], told_of: CarriedOver) -> None:
    for at in range(0, len(puts), _AT_ONCE):
        part = puts[at : at + _AT_ONCE]
        ops: list[Op] = [Collection(documents, space, kind).add(entry) for kind, entry in part]
        for (kind, _), rank in zip(part, await documents.commit(None, ops), strict=True):
            counts = told_of.kept if rank is None else told_of.carried
            counts[kind] = counts.get(kind, 0) + 1


def _puts(old: DurableDirectory, name: str, clock: Clock, left_out: list[str]) -> Iterator[Put]:
    """Yield what is to be added for a file, and a header after its parts, which are not seen without it.

    Why a task of the file is left out goes into `left_out`.
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
            yield from _task_list(plain, left_out)


def _read(old: DurableDirectory, name: str) -> Any:
    try:
        return json.loads(old.read(name, _LARGEST))
    except (StorageError, FileNotFoundError) as error:
        raise ValueError(str(error)) from error


def _items(plain: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(plain, dict):
        raise TypeError(f"a JSON object is expected, got {brief(plain)}")
    yield from plain.items()


def _value(key: Any, value: Any) -> Entry:
    return Entry(stored_key(key), encode(value, max_bytes=_LARGEST), rank=0.0)


def _conversation(plain: Any, clock: Clock) -> Iterator[Put]:
    found = conversation_of(plain)
    key = str(found.id)
    for message in found.messages:
        yield MESSAGE, message_entry(key, message, max_bytes=_LARGEST)
    names = [each for each in vars(found) if each != "messages"]
    header = Header(**{name: getattr(found, name) for name in names}, born=new_ulid(clock))
    yield CONVERSATION, header_entry(key, header, moment(found.updated_at))


def _task_list(plain: Any, left_out: list[str]) -> Iterator[Put]:
    found, wrong = task_list_of(plain)
    left_out += wrong
    key = str(found.id)
    waits = {str(task.id): [str(each) for each in task.dependencies] for task in found.tasks}
    if circle(list(waits), lambda each: waits.get(each, ())):
        raise ValueError("its tasks wait for each other in a circle")
    for task in found.tasks:
        try:
            yield TASK, Entry(str(task.id), text_of(task, max_bytes=_LARGEST), key)
        except UnserialisableResult as error:
            left_out.append(f"task {brief(task.name)}: {error}")
    text = text_of(found, leave_out=frozenset({"tasks"}))
    yield TASK_LIST, Entry(key, text, str(found.conversation_id or ""), moment(found.updated_at))


def _open_from_now_on(directory: str, files: int, clock: Clock) -> None:
    disk = DurableDirectory(root_of(directory))
    disk.make("")
    note = {"from": "0.5.2", "files": files, "at": aware(clock.wall()).isoformat()}
    with told(disk.root), locked(disk.path(LOCK)):
        draft = disk.draft(json.dumps(note).encode() + b"\n")
        disk.flush(draft)
        disk.rename(draft, CARRIED)
        disk.flush("")
