"""Tool results that a model receives as content parts, such as images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["ContentParts", "text_of_parts"]


class ContentParts(list[dict[str, Any]]):
    """A tool result that the model receives as content parts in OpenAI's format, and not as the JSON of a list.

    @tool
    def screenshot() -> ContentParts:
        url = "data:image/png;base64," + take_screenshot()
        return ContentParts([{"type": "image_url", "image_url": {"url": url}}])
    """


def text_of_parts(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of content parts, with the type of each part that is no text in brackets."""
    return "\n".join(str(each["text"]) if "text" in each else f"[{each.get('type')}]" for each in parts)
