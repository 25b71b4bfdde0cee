"""How conversations are written: what a commit holds, where new messages go, and what is remembered of an object."""

from __future__ import annotations

import asyncio
import gc
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.errors import InvalidArgument, StorageBusy
from agent_runtime_core.persistence.backends.memory import InMemoryConversationStore, InMemoryMemoryStore
from agent_runtime_core.persistence.document_stores.base import IdentityMap, escaped, id_text, original, ranks_for
from agent_runtime_core.persistence.documents.base import CHANGE_TRIES, VersionConflict, text_in
from agent_runtime_core.persistence.models import Conversation, ConversationMessage, Message, Scope
from tests.contract.third_party.plain_stores import PlainConversations
from tests.support.codec_values import QUICK


class Counted(MemoryEngine):
    """Writes down what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[list[str]] = []
        self.reads = 0

    async def commit(self, guard: Any, ops: Any) -> list[Any]:
        self.commits.append([op.name for op in ops])
        return await super().commit(guard, ops)

    async def read(self, fn: Any, *args: Any) -> Any:
        self.reads += 1
        return await super().read(fn, *args)

    def taken(self) -> tuple[list[list[str]], int]:
        taken = (self.commits, self.reads)
        self.commits, self.reads = [], 0
        return taken


def say(content: Any, **fields: Any) -> ConversationMessage:
    return ConversationMessage(role="user", content=content, **fields)


async def stored(count: int) -> tuple[InMemoryConversationStore, Counted, Conversation]:
    engine = Counted()
    store = InMemoryConversationStore(engine=engine)
    conversation = Conversation(messages=[say(n) for n in range(count)])
    await store.save(conversation)
    engine.taken()
    return store, engine, conversation


@pytest.mark.parametrize("count", [10, 10_000])
async def test_an_append_is_one_commit_of_two_operations_and_no_read(count: int) -> None:
    store, engine, conversation = await stored(count)
    await store.add_message(conversation.id, say("more"))
    assert engine.taken() == ([["documents.add", "documents.touch"]], 0)
    await store.append(conversation.id, [say("a"), say("b")])
    assert engine.taken() == ([["documents.add", "documents.add", "documents.touch"]], 0)


async def test_a_save_writes_what_is_new_or_changed() -> None:
    store, engine, conversation = await stored(200)
    await store.save(conversation)
    assert engine.taken() == ([["documents.put"]], 1)
    conversation.messages.append(say("more"))
    conversation.messages[7].content = "changed"
    del conversation.messages[3]
    await store.save(conversation)
    assert engine.taken() == ([["documents.put", "documents.put", "documents.put", "documents.delete"]], 1)
    found = await store.get(conversation.id)
    engine.taken()
    assert found is not None
    found.messages.insert(0, say("first"))
    await store.save(found)
    assert engine.taken() == ([["documents.put", "documents.put"]], 1)


async def test_an_edit_is_one_commit() -> None:
    store, engine, conversation = await stored(3)
    await store.edit_message(conversation.id, conversation.messages[1].id, "edited")
    commits, _ = engine.taken()
    assert [sorted(each) for each in commits] == [["documents.add", "documents.put"]]


async def test_sixteen_appenders_lose_no_message_and_no_order() -> None:
    store = InMemoryConversationStore()
    conversation = Conversation()
    await store.save(conversation)

    async def appends(who: int) -> None:
        for n in range(500):
            await store.add_message(conversation.id, say([who, n]))
            await asyncio.sleep(0)

    await asyncio.gather(*(appends(who) for who in range(16)))
    found: list[Any] = [message.content for message in await store.get_messages(conversation.id)]
    assert len(found) == 8_000
    assert all([n for each, n in found if each == who] == list(range(500)) for who in range(16))


async def test_messages_that_outlived_their_conversation_are_not_those_of_a_new_one() -> None:
    store, _, conversation = await stored(3)
    headers = store.home.table(None, "conversation")
    await headers.write(headers.delete(str(conversation.id)))
    with pytest.raises(InvalidArgument, match=str(conversation.id)):
        await store.add_message(conversation.id, say("late"))
    await store.save(Conversation(id=conversation.id, messages=[say("new")]))
    assert [each.content for each in await store.get_messages(conversation.id)] == ["new"]


class Beaten(MemoryEngine):
    """Somebody else is always faster."""

    async def commit(self, guard: Any, ops: Any) -> list[Any]:
        if any(op.name == "documents.put" for op in ops):
            raise VersionConflict
        return await super().commit(guard, ops)


async def test_whoever_is_always_beaten_is_told() -> None:
    engine = Beaten()
    with pytest.raises(StorageBusy, match=str(CHANGE_TRIES)):
        await InMemoryMemoryStore(engine=engine).change("key", lambda old: 1)
    with pytest.raises(StorageBusy, match=str(CHANGE_TRIES)):
        await InMemoryConversationStore(engine=engine).save(Conversation())


async def test_two_changes_to_one_text_are_two() -> None:
    """The second one finds its own text in the place of the version it saw, put there by the first."""
    engine = MemoryEngine()
    one, two = InMemoryMemoryStore(engine=engine), InMemoryMemoryStore(engine=engine)
    between = [two.change("n", lambda old: (old or 0) + 1)]

    class Between(MemoryEngine):
        async def commit(self, guard: Any, ops: Any) -> list[Any]:
            if between:
                await between.pop()
            return await engine.commit(guard, ops)

    late = Between()
    late.tables = engine.tables
    one.documents(Scope.PROJECT).engine = late  # type: ignore[attr-defined]
    assert await one.change("n", lambda old: (old or 0) + 1) == 2
    assert await two.get("n") == 2


async def test_readme_branching() -> None:
    store = InMemoryConversationStore()
    original_conv = Conversation(title="Chat 1")
    original_msg = Message(role="user", content="Question")
    original_conv.messages.append(original_msg)
    original_conv.messages.append(Message(role="assistant", content="Answer"))
    await store.save(original_conv)

    # Create a branched message (e.g., user edited their message)
    branch_id = uuid4()
    edited_msg = ConversationMessage(
        id=uuid4(),
        role="user",
        content="Updated question",
        parent_message_id=original_msg.id,  # Points to original
        branch_id=branch_id,
    )

    # Fork a conversation
    forked_conv = Conversation(
        id=uuid4(), title="Forked conversation", parent_conversation_id=original_conv.id, active_branch_id=branch_id
    )

    await store.add_message(original_conv.id, edited_msg)
    await store.switch_branch(original_conv.id, branch_id)
    assert await store.history(original_conv.id) == [edited_msg]
    assert await store.history(original_conv.id, branch_id=None) == original_conv.messages
    await store.save(forked_conv)
    assert await store.get(forked_conv.id) == forked_conv
    assert await store.history(forked_conv.id) == []
    await store.add_message(forked_conv.id, original_msg)
    assert await store.history(forked_conv.id) == [original_msg]


# -- ranks


@QUICK
@given(st.permutations(list("abcdefghij")), st.sets(st.sampled_from("abcdefghij")), st.data())
def test_ranks_grow_in_the_order_that_is_wanted(order: list[str], known: set[str], data: st.DataObject) -> None:
    places = data.draw(st.permutations(sorted(known)))
    gaps = data.draw(st.lists(st.sampled_from([1e-9, 1.0, 5.0]), min_size=len(places), max_size=len(places)))
    held = {key: sum(gaps[: n + 1]) for n, key in enumerate(places)}
    ranks = ranks_for(order, held)
    assert list(ranks) == order
    last = max((order.index(key) for key in known), default=-1)
    assert [key for key in order if ranks[key] is None] == order[last + 1 :]
    body = [rank for rank in ranks.values() if rank is not None]
    assert all(before < after for before, after in pairwise(body))
    if [key for key in order if key in known] == places:
        assert all(ranks[key] == held[key] for key in known) or min(gaps) < 1e-6


def test_ranks_find_room_where_there_is_none() -> None:
    held = {"a": 1.0, "b": 1.0}
    assert ranks_for(["a", "b"], held) == {"a": 1.0, "b": 2.0}
    tight = {"a": 1.0, "b": 1.0 + 2**-52, "c": 2.0}
    assert ranks_for(["a", "x", "b", "c"], tight) == pytest.approx({"a": 1.0, "x": 4 / 3, "b": 5 / 3, "c": 2.0})
    assert ranks_for(["b", "a", "x", "c"], {"a": 1.0, "b": 2.0, "c": 10.0}) == {"b": 1.0, "a": 2.0, "x": 6.0, "c": 10.0}
    assert ranks_for([], {}) == {}


# -- what is remembered of objects


def test_what_was_seen_of_an_object_ends_with_it() -> None:
    seen: IdentityMap[int] = IdentityMap()
    one, two = Conversation(), Conversation()
    seen.remember(one, 1)
    seen.remember(one, 2)
    seen.remember(two, 3)
    assert (seen.of(one), seen.of(two), seen.of(Conversation())) == (2, 3, None)
    del one
    gc.collect()
    assert (len(seen), seen.of(two)) == (1, 3)


# -- keys and contents


@QUICK
@given(st.text(st.characters()), st.text(st.characters()))
def test_an_escaped_key_is_storable_and_comes_back(one: str, two: str) -> None:
    assert original(escaped(one)) == one
    assert escaped(one).encode().decode() == escaped(one)
    assert "\x00" not in escaped(one)
    assert escaped(one).startswith(escaped(two)) == one.startswith(two)
    assert (escaped(one) == escaped(two)) == (one == two)


def test_an_id_is_a_uuid_or_its_text() -> None:
    known = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b01")
    assert id_text(known, "message") == id_text(str(known).upper(), "message") == str(known)
    for bad in ("m1", "", None, 7, "../x"):
        with pytest.raises(InvalidArgument, match="message"):
            id_text(bad, "message")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text", "text"),
        ([{"type": "text", "text": "a"}, "b", {"deep": [["c"], 1, None]}], "text\na\nb\nc"),
        ({"n": 1}, ""),
        (None, ""),
    ],
)
def test_the_strings_of_a_content_are_its_text(content: Any, expected: str) -> None:
    assert text_in(content) == expected


async def test_a_search_is_in_its_scope() -> None:
    store = InMemoryConversationStore()
    conversation = Conversation(messages=[say("a needle\x00 and half a pair \ud800")])
    await store.save(conversation, Scope.GLOBAL)
    assert await store.search("needle") == []
    assert await store.search("needle pair", Scope.GLOBAL) == [(conversation.id, conversation.messages[0])]


async def test_a_search_of_a_store_of_ones_own_reads_every_page() -> None:
    store = PlainConversations()
    made = [Conversation(messages=[say(f"needle {n}")]) for n in range(201)]
    for conversation in made:
        await store.save(conversation)
    found = await store.search("needle", limit=1000)
    assert {where for where, _ in found} == {conversation.id for conversation in made}
    assert [message.content for _, message in await store.search("needle 200")] == ["needle 200"]
