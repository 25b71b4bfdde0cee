"""Results of tools with images, for servers that accept only text in the message of a tool."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_TEXT: Final = ("text", "refusal")
_ABOUT: Final = "What the tools returned besides text:"
#: Characters of the arguments in the label of a call.
_LONGEST: Final = 200


def with_text_of_tools(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the messages with other parts than text moved from results of tools to a message of the user.

    That message follows the last result of the same turn, because a result must follow its call. It names the call
    before its parts. A result without text refers to it.
    """
    moved: list[Any] = []
    calls: dict[Any, str] = {}
    for message in messages:
        if message.get("role") != "tool":
            if moved:
                yield {"role": "user", "content": [{"type": "text", "text": _ABOUT}, *moved]}
                moved = []
            calls |= {call.get("id"): _shown(call) for call in message.get("tool_calls") or ()}
            yield message
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        others = [each for each in parts if _is_other(each)]
        if not others:
            yield message
            continue
        id_ = message.get("tool_call_id")
        moved += [{"type": "text", "text": f"Result of the call {id_}{calls.get(id_, '')}:"}, *others]
        kept = [each for each in parts if not _is_other(each)]
        says = any(isinstance(each, str) or str(each.get("text") or "").strip() for each in kept)
        elsewhere = f"(The result of the call {id_} is in the next message of the user.)"
        yield {**message, "content": kept if says else elsewhere}
    if moved:
        yield {"role": "user", "content": [{"type": "text", "text": _ABOUT}, *moved]}


def _is_other(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") not in _TEXT


def _shown(call: Mapping[str, Any]) -> str:
    """Return the tool and the arguments of a call, because some servers do not show its id to the model."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False, default=str)
    return f", {function.get('name')}({text[:_LONGEST]}{'…' * (len(text) > _LONGEST)})"
