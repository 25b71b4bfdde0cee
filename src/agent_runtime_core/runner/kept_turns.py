"""Decide which messages of a run that did not succeed stay in its conversation. Pure functions on plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .._core.arguments import SYSTEM_ROLES, are_mappings
from .._execution.loop_messages import LoopTurn
from ..llm._openai_format import text_of_answer
from ..persistence.chat_format import paired, same_chat
from ..persistence.stored_history import OPEN, REJECTED, UNANSWERED

_LONGEST: Final = 2_000  # characters of a result that a provider may have rejected


@dataclass
class Kept:
    """A message that stays.

    Attributes:
        chat: The message.
        accepted: A provider has accepted a request with it.
        from_user: It is one of the input, or was sent to the run.
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

    A turn is complete with the results of its tool calls. Calls without a result get one that says so. Answers without
    a tool call stay only before another complete turn: the run has failed, and so has its last answer.

    Args:
        loaded: The history that the run began with.
        given: The messages of its input after that.
        turns: The turns of its agent loops.
        returned: The messages that its agent returned, from those of the input on. Used if there are no turns.
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
        if turn.is_first and not turn.continues:  # all of its conversation, or another one
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
    """Number the messages that were sent to the run, and add the messages that its agent has not received.

    Args:
        kept: The messages of the run. The first ones are those of its input.
        given: How many those are.
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
    """Return how many messages at the end of `known` are the first ones of `messages`; None if fewer than `least`.

    If the input had no messages (`least` is 0), messages that only repeat the end of a longer history are new ones.
    """
    for count in range(min(len(known), len(messages)), least - 1, -1):
        adds = least > 0 or count < len(messages) or count in (0, len(known))
        if adds and begins(messages, known[len(known) - count :]):
            return count
    return None
