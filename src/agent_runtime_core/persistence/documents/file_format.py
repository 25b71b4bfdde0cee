"""The files of documents: their names, and their format of three lines that a person can read and search."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from ..._core.codec.json import loads_strict
from ...errors import StorageCorrupt, StorageTooNew
from .base import Document

VERSION: Final = 1

_VALUE_FIELD: Final = b'"value": '
_TEXT_FIELD: Final = b'"text": '
_NEWER: Final = re.compile(rb'\s*\{\s*"v"\s*:\s*([0-9]{1,9})\b')


class FileRecord(NamedTuple):
    """The content of a document's file. The rank is in the name of the file."""

    key: str
    group: str
    version: int
    expires: float | None
    text: str
    words: str = ""
    mark: int = 0

    def document(self, rank: float) -> Document:
        """Return the document, with the rank from the name of the file."""
        return Document(self.key, self.text, self.version, rank, self.group, self.expires)


def encode_record(record: FileRecord) -> bytes:
    """Return the bytes of a file."""
    head: dict[str, Any] = {
        "v": VERSION, "key": record.key, "group": record.group, "version": record.version, "expires": record.expires,
        "mark": record.mark,
    }  # fmt: skip
    if record.words:
        head["words"] = record.words
    return sealed(json.dumps(head).encode()[:-1] + b",\n" + _value_line(record.text))


def _value_line(text: str) -> bytes:
    try:
        data = text.encode()
        if b"\n" not in data:
            loads_strict(text)
            return _VALUE_FIELD + data
    except (ValueError, RecursionError):
        pass
    return _TEXT_FIELD + json.dumps(text).encode()


def decode_record(data: bytes, path: str) -> FileRecord:
    """Decode the bytes of a file. `path` is for error messages.

    Raises:
        StorageTooNew: A later version of this library wrote the file.
        StorageCorrupt: The file is damaged, or is not a document.
    """
    signed = unsealed(data, path)
    head, _, value = signed.partition(b"\n")
    try:
        fields = json.loads(head.rstrip(b",") + b"}")
        text = (
            value.removeprefix(_VALUE_FIELD).decode()
            if value.startswith(_VALUE_FIELD)
            else json.loads(value[len(_TEXT_FIELD) :])
        )
        return FileRecord(
            fields["key"],
            fields["group"],
            fields["version"],
            fields["expires"],
            text,
            fields.get("words", ""),
            fields["mark"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, f"it is not a document ({error!r})") from error


def sealed(signed: bytes) -> bytes:
    """Append the checksum and the closing brace to the lines of a JSON object."""
    return signed + b',\n"crc": "%08x"}\n' % zlib.crc32(signed)


def unsealed(data: bytes, path: str) -> bytes:
    """Check the checksum and the version, and undo `sealed`. It raises the errors of `decode_record`."""
    newer = _NEWER.match(data)
    if newer is not None and int(newer[1]) > VERSION:
        raise StorageTooNew(
            f"{path} has format version {int(newer[1])}, this library reads {VERSION}. Upgrade agent-runtime-core."
        )
    signed, comma, _ = data.rpartition(b',\n"crc": ')
    if not comma:
        raise _corrupt(path, "it is empty" if not data else "it is truncated, or not from this library")
    if sealed(signed) != data:
        raise _corrupt(path, "its checksum does not match")
    if newer is None or int(newer[1]) != VERSION:
        raise _corrupt(path, "it has no version")
    return signed


def _corrupt(path: str, reason: str) -> StorageCorrupt:
    return StorageCorrupt(
        f"{path} cannot be read: {reason}. It was not modified. Restore it from a backup, or move it away."
    )


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
    """Undo `part`. None if the part contains a hash, so that only the file contains the text."""
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
    """Return the key of an ident in a group. None if the name contains a hash: then only the file contains the key."""
    text = text_of(ident[1:])
    if text is None or ident[0] == "~":
        return text
    return None if group is None else f"{group}/{text}"


def name_of(rank: float, ident: str) -> str:
    """Return the name of a document's file."""
    is_integral = -_MAX_INTEGRAL < rank < _MAX_INTEGRAL and rank == int(rank)
    return f"{int(rank):06d}{ident}.json" if is_integral else f"{rank!r}{ident}.json"


def parsed(name: str) -> tuple[float, str] | None:
    """Return (rank, ident) of the name of a document's file. None for another file."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        return float(found[1]), found[2]
    except ValueError:
        return None
