"""Messages of frameworks in OpenAI's chat format, in which traces have the messages of all model calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_CALLS: Final = ("function_call", "tool-call")  # of OpenAI's Responses API, and of Pydantic AI


def chat_of_items(items: str | Iterable[Any], instructions: Any = None) -> list[dict[str, Any]]:
    """Return items of OpenAI's Responses API as messages. The items of one answer are one message.

    Args:
        items: The items as JSON, or the text of a user.
        instructions: The instructions of the request, or None.
    """
    messages: list[dict[str, Any]] = []
    given: Iterable[Any] = [{"role": "user", "content": items}] if isinstance(items, str) else items
    for item in given:
        kind, role = str(item.get("type") or "message"), item.get("role")
        if kind.endswith("_output"):
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif role is not None and role != "assistant":
            messages.append({"role": role, "content": item.get("content")})
        else:
            _add(_answer(messages), kind, item)
    return [*_system(instructions), *messages]


def chat_of_model_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of Pydantic AI, in the JSON form of its `ModelMessagesTypeAdapter`, as chat messages."""
    made: list[dict[str, Any]] = []
    instructions = None
    for message in messages:
        if message.get("kind") == "request":
            instructions = message.get("instructions")  # only the last instructions are sent
            made += [chat for part in message.get("parts") or () if (chat := _request_part(part)) is not None]
        else:
            made.append({"role": "assistant"})
            for part in message.get("parts") or ():
                _add(made[-1], str(part.get("part_kind")), part)
    return [*_system(instructions), *made]


def _system(instructions: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": instructions}] if instructions else []


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer at the end of a list of messages. If there is none, append an empty answer."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _add(answer: dict[str, Any], kind: str, part: Mapping[str, Any]) -> None:
    """Add an item or part of an answer."""
    content: list[Any] = answer.setdefault("content", [])
    if kind in ("message", "text"):
        given = part.get("content")
        content += given if isinstance(given, list) else [{"type": "text", "text": str(given or "")}]
    elif kind in ("reasoning", "thinking"):
        texts = [answer["reasoning"]] if "reasoning" in answer else []
        answer["reasoning"] = "\n".join([*texts, *_texts(part.get("summary")), *_texts(part.get("content"))])
    elif kind in _CALLS:
        call_id, name = part.get("call_id") or part.get("tool_call_id"), part.get("name") or part.get("tool_name")
        arguments = part.get("arguments") if kind == "function_call" else part.get("args")
        answer.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )
    else:
        content.append({**part, "type": kind})


def _texts(blocks: Any) -> Iterator[str]:
    if isinstance(blocks, str):
        blocks = [{"text": blocks}]
    for block in blocks if isinstance(blocks, list) else []:
        if isinstance(block, Mapping) and isinstance(block.get("text"), str) and block["text"]:
            yield block["text"]


def _request_part(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a part of a request of Pydantic AI as a message; None for a part that no model gets as a message."""
    kind, content = str(part.get("part_kind")), part.get("content")
    if kind == "system-prompt":
        return {"role": "system", "content": content}
    if kind == "user-prompt":
        return {"role": "user", "content": [*map(_user_content, content)] if isinstance(content, list) else content}
    if kind not in ("tool-return", "retry-prompt", "retry-feedback"):
        return None
    if kind == "tool-return" or part.get("tool_name"):
        return {"role": "tool", "tool_call_id": part.get("tool_call_id"), "content": content}
    return {"role": "user", "content": content}


def _user_content(part: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        return {"type": "text", "text": str(part)}
    kind, media = str(part.get("kind")), str(part.get("media_type") or "")
    if kind == "image-url":
        return {"type": "image_url", "image_url": {"url": part.get("url")}}
    if kind == "binary":
        url = f"data:{media};base64,{part.get('data')}"
        if media.startswith("image/"):
            return {"type": "image_url", "image_url": {"url": url}}
        return {"type": "file", "file": {"file_data": url}}
    if kind == "text":  # a text with metadata
        return {"type": "text", "text": str(part.get("content") or "")}
    return {**part, "type": kind}
