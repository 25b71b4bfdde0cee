"""Lists of tasks as documents: a header for each list, and a document for each task of it."""

from __future__ import annotations

import datetime as _dt
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast
from uuid import UUID, uuid5

from ..._core.clock import TOO_LATE, Clock, aware
from ..._core.validation import Shown, is_number, must
from ..._engines.base import Op
from ...errors import InvalidArgument, TaskNotHeld, brief
from ..base.tasks import TaskStore, check_fields
from ..documents.base import Document, Entry, VersionConflict, retry_conflicts
from ..model_codec import model_of, text_of
from ..models import Order, Scope, Task, TaskList, TaskState, is_unclaimed, moment, order
from .base import (
    TASK,
    TASK_LIST,
    DocumentBackedStore,
    TrackedIndex,
    check_count,
    id_text,
    of_space,
    ranks_for,
    three_way_merge,
)
from .task_collection import Change, TaskCollection, check_list, check_task, now_like, settled

Position = tuple[Order, float, str]


class ReadyTasks:
    """Open tasks, in order. Of complete tasks only the ids are kept, because other tasks depend on them."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Position, Task, Document]] = {}
        self._order: list[Position] = []
        self._complete: set[UUID] = set()

    async def load(self, documents: Sequence[Document]) -> None:
        for each in documents:
            task = model_of(Task, each.text)
            self.drop(each.key)
            if task.state is TaskState.COMPLETE:
                self._complete.add(task.id)
            elif task.state is not TaskState.CANCELLED:
                position = (order(task), each.rank, each.key)
                self._open[each.key] = (position, task, each)
                insort(self._order, position)

    add = load

    def drop(self, key: str) -> None:
        self._complete.discard(UUID(key))
        if key in self._open:
            position, _, _ = self._open.pop(key)
            del self._order[bisect_left(self._order, position)]

    def ready(self, group: str | None, now: float) -> Iterator[Document]:
        """Yield the ready tasks of a list, or of all lists, in order."""
        for _, _, key in self._order:
            _, task, document = self._open[key]
            if (
                group in (None, document.group)
                and is_unclaimed(task, now)
                and self._complete.issuperset(task.dependencies)
            ):
                yield document


class TaskClaims:
    """Claims on the tasks of one scope. Each change of a task is a compare-and-set of its document."""

    def __init__(self, collection: TaskCollection, clock: Clock) -> None:
        self.collection: TaskCollection = collection
        self._clock = clock
        self._index = TrackedIndex(collection.tasks, collection.log, ReadyTasks)
        self._claiming: set[str] = set()  # tasks that another coroutine of this process is claiming

    async def ready(self, group: str | None) -> Iterator[Document]:
        """Return the ready tasks of a list, or of all lists, in the order in which workers claim them."""
        return (await self._index.current()).ready(group, self._clock.wall())

    async def claim(self, worker: str, group: str | None, lease_seconds: float | None) -> Task | None:
        """Claim the first ready task of a list, or of all lists. None if no task is ready."""
        if not isinstance(worker, str) or not worker:
            raise must("worker", "be a non-empty string", worker)
        self.lease_end(lease_seconds)  # an invalid value must raise even if no task is ready
        conflicting: Document | None = None
        while True:
            index = await self._index.current()
            ready = index.ready(group, self._clock.wall())
            stored = next((each for each in ready if each.key not in self._claiming), None)
            if stored is None:
                return None
            if stored is conflicting:  # it is expired, which the change log does not contain
                await self._index.read(index, {stored.key})
                continue
            self._claiming.add(stored.key)
            try:
                return await self._claim(stored, worker, lease_seconds)
            except VersionConflict:
                conflicting = stored  # another process changed it, and the change log contains that
            finally:
                self._claiming.discard(stored.key)

    async def _claim(self, stored: Document, worker: str, lease_seconds: float | None) -> Task:
        task = settled(model_of(Task, stored.text), {"state": TaskState.IN_PROGRESS}, self._clock.wall())
        task.attempts += 1
        task.claimed_by, task.claimed_until = worker, self.lease_end(lease_seconds)
        entry = replaced(stored, task)
        await self.collection.write(Change([(entry, stored)]))
        return self.collection.task_of(entry.text)

    def lease_end(self, seconds: float | None) -> _dt.datetime | None:
        """Return the time at which a claim of so many seconds expires. None if it does not expire."""
        if seconds is None:
            return None
        if not (is_number(seconds) and 0 < seconds < TOO_LATE):
            raise must("lease_seconds", "be a number of seconds above 0", seconds)
        return aware(self._clock.wall() + seconds)

    async def change(self, claim: Task | UUID, worker: str | None, fields: Mapping[str, Any]) -> Task:
        """Set fields of a task that the worker claimed.

        Raises:
            TaskNotHeld: The worker no longer holds this claim.
        """

        def changed(stored: Document) -> Entry:
            task, now = model_of(Task, stored.text), self._clock.wall()
            _check_claim(task, claim, worker, now)
            return replaced(stored, settled(task, fields, now))

        return await self.collection.change(id_text(claim.id if isinstance(claim, Task) else claim, "task"), changed)


def replaced(stored: Document, task: Task) -> Entry:
    """Return the new document of a task, in the same list and with the same rank."""
    return Entry(stored.key, text_of(task), stored.group, stored.rank)


def _check_claim(task: Task, claim: Task | UUID, worker: str | None, now: float) -> None:
    attempt = claim.attempts if isinstance(claim, Task) else task.attempts
    claimant = claim.claimed_by if worker is None and isinstance(claim, Task) else worker
    expired = task.claimed_until is not None and moment(task.claimed_until) <= now
    is_owner = task.state is TaskState.IN_PROGRESS and task.claimed_by == claimant and task.attempts == attempt
    if claimant is None or not is_owner or expired:
        reason = f"it is {task.state.value}"
        if is_owner:
            reason = "the claim has expired, so other workers can claim the task"
        elif task.claimed_by is not None:
            reason = f"{task.claimed_by!r} has claimed it, with attempt {task.attempts}"
        raise TaskNotHeld(
            f"worker {brief(claimant)} has no claim on task {brief(task.name)} ({task.id}): {reason}. "
            "Nothing was written. Stop working on it, or claim a task again."
        )


# Existing stores contain ids derived from it. With another value, a task saved alone would go into a new list.
_DEFAULT_LISTS = UUID("6d0f1c4e-2b7a-5d93-8a51-94e3c7b2f06d")
_TASKS = frozenset({"tasks"})
_INDEXED_SPACES = 1024  # whose ready tasks are in memory at the same time, at most


class StoredTasks(DocumentBackedStore, TaskStore):
    """Stores lists of tasks.

    A task that is saved without a list is stored in the list of its conversation, or without a conversation in the list
    "Inbox".
    """

    def __init__(self, *place: Any, **options: Any) -> None:
        super().__init__(*place, **options)
        self._claims: dict[str, TaskClaims] = {}

    def _claims_of(self, scope: Scope | None) -> TaskClaims:
        lists, tasks = self.home.table(scope, TASK_LIST), self.home.table(scope, TASK)
        return of_space(
            self._claims, tasks.space, lambda: TaskClaims(TaskCollection(lists, tasks), self.clock), _INDEXED_SPACES
        )

    def _collection(self, scope: Scope | None) -> TaskCollection:
        return self._claims_of(scope).collection

    async def save(self, task_list: TaskList | Task, scope: Scope | None = None) -> None:
        """Store a list, or one task, and set its `updated_at`.

        Of an object that was read from this store, only what the caller changed since then is written. Changes of
        other writers are kept. A list that the application created is written as it is, and deletes no task.

        Args:
            task_list: The list. The built-in stores also accept a Task.
            scope: The scope.

        Raises:
            InvalidArgument: A field is not valid, or dependencies would form a cycle.
        """
        if not isinstance(task_list, TaskList | Task):
            raise must("task_list", "be a TaskList or a Task", task_list)
        collection = self._collection(scope)
        if isinstance(task_list, Task):
            await self._save_with_time(check_task(task_list), partial(self._save_one, collection, task_list))
        else:
            await self._save_with_time(check_list(task_list), partial(self._save_all, collection, task_list))

    async def save_task(self, task_list: TaskList, task: Task, scope: Scope | None = None) -> None:
        save = partial(self._save_one, self._collection(scope), task, check_list(task_list))
        await self._save_with_time(check_task(task), save)

    async def _save_with_time(self, model: TaskList | Task, save: Callable[[], Awaitable[None]]) -> None:
        before = model.updated_at
        model.updated_at = now_like(self.clock.wall(), before)
        try:
            await retry_conflicts(brief(model.name), save)
        except BaseException:
            model.updated_at = before
            raise

    async def _save_all(self, collection: TaskCollection, task_list: TaskList) -> None:
        tasks = {str(check_task(task).id): task for task in task_list.tasks}
        if len(tasks) != len(task_list.tasks):
            twice = next(key for key, count in Counter(str(task.id) for task in task_list.tasks).items() if count > 1)
            raise must(f"the task ids of list {brief(task_list.name)}", "be unique", Shown(f"{twice} twice"))
        texts = {key: _text(task) for key, task in tasks.items()}
        key = id_text(task_list.id, "task list")
        header = await collection.lists.get(key)
        base, read_keys = collection.read_lists.of(task_list) or (None, frozenset())
        change = await self._changed_tasks(
            collection, key, tasks, texts, read_keys if header is not None else frozenset()
        )
        text = text_of(task_list, leave_out=_TASKS)
        merged = three_way_merge(text, base, header and header.text)
        change.more = [collection.lists.put(_header(task_list, merged), 0 if header is None else header.version)]
        await collection.write(change)
        collection.read_lists.remember(task_list, (text, frozenset(tasks)))
        for key, task in tasks.items():
            collection.read_tasks.remember(task, texts[key])

    async def _changed_tasks(
        self,
        collection: TaskCollection,
        group: str,
        tasks: Mapping[str, Task],
        texts: Mapping[str, str],
        read_keys: frozenset[str],
    ) -> Change:
        """Return which tasks of a list to put and to delete.

        Args:
            collection: The lists and tasks.
            group: The key of the list.
            tasks: The tasks of the list object, by key.
            texts: The same tasks as JSON.
            read_keys: The tasks that the list object had when it was read.
        """
        stored = {each.key: each for each in await collection.tasks.find(group)}
        drops = [key for key in stored if key in read_keys and key not in tasks]
        stored = {key: each for key, each in stored.items() if key not in drops}
        in_other_lists = {
            each.key: each for each in await collection.tasks.many([key for key in tasks if key not in stored])
        }
        present = stored | in_other_lists
        # A task that another writer deleted stays deleted, unless the caller changed it.
        written = [
            key
            for key in tasks
            if key in present or key not in read_keys or collection.read_tasks.of(tasks[key]) != texts[key]
        ]
        change = Change(drops=drops)
        for key, rank in ranks_for(written, {key: each.rank for key, each in stored.items()}).items():
            document = present.get(key)
            _put_if_changed(change, key, collection.merged(tasks[key], texts[key], document), group, rank, document)
        return change

    async def _save_one(self, collection: TaskCollection, task: Task, task_list: TaskList | None = None) -> None:
        text, key = _text(task), str(task.id)
        stored = await collection.tasks.get(key)
        change = Change()
        if task_list is not None:
            group = await self._existing_or_new_list(collection, task_list, change)
        else:
            group = stored.group if stored is not None else await self._default_list(collection, task, change)
        _put_if_changed(change, key, collection.merged(task, text, stored), group, None, stored)
        await collection.write(change)
        collection.read_tasks.remember(task, text)

    async def _default_list(self, collection: TaskCollection, task: Task, change: Change) -> str:
        """Return the key of the list of a task's conversation, or of the inbox. `change` creates a missing list."""
        conversation = task.conversation_id
        if (
            conversation is not None
            and (found := await self._header_of_conversation(collection, conversation)) is not None
        ):
            change.more = [collection.lists.touch(found.key, 0.0)]  # conflicts if the list is deleted before the commit
            return found.key
        name = "Inbox" if conversation is None else "Tasks"
        new_list = TaskList(
            id=uuid5(_DEFAULT_LISTS, str(conversation or "inbox")), name=name, conversation_id=conversation
        )
        new_list.created_at = new_list.updated_at = aware(self.clock.wall())
        change.more = [_add_list(collection, new_list)]
        return str(new_list.id)

    async def _existing_or_new_list(self, collection: TaskCollection, task_list: TaskList, change: Change) -> str:
        key = id_text(task_list.id, "task list")
        stored = await collection.lists.get(key)
        change.more = [_add_list(collection, task_list) if stored is None else collection.lists.touch(key, 0.0)]
        return key

    async def get(self, task_list_id: UUID, scope: Scope | None = None) -> TaskList | None:
        """Return the list with this id, else the Task with this id, else None. For a typed Task, use `get_task`.

        Args:
            task_list_id: The id of the list.
            scope: The scope.
        """
        collection = self._collection(scope)
        header = await collection.lists.get(id_text(task_list_id, "task list"))
        if header is None:
            # The callers of the abstract method expect a list for the id of a list, and their types stay valid.
            return cast("TaskList | None", await self.get_task(task_list_id, scope))
        return await self._read_list(collection, header)

    async def get_by_conversation(self, conversation_id: UUID, scope: Scope | None = None) -> TaskList | None:
        """Return the list of a conversation that was saved last, or None.

        Args:
            conversation_id: The id of the conversation.
            scope: The scope.
        """
        collection = self._collection(scope)
        header = await self._header_of_conversation(collection, conversation_id)
        return None if header is None else await self._read_list(collection, header)

    async def _header_of_conversation(self, collection: TaskCollection, conversation_id: UUID) -> Document | None:
        found = await collection.lists.find(id_text(conversation_id, "conversation"), descending=True, limit=1)
        return found[0] if found else None

    async def list_of(self, conversation_id: UUID, scope: Scope | None = None) -> UUID | None:
        header = await self._header_of_conversation(self._collection(scope), conversation_id)
        return None if header is None else UUID(header.key)

    async def _read_list(self, collection: TaskCollection, header: Document) -> TaskList:
        tasks = [collection.task_of(each.text) for each in await collection.tasks.find(header.key)]
        task_list = model_of(TaskList, header.text, tasks=tasks)
        parts = frozenset(str(task.id) for task in tasks)
        collection.read_lists.remember(task_list, (text_of(task_list, leave_out=_TASKS), parts))
        return task_list

    async def get_task(self, task_id: UUID, scope: Scope | None = None) -> Task | None:
        """Return a task of any list, or None if there is none.

        Args:
            task_id: The id of the task.
            scope: The scope.
        """
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
        """Delete a list with its tasks, and return whether it existed.

        A task of another list that depends on a task of this list is blocked.

        Args:
            task_list_id: The id of the list.
            scope: The scope.

        Returns:
            Whether the list existed.
        """
        return await self._collection(scope).delete(id_text(task_list_id, "task list"))

    async def update(
        self, task_id: UUID, *, scope: Scope | None = None, task_list_id: UUID | None = None, **fields: Any
    ) -> None:
        """Change fields of a task.

        Args:
            task_id: The task to change.
            scope: The scope of the task.
            task_list_id: The list of the task. The store finds the task without it.
            **fields: New values by the names of the fields of `Task`, except `id`.

        Raises:
            InvalidArgument: The task or the field does not exist, or the task is not in the list `task_list_id`.
        """
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
        arguments = {"state": state, "name": name, "description": description}
        fields = {name: value for name, value in arguments.items() if value is not None}
        await self._update(task_id, scope, task_list_id, fields)

    async def _update(
        self, task_id: UUID, scope: Scope | None, task_list_id: UUID | None, fields: Mapping[str, Any]
    ) -> None:
        def changed(stored: Document) -> Entry:
            if task_list_id is not None and stored.group != id_text(task_list_id, "task list"):
                raise InvalidArgument(f"task {task_id} not found in list {task_list_id} of this scope. Save it first.")
            return replaced(stored, settled(model_of(Task, stored.text), fields, self.clock.wall()))

        await self._collection(scope).change(id_text(task_id, "task"), changed)

    # -- claims

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
        checkpoint = {} if data is None else self._data(data)
        return await self._claims_of(scope).change(task, worker, {"state": TaskState.COMPLETE, **checkpoint})

    async def fail(
        self, task: Task | UUID, worker: str | None = None, error: object = None, retry: bool = True, *,
        scope: Scope | None = None,
    ) -> Task:  # fmt: skip
        reason = None if error is None else str(error)
        if isinstance(error, BaseException):
            reason = f"{type(error).__name__}: {error}"
        state = TaskState.NOT_STARTED if retry else TaskState.CANCELLED
        return await self._claims_of(scope).change(task, worker, {"state": state, "last_error": reason})

    async def release(self, task: Task | UUID, worker: str | None = None, *, scope: Scope | None = None) -> Task:
        return await self._claims_of(scope).change(task, worker, {"state": TaskState.NOT_STARTED})

    def _data(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(data, Mapping):
            raise must("data", "be a dict", data)
        return {"checkpoint_data": dict(data), "checkpoint_at": aware(self.clock.wall())}


def _group(task_list_id: UUID | None) -> str | None:
    return None if task_list_id is None else id_text(task_list_id, "task list")


def _text(task: Task) -> str:
    return text_of(check_task(task))


def _header(task_list: TaskList, text: str) -> Entry:
    """Return the document of a list. Its conversation comes from `text`, which another writer may have changed."""
    stored = model_of(TaskList, text)
    return Entry(str(task_list.id), text, str(stored.conversation_id or ""), moment(task_list.updated_at))


def _add_list(collection: TaskCollection, task_list: TaskList) -> Op:
    return collection.lists.add(_header(task_list, text_of(task_list, leave_out=_TASKS)))


def _put_if_changed(
    change: Change, key: str, text: str, group: str, rank: float | None, stored: Document | None
) -> None:
    """Add the task to the puts of a change, unless the stored document is the same."""
    same_text = stored is not None and stored.text == text
    if stored is None or not same_text or stored.group != group or rank not in (None, stored.rank):
        change.puts.append((Entry(key, text, group, rank), stored))
