"""What a tool gave, in the form in which it is kept and told."""

from __future__ import annotations

from typing import Any

from .._core.codec.json import MAX_BYTES, decode, encode
from .._core.codec.type_hints import returns_of
from .._core.codec.typed import codec_for
from ..errors import UnserialisableResult
from .base import ToolResult
from .tool import Tool

__all__ = ["in_json"]


def in_json(tool: Tool, result: Any, max_bytes: int = MAX_BYTES) -> tuple[Any, str]:
    """The result and its JSON text; what has no form in JSON is given the one of the tool's annotated return type.

    UnserialisableResult: it has none there either. InvalidArgument: no value of that type could be read again.
    """
    try:
        return result, encode(result, max_bytes=max_bytes)
    except UnserialisableResult:
        annotation = returns_of(tool.handler)
        if annotation is None or annotation is ToolResult:  # which says nothing of the output in it
            raise
        to_text, _ = codec_for(annotation, max_bytes)
        text = to_text(result)
        return decode(text), text
