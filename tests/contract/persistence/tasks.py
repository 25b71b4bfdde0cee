"""Cases for what the task stores of this package do in addition to the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agent_runtime_core.errors import InvalidArgument, NotSupported, TaskNotHeld, UnserialisableResult
from agent_runtime_core.persistence.base.tasks import TaskStore
from agent_runtime_core.persistence.models import Scope, Task, TaskList, TaskState, new_id
from agent_runtime_core.testing.clock import START, VirtualClock
from agent_runtime_core.testing.contracts.checks import Cases, opened, refused, same
from agent_runtime_core.testing.contracts.persistence.tasks import (
    NAIVE,
    NOON,
    UNKNOWN,
    Case,
    Make,
    after,
    found,
    names,
    stored,
)
from tests.contract.persistence.fixtures import fenced

BUILT_IN: Cases[Case] = Cases()


@BUILT_IN
async def tasks_saved_alone_at_once_make_their_list_once(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        given, tasks = TaskList(name="list"), [Task(name=str(n)) for n in range(12)]
        await asyncio.gather(*((store, beside)[n % 2].save_task(given, task) for n, task in enumerate(tasks)))
        same({task.name for task in (await store.get(given.id)).tasks}, {str(n) for n in range(12)}, "the tasks")


# -- single tasks


@BUILT_IN
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
        same((await store.get(lonely.id)).state, TaskState.COMPLETE, "the task read by its id")
        same(await store.get(UNKNOWN), None, "an unknown id")


@BUILT_IN
async def tasks_saved_at_once_share_the_list(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        conversation = new_id()
        tasks = [Task(name=str(n), conversation_id=conversation) for n in range(12)]
        await asyncio.gather(*(to.save(task) for task, to in zip(tasks, [store, beside] * 6, strict=True)))
        theirs = await store.get_by_conversation(conversation)
        same(sorted(map(int, names(theirs.tasks))), list(range(12)), "the tasks of the conversation")


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
async def two_at_once_close_no_circle(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        for n in range(5):
            ring = [Task(name=f"{n}.{at}") for at in range(4)]
            await stored(store, *ring)
            answers = await asyncio.gather(
                *(
                    to.update(task.id, dependencies=after(ring[(at + 1) % 4]))
                    for at, (task, to) in enumerate(zip(ring, [store, beside] * 2, strict=True))
                ),
                return_exceptions=True,
            )
            same(sum(isinstance(each, InvalidArgument) for each in answers), 1, "how many were refused")
            same(sum(each is None for each in answers), 3, "how many were not")


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
async def a_session_is_seen_by_those_who_know_its_id(make: Make) -> None:
    async with opened(make, place="one") as mine, opened(make, place="one") as another:
        task = Task(name="a")
        await mine.save(task, Scope.SESSION)
        same(await mine.get_task(task.id, Scope.SESSION), task, "a task of the session")
        same((await another.ready(scope=Scope.SESSION), await mine.ready()), ([], []), "other sessions, the project")
        claimed = await mine.claim("w", scope=Scope.SESSION)
        await mine.complete(claimed, scope=Scope.SESSION)
        same((await mine.get_task(task.id, Scope.SESSION)).state, TaskState.COMPLETE, "the task of the session")


@BUILT_IN
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
    """For a store that writes only the abstract methods: not among BUILT_IN."""
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
