"""The format of a document's file: three lines of JSON that a person can read and search.

    {"v": 1, "key": "theme", "group": "", "version": 3, "expires": null, "mark": 4503599627370,
    "value": {"dark":true},
    "crc": "1c291ca3"}

`mark` is a random id of the write. The text of the document is stored unchanged as "value" if it is JSON on one line.
Any other text is stored as the string "text" in place of "value".
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, Final, NamedTuple

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
