"""What every conversation store must do; run each of `CASES` on your own with `await case(make)`, or `check(make)`.

`make()` gives a new and empty store each time. `OURS` holds what the stores of this package do beside that:
there `make(**options)` also takes their options, and `place="a name"` to open one place more than once.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime as dt
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

from ....errors import InvalidArgument, UnserialisableResult
from ....persistence.base.conversations import ConversationStore
from ....persistence.models import Conversation, ConversationMessage, Scope, ToolCall, new_id
from ...clock import VirtualClock
from ..checks import Cases, refused, same
from .rig import TREE, TYPED, fenced, opened

Make = Callable[..., Any]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
OURS: Cases[Case] = Cases()
check: Callable[[Make], Awaitable[None]] = CASES.check

NOON = dt.datetime(2026, 11, 21, 12, 0, tzinfo=dt.UTC)
EAST = dt.timezone(dt.timedelta(hours=5, minutes=30))
UNKNOWN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2bff")


def message(content: Any, role: str = "user", **fields: Any) -> ConversationMessage:
    return ConversationMessage(role=role, content=content, **fields)


def said(messages: Sequence[ConversationMessage]) -> list[Any]:
    return [each.content for each in messages]


async def talk(store: ConversationStore, *contents: str, **fields: Any) -> Conversation:
    """A stored conversation of a user and an assistant by turns."""
    roles = ["user", "assistant"] * len(contents)
    messages = [message(content, role) for content, role in zip(contents, roles, strict=False)]
    conversation = Conversation(messages=messages, **fields)
    await store.save(conversation)
    return conversation


def full() -> Conversation:
    """Every field set, and times of all sorts."""
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


# -- what the six methods do


@CASES
async def what_is_unknown_is_none_or_empty(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get(UNKNOWN), None, "an unknown conversation")
        same(await store.get_messages(UNKNOWN), [], "its messages")
        same(await store.delete(UNKNOWN), False, "deleting it")
        same(await store.list_conversations(), [], "the list of an empty store")
        with refused(ValueError, "a message to it"):
            await store.add_message(UNKNOWN, message("Hello?"))
        same(await store.get(UNKNOWN), None, "the conversation after that")


@CASES
async def every_field_comes_back(make: Make) -> None:
    async with opened(make) as store:
        for conversation in (full(), Conversation()):
            before = conversation.updated_at
            await store.save(conversation)
            assert conversation.updated_at != before, "save() sets updated_at on the object"
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
        same(said(found.messages), ["one", "two", "three"], "those of the conversation")
        assert found.updated_at >= conversation.updated_at, "an append is a change"
        same(said(await store.get_messages(other.id)), ["else"], "those of another conversation")


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
            same(await some(before=before), [0, 1, 2], f"those before {before}")
            same(await some(before=before, limit=2), [1, 2], f"the last two before {before}")
        same(await some(before=NOON), [], "those before the first")


@CASES
async def conversations_are_listed_the_last_changed_first(make: Make) -> None:
    async with opened(make) as store:
        made = [await talk(store, str(n), agent_key="a" if n % 2 else None) for n in range(5)]
        await store.add_message(made[1].id, message("more"))
        listed = await store.list_conversations()
        same({each.id for each in listed}, {each.id for each in made}, "those listed")
        times = [each.updated_at for each in listed]
        same(times, sorted(times, reverse=True), "their times")
        same([each.id for each in await store.list_conversations(limit=2)], [each.id for each in listed[:2]], "two")
        rest = await store.list_conversations(limit=2, offset=3)
        same([each.id for each in rest], [each.id for each in listed[3:]], "those from the fourth on")
        found = await store.list_conversations(agent_key="a")
        same({each.id for each in found}, {made[1].id, made[3].id}, "those of one agent")
        same(await store.list_conversations(agent_key="nobody"), [], "those of another")


@CASES
async def a_deleted_conversation_is_gone_with_its_messages(make: Make) -> None:
    async with opened(make) as store:
        conversation, other = await talk(store, "one"), await talk(store, "else")
        same((await store.delete(conversation.id), await store.delete(conversation.id)), (True, False), "deleted twice")
        same(await store.get(conversation.id), None, "the conversation")
        same(await store.get_messages(conversation.id), [], "its messages")
        same([each.id for each in await store.list_conversations()], [other.id], "the list")
        await store.save(Conversation(id=conversation.id))
        same(await store.get_messages(conversation.id), [], "the messages of a new one under its id")


@CASES
async def scopes_are_apart(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one")
        same(await store.get(conversation.id, scope=Scope.GLOBAL), None, "a conversation of the project, globally")
        same(await store.list_conversations(scope=Scope.GLOBAL), [], "the list of the global scope")
        with refused(ValueError, "a message to it in the global scope"):
            await store.add_message(conversation.id, message("two"), Scope.GLOBAL)
        same(said(await store.get_messages(conversation.id, Scope.PROJECT)), ["one"], "its messages")


# -- what is made of them


@CASES
async def an_append_of_what_is_there_is_none(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one")
        more = [message("two"), message("three")]
        same(await store.append(conversation.id, more), 2, "how many were appended")
        four = message("four")
        same(await store.append(conversation.id, [*more, four, more[0], four]), 1, "how many, some known")
        same(await store.append(conversation.id, []), 0, "how many of none")
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
        assert edited.branch_id is not None, "the new message is on a branch of its own"
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
        same(branch.updated_at, answer.timestamp, "when it was last added to")


@CASES
async def an_answer_is_made_anew(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "q1", "a1", "q2")
        answer = conversation.messages[1]
        again = await store.regenerate(conversation.id, answer.id, "a1, anew", switch=False, model="m-2")
        same((again.role, again.model), ("assistant", "m-2"), "the new answer")
        same(said(await store.history(conversation.id)), ["q1", "a1", "q2"], "the path, not switched")
        same(said(await store.history(conversation.id, leaf=again.id)), ["q1", "a1, anew"], "the new path")
        third = await store.regenerate(conversation.id, again.id, "a1, once more")
        same(said(await store.history(conversation.id)), ["q1", "a1, once more"], "the path after a third one")
        same(third.parent_message_id, again.id, "what the third stands for")
        with refused(InvalidArgument, "another answer in the place of a question"):
            await store.regenerate(conversation.id, conversation.messages[0].id, "no")


@CASES
async def an_edit_that_is_repeated_is_one(make: Make) -> None:
    async with opened(make) as store:
        conversation, known = await talk(store, "q1"), new_id()
        question = conversation.messages[0].id
        first = await store.edit_message(conversation.id, question, "q1, better", id=known)
        await store.switch_branch(conversation.id, None)
        second = await store.edit_message(conversation.id, question, "q1, better", id=known)
        same((second.id, second.branch_id), (first.id, first.branch_id), "the answer to the repeat")
        same(len(await store.get_messages(conversation.id)), 2, "how many messages there are")
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
        with refused(InvalidArgument, "a branch that there is not"):
            await store.switch_branch(conversation.id, UNKNOWN)
        same(said(await store.history(conversation.id)), ["q1, better"], "the branch after that")


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
        same((found.parent_conversation_id, found.title, found.agent_key), (conversation.id, "Chat", "agent"), "whose")
        same(found.messages[0].metadata["forked_from"], str(q1.id), "where its first message is from")
        same(found.messages[2].metadata["forked_from"], str(edited.id), "where its last message is from")
        assert {each.id for each in found.messages}.isdisjoint(each.id for each in conversation.messages), "new ids"
        await store.add_message(forked.id, message("a2", "assistant"))
        same(said(await store.history(forked.id)), ["q1", "a1", "q2, better", "a2"], "its history, gone on with")
        short = await store.fork(conversation.id, at=conversation.messages[1].id, title="Short")
        same((said(short.messages), short.title), (["q1", "a1"], "Short"), "a fork at the second message")
        same(len(await store.get_messages(conversation.id)), 5, "how many messages the first conversation has")


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

        same(await found("resume PILOT"), [(first.id, first.messages[0].content)], "both words, case and accent aside")
        same({where for where, _ in await found("drawer")}, {first.id, second.id}, "a word of two conversations")
        same(len(await found("pilot")), 3, "how many have a word or what begins with it")
        same(len(await found("pilot", limit=1)), 1, "how many of them with a limit")
        same(await found("submarine"), [], "an unknown word")
        for query in ("", "   ", '"', "AND", "(", "pilot* OR", "'; --"):
            await found(query)


# -- what ours do beside that


@OURS
async def an_id_is_appended_once(make: Make) -> None:
    async with opened(make) as store:
        conversation, more = await talk(store, "one"), message("two")
        await asyncio.gather(*(store.add_message(conversation.id, more) for _ in range(8)))
        await store.add_message(conversation.id, dataclasses.replace(more, content="another two"))
        same(said(await store.get_messages(conversation.id)), ["one", "two"], "the messages")


@OURS
async def a_save_keeps_what_others_appended(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        conversation = await talk(store, "one", "two", "three")
        await beside.add_message(conversation.id, message("theirs"))
        conversation.messages.append(message("four"))
        await store.save(conversation)
        same(said(await store.get_messages(conversation.id)), ["one", "two", "three", "theirs", "four"], "appended")
        del conversation.messages[1]
        conversation.messages[0].content = "one, changed"
        await beside.add_message(conversation.id, message("theirs too"))
        await store.save(conversation)
        expected = ["one, changed", "three", "theirs", "four", "theirs too"]
        same(said(await beside.get_messages(conversation.id)), expected, "after one was changed and one taken out")


@OURS
async def a_save_writes_only_what_the_caller_changed(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        conversation = await talk(store, "one", "two", title="mine", summary="old")
        theirs = await beside.get(conversation.id)
        theirs.title, theirs.messages[1].content = "theirs", "two, theirs"
        await beside.save(theirs)
        await beside.edit_message(conversation.id, theirs.messages[0].id, "one, edited")
        for n in range(2):
            conversation.summary = f"new {n}"
            await store.save(conversation)
            found = await store.get(conversation.id)
            same((found.title, found.summary), ("theirs", f"new {n}"), "title and summary")
            assert found.active_branch_id is not None, "the branch that another made active stays so"
            same(said(found.messages), ["one", "two, theirs", "one, edited"], "the messages")
        conversation.title = "mine again"
        await store.save(conversation)
        same((await store.get(conversation.id)).title, "mine again", "the title that was changed here")


@OURS
async def a_save_in_another_order_keeps_what_others_changed(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        conversation = await talk(store, "one", "two", "three", "four")
        theirs = await beside.get(conversation.id)
        theirs.messages[0].content = "one, theirs"
        del theirs.messages[1]
        await beside.save(theirs)
        conversation.messages.insert(0, conversation.messages.pop())
        for _ in range(2):
            await store.save(conversation)
            same(said(await beside.get_messages(conversation.id)), ["four", "one, theirs", "three"], "the messages")
        same([each.content for _, each in await store.search("theirs")], ["one, theirs"], "what is found")
        conversation.messages.reverse()
        conversation.messages[2].content = "one, mine"
        await store.save(conversation)
        same(said(await beside.get_messages(conversation.id)), ["three", "one, mine", "four"], "then")


@OURS
async def any_number_limits(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one", "one more")
        for limit in (None, 2, 2**63, 10**30):
            same(len(await store.list_conversations(limit=limit)), 1, f"the conversations, up to {limit}")
            same(len(await store.get_messages(conversation.id, limit=limit)), 2, f"the messages, up to {limit}")
            same(len(await store.search("one", limit=limit)), 2, f"what is found, up to {limit}")
        same(await store.list_conversations(offset=10**30), [], "the conversations behind the last one")


@OURS
async def a_change_to_an_equal_value_of_another_type_is_saved(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, metadata={"done": 1, "rate": 2})
        conversation.metadata = {"done": True, "rate": 2.0}
        await store.save(conversation)
        found = (await store.get(conversation.id)).metadata
        same(repr(found), repr({"done": True, "rate": 2.0}), "the metadata")


@OURS
async def a_conversation_built_by_hand_deletes_nothing(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one", "two", title="first")
        await store.save(Conversation(id=conversation.id, title="second", messages=[message("three")]))
        found = await store.get(conversation.id)
        same((found.title, said(found.messages)), ("second", ["one", "two", "three"]), "title and messages")
        again = copy.deepcopy(found)
        del again.messages[0]
        again.messages[0].content = "two, changed"
        await store.save(again)
        same(said(await store.get_messages(conversation.id)), ["one", "two, changed", "three"], "after a copy's save")


@OURS
async def the_order_of_the_object_is_kept(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "b", "d")
        for at, content in ((0, "a"), (2, "c"), (4, "e")):
            conversation.messages.insert(at, message(content))
        await store.save(conversation)
        same(said(await store.get_messages(conversation.id)), list("abcde"), "after new ones between the old")
        conversation.messages.reverse()
        await store.save(conversation)
        same(said(await store.get_messages(conversation.id)), list("edcba"), "the other way round")
        for n in range(70):
            conversation.messages.insert(1, message(n))
            await store.save(conversation)
        expected = ["e", *range(69, -1, -1), *"dcba"]
        same(said(await store.get_messages(conversation.id)), expected, "after 70 in one place")
        await store.add_message(conversation.id, message("last"))
        same(said((await store.get(conversation.id)).messages), [*expected, "last"], "after an append")


@OURS
async def a_conversation_deleted_and_made_anew_is_another(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one", "two")
        await store.delete(conversation.id)
        await store.save(conversation)
        same(await store.get(conversation.id), conversation, "the conversation saved once more")
        await store.delete(conversation.id)
        await store.save(Conversation(id=conversation.id, messages=[message("theirs")]))
        await store.save(conversation)
        same(set(said(await store.get_messages(conversation.id))), {"one", "two", "theirs"}, "what both have said")


@OURS
async def a_conversation_is_copied_to_another_scope_whole(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one", "two")
        await store.save(conversation, Scope.GLOBAL)
        same(await store.get(conversation.id, Scope.GLOBAL), conversation, "the conversation in the other scope")
        await store.save(conversation)
        same(await store.get(conversation.id), conversation, "the conversation where it was")


@OURS
async def racing_appends_and_saves_lose_none(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        conversation = await talk(store, "first", title="t")

        async def appends(to: ConversationStore, who: str) -> None:
            for n in range(12):
                await to.append(conversation.id, [message([who, n]), message([who, n + 0.5])])

        async def saves(to: ConversationStore, who: str) -> None:
            mine = await to.get(conversation.id)
            assert mine is not None
            for n in range(12):
                mine.messages.append(message([who, n]))
                mine.metadata[who] = n
                await to.save(mine)

        writers = [write(to, f"{write.__name__} {n}") for n, to in enumerate((store, beside) * 2)
                   for write in (appends, saves)]  # fmt: skip
        await asyncio.gather(*writers)
        found = said(await store.get_messages(conversation.id))[1:]
        same(len(found), 4 * 24 + 4 * 12, "how many messages there are")
        for who in {who for who, _ in found}:
            numbers = [n for each, n in found if each == who]
            same(numbers, sorted(numbers), f"the messages of {who}")


@OURS
async def times_and_order_are_those_of_the_clock(make: Make) -> None:
    clock = VirtualClock()
    async with opened(make, clock=clock) as store:
        made = []
        for n in range(4):
            clock.advance(10)
            made.append(await talk(store, str(n), agent_key=["a", "", None, "\x00\ud800"][n]))
        clock.advance(10)
        await store.add_message(made[1].id, message("more"))
        order = [1, 3, 2, 0]
        listed = await store.list_conversations()
        same([each.id for each in listed], [made[n].id for n in order], "the list")
        same([said(each.messages) for each in listed], [["1", "more"], ["3"], ["2"], ["0"]], "their messages")
        for n, agent in enumerate(["a", "", None, "\x00\ud800"]):
            expected = [made[n].id] if agent is not None else [made[n].id for n in order]
            found = await store.list_conversations(agent_key=agent)
            same([each.id for each in found], expected, f"those of agent {agent!a}")
        same((await store.get(made[1].id)).updated_at.timestamp(), clock.wall(), "when the second was changed")
        made[0].agent_key = "b"
        await store.save(made[0])
        same(
            [each.id for each in await store.list_conversations(agent_key="b")], [made[0].id], "those of another agent"
        )
        same(await store.list_conversations(agent_key="a"), [], "those of the agent it had")


@OURS
async def a_time_stays_naive_or_in_its_zone(make: Make) -> None:
    async with opened(make) as store:
        for zone in (None, dt.UTC, EAST):
            conversation = Conversation(updated_at=NOON.astimezone(EAST).replace(tzinfo=zone))
            await store.save(conversation)
            same(conversation.updated_at.tzinfo, zone, "the zone of the object saved")
            same((await store.get(conversation.id)).updated_at, conversation.updated_at, "the time stored")
            await store.add_message(conversation.id, message("later"))
            same((await store.get(conversation.id)).updated_at.tzinfo, zone, "the zone after an append")


@OURS
async def a_long_conversation_is_read_from_its_end(make: Make) -> None:
    async with opened(make) as store:
        start = NOON.replace(tzinfo=None)
        messages = [message(n, timestamp=start + dt.timedelta(seconds=n)) for n in range(450)]
        conversation = Conversation(messages=messages)
        await store.save(conversation)
        late = message("late", timestamp=start)
        await store.add_message(conversation.id, late)

        async def some(**options: Any) -> list[Any]:
            return said(await store.get_messages(conversation.id, **options))

        same(await some(before=NOON + dt.timedelta(seconds=100), limit=3), [98, 99, "late"], "three before the 100th")
        same(await some(before=NOON + dt.timedelta(seconds=3)), [0, 1, 2, "late"], "all before the third")
        same(await some(before=NOON + dt.timedelta(days=1)), [*range(450), "late"], "all before the next day")
        same(await some(limit=2), [449, "late"], "the last two")
        same(await some(limit=0), [], "none of them")


@OURS
async def values_are_kept_as_they_are_and_are_no_aliases(make: Make) -> None:
    async with opened(make) as store:
        content = copy.deepcopy(TYPED)
        conversation = Conversation(metadata=content, messages=[message(content)])
        await store.save(conversation)
        content["pair"] = "changed by its writer"
        found = await store.get(conversation.id)
        same((found.metadata, found.messages[0].content), (TYPED, TYPED), "values of many types")
        found.messages[0].content["tree"]["a"].append("changed by its reader")
        same((await store.get_messages(conversation.id))[0].content, TYPED, "the value after its reader changed it")


@OURS
async def a_message_may_hold_a_picture(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one")
        picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}]
        await store.add_message(conversation.id, message(picture))
        found = await store.get(conversation.id)
        same(found.messages[-1].content == picture, True, "whether the picture came back")
        found.title = "changed"
        await store.save(found)
        with refused(UnserialisableResult, "a message of more than 16 MiB"):
            await store.add_message(conversation.id, message("x" * 17 * 1024 * 1024))


@OURS
async def what_cannot_be_kept_is_refused_and_nothing_lost(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one")
        kept = await store.get(conversation.id)

        async def tried(what: str, error: type[Exception], call: Callable[[], Awaitable[Any]]) -> None:
            with refused(error, what):
                await call()
            same(await store.get(conversation.id), kept, f"the conversation after {what}")

        bad: dict[str, tuple[type[Exception], Any]] = {
            "a message without JSON form": (UnserialisableResult, message(object())),
            "a message that is none": (InvalidArgument, "hello"),
            "a message whose id is none": (InvalidArgument, message("x", id="../x")),
            "a message of no time": (InvalidArgument, message("x", timestamp=None)),
            "a tool call that is none": (InvalidArgument, message("x", tool_calls=[{"id": "c", "function": {}}])),
        }
        for what, (error, value) in bad.items():
            await tried(f"add_message of {what}", error, lambda: store.add_message(conversation.id, value))  # noqa: B023
            await tried(f"append of {what}", error, lambda: store.append(conversation.id, [message("x"), value]))  # noqa: B023
            mine = dataclasses.replace(conversation, title="changed", messages=[message("y"), value])
            await tried(f"save of {what}", error, lambda: store.save(mine))  # noqa: B023
        twice = dataclasses.replace(conversation, messages=[conversation.messages[0]] * 2)
        await tried("two messages of one id", InvalidArgument, lambda: store.save(twice))
        odd = dataclasses.replace(conversation, metadata={"x": object()})
        await tried("metadata without JSON form", UnserialisableResult, lambda: store.save(odd))
        odd = dataclasses.replace(conversation, agent_key=5)  # type: ignore[arg-type]
        await tried("an agent that is none", InvalidArgument, lambda: store.save(odd))
        await tried("a list of an agent that is none", InvalidArgument, lambda: store.list_conversations(agent_key=5))
        none = dataclasses.replace(conversation, messages=None)  # type: ignore[arg-type]
        await tried("messages that are none", InvalidArgument, lambda: store.save(none))
        await tried("a conversation that is none", InvalidArgument, lambda: store.save("hello"))
        await tried("an id that is none", InvalidArgument, lambda: store.get("../x"))
        await tried("a limit below 0", InvalidArgument, lambda: store.get_messages(conversation.id, limit=-1))
        await tried("an offset below 0", InvalidArgument, lambda: store.list_conversations(offset=-1))
        await tried("a search for no text", InvalidArgument, lambda: store.search(None))
        await tried("a time that is none", InvalidArgument, lambda: store.get_messages(conversation.id, before=1))


@OURS
async def a_session_is_seen_by_those_who_know_its_id(make: Make) -> None:
    async with opened(make, place="one") as mine, opened(make, place="one") as another:
        conversation = Conversation(messages=[message("one")])
        await mine.save(conversation, Scope.SESSION)
        await mine.add_message(conversation.id, message("two"), Scope.SESSION)
        same(said(await mine.history(conversation.id, Scope.SESSION)), ["one", "two"], "its messages in the session")
        same(await another.get(conversation.id, Scope.SESSION), None, "the conversation in another session")
        same(await mine.get(conversation.id), None, "the conversation in the project")


@OURS
async def a_session_that_is_used_loses_no_message(make: Make) -> None:
    clock = VirtualClock()
    async with opened(make, clock=clock, session_id="s", session_ttl=100.0) as store:
        conversation = Conversation(messages=[message("first")])
        await store.save(conversation, Scope.SESSION)
        told = ["first"]
        for n in range(10):
            clock.advance(40)
            await store.add_message(conversation.id, message(str(n)), Scope.SESSION)
            told.append(str(n))
        for _ in range(4):
            clock.advance(40)
            found = await store.get(conversation.id, Scope.SESSION)
            found.title = f"at {clock.wall()}"
            await store.save(found, Scope.SESSION)
        found = await store.get(conversation.id, Scope.SESSION)
        same([each.content for each in found.messages], told, "what was said in the session")


@OURS
async def a_superseded_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "q1", "a1")
        q1, a1 = conversation.messages

        async def state() -> Any:
            return await store.list_conversations()

        writes: dict[str, Callable[[], Awaitable[Any]]] = {
            "add_message": lambda: store.add_message(conversation.id, message("late")),
            "append": lambda: store.append(conversation.id, [message("late"), message("later")]),
            "save": lambda: store.save(dataclasses.replace(conversation, title="late")),
            "save of a new one": lambda: store.save(Conversation()),
            "edit_message": lambda: store.edit_message(conversation.id, q1.id, "late"),
            "regenerate": lambda: store.regenerate(conversation.id, a1.id, "late", switch=False),
            "switch_branch": lambda: store.switch_branch(conversation.id, None),
            "fork": lambda: store.fork(conversation.id),
            "delete": lambda: store.delete(conversation.id),
        }
        await fenced(store.documents(Scope.PROJECT).commits, writes, state)
