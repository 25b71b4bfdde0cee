"""Stored messages as the chat messages that agents and models exchange, and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, cast
from uuid import UUID

from .._core.codec.json import decode, encode
from ..errors import BadArguments, UnserialisableResult
from ..interfaces import ToolCallDict
from ..tools.arguments import read_arguments
from .models import ConversationMessage, ToolCall

RAW = "chat"  # in a message's metadata: the chat message, where the fields of the model do not say all of it

_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
#: In its place there, what is the content of the message itself: an answer of 10 MiB fits into a message once.
_ABOVE = {"in": "content"}


def chat_of(message: ConversationMessage) -> dict[str, Any]:
    """The message in OpenAI's chat format."""
    chat = _chat_of(message)
    raw = (message.metadata or {}).get(RAW)  # other people's stores may give None
    if not isinstance(raw, dict) or str(raw.get("role", "")) != message.role:  # something of the caller's own
        return chat
    kept = cast("dict[str, Any]", decode(encode(raw)))
    if kept.get("content") == _ABOVE:
        kept["content"] = copy.deepcopy(message.content)
    was = _chat_of(_message_of(kept, message.id))
    for name in _FIELDS:
        if chat.get(name) != was.get(name):  # it was changed since
            kept.pop(name, None)
            kept |= {name: chat[name]} if name in chat else {}
    return kept


def _chat_of(message: ConversationMessage) -> dict[str, Any]:
    """What the fields of the model say."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [_call_of(each) for each in message.tool_calls]
    if message.tool_call_id is not None:
        chat["tool_call_id"] = message.tool_call_id
    return chat


def _call_of(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, separators=(",", ":"))
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def message_of(chat: Mapping[str, Any], message_id: UUID, **fields: Any) -> ConversationMessage:
    """The chat message under that id. What the model has no field for is kept, and `chat_of` gives it back."""
    message = _message_of(chat, message_id, **fields)
    if _chat_of(message) != dict(chat):
        above = {"content": dict(_ABOVE)} if message.content else {}
        message.metadata = {**message.metadata, RAW: {**chat, **above}}
    return message


def _message_of(chat: Mapping[str, Any], message_id: UUID, **fields: Any) -> ConversationMessage:
    content = chat.get("content")
    return ConversationMessage(
        id=message_id,
        role=str(chat.get("role", "")),
        content=content if isinstance(content, (str, dict, list)) else "",
        tool_calls=[ToolCall(**call) for each in chat.get("tool_calls") or () if (call := _called(each))],
        tool_call_id=chat.get("tool_call_id"),
        **fields,
    )


def _called(call: Any) -> dict[str, Any] | None:
    if not isinstance(call, Mapping):
        return None
    told = ToolCallDict(call)
    try:
        arguments = read_arguments(told.arguments)
        encode([[[arguments]]])  # as deep as a message has them
    except (BadArguments, UnserialisableResult):
        arguments = {}
    return {"id": told.id, "name": told.name, "arguments": arguments}


def paired(chats: Iterable[Mapping[str, Any]], following: Iterable[Any] = ()) -> list[Mapping[str, Any]]:
    """The chat messages, each tool call followed by a result and no result without its call: providers refuse others,
    and would refuse the conversation for ever.

    Results that are missing say so; one of a call at the end may be among the first messages `following`.
    """
    pairs: list[Mapping[str, Any]] = []
    left: list[Any] = []  # ids of calls without a result
    for chat in chats:
        if chat.get("role") != "tool":
            pairs += map(_missing, left)
            pairs.append(chat)
            left = [each.get("id") for each in chat.get("tool_calls") or () if isinstance(each, Mapping)]
        elif chat.get("tool_call_id") in left:
            pairs.append(chat)
            left.remove(chat.get("tool_call_id"))
    told = [each.get("tool_call_id") for each in takewhile(_is_result, following)]
    return [*pairs, *(_missing(each) for each in left if each not in told)]


def _missing(call_id: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "Error: no result of this call is known"}


def _is_result(chat: Any) -> bool:
    return isinstance(chat, Mapping) and chat.get("role") == "tool"


def same_chat(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two chat messages are the same one: what else clients hang on them has no part in it."""
    return all(_told(one, name) == _told(other, name) for name in _FIELDS)


def _told(chat: Mapping[str, Any], name: str) -> Any:
    value = chat.get(name)
    if name == "tool_calls":
        return [each.get("id") for each in value or () if isinstance(each, Mapping)]
    return value or None
