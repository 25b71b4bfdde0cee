"""Load the conversation of a run, and append the run's new messages to it.

The journal records the last message at the start of the run, so that a resumed run sees the same history. New messages
have ids made of the run's id and a number, and are appended before the run ends: after a crash between the two the same
messages are appended again, which changes nothing. A run that does not succeed appends its complete turns and the
messages of its user (`kept_messages`). If it is resumed, each message is found again, and the results of calls that
were open replace the messages that closed them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, cast
from uuid import UUID, uuid5

from .._core.arguments import SYSTEM_ROLES, are_mappings
from .._core.clock import Clock, aware
from .._core.codec.json import decode, encode
from .._core.ids import conversation_name
from .._core.log import about_run, log
from .._core.validation import Shown, must
from .._execution.context import Context
from .._execution.effects import FORKED_FROM
from .._execution.loop_messages import LoopTurn
from .._execution.result_codec import OmittedHistory, encode_result
from .._journal.record import DONE, Record
from ..errors import InvalidArgument, StorageBusy
from ..interfaces import RunResult
from ..llm._openai_format import text_of_answer
from ..persistence.base.conversations import ConversationStore
from ..persistence.chat_format import RAW, message_of, paired, same_chat
from ..persistence.document_stores.conversations import read_history
from ..persistence.models import Conversation, ConversationMessage
from ..persistence.stored_history import OPEN, REJECTED, UNANSWERED, ChatPath, StoredHistory, copied, is_marked
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
        self._name = conversation_name(row.conversation)
        self.forked: bool = FORKED_FROM in cast("dict[str, Any]", decode(row.metadata))
        self._number = row.arrival  # distinguishes the run from a deleted run with the same id
        self._loaded: list[Mapping[str, Any]] = []  # without the leading prompts
        self._is_long: bool | None = None  # whether a saved result refers to them; None if not known yet
        self._input_messages: list[Any] = []  # messages of the input that are not in the conversation yet
        self._pinned_leaf: dict[str, Any] = {}
        self._base: UUID = self.run_id  # what the ids of the messages of this run are made of
        self._leaf: ConversationMessage | None = None  # the last loaded message
        self._stored = False  # the conversation exists
        self._saved_before = False  # it contains messages of an earlier execution of this run

    async def load(self, ctx: Context, read: ReadHistory | None = None) -> None:
        """Put the earlier messages before the messages of the input, unless the input begins with them already.

        Args:
            ctx: The context.
            read: Reads the conversation instead of `read_history`.
        """
        if read is None:
            stored = await read_history(self.store, self.conversation_id)
        else:
            stored = await read(ctx, self.store, self.conversation_id)

        async def newest() -> dict[str, Any]:
            leaf = None if stored is None else stored.leaf()
            branch = None if stored is None else stored.active_branch_id
            found: dict[str, Any] = {
                "leaf": None if leaf is None else str(leaf.id),
                "branch": None if branch is None else str(branch),
            }
            # The run starts now: messages with its ids belong to a deleted run with the same id.
            return {**found, "number": self._number} if self._is_in(stored) else found

        if ctx.started_without("history"):
            # Its runner stored no conversations then. With a history now, the code would see other messages on replay
            # than those that its recorded steps were made from.
            pinned = {**await newest(), "leaf": None}
        else:
            pinned = await ctx.recorded_value("history", newest)
        leaf = pinned["leaf"]
        if ctx.history_stale and leaf is not None and (stored is None or UUID(leaf) not in stored):
            raise StorageBusy(
                f"conversation {self.conversation_id} cannot be read, and the last known history does not have the "
                "messages that this run started with. The run is tried again later"
            )
        prompts = await self._pin(stored, pinned, ctx.input_messages)
        ctx.input_messages = [*prompts, *self._loaded, *self._input_messages]
        ctx.history = list(ctx.input_messages)

    async def load_recorded(self, records: Iterable[Record], messages: Sequence[Any]) -> bool:
        """Read the conversation for a run whose code is not executed; return whether its code loaded it before.

        Args:
            records: The journal of the run.
            messages: The messages of its input.
        """
        pins = (each for each in records if each.kind == DONE and each.name == "history" and each.key[:2] == "v:")
        if (pin := next(pins, None)) is None:
            return False
        pinned = cast("dict[str, Any]", decode(pin.result or "{}"))
        await self._pin(await read_history(self.store, self.conversation_id), pinned, messages)
        return True

    async def _pin(self, stored: StoredHistory | None, pinned: dict[str, Any], messages: Sequence[Any]) -> list[Any]:
        """Load the messages up to the pinned message, and return the prompts."""
        self._pinned_leaf, leaf = pinned, pinned["leaf"]
        if "number" in pinned:
            self._base = uuid5(self.run_id, f"run:{pinned['number']}")
        self._stored, self._saved_before = stored is not None, self._is_in(stored)
        path = ChatPath() if stored is None or leaf is None else await stored.path_to(UUID(leaf))
        self._leaf = path.leaf
        prompts, self._loaded, self._input_messages = await _joined(path, messages)
        return prompts

    def _is_in(self, stored: StoredHistory | None) -> bool:
        """Return whether a conversation contains messages of this run."""
        first = (self._own_id("message", 0), self._own_id("sent", 0))
        return stored is not None and any(each in stored for each in first)

    async def save(self, result: RunResult) -> None:
        """Append the new messages of this run to the conversation."""
        encode_result(result, self.omitted(result))  # a result that cannot be recorded must not be appended either
        new = self._new_messages(result)
        if new:
            await self._store(self._with_ids(new), answered=True)

    async def keep(
        self, turns: Sequence[LoopTurn], sent: Sequence[Mapping[str, Any]], result: RunResult, *,
        rejected: bool, unanswered: bool,
    ) -> None:  # fmt: skip
        """Append the complete turns and the user's messages of a run that did not succeed.

        The next run of the conversation then sees what the user asked and what the tools did.

        Args:
            turns: The turns of its agent loops.
            sent: The messages that were sent to the run while it was executed.
            result: The result of the run. Without turns, its messages are used.
            rejected: Whether the provider rejected the last request. Messages of the user that no other request
                contained are marked so that no later request contains them.
            unanswered: Whether to keep messages of the user that no complete turn follows.
        """
        new = self._new_messages(result) if result.final_messages else []
        kept = kept_messages(self._loaded, self._input_messages, turns, new, sent, rejected=rejected)
        if not unanswered:
            kept = kept[: max((at + 1 for at, each in enumerate(kept) if not each.is_tail), default=0)]
        if not kept:
            return
        messages = self._with_ids([each.chat for each in kept])
        accepted: list[ConversationMessage] = []
        for each, message in zip(kept, messages[-len(kept) :], strict=True):
            if each.number is not None:  # if the run is resumed, it may have another position
                message.id = self._own_id("sent", each.number)
            message.metadata = {**message.metadata, **each.marks}
            if each.accepted:
                accepted.append(message)
        await self._store(messages, accepted=accepted)

    def _own_id(self, kind: str, number: int) -> UUID:
        return uuid5(self._base, f"{kind}:{number}")

    async def _store(
        self, messages: Sequence[ConversationMessage], *, answered: bool = False,
        accepted: Sequence[ConversationMessage] = (),
    ) -> None:  # fmt: skip
        """Append the messages of this run that the conversation does not contain, and correct the others.

        Args:
            messages: All messages of the run, in their order.
            answered: Whether the run succeeded.
            accepted: The messages that a provider accepted in a request, if the run did not succeed.
        """
        if self._saved_before and (stored := await self.store.get(self.conversation_id)) is not None:
            self._match(stored.messages, messages)
        if not self._stored and await self.store.get(self.conversation_id) is None:
            conversation = Conversation(id=self.conversation_id, agent_key=self.agent, name=self._name)
            await self.store.save(conversation)
        added = await self.store.append(self.conversation_id, messages)
        if not self._saved_before and added in (None, len(messages)):
            return
        stored = await self.store.get(self.conversation_id)
        if stored is None:  # it was deleted since
            return
        new, is_accepted, changed = {each.id: each for each in messages}, {each.id for each in accepted}, False
        for old in stored.messages:
            if old.id in new:
                changed = _correct(old, new[old.id], answered=answered, accepted=old.id in is_accepted) or changed
        ordered = _moved(stored.messages, messages)
        if changed or ordered != stored.messages:
            stored.messages = ordered
            await self.store.save(stored)

    def _match(self, stored: Sequence[ConversationMessage], messages: Sequence[ConversationMessage]) -> None:
        """Give messages of this run the ids under which an earlier execution stored them, and new ids to the others."""
        own, taken, at, number = self._own_messages(stored, messages), {each.id for each in stored}, 0, len(messages)
        for message in messages:
            found = next((n for n in range(at, len(own)) if _is_same(own[n], message)), None)
            if found is not None:
                message.id, at = own[found].id, found + 1
                continue
            while message.id in taken:
                message.id, number = self._own_id("message", number), number + 1
            taken.add(message.id)

    def _own_messages(
        self, stored: Sequence[ConversationMessage], new: Sequence[ConversationMessage]
    ) -> list[ConversationMessage]:
        """Return the messages of this run in the conversation, which an earlier execution stored."""
        others = (each.position for each in stored if each.run_id == self.run_id and each.position is not None)
        most = max([len(stored) + len(new), *(each + 1 for each in others)])
        ids = {self._own_id(kind, number) for kind in ("message", "sent") for number in range(most)}
        ids.add(uuid5(self._base, "leaf"))
        return [each for each in stored if each.id in ids]

    def omitted(self, result: RunResult) -> OmittedHistory | None:
        """Return which messages of a result are the loaded history, if that is longer than `MAX_INLINE_HISTORY`."""
        leaf, count = self._pinned_leaf.get("leaf"), len(self._loaded)
        messages = result.final_messages or []
        at = len(split_prompts(messages)[0])
        if leaf is None or messages[at : at + count] != self._loaded:
            return None
        if self._is_long is None:
            self._is_long = _is_long(self._loaded)
        if not self._is_long:
            return None
        return OmittedHistory(str(self.conversation_id), leaf, at, count)

    def _new_messages(self, result: RunResult) -> list[Mapping[str, Any]]:
        _, messages = split_prompts(result.final_messages or [])
        if not messages:
            response = result.final_output.get("response") if isinstance(result.final_output, dict) else None
            answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else []
            return [*self._input_messages, *answer]
        known = overlap([*self._loaded, *self._input_messages], messages, len(self._input_messages))
        return [*self._input_messages, *messages] if known is None else messages[known - len(self._input_messages) :]

    def _with_ids(self, new: Sequence[Mapping[str, Any]]) -> list[ConversationMessage]:
        """Return new messages as messages of the run's branch. The first message of a branch names its parent.

        If both roles are the same, the new message would replace its parent: the branch then begins with a copy of the
        parent.
        """
        branch = uuid5(self._base, "branch") if self.forked else _uuid(self._pinned_leaf["branch"])
        messages = [self._message(each, n, branch) for n, each in enumerate(new)]
        leaf = self._leaf
        if leaf is None or leaf.branch_id == branch:
            return messages
        if leaf.role == messages[0].role:
            metadata = {**(leaf.metadata or {}), "forked_from": str(leaf.id)}
            messages.insert(0, replace(leaf, id=uuid5(self._base, "leaf"), branch_id=branch, metadata=metadata))
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
        message = message_of(
            chat, self._own_id("message", number), timestamp=when, branch_id=branch, run_id=self.run_id, position=number
        )
        if unanswered:
            message.metadata = {**message.metadata, UNANSWERED: True}
        return message


async def merged_history(
    store: ConversationStore, conversation_id: UUID, leaf: str | None, messages: list[Any]
) -> list[Any]:
    """Return the messages that a run started with: its conversation up to the message `leaf`, and its input.

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

    The code of the run may modify all of them, so the messages of the conversation are copies.
    """
    prompts, passed = split_prompts(messages)
    new = _beyond(passed, path.chats)
    loaded: list[Mapping[str, Any]] = [*await path.copies(new)]
    if new is passed:
        new = _beyond(passed, loaded)
    prompts += [copied(each) for each in path.prompts if not any(same_chat(each, one) for one in prompts)]
    return prompts, loaded, new


async def restore_history(store: ConversationStore, result: RunResult, omitted: OmittedHistory) -> RunResult:
    """Put the messages that a saved result refers to into it, if they are still in the conversation."""
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
            omitted.conversation_id,
            result.run_id,
            extra=None if result.run_id is None else about_run(str(result.run_id)),
        )
    return result


def _is_long(chats: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages have more than `MAX_INLINE_HISTORY` bytes as JSON. Only so many are encoded."""
    left = MAX_INLINE_HISTORY - 1  # each part is in two brackets, and one of them counts as the comma after it
    for start in range(0, len(chats), _ENCODED_AT_ONCE):
        left -= len(encode(chats[start : start + _ENCODED_AT_ONCE], max_bytes=_UNLIMITED)) - 1
        if left < 0:
            return True
    return False


def _is_same(stored: ConversationMessage, message: ConversationMessage) -> bool:
    """Return whether a stored message is this message of the run. The application may have edited its text."""
    if stored.role != message.role or stored.tool_call_id != message.tool_call_id:
        return False
    if calls := [(each.id, each.name) for each in message.tool_calls] or stored.tool_calls:
        return calls == [(each.id, each.name) for each in stored.tool_calls]
    if stored.tool_call_id is not None:  # its content may have been redacted
        return True
    return stored.id == message.id or stored.content == message.content


def _correct(stored: ConversationMessage, new: ConversationMessage, *, answered: bool, accepted: bool) -> bool:
    """Correct a stored message of the run, and return whether that changed it.

    A message that was open gets its new content, and an answer gets the content of the last execution. The marks follow
    from how the run ended now.
    """
    before = replace(stored)
    marks = {OPEN, UNANSWERED, REJECTED}
    if is_marked(stored, OPEN):
        stored.content, stored.tool_calls, stored.metadata = new.content, new.tool_calls, dict(new.metadata)
        stored.run_id, stored.position = new.run_id, new.position
    elif answered:
        gone = {REJECTED} if is_marked(new) else marks
        stored.metadata = {name: value for name, value in (stored.metadata or {}).items() if name not in gone}
    elif is_marked(new):
        gone = marks if accepted else {OPEN}
        kept = {name: value for name, value in (stored.metadata or {}).items() if name not in gone}
        stored.metadata = {**kept, **{name: new.metadata[name] for name in marks if name in new.metadata}}
    if stored.role == "assistant" and not stored.tool_calls and stored.content != new.content:
        raw = {RAW: new.metadata[RAW]} if RAW in new.metadata else {}
        stored.content, stored.metadata = new.content, {**{k: v for k, v in stored.metadata.items() if k != RAW}, **raw}
    if is_marked(before):
        stored.parent_message_id = new.parent_message_id
    return stored != before


def _moved(stored: Sequence[ConversationMessage], messages: Sequence[ConversationMessage]) -> list[ConversationMessage]:
    """Return the stored messages, with the messages of the run after the message that they follow in `messages`."""
    by_id, order = {each.id: each for each in stored}, [each.id for each in stored]
    for before, each in pairwise(messages):
        if each.id in by_id and before.id in by_id and order.index(each.id) < order.index(before.id):
            order.remove(each.id)
            order.insert(order.index(before.id) + 1, each.id)
    return [by_id[each] for each in order]


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


def _beyond(messages: list[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages that the conversation `known` does not contain.

    A client that stores the conversation sends all of it with each message, or the last part of it, and often without
    the tool calls. Only such an input contains answers. An input without answers that happens to start with the text of
    the last message is new.
    """
    if begins(messages, known):
        return messages[len(known) :]
    if any(each.get("role") == "assistant" for each in messages):
        for start in range(len(known)):
            count = _repeated(messages, known[start:])
            if any(each.get("role") == "assistant" for each in messages[:count]):
                return messages[count:]
    return messages


def _repeated(messages: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> int:
    """Return how many messages at the start repeat the messages `known`, with or without tool calls and their results.

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


_LONGEST: Final = 2_000  # characters of a result that a provider may have rejected


@dataclass
class Kept:
    """A message that stays.

    Attributes:
        chat: The message.
        accepted: A provider accepted a request with it.
        from_user: It comes from the input, or was sent to the run.
        is_tail: No complete turn of the run follows.
        number: Its number in the messages that were sent to the run, None for others.
        marks: Marks of the stored message.
    """

    chat: Mapping[str, Any]
    accepted: bool
    from_user: bool = False
    is_tail: bool = False
    number: int | None = None
    marks: dict[str, Any] = field(default_factory=dict)


def kept_messages(
    loaded: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]], turns: Sequence[LoopTurn],
    returned: Sequence[Mapping[str, Any]], sent: Sequence[Mapping[str, Any]], *, rejected: bool,
) -> list[Kept]:  # fmt: skip
    """Return the messages of a run that stay: its complete turns, then the messages of its user after them.

    A turn is complete with the results of its tool calls. A call without a result gets a result that says so. Answers
    without a tool call stay only before another complete turn: the run failed, and so did its last answer.

    Args:
        loaded: The history that the run began with.
        given: The messages of its input after that.
        turns: The turns of its agent loops.
        returned: The messages that its agent returned, from the messages of the input on. Used if there are no turns.
        sent: The messages that were sent to the run.
        rejected: Whether the provider rejected the last request.
    """
    loops = {each.loop for each in turns if each.is_first and (each.continues or each.said)}
    turns = [each for each in turns if each.loop in loops]  # the others are calls of a planner
    items, end = _of_turns(loaded, given, turns) if turns else _of_result(given, returned)
    for each in items[end:]:
        each.is_tail = True
    kept = [*items[:end], *(each for each in items[end:] if each.from_user)]
    _number(kept, len(given), sent)
    for each in kept:
        if each.from_user:
            each.marks |= {UNANSWERED: True, REJECTED: True} if rejected and not each.accepted else {UNANSWERED: True}
        elif rejected and not each.accepted:
            each.chat, each.marks = _plain(each.chat), {OPEN: True}
    return kept


def _of_turns(
    loaded: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]], turns: Sequence[LoopTurn]
) -> tuple[list[Kept], int]:
    """Return the messages of a run from the turns of its loops, and how many of them complete turns contain."""
    items, end = [Kept(each, accepted=True, from_user=True) for each in given], 0
    for number, turn in enumerate(turns):
        said = turn.said if not turn.is_first else []
        if turn.is_first and not turn.continues:  # all of its conversation, or another conversation
            whole = split_prompts(turn.said)[1]
            known = overlap([*loaded, *(each.chat for each in items)], whole, 1)
            said = [] if known is None else whole[known:]
        items += [Kept(each, accepted=True) for each in said]
        items += [Kept(each, accepted=True, from_user=True) for each in turn.received]
        is_read = any(each.loop == turn.loop for each in turns[number + 1 :])
        results = turn.closed_results()
        if turn.calls or text_of_answer(turn.answer.get("content")).strip():
            # A person may edit an open call after a resume.
            marks = {OPEN: True} if any(is_open for _, is_open in results) else {}
            items.append(Kept(turn.answer, accepted=is_read, marks=marks))
        for result, is_open in results:
            items.append(Kept(result, accepted=is_read, marks={OPEN: True} if is_open else {}))
        if turn.begun:
            end = len(items)
    return items, end


def _of_result(given: Sequence[Mapping[str, Any]], returned: Sequence[Mapping[str, Any]]) -> tuple[list[Kept], int]:
    """Return the messages of a run whose agent makes its model calls in another way, or returned none."""
    known = {id(each) for each in returned}
    items = [
        Kept(
            each, accepted=False, from_user=each.get("role") == "user", marks={} if id(each) in known else {OPEN: True}
        )
        for each in paired(returned)
    ]
    roles = [each.chat.get("role") for each in items]
    if "tool" not in roles:
        return [Kept(each, accepted=False, from_user=True) for each in given], 0
    for at, each in enumerate(items):
        each.accepted = "assistant" in roles[at:]
    return items, len(roles) - roles[::-1].index("tool")


def _number(kept: list[Kept], given: int, sent: Sequence[Mapping[str, Any]]) -> None:
    """Number the messages that were sent to the run, and add the messages that its agent did not receive.

    Args:
        kept: The messages of the run. The first messages are the input.
        given: How many messages are the input.
        sent: All messages that were sent to the run.
    """
    left = [*enumerate(sent)]
    for each in kept[given:]:
        if each.from_user:
            at = next((at for at, (_, other) in enumerate(left) if same_chat(each.chat, other)), None)
            if at is not None:
                each.number = left.pop(at)[0]
    kept += [Kept(each, accepted=False, from_user=True, is_tail=True, number=number) for number, each in left]


def _plain(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without what its provider may have rejected: pictures, a very long text, data of a provider."""
    text = text_of_answer(chat.get("content")) or "(left out)"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} … ({len(text) - _LONGEST} more characters)"
    plain = {name: chat[name] for name in ("role", "tool_calls", "tool_call_id") if name in chat}
    return {**plain, "content": None if "tool_calls" in chat and not chat.get("content") else text}


def split_prompts(messages: Sequence[Any]) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """Return the leading prompts, which belong to the agent, and the conversation after them."""
    at = 0
    while at < len(messages) and isinstance(messages[at], Mapping) and messages[at].get("role") in SYSTEM_ROLES:
        at += 1
    prompts, rest = list(messages[:at]), list(messages[at:])
    return prompts, rest if are_mappings(rest) else [each for each in rest if isinstance(each, Mapping)]


def begins(messages: Sequence[Mapping[str, Any]], start: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether `messages` begin with `start`."""
    if len(messages) < len(start):
        return False
    # Messages that the code of the run got and returned are equal: a comparison by fields takes much longer.
    return messages[: len(start)] == start or all(map(same_chat, messages, start))


def overlap(known: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]], least: int) -> int | None:
    """Return how many messages at the end of `known` are the first messages of `messages`; None if fewer than `least`.

    If the input contained no messages (`least` is 0), messages that only repeat the end of a longer history are new.
    """
    for count in range(min(len(known), len(messages)), least - 1, -1):
        adds = least > 0 or count < len(messages) or count in (0, len(known))
        if adds and begins(messages, known[len(known) - count :]):
            return count
    return None
