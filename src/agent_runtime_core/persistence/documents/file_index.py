"""Index of the documents of one kind, read from the names of their files.

A read or commit lists the directories it needs, and keeps what it found for the next one. A directory is listed again
if its modification time is another one, or was so recent that a later change may have left the same time.

The file `~last` of a group keeps the highest rank the group ever had, if no document has it any more.
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
from .file_format import VERSION, FileRecord, read_page, sealed, unsealed
from .file_names import ident, key_of, parsed, part, text_of

DOCUMENTS: Final = "documents"
LAST: Final = "~last"

#: Seconds after which a change of a directory gets another modification time on every file system (FAT counts in two).
_SETTLED: Final = 3.0
_EXPIRED: Final = 1000  # expired documents that are remembered, to be removed

_rank = attrgetter("rank")


class DocumentFile(NamedTuple):
    """A file named `<rank><ident>.json` in the directory of a group; "." is the group of documents without one."""

    group: str
    rank: float
    ident: str
    name: str


class Listing(NamedTuple):
    """The documents of a group by their idents."""

    files: dict[str, DocumentFile]
    kept: float = 0.0  # the rank in `~last`
    last: float = 0.0  # the highest rank the group ever had
    names: frozenset[str] = frozenset()  # all that is in the directory
    modified: int | None = None  # modification time of the directory in ns; None: list it again next time


class NameIndex:
    """One kind of documents in one space. Only the thread of its store uses it, while it holds the lock."""

    def __init__(self, disk: DurableDirectory, directory: str) -> None:
        self.disk = disk
        self.directory: str = directory
        self._listings: dict[str, Listing] = {}
        self._current: set[str] = set()  # groups that were compared with the disk since `recheck`
        self._all_current = False
        self._expired: dict[str, None] = {}  # keys of documents that were found to be expired

    def recheck(self) -> None:
        """Compare each directory with the disk before its next use: others, or this process, may have written."""
        self._current.clear()
        self._all_current = False

    # -- reading names

    def group(self, group: str) -> Listing:
        """The documents of one group."""
        if group not in self._current:
            self._compare(group, self.disk.modified(self.directory_of(group)))
        return self._listings[group]

    def groups(self) -> dict[str, Listing]:
        """The documents of all groups."""
        if not self._all_current:
            self.group(".")
            directories = self.disk.directories(self.directory)
            for group, modified in directories.items():
                if group not in self._current:
                    self._compare(group, modified)
            self._listings = {each: self._listings[each] for each in (".", *directories)}
            self._current = set(self._listings)
            self._all_current = True
        return self._listings

    def _compare(self, group: str, modified: int | None) -> None:
        known = self._listings.get(group, Listing({}))
        if modified is None:
            self._listings[group] = Listing({})
        elif modified != known.modified:
            settled = SYSTEM.wall() - modified / 1e9 > _SETTLED
            self._listings[group] = self._list(group, known)._replace(modified=modified if settled else None)
        self._current.add(group)

    def _list(self, group: str, known: Listing) -> Listing:
        """List a directory. Only names that are new since `known` are parsed."""
        names = frozenset(self.disk.names(self.directory_of(group)))
        if names == known.names and LAST not in names:
            return known
        files, kept = dict(known.files), self._last_file(group) if LAST in names else 0.0
        for name in known.names - names:
            if (old := parsed(name)) is not None:
                files.pop(old[1], None)
        for name in names - known.names:
            file = self._parsed(group, name)
            if file is not None and files.setdefault(file.ident, file) is not file:
                self._twice(files[file.ident], file)
        return Listing(files, kept, max(kept, *map(_rank, files.values()), 0.0), names)

    def _parsed(self, group: str, name: str) -> DocumentFile | None:
        found = parsed(name)
        if found is not None:
            return DocumentFile(group, *found, name)
        path = self.disk.path(f"{self.directory_of(group)}/{name}")
        if name.endswith(".json") and not (group == "." and os.path.isdir(path)):
            raise StorageCorrupt(f"{path} is no document: move it away")
        return None

    def _last_file(self, group: str) -> float:
        where = self.path_of(last_file(group))
        last: float = json.loads(unsealed(self.disk.read(where), self.disk.path(where)) + b"}").get("last", 0.0)
        return last

    def _twice(self, *files: DocumentFile) -> Never:
        one, other = (self.disk.path(self.path_of(each)) for each in files)
        raise StorageCorrupt(f"{one} and {other} are one document twice: move one of them away")

    # -- looking up

    def directory_of(self, group: str) -> str:
        return self.directory if group == "." else f"{self.directory}/{group}"

    def path_of(self, file: DocumentFile) -> str:
        return f"{self.directory_of(file.group)}/{file.name}"

    def file(self, key: str) -> DocumentFile | None:
        """The file of a document. Only a key that does not begin with its group is looked for in all groups."""
        at = key.find("/", 1)
        while at > 0:
            file = self.group(part(key[:at])).files.get(ident(key, key[:at]))
            if file is not None:
                return file
            at = key.find("/", at + 1)
        whole = ident(key, "")
        found = [each.files[whole] for each in self.groups().values() if whole in each.files]
        if len(found) > 1:
            self._twice(*found[:2])
        return found[0] if found else None

    def files(self, group: str | None) -> list[DocumentFile]:
        """The files of a group's documents; None: of all groups."""
        if group is not None:
            return list(self.group(group_part(group)).files.values())
        found = [file for each in self.groups().values() for file in each.files.values()]
        first = dict[str, DocumentFile]()
        for file in found:
            if file.ident.startswith("~") and first.setdefault(file.ident, file) is not file:
                self._twice(first[file.ident], file)
        return found

    def ordered(self, query: Query) -> Iterator[DocumentFile]:
        """The files that a query may find by their names, in the order of (rank, key)."""
        low = -math.inf if query.low is None else query.low
        high = math.inf if query.high is None else query.high
        found = [each for each in self.files(query.group) if low <= each.rank < high]
        if query.prefix:
            found = [each for each in found if self.key(each).startswith(query.prefix)]
        found.sort(key=_rank, reverse=query.descending)
        for _, equal in groupby(found, _rank):
            files = list(equal)
            if len(files) > 1:
                files.sort(key=self.key, reverse=query.descending)
            yield from files

    def take_expired(self, most: int) -> list[str]:
        """Keys of documents that reads found expired; each is returned once."""
        found = list(self._expired)[:most]
        for key in found:
            del self._expired[key]
        return found

    # -- reading files

    def key(self, file: DocumentFile) -> str:
        """The key of a document; its file is read only if the name holds a hash of the key."""
        key = key_of(file.ident, text_of(file.group))
        return self.page(file).key if key is None else key

    def page(self, file: DocumentFile) -> FileRecord:
        """Read a document's file.

        Raises:
            StorageCorrupt: The file is damaged, or holds another document than its name says.
            StorageTooNew: A later version of this library wrote it.
            StorageError: It was removed since its directory was listed.
        """
        where = self.path_of(file)
        path = self.disk.path(where)
        try:
            page = read_page(self.disk.read(where), path)
        except FileNotFoundError:
            raise StorageError(f"{path} was removed while the store was in use: try again") from None
        if (group_part(page.group), ident(page.key, page.group)) != (file.group, file.ident):
            raise StorageCorrupt(
                f"{path} holds {page.key!r} of group {page.group!r}, which does not belong there: move it away"
            )
        return page

    def live(self, files: Iterable[DocumentFile | None], now: float) -> Iterator[tuple[DocumentFile, FileRecord]]:
        """Read those files that exist and have not expired."""
        for file in files:
            if file is not None:
                page = self.page(file)
                if page.expires is None or page.expires > now:
                    yield file, page
                elif len(self._expired) < _EXPIRED:
                    self._expired[page.key] = None


def directory_of(space: str, kind: str) -> str:
    return f"{DOCUMENTS}/{part(space)}/{part(kind)}"


def group_part(group: str) -> str:
    return part(group) if group else "."


def last_file(group: str) -> DocumentFile:
    return DocumentFile(group, 0.0, "", LAST)


def last_page(rank: float) -> bytes:
    return sealed(json.dumps({"v": VERSION, "last": rank}).encode()[:-1])
