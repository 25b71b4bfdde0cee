"""Load the conversation of a run, and append the run's new messages to it.

The journal records which message was the last one when the run started, so that a resumed run sees the same history.
New messages have ids made of the run's id and a number, and are appended before the run ends: after a crash between the
two the same messages are appended again, which changes nothing. A run that fails appends only the messages of its
user, marked as unanswered, under the ids that they also have if the run is resumed and succeeds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast
from uuid import UUID, uuid5

from .._core.chat_messages import SYSTEM_ROLES, are_mappings
from .._core.clock import Clock, aware
from .._core.codec.json import decode, encode
from .._core.log import about_run, log
from .._core.validation import Shown, must
from .._execution.context import Context
from .._execution.effects import FORKED_FROM
from .._execution.result_codec import OmittedHistory, encode_result
from ..errors import InvalidArgument, StorageBusy
from ..interfaces import RunResult
from ..persistence.base.conversations import ConversationStore
from ..persistence.chat_format import message_of, same_chat
from ..persistence.document_stores.conversations import read_history
from ..persistence.models import Conversation, ConversationMessage
from ..persistence.stored_history import REJECTED, UNANSWERED, ChatPath, StoredHistory, copied, is_marked
from ..queue.records import RunRow

MAX_INLINE_HISTORY = 64 * 1024  # bytes of JSON up to which a saved result contains the history
_ENCODED_AT_ONCE = 64  # messages
_UNLIMITED = 1 << 40

#: Called with a context, the store and the id of a conversation; returns the messages.
ReadHistory = Callable[[Context, ConversationStore, UUID], Awaitable[StoredHistory | None]]


class ConversationHistory:
    """The conversation of a run, as one attempt sees it."""

    def __init__(self, store: ConversationStore, conversation_id: UUID, row: RunRow, clock: Clock) -> None:
        self.store: ConversationStore = store
        self.conversation_id: UUID = conversation_id
        self.clock: Clock = clock
        self.run_id: UUID = UUID(row.run_id)
        self.agent: str = row.agent
        self.forked: bool = FORKED_FROM in cast("dict[str, Any]", decode(row.metadata))
        self._loaded: list[Mapping[str, Any]] = []  # without the leading prompts
        self._is_long: bool | None = None  # whether a saved result refers to them; None if not known yet
        self._input_messages: list[Any] = []  # messages of the input that are not in the conversation yet
        self._pinned_leaf: dict[str, str | None] = {}
        self._leaf: ConversationMessage | None = None  # the last loaded message
        self._stored = False  # the conversation exists
        self._saved_before = False  # it has messages of an earlier execution of this run

    async def load(self, ctx: Context, read: ReadHistory | None = None) -> None:
        """Put the earlier messages before those of the input, unless the input begins with them already.

        Args:
            ctx: The context.
            read: Reads the conversation instead of `read_history`.
        """
        if read is None:
            stored = await read_history(self.store, self.conversation_id)
        else:
            stored = await read(ctx, self.store, self.conversation_id)
        self._stored = stored is not None
        first = (self._own_id("message", 0), self._own_id("sent", 0))
        self._saved_before = stored is not None and any(each in stored for each in first)

        async def newest() -> dict[str, str | None]:
            leaf = None if stored is None else stored.leaf()
            branch = None if stored is None else stored.active_branch_id
            return {
                "leaf": None if leaf is None else str(leaf.id),
                "branch": None if branch is None else str(branch),
            }

        if ctx.started_without("history"):
            # Its runner stored no conversations then. With a history now, the code would see other messages on replay
            # than those that its recorded steps were made from.
            self._pinned_leaf = {**await newest(), "leaf": None}
        else:
            self._pinned_leaf = await ctx.recorded_value("history", newest)
        leaf = self._pinned_leaf["leaf"]
        if ctx.history_stale and leaf is not None and (stored is None or UUID(leaf) not in stored):
            raise StorageBusy(
                f"conversation {self.conversation_id} cannot be read, and the last known history does not have the "
                "messages that this run started with. The run is tried again later"
            )
        path = ChatPath() if stored is None or leaf is None else await stored.path_to(UUID(leaf))
        self._leaf = path.leaf
        prompts, self._loaded, self._input_messages = await _joined(path, ctx.input_messages)
        ctx.input_messages = [*prompts, *self._loaded, *self._input_messages]
        ctx.history = list(ctx.input_messages)

    async def save(self, result: RunResult) -> None:
        """Append the new messages of this run to the conversation."""
        encode_result(result, self.omitted(result))  # a result that cannot be recorded must not be appended either
        new = self._new_messages(result)
        if not new:
            return
        messages = self._with_ids(new)
        if self._saved_before:
            await self._take_ids(messages, len(messages) - len(new) + len(self._input_messages))
        await self._append(messages)
        if self._saved_before:
            await self._mark_answered(messages)

    async def save_unanswered(self, sent: Sequence[Mapping[str, Any]], *, rejected: bool) -> None:
        """Append the messages to a run that did not succeed; those of the user are marked as unanswered.

        The next run of the conversation then sees what the user asked, unless the provider `rejected` the request.

        Args:
            sent: The messages that were sent to the run while it was executed. They follow those of its input.
            rejected: Whether to mark the messages so that no later request has them.
        """
        mark = {UNANSWERED: True, REJECTED: True} if rejected else {UNANSWERED: True}
        new = [*self._input_messages, *sent]
        if not new:
            return
        messages = self._with_ids(new)
        for number, each in enumerate(messages[-len(new) :], -len(self._input_messages)):
            if number >= 0:  # if the run is resumed and succeeds, answers are between these
                each.id = self._own_id("sent", number)
            if each.role == "user":
                each.metadata = {**each.metadata, **mark}
        await self._append(messages)

    def _own_id(self, kind: str, number: int) -> UUID:
        return uuid5(self.run_id, f"{kind}:{number}")

    async def _append(self, messages: Sequence[ConversationMessage]) -> None:
        if not self._stored and await self.store.get(self.conversation_id) is None:
            await self.store.save(Conversation(id=self.conversation_id, agent_key=self.agent))
        await self.store.append(self.conversation_id, messages)

    async def _take_ids(self, messages: Sequence[ConversationMessage], start: int) -> None:
        """Give messages that an earlier execution stored as unanswered the ids that they have.

        The history of another run may end with such a message, and an edit of it refers to it.
        """
        for copy in self._copies(await self.store.get(self.conversation_id)):
            for at in range(start, len(messages)):
                if messages[at].role == copy.role and messages[at].content == copy.content:
                    messages[at].id, start = copy.id, at + 1
                    break

    def _copies(self, stored: Conversation | None) -> list[ConversationMessage]:
        """Return the messages to this run that an execution of it which failed has stored."""
        messages = [] if stored is None else stored.messages
        ids = {self._own_id("sent", number) for number in range(len(messages))}
        return [each for each in messages if each.id in ids]

    async def _mark_answered(self, messages: Sequence[ConversationMessage]) -> None:
        """Remove the marks of an earlier execution from messages, and move them between the answers."""
        stored = await self.store.get(self.conversation_id)
        if stored is None:
            return
        saved = {each.id: each for each in messages}
        copies = {each.id for each in self._copies(stored)}
        ordered, changed = _moved(stored.messages, messages, copies), False
        for each in ordered:
            if is_marked(each) and (each.id in saved or each.id in copies):
                new = saved.get(each.id)
                gone = (REJECTED,) if new is not None and is_marked(new) else (UNANSWERED, REJECTED)
                metadata = {name: value for name, value in each.metadata.items() if name not in gone}
                parent = each.parent_message_id if new is None else new.parent_message_id
                changed = changed or (metadata, parent) != (each.metadata, each.parent_message_id)
                each.metadata, each.parent_message_id = metadata, parent
        if changed or ordered != stored.messages:
            stored.messages = ordered
            await self.store.save(stored)

    def omitted(self, result: RunResult) -> OmittedHistory | None:
        """Return which messages of a result are the loaded history, if that is longer than `MAX_INLINE_HISTORY`."""
        leaf, count = self._pinned_leaf.get("leaf"), len(self._loaded)
        messages = result.final_messages or []
        at = len(_split(messages)[0])
        if leaf is None or messages[at : at + count] != self._loaded:
            return None
        if self._is_long is None:
            self._is_long = _is_long(self._loaded)
        if not self._is_long:
            return None
        return OmittedHistory(str(self.conversation_id), leaf, at, count)

    def _new_messages(self, result: RunResult) -> list[Mapping[str, Any]]:
        _, messages = _split(result.final_messages or [])
        if not messages:
            response = result.final_output.get("response") if isinstance(result.final_output, dict) else None
            answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else []
            return [*self._input_messages, *answer]
        known = _overlap([*self._loaded, *self._input_messages], messages, len(self._input_messages))
        return [*self._input_messages, *messages] if known is None else messages[known - len(self._input_messages) :]

    def _with_ids(self, new: Sequence[Mapping[str, Any]]) -> list[ConversationMessage]:
        """Return new messages as those of the run's branch. The first message of a branch names its parent.

        If both have the same role, the new one would replace its parent: the branch then begins with a copy of the
        parent.
        """
        branch = uuid5(self.run_id, "branch") if self.forked else _uuid(self._pinned_leaf["branch"])
        messages = [self._message(each, n, branch) for n, each in enumerate(new)]
        leaf = self._leaf
        if leaf is None or leaf.branch_id == branch:
            return messages
        if leaf.role == messages[0].role:
            metadata = {**(leaf.metadata or {}), "forked_from": str(leaf.id)}
            messages.insert(0, replace(leaf, id=uuid5(self.run_id, "leaf"), branch_id=branch, metadata=metadata))
        messages[0].parent_message_id = leaf.id
        return messages

    def _message(self, chat: Mapping[str, Any], number: int, branch: UUID | None) -> ConversationMessage:
        when = aware(self.clock.wall())
        given = chat.get("metadata")
        metadata = dict(given) if isinstance(given, Mapping) else {}
        unanswered = metadata.pop(UNANSWERED, None) is True
        if unanswered:  # a mark of the stored message, and not of what a model gets
            chat = {
                name: value for name, value in {**chat, "metadata": metadata}.items() if value or name != "metadata"
            }
        message = message_of(chat, uuid5(self.run_id, f"message:{number}"), timestamp=when, branch_id=branch)
        if unanswered:
            message.metadata = {**message.metadata, UNANSWERED: True}
        return message


async def merged_history(
    store: ConversationStore, conversation_id: UUID, leaf: str | None, messages: list[Any]
) -> list[Any]:
    """Return the messages that a run started with: its conversation up to the message `leaf`, and those of its input.

    Raises:
        InvalidArgument: The conversation was deleted.
    """
    stored = None if leaf is None else await read_history(store, conversation_id)
    if leaf is not None and stored is None:
        fix = "Pass another conversation_id, or restore the conversation"
        raise must(f"conversation {conversation_id}", "be in the store", Shown("none: it was deleted"), fix)
    path = ChatPath() if stored is None or leaf is None else await stored.path_to(UUID(leaf))
    prompts, loaded, given = await _joined(path, messages)
    return [*prompts, *loaded, *given]


async def _joined(
    path: ChatPath, messages: Sequence[Any]
) -> tuple[list[Any], list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the prompts, the conversation, and the messages of the input that it does not contain yet.

    The code of the run may modify all of them, so those of the conversation are copies.
    """
    prompts, passed = _split(messages)
    new = _beyond(passed, path.chats)
    loaded: list[Mapping[str, Any]] = [*await path.copies(new)]
    if new is passed:
        new = _beyond(passed, loaded)
    prompts += [copied(each) for each in path.prompts if not any(same_chat(each, one) for one in prompts)]
    return prompts, loaded, new


async def restore_history(store: ConversationStore, result: RunResult, omitted: OmittedHistory) -> RunResult:
    """Put the messages that a saved result refers to into it, if the conversation still has them."""
    stored = await read_history(store, UUID(omitted.conversation_id))
    try:
        path = ChatPath() if stored is None else await stored.path_to(UUID(omitted.leaf))
    except InvalidArgument:
        path = ChatPath()
    known = await path.copies(result.final_messages[omitted.at :])
    if len(known) == omitted.messages:
        result.final_messages[omitted.at : omitted.at] = known
    else:
        log.warning(
            "conversation %s has changed since run %s: the result of the run does not contain it",
            omitted.conversation_id, result.run_id,
            extra=None if result.run_id is None else about_run(str(result.run_id)),
        )  # fmt: skip
    return result


def _is_long(chats: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages have more than `MAX_INLINE_HISTORY` bytes as JSON. Only so many are encoded."""
    left = MAX_INLINE_HISTORY - 1  # each part has two brackets, of which one counts as the comma after it
    for start in range(0, len(chats), _ENCODED_AT_ONCE):
        left -= len(encode(chats[start : start + _ENCODED_AT_ONCE], max_bytes=_UNLIMITED)) - 1
        if left < 0:
            return True
    return False


def _moved(
    stored: Sequence[ConversationMessage], messages: Sequence[ConversationMessage], copies: Collection[UUID]
) -> list[ConversationMessage]:
    """Return the stored messages, with each of `copies` after the message that it follows in `messages`."""
    by_id, order = {each.id: each for each in stored}, [each.id for each in stored]
    for before, each in pairwise(messages):
        if each.id in copies and before.id in by_id and order.index(each.id) < order.index(before.id):
            order.remove(each.id)
            order.insert(order.index(before.id) + 1, each.id)
    return [by_id[each] for each in order]


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


def _split(messages: Sequence[Any]) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """Return the leading prompts, which belong to the agent, and the conversation after them."""
    at = 0
    while at < len(messages) and isinstance(messages[at], Mapping) and messages[at].get("role") in SYSTEM_ROLES:
        at += 1
    prompts, rest = list(messages[:at]), list(messages[at:])
    return prompts, rest if are_mappings(rest) else [each for each in rest if isinstance(each, Mapping)]


def _begins(messages: Sequence[Mapping[str, Any]], start: Sequence[Mapping[str, Any]]) -> bool:
    if len(messages) < len(start):
        return False
    # Messages that the code of the run got and returned are equal: a comparison by fields takes much longer.
    return messages[: len(start)] == start or all(map(same_chat, messages, start))


def _overlap(known: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]], least: int) -> int | None:
    """Return how many messages at the end of `known` are the first ones of `messages`; None if fewer than `least`.

    If the input had no messages (`least` is 0), messages that only repeat the end of a longer history are new ones.
    """
    for count in range(min(len(known), len(messages)), least - 1, -1):
        adds = least > 0 or count < len(messages) or count in (0, len(known))
        if adds and _begins(messages, known[len(known) - count :]):
            return count
    return None


def _beyond(messages: list[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages that the conversation `known` does not contain.

    A client that stores the conversation sends all of it with each message, or the last part of it, and often without
    the tool calls. Only such an input contains answers. An input without one that happens to start with the text of the
    last message is new.
    """
    if _begins(messages, known):
        return messages[len(known) :]
    if any(each.get("role") == "assistant" for each in messages):
        for start in range(len(known)):
            count = _repeated(messages, known[start:])
            if any(each.get("role") == "assistant" for each in messages[:count]):
                return messages[count:]
    return messages


def _repeated(messages: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> int:
    """Return how many messages at the start repeat those of `known`, with or without tool calls and their results.

    Returns 0 if another message is missing.
    """
    count = 0
    for each in known:
        if count < len(messages) and (
            same_chat(messages[count], each) or same_chat(messages[count], {**each, "tool_calls": None})
        ):
            count += 1
        elif each.get("role") != "tool" and not each.get("tool_calls"):
            return 0
    return count
