"""File names for keys and groups: valid on every file system, unique, and readable if possible.

A plain word or a UUID is its own name. Any other byte is written as `%` and two hexadecimal digits. So are capital
letters, because some file systems ignore case. A name that would be too long ends in `%%` and a hash.
The file of a document is `<rank>~<key>.json`, or `<rank>@<rest>.json` if its key is `<group>/<rest>`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final
from urllib.parse import unquote_to_bytes

LONGEST: Final = 110  # characters of a part. With a rank it must fit into the 255 that most file systems allow
_PREFIX: Final = 60  # characters of a long name before its hash

_PLAIN: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_-])?")
_DEVICES: Final = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")
_SAFE: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-.")
_NAME: Final = re.compile(r"(-?(?:[0-9][0-9.e+-]*|inf))([~@](?:[a-z0-9_.%-]*))\.json")
_MAX_INTEGRAL: Final = 1e15  # integral ranks below it are written as integers


def part(text: str) -> str:
    """Return the part of a path for any text."""
    if len(text) <= LONGEST and _PLAIN.fullmatch(text) and not _DEVICES.fullmatch(text):
        return text
    data = text.encode("utf-8", "surrogatepass")
    last = len(data) - 1
    escaped = "".join(
        chr(byte) if byte in _SAFE and (chr(byte) not in "-." or 0 < position < last) else f"%{byte:02x}"
        for position, byte in enumerate(data)
    )
    if _DEVICES.fullmatch(escaped):
        escaped = f"%{data[0]:02x}{escaped[1:]}"
    if len(escaped) > LONGEST:
        return f"{escaped[:_PREFIX]}%%{hashlib.sha256(data).hexdigest()[:32]}"
    return escaped or "%"


def text_of(part: str) -> str | None:
    """Undo `part`. None: the part has a hash, and only the file contains the text."""
    if "%" not in part:
        return part
    if part == "%":
        return ""
    return None if "%%" in part else unquote_to_bytes(part).decode("utf-8", "surrogatepass")


def ident(key: str, group: str) -> str:
    """Return the ident of a document: the part of its file name that is unique in the directory of its group."""
    if group and key.startswith(f"{group}/"):
        return f"@{part(key[len(group) + 1 :])}"
    return f"~{part(key)}"


def key_of(ident: str, group: str | None) -> str | None:
    """Return the key of an ident in a group. None: the name has a hash, and only the file contains the key."""
    text = text_of(ident[1:])
    if text is None or ident[0] == "~":
        return text
    return None if group is None else f"{group}/{text}"


def name_of(rank: float, ident: str) -> str:
    """Return the name of a document's file."""
    is_integral = -_MAX_INTEGRAL < rank < _MAX_INTEGRAL and rank == int(rank)
    return f"{int(rank):06d}{ident}.json" if is_integral else f"{rank!r}{ident}.json"


def parsed(name: str) -> tuple[float, str] | None:
    """Return (rank, ident) of the name of a document's file. None: it is another file."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        return float(found[1]), found[2]
    except ValueError:
        return None
