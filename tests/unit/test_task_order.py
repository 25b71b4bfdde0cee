"""Which tasks are ready, circles of dependencies, and the index and the log that workers read instead of all tasks."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.persistence.backends.memory import InMemoryPlace
from agent_runtime_core.persistence.backends.sqlite import SQLiteTaskStore
from agent_runtime_core.persistence.document_stores import base
from agent_runtime_core.persistence.document_stores.base import ChangeLog
from agent_runtime_core.persistence.document_stores.tasks import ReadyTasks, StoredTasks
from agent_runtime_core.persistence.documents.base import Collection, Document, Entry, Query
from agent_runtime_core.persistence.documents.memory import MemoryDocuments
from agent_runtime_core.persistence.model_codec import text_of
from agent_runtime_core.persistence.models import Scope, Task, TaskList, TaskState, find_cycle, ready_of
from agent_runtime_core.testing.clock import VirtualClock


def _reaches_itself(edges: dict[str, list[str]]) -> bool:
    """By following every path for as many steps as there are tasks."""
    reached = {key: set(after) for key, after in edges.items()}
    for _ in edges:
        for after in reached.values():
            after |= {far for near in tuple(after) for far in edges.get(near, ())}
    return any(key in after for key, after in reached.items())


def test_circles_are_found_where_there_are_any() -> None:
    chance, with_one = random.Random(3), 0
    for _ in range(600):
        count = chance.randrange(1, 9)
        edges = {str(n): [str(chance.randrange(count + 1)) for _ in range(chance.randrange(3))] for n in range(count)}
        found = find_cycle(edges, lambda key, edges=edges: edges.get(key, ()))  # type: ignore[misc]
        assert bool(found) == _reaches_itself(edges), edges
        with_one += bool(found)
        for key, follower in zip(found, [*found[1:], *found[:1]], strict=True):
            assert follower in edges[key], f"{found} is no cycle of {edges}"
    assert 100 < with_one < 500


def test_a_long_chain_is_no_circle_and_ends() -> None:
    assert find_cycle(["0"], lambda key: [str(int(key) + 1)] if int(key) < 100_000 else []) == []


class _Counted(MemoryDocuments):
    """Counts the documents that are read."""

    read_: int = 0

    async def read(self, what: str, *args: object) -> object:
        found = await super().read(what, *args)
        if isinstance(found, list):
            wanted = [each for each in found if isinstance(each, Document)]
            kind = args[0].kind if isinstance(args[0], Query) else args[1]
            self.read_ += len(wanted) if kind == "task" else 0
        return found


class _Store(InMemoryPlace, StoredTasks):
    def __init__(self) -> None:
        super().__init__(clock=VirtualClock())
        self.counted = _Counted(clock=self.clock)
        self.home.keep_in(self.counted)


async def test_a_claim_does_not_read_all_tasks_again() -> None:
    store = _Store()
    await store.save(TaskList(name="work", tasks=[Task(name=str(n)) for n in range(300)]))
    first = await store.claim("w", lease_seconds=60)
    before = store.counted.read_
    for _ in range(100):
        task = await store.claim("w", lease_seconds=60)
        assert task is not None
        await store.complete(task)
    assert first is not None
    assert store.counted.read_ - before <= 2 * 100, "one for each end, and none for a claim"


def _document(task: Task, version: int = 1) -> Document:
    return Document(str(task.id), text_of(task), version, 1.0, "list")


async def test_the_index_has_the_tasks_that_are_ready_in_a_list() -> None:
    chance = random.Random(11)
    for _ in range(60):
        tasks = [Task(name=str(n), priority=chance.randrange(3)) for n in range(8)]
        index, now = ReadyTasks(), 1_000.0
        added = dict[str, Task]()
        for version in range(1, 30):
            task = chance.choice(tasks)
            task.state = chance.choice(list(TaskState))
            task.dependencies = [
                each.id for each in chance.sample(tasks[: tasks.index(task)], k=min(2, tasks.index(task)))
            ]
            await index.add([_document(task, version)])
            added[str(task.id)] = task
            if chance.random() < 0.1:
                index.drop(added.popitem()[0])
            expected = [str(each.id) for each in ready_of([each for each in tasks if str(each.id) in added], now)]
            assert [each.key for each in index.ready("list", now)] == expected
            assert [each.key for each in index.ready(None, now)] == expected
            assert list(index.ready("another list", now)) == []


async def test_the_log_has_what_changed_or_says_that_it_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "KEPT", 10)
    table = Collection(MemoryDocuments(), "project", "thing")
    mine, theirs = ChangeLog(table), ChangeLog(table)
    assert await mine.since(None) == (set(), None)

    async def change(*keys: str) -> None:
        await theirs.trim(await table.write(*theirs.note(keys)))

    await change("a")
    assert await mine.since(None) is None
    cursor = await mine.last()
    await change("b")
    await change("c", "d")
    changes = await mine.since(cursor)
    assert changes is not None
    assert (changes[0], await mine.since(changes[1])) == ({"b", "c", "d"}, (set(), changes[1]))
    for n in range(40):
        await change(str(n))
    assert len(await table.documents.read("find", Query("project", "thing_change", 0.0))) <= 20, "old entries stay"
    assert await mine.since(cursor) is None, "a reader that is too far back must read everything again"
    many = [str(n) for n in range(2500)]
    cursor = await mine.last()
    await change(*many)
    assert await mine.since(cursor) == (set(many), await mine.last())


async def test_a_list_that_is_deleted_takes_along_what_was_added_meanwhile() -> None:
    store, late = _Store(), [Task(name="late")]
    task_list = TaskList(name="work", tasks=[Task(name="a")])
    await store.save(task_list)
    tasks = store.home.table(Scope.PROJECT, "task")
    find = tasks.documents.read

    async def found(what: str, *args: object) -> object:
        answer = await find(what, *args)
        while what == "find" and late:
            task = late.pop()
            await tasks.write(tasks.put(Entry(str(task.id), text_of(task), str(task_list.id))))
        return answer

    tasks.documents.read = found  # type: ignore[method-assign]
    assert await store.delete(task_list.id)
    tasks.documents.read = find  # type: ignore[method-assign]
    assert await tasks.find(str(task_list.id)) == []


async def test_an_index_that_was_read_while_its_own_store_wrote_catches_up() -> None:
    store, beside = _Store(), _Store()
    beside.home.keep_in(store.counted)
    task = Task(name="a")
    await store.save(task)
    assert await store.ready() == [task]
    await beside.update(task.id, description="theirs")
    read, reading, go_on = store.counted.read, asyncio.Event(), asyncio.Event()

    async def slow(what: str, *args: object) -> object:
        found = await read(what, *args)
        if what == "get" and not reading.is_set():
            reading.set()
            await go_on.wait()
        return found

    store.counted.read = slow  # type: ignore[method-assign]
    refresh = asyncio.ensure_future(store.ready())
    await reading.wait()
    await store.update(task.id, state=TaskState.CANCELLED)
    assert await store.ready() == []
    go_on.set()
    assert [each.description for each in await refresh] == ["theirs"], "what it had read before the update"
    assert await store.ready() == []


async def test_coroutines_that_claim_at_once_try_different_tasks() -> None:
    store = _Store()
    await store.save(TaskList(name="work", tasks=[Task(name=str(n)) for n in range(50)]))
    commits, commit = 0, store.counted.engine.commit

    async def counted(guard: Any, ops: Any) -> list[Any]:
        nonlocal commits
        commits += 1
        await asyncio.sleep(0)
        return await commit(guard, ops)

    store.counted.engine.commit = counted  # type: ignore[method-assign]
    claimed = await asyncio.gather(*(store.claim(f"w{n}") for n in range(50)))
    assert sorted(int(task.name) for task in claimed if task is not None) == list(range(50))
    assert commits == 50


async def test_a_task_that_has_expired_is_not_claimed(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = SQLiteTaskStore(tmp_path / "a.db", session_id="s", session_ttl=100.0, clock=clock)
    await store.save(Task(name="a"), Scope.SESSION)
    assert [each.name for each in await store.ready(scope=Scope.SESSION)] == ["a"]
    clock.advance(100)
    assert await store.claim("w", scope=Scope.SESSION) is None
    await store.close()
