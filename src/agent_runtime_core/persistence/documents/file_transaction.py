"""One commit on files while it is prepared: what its operations read, and the changes of files it takes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ...errors import StorageCorrupt, StorageError
from .base import Document, Entry, behind
from .file_disk import Disk
from .file_form import VERSION, Page, sealed, unsealed, written
from .file_index import DOCUMENTS, LAST, DocumentFile, NameIndex, directory_of, group_part, last_page
from .file_names import ident, name_of, part
from .operations import DocumentTransaction

FENCES: Final = "fences"
SWEPT: Final = 4  # expired documents of a kind that a commit removes, at most


class StoredDocument(NamedTuple):
    """A document with its file, the words a search finds it by, and the mark of its write."""

    document: Document
    file: DocumentFile
    words: str = ""
    mark: int = 0

    @property
    def page(self) -> Page:
        key, text, version, _, group, expires = self.document
        return Page(key, group, version, expires, text, self.words, self.mark)


class Changes(NamedTuple):
    """What a commit does to files: contents by path, renames and removals; `kinds` are directories of kinds."""

    writes: dict[str, bytes]
    moves: list[tuple[str, str]]
    removes: list[str]
    kinds: list[str]

    @property
    def is_several(self) -> bool:
        """Whether one rename or removal is not all of it."""
        return len(self.writes) + len(self.moves) + len(self.removes) > 1

    def add(self, index: NameIndex, stored: StoredDocument | None, found: StoredDocument | None) -> None:
        """Add what becomes of one document."""
        old = None if stored is None else index.path_of(stored.file)
        new = None if found is None else index.path_of(found.file)
        if stored is not None and found is not None and stored.page == found.page:
            if old is not None and new is not None and old != new:
                self.moves.append((old, new))
            return
        if found is not None and new is not None:
            self.writes[new] = written(found.page)
        if old is not None and old != new:
            self.removes.append(old)


class FileTransaction(DocumentTransaction):
    """Reads see what the commit changed itself. Nothing is written before all of it is known.

    `at` is the directory of a kind.
    """

    def __init__(self, disk: Disk, index: Callable[[str], NameIndex]) -> None:
        self.disk = disk
        self._index = index
        self._stored: dict[tuple[str, str], StoredDocument | None] = {}
        self._fences: dict[str, str | None] = {}
        self._changed: dict[tuple[str, str], StoredDocument | None] = {}
        self._ranks: dict[tuple[str, str], float] = {}  # the highest rank of each group that changes
        self._emptied: set[str] = set()

    def saved(self) -> tuple[Any, ...]:
        """What it has changed so far."""
        return dict(self._fences), dict(self._changed), dict(self._ranks), set(self._emptied)

    def restore(self, saved: tuple[Any, ...]) -> None:
        self._fences, self._changed, self._ranks, self._emptied = saved

    # -- fences

    def fenced(self, key: str) -> str | None:
        if key in self._fences:
            return self._fences[key]
        where = _fence_file(key)
        try:
            data = self.disk.read(where)
        except FileNotFoundError:
            return None
        path = self.disk.path(where)
        fence = json.loads(unsealed(data, path) + b"}")
        if fence.get("key") != key or not isinstance(fence.get("token"), str):
            raise StorageCorrupt(f"{path} is the fence of {fence.get('key')!r}, not of {key!r}: move it away")
        token: str = fence["token"]
        return token

    def fence(self, key: str, token: str | None) -> None:
        self._fences[key] = token

    # -- documents

    def _on_disk(self, at: str, key: str) -> StoredDocument | None:
        if (at, key) not in self._stored:
            file = self._index(at).file(key)
            self._stored[at, key] = None if file is None else _stored(self._index(at).page(file), file)
        return self._stored[at, key]

    def _now(self, at: str, key: str) -> StoredDocument | None:
        return self._changed[at, key] if (at, key) in self._changed else self._on_disk(at, key)

    def _last(self, at: str, group: str) -> float:
        """The highest rank a group ever had on the disk."""
        return 0.0 if at in self._emptied else self._index(at).group(group).last

    def get(self, space: str, kind: str, key: str, now: float) -> Document | None:
        return self._live(directory_of(space, kind), key, now)

    def _live(self, at: str, key: str, now: float) -> Document | None:
        found = self._now(at, key)
        if found is None or (found.document.expires is not None and found.document.expires <= now):
            return None
        return found.document

    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        found = self._now(directory_of(space, kind), entry.key)
        return found is not None and (found.document.text, found.mark) == (entry.text, entry.mark)

    def next_rank(self, space: str, kind: str, group: str) -> float:
        at, group = directory_of(space, kind), group_part(group)
        return behind(max(self._last(at, group), self._ranks.get((at, group), 0.0)))

    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        at, file = directory_of(space, kind), _file(document)
        found = self._now(at, document.key)
        if entry is not None:
            found = StoredDocument(document, file, entry.words, entry.mark)
        elif found is not None:
            found = found._replace(document=document, file=file)
        self._change(at, document.key, found)

    def remove(self, space: str, kind: str, key: str) -> None:
        self._change(directory_of(space, kind), key, None)

    def _change(self, at: str, key: str, found: StoredDocument | None) -> None:
        for each in (self._now(at, key), found):
            if each is not None:
                group = (at, each.file.group)
                self._ranks[group] = max(self._ranks.get(group, 0.0), self._last(*group), each.file.rank)
        self._changed[at, key] = found

    def live_keys(self, space: str, kind: str, group: str | None, now: float) -> list[str]:
        at = directory_of(space, kind)
        found = [(key, self._live(at, key, now)) for key in self._keys(at, group)]
        return [key for key, each in found if each is not None and (group is None or each.group == group)]

    def _keys(self, at: str, group: str | None = None) -> list[str]:
        index = self._index(at)
        keys = {index.key(file) for file in index.files(group)}
        return sorted(keys | {key for kind, key in self._changed if kind == at})

    def drop(self, space: str) -> None:
        directory = f"{DOCUMENTS}/{part(space)}"
        stored = {f"{directory}/{name}" for name in self.disk.directories(directory)}
        for at in sorted(stored | {at for at, _ in self._changed if at.startswith(f"{directory}/")}):
            for key in self._keys(at):
                self._change(at, key, None)
            self._emptied.add(at)
        self._ranks = {group: rank for group, rank in self._ranks.items() if group[0] not in self._emptied}

    def remove_expired(self, now: float) -> None:
        """Remove a few expired documents of the kinds that change anyway."""
        for at in sorted({at for at, _ in self._changed} - self._emptied):
            for key in self._index(at).take_expired(SWEPT):
                with contextlib.suppress(StorageError):  # a damaged one must not fail this commit
                    if (at, key) not in self._changed and self._on_disk(at, key) and not self._live(at, key, now):
                        self._change(at, key, None)

    # -- the files

    def changes(self) -> Changes:
        changes = Changes({}, [], [], sorted({at for at, _ in self._changed} | self._emptied))
        for key, token in self._fences.items():
            if token is None:
                changes.removes.append(_fence_file(key))
            else:
                changes.writes[_fence_file(key)] = _fence(key, token)
        for at in self._emptied:
            for group, listing in self._index(at).groups().items():
                if listing.kept:
                    changes.removes.append(f"{self._index(at).directory_of(group)}/{LAST}")
        left, gone = set[tuple[str, str, float]](), set[tuple[str, str, float]]()
        for (at, key), found in self._changed.items():
            stored = self._on_disk(at, key)
            changes.add(self._index(at), stored, found)
            gone |= set() if stored is None else {(at, stored.file.group, stored.file.rank)}
            left |= set() if found is None else {(at, found.file.group, found.file.rank)}
        for (at, group), rank in self._ranks.items():
            if (at, group, rank) not in left and (rank > self._last(at, group) or (at, group, rank) in gone):
                changes.writes[f"{self._index(at).directory_of(group)}/{LAST}"] = last_page(rank)
        return changes._replace(removes=[each for each in changes.removes if each not in changes.writes])


def _stored(page: Page, file: DocumentFile) -> StoredDocument:
    return StoredDocument(page.document(file.rank), file, page.words, page.mark)


def _file(document: Document) -> DocumentFile:
    name = ident(document.key, document.group)
    return DocumentFile(group_part(document.group), document.rank, name, name_of(document.rank, name))


def _fence_file(key: str) -> str:
    return f"{FENCES}/{part(key)}.json"


def _fence(key: str, token: str) -> bytes:
    return sealed(json.dumps({"v": VERSION, "key": key, "token": token}).encode()[:-1])
