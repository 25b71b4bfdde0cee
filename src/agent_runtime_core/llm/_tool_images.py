"""Results of tools with images, for servers that accept only text in the message of a tool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_TEXT: Final = ("text", "refusal")
_ABOUT: Final = "What the tools returned besides text:"


def with_text_of_tools(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the messages with other parts than text moved from results of tools to a message of the user.

    That message follows the last result of the same turn, because a result must follow its call.
    """
    moved: list[Any] = []
    for message in messages:
        if message.get("role") != "tool":
            if moved:
                yield {"role": "user", "content": [{"type": "text", "text": _ABOUT}, *moved]}
                moved = []
            yield message
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        others = [each for each in parts if _is_other(each)]
        moved += others
        yield {**message, "content": [each for each in parts if not _is_other(each)]} if others else message
    if moved:
        yield {"role": "user", "content": [{"type": "text", "text": _ABOUT}, *moved]}


def _is_other(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") not in _TEXT
