"""Cases for what the conversation stores of this package do in addition to the contract."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime as dt
from collections.abc import Awaitable, Callable
from typing import Any

from agent_runtime_core.errors import InvalidArgument, UnserialisableResult
from agent_runtime_core.persistence.base.conversations import ConversationStore
from agent_runtime_core.persistence.models import Conversation, Scope
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.testing.contracts.checks import Cases, opened, refused, same
from agent_runtime_core.testing.contracts.persistence.conversations import EAST, NOON, Case, Make, message, said, talk
from tests.contract.persistence.fixtures import TYPED, fenced

BUILT_IN: Cases[Case] = Cases()


@BUILT_IN
async def an_id_is_appended_once(make: Make) -> None:
    async with opened(make) as store:
        conversation, more = await talk(store, "one"), message("two")
        await asyncio.gather(*(store.add_message(conversation.id, more) for _ in range(8)))
        await store.add_message(conversation.id, dataclasses.replace(more, content="another two"))
        same(said(await store.get_messages(conversation.id)), ["one", "two"], "the messages")


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
async def any_number_limits(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one", "one more")
        for limit in (None, 2, 2**63, 10**30):
            same(len(await store.list_conversations(limit=limit)), 1, f"the conversations, up to {limit}")
            same(len(await store.get_messages(conversation.id, limit=limit)), 2, f"the messages, up to {limit}")
            same(len(await store.search("one", limit=limit)), 2, f"what is found, up to {limit}")
        same(await store.list_conversations(offset=10**30), [], "the conversations behind the last one")


@BUILT_IN
async def a_change_to_an_equal_value_of_another_type_is_saved(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, metadata={"done": 1, "rate": 2})
        conversation.metadata = {"done": True, "rate": 2.0}
        await store.save(conversation)
        found = (await store.get(conversation.id)).metadata
        same(repr(found), repr({"done": True, "rate": 2.0}), "the metadata")


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
async def a_conversation_is_copied_to_another_scope_whole(make: Make) -> None:
    async with opened(make) as store:
        conversation = await talk(store, "one", "two")
        await store.save(conversation, Scope.GLOBAL)
        same(await store.get(conversation.id, Scope.GLOBAL), conversation, "the conversation in the other scope")
        await store.save(conversation)
        same(await store.get(conversation.id), conversation, "the conversation where it was")


@BUILT_IN
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

        writers = [
            write(to, f"{write.__name__} {n}") for n, to in enumerate((store, beside) * 2) for write in (appends, saves)
        ]
        await asyncio.gather(*writers)
        found = said(await store.get_messages(conversation.id))[1:]
        same(len(found), 4 * 24 + 4 * 12, "how many messages there are")
        for who in {who for who, _ in found}:
            numbers = [n for each, n in found if each == who]
            same(numbers, sorted(numbers), f"the messages of {who}")


@BUILT_IN
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
        same([each.messages for each in listed], [[]] * 4, "their messages, which a list does not read")
        found = [said((await store.get(each.id)).messages) for each in listed]
        same(found, [["1", "more"], ["3"], ["2"], ["0"]], "the messages of each")
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


@BUILT_IN
async def a_time_stays_naive_or_in_its_zone(make: Make) -> None:
    async with opened(make) as store:
        for zone in (None, dt.UTC, EAST):
            conversation = Conversation(updated_at=NOON.astimezone(EAST).replace(tzinfo=zone))
            await store.save(conversation)
            same(conversation.updated_at.tzinfo, zone, "the zone of the object saved")
            same((await store.get(conversation.id)).updated_at, conversation.updated_at, "the time stored")
            await store.add_message(conversation.id, message("later"))
            same((await store.get(conversation.id)).updated_at.tzinfo, zone, "the zone after an append")


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
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


@BUILT_IN
async def a_session_is_seen_by_those_who_know_its_id(make: Make) -> None:
    async with opened(make, place="one") as mine, opened(make, place="one") as another:
        conversation = Conversation(messages=[message("one")])
        await mine.save(conversation, Scope.SESSION)
        await mine.add_message(conversation.id, message("two"), Scope.SESSION)
        same(said(await mine.history(conversation.id, Scope.SESSION)), ["one", "two"], "its messages in the session")
        same(await another.get(conversation.id, Scope.SESSION), None, "the conversation in another session")
        same(await mine.get(conversation.id), None, "the conversation in the project")


@BUILT_IN
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


@BUILT_IN
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
