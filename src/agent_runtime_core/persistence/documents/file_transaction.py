"""One commit on files while it is prepared: what its operations read, and the changes of files it takes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ...errors import StorageCorrupt, StorageError
from .base import Document, Entry, next_rank
from .file_directory import DurableDirectory
from .file_format import VERSION, FileRecord, sealed, unsealed, written
from .file_index import DOCUMENTS, DocumentFile, NameIndex, directory_of, group_part, last_file, last_page
from .file_names import ident, name_of, part
from .operations import DocumentTransaction

FENCES: Final = "fences"
SWEPT: Final = 4  # expired documents of a kind that a commit removes, at most


class StoredDocument(NamedTuple):
    """A document: the content of its file, and the name."""

    page: FileRecord
    file: DocumentFile

    @property
    def document(self) -> Document:
        return self.page.document(self.file.rank)


class Changes(NamedTuple):
    """What a commit does to files: contents by path, and removals; `kinds` are directories of kinds."""

    writes: dict[str, bytes]
    removes: list[str]
    kinds: list[str]

    @property
    def is_several(self) -> bool:
        """Whether one rename or removal is not all of it."""
        return len(self.writes) + len(self.removes) > 1


class FileTransaction(DocumentTransaction):
    """Reads see what the commit changed itself. Nothing is written before all of it is known.

    `at` is the directory of a kind.
    """

    def __init__(self, disk: DurableDirectory, index: Callable[[str], NameIndex]) -> None:
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
            index = self._index(at)
            file = index.file(key)
            self._stored[at, key] = None if file is None else StoredDocument(index.page(file), file)
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
        if found is None or (found.page.expires is not None and found.page.expires <= now):
            return None
        return found.document

    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        found = self._now(directory_of(space, kind), entry.key)
        return found is not None and (found.page.text, found.page.mark) == (entry.text, entry.mark)

    def next_rank(self, space: str, kind: str, group: str) -> float:
        at, group = directory_of(space, kind), group_part(group)
        return next_rank(max(self._last(at, group), self._ranks.get((at, group), 0.0)))

    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        key, text, version, rank, group, expires = document
        at, name = directory_of(space, kind), ident(key, group)
        stored = self._now(at, key)
        searched = entry or (stored and stored.page)
        words, mark = (searched.words, searched.mark) if searched else ("", 0)
        page = FileRecord(key, group, version, expires, text, words, mark)
        self._change(at, key, StoredDocument(page, DocumentFile(group_part(group), rank, name, name_of(rank, name))))

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
        writes, removes = dict[str, bytes](), list[str]()
        for key, token in self._fences.items():
            if token is None:
                removes.append(_fence_file(key))
            else:
                writes[_fence_file(key)] = _fence(key, token)
        for at in self._emptied:
            index = self._index(at)
            removes += [index.path_of(last_file(group)) for group, listing in index.groups().items() if listing.kept]
        left, gone = set[tuple[str, str, float]](), set[tuple[str, str, float]]()
        for (at, key), found in self._changed.items():
            index, stored = self._index(at), self._on_disk(at, key)
            if stored is not None:
                removes.append(index.path_of(stored.file))
                gone.add((at, stored.file.group, stored.file.rank))
            if found is not None:
                writes[index.path_of(found.file)] = written(found.page)
                left.add((at, found.file.group, found.file.rank))
        for (at, group), rank in self._ranks.items():
            if (at, group, rank) not in left and (rank > self._last(at, group) or (at, group, rank) in gone):
                writes[self._index(at).path_of(last_file(group))] = last_page(rank)
        kinds = sorted({at for at, _ in self._changed} | self._emptied)
        return Changes(writes, [each for each in removes if each not in writes], kinds)


def _fence_file(key: str) -> str:
    return f"{FENCES}/{part(key)}.json"


def _fence(key: str, token: str) -> bytes:
    return sealed(json.dumps({"v": VERSION, "key": key, "token": token}).encode()[:-1])
