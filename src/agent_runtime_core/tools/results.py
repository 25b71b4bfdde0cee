"""Convert the result of a tool to the form that is stored and sent to the model."""

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
    """Return the result and its JSON text.

    A result that is not JSON is converted by the tool's annotated return type.

    Args:
        tool: The tool that returned the result.
        result: The result.
        max_bytes: The largest JSON text, in bytes.

    Raises:
        UnserialisableResult: The result cannot be converted.
        InvalidArgument: Values of the annotated type could not be decoded again.
    """
    try:
        return result, encode(result, max_bytes=max_bytes)
    except UnserialisableResult:
        annotation = returns_of(tool.handler)
        if annotation is None or annotation is ToolResult:  # it does not name the type of its output
            raise
        to_text, _ = codec_for(annotation, max_bytes)
        text = to_text(result)
        return decode(text), text
