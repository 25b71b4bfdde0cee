"""The to-do tool: its actions, what it is told wrong, and that a repeated call has no second effect."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from agent_runtime_core.errors import ToolFailed
from agent_runtime_core.interfaces import RunContext
from agent_runtime_core.persistence import (
    InMemoryMemoryStore,
    InMemoryTaskStore,
    PersistenceConfig,
    PersistenceManager,
    Task,
    TaskList,
)
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.testing import MockRunContext
from agent_runtime_core.tools import TodoStoreTool, ToolRegistry
from tests.contract.third_party.plain_records import PlainTasks
from tests.support.runs import Script


class Ctx(MockRunContext):
    """A context inside a step of that key."""

    def __init__(self, stores: Any = None, key: str | None = None, conversation_id: UUID | None = None) -> None:
        super().__init__(conversation_id=conversation_id)
        self.idempotency_key = key
        if stores is not None:
            self.persistence = stores


async def do(tool: TodoStoreTool, action: str, ctx: Any = None, **given: Any) -> Any:
    result = await tool.execute(action, ctx=ctx, **given)
    assert result.success, result.error
    return result.output


async def texts(tool: TodoStoreTool, ctx: Any = None) -> list[tuple[int | None, str, bool]]:
    return [(each["number"], each["text"], each["done"]) for each in await do(tool, "list", ctx)]


@pytest.mark.sentence("003", "`TodoStoreTool`: add, list, complete, delete with state management")
async def test_to_dos_come_and_go() -> None:
    tool = TodoStoreTool()
    assert await do(tool, "list") == []
    milk = await do(tool, "add", text=" buy milk ")
    assert milk == {"id": milk["id"], "number": 1, "text": "buy milk", "done": False}
    await do(tool, "add", text="call Bob")
    assert await do(tool, "get", todo_id="#1") == await do(tool, "get", todo_id=milk["id"].upper()) == milk
    assert await do(tool, "complete", text="BUY milk") == {**milk, "done": True}
    assert await do(tool, "complete", todo_id="1") == {**milk, "done": True}
    assert (await do(tool, "delete", text="bob"))["number"] == 2
    assert (await do(tool, "add", text="a third"))["number"] == 3, "a number is given once"
    assert await texts(tool) == [(1, "buy milk", True), (3, "a third", False)]


@pytest.mark.sentence("003", "`TodoStoreTool`: add, list, complete, delete with state management")
@pytest.mark.parametrize(
    ("action", "given", "says"),
    [
        ("add", {}, "text must be the text of the new to-do, got"),
        ("add", {"text": "  "}, "text must be the text of the new to-do, got"),
        ("get", {}, "must identify the to-do"),
        ("get", {"todo_id": "9"}, "unknown to-do '9'. Known: #1 'buy milk', #2 'buy bread'."),
        ("complete", {"text": "by milk"}, "Did you mean #1 'buy milk'?"),
        (
            "delete",
            {"text": "buy"},
            "text must match one to-do, got 'buy', which matches #1 'buy milk', #2 'buy bread'. Pass todo_id",
        ),
        ("destroy", {}, "action must be one of add, list, get, complete, delete, got 'destroy'"),
    ],
)
async def test_what_cannot_be_done_is_told(action: str, given: dict[str, Any], says: str) -> None:
    tool = TodoStoreTool()
    await do(tool, "add", text="buy milk")
    await do(tool, "add", text="buy bread")
    result = await tool.execute(action, **given)
    assert not result.success
    assert result.output is None
    assert says in (result.error or "")
    assert len(await do(tool, "list")) == 2


async def test_a_text_means_the_one_that_is_left_to_do() -> None:
    tool = TodoStoreTool()
    for _ in range(2):
        await do(tool, "add", text="water the plants")
    assert (await tool.execute("complete", text="water the plants")).success is False
    await do(tool, "complete", todo_id="1")
    assert (await do(tool, "complete", text="water the plants"))["number"] == 2


async def test_none_is_no_number_of_one_that_another_hand_put_there() -> None:
    tool, stores = TodoStoreTool(), PersistenceManager.open("memory://")
    conversation = uuid4()
    task = Task(name="by hand")
    await stores.tasks.save(TaskList(name="list", conversation_id=conversation, tasks=[task]))
    refused = await tool.execute("delete", todo_id="None", ctx=Ctx(stores, None, conversation))
    assert (refused.success, refused.error) == (False, f"unknown to-do 'None'. Known: {task.id} 'by hand'.")
    await stores.close()


async def test_registered_it_is_a_tool_like_others() -> None:
    registry = ToolRegistry()
    registry.register(TodoStoreTool())
    made = registry.get("todo_store")
    assert made is not None
    assert made.has_side_effects
    ctx = Ctx()
    assert (await registry.execute("todo_store", {"action": "add", "text": "x"}, ctx))["number"] == 1
    with pytest.raises(ToolFailed, match="unknown to-do 'y'"):
        await registry.execute("todo_store", {"action": "get", "text": "y"}, ctx)
    assert "ctx" not in made.parameters["properties"]


async def test_they_lie_where_the_run_keeps_its_tasks(tmp_path: Path) -> None:
    async with PersistenceManager.open(tmp_path / "a.db") as stores:
        await do(TodoStoreTool(), "add", Ctx(stores), text="kept")
    async with PersistenceManager.open(tmp_path / "a.db") as stores:
        assert await texts(TodoStoreTool(), Ctx(stores)) == [(1, "kept", False)]
        assert await texts(TodoStoreTool()) == []


async def test_a_conversation_has_its_own_list(tmp_path: Path) -> None:
    one, other = uuid4(), uuid4()
    async with PersistenceManager.open(tmp_path / "a.db") as stores:
        await do(TodoStoreTool(), "add", Ctx(stores, conversation_id=one), text="here")
        theirs = TaskList(name="Theirs", conversation_id=other, tasks=[Task(name="by another hand")])
        await stores.tasks.save(theirs)
        added = await do(TodoStoreTool(), "add", Ctx(stores, conversation_id=other), text="there")
        assert await texts(TodoStoreTool(), Ctx(stores, conversation_id=one)) == [(1, "here", False)]
        told = await texts(TodoStoreTool(), Ctx(stores, conversation_id=other))
        assert told == [(None, "by another hand", False), (1, "there", False)]
        assert await texts(TodoStoreTool(), Ctx(stores)) == []
        found = await stores.tasks.get_by_conversation(other)
        assert found is not None
        assert (found.id, [str(each.id) for each in found.tasks][1:]) == (theirs.id, [added["id"]])


async def test_repeated_under_one_key_it_happens_once(tmp_path: Path) -> None:
    async with PersistenceManager.open(tmp_path / "a.db") as stores:
        tool = TodoStoreTool()
        first = await do(tool, "add", Ctx(stores, "run:1"), text="once")
        assert await do(tool, "add", Ctx(stores, "run:1"), text="once") == first
        second = await do(tool, "add", Ctx(stores, "run:2"), text="once")
        assert (first["id"] != second["id"], second["number"]) == (True, 2)
        gone = await do(tool, "delete", Ctx(stores, "run:3"), todo_id="1")
        assert await do(tool, "delete", Ctx(stores, "run:3"), todo_id="1") == gone == first
        assert not (await tool.execute("delete", todo_id="1", ctx=Ctx(stores, "run:4"))).success
        assert await texts(tool, Ctx(stores)) == [(2, "once", False)]


async def test_a_delete_that_was_cut_off_behind_its_note_is_finished(tmp_path: Path) -> None:
    async with PersistenceManager.open(tmp_path / "a.db") as stores:
        tool, ctx = TodoStoreTool(), Ctx(stores, "run:1")
        added = await do(tool, "add", Ctx(stores), text="gone")
        there = await stores.tasks.get_by_conversation(uuid4())
        assert there is None
        save = stores.tasks.save

        async def cut(*_: Any) -> None:
            raise OSError("cut off")

        vars(stores.tasks)["save"] = cut
        with pytest.raises(OSError, match="cut off"):
            await tool.execute("delete", todo_id="1", ctx=ctx)
        vars(stores.tasks)["save"] = save
        assert await do(tool, "delete", ctx, todo_id="1") == added
        assert await texts(tool, ctx) == []


async def test_many_at_once_are_all_kept_and_numbered(tmp_path: Path) -> None:
    async with PersistenceManager.open(tmp_path / "a.db") as stores, PersistenceManager.open(tmp_path / "a.db") as more:
        adding = [do(TodoStoreTool(), "add", Ctx((stores, more)[i % 2]), text=f"to-do {i}") for i in range(12)]
        numbers = [each["number"] for each in await asyncio.gather(*adding)]
        assert sorted(numbers) == list(range(1, 13))
        assert sorted(each[1] for each in await texts(TodoStoreTool(), Ctx(stores))) == sorted(
            f"to-do {i}" for i in range(12)
        )


async def test_in_a_run_it_finds_the_runs_stores(tmp_path: Path) -> None:
    tool = TodoStoreTool()

    async def body(ctx: RunContext) -> Any:
        async def add() -> Any:
            return (await tool.execute("add", text="from a run", ctx=ctx)).output

        return await ctx.step("add", add)

    async with AgentRunner.open(tmp_path / "a.db") as runner:
        result = await runner.execute(Script(body), "r")
        stored = Ctx(runner.persistence)
        assert await do(tool, "get", stored, todo_id="1") == result.final_output["value"]


async def test_a_text_that_cannot_be_stored_is_told_and_nothing_is_added() -> None:
    todos = TodoStoreTool()
    refused = await todos.execute("add", text="x" * 20_000_000)
    assert (refused.success, refused.output) == (False, None)
    assert "larger than" in (refused.error or "")
    assert (await todos.execute("list")).output == []


async def test_whole_lists_are_read_only_to_find_a_to_do_by_its_number_or_text() -> None:
    read: list[str] = []

    class Counted(InMemoryTaskStore):
        async def save(self, *args: Any, **kwargs: Any) -> None:
            read.append("save")
            await super().save(*args, **kwargs)

        async def get(self, *args: Any, **kwargs: Any) -> TaskList | None:
            read.append("get")
            return await super().get(*args, **kwargs)

        async def get_by_conversation(self, *args: Any, **kwargs: Any) -> TaskList | None:
            read.append("get_by_conversation")
            return await super().get_by_conversation(*args, **kwargs)

    stores = PersistenceManager(PersistenceConfig(task_store=Counted(), memory_store=InMemoryMemoryStore()))
    tool = TodoStoreTool()
    for conversation in (None, uuid4()):
        for key in ("run:1", None):
            ctx = Ctx(stores, key, conversation)
            added = await do(tool, "add", ctx, text="water the plants")
            assert await do(tool, "get", ctx, todo_id=added["id"]) == added
            await do(tool, "complete", ctx, todo_id=added["id"])
            assert read == []
            await do(tool, "get", ctx, todo_id=str(added["number"]))
            await do(tool, "complete", ctx, todo_id=str(added["number"]))
            assert read == ["get", "get"]
            read.clear()
    await stores.close()


async def test_a_task_store_of_somebody_else_is_enough() -> None:
    stores = PersistenceManager(PersistenceConfig(task_store=PlainTasks(), memory_store=InMemoryMemoryStore()))
    tool, conversation = TodoStoreTool(), uuid4()
    for ctx in (Ctx(stores, "run:1"), Ctx(stores, "run:1", conversation)):
        for _ in range(2):
            added = await do(tool, "add", ctx, text="buy milk")
        await do(tool, "add", Ctx(stores, None, ctx.conversation_id), text="call Bob")
        assert await do(tool, "get", ctx, todo_id=added["id"]) == added
        await do(tool, "complete", ctx, todo_id="1")
        assert (await do(tool, "delete", ctx, text="bob"))["number"] == 2
        assert await texts(tool, ctx) == [(1, "buy milk", True)]
    await stores.close()


@pytest.mark.sentence("003", "`TodoStoreTool.todos` has the to-dos")
async def test_the_object_shows_the_to_dos_that_it_keeps() -> None:
    tool = TodoStoreTool()
    assert tool.todos == {}
    added = await do(tool, "add", text="call Bob")
    assert tool.todos == {added["id"]: {"id": added["id"], "number": 1, "text": "call Bob", "done": False}}
    await do(tool, "complete", todo_id=added["id"])
    assert tool.todos[added["id"]]["done"]
    await do(tool, "add", MockRunContext(), text="of a run")
    assert list(tool.todos) == [added["id"]]
    await do(tool, "delete", todo_id=added["id"])
    assert tool.todos == {}
