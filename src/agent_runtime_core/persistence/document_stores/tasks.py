"""Lists of tasks as documents: a header for each list, and a document for each task of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any
from uuid import UUID, uuid5

from ..._core.clock import aware
from ..._engines.base import Op
from ...errors import InvalidArgument, brief
from ..base.tasks import TaskStore, check_fields
from ..documents.base import Document, Entry, retry_conflicts
from ..model_codec import model_of, text_of
from ..models import Scope, Task, TaskList, TaskState, moment
from .arguments import check_count, id_text
from .base import TASK, TASK_LIST, DocumentBackedStore
from .ranks import ranks_for
from .task_claims import TaskClaims, replaced
from .task_collection import Change, TaskCollection
from .task_validation import check_list, check_task, now_like, settled
from .three_way_merge import three_way_merge

# Part of every store ever written: with another value tasks saved alone would go into new lists.
_LISTS = UUID("6d0f1c4e-2b7a-5d93-8a51-94e3c7b2f06d")
_TASKS = frozenset({"tasks"})


class StoredTasks(DocumentBackedStore, TaskStore):
    """Lists of tasks. A task that is saved alone goes into the list of its conversation, or into the inbox."""

    def __init__(self, *place: Any, **options: Any) -> None:
        super().__init__(*place, **options)
        self._claims: dict[str, TaskClaims] = {}

    def _claims_of(self, scope: Scope | None) -> TaskClaims:
        tasks = self.home.table(scope, TASK)
        if tasks.space not in self._claims:
            collection = TaskCollection(self.home.table(scope, TASK_LIST), tasks)
            self._claims[tasks.space] = TaskClaims(collection, self.clock)
        return self._claims[tasks.space]

    def _collection(self, scope: Scope | None) -> TaskCollection:
        return self._claims_of(scope).collection

    async def save(self, task_list: TaskList | Task, scope: Scope | None = None) -> None:
        """Store a list, or a task alone, and set its `updated_at`.

        Of what was read from this store only what was changed since then is written: what others did meanwhile stays.
        A list built by hand is written as it is, and deletes nothing. InvalidArgument: tasks would wait for each other.
        """
        if not isinstance(task_list, TaskList | Task):
            raise InvalidArgument(f"a TaskList or a Task is saved here, not {brief(task_list)}")
        collection = self._collection(scope)
        if isinstance(task_list, Task):
            await self._saved(check_task(task_list), partial(self._save_one, collection, task_list))
        else:
            await self._saved(check_list(task_list), partial(self._save_all, collection, task_list))

    async def save_task(self, task_list: TaskList, task: Task, scope: Scope | None = None) -> None:
        save = partial(self._save_one, self._collection(scope), task, check_list(task_list))
        await self._saved(check_task(task), save)

    async def _saved(self, what: TaskList | Task, save: Callable[[], Awaitable[None]]) -> None:
        before = what.updated_at
        what.updated_at = now_like(self.clock.wall(), before)
        try:
            await retry_conflicts(brief(what.name), save)
        except BaseException:
            what.updated_at = before
            raise

    async def _save_all(self, collection: TaskCollection, task_list: TaskList) -> None:
        mine = {str(check_task(task).id): task for task in task_list.tasks}
        if len(mine) != len(task_list.tasks):
            raise InvalidArgument(f"a task stands twice in the list {brief(task_list.name)}")
        texts = {key: _text(task) for key, task in mine.items()}
        key = id_text(task_list.id, "task list")
        header = await collection.lists.get(key)
        base, read = collection.read_lists.of(task_list) or (None, frozenset())
        change = await self._parts(collection, key, mine, texts, read if header is not None else frozenset())
        text = text_of(task_list, leave_out=_TASKS)
        whole = three_way_merge(text, base, header and header.text)
        change.more = [collection.lists.put(_header(task_list, whole), 0 if header is None else header.version)]
        await collection.write(change)
        collection.read_lists.remember(task_list, (text, frozenset(mine)))
        for key, task in mine.items():
            collection.read_tasks.remember(task, texts[key])

    async def _parts(
        self,
        collection: TaskCollection,
        group: str,
        mine: Mapping[str, Task],
        texts: Mapping[str, str],
        read: frozenset[str],
    ) -> Change:
        """What is to be written of the tasks of a list of which those in `read` were read."""
        there = {each.key: each for each in await collection.tasks.find(group)}
        drops = [key for key in there if key in read and key not in mine]
        there = {key: each for key, each in there.items() if key not in drops}
        elsewhere = {each.key: each for each in await collection.tasks.many([key for key in mine if key not in there])}
        known = there | elsewhere
        # What others deleted, and the holder of this list left alone, stays deleted.
        kept = [
            key for key in mine if key in known or key not in read or collection.read_tasks.of(mine[key]) != texts[key]
        ]
        change = Change(drops=drops)
        for key, rank in ranks_for(kept, {key: each.rank for key, each in there.items()}).items():
            old = known.get(key)
            _put(change, key, collection.merged(mine[key], texts[key], old), group, rank, old)
        return change

    async def _save_one(self, collection: TaskCollection, task: Task, task_list: TaskList | None = None) -> None:
        text, key = _text(task), str(task.id)
        there = await collection.tasks.get(key)
        change = Change()
        if task_list is not None:
            group = await self._in_list(collection, task_list, change)
        else:
            group = there.group if there is not None else await self._list_for(collection, task, change)
        _put(change, key, collection.merged(task, text, there), group, None, there)
        await collection.write(change)
        collection.read_tasks.remember(task, text)

    async def _list_for(self, collection: TaskCollection, task: Task, change: Change) -> str:
        """The list of its conversation or the inbox, to be made by that change where there is none."""
        conversation = task.conversation_id
        if conversation is not None and (found := await self._of_conversation(collection, conversation)) is not None:
            change.more = [collection.lists.touch(found.key, 0.0)]  # refused if it is deleted meanwhile
            return found.key
        name = "Inbox" if conversation is None else "Tasks"
        made = TaskList(id=uuid5(_LISTS, str(conversation or "inbox")), name=name, conversation_id=conversation)
        made.created_at = made.updated_at = aware(self.clock.wall())
        change.more = [_made(collection, made)]
        return str(made.id)

    async def _in_list(self, collection: TaskCollection, task_list: TaskList, change: Change) -> str:
        key = id_text(task_list.id, "task list")
        there = await collection.lists.get(key)
        change.more = [_made(collection, task_list) if there is None else collection.lists.touch(key, 0.0)]
        return key

    async def get(self, task_list_id: UUID, scope: Scope | None = None) -> TaskList | None:
        collection = self._collection(scope)
        header = await collection.lists.get(id_text(task_list_id, "task list"))
        return None if header is None else await self._list(collection, header)

    async def get_by_conversation(self, conversation_id: UUID, scope: Scope | None = None) -> TaskList | None:
        """The last saved list of that conversation."""
        collection = self._collection(scope)
        header = await self._of_conversation(collection, conversation_id)
        return None if header is None else await self._list(collection, header)

    async def _of_conversation(self, collection: TaskCollection, conversation_id: UUID) -> Document | None:
        found = await collection.lists.find(id_text(conversation_id, "conversation"), descending=True, limit=1)
        return found[0] if found else None

    async def list_of(self, conversation_id: UUID, scope: Scope | None = None) -> UUID | None:
        header = await self._of_conversation(self._collection(scope), conversation_id)
        return None if header is None else UUID(header.key)

    async def _list(self, collection: TaskCollection, header: Document) -> TaskList:
        tasks = [collection.task_of(each.text) for each in await collection.tasks.find(header.key)]
        task_list = model_of(TaskList, header.text, tasks=tasks)
        parts = frozenset(str(task.id) for task in tasks)
        collection.read_lists.remember(task_list, (text_of(task_list, leave_out=_TASKS), parts))
        return task_list

    async def get_task(self, task_id: UUID, scope: Scope | None = None) -> Task | None:
        collection = self._collection(scope)
        found = await collection.tasks.get(id_text(task_id, "task"))
        return None if found is None else collection.task_of(found.text)

    async def find_task(self, task_list_id: UUID, task_id: UUID, scope: Scope | None = None) -> Task | None:
        collection = self._collection(scope)
        found = await collection.tasks.get(id_text(task_id, "task"))
        if found is None or found.group != id_text(task_list_id, "task list"):
            return None
        return collection.task_of(found.text)

    async def delete(self, task_list_id: UUID, scope: Scope | None = None) -> bool:
        """Delete the list and its tasks; what depends on one of them is blocked."""
        return await self._collection(scope).delete(id_text(task_list_id, "task list"))

    async def update(
        self, task_id: UUID, *, scope: Scope | None = None, task_list_id: UUID | None = None, **fields: Any
    ) -> None:
        """Change fields of a task by their names. InvalidArgument: there is no such task, list or field."""
        check_fields(fields)
        await self._update(task_id, scope, task_list_id, fields)

    async def update_task(
        self,
        task_list_id: UUID,
        task_id: UUID,
        state: TaskState | None = None,
        name: str | None = None,
        description: str | None = None,
        scope: Scope | None = None,
    ) -> None:
        given = {"state": state, "name": name, "description": description}
        fields = {name: value for name, value in given.items() if value is not None}
        await self._update(task_id, scope, task_list_id, fields)

    async def _update(
        self, task_id: UUID, scope: Scope | None, task_list_id: UUID | None, fields: Mapping[str, Any]
    ) -> None:  # fmt: skip
        def changed(there: Document) -> Entry:
            if task_list_id is not None and there.group != id_text(task_list_id, "task list"):
                raise InvalidArgument(f"there is no task {task_id} in a list {task_list_id} here")
            return replaced(there, settled(model_of(Task, there.text), fields, self.clock.wall()))

        await self._collection(scope).change(id_text(task_id, "task"), changed)

    # -- workers

    async def ready(
        self, task_list_id: UUID | None = None, scope: Scope | None = None, limit: int | None = None
    ) -> list[Task]:
        check_count(limit, "limit")
        claims = self._claims_of(scope)
        found = islice(await claims.ready(_group(task_list_id)), limit)
        return [claims.collection.task_of(each.text) for each in found]

    async def claim(
        self,
        worker: str,
        *,
        task_list_id: UUID | None = None,
        lease_seconds: float | None = None,
        scope: Scope | None = None,
    ) -> Task | None:
        return await self._claims_of(scope).claim(worker, _group(task_list_id), lease_seconds)

    async def renew(
        self, task: Task | UUID, worker: str | None = None, *, lease_seconds: float, scope: Scope | None = None
    ) -> Task:
        claims = self._claims_of(scope)
        return await claims.change(task, worker, {"claimed_until": claims.lease_end(lease_seconds)})

    async def checkpoint(
        self, task: Task | UUID, worker: str | None = None, data: Mapping[str, Any] | None = None, *,
        lease_seconds: float | None = None, scope: Scope | None = None,
    ) -> Task:  # fmt: skip
        claims = self._claims_of(scope)
        end = claims.lease_end(lease_seconds)
        renewed = {} if end is None else {"claimed_until": end}
        return await claims.change(task, worker, self._data(data or {}) | renewed)

    async def complete(
        self, task: Task | UUID, worker: str | None = None, data: Mapping[str, Any] | None = None, *,
        scope: Scope | None = None,
    ) -> Task:  # fmt: skip
        more = {} if data is None else self._data(data)
        return await self._claims_of(scope).change(task, worker, {"state": TaskState.COMPLETE, **more})

    async def fail(
        self, task: Task | UUID, worker: str | None = None, error: object = None, retry: bool = True, *,
        scope: Scope | None = None,
    ) -> Task:  # fmt: skip
        reason = None if error is None else str(error)
        if isinstance(error, BaseException):
            reason = f"{type(error).__name__}: {error}"
        state = TaskState.NOT_STARTED if retry else TaskState.CANCELLED
        return await self._claims_of(scope).change(task, worker, {"state": state, "last_error": reason})

    async def release(
        self, task: Task | UUID, worker: str | None = None, *, scope: Scope | None = None
    ) -> Task:  # fmt: skip
        return await self._claims_of(scope).change(task, worker, {"state": TaskState.NOT_STARTED})

    def _data(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(data, Mapping):
            raise InvalidArgument(f"the data of a task's checkpoint is a dict, not {brief(data)}")
        return {"checkpoint_data": dict(data), "checkpoint_at": aware(self.clock.wall())}


def _group(task_list_id: UUID | None) -> str | None:
    return None if task_list_id is None else id_text(task_list_id, "task list")


def _text(task: Task) -> str:
    return text_of(check_task(task))


def _header(task_list: TaskList, text: str) -> Entry:
    """`text` is what is stored, in which others may have given the list another conversation."""
    stored = model_of(TaskList, text)
    return Entry(str(task_list.id), text, str(stored.conversation_id or ""), moment(task_list.updated_at))


def _made(collection: TaskCollection, task_list: TaskList) -> Op:
    return collection.lists.add(_header(task_list, text_of(task_list, leave_out=_TASKS)))


def _put(change: Change, key: str, text: str, group: str, rank: float | None, there: Document | None) -> None:
    """Have the task written, unless it is there as it should be."""
    alike = there is not None and there.text == text
    if there is None or not alike or there.group != group or rank not in (None, there.rank):
        change.puts.append((Entry(key, text, group, rank), there))
