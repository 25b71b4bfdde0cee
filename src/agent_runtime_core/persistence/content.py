"""What is said in a message, as one text to be searched."""

from __future__ import annotations

from typing import Any


def text_in(content: Any) -> str:
    """A text itself; of lists and dicts all strings in them that are no keys, one below the other."""
    found: list[str] = []
    left = [content]
    while left:
        each = left.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict):
            left.extend(reversed(each.values()))
        elif isinstance(each, list | tuple):
            left.extend(reversed(each))
    return "\n".join(found)
