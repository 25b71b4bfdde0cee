"""The histories that a conversation store keeps decoded: how many, what is read again, and what a change meets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from agent_runtime_core._core import per_loop
from agent_runtime_core._core.per_loop import sliced
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.persistence import (
    Conversation,
    ConversationMessage,
    InMemoryConversationStore,
    PersistenceConfig,
    PersistenceManager,
    ToolCall,
)
from agent_runtime_core.persistence.document_stores import conversations
from agent_runtime_core.persistence.document_stores.base import MESSAGE
from agent_runtime_core.persistence.document_stores.conversations import read_history
from agent_runtime_core.persistence.models import Scope
from agent_runtime_core.persistence.stored_history import StoredHistory, copied
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from tests.support.fault_runs import Agent, settings


class Reads:
    """The reads of a document store: how many documents each found, and what happens after one of them."""

    def __init__(self, store: InMemoryConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, int]] = []
        self.after: dict[str, Callable[[], Awaitable[Any]]] = {}
        documents = store.documents(Scope.PROJECT)
        real = documents.read

        async def read(fn: str, *args: Any) -> Any:
            found = await real(fn, *args)
            self.found.append((fn, len(found)))
            if action := self.after.pop(fn, None):
                await action()
            return found

        monkeypatch.setattr(documents, "read", read)


def messages(*contents: str) -> list[ConversationMessage]:
    return [ConversationMessage(role="user", content=content) for content in contents]


async def talk(store: InMemoryConversationStore, *contents: str) -> UUID:
    conversation = Conversation(messages=messages(*contents))
    await store.save(conversation)
    return conversation.id


async def shown(store: InMemoryConversationStore, chat: UUID) -> list[Any]:
    kept = await read_history(store, chat)
    assert kept is not None
    leaf = kept.leaf()
    return [] if leaf is None else [each["content"] for each in (await kept.path_to(leaf.id)).chats]


async def test_a_turn_reads_the_last_message_and_the_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryConversationStore()
    chat = await talk(store, *map(str, range(50)))
    reads = Reads(store, monkeypatch)
    assert len(await shown(store, chat)) == 50
    await store.append(chat, messages("new", "newer"))
    reads.found.clear()
    assert (await shown(store, chat))[48:] == ["48", "49", "new", "newer"]
    assert reads.found == [("find", 3), ("get", 1)]


@pytest.mark.parametrize("read", ["find", "get"])
async def test_a_save_between_two_reads_mixes_no_messages(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryConversationStore()
    before, after = ["one", "two", "three"], ["changed", "two", "three", "four"]
    chat = await talk(store, *before)
    await shown(store, chat)
    reads = Reads(store, monkeypatch)

    async def change() -> None:
        found = await store.get(chat)
        assert found is not None
        found.messages[0].content = "changed"
        found.messages += messages("four")
        await store.save(found)

    reads.after[read] = change
    assert await shown(store, chat) in (before, after)
    assert await shown(store, chat) == after


async def test_a_restored_backup_is_read_in_full() -> None:
    """Its header may be the same, because an append does not change it."""
    store = InMemoryConversationStore()
    chat = await talk(store, "one", "two")
    new = messages("three")
    await store.append(chat, new)
    assert await shown(store, chat) == ["one", "two", "three"]
    table = store.home.table(None, MESSAGE)
    await table.write(table.delete(f"{chat}/{new[0].id}"))
    assert await shown(store, chat) == ["one", "two"]


@pytest.mark.parametrize("limit", ["MOST", "MOST_BYTES"])
async def test_only_recent_conversations_are_kept(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, limit, {"MOST": 2, "MOST_BYTES": 70_000}[limit])
    store = InMemoryConversationStore()
    chats = [await talk(store, *["x" * 10_000] * 2) for _ in range(3)]
    for chat in chats:
        await shown(store, chat)
    await shown(store, chats[1])  # it is the most recent one now
    await shown(store, await talk(store, "x" * 10_000))
    reads = Reads(store, monkeypatch)
    for chat in (chats[1], chats[0], chats[2]):
        await shown(store, chat)
    assert [count for fn, count in reads.found if fn == "find"] == [1, 2, 2]


async def test_a_conversation_beyond_the_limit_is_read_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MOST_BYTES", 10_000)
    store = InMemoryConversationStore()
    chat = await talk(store, *["x" * 10_000] * 2)
    small = await talk(store, "small")
    reads = Reads(store, monkeypatch)
    for each in (small, chat, chat, small):
        await shown(store, each)
    assert [count for fn, count in reads.found if fn == "find"] == [1, 2, 2, 1]


class Other(InMemoryConversationStore):
    async def get(self, conversation_id: UUID, scope: Scope | None = None) -> Conversation | None:
        found = await super().get(conversation_id, scope)
        return None if found is None else Conversation(id=found.id, messages=found.messages[:1])


async def test_a_store_with_another_get_is_read_through_it() -> None:
    store = Other()
    assert await shown(store, await talk(store, "one", "two")) == ["one"]
    assert await read_history(store, uuid4()) is None


async def test_a_run_may_modify_its_messages(tmp_path: Path) -> None:
    """Neither the stored conversation nor the messages of the next run change."""
    store, agents, heard = InMemoryConversationStore(), Registry(), []
    call = ToolCall(id="c", name="look", arguments={"at": ["here"]})
    said = [
        ConversationMessage(role="system", content=[{"type": "text", "text": "prompt"}]),
        ConversationMessage(role="user", content=[{"type": "text", "text": "one"}]),
        ConversationMessage(role="assistant", content="", tool_calls=[call]),
        ConversationMessage(role="tool", content={"found": [1]}, tool_call_id="c"),
    ]
    conversation = Conversation(messages=said)
    await store.save(conversation)

    async def spoil(ctx: Any) -> RunResult:
        given = ctx.input_messages
        heard.append(copied(given[:4]))
        given[0]["content"][0]["text"] = given[1]["content"][0]["text"] = "spoiled"
        given[2]["tool_calls"][0]["function"]["name"] = "spoiled"
        given[2]["tool_calls"].append({})
        given[3]["content"]["found"].append("spoiled")
        given[3].clear()
        return RunResult({"response": "answer"})

    agents.register(Agent("a", spoil))
    stores = PersistenceManager(PersistenceConfig(conversation_store=store))
    async with AgentRunner.open(tmp_path / "a.db", config=settings(), persistence=stores, registry=agents) as runner:
        for content in ("two", "three"):
            given = {"messages": [{"role": "user", "content": content}], "conversation_id": str(conversation.id)}
            await runner.execute("a", None, given, raise_on_error=True)
    assert heard[0] == heard[1]
    assert heard[0][1]["content"] == [{"type": "text", "text": "one"}]


async def test_a_reader_keeps_its_history_while_it_grows() -> None:
    store = InMemoryConversationStore()
    chat = await talk(store, "one", "two")
    before = await store.read_history(chat)
    await store.append(chat, messages("three"))
    after = await store.read_history(chat)
    assert isinstance(before, StoredHistory)
    assert isinstance(after, StoredHistory)
    for kept, expected in ((before, ["one", "two"]), (after, ["one", "two", "three"]), (before, ["one", "two"])):
        leaf = kept.leaf()
        assert leaf is not None
        assert [each["content"] for each in (await kept.path_to(leaf.id)).chats] == expected


async def test_long_work_lets_other_tasks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_loop, "LONGEST_SLICE", -1.0)  # every item takes too long
    others: list[int] = []

    async def count() -> None:
        while True:
            others.append(len(others))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await sliced(map(str, range(5))) == ["0", "1", "2", "3", "4"]
    counting.cancel()
    assert len(others) == 5
