"""The conversation of a run: what was said before is read once, what is new is appended once.

What was read is pinned in the journal, so that a run that is taken up again sees the same; what is appended has ids
made of the run's own and a number, and goes in before the run ends: after a crash between the two the same
messages are offered again, and are there already.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from uuid import UUID, uuid5

from .._core.clock import Clock, aware
from .._core.codec.json import decode, encode
from .._execution.context import Context
from .._execution.effects import FORKED_FROM
from .._execution.result_codec import OmittedHistory, encode_result
from ..errors import InvalidArgument
from ..interfaces import RunResult
from ..persistence.base.conversations import ConversationStore
from ..persistence.chat_format import chat_of, message_of, paired, same_chat
from ..persistence.message_tree import history
from ..persistence.models import Conversation, ConversationMessage
from ..queue.records import RunRow

log: logging.Logger = logging.getLogger("agent_runtime_core")

MAX_INLINE_HISTORY = 64 * 1024  # bytes of JSON: a history up to that is recorded in the result as well
_UNLIMITED = 1 << 40
_SYSTEM_ROLES = ("system", "developer")  # two names of one role


class ConversationHistory:
    """One attempt's view of its conversation."""

    def __init__(self, store: ConversationStore, conversation_id: UUID, row: RunRow, clock: Clock) -> None:
        self.store: ConversationStore = store
        self.conversation_id: UUID = conversation_id
        self.clock: Clock = clock
        self.run_id: UUID = UUID(row.run_id)
        self.agent: str = row.agent
        self.forked: bool = FORKED_FROM in cast("dict[str, Any]", decode(row.metadata))
        self._loaded: list[Mapping[str, Any]] = []  # without the prompts in front of it
        self._input_messages: list[Any] = []  # of the input, what is not in the conversation yet
        self._pinned_leaf: dict[str, str | None] = {}
        self._leaf: ConversationMessage | None = None  # the last message of what was loaded
        self._stored = False  # whether there is such a conversation

    async def load(self, ctx: Context) -> None:
        """Put what was said before in front of the run's own messages, unless they begin with it already."""
        stored = await self.store.get(self.conversation_id)
        self._stored = stored is not None

        async def newest() -> dict[str, str | None]:
            said = [] if stored is None else history(stored.messages, stored.active_branch_id)
            branch = None if stored is None else stored.active_branch_id
            return {"leaf": str(said[-1].id) if said else None, "branch": None if branch is None else str(branch)}

        if ctx.started_without("history"):
            # Its runner kept no conversations then. With a history now, code that runs again would see other messages
            # than those that its recorded steps were made from.
            self._pinned_leaf = {**await newest(), "leaf": None}
        else:
            self._pinned_leaf = await ctx.recorded_value("history", newest)
        leaf = self._pinned_leaf["leaf"]
        kept = [] if stored is None or leaf is None else history(stored.messages, leaf=UUID(leaf))
        self._leaf = kept[-1] if kept else None
        prompts, self._loaded, self._input_messages = _joined(kept, ctx.input_messages)
        ctx.input_messages = [*prompts, *self._loaded, *self._input_messages]
        ctx.history = list(ctx.input_messages)

    async def save(self, result: RunResult) -> None:
        """Append what this run said and heard beyond what was loaded."""
        encode_result(result, self.omitted(result))  # what cannot be recorded must not be kept either
        said = self._new_messages(result)
        if not said:
            return
        if not self._stored and await self.store.get(self.conversation_id) is None:
            await self.store.save(Conversation(id=self.conversation_id, agent_key=self.agent))
        await self.store.append(self.conversation_id, self._with_ids(said))

    def omitted(self, result: RunResult) -> OmittedHistory | None:
        """The messages of a result that are the history as it was loaded, where they are many."""
        leaf, count = self._pinned_leaf.get("leaf"), len(self._loaded)
        told = result.final_messages or []
        at = len(_split(told)[0])
        if leaf is None or told[at : at + count] != self._loaded:
            return None
        if len(encode(self._loaded, max_bytes=_UNLIMITED)) <= MAX_INLINE_HISTORY:
            return None
        return OmittedHistory(str(self.conversation_id), leaf, at, count)

    def _new_messages(self, result: RunResult) -> list[Mapping[str, Any]]:
        _, told = _split(result.final_messages or [])
        if not told:
            said = result.final_output.get("response") if isinstance(result.final_output, dict) else None
            answer = [{"role": "assistant", "content": said}] if isinstance(said, str) else []
            return [*self._input_messages, *answer]
        known = _overlap([*self._loaded, *self._input_messages], told, len(self._input_messages))
        return [*self._input_messages, *told] if known is None else told[known - len(self._input_messages) :]

    def _with_ids(self, said: Sequence[Mapping[str, Any]]) -> list[ConversationMessage]:
        """What was said as messages of the run's branch. The first one of a branch names what it follows.

        Of one role with that it would stand in its place: such a branch begins with what it follows once more.
        """
        branch = uuid5(self.run_id, "branch") if self.forked else _uuid(self._pinned_leaf["branch"])
        messages = [self._message(each, n, branch) for n, each in enumerate(said)]
        leaf = self._leaf
        if leaf is None or leaf.branch_id == branch:
            return messages
        if leaf.role == messages[0].role:
            again = {**(leaf.metadata or {}), "forked_from": str(leaf.id)}
            messages.insert(0, replace(leaf, id=uuid5(self.run_id, "leaf"), branch_id=branch, metadata=again))
        messages[0].parent_message_id = leaf.id
        return messages

    def _message(self, chat: Mapping[str, Any], number: int, branch: UUID | None) -> ConversationMessage:
        when = aware(self.clock.wall())
        return message_of(chat, uuid5(self.run_id, f"message:{number}"), timestamp=when, branch_id=branch)


async def merged_history(
    store: ConversationStore, conversation_id: UUID, leaf: str | None, messages: list[Any]
) -> list[Any]:
    """The messages that a run began with: these of its input, behind its conversation up to the message `leaf`.

    InvalidArgument: the conversation is not there any more.
    """
    stored = None if leaf is None else await store.get(conversation_id)
    if leaf is not None and stored is None:
        raise InvalidArgument(f"the conversation {conversation_id} is not there any more")
    kept = [] if stored is None or leaf is None else history(stored.messages, leaf=UUID(leaf))
    prompts, loaded, given = _joined(kept, messages)
    return [*prompts, *loaded, *given]


def _joined(
    kept: Sequence[ConversationMessage], messages: Sequence[Any]
) -> tuple[list[Any], list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The prompts, what was said before, and what of a run's own messages is not said there yet."""
    before, there = _split([chat_of(each) for each in kept])
    prompts, said = _split(messages)
    given = _beyond(said, there)
    loaded = paired(there, given)
    if given is said:
        given = _beyond(said, loaded)
    prompts += [each for each in before if not any(same_chat(each, one) for one in prompts)]
    return prompts, loaded, given


async def restore_history(store: ConversationStore, result: RunResult, before: OmittedHistory) -> RunResult:
    """The result with the messages that its record names, if the conversation still has them."""
    stored = await store.get(UUID(before.conversation_id))
    try:
        path = [] if stored is None else history(stored.messages, leaf=UUID(before.leaf))
    except InvalidArgument:
        path = []
    known = paired(_split([chat_of(each) for each in path])[1], result.final_messages[before.at :])
    if len(known) == before.messages:
        result.final_messages[before.at : before.at] = known
    else:
        log.warning(
            "conversation %s is not what run %s went on with: its result is without it",
            before.conversation_id, result.run_id,
        )  # fmt: skip
    return result


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


def _split(messages: Sequence[Any]) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """The prompts in front, which are the agent's own affair, and the conversation behind them."""
    at = 0
    while at < len(messages) and isinstance(messages[at], Mapping) and messages[at].get("role") in _SYSTEM_ROLES:
        at += 1
    return list(messages[:at]), [each for each in messages[at:] if isinstance(each, Mapping)]


def _begins(messages: Sequence[Mapping[str, Any]], start: Sequence[Mapping[str, Any]]) -> bool:
    return len(messages) >= len(start) and all(map(same_chat, messages, start))


def _overlap(known: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]], least: int) -> int | None:
    """How many messages at the end of `known` are told again at first, `least` of them or more; None: not so many.

    Where nothing was given, whoever tells the end of a long history again adds to it: a message that is the same as the
    last one, and all that is told, is said once more.
    """
    for count in range(min(len(known), len(told)), least - 1, -1):
        adds = least > 0 or count < len(told) or count in (0, len(known))
        if adds and _begins(told, known[len(known) - count :]):
            return count
    return None


def _beyond(messages: list[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages that the conversation `known` lacks.

    A client that keeps the conversation sends all of it again with each message, or the last part of it, and often
    without the tool calls. Only such an input has answers in it: one that starts with the text of the last message by
    chance is new.
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
    """How many messages at the start are those of `known` again, tool calls and their results left out or not; 0 if
    another message is missing."""
    count = 0
    for each in known:
        if count < len(messages) and (
            same_chat(messages[count], each) or same_chat(messages[count], {**each, "tool_calls": None})
        ):
            count += 1
        elif each.get("role") != "tool" and not each.get("tool_calls"):
            return 0
    return count
