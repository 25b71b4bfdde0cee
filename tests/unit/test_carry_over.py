"""The files of version 0.5.2: refused until the command has carried them over, and then all there."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core.cli.main import main
from agent_runtime_core.errors import InvalidArgument, StorageOutdated
from agent_runtime_core.persistence.backends.files import FilePlace
from agent_runtime_core.persistence.carry_over import carry_over
from agent_runtime_core.persistence.document_stores import base as kinds
from agent_runtime_core.persistence.document_stores.conversations import StoredConversations
from agent_runtime_core.persistence.document_stores.knowledge import StoredMemory, StoredPreferences
from agent_runtime_core.persistence.document_stores.tasks import StoredTasks
from agent_runtime_core.persistence.models import (
    Conversation,
    ConversationMessage,
    Scope,
    Task,
    TaskList,
    TaskState,
    ToolCall,
)
from tests.support.cases import for_each
from tests.support.store_0_5_2 import LIST, OTHER, RUN, TALK, id_of, message, write, write_old_store

ALL = {"memory": 2, "preference": 2, "conversation": 2, "message": 4, "task_list": 1, "task": 2}


class Memory(FilePlace, StoredMemory):
    """What an agent remembers, in files."""


class Preferences(FilePlace, StoredPreferences):
    """Preferences in files."""


class Conversations(FilePlace, StoredConversations):
    """Conversations in files."""


class Tasks(FilePlace, StoredTasks):
    """Tasks in files."""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def naive(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


def snapshot(directory: Path) -> dict[str, bytes]:
    found = [each for each in directory.rglob("*") if each.is_file() and "v1" not in each.relative_to(directory).parts]
    return {str(each.relative_to(directory)): each.read_bytes() for each in found}


async def found_whole(project: Path, scope: Scope = Scope.PROJECT, *, messages: int = 4) -> None:
    memory, preferences = Memory(project), Preferences(project)
    assert await memory.list_keys(scope) == ["a/b", "theme"]
    assert [await memory.get(key, scope) for key in ("a/b", "theme")] == ["slash", {"dark": True}]
    assert await preferences.get_all(scope) == {"language": "de", "$": ["x", None]}
    conversations = Conversations(project)
    talk, other = [await conversations.get(each.id, scope) for each in await conversations.list_conversations(scope)]
    assert talk is not None
    assert other is not None
    assert (talk.id, other.id) == (UUID(TALK), UUID(OTHER))
    sent = [each.id for each in talk.messages]
    assert sent == [UUID(id_of(number)) for number in range(1, messages + 1)]
    call = ToolCall(id="call_1", name="look", arguments={"at": "x"}, timestamp=naive("2025-03-04T05:06:07"))
    assert talk.messages[1] == ConversationMessage(
        id=UUID(id_of(2)), role="assistant", content="", timestamp=naive("2025-03-04T05:06:02.000007"),
        tool_calls=[call], model="m", usage={"total_tokens": 7},
    )  # fmt: skip
    assert talk.messages[2].content == [{"type": "text", "text": "found"}]
    talk.messages = []
    assert talk == Conversation(
        id=UUID(TALK), title="Trains", agent_key="guide", summary="of trains", metadata={"a": [1, None]},
        created_at=naive("2025-03-04T05:06:00"), updated_at=naive("2025-03-05T05:06:00.123456"),
    )  # fmt: skip
    assert other.updated_at == dt.datetime.fromisoformat("2025-03-03T00:00:00+02:00")
    assert other.updated_at.utcoffset() == dt.timedelta(hours=2)
    assert [each.id for each in await conversations.list_conversations(scope, agent_key="guide")] == [UUID(TALK)]
    tasks = await Tasks(project).get_by_conversation(UUID(TALK), scope)
    at: dict[str, Any] = {"created_at": naive("2025-03-04T05:06:00"), "updated_at": naive("2025-03-04T05:06:09")}
    buy, go = UUID(id_of(901)), UUID(id_of(902))
    assert tasks == TaskList(
        id=UUID(LIST), name="Journey", conversation_id=UUID(TALK), run_id=UUID(RUN),
        created_at=naive("2025-03-04T05:06:00"), updated_at=naive("2025-03-04T05:06:08"),
        tasks=[
            Task(id=buy, name="buy", state=TaskState.COMPLETE, metadata={"price": 1.5}, **at),
            Task(id=go, name="go", parent_id=buy, **at),
        ],
    )  # fmt: skip


@pytest.mark.parametrize("what", ["memory", "conversations", "tasks", "preferences.json"])
async def test_it_is_refused_until_it_was_carried_over(tmp_path: Path, what: str) -> None:
    directory = write_old_store(tmp_path / "a project")
    for each in directory.iterdir():
        if each.name != what:
            each.rename(tmp_path / each.name)
    before = snapshot(directory)
    memory = Memory(tmp_path / "a project")
    said = rf"{directory} .*agent-runtime carry-over '{tmp_path}/a project'"
    for _ in range(2):
        with pytest.raises(StorageOutdated, match=said):
            await memory.get("theme")
        with pytest.raises(StorageOutdated, match=said):
            await memory.set("theme", 1)
    assert snapshot(directory) == before
    assert not (directory / "v1").exists()
    await carry_over(tmp_path / "a project")
    assert await memory.get("unknown") is None


async def test_all_of_it_is_there_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_old_store(tmp_path)
    before = snapshot(directory)
    result = await carry_over(tmp_path)
    assert (result.carried, result.kept, result.unreadable) == (ALL, {}, {})
    assert snapshot(directory) == before
    await found_whole(tmp_path)
    again = await carry_over(tmp_path)
    assert (again.carried, again.kept) == ({}, ALL)
    await found_whole(tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_old_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["carry-over"]) == 0
    said = f"{directory}: 2 conversation, 2 memory, 4 message, 2 preference, 2 task, 1 task list carried over\n"
    assert capsys.readouterr() == (said, "")
    assert main(["carry-over", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"directory": str(directory), "carried": {}, "kept": ALL, "unreadable": {}, "opens": True}
    assert main(["carry-over", str(tmp_path / "nowhere")]) == 2
    assert "no files of version 0.5.2" in capsys.readouterr().err


async def test_the_home_directory_is_that_of_the_user_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.2 kept GLOBAL there, and PROJECT of who worked there."""
    write_old_store(tmp_path / "home")
    with pytest.raises(StorageOutdated):
        await Preferences(tmp_path / "project").get_all()
    await carry_over(tmp_path / "home")
    await found_whole(tmp_path / "project", Scope.GLOBAL)
    await found_whole(tmp_path / "home", Scope.PROJECT)
    assert await Preferences(tmp_path / "project").get_all(Scope.PROJECT) == {}


TORN: dict[str, Callable[[str], Any]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[:-3],
    "no object": lambda text: "[1]",
    "bytes": lambda text: "\udcff",
}


@pytest.mark.parametrize("how", TORN)
@pytest.mark.parametrize(
    "name", ["memory/theme.json", f"conversations/{TALK}.json", f"tasks/{LIST}.json", "preferences.json"]
)
def test_a_torn_file_is_named_and_left_and_the_others_are_carried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, name: str
) -> None:
    directory = write_old_store(tmp_path)
    whole = (directory / name).read_text()
    (directory / name).write_text(TORN[how](whole), errors="surrogateescape")
    before = snapshot(directory)
    assert main(["carry-over", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "carried over" in out
    assert f"{directory}/{name} cannot be read and is not modified" in err
    assert "run the command again" in err
    assert snapshot(directory) == before
    (directory / name).write_text(whole)
    assert main(["carry-over", str(tmp_path)]) == 0
    assert "already present" in capsys.readouterr().out


async def test_a_store_with_a_torn_file_stays_closed(tmp_path: Path) -> None:
    directory = write_old_store(tmp_path)
    (directory / "preferences.json").write_text('{"language": "d')
    assert (await carry_over(tmp_path)).unreadable
    with pytest.raises(StorageOutdated):
        await Memory(tmp_path).get("theme")
    (directory / "preferences.json").rename(tmp_path / "torn.json")
    assert not (await carry_over(tmp_path)).unreadable
    assert await Memory(tmp_path).get("theme") == {"dark": True}
    assert await Preferences(tmp_path).get_all(Scope.PROJECT) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory/x.json", {"value": 1}),
        ("memory/x.json", {"key": 1, "value": 1}),
        ("memory/x.json", {"key": "x", "value": float("nan")}),
        ("conversations/x.json", {"id": "x"}),
        ("conversations/x.json", {"id": TALK, "messages": [1]}),
        ("conversations/x.json", {"id": TALK, "messages": [{"id": id_of(1)}]}),
        ("conversations/x.json", {"id": TALK, "updated_at": "yesterday"}),
        ("tasks/x.json", {"id": LIST, "tasks": [{"id": id_of(1), "name": "x", "state": "else"}]}),
    ],
)
async def test_what_says_no_such_thing_is_left(tmp_path: Path, name: str, value: Any) -> None:
    write(tmp_path / ".agent_runtime" / name, value)
    assert list((await carry_over(tmp_path)).unreadable) == [name]


async def test_what_is_newer_is_not_overwritten(tmp_path: Path) -> None:
    directory = write_old_store(tmp_path)
    await carry_over(tmp_path)
    conversations = Conversations(tmp_path)
    talk = await conversations.get(UUID(TALK))
    assert talk is not None
    talk.title = "Trains and buses"
    await conversations.save(talk)
    await conversations.add_message(talk.id, ConversationMessage(role="user", content="new"))
    await Memory(tmp_path).set("theme", "light")
    old = json.loads((directory / "conversations" / f"{TALK}.json").read_text())
    late = {**old["messages"][0], "id": id_of(77), "content": "late"}
    write(directory / "conversations" / f"{TALK}.json", {**old, "messages": [*old["messages"], late]})
    result = await carry_over(tmp_path)
    assert result.carried == {"message": 1}
    found = await conversations.get(talk.id)
    assert found is not None
    assert found.title == "Trains and buses"
    assert [each.content for each in found.messages][-2:] == ["new", "late"]
    assert await Memory(tmp_path).get("theme") == "light"


async def test_what_models_have_no_field_for_is_kept_beside(tmp_path: Path) -> None:
    talk = {
        "id": TALK,
        "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "mood": "glad"}],
    }
    write(tmp_path / ".agent_runtime/conversations/x.json", talk)
    write(tmp_path / ".agent_runtime/tasks/notes.txt", "no file of a store")
    for carried in (True, False):
        result = await carry_over(tmp_path)
        assert result.carried == ({"conversation": 1, "message": 2} if carried else {})
    [first, second] = await Conversations(tmp_path).get_messages(UUID(TALK))
    assert (first.content, second.content) == ("a", "b")
    assert second.metadata == {"0.5.2": {"mood": "glad"}}
    assert first.id != second.id


async def test_a_name_that_came_twice_loses_no_message(tmp_path: Path) -> None:
    same = {"id": id_of(1), "role": "user"}
    talk = {"id": TALK, "messages": [{**same, "content": "a"}, {**same, "content": "b"}]}
    write(tmp_path / ".agent_runtime/conversations/x.json", talk)
    await carry_over(tmp_path)
    found = await Conversations(tmp_path).get_messages(UUID(TALK))
    assert [each.content for each in found] == ["a", "b"]


async def test_what_was_written_once_is_carried_however_large(tmp_path: Path) -> None:
    large = "x" * 17 * 1024 * 1024  # more than a value may have today
    write(tmp_path / ".agent_runtime/memory/a.json", {"key": "a", "value": large})
    write(tmp_path / ".agent_runtime/conversations/x.json", {"id": TALK, "messages": [{"role": "u", "content": large}]})
    assert not (await carry_over(tmp_path)).unreadable
    assert await Memory(tmp_path).get("a") == large
    [message] = await Conversations(tmp_path).get_messages(UUID(TALK))
    assert message.content == large


async def test_an_empty_directory_is_no_old_store(tmp_path: Path) -> None:
    (tmp_path / ".agent_runtime" / "memory").mkdir(parents=True)
    assert await Memory(tmp_path).get("theme") is None
    with pytest.raises(InvalidArgument, match="no files of version"):
        await carry_over(tmp_path)


async def test_kinds_are_those_that_the_stores_use(tmp_path: Path) -> None:
    conversations, talk = (
        Conversations(tmp_path),
        Conversation(messages=[ConversationMessage(role="user", content="a")]),
    )
    await conversations.save(talk)
    await Memory(tmp_path).set("k", 1)
    await Preferences(tmp_path).set("k", 1, Scope.PROJECT)
    await Tasks(tmp_path).save(TaskList(name="l", tasks=[Task(name="t")]))
    made = {each.name for each in (tmp_path / ".agent_runtime/v1/documents/project").iterdir()}
    assert {kinds.MEMORY, kinds.PREFERENCE, kinds.CONVERSATION, kinds.MESSAGE, kinds.TASK_LIST, kinds.TASK} <= made


async def test_tasks_that_two_lists_have_are_in_both(tmp_path: Path) -> None:
    directory = write_old_store(tmp_path)
    old = json.loads((directory / "tasks" / f"{LIST}.json").read_text())
    write(directory / "tasks" / "again.json", {**old, "id": OTHER, "name": "The same once more"})
    carried = (await carry_over(tmp_path)).carried
    assert (carried["task_list"], carried["task"]) == (2, 4)
    again = await carry_over(tmp_path)
    assert (again.carried, again.kept["task"]) == ({}, 4)
    tasks = Tasks(tmp_path)
    lists = [await tasks.get(UUID(each)) for each in (LIST, OTHER)]
    buy, go = ([each.tasks[n] for each in lists if each is not None] for n in (0, 1))
    assert [each.name for each in buy + go] == ["buy", "buy", "go", "go"]
    assert {each.parent_id for each in go} == {each.id for each in buy}
    assert len({each.id for each in buy}) == 2
    await tasks.close()


WRONG: dict[str, list[Any]] = {
    **{key: [None, 5, "yesterday", ""] for key in ("created_at", "updated_at")},
    **{key: [1, "x", []] for key in ("due_at", "completed_at", "checkpoint_at", "claimed_until")},
    **{key: [None, [], "x", {"x": float("inf")}] for key in ("metadata", "checkpoint_data")},
    "priority": [None, "high", True, [], float("nan")],
    "dependencies": [None, "x", ["x"], [None], {}],
    "state": [None, "else", 1, []],
    "attempts": [None, 1.5, "1"],
    "name": [None, 1],
    "description": [None, {}],
    "id": ["x", 1, ["x"]],
    "parent_id": ["x"],
    "conversation_id": [1],
    "claimed_by": [1],
    "last_error": [[]],
}


@for_each(("field", "value"), [(name, value) for name, values in WRONG.items() for value in values])
async def test_a_task_that_save_refuses_is_named_and_stops_no_other(field: str, value: Any, tmp_path: Path) -> None:
    directory = write_old_store(tmp_path)
    path = directory / "tasks" / f"{LIST}.json"
    whole = json.loads(path.read_text())
    torn = json.loads(path.read_text())
    torn["tasks"][1][field] = value
    write(path, torn)
    result = await carry_over(tmp_path)
    assert result.carried == {**ALL, "task": 1}
    assert list(result.unreadable) == [f"tasks/{LIST}.json"]
    assert "task " in result.unreadable[f"tasks/{LIST}.json"]
    tasks = Tasks(tmp_path)
    await tasks.save(Task(name="sound"))
    assert {each.name for each in await tasks.ready()} == {"sound"}
    assert await tasks.claim("worker-1") is not None
    write(path, whole)
    assert (await carry_over(tmp_path)).carried == {"task": 1}
    found = await Tasks(tmp_path).get(UUID(LIST))
    assert found is not None
    assert [each.name for each in found.tasks] == ["buy", "go"]


MESSAGE_FIELDS: list[tuple[str, Any]] = [
    ("role", None), ("role", 1), ("content", 1), ("content", None), ("timestamp", None), ("timestamp", 1),
    ("tool_calls", None), ("tool_calls", [1]), ("tool_calls", [{"id": "x"}]),
    ("tool_calls", [{"id": 1, "name": "x"}]), ("tool_calls", [{"id": "1", "name": "x", "arguments": []}]),
    ("tool_call_id", 1), ("model", []), ("usage", None), ("metadata", []), ("parent_message_id", "x"),
    ("branch_id", 7),
]  # fmt: skip


def changed(name: str, fields: list[tuple[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, {field: value}) for field, value in fields]


@for_each(
    ("name", "change"),
    [
        *changed(
            f"tasks/{LIST}.json",
            [("created_at", None), ("updated_at", 1), ("name", None), ("conversation_id", 3), ("run_id", "x"),
             ("tasks", {"a": 1}), ("tasks", [1]), ("id", None)],
        ),
        *changed(
            f"conversations/{TALK}.json",
            [("created_at", None), ("updated_at", "x"), ("title", 1), ("metadata", None), ("agent_key", 3),
             ("summary", []), ("parent_conversation_id", "x"), ("active_branch_id", 1), ("messages", {"a": 1}),
             ("id", 1)],
        ),
        *changed(
            f"conversations/{TALK}.json",
            [("messages", [{**message(1), field: value}]) for field, value in MESSAGE_FIELDS],
        ),
        *changed("memory/theme.json", [("key", None), ("key", ""), ("key", ["x"]), ("value", float("nan"))]),
        *changed("preferences.json", [("", 1), ("x", float("inf"))]),
    ],
)  # fmt: skip
async def test_a_file_that_save_refuses_is_named_and_stops_no_other(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    directory = write_old_store(tmp_path)
    write(directory / name, {**json.loads((directory / name).read_text()), **change})
    result = await carry_over(tmp_path)
    assert list(result.unreadable) == [name]
    assert not result.opens
    others = {"memory": "memory", "conversations": "conversation", "tasks": "task_list"}
    assert {kind for folder, kind in others.items() if not name.startswith(folder)} <= result.carried.keys()


async def test_tasks_that_wait_for_each_other_are_left(tmp_path: Path) -> None:
    tasks = [{"id": id_of(n), "name": str(n), "dependencies": [id_of(3 - n)]} for n in (1, 2)]
    write(tmp_path / ".agent_runtime" / "tasks" / "x.json", {"id": LIST, "name": "x", "tasks": tasks})
    assert "cycle" in (await carry_over(tmp_path)).unreadable["tasks/x.json"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "link", "folder_link", "directory", "dangling", "large"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    directory = write_old_store(tmp_path)
    path = directory / "memory" / "x.json"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening, contextlib.chdir(path.parent):
                listening.bind(path.name)  # its whole path may be too long for a socket
        case "device":
            path.symlink_to("/dev/zero")
        case "link":
            (tmp_path / "else.json").write_text('{"key": "x", "value": 1}')
            path.symlink_to(tmp_path / "else.json")
        case "folder_link":
            (directory / "memory").rename(tmp_path / "memory")
            (directory / "memory").symlink_to(tmp_path / "memory")
            path = directory / "memory" / "theme.json"
        case "directory":
            path.mkdir()
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
        case "large":
            with path.open("wb") as file:
                file.truncate(1 << 40)  # takes no space
    # A process of its own: a read that waits would keep this one.
    command = [sys.executable, "-m", "agent_runtime_core", "carry-over", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if kind == "large":
        path.unlink()  # the suite reads what a test leaves
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert f"memory/{path.name}" in told["unreadable"]
    assert told["carried"]["preference"] == 2


def test_the_command_names_the_task_that_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_old_store(tmp_path)
    path = directory / "tasks" / f"{LIST}.json"
    torn = json.loads(path.read_text())
    torn["tasks"][1]["priority"] = "high"
    write(path, torn)
    assert main(["carry-over", str(tmp_path)]) == 1
    _, err = capsys.readouterr()
    assert "task 'go': $.priority: must be int or float, got 'high'" in err
    assert "opens without these tasks. Repair them and run the command again to add them" in err
