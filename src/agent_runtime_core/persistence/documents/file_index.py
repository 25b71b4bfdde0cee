"""An index of the documents of one kind, read from the names of their files.

A read or commit lists the directories it needs, and keeps the listings for the next access. A directory is listed again
if its modification time changed, or was so recent that a later change may have left the same time.

The file `~last` of a group holds the highest rank ever used in the group, if no document uses it any more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, Never

from ..._core.clock import SYSTEM
from ...errors import StorageCorrupt, StorageError
from .base import Query
from .file_directory import DurableDirectory
from .file_format import VERSION, FileRecord, decode_record, ident, key_of, parsed, part, sealed, text_of, unsealed

DOCUMENTS: Final = "documents"
LAST: Final = "~last"

#: Seconds after which a change of a directory gets another modification time on every file system (FAT: two seconds).
_MTIME_RESOLUTION: Final = 3.0
_EXPIRED: Final = 1000  # expired documents that are remembered for removal, at most

_rank = attrgetter("rank")


class DocumentFile(NamedTuple):
    """A file named `<rank><ident>.json` in the directory of a group; "." is the group of documents without a group."""

    group: str
    rank: float
    ident: str
    name: str


class Listing(NamedTuple):
    """The files in the directory of a group, by the idents of their documents."""

    files: dict[str, DocumentFile]
    kept_rank: float = 0.0  # the rank in `~last`
    last: float = 0.0  # the highest rank the group ever had
    names: frozenset[str] = frozenset()  # all that is in the directory
    modified: int | None = None  # modification time of the directory in ns; if None, list it again next time


class NameIndex:
    """One kind of documents in one space. Only the thread of its store uses it, while it holds the lock."""

    def __init__(self, disk: DurableDirectory, directory: str) -> None:
        self.disk = disk
        self.directory: str = directory
        self._listings: dict[str, Listing] = {}
        self._checked: set[str] = set()  # groups whose directories were checked since `recheck`
        self._all_checked = False
        self._expired: dict[str, None] = {}  # keys of documents that reads found expired

    def recheck(self) -> None:
        """Check each directory before its next use, because this or another process may have written."""
        self._checked.clear()
        self._all_checked = False

    # -- reading names

    def group(self, group: str) -> Listing:
        """Return the files of one group."""
        if group not in self._checked:
            self._refresh(group, self.disk.modified(self.directory_of(group)))
        return self._listings[group]

    def groups(self) -> dict[str, Listing]:
        """Return the files of all groups."""
        if not self._all_checked:
            self.group(".")
            directories = self.disk.directories(self.directory)
            for group, modified in directories.items():
                if group not in self._checked:
                    self._refresh(group, modified)
            self._listings = {each: self._listings[each] for each in (".", *directories)}
            self._checked = set(self._listings)
            self._all_checked = True
        return self._listings

    def _refresh(self, group: str, modified: int | None) -> None:
        known = self._listings.get(group, Listing({}))
        if modified is None:
            self._listings[group] = Listing({})
        elif modified != known.modified:
            is_old = SYSTEM.wall() - modified / 1e9 > _MTIME_RESOLUTION
            self._listings[group] = self._list(group, known)._replace(modified=modified if is_old else None)
        self._checked.add(group)

    def _list(self, group: str, known: Listing) -> Listing:
        """List a directory. Only names that are new since `known` are parsed."""
        names = frozenset(self.disk.names(self.directory_of(group)))
        if names == known.names and LAST not in names:
            return known
        files, kept_rank = dict(known.files), self._read_last(group) if LAST in names else 0.0
        for name in known.names - names:
            if (old := parsed(name)) is not None:
                files.pop(old[1], None)
        for name in names - known.names:
            file = self._document_file(group, name)
            if file is not None and files.setdefault(file.ident, file) is not file:
                self._duplicate(files[file.ident], file)
        return Listing(files, kept_rank, max(kept_rank, *map(_rank, files.values()), 0.0), names)

    def _document_file(self, group: str, name: str) -> DocumentFile | None:
        found = parsed(name)
        if found is not None:
            return DocumentFile(group, *found, name)
        path = self.disk.path(f"{self.directory_of(group)}/{name}")
        if name.endswith(".json") and not (group == "." and os.path.isdir(path)):
            raise StorageCorrupt(f"{path} is not a document. Move it away.")
        return None

    def _read_last(self, group: str) -> float:
        relative = self.path_of(last_file(group))
        last: float = json.loads(unsealed(self.disk.read(relative), self.disk.path(relative)) + b"}").get("last", 0.0)
        return last

    def _duplicate(self, *files: DocumentFile) -> Never:
        one, other = (self.disk.path(self.path_of(each)) for each in files)
        raise StorageCorrupt(f"{one} and {other} hold the same document. Move one of them away.")

    # -- looking up

    def directory_of(self, group: str) -> str:
        """Return the directory of a group."""
        return self.directory if group == "." else f"{self.directory}/{group}"

    def path_of(self, file: DocumentFile) -> str:
        """Return the path of a file, relative to the root."""
        return f"{self.directory_of(file.group)}/{file.name}"

    def file(self, key: str) -> DocumentFile | None:
        """Return the file of a document, or None.

        All groups are searched only for a key that does not begin with its group.
        """
        slash = key.find("/", 1)
        while slash > 0:
            file = self.group(part(key[:slash])).files.get(ident(key, key[:slash]))
            if file is not None:
                return file
            slash = key.find("/", slash + 1)
        name = ident(key, "")
        found = [each.files[name] for each in self.groups().values() if name in each.files]
        if len(found) > 1:
            self._duplicate(*found[:2])
        return found[0] if found else None

    def files(self, group: str | None) -> list[DocumentFile]:
        """Return the files of a group, or of all groups."""
        if group is not None:
            return list(self.group(group_part(group)).files.values())
        found = [file for each in self.groups().values() for file in each.files.values()]
        by_ident = dict[str, DocumentFile]()
        for file in found:
            if file.ident.startswith("~") and by_ident.setdefault(file.ident, file) is not file:
                self._duplicate(by_ident[file.ident], file)
        return found

    def ordered(self, query: Query) -> Iterator[DocumentFile]:
        """Yield the files that match a query by their names, sorted by (rank, key)."""
        low = -math.inf if query.low is None else query.low
        high = math.inf if query.high is None else query.high
        found = [each for each in self.files(query.group) if low <= each.rank < high]
        if query.prefix:
            found = [each for each in found if self.key(each).startswith(query.prefix)]
        found.sort(key=_rank, reverse=query.descending)
        for _, same_rank in groupby(found, _rank):
            files = list(same_rank)
            if len(files) > 1:
                files.sort(key=self.key, reverse=query.descending)
            yield from files

    def take_expired(self, count: int) -> list[str]:
        """Return at most `count` keys of documents that reads found expired. Each is returned once."""
        found = list(self._expired)[:count]
        for key in found:
            del self._expired[key]
        return found

    # -- reading files

    def key(self, file: DocumentFile) -> str:
        """Return the key of a document. Its file is read only if the name contains a hash instead of the key."""
        key = key_of(file.ident, text_of(file.group))
        return self.record(file).key if key is None else key

    def record(self, file: DocumentFile) -> FileRecord:
        """Read a document's file.

        Raises:
            StorageCorrupt: The file is damaged, or holds another document than its name says.
            StorageTooNew: A later version of this library wrote it.
            StorageError: It was removed since its directory was listed.
        """
        relative = self.path_of(file)
        path = self.disk.path(relative)
        try:
            record = decode_record(self.disk.read(relative), path)
        except FileNotFoundError:
            raise StorageError(f"{path} was removed while the store was in use. Try again.") from None
        if (group_part(record.group), ident(record.key, record.group)) != (file.group, file.ident):
            raise StorageCorrupt(
                f"{path} holds {record.key!r} of group {record.group!r}, which does not belong there. Move it away."
            )
        return record

    def live(self, files: Iterable[DocumentFile | None], now: float) -> Iterator[tuple[DocumentFile, FileRecord]]:
        """Read the files, and yield those whose documents have not expired. None is skipped."""
        for file in files:
            if file is not None:
                record = self.record(file)
                if record.expires is None or record.expires > now:
                    yield file, record
                elif len(self._expired) < _EXPIRED:
                    self._expired[record.key] = None


def directory_of(space: str, kind: str) -> str:
    """Return the directory of a kind, relative to the root."""
    return f"{DOCUMENTS}/{part(space)}/{part(kind)}"


def group_part(group: str) -> str:
    """Return the name of the directory of a group, or "." for documents without a group."""
    return part(group) if group else "."


def last_file(group: str) -> DocumentFile:
    """Return the file that holds the highest rank of a group."""
    return DocumentFile(group, 0.0, "", LAST)


def last_record(rank: float) -> bytes:
    """Return the content of a `last_file`."""
    return sealed(json.dumps({"v": VERSION, "last": rank}).encode()[:-1])
