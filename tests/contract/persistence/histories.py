"""Cases for the histories of conversations that the built-in stores keep decoded: they are never out of date."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

from agent_runtime_core.persistence.chat_format import chat_of
from agent_runtime_core.persistence.document_stores.conversations import StoredConversations, read_history
from agent_runtime_core.persistence.message_tree import history
from agent_runtime_core.persistence.models import Conversation, ConversationMessage, new_id
from agent_runtime_core.testing.contracts.checks import Cases, opened, same
from agent_runtime_core.testing.contracts.persistence.conversations import Case, Make, message, talk

HISTORIES: Cases[Case] = Cases()

Change = Callable[[StoredConversations, UUID], Awaitable[Any]]


async def _append(store: StoredConversations, chat: UUID) -> None:
    await store.append(chat, [message("more"), message("and more", "assistant")])


async def _add_branch(store: StoredConversations, chat: UUID) -> None:
    """Append to a branch whose first message follows one in the middle."""
    found = await store.get(chat)
    assert found is not None
    branch, first = UUID(int=7), found.messages[0]
    await store.append(chat, [message("aside", "assistant", branch_id=branch, parent_message_id=first.id)])
    await store.append(chat, [message("on the branch", branch_id=branch)])


async def _edit(store: StoredConversations, chat: UUID) -> None:
    await store.edit_message(chat, (await _messages(store, chat))[2].id, "edited")


async def _edit_elsewhere(store: StoredConversations, chat: UUID) -> None:
    await store.edit_message(chat, (await _messages(store, chat))[0].id, "not shown", switch=False)


async def _to_branch(store: StoredConversations, chat: UUID) -> None:
    await store.switch_branch(chat, (await _messages(store, chat))[-1].branch_id)


async def _to_main_line(store: StoredConversations, chat: UUID) -> None:
    await store.switch_branch(chat, None)


async def _change_text(store: StoredConversations, chat: UUID) -> None:
    await _saved(store, chat, lambda messages: setattr(messages[1], "content", "changed"))


async def _replace_last(store: StoredConversations, chat: UUID) -> None:
    """Delete the last message, and append another one, which may get the same rank."""
    await _saved(store, chat, lambda messages: messages.pop())
    await store.append(chat, [message(f"instead {new_id()}")])


async def _delete_first(store: StoredConversations, chat: UUID) -> None:
    await _saved(store, chat, lambda messages: messages.pop(0))


async def _reorder(store: StoredConversations, chat: UUID) -> None:
    await _saved(store, chat, lambda messages: messages.insert(0, messages.pop(1)))


async def _empty(store: StoredConversations, chat: UUID) -> None:
    await _saved(store, chat, lambda messages: messages.clear())


async def _delete(store: StoredConversations, chat: UUID) -> None:
    await store.delete(chat)


async def _recreate(store: StoredConversations, chat: UUID) -> None:
    """Replace the conversation by another one with the same ids, as many messages, and the same last message."""
    found = await store.get(chat)
    assert found is not None
    await store.delete(chat)
    messages = [dataclasses.replace(each, content=f"new {n}") for n, each in enumerate(found.messages[:-1])]
    again = Conversation(id=chat, messages=[*messages, *found.messages[-1:]], created_at=found.created_at)
    await store.save(again)


CHANGES: Sequence[Change] = (
    _append, _edit_elsewhere, _append, _change_text, _replace_last, _delete_first, _reorder, _edit, _append,
    _to_main_line, _append, _to_branch, _add_branch, _to_branch, _recreate, _append, _empty, _append, _delete,
)  # fmt: skip


async def _messages(store: StoredConversations, chat: UUID) -> list[ConversationMessage]:
    found = await store.get(chat)
    assert found is not None
    return found.messages


async def _saved(store: StoredConversations, chat: UUID, change: Callable[[list[ConversationMessage]], Any]) -> None:
    found = await store.get(chat)
    assert found is not None
    change(found.messages)
    await store.save(found)


async def _shown(store: StoredConversations, chat: UUID) -> list[Any] | None:
    """The chat messages of the active branch, from the history that the store keeps."""
    kept = await read_history(store, chat)
    leaf = None if kept is None else kept.leaf()
    if kept is None or leaf is None:
        return None
    path = await kept.path_to(leaf.id)
    return [*path.prompts, *path.chats]


async def _stored(store: StoredConversations, chat: UUID) -> list[Any] | None:
    """The same, read in full."""
    found = await store.get(chat)
    return None if found is None else [*map(chat_of, history(found.messages, found.active_branch_id))] or None


def _pair(make: Make) -> tuple[Any, Any]:
    return opened(make, place="one"), opened(make, place="one")


@HISTORIES
async def changes_of_another_process_are_seen(make: Make) -> None:
    readers, writers = _pair(make)
    async with readers as store, writers as beside:
        chat = (await talk(store, "one", "two", "three", "four")).id
        for number, change in enumerate(CHANGES):
            await _shown(store, chat)
            await change(beside, chat)
            expected = await _stored(beside, chat)
            for repeated in ("", ", read again"):
                same(await _shown(store, chat), expected, f"after change {number}, {change.__name__}{repeated}")


@HISTORIES
async def changes_through_the_same_store_are_seen(make: Make) -> None:
    async with opened(make, place="one") as store:
        chat = (await talk(store, "one", "two", "three", "four")).id
        for number, change in enumerate(CHANGES):
            await _shown(store, chat)
            await change(store, chat)
            same(await _shown(store, chat), await _stored(store, chat), f"after change {number}, {change.__name__}")


@HISTORIES
async def two_changes_between_two_reads_are_seen(make: Make) -> None:
    """A history that several changes have made out of date, with no read in between."""
    readers, writers = _pair(make)
    async with readers as store, writers as beside:
        for first in (_change_text, _replace_last, _delete_first, _reorder, _edit, _recreate, _empty):
            for second in (_append, _delete) if first is _empty else (_append, _replace_last, _recreate):
                chat = (await talk(beside, "one", "two", "three", "four")).id
                await _shown(store, chat)
                await first(beside, chat)
                await second(beside, chat)
                expected = await _stored(beside, chat)
                same(await _shown(store, chat), expected, f"after {first.__name__} and {second.__name__}")


@HISTORIES
async def a_fork_has_its_own_messages(make: Make) -> None:
    async with opened(make, place="one") as store:
        conversation = await talk(store, "one", "two", "three", "four")
        before = await _shown(store, conversation.id)
        fork = await store.fork(conversation.id, at=conversation.messages[1].id)
        await store.append(fork.id, [message("on the fork")])
        same(await _shown(store, fork.id), await _stored(store, fork.id), "the fork")
        same(await _shown(store, conversation.id), before, "the conversation")


@HISTORIES
async def concurrent_readers_and_writers_agree_in_the_end(make: Make) -> None:
    readers, writers = _pair(make)
    async with readers as store, writers as beside:
        chat = (await talk(store, "one", "two", "three", "four")).id
        await _shown(store, chat)

        async def write(number: int) -> None:
            await beside.append(chat, [message(f"{number}")])
            if number % 3 == 0:
                await _replace_last(beside, chat)

        async def read() -> None:
            for _ in range(4):
                shown = await _shown(store, chat)
                assert shown is not None
                contents = [each["content"] for each in shown]
                same(len(set(contents)), len(contents), "each message is shown once")

        await asyncio.gather(*(each for n in range(6) for each in (write(n), read())))
        same(await _shown(store, chat), await _stored(beside, chat), "in the end")
