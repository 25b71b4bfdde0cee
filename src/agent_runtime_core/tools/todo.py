"""To-dos for models and plans, stored as tasks of the run."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypedDict
from uuid import UUID, uuid5

from .._core.lazy_import import load
from .._core.validation import must
from ..errors import InvalidArgument, NotSupported, UnserialisableResult, brief
from .base import BaseTool, ToolResult

__all__ = ["Todo", "TodoStoreTool"]

# Part of the ids of all stored to-dos: with another value, a repeated `add` would create a duplicate.
_TODOS: Final = UUID("3f0b6a1e-7f0a-5c55-9d5e-0c2b8a4c7d11")
_RECEIPTS = 100  # deletions of a list that are remembered, so that a repeated one returns the same result


class RunContext(Protocol):
    """The part of a context that this tool uses."""

    @property
    def persistence(self) -> Any: ...
    @property
    def conversation_id(self) -> UUID | None: ...
    @property
    def idempotency_key(self) -> str | None: ...


class Todo(TypedDict):
    """A to-do as the tool returns it.

    `number` is unique in its list and never reused; it is None for a task that was not added by this tool.
    """

    id: str
    number: int | None
    text: str
    done: bool


class TodoStoreTool(BaseTool):
    """Adds, lists, gets, completes and deletes to-dos in the task list of the run's conversation, or in an inbox.

    They are stored with `ctx.persistence`; without a context they are kept by this object. `list` returns a list of
    Todo, any other action one Todo. An action that fails is a ToolResult without success. Repeating an action with the
    same idempotency key returns the same result and causes no second effect.
    """

    has_side_effects = True

    def __init__(self) -> None:
        self._own: Any = None
        #: The to-dos by id that this object keeps, after the last action. To-dos of runs are stored with the run.
        self.todos: dict[str, Todo] = {}

    def name(self) -> str:
        return "todo_store"

    def description(self) -> str:
        return (
            "Keeps to-dos: add one by its text, list them all, or get, complete or delete the one with that todo_id "
            "(its id or its number), or else that text."
        )

    def parameters(self) -> dict[str, Any]:
        about = {
            "action": {"type": "string", "enum": [*_ACTIONS], "description": "What to do."},
            "todo_id": {"type": "string", "description": "Which one: its id, or its number."},
            "text": {"type": "string", "description": "What is to be done; or which one is meant, without todo_id."},
        }
        return {"type": "object", "properties": about, "required": ["action"], "additionalProperties": False}

    async def execute(
        self, action: str, todo_id: str | None = None, text: str | None = None, ctx: RunContext | None = None
    ) -> ToolResult:
        do = _ACTIONS.get(action) if isinstance(action, str) else None
        if do is None:
            return ToolResult(False, None, str(must("action", f"be one of {', '.join(_ACTIONS)}", action)))
        stores = self._stores(ctx)
        todos = _Todos(stores, getattr(ctx, "conversation_id", None), getattr(ctx, "idempotency_key", None))
        try:
            result = ToolResult(True, await do(todos, todo_id, text))
            if stores is self._own:
                self.todos = {each["id"]: each for each in await todos.listed(None, None)}
            return result
        except (_ActionFailed, UnserialisableResult) as failure:
            return ToolResult(False, None, str(failure))

    def _stores(self, ctx: RunContext | None) -> Any:
        try:
            stores = getattr(ctx, "persistence", None)
        except NotSupported:
            stores = None
        if stores is None:
            if self._own is None:
                manager: Any = load("..persistence.manager:PersistenceManager", package=__package__)
                self._own = manager.open("memory://")
            stores = self._own
        return stores


class _ActionFailed(InvalidArgument):
    """The action is not possible; the message says how the caller can correct it."""


class _Todos:
    """One list of to-dos, during one call."""

    def __init__(self, stores: Any, conversation: UUID | None, key: str | None) -> None:
        self.tasks, self.memory = stores.tasks, stores.memory
        self.conversation = conversation
        self.key = key
        self._models: Any = load("..persistence.models", package=__package__)

    async def add(self, todo_id: str | None, text: str | None) -> Todo:
        wanted = text.strip() if isinstance(text, str) else ""
        if not wanted:
            raise _ActionFailed(f"text must be the text of the new to-do, got {brief(text)}.")
        list_id = await self._list()
        task = self._models.Task(name=wanted, conversation_id=self.conversation)
        known = None
        if self.key is not None:
            task.id = uuid5(_TODOS, f"{self.key}:{wanted}")
            known = await self.tasks.find_task(list_id, task.id)
        if known is None:
            task.metadata["number"] = await self._number(list_id)
            stored = self._models.TaskList(id=list_id, name="To-dos", conversation_id=self.conversation)
            await self.tasks.save_task(stored, task)
        return self._as_todo(known or task)

    async def listed(self, todo_id: str | None, text: str | None) -> list[Todo]:
        return [self._as_todo(each) for each in await self._open(await self._list())]

    async def get(self, todo_id: str | None, text: str | None) -> Todo:
        return self._as_todo(await self._one(await self._list(), todo_id, text))

    async def complete(self, todo_id: str | None, text: str | None) -> Todo:
        list_id, done = await self._list(), self._models.TaskState.COMPLETE
        task = await self._one(list_id, todo_id, text)
        if task.state is not done:
            await self.tasks.update_task(list_id, task.id, state=done)
        return {**self._as_todo(task), "done": True}

    async def delete(self, todo_id: str | None, text: str | None) -> Todo:
        list_id = await self._list()
        receipt = f"{self.key}:{todo_id}:{text}"
        todo: Todo | None = (await self._notes(list_id)).get("deleted", {}).get(receipt) if self.key else None
        if todo is None:
            todo = self._as_todo(await self._one(list_id, todo_id, text))
            if self.key is not None:
                await self._note_deleted(list_id, receipt, todo)
        stored = await self.tasks.get(list_id)
        left = [] if stored is None else [each for each in stored.tasks if str(each.id) != todo["id"]]
        if stored is not None and len(left) < len(stored.tasks):
            stored.tasks = left
            await self.tasks.save(stored)
        return todo

    # -- the list

    async def _list(self) -> UUID:
        """Return the id of the list, which is stored with its first to-do."""
        found: UUID | None = None if self.conversation is None else await self.tasks.list_of(self.conversation)
        return found or uuid5(_TODOS, str(self.conversation or "inbox"))

    async def _open(self, list_id: UUID) -> Sequence[Any]:
        stored, cancelled = await self.tasks.get(list_id), self._models.TaskState.CANCELLED
        return [] if stored is None else [each for each in stored.tasks if each.state is not cancelled]

    async def _one(self, list_id: UUID, todo_id: str | None, text: str | None) -> Any:
        """Return the task that `todo_id` or `text` identifies; _ActionFailed if none or several match."""
        wanted = str(todo_id if todo_id is not None else text or "").strip()
        if not wanted:
            raise _ActionFailed("todo_id or text must identify the to-do, got neither. Pass one of them")
        if todo_id is not None and (task := await self._known(list_id, wanted)) is not None:
            return task
        tasks = await self._open(list_id)
        found = self._by_id(tasks, wanted) if todo_id is not None else self._by_text(tasks, wanted)
        if len(found) == 1:
            return found[0]
        if found:
            raise _ActionFailed(
                f"text must match one to-do, got {brief(wanted)}, which matches {_names(found)}. Pass todo_id"
            )
        raise _ActionFailed(f"unknown to-do {brief(wanted)}. {_hint(wanted, tasks)}")

    async def _known(self, list_id: UUID, wanted: str) -> Any:
        """Return the task with that id, or None if there is none or it is cancelled."""
        try:
            task = await self.tasks.find_task(list_id, UUID(wanted))
        except ValueError:  # a number
            return None
        return None if task is None or task.state is self._models.TaskState.CANCELLED else task

    def _by_id(self, tasks: Sequence[Any], wanted: str) -> list[Any]:
        number = f"#{wanted.removeprefix('#')}"
        return [each for each in tasks if wanted.lower() == str(each.id) or number == _short(each)]

    def _by_text(self, tasks: Sequence[Any], wanted: str) -> list[Any]:
        """Return the tasks with that text, else those that contain it; if several match, those not done yet."""
        text = wanted.casefold()
        found = [each for each in tasks if each.name.strip().casefold() == text]
        found = found or [each for each in tasks if text in each.name.casefold()]
        left = [each for each in found if each.state is not self._models.TaskState.COMPLETE]
        return left if len(found) > 1 and left else found

    def _as_todo(self, task: Any) -> Todo:
        done = task.state is self._models.TaskState.COMPLETE
        return {"id": str(task.id), "number": task.metadata.get("number"), "text": task.name, "done": done}

    # -- notes of the list: the last number, and deletions by idempotency key

    async def _notes(self, list_id: UUID) -> dict[str, Any]:
        return await self.memory.get(f"todo_store:{list_id}") or {}

    async def _number(self, list_id: UUID) -> int:
        def next_one(notes: dict[str, Any] | None) -> dict[str, Any]:
            return {**(notes or {}), "last": (notes or {}).get("last", 0) + 1}

        return int((await self.memory.change(f"todo_store:{list_id}", next_one))["last"])

    async def _note_deleted(self, list_id: UUID, receipt: str, todo: Todo) -> None:
        def noted(notes: dict[str, Any] | None) -> dict[str, Any]:
            deleted = {**(notes or {}).get("deleted", {}), receipt: todo}
            return {**(notes or {}), "deleted": dict([*deleted.items()][-_RECEIPTS:])}

        await self.memory.change(f"todo_store:{list_id}", noted)


_Action = Callable[[_Todos, "str | None", "str | None"], Awaitable[Any]]
_ACTIONS: Final[dict[str, _Action]] = {
    "add": _Todos.add, "list": _Todos.listed, "get": _Todos.get, "complete": _Todos.complete, "delete": _Todos.delete,
}  # fmt: skip


def _names(tasks: Sequence[Any]) -> str:
    more = f" and {len(tasks) - 5} more" if len(tasks) > 5 else ""
    return ", ".join(f"{_short(each)} {brief(each.name)}" for each in tasks[:5]) + more


def _short(task: Any) -> str:
    """Return the number of a task, or its id if there is no number."""
    number = task.metadata.get("number")
    return str(task.id) if number is None else f"#{number}"


def _hint(wanted: str, tasks: Sequence[Any]) -> str:
    by_name = {each.name: each for each in tasks}
    near = difflib.get_close_matches(wanted[:100], by_name, n=1)
    if near:
        return f"Did you mean {_names([by_name[near[0]]])}?"
    return f"Known: {_names(tasks)}." if tasks else "None exist."
