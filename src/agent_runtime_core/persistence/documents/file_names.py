"""Names of files for keys and groups: safe on every file system, never the same for two, readable where harmless.

A plain word or a UUID stands for itself. Every other byte is written `%` and two hexadecimal digits; so are capital
letters, which some file systems do not tell from small ones. What would be too long ends in `%%` and a hash.
A document's file is `<rank>~<key>.json`, or `<rank>@<rest>.json` where its key is `<group>/<rest>`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final
from urllib.parse import unquote_to_bytes

LONGEST: Final = 110  # characters of a part, which leaves room for a rank in the 255 that most systems allow
_KEPT: Final = 60  # characters of a long one before its hash

_PLAIN: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_-])?")
_DEVICES: Final = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")
_SAFE: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-.")
_NAME: Final = re.compile(r"(-?(?:[0-9][0-9.e+-]*|inf))([~@](?:[a-z0-9_.%-]*))\.json")
_WHOLE: Final = 1e15  # ranks below it that are whole numbers are written as such


def part(text: str) -> str:
    """One part of a path for any text."""
    if len(text) <= LONGEST and _PLAIN.fullmatch(text) and not _DEVICES.fullmatch(text):
        return text
    data = text.encode("utf-8", "surrogatepass")
    last = len(data) - 1
    escaped = "".join(
        chr(byte) if byte in _SAFE and (chr(byte) not in "-." or 0 < at < last) else f"%{byte:02x}"
        for at, byte in enumerate(data)
    )
    if _DEVICES.fullmatch(escaped):
        escaped = f"%{data[0]:02x}{escaped[1:]}"
    if len(escaped) > LONGEST:
        return f"{escaped[:_KEPT]}%%{hashlib.sha256(data).hexdigest()[:32]}"
    return escaped or "%"


def text_of(part: str) -> str | None:
    """The text that a part of a path stands for; None where only the file itself can tell."""
    if "%" not in part:
        return part
    if part == "%":
        return ""
    return None if "%%" in part else unquote_to_bytes(part).decode("utf-8", "surrogatepass")


def ident(key: str, group: str) -> str:
    """What tells a document's file from the others in the directory of its group."""
    if group and key.startswith(f"{group}/"):
        return f"@{part(key[len(group) + 1 :])}"
    return f"~{part(key)}"


def key_of(ident: str, group: str | None) -> str | None:
    """The key of a file in the directory of a group; None where only the file itself can tell."""
    text = text_of(ident[1:])
    if text is None or ident[0] == "~":
        return text
    return None if group is None else f"{group}/{text}"


def name_of(rank: float, ident: str) -> str:
    whole = -_WHOLE < rank < _WHOLE and rank == int(rank)
    return f"{int(rank):06d}{ident}.json" if whole else f"{rank!r}{ident}.json"


def parsed(name: str) -> tuple[float, str] | None:
    """(rank, ident) of a file's name; None: it is no name of ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        return float(found[1]), found[2]
    except ValueError:
        return None
