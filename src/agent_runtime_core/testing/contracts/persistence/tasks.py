"""Conformance tests for task stores. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make()` returns a new and empty store.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

from ....errors import InvalidArgument
from ....persistence.base.tasks import TaskStore
from ....persistence.models import Scope, Task, TaskList, TaskState, new_id
from ..checks import Cases, opened, refused, same
from .fixtures import TREE, deleted_once, stores_of_tenants

Make = Callable[..., Any]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
check: Callable[[Make], Awaitable[None]] = CASES.check

NOON = dt.datetime(2026, 11, 21, 12, 0, tzinfo=dt.UTC)
NAIVE = NOON.replace(tzinfo=None)
HOUR = dt.timedelta(hours=1)
UNKNOWN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2bff")


def names(tasks: Sequence[Task]) -> list[str]:
    return [task.name for task in tasks]


def after(*tasks: Task) -> list[UUID]:
    return [task.id for task in tasks]


async def stored(store: TaskStore, *tasks: Task, **fields: Any) -> TaskList:
    task_list = TaskList(name="list", tasks=list(tasks), **fields)
    await store.save(task_list)
    return task_list


async def found(store: TaskStore, task_list: TaskList) -> dict[str, Task]:
    """The stored tasks by name."""
    there = await store.get(task_list.id)
    return {task.name: task for task in there.tasks} if there is not None else {}


def full() -> TaskList:
    """A list with every field set, and naive and aware times."""
    first = Task(name="first", state=TaskState.COMPLETE, completed_at=NAIVE, created_at=NAIVE, updated_at=NAIVE)
    second = Task(
        name="zweite é",
        description="what is to be done",
        state=TaskState.IN_PROGRESS,
        parent_id=first.id,
        metadata=copy.deepcopy(TREE),
        dependencies=[first.id],
        priority=-3,
        due_at=NAIVE + HOUR,
        checkpoint_data={"step": 5, "of": [1, 2]},
        checkpoint_at=NOON,
        attempts=2,
        last_error="Temporary network failure",
        conversation_id=new_id(),
        claimed_by="worker-1",
        claimed_until=NOON + HOUR,
    )
    third = Task(name="third", parent_id=second.id, dependencies=after(second, first), due_at=NOON)
    return TaskList(
        name="Ein Plan", tasks=[second, first, third], created_at=NAIVE, updated_at=NAIVE, conversation_id=new_id(),
        run_id=new_id(),
    )  # fmt: skip


# -- storing and updating


@CASES
async def what_is_unknown_is_none(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get(UNKNOWN), None, "an unknown list")
        same(await store.get_by_conversation(UNKNOWN), None, "the list of an unknown conversation")
        same(await store.delete(UNKNOWN), False, "the result of deleting an unknown list")
        task_list = await stored(store, Task(name="a"))
        for ids in ((UNKNOWN, task_list.tasks[0].id), (task_list.id, UNKNOWN)):
            with refused(ValueError, f"an update of {ids}"):
                await store.update_task(*ids, name="b")
        same(await store.get(task_list.id), task_list, "the list after the rejected updates")


@CASES
async def every_field_comes_back(make: Make) -> None:
    async with opened(make) as store:
        for task_list in (full(), TaskList(name="")):
            before = task_list.updated_at
            await store.save(task_list)
            assert task_list.updated_at != before, "save() must set updated_at on the object"
            same(await store.get(task_list.id), task_list, "a list of tasks")


@CASES
async def saving_again_keeps_what_the_object_holds(make: Make) -> None:
    async with opened(make) as store:
        task_list = await stored(store, Task(name="a"), Task(name="b"))
        task_list.tasks.append(Task(name="c"))
        task_list.tasks[0].priority = 5
        task_list.name = "another name"
        await store.save(task_list)
        same(await store.get(task_list.id), task_list, "the list saved twice")
        again = await store.get(task_list.id)
        del again.tasks[1]
        await store.save(again)
        same(names((await store.get(task_list.id)).tasks), ["a", "c"], "the tasks after one was removed")


@CASES
async def a_deleted_list_is_gone_with_its_tasks(make: Make) -> None:
    async with opened(make) as store:
        task_list, other = await stored(store, Task(name="a")), await stored(store, Task(name="b"))
        await deleted_once(store.delete, task_list.id)
        same(await store.get(task_list.id), None, "the list")
        with refused(ValueError, "an update of its task"):
            await store.update_task(task_list.id, task_list.tasks[0].id, name="c")
        same(await store.get(other.id), other, "another list")
        await store.save(TaskList(id=task_list.id, name="anew"))
        same((await store.get(task_list.id)).tasks, [], "the tasks of a new list with its id")


@CASES
async def a_conversation_has_its_list(make: Make) -> None:
    async with opened(make) as store:
        conversation = new_id()
        await stored(store, Task(name="a"), conversation_id=new_id())
        task_list = await stored(store, Task(name="b"), conversation_id=conversation)
        await stored(store, Task(name="c"))
        same(await store.get_by_conversation(conversation), task_list, "the list of the conversation")


@CASES
async def an_update_changes_what_is_given(make: Make) -> None:
    async with opened(make) as store:
        first, second = Task(name="a", description="d", priority=3), Task(name="b")
        task_list = await stored(store, first, second)
        await store.update_task(task_list.id, first.id, state=TaskState.IN_PROGRESS)
        await store.update_task(task_list.id, first.id, name="A")
        await store.update_task(task_list.id, first.id, description="")
        there = (await store.get(task_list.id)).tasks
        shown = (there[0].state, there[0].name, there[0].description, there[0].priority)
        same(shown, (TaskState.IN_PROGRESS, "A", "", 3), "the task")
        same(there[1], second, "another task")
        await store.update(first.id, task_list_id=task_list.id, state=TaskState.COMPLETE, description="new")
        changed = (await found(store, task_list))["A"]
        same((changed.state, changed.description), (TaskState.COMPLETE, "new"), "the task after update()")
        with refused(InvalidArgument, "an update of an unknown field"):
            await store.update(first.id, task_list_id=task_list.id, staet=TaskState.COMPLETE)


@CASES
async def a_list_is_no_alias_of_the_callers(make: Make) -> None:
    async with opened(make) as store:
        task = Task(name="a", metadata={"items": [1]})
        task_list = await stored(store, task)
        task.metadata["items"].append(2)
        first = await store.get(task_list.id)
        same(first.tasks[0].metadata, {"items": [1]}, "the saved task after the writer changed its copy")
        first.tasks[0].metadata["items"].append(3)
        same((await store.get(task_list.id)).tasks[0].metadata, {"items": [1]}, "the task after its copy was changed")


@CASES
async def scopes_are_apart(make: Make) -> None:
    async with opened(make) as store:
        task_list = await stored(store, Task(name="a"), conversation_id=new_id())
        same(await store.get(task_list.id, scope=Scope.GLOBAL), None, "a list of the project in the global scope")
        elsewhere = await store.get_by_conversation(task_list.conversation_id, Scope.GLOBAL)
        same(elsewhere, None, "the list of a conversation in the global scope")
        same(await store.delete(task_list.id, Scope.GLOBAL), False, "the result of deleting in another scope")
        same(await store.get(task_list.id, Scope.PROJECT), task_list, "the list in its scope")


@CASES
async def tasks_of_a_list_are_ready_in_order(make: Make) -> None:
    async with opened(make) as store:
        done = Task(name="done", state=TaskState.COMPLETE)
        gone = Task(name="gone", state=TaskState.CANCELLED)
        begun = Task(name="begun", state=TaskState.IN_PROGRESS)
        tasks = [
            Task(name="later", created_at=NOON + HOUR),
            Task(name="sooner", created_at=NAIVE),
            Task(name="due late", due_at=NOON + HOUR, created_at=NOON + HOUR),
            Task(name="due soon", due_at=NAIVE, created_at=NAIVE + 2 * HOUR),
            Task(name="urgent", priority=1, created_at=NOON + 3 * HOUR, dependencies=after(done)),
            Task(name="blocked by begun", priority=9, dependencies=after(done, begun)),
            Task(name="blocked by gone", priority=9, dependencies=after(gone)),
            Task(name="blocked by nothing known", priority=9, dependencies=[UNKNOWN]),
        ]
        task_list = await stored(store, done, gone, begun, *tasks)
        expected = ["urgent", "due soon", "due late", "sooner", "later"]
        same(names(await store.ready(task_list.id)), expected, "the ready tasks")
        same(names(await store.ready(task_list.id, limit=2)), expected[:2], "the ready tasks with limit 2")
        same(await store.ready(UNKNOWN), [], "the ready tasks of an unknown list")
        await store.update_task(task_list.id, begun.id, state=TaskState.COMPLETE)
        same(names(await store.ready(task_list.id, limit=1)), ["blocked by begun"], "the first ready task")


@CASES
async def a_task_is_stored_and_found_alone_in_its_list(make: Make) -> None:
    async with opened(make) as store:
        conversation, first, second = new_id(), Task(name="first"), Task(name="second")
        same(await store.list_of(conversation), None, "the list of an unknown conversation")
        task_list = TaskList(name="list", conversation_id=conversation, tasks=[Task(name="not asked for")])
        for task in (first, second):
            await store.save_task(task_list, task)
        same(names(task_list.tasks), ["not asked for"], "the tasks of the passed list")
        same(await store.list_of(conversation), task_list.id, "the list of the conversation")
        there = await store.get(task_list.id)
        same((there.name, names(there.tasks)), ("list", ["first", "second"]), "the list created with its first task")
        first.description = "changed"
        await store.save_task(TaskList(id=task_list.id, name="another name"), first)
        there = await store.get(task_list.id)
        same((there.name, names(there.tasks)), ("list", ["first", "second"]), "the list after a task was saved again")
        same((await store.find_task(task_list.id, first.id)).description, "changed", "the task saved again")
        other = await stored(store, Task(name="other"))
        same(await store.find_task(other.id, first.id), None, "a task in another list")
        same(await store.find_task(task_list.id, UNKNOWN), None, "an unknown task")
        same(await store.find_task(UNKNOWN, first.id), None, "a task in an unknown list")


@CASES
async def tenants_use_the_same_task_ids_apart(make: Make) -> None:
    async with stores_of_tenants(make) as stores:
        for scope in Scope:
            for tenant, store in stores.items():
                same(await store.get(UNKNOWN, scope), None, f"the list of tenant {tenant!r} before it is saved")
                task = Task(name=f"{tenant} in {scope.value}", id=UNKNOWN)
                task_list = TaskList(name=f"{tenant}", id=UNKNOWN, conversation_id=UNKNOWN, tasks=[task])
                await store.save(task_list, scope)
        for scope in Scope:
            for tenant, store in stores.items():
                named = await store.get_by_conversation(UNKNOWN, scope)
                same(named and named.name, str(tenant), f"the list of tenant {tenant!r}")
                claimed = await store.claim("worker", scope=scope)
                same(claimed and claimed.name, f"{tenant} in {scope.value}", f"the task that tenant {tenant!r} claims")
                same(await store.claim("worker", scope=scope), None, "the next task that it claims")
        for number, store in enumerate(stores.values()):
            same(await store.delete(UNKNOWN), True, "the result of a delete")
            left = [await each.get(UNKNOWN) is not None for each in stores.values()]
            same(left, [False] * (number + 1) + [True] * (len(stores) - number - 1), "which lists are left")
