"""Names of tools that every provider accepts."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

from .._core.validation import must

__all__ = ["check_name", "tool_name"]

_LONGEST: Final = 64
_VALID: Final = re.compile(rf"[a-zA-Z0-9_-]{{1,{_LONGEST}}}")
INVALID_PART: Final = re.compile(r"[^a-zA-Z0-9_-]+")
_DIGITS: Final = 8  # of the digest


def tool_name(text: str) -> str:
    """Return a valid name of a tool for any text, such as "fs.read" of an MCP server.

    A valid name is returned unchanged. Otherwise the name ends with a digest of the text, so that two texts have
    different names.

        Tool(tool_name("fs.read"), ...)  # fs_read_4074bc02

    Args:
        text: The name or key to convert.
    """
    if _VALID.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]
    start = INVALID_PART.sub("_", text).strip("_-")[: _LONGEST - _DIGITS - 1] or "tool"
    return f"{start}_{digest}"


def check_name(name: Any) -> None:
    """Raise InvalidArgument unless every provider accepts the name of a tool."""
    if not isinstance(name, str):
        raise must("tool name", "be a string", name)
    if not _VALID.fullmatch(name):
        raise must(
            "tool name",
            f"have 1 to {_LONGEST} characters of a-z, A-Z, 0-9, '_' and '-'",
            name,
            f"Model providers reject others. Pass name={tool_name(name)!r}",
        )
