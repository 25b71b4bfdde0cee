"""Conformance tests for conversation stores. Run one of `CASES` with `await case(make)`, or all with `check(make)`.

`make()` returns a new and empty store.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

from ....errors import InvalidArgument
from ....persistence.base.conversations import ConversationStore
from ....persistence.models import Conversation, ConversationMessage, Scope, ToolCall, new_id
from ..checks import Cases, opened, refused, same
from .fixtures import TREE, deleted_once, stores_of_tenants

Make = Callable[..., Any]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
check: Callable[[Make], Awaitable[None]] = CASES.check

NOON = dt.datetime(2026, 11, 21, 12, 0, tzinfo=dt.UTC)
EAST = dt.timezone(dt.timedelta(hours=5, minutes=30))
UNKNOWN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2bff")


def message(content: Any, role: str = "user", **fields: Any) -> ConversationMessage:
    return ConversationMessage(role=role, content=content, **fields)


def said(messages: Sequence[ConversationMessage]) -> list[Any]:
    return [each.content for each in messages]


async def talk(store: ConversationStore, *contents: str, **fields: Any) -> Conversation:
    """Store a conversation with alternating user and assistant messages."""
    roles = ["user", "assistant"] * len(contents)
    messages = [message(content, role) for content, role in zip(contents, roles, strict=False)]
    conversation = Conversation(messages=messages, **fields)
    await store.save(conversation)
    return conversation


def full() -> Conversation:
    """A conversation with every field set, and naive and aware times."""
    naive = NOON.replace(tzinfo=None)
    calls = [
        ToolCall(id="call_1", name="look", arguments={"q": [1, {"deep": None}]}, timestamp=naive),
        ToolCall(id="call_2", name="look"),
    ]
    messages = [
        message("Hello!", timestamp=naive),
        message("", "assistant", tool_calls=calls, model="m-1", usage={"total": 3, "cost": 0.5}, timestamp=NOON),
        message({"found": [1, 2]}, "tool", tool_call_id="call_1", timestamp=NOON.astimezone(EAST)),
        message([{"type": "text", "text": "é\n"}], "assistant", metadata=copy.deepcopy(TREE), branch_id=new_id()),
    ]
    messages.append(message("edited", parent_message_id=messages[0].id, branch_id=new_id()))
    return Conversation(
        title="Ein Titel",
        messages=messages,
        created_at=naive,
        updated_at=naive,
        metadata=copy.deepcopy(TREE),
        agent_key="an/agent",
        summary="a summary",
        parent_conversation_id=new_id(),
        active_branch_id=messages[-1].branch_id,
    )


# -- storing and reading


@CASES
async def what_is_unknown_is_none_or_empty(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get(UNKNOWN), None, "an unknown conversation")
        same(await store.get_messages(UNKNOWN), [], "its messages")
        same(await store.delete(UNKNOWN), False, "the result of deleting an unknown conversation")
        same(await store.list_conversations(), [], "the list of an empty store")
        with refused(ValueError, "a message to an unknown conversation"):
            await store.add_message(UNKNOWN, message("Hello?"))
        same(await store.get(UNKNOWN), None, "the conversation after the rejected message")


@CASES
async def every_field_comes_back(make: Make) -> None:
    async with opened(make) as store:
        for conversation in (full(), Conversation()):
            before = conversation.updated_at
            await store.save(conversation)
            assert conversation.updated_at != before, "save() must set updated_at on the object"
            found = await store.get(conversation.id)
            same(found, conversation, "a conversation")
            same(await store.get_messages(conversation.id), conversation.messages, "its messages")
            same(
                [each.timestamp.tzinfo is None for each in found.messages],
                [each.timestamp.tzinfo is None for each in conversation.messages],
                "which times are naive",
            )


@CASES
async def saving_again_keeps_what_the_object_holds(make: Make) -> None:
    async with opened(make) as store:
        conversation = Conversation(title="Chat 1")
        conversation.messages.append(message("Hello!"))
        await store.save(conversation)
        conversation.messages.append(message("Hi.", "assistant"))
        conversation.title, conversation.metadata["n"] = "Chat 2", 1
        await store.save(conversation)
        same(await store.get(conversation.id), conversation, "the conversation saved twice")
        found = await store.get(conversation.id)
        found.messages.append(message("How are you?"))
        await store.save(found)
        same(said(await store.get_messages(conversation.id)), ["Hello!", "Hi.", "How are you?"], "its messages")


@CASES
async def messages_are_appended_in_order(make: Make) -> None:
    async with opened(make) as store:
        conversation, other = await talk(store, "one"), await talk(store, "else")
        for content in ("two", "three"):
            await store.add_message(conversation.id, message(content))
        same(said(await store.get_messages(conversation.id)), ["one", "two", "three"], "the messages")
        found = await store.get(conversation.id)
        same(said(found.messages), ["one", "two", "three"], "the messages of the conversation object")
        assert found.updated_at >= conversation.updated_at, "an append must update updated_at"
        same(said(await store.get_messages(other.id)), ["else"], "the messages of another conversation")


@CASES
async def the_last_messages_before_a_time_are_given(make: Make) -> None:
    async with opened(make) as store:
        conversation = Conversation()
        for n in range(6):
            when = NOON + dt.timedelta(minutes=n)
            conversation.messages.append(message(n, timestamp=when.replace(tzinfo=None) if n % 2 else when))
        await store.save(conversation)

        async def some(**options: Any) -> list[Any]:
            return said(await store.get_messages(conversation.id, **options))

        same(await some(limit=2), [4, 5], "the last two")
        same(await some(limit=99), [0, 1, 2, 3, 4, 5], "the last 99")
        at = NOON + dt.timedelta(minutes=3)
        for before in (at, at.replace(tzinfo=None), at.astimezone(EAST)):
            same(await some(before=before), [0, 1, 2], f"the messages before {before}")
            same(await some(before=before, limit=2), [1, 2], f"the last two before {before}")
        same(await some(before=NOON), [], "the messages before the first")


@CASES
async def conversations_are_listed_the_last_changed_first(make: Make) -> None:
    async with opened(make) as store:
        made = [await talk(store, str(n), agent_key="a" if n % 2 else None) for n in range(5)]
        await store.add_message(made[1].id, message("more"))
        listed = await store.list_conversations()
        same({each.id for each in listed}, {each.id for each in made}, "the listed conversations")
        times = [each.updated_at for each in listed]
        same(times, sorted(times, reverse=True), "their updated_at times")
        newest = [each.id for each in await store.list_conversations(limit=2)]
        same(newest, [each.id for each in listed[:2]], "the conversations with limit 2")
        rest = await store.list_conversations(limit=2, offset=3)
        same([each.id for each in rest], [each.id for each in listed[3:]], "the conversations from offset 3")
        found = await store.list_conversations(agent_key="a")
        same({each.id for each in found}, {made[1].id, made[3].id}, "the conversations of one agent")
        same(await store.list_conversations(agent_key="nobody"), [], "the conversations of another agent")


@CASES
async def a_deleted_conversation_is_gone_with_its_messages(make: Make) -> None:
    async with opened(make) as store:
        conversation, other = await talk(store, "one"), await talk(store, "else")
        await deleted_once(store.delete, conversation.id)
        same(await store.get(conversation.id), None, "the conversation")
        same(await store.get_messages(conversation.id), [], "its messages")
        same([each.id for each in await store.list_conversations()], [other.id], "the list")
        await store.save(Conversation(id=conversation.id))
        same(await store.get_messages(conversation.id), [], "the messages of a new conversation with its id")


@CASES
async def scopes_are_apart(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one")
        same(await store.get(conversation.id, scope=Scope.GLOBAL), None, "a conversation in the global scope")
        same(await store.list_conversations(scope=Scope.GLOBAL), [], "the list of the global scope")
        with refused(ValueError, "a message to a project conversation in the global scope"):
            await store.add_message(conversation.id, message("two"), Scope.GLOBAL)
        same(said(await store.get_messages(conversation.id, Scope.PROJECT)), ["one"], "its messages")


# -- appending, branches and forks


@CASES
async def an_append_of_what_is_there_is_none(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one")
        more = [message("two"), message("three")]
        same(await store.append(conversation.id, more), 2, "the number of appended messages")
        four = message("four")
        added = await store.append(conversation.id, [*more, four, more[0], four])
        same(added, 1, "the number of appended messages when some are known")
        same(await store.append(conversation.id, []), 0, "the number of appended messages of an empty list")
        same(said(await store.get_messages(conversation.id)), ["one", "two", "three", "four"], "the messages")
        for messages in ([message("lost")], []):
            with refused(InvalidArgument, f"{len(messages)} messages to an unknown conversation"):
                await store.append(UNKNOWN, messages)
        same(await store.get(UNKNOWN), None, "the unknown conversation")


@CASES
async def an_edit_is_a_branch_and_the_old_path_stays(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "q1", "a1", "q2", "a2")
        q2 = conversation.messages[2]
        edited = await store.edit_message(conversation.id, q2.id, "q2, better", metadata={"n": 1})
        same((edited.parent_message_id, edited.role, edited.metadata), (q2.id, "user", {"n": 1}), "the new message")
        assert edited.branch_id is not None, "the new message must have a new branch"
        same((await store.get(conversation.id)).active_branch_id, edited.branch_id, "the active branch")
        answer = message("a2, better", "assistant", branch_id=edited.branch_id)
        await store.add_message(conversation.id, answer)
        same(said(await store.history(conversation.id)), ["q1", "a1", "q2, better", "a2, better"], "the new path")
        old = await store.history(conversation.id, branch_id=None)
        same(old, conversation.messages, "the old path")
        main, branch = await store.branches(conversation.id)
        same((main.id, main.leaf, main.messages, main.follows), (None, old[-1].id, 4, None), "the main line")
        same(
            (branch.id, branch.leaf, branch.messages, branch.follows, branch.replaces),
            (edited.branch_id, answer.id, 2, old[1].id, q2.id),
            "the branch",
        )
        same(branch.updated_at, answer.timestamp, "updated_at of the branch")


@CASES
async def an_answer_is_made_anew(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "q1", "a1", "q2")
        answer = conversation.messages[1]
        again = await store.regenerate(conversation.id, answer.id, "a1, anew", switch=False, model="m-2")
        same((again.role, again.model), ("assistant", "m-2"), "the new answer")
        same(said(await store.history(conversation.id)), ["q1", "a1", "q2"], "the path, not switched")
        same(said(await store.history(conversation.id, leaf=again.id)), ["q1", "a1, anew"], "the new path")
        third = await store.regenerate(conversation.id, again.id, "a1, again")
        same(said(await store.history(conversation.id)), ["q1", "a1, again"], "the path after a third one")
        same(third.parent_message_id, again.id, "the message that the third answer replaces")
        with refused(InvalidArgument, "regenerating a user message"):
            await store.regenerate(conversation.id, conversation.messages[0].id, "no")


@CASES
async def an_edit_that_is_repeated_is_one(make: Make) -> None:
    async with opened(make) as store:
        conversation, known = await talk(store, "q1"), new_id()
        question = conversation.messages[0].id
        first = await store.edit_message(conversation.id, question, "q1, better", id=known)
        await store.switch_branch(conversation.id, None)
        second = await store.edit_message(conversation.id, question, "q1, better", id=known)
        same((second.id, second.branch_id), (first.id, first.branch_id), "the result of the repeated edit")
        same(len(await store.get_messages(conversation.id)), 2, "the number of messages")
        same((await store.get(conversation.id)).active_branch_id, first.branch_id, "the active branch")


@CASES
async def the_active_branch_is_switched(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "q1", "a1")
        edited = await store.edit_message(conversation.id, conversation.messages[0].id, "q1, better")
        await store.switch_branch(conversation.id, None)
        same((await store.get(conversation.id)).active_branch_id, None, "the active branch")
        same(said(await store.history(conversation.id)), ["q1", "a1"], "the main line")
        await store.switch_branch(conversation.id, edited.branch_id)
        same(said(await store.history(conversation.id)), ["q1, better"], "the other branch")
        with refused(InvalidArgument, "switching to an unknown branch"):
            await store.switch_branch(conversation.id, UNKNOWN)
        same(said(await store.history(conversation.id)), ["q1, better"], "the branch after the rejected switch")


@CASES
async def a_fork_is_a_conversation_of_its_own(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "q1", "a1", "q2", "a2", title="Chat", agent_key="agent", metadata={"n": 1})
        q1 = conversation.messages[0]
        edited = await store.edit_message(conversation.id, conversation.messages[2].id, "q2, better")
        forked = await store.fork(conversation.id)
        found = await store.get(forked.id)
        same(found, forked, "the fork")
        same(said(found.messages), ["q1", "a1", "q2, better"], "its messages")
        origin = (found.parent_conversation_id, found.title, found.agent_key)
        same(origin, (conversation.id, "Chat", "agent"), "its origin, title and agent")
        same(found.messages[0].metadata["forked_from"], str(q1.id), "the origin of its first message")
        same(found.messages[2].metadata["forked_from"], str(edited.id), "the origin of its last message")
        assert {each.id for each in found.messages}.isdisjoint(each.id for each in conversation.messages), (
            "a fork must have new message ids"
        )
        await store.add_message(forked.id, message("a2", "assistant"))
        same(
            said(await store.history(forked.id)), ["q1", "a1", "q2, better", "a2"], "its history after another message"
        )
        short = await store.fork(conversation.id, at=conversation.messages[1].id, title="Short")
        same((said(short.messages), short.title), (["q1", "a1"], "Short"), "a fork at the second message")
        same(len(await store.get_messages(conversation.id)), 5, "the number of messages in the first conversation")


@CASES
async def what_there_is_not_is_refused(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "q1", "a1")
        calls: dict[str, Callable[[UUID], Awaitable[Any]]] = {
            "branches": store.branches,
            "history": store.history,
            "fork": store.fork,
            "switch_branch": lambda id_: store.switch_branch(id_, None),
            "edit_message": lambda id_: store.edit_message(id_, UNKNOWN, "x"),
            "regenerate": lambda id_: store.regenerate(id_, UNKNOWN, "x"),
        }
        for name, call in calls.items():
            with refused(InvalidArgument, f"{name} of an unknown conversation"):
                await call(UNKNOWN)
        with refused(InvalidArgument, "an edit of an unknown message"):
            await store.edit_message(conversation.id, UNKNOWN, "x")
        with refused(InvalidArgument, "a history up to an unknown message"):
            await store.history(conversation.id, leaf=UNKNOWN)
        with refused(InvalidArgument, "a history of an unknown branch"):
            await store.history(conversation.id, branch_id=UNKNOWN)
        for field in ("role", "branch_id", "colour"):
            with refused(InvalidArgument, f"an edit that sets {field}"):
                await store.edit_message(conversation.id, conversation.messages[0].id, "x", **{field: "x"})
        same(await store.get(conversation.id), conversation, "the conversation")


@CASES
async def messages_are_found_by_their_words(make: Make) -> None:
    async with opened(make) as store:
        first = await talk(store, "Where is the Résumé of the pilot?", "In the drawer.")
        second = await talk(store, "Pilot, pilot and co-pilot")
        await store.add_message(second.id, message([{"type": "text", "body": {"deep": "the pilots' drawer"}}]))

        async def found(query: str, **options: Any) -> list[tuple[UUID, Any]]:
            return [(where, each.content) for where, each in await store.search(query, **options)]

        both = await found("resume PILOT")
        same(both, [(first.id, first.messages[0].content)], "the messages with both words, ignoring case and accents")
        same({where for where, _ in await found("drawer")}, {first.id, second.id}, "conversations with a word of both")
        same(len(await found("pilot")), 3, "the number of messages with a word or its prefix")
        same(len(await found("pilot", limit=1)), 1, "the number of messages found with limit 1")
        same(await found("submarine"), [], "the messages found by an unknown word")
        for query in ("", "   ", '"', "AND", "(", "pilot* OR", "'; --"):
            await found(query)


# -- tenants


@CASES
async def tenants_use_the_same_conversation_ids_apart(make: Make) -> None:
    async with stores_of_tenants(make) as stores:
        for scope in Scope:
            for tenant, store in stores.items():
                same(await store.get(UNKNOWN, scope), None, f"the conversation of tenant {tenant!r} before it is saved")
                await store.save(Conversation(id=UNKNOWN, title=f"{tenant}", messages=[message("secret")]), scope)
                first = message(f"secret of {tenant} in {scope.value}", id=UNKNOWN)
                await store.append(UNKNOWN, [first], scope)
        for scope in Scope:
            for tenant, store in stores.items():
                expected = ["secret", f"secret of {tenant} in {scope.value}"]
                same(said(await store.get_messages(UNKNOWN, scope)), expected, f"the messages of tenant {tenant!r}")
                titles = [each.title for each in await store.list_conversations(scope)]
                same(titles, [str(tenant)], f"the conversations of tenant {tenant!r}")
                found = sorted(each.content for _, each in await store.search("secret", scope))
                same(found, expected, f"the messages that tenant {tenant!r} finds")
        for number, store in enumerate(stores.values()):
            same(await store.delete(UNKNOWN), True, "the result of a delete")
            left = [await each.get(UNKNOWN) is not None for each in stores.values()]
            same(left, [False] * (number + 1) + [True] * (len(stores) - number - 1), "which conversations are left")


@CASES
async def a_conversation_moves_to_a_tenant(make: Make) -> None:
    async with stores_of_tenants(make) as stores:
        if not stores:
            return
        store, theirs, others = stores[None], stores["a"], stores["A"]
        same(await store.move_to(theirs, UNKNOWN), False, "the result of moving an unknown conversation")
        moved = await talk(store, "red", "blue", id=UNKNOWN, agent_key="agent", title="colors", metadata={"n": 1})
        await store.edit_message(UNKNOWN, moved.messages[0].id, "green")
        before = await store.get(UNKNOWN)
        await talk(others, "theirs", id=UNKNOWN)
        same(await store.move_to(others, UNKNOWN), False, "the result of moving to a tenant that has the id")
        same(await store.get(UNKNOWN), before, "the conversation that was not moved")
        same(await store.move_to(theirs, UNKNOWN), True, "the result of the move")
        same(await store.move_to(theirs, UNKNOWN), False, "the result of the second move")
        same((await store.get(UNKNOWN), await store.get_messages(UNKNOWN)), (None, []), "what is left behind")
        after = await theirs.get(UNKNOWN)
        assert before is not None
        assert after is not None
        after.updated_at = before.updated_at
        same(after, before, "the moved conversation")
        same([each.content for _, each in await theirs.search("green")], ["green"], "what its tenant finds")
        same(await store.search("green"), [], "what others find")
        same(said(await others.get_messages(UNKNOWN)), ["theirs"], "the conversation of another tenant")
        await theirs.append(UNKNOWN, [message("new")])
        same(said(await theirs.get_messages(UNKNOWN))[-1], "new", "a message after the move")
