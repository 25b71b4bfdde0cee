"""Convert stored messages to the chat messages of agents and models, and back."""

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

#: Key in the metadata of a message: the chat message, if the fields of the model do not hold all of it.
RAW = "chat"

_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
#: Replaces the content in that chat message, because the message itself contains it. A content of 10 MiB fits only
#: once.
_SAME_CONTENT = {"in": "content"}


def chat_of(message: ConversationMessage) -> dict[str, Any]:
    """Return a message in OpenAI's chat format."""
    chat = _chat_of(message)
    raw = (message.metadata or {}).get(RAW)  # a custom store may return None as metadata
    if not isinstance(raw, dict) or str(raw.get("role", "")) != message.role:  # metadata of the application
        return chat
    original = cast("dict[str, Any]", decode(encode(raw)))
    if original.get("content") == _SAME_CONTENT:
        original["content"] = copy.deepcopy(message.content)
    before = _chat_of(_message_of(original, message.id))
    for name in _FIELDS:
        if chat.get(name) != before.get(name):  # a field of the message was changed after it was stored
            original.pop(name, None)
            original |= {name: chat[name]} if name in chat else {}
    return original


def _chat_of(message: ConversationMessage) -> dict[str, Any]:
    """Return the chat message that the fields of the model describe."""
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
    """Return a chat message as a stored message. `chat_of` restores it, including data without a field in the model."""
    message = _message_of(chat, message_id, **fields)
    if _chat_of(message) != dict(chat):
        content = {"content": dict(_SAME_CONTENT)} if message.content else {}
        message.metadata = {**message.metadata, RAW: {**chat, **content}}
    return message


def _message_of(chat: Mapping[str, Any], message_id: UUID, **fields: Any) -> ConversationMessage:
    content = chat.get("content")
    return ConversationMessage(
        id=message_id,
        role=str(chat.get("role", "")),
        content=content if isinstance(content, (str, dict, list)) else "",
        tool_calls=[ToolCall(**call) for each in chat.get("tool_calls") or () if (call := _tool_call_fields(each))],
        tool_call_id=chat.get("tool_call_id"),
        **fields,
    )


def _tool_call_fields(call: Any) -> dict[str, Any] | None:
    if not isinstance(call, Mapping):
        return None
    tool_call = ToolCallDict(call)
    try:
        arguments = read_arguments(tool_call.arguments)
        encode([[[arguments]]])  # nested as deeply as in a stored message, whose depth is limited
    except (BadArguments, UnserialisableResult):
        arguments = {}
    return {"id": tool_call.id, "name": tool_call.name, "arguments": arguments}


class Pairing:
    """Chat messages in which each tool call is followed by a result, and each result belongs to a tool call.

    Providers reject other messages, and a stored conversation with them would be rejected forever. A missing result
    is replaced by an error text. A result without a call is dropped.
    """

    def __init__(self) -> None:
        self.pairs: list[Mapping[str, Any]] = []
        self.unanswered: list[Any] = []  # ids of the calls of the last message that have no result yet

    def add(self, chat: Mapping[str, Any]) -> None:
        """Add the next message."""
        if chat.get("role") != "tool":
            self.pairs += map(_missing_result, self.unanswered)
            self.pairs.append(chat)
            self.unanswered = [each.get("id") for each in chat.get("tool_calls") or () if isinstance(each, Mapping)]
        elif chat.get("tool_call_id") in self.unanswered:
            self.pairs.append(chat)
            self.unanswered.remove(chat.get("tool_call_id"))

    def before(self, following: Iterable[Any] = ()) -> list[Mapping[str, Any]]:
        """Return all messages. For calls at the end, a result may be at the beginning of `following`."""
        answered = [each.get("tool_call_id") for each in takewhile(_is_result, following)]
        return [*self.pairs, *(_missing_result(each) for each in self.unanswered if each not in answered)]

    def copy(self) -> Pairing:
        """Return another pairing of the same messages, to which other messages can be added."""
        other = Pairing()
        other.pairs, other.unanswered = self.pairs.copy(), self.unanswered.copy()
        return other


def paired(chats: Iterable[Mapping[str, Any]], following: Iterable[Any] = ()) -> list[Mapping[str, Any]]:
    """Return chat messages as `Pairing` pairs them."""
    pairing = Pairing()
    for chat in chats:
        pairing.add(chat)
    return pairing.before(following)


def _missing_result(call_id: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "Error: no result of this call is known"}


def _is_result(chat: Any) -> bool:
    return isinstance(chat, Mapping) and chat.get("role") == "tool"


def same_chat(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two chat messages are the same. Fields that some clients add are not compared."""
    return all(_comparable(one, name) == _comparable(other, name) for name in _FIELDS)


def _comparable(chat: Mapping[str, Any], name: str) -> Any:
    value = chat.get(name)
    if name == "tool_calls":
        return [each.get("id") for each in value or () if isinstance(each, Mapping)]
    return value or None
