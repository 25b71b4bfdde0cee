"""What stands in a document's file: three lines of JSON that a person can read and search.

    {"v": 1, "key": "theme", "group": "", "version": 3, "expires": null, "mark": 4503599627370,
    "value": {"dark":true},
    "crc": "1c291ca3"}

`mark` is a number of that very write. The value's text is kept to the letter; one that is no JSON on one line stands
there as the string `"text"`.
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

_VALUE: Final = b'"value": '
_TEXT: Final = b'"text": '
_NEWER: Final = re.compile(rb'\s*\{\s*"v"\s*:\s*([0-9]{1,9})\b')


class FileRecord(NamedTuple):
    """What a file says; its rank stands in its name."""

    key: str
    group: str
    version: int
    expires: float | None
    text: str
    words: str = ""
    mark: int = 0

    def document(self, rank: float) -> Document:
        return Document(self.key, self.text, self.version, rank, self.group, self.expires)


def written(page: FileRecord) -> bytes:
    head: dict[str, Any] = {
        "v": VERSION, "key": page.key, "group": page.group, "version": page.version, "expires": page.expires,
        "mark": page.mark,
    }  # fmt: skip
    if page.words:
        head["words"] = page.words
    return sealed(json.dumps(head).encode()[:-1] + b",\n" + _value(page.text))


def _value(text: str) -> bytes:
    try:
        data = text.encode()
        if b"\n" not in data:
            loads_strict(text)
            return _VALUE + data
    except (ValueError, RecursionError):
        pass
    return _TEXT + json.dumps(text).encode()


def read_page(data: bytes, path: str) -> FileRecord:
    """StorageTooNew: a later version of this library wrote it; StorageCorrupt: nobody did, or not like this."""
    signed = unsealed(data, path)
    head, _, value = signed.partition(b"\n")
    try:
        told = json.loads(head.rstrip(b",") + b"}")
        text = value.removeprefix(_VALUE).decode() if value.startswith(_VALUE) else json.loads(value[len(_TEXT) :])
        return FileRecord(
            told["key"], told["group"], told["version"], told["expires"], text, told.get("words", ""), told["mark"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, f"it is no document ({error!r})") from error


def sealed(signed: bytes) -> bytes:
    """The lines of a JSON object without its closing brace, closed with their checksum."""
    return signed + b',\n"crc": "%08x"}\n' % zlib.crc32(signed)


def unsealed(data: bytes, path: str) -> bytes:
    """What `sealed` was given; the errors of `read_page`."""
    newer = _NEWER.match(data)
    if newer is not None and int(newer[1]) > VERSION:
        raise StorageTooNew(
            f"{path} has the form of version {int(newer[1])}, this library knows {VERSION}: upgrade agent-runtime-core"
        )
    signed, comma, _ = data.rpartition(b',\n"crc": ')
    if not comma:
        raise _corrupt(path, "it is empty" if not data else "it is cut short, or not of this library")
    if sealed(signed) != data:
        raise _corrupt(path, "its checksum is another one")
    if newer is None or int(newer[1]) != VERSION:
        raise _corrupt(path, "it has no version")
    return signed


def _corrupt(path: str, why: str) -> StorageCorrupt:
    return StorageCorrupt(
        f"{path} cannot be read: {why}; it is left as it is: restore it from a backup or move it away"
    )
