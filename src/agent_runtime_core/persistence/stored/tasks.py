"""Lists of tasks as documents: a header for each list, and a document for each task of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any
from uuid import UUID, uuid5

from ..._clock import aware
from ..._engines.base import Op
from ...errors import InvalidArgument, StorageBusy, brief
from ..base.tasks import check_fields
from ..documents.base import CHANGE_TRIES, Absent, Changed, Document, Entry
from ..forms import model_of, text_of
from ..models import Scope, Task, TaskList, TaskState, moment
from .claims import Claims
from .keys import id_text
from .merging import merged
from .order import ranks_for
from .task_form import check_list, check_task, now_like, settled
from .task_space import Change, TaskSpace

# Part of every store ever written: with another value tasks saved alone would go into new lists.
_LISTS = UUID("6d0f1c4e-2b7a-5d93-8a51-94e3c7b2f06d")
_TASKS = frozenset({"tasks"})


class StoredTasks(Claims):
    """Lists of tasks. A task that is saved alone goes into the list of its conversation, or into the inbox."""

    async def save(self, task_list: TaskList | Task, scope: Scope | None = None) -> None:
        """Store a list, or a task alone, and set its `updated_at`.

        Of what was read from this store only what was changed since then is written: what others did meanwhile stays.
        A list built by hand is written as it is, and deletes nothing. InvalidArgument: tasks would wait for each other.
        """
        if not isinstance(task_list, TaskList | Task):
            raise InvalidArgument(f"a TaskList or a Task is saved here, not {brief(task_list)}")
        space = self._space(scope)
        if isinstance(task_list, Task):
            await self._saved(check_task(task_list), partial(self._save_one, space, task_list))
        else:
            await self._saved(check_list(task_list), partial(self._save_all, space, task_list))

    async def save_task(self, task_list: TaskList, task: Task, scope: Scope | None = None) -> None:
        save = partial(self._save_one, self._space(scope), task, check_list(task_list))
        await self._saved(check_task(task), save)

    async def _saved(self, what: TaskList | Task, save: Callable[[], Awaitable[None]]) -> None:
        before = what.updated_at
        what.updated_at = now_like(self.clock.wall(), before)
        try:
            for _ in range(CHANGE_TRIES):
                try:
                    return await save()
                except (Changed, Absent):
                    continue
            raise StorageBusy(f"{brief(what.name)} was changed by others {CHANGE_TRIES} times in a row; save it again")
        except BaseException:
            what.updated_at = before
            raise

    async def _save_all(self, space: TaskSpace, task_list: TaskList) -> None:
        mine = {str(check_task(task).id): task for task in task_list.tasks}
        if len(mine) != len(task_list.tasks):
            raise InvalidArgument(f"a task stands twice in the list {brief(task_list.name)}")
        texts = {key: _text(task) for key, task in mine.items()}
        key = id_text(task_list.id, "task list")
        header = await space.lists.get(key)
        base, read = space.read.of(task_list) or (None, frozenset())
        change = await self._parts(space, key, mine, texts, read if header is not None else frozenset())
        text = text_of(task_list, leave_out=_TASKS)
        whole = merged(text, base, header and header.text)
        change.more = [space.lists.put(_header(task_list, whole), 0 if header is None else header.version)]
        await space.write(change)
        space.read.remember(task_list, (text, frozenset(mine)))
        for key, task in mine.items():
            space.seen.remember(task, texts[key])

    async def _parts(
        self, space: TaskSpace, group: str, mine: Mapping[str, Task], texts: Mapping[str, str], read: frozenset[str]
    ) -> Change:
        """What is to be written of the tasks of a list of which those in `read` were read."""
        there = {each.key: each for each in await space.tasks.find(group)}
        drops = [key for key in there if key in read and key not in mine]
        there = {key: each for key, each in there.items() if key not in drops}
        elsewhere = {each.key: each for each in await space.tasks.many([key for key in mine if key not in there])}
        known = there | elsewhere
        # What others deleted, and the holder of this list left alone, stays deleted.
        kept = [key for key in mine if key in known or key not in read or space.seen.of(mine[key]) != texts[key]]
        change = Change(drops=drops)
        for key, rank in ranks_for(kept, {key: each.rank for key, each in there.items()}).items():
            old = known.get(key)
            _put(change, key, merged(texts[key], space.seen.of(mine[key]), old and old.text), group, rank, old)
        return change

    async def _save_one(self, space: TaskSpace, task: Task, task_list: TaskList | None = None) -> None:
        text, key = _text(task), str(task.id)
        there = await space.tasks.get(key)
        change = Change()
        if task_list is not None:
            group = await self._in_list(space, task_list, change)
        else:
            group = there.group if there is not None else await self._list_for(space, task, change)
        _put(change, key, merged(text, space.seen.of(task), there and there.text), group, None, there)
        await space.write(change)
        space.seen.remember(task, text)

    async def _list_for(self, space: TaskSpace, task: Task, change: Change) -> str:
        """The list of its conversation or the inbox, to be made by that change where there is none."""
        conversation = task.conversation_id
        if conversation is not None and (found := await self._of_conversation(space, conversation)) is not None:
            change.more = [space.lists.touch(found.key, 0.0)]  # refused if it is deleted meanwhile
            return found.key
        name = "Inbox" if conversation is None else "Tasks"
        made = TaskList(id=uuid5(_LISTS, str(conversation or "inbox")), name=name, conversation_id=conversation)
        made.created_at = made.updated_at = aware(self.clock.wall())
        change.more = [_made(space, made)]
        return str(made.id)

    async def _in_list(self, space: TaskSpace, task_list: TaskList, change: Change) -> str:
        key = id_text(task_list.id, "task list")
        there = await space.lists.get(key)
        change.more = [_made(space, task_list) if there is None else space.lists.touch(key, 0.0)]
        return key

    async def get(self, task_list_id: UUID, scope: Scope | None = None) -> TaskList | None:
        space = self._space(scope)
        header = await space.lists.get(id_text(task_list_id, "task list"))
        return None if header is None else await self._list(space, header)

    async def get_by_conversation(self, conversation_id: UUID, scope: Scope | None = None) -> TaskList | None:
        """The last saved list of that conversation."""
        space = self._space(scope)
        header = await self._of_conversation(space, conversation_id)
        return None if header is None else await self._list(space, header)

    async def _of_conversation(self, space: TaskSpace, conversation_id: UUID) -> Document | None:
        found = await space.lists.find(id_text(conversation_id, "conversation"), descending=True, limit=1)
        return found[0] if found else None

    async def list_of(self, conversation_id: UUID, scope: Scope | None = None) -> UUID | None:
        header = await self._of_conversation(self._space(scope), conversation_id)
        return None if header is None else UUID(header.key)

    async def _list(self, space: TaskSpace, header: Document) -> TaskList:
        tasks = [self._task(space, each) for each in await space.tasks.find(header.key)]
        task_list = model_of(TaskList, header.text, tasks=tasks)
        parts = frozenset(str(task.id) for task in tasks)
        space.read.remember(task_list, (text_of(task_list, leave_out=_TASKS), parts))
        return task_list

    async def get_task(self, task_id: UUID, scope: Scope | None = None) -> Task | None:
        space = self._space(scope)
        found = await space.tasks.get(id_text(task_id, "task"))
        return None if found is None else self._task(space, found)

    async def find_task(self, task_list_id: UUID, task_id: UUID, scope: Scope | None = None) -> Task | None:
        space = self._space(scope)
        found = await space.tasks.get(id_text(task_id, "task"))
        if found is None or found.group != id_text(task_list_id, "task list"):
            return None
        return self._task(space, found)

    async def delete(self, task_list_id: UUID, scope: Scope | None = None) -> bool:
        """Delete the list and its tasks; what depends on one of them is blocked."""
        return await self._space(scope).delete(id_text(task_list_id, "task list"))

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
            return self._entry(there, settled(model_of(Task, there.text), fields, self.clock.wall()))

        await self._space(scope).change(id_text(task_id, "task"), changed)


def _text(task: Task) -> str:
    return text_of(check_task(task))


def _header(task_list: TaskList, text: str) -> Entry:
    """`text` is what is stored, in which others may have given the list another conversation."""
    stored = model_of(TaskList, text)
    return Entry(str(task_list.id), text, str(stored.conversation_id or ""), moment(task_list.updated_at))


def _made(space: TaskSpace, task_list: TaskList) -> Op:
    return space.lists.add(_header(task_list, text_of(task_list, leave_out=_TASKS)))


def _put(change: Change, key: str, text: str, group: str, rank: float | None, there: Document | None) -> None:
    """Have the task written, unless it is there as it should be."""
    alike = there is not None and there.text == text
    if there is None or not alike or there.group != group or rank not in (None, there.rank):
        change.puts.append((Entry(key, text, group, rank), there))
