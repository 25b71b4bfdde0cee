"""Convert the content of MCP tool results to what an agent's model receives."""

from __future__ import annotations

import base64
from typing import Any

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from ..tools.parts import ContentParts, text_of_parts


def content_of(result: CallToolResult) -> Any:
    """Return the result of a tool: text, structured content, or content parts if it has images or documents."""
    parts = [_part(each) for each in result.content]
    if any(part["type"] != "text" for part in parts):
        return ContentParts(parts)
    if not parts and result.structured_content is not None:
        return result.structured_content
    return "\n".join(part["text"] for part in parts)


def text_of(result: CallToolResult) -> str:
    """Return the text of a result, with a note for each block that is no text."""
    return text_of_parts(map(_part, result.content))


def _part(block: ContentBlock) -> dict[str, Any]:
    match block:
        case TextContent():
            return _text(block.text)
        case ImageContent():
            return _image(block.mime_type, block.data)
        case AudioContent():
            return _text(f"[{block.mime_type}, {_size(block.data)} bytes: this model client sends no audio]")
        case ResourceLink():
            return _text(f"{block.name}: {block.uri}" + (f" ({block.description})" if block.description else ""))
        case EmbeddedResource():
            held = block.resource
            return _text(held.text) if isinstance(held, TextResourceContents) else _blob(held)


def _blob(blob: BlobResourceContents) -> dict[str, Any]:
    kind = blob.mime_type or "application/octet-stream"
    if kind.startswith("image/"):
        return _image(kind, blob.blob)
    if kind == "application/pdf":
        data = f"data:{kind};base64,{blob.blob}"
        return {"type": "file", "file": {"filename": blob.uri.rpartition("/")[2] or "file.pdf", "file_data": data}}
    return _text(f"[{blob.uri}: {kind}, {_size(blob.blob)} bytes]")


def _image(kind: str, data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _size(data: str) -> int:
    return len(base64.b64decode(data))
