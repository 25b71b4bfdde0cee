"""What every task store must do; run each of `CASES` on your own with `await case(make)`, or `check(make)`.

`make()` gives a new and empty store each time. `OURS` holds what the stores of this package do beside that:
there `make(**options)` also takes their options, and `place="a name"` to open one place more than once.
"""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

from ....errors import InvalidArgument, NotSupported, TaskNotHeld, UnserialisableResult
from ....persistence.base.tasks import TaskStore
from ....persistence.models import Scope, Task, TaskList, TaskState, new_id
from ...clock import START, VirtualClock
from ..checks import Cases, refused, same
from .rig import TREE, fenced, opened

Make = Callable[..., Any]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
OURS: Cases[Case] = Cases()
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
    """The tasks that are stored, by name."""
    there = await store.get(task_list.id)
    return {task.name: task for task in there.tasks} if there is not None else {}


def full() -> TaskList:
    """Every field set, and times of all sorts."""
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


# -- what the five methods do


@CASES
async def what_is_unknown_is_none(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get(UNKNOWN), None, "an unknown list")
        same(await store.get_by_conversation(UNKNOWN), None, "the list of an unknown conversation")
        same(await store.delete(UNKNOWN), False, "deleting an unknown list")
        task_list = await stored(store, Task(name="a"))
        for ids in ((UNKNOWN, task_list.tasks[0].id), (task_list.id, UNKNOWN)):
            with refused(ValueError, f"an update of {ids}"):
                await store.update_task(*ids, name="b")
        same(await store.get(task_list.id), task_list, "the list after that")


@CASES
async def every_field_comes_back(make: Make) -> None:
    async with opened(make) as store:
        for task_list in (full(), TaskList(name="")):
            before = task_list.updated_at
            await store.save(task_list)
            assert task_list.updated_at != before, "save() sets updated_at on the object"
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
        same(names((await store.get(task_list.id)).tasks), ["a", "c"], "the tasks, one taken out")


@CASES
async def a_deleted_list_is_gone_with_its_tasks(make: Make) -> None:
    async with opened(make) as store:
        task_list, other = await stored(store, Task(name="a")), await stored(store, Task(name="b"))
        same((await store.delete(task_list.id), await store.delete(task_list.id)), (True, False), "deleted twice")
        same(await store.get(task_list.id), None, "the list")
        with refused(ValueError, "an update of its task"):
            await store.update_task(task_list.id, task_list.tasks[0].id, name="c")
        same(await store.get(other.id), other, "another list")
        await store.save(TaskList(id=task_list.id, name="anew"))
        same((await store.get(task_list.id)).tasks, [], "the tasks of a new one under its id")


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
        same(
            (there[0].state, there[0].name, there[0].description, there[0].priority),
            (TaskState.IN_PROGRESS, "A", "", 3),
            "the task",
        )
        same(there[1], second, "another task")
        await store.update(first.id, task_list_id=task_list.id, state=TaskState.COMPLETE, description="new")
        changed = (await found(store, task_list))["A"]
        same((changed.state, changed.description), (TaskState.COMPLETE, "new"), "the task after update()")
        with refused(InvalidArgument, "an update of a field that there is not"):
            await store.update(first.id, task_list_id=task_list.id, staet=TaskState.COMPLETE)


@CASES
async def a_list_is_no_alias_of_the_callers(make: Make) -> None:
    async with opened(make) as store:
        task = Task(name="a", metadata={"items": [1]})
        task_list = await stored(store, task)
        task.metadata["items"].append(2)
        first = await store.get(task_list.id)
        same(first.tasks[0].metadata, {"items": [1]}, "what was saved, after its writer changed its copy")
        first.tasks[0].metadata["items"].append(3)
        same((await store.get(task_list.id)).tasks[0].metadata, {"items": [1]}, "the same, after a reader did")


@CASES
async def scopes_are_apart(make: Make) -> None:
    async with opened(make) as store:
        task_list = await stored(store, Task(name="a"), conversation_id=new_id())
        same(await store.get(task_list.id, scope=Scope.GLOBAL), None, "a list of the project, globally")
        same(await store.get_by_conversation(task_list.conversation_id, Scope.GLOBAL), None, "that of a conversation")
        same(await store.delete(task_list.id, Scope.GLOBAL), False, "deleting it there")
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
        same(names(await store.ready(task_list.id, limit=2)), expected[:2], "two of them")
        same(await store.ready(UNKNOWN), [], "those of an unknown list")
        await store.update_task(task_list.id, begun.id, state=TaskState.COMPLETE)
        same(names(await store.ready(task_list.id, limit=1)), ["blocked by begun"], "the first when that is complete")


@CASES
async def a_task_is_stored_and_found_alone_in_its_list(make: Make) -> None:
    async with opened(make) as store:
        conversation, first, second = new_id(), Task(name="first"), Task(name="second")
        same(await store.list_of(conversation), None, "the list of an unknown conversation")
        given = TaskList(name="list", conversation_id=conversation, tasks=[Task(name="not asked for")])
        for task in (first, second):
            await store.save_task(given, task)
        same(names(given.tasks), ["not asked for"], "the tasks of the list that was given")
        same(await store.list_of(conversation), given.id, "the list of the conversation")
        there = await store.get(given.id)
        same((there.name, names(there.tasks)), ("list", ["first", "second"]), "the list, made with its first task")
        first.description = "changed"
        await store.save_task(TaskList(id=given.id, name="another name"), first)
        there = await store.get(given.id)
        same((there.name, names(there.tasks)), ("list", ["first", "second"]), "the list, with a task saved again")
        same((await store.find_task(given.id, first.id)).description, "changed", "the task that was saved again")
        other = await stored(store, Task(name="other"))
        same(await store.find_task(other.id, first.id), None, "a task in another list than its own")
        same(await store.find_task(given.id, UNKNOWN), None, "an unknown task")
        same(await store.find_task(UNKNOWN, first.id), None, "a task in an unknown list")


@OURS
async def tasks_saved_alone_at_once_make_their_list_once(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        given, tasks = TaskList(name="list"), [Task(name=str(n)) for n in range(12)]
        await asyncio.gather(*((store, beside)[n % 2].save_task(given, task) for n, task in enumerate(tasks)))
        same({task.name for task in (await store.get(given.id)).tasks}, {str(n) for n in range(12)}, "the tasks")


# -- what ours do beside that: tasks alone


@OURS
async def a_task_saved_alone_goes_where_it_belongs(make: Make) -> None:
    async with opened(make) as store:
        conversation, lonely = new_id(), Task(name="Review code")
        first, second = (Task(name=name, conversation_id=conversation) for name in ("first", "second"))
        for task in (lonely, first, second):
            await store.save(task)
        theirs = await store.get_by_conversation(conversation)
        same(theirs.tasks, [first, second], "the tasks of the conversation")
        same(await store.get_task(lonely.id), lonely, "a task of no conversation")
        own = await stored(store, Task(name="third"), conversation_id=conversation)
        fourth = Task(name="fourth", conversation_id=conversation)
        await store.save(fourth)
        same(names((await store.get(own.id)).tasks), ["third", "fourth"], "the list that was saved last")
        first.description = "changed"
        await store.save(first)
        same((await store.get(theirs.id)).tasks, [first, second], "a task stays in its list")
        await store.update(lonely.id, state=TaskState.COMPLETE)
        same((await store.get_task(lonely.id)).state, TaskState.COMPLETE, "the task updated by its id")
        same(await store.get_task(UNKNOWN), None, "an unknown task")


@OURS
async def tasks_saved_at_once_share_the_list(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        conversation = new_id()
        tasks = [Task(name=str(n), conversation_id=conversation) for n in range(12)]
        await asyncio.gather(*(to.save(task) for task, to in zip(tasks, [store, beside] * 6, strict=True)))
        theirs = await store.get_by_conversation(conversation)
        same(sorted(map(int, names(theirs.tasks))), list(range(12)), "the tasks of the conversation")


@OURS
async def completion_is_told_by_the_state(make: Make) -> None:
    clock = VirtualClock()
    async with opened(make, clock=clock) as store:
        task = Task(name="a")
        task_list = await stored(store, task)

        async def alone(state: Any) -> None:
            await store.update(task.id, state=state)

        async def listwise(state: Any) -> None:
            await store.update_task(task_list.id, task.id, state=state)

        for update in (alone, listwise):
            clock.advance(5)
            await update("complete")
            done = await store.get_task(task.id)
            same(done.completed_at.timestamp(), clock.wall(), "when it was completed")
            same(done.updated_at.timestamp(), clock.wall(), "when it was updated")
            clock.advance(5)
            await update(TaskState.COMPLETE)
            same((await store.get_task(task.id)).completed_at, done.completed_at, "when it was, said again")
            await update(TaskState.NOT_STARTED)
            same((await store.get_task(task.id)).completed_at, None, "when it was, once it is open again")


@OURS
async def every_field_can_be_updated(make: Make) -> None:
    async with opened(make) as store:
        task = Task(name="a")
        task_list = await stored(store, task)
        fields = {
            "name": "b", "description": "d", "parent_id": new_id(), "metadata": {"a": [1]}, "priority": 7,
            "due_at": NAIVE, "checkpoint_data": {"n": 1}, "checkpoint_at": NOON, "attempts": 3, "last_error": "e",
            "conversation_id": new_id(), "dependencies": [UNKNOWN], "created_at": NAIVE, "updated_at": NOON,
            "state": TaskState.IN_PROGRESS, "claimed_by": "w", "claimed_until": NOON, "completed_at": None,
        }  # fmt: skip
        await store.update(task.id, **fields)
        there = await store.get_task(task.id)
        same({name: getattr(there, name) for name in fields}, fields, "the fields")
        for bad in (
            {"state": "begun"}, {"priority": "high"}, {"priority": float("nan")}, {"due_at": "soon"}, {"name": 5},
            {"dependencies": ["a"]}, {"id": new_id()}, {"priorty": 1}, {"created_at": "now"}, {"dependencies": None},
        ):  # fmt: skip
            with refused(InvalidArgument, f"an update with {bad}"):
                await store.update(task.id, **bad)
        with refused(UnserialisableResult, "an update with what has no JSON form"):
            await store.update(task.id, metadata={"x": object()})
        with refused(InvalidArgument, "an update in another list"):
            await store.update(task.id, task_list_id=UNKNOWN, name="c")
        with refused(InvalidArgument, "an update of an unknown task"):
            await store.update(UNKNOWN, name="c")
        same((await store.get(task_list.id)).tasks, [there], "the list after that")


# -- whole lists, when others write too


@OURS
async def a_save_keeps_what_others_did(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        task_list = await stored(store, *(Task(name=name) for name in "abcd"))
        a, b, c, d = task_list.tasks
        claimed = await beside.claim("w", lease_seconds=60)
        same(claimed.name, "a", "the task claimed")
        await beside.update(b.id, description="theirs", priority=1)
        mine = await beside.get(task_list.id)
        del mine.tasks[3]
        mine.tasks.append(Task(name="e"))
        await beside.save(mine)
        for _ in range(2):
            b.name = "b, renamed"
            await store.save(task_list)
            there = await found(store, task_list)
            same(list(there), ["a", "b, renamed", "c", "e"], "the tasks: one taken out and one added by another")
            same((there["a"].state, there["a"].claimed_by), (TaskState.IN_PROGRESS, "w"), "the claim")
            same((there["b, renamed"].description, there["b, renamed"].priority), ("theirs", 1), "the update")
        await beside.complete(claimed)
        c.name = d.name = "changed"
        await store.save(task_list)
        same(len((await store.get(task_list.id)).tasks), 5, "how many there are: what was changed here is written back")
        same((await store.get_task(a.id)).state, TaskState.COMPLETE, "the task completed meanwhile")
        a.state = TaskState.NOT_STARTED
        a.name = "a, anew"
        await store.save(task_list)
        a.state = TaskState.CANCELLED
        await store.save(task_list)
        same((await store.get_task(a.id)).state, TaskState.CANCELLED, "the state that was changed here")


@OURS
async def a_list_that_others_gave_a_conversation_is_found_by_it(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        task_list = await stored(store, Task(name="a"))
        theirs = await beside.get(task_list.id)
        theirs.conversation_id = new_id()
        await beside.save(theirs)
        task_list.name = "mine"
        await store.save(task_list)
        there = await store.get_by_conversation(theirs.conversation_id)
        same((there and there.id, there and there.name), (task_list.id, "mine"), "the list of the conversation")


@OURS
async def a_list_built_by_hand_deletes_nothing(make: Make) -> None:
    async with opened(make) as store:
        task_list = await stored(store, Task(name="a"), Task(name="b"), conversation_id=new_id())
        await store.save(TaskList(id=task_list.id, name="by hand", tasks=[Task(name="c")]))
        there = await store.get(task_list.id)
        same((there.name, names(there.tasks)), ("by hand", ["a", "b", "c"]), "name and tasks")
        same(await store.get_by_conversation(task_list.conversation_id), None, "the conversation's list now")
        moved = Task(id=task_list.tasks[0].id, name="a, moved")
        other = await stored(store, moved)
        same((await store.get(other.id)).tasks, [moved], "a list that took a task of another")
        same(names((await store.get(task_list.id)).tasks), ["b", "c"], "the list it was taken from")
        with refused(InvalidArgument, "a list that holds a task twice"):
            await store.save(TaskList(name="twice", tasks=[moved, moved]))
        for bad in (Task(name="x", state="begun"), Task(name="x", dependencies=["y"]), "a task"):  # type: ignore[arg-type,list-item]
            with refused(InvalidArgument, f"a list that holds {bad!r:.60}"):
                await store.save(TaskList(name="bad", tasks=[bad]))  # type: ignore[list-item]
        fields: dict[str, Any]
        for fields in ({"name": None}, {"name": "x", "tasks": None}):
            with refused(InvalidArgument, f"a list with {fields}"):
                await store.save(TaskList(**fields))
        for limit in (-1, 1.5, "1"):
            with refused(InvalidArgument, f"a limit of {limit!r}"):
                await store.ready(limit=limit)
        with refused(InvalidArgument, "what is no list"):
            await store.save("a list")


@OURS
async def the_order_of_the_object_is_kept(make: Make) -> None:
    async with opened(make) as store:
        task_list = await stored(store, *(Task(name=name) for name in "bd"))
        for at, name in ((0, "a"), (2, "c"), (4, "e")):
            task_list.tasks.insert(at, Task(name=name))
        await store.save(task_list)
        same(names((await store.get(task_list.id)).tasks), list("abcde"), "after new ones between the old")
        task_list.tasks.reverse()
        await store.save(task_list)
        same(names((await store.get(task_list.id)).tasks), list("edcba"), "the other way round")


@OURS
async def a_list_is_copied_to_another_scope_whole(make: Make) -> None:
    async with opened(make) as store:
        task_list = await stored(store, Task(name="a"), Task(name="b"))
        for _ in range(2):
            await store.save(task_list, Scope.GLOBAL)
            same(await store.get(task_list.id, Scope.GLOBAL), task_list, "the list in the other scope")
        await store.delete(task_list.id)
        await store.save(task_list)
        same(await store.get(task_list.id), task_list, "the list deleted and saved again")


# -- dependencies


@OURS
async def a_circle_is_refused(make: Make) -> None:
    async with opened(make) as store:
        a, b, c = Task(name="a"), Task(name="b"), Task(name="c")
        first = await stored(store, a, b)
        await stored(store, c)
        await store.update(b.id, dependencies=after(a))
        await store.update(c.id, dependencies=after(b))
        for task, dependency, drawn in ((a, c, "a -> c -> b -> a"), (b, c, "b -> c -> b"), (a, a, "a -> a")):
            try:
                await store.update(task.id, dependencies=after(dependency))
                said = "nothing was refused"
            except InvalidArgument as error:
                said = str(error)
            same(drawn in said, True, f"whether {said!r} draws {drawn}")
        same((await store.get_task(a.id)).dependencies, [], "the dependencies of a")
        x, y = Task(name="x"), Task(name="y")
        x.dependencies, y.dependencies = after(y), after(x)
        with refused(InvalidArgument, "a list with a circle in it"):
            await stored(store, x, y)
        a.dependencies = after(c)
        with refused(InvalidArgument, "a save that closes a circle across lists"):
            await store.save(first)
        with refused(InvalidArgument, "the same of a task alone"):
            await store.save(Task(id=a.id, name="a", dependencies=after(c)))
        await store.update(c.id, dependencies=[])
        await store.save(first)
        same((await store.get_task(a.id)).dependencies, after(c), "the dependencies of a, once there is no circle")


@OURS
async def two_at_once_close_no_circle(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        for n in range(5):
            ring = [Task(name=f"{n}.{at}") for at in range(4)]
            await stored(store, *ring)
            answers = await asyncio.gather(
                *(to.update(task.id, dependencies=after(ring[(at + 1) % 4]))
                  for at, (task, to) in enumerate(zip(ring, [store, beside] * 2, strict=True))),
                return_exceptions=True,
            )  # fmt: skip
            same(sum(isinstance(each, InvalidArgument) for each in answers), 1, "how many were refused")
            same(sum(each is None for each in answers), 3, "how many were not")


@OURS
async def tasks_are_ready_across_lists(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        a = Task(name="a")
        first = await stored(store, a)
        second = await stored(beside, Task(name="b", dependencies=after(a)), Task(name="c", priority=-1))
        same(names(await store.ready()), ["a", "c"], "the ready tasks of all lists")
        same(names(await store.ready(second.id)), ["c"], "those of the second list")
        await beside.update(a.id, state=TaskState.COMPLETE)
        same(names(await store.ready()), ["b", "c"], "those once a is complete")
        await store.update(a.id, state=TaskState.CANCELLED)
        same(names(await beside.ready()), ["c"], "those once a is cancelled")
        await store.update(a.id, state=TaskState.COMPLETE)
        await beside.delete(first.id)
        same(names(await store.ready()), ["c"], "those once the list of a is deleted")


# -- claims


@OURS
async def a_claim_is_one_workers(make: Make) -> None:
    clock = VirtualClock()
    async with opened(make, place="one", clock=clock) as store, opened(make, place="one", clock=clock) as beside:
        first, other = await stored(store, Task(name="a"), Task(name="b", priority=1)), await stored(store)
        same(await store.claim("w1", task_list_id=other.id), None, "a claim in an empty list")
        task = await store.claim("w1", lease_seconds=30, task_list_id=first.id)
        same((task.name, task.state, task.attempts), ("b", TaskState.IN_PROGRESS, 1), "the task claimed")
        same((task.claimed_by, task.claimed_until.timestamp()), ("w1", START + 30), "by whom and until when")
        same(await beside.get_task(task.id), task, "the task as it is stored")
        second = await beside.claim("w2")
        same((second.name, second.claimed_until), ("a", None), "the task that another worker gets")
        same(await store.claim("w3"), None, "a claim when there is none left")
        for bad in (
            {"worker": ""},
            {"worker": "w", "lease_seconds": 0},
            {"worker": "w", "lease_seconds": float("nan")},
        ):
            with refused(InvalidArgument, f"a claim with {bad}"):
                await store.claim(**bad)
        await beside.complete(second, data={"n": 1})
        done = await store.get_task(second.id)
        same((done.state, done.completed_at.timestamp()), (TaskState.COMPLETE, START), "the task completed")
        same((done.checkpoint_data, done.claimed_by), ({"n": 1}, None), "its checkpoint, and who has it")


@OURS
async def a_claim_that_has_run_out_is_another_workers(make: Make) -> None:
    clock = VirtualClock()
    async with opened(make, place="one", clock=clock) as store, opened(make, place="one", clock=clock) as beside:
        await stored(store, Task(name="a"))
        task = await store.claim("w1", lease_seconds=30)
        clock.advance(20)
        task = await store.checkpoint(task, data={"step": 5}, lease_seconds=30)
        same((task.checkpoint_data, task.checkpoint_at.timestamp()), ({"step": 5}, clock.wall()), "the checkpoint")
        clock.advance(20)
        same((await beside.claim("w2"), await beside.ready()), (None, []), "a claim while it was renewed")
        clock.advance(11)
        with refused(TaskNotHeld, "the end of a task whose time is over"):
            await store.complete(task)
        same(names(await beside.ready()), ["a"], "the ready tasks once its time is over")
        taken = await beside.claim("w2", lease_seconds=30)
        same((taken.attempts, taken.checkpoint_data), (2, {"step": 5}), "its second attempt, with the checkpoint")
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "checkpoint": lambda: store.checkpoint(task, data={}),
            "complete": lambda: store.complete(task),
            "fail": lambda: store.fail(task.id, "w1", "no"),
            "release": lambda: store.release(task),
            "renew": lambda: store.renew(task, lease_seconds=9),
            "complete by nobody": lambda: store.complete(task.id),
        }
        for name, call in calls.items():
            with refused(TaskNotHeld, f"{name} by the first worker"):
                await call()
        same(await store.get_task(task.id), taken, "the task after that")
        await store.renew(taken, lease_seconds=60)
        clock.advance(59)
        await store.complete(taken.id, "w2")


@OURS
async def a_later_claim_of_the_same_name_is_another(make: Make) -> None:
    clock = VirtualClock()
    async with opened(make, clock=clock) as store:
        await stored(store, Task(name="a"))
        old = await store.claim("w", lease_seconds=1)
        clock.advance(2)
        new = await store.claim("w", lease_seconds=1)
        with refused(TaskNotHeld, "the end by the first claim of that worker"):
            await store.complete(old)
        await store.complete(new)


@OURS
async def a_failed_task_is_tried_again_or_cancelled(make: Make) -> None:
    async with opened(make) as store:
        await stored(store, Task(name="a"))
        for attempt in (1, 2):
            task = await store.claim("w")
            same(task.attempts, attempt, "the attempt")
            failed = await store.fail(task, error=OSError("no network"))
            same((failed.state, failed.last_error), (TaskState.NOT_STARTED, "OSError: no network"), "the failed task")
        task = await store.claim("w")
        released = await store.release(task.id, "w")
        same((released.state, released.claimed_by), (TaskState.NOT_STARTED, None), "the task given back")
        task = await store.claim("w")
        same((await store.fail(task, error="for good", retry=False)).state, TaskState.CANCELLED, "its state at the end")
        same((await store.claim("w"), await store.ready()), (None, []), "what is left")
        with refused(InvalidArgument, "the end of an unknown task"):
            await store.complete(UNKNOWN, "w")


@OURS
async def an_administrator_takes_a_task_away(make: Make) -> None:
    async with opened(make) as store:
        await stored(store, Task(name="a"))
        task = await store.claim("w")
        await store.update(task.id, description="more is known")
        await store.checkpoint(task, data={"n": 1})
        await store.update(task.id, state=TaskState.CANCELLED)
        with refused(TaskNotHeld, "the end of a task that was cancelled"):
            await store.complete(task)
        same((await store.get_task(task.id)).state, TaskState.CANCELLED, "its state")


@OURS
async def workers_take_what_is_most_urgent(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        task_list = await stored(store, *(Task(name=str(n), priority=n) for n in range(6)))
        same((await store.claim("w")).name, "5", "the first claim")
        urgent = Task(name="urgent", priority=99, dependencies=after(task_list.tasks[0]))
        await beside.save(urgent)
        same((await store.claim("w")).name, "4", "the second one")
        await beside.update(task_list.tasks[0].id, state=TaskState.COMPLETE)
        same((await store.claim("w")).name, "urgent", "the third, a dependency complete")
        await beside.update(task_list.tasks[1].id, priority=50)
        same((await store.claim("w")).name, "1", "the fourth, its priority raised")


@OURS
async def no_task_is_claimed_twice(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        tasks = [Task(name=str(n)) for n in range(60)]
        for n, task in enumerate(tasks):
            task.dependencies = after(tasks[n // 2]) if n % 3 == 2 else []
        await stored(store, *tasks)
        claimed: list[str] = []

        async def work(at: TaskStore, worker: str) -> None:
            while True:
                task = await at.claim(worker, lease_seconds=60)
                if task is None:
                    if len(claimed) == len(tasks):
                        return
                    await asyncio.sleep(0.001)  # others have what this one waits for
                    continue
                claimed.append(task.name)
                await at.complete(task)

        await asyncio.gather(*(work(at, f"w{n}") for n, at in enumerate([store, beside] * 4)))
        same(sorted(claimed, key=int), names(tasks), "what was claimed")
        same({task.attempts for task in (await found(store, await stored(store))).values()}, set(), "an empty list")
        same(await beside.ready(), [], "what is left")


# -- sessions, claims of runs


@OURS
async def a_session_is_seen_by_those_who_know_its_id(make: Make) -> None:
    async with opened(make, place="one") as mine, opened(make, place="one") as another:
        task = Task(name="a")
        await mine.save(task, Scope.SESSION)
        same(await mine.get_task(task.id, Scope.SESSION), task, "a task of the session")
        same((await another.ready(scope=Scope.SESSION), await mine.ready()), ([], []), "other sessions, the project")
        claimed = await mine.claim("w", scope=Scope.SESSION)
        await mine.complete(claimed, scope=Scope.SESSION)
        same((await mine.get_task(task.id, Scope.SESSION)).state, TaskState.COMPLETE, "the task of the session")


@OURS
async def a_superseded_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as store:
        task_list = await stored(store, Task(name="a"), Task(name="b"))
        mine = await store.claim("w")
        other = task_list.tasks[1]
        await store.ready()

        async def state() -> Any:
            return await store.get(task_list.id), await store.ready()

        writes: dict[str, Callable[[], Awaitable[Any]]] = {
            "update": lambda: store.update(other.id, description="late"),
            "update_task": lambda: store.update_task(task_list.id, other.id, name="late"),
            "checkpoint": lambda: store.checkpoint(mine, data={"late": 1}),
            "renew": lambda: store.renew(mine, lease_seconds=9),
            "claim": lambda: store.claim("late"),
            "save": lambda: store.save(TaskList(name="late")),
            "save of a task": lambda: store.save(Task(name="late")),
            "complete": lambda: store.complete(mine),
            "fail": lambda: store.fail(mine),
            "release": lambda: store.release(mine),
            "delete": lambda: store.delete(task_list.id),
        }
        await fenced(store.documents(Scope.PROJECT).commits, writes, state)


async def claims_are_not_supported(make: Make) -> None:
    """What a store of one's own says that brings no more than it has to."""
    async with opened(make) as store:
        task_list = await stored(store, Task(name="a"))
        task = task_list.tasks[0]
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "update": lambda: store.update(task.id, state=TaskState.COMPLETE),
            "update of another field": lambda: store.update(task.id, task_list_id=task_list.id, priority=1),
            "ready": store.ready,
            "claim": lambda: store.claim("w"),
            "renew": lambda: store.renew(task, "w", lease_seconds=1),
            "checkpoint": lambda: store.checkpoint(task, "w"),
            "complete": lambda: store.complete(task, "w"),
            "fail": lambda: store.fail(task, "w"),
            "release": lambda: store.release(task, "w"),
        }
        for name, call in calls.items():
            with refused(NotSupported, name):
                await call()
        same(await store.get(task_list.id), task_list, "the list after that")
