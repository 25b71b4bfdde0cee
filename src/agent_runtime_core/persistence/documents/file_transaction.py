"""Prepare a commit on files: execute its operations, and collect the changes of files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ...errors import StorageCorrupt, StorageError
from .base import Document, Entry, next_rank
from .file_directory import DurableDirectory
from .file_format import VERSION, FileRecord, encode_record, ident, name_of, part, sealed, text_of, unsealed
from .file_index import DOCUMENTS, DocumentFile, NameIndex, directory_of, group_part, last_file, last_record
from .operations import DocumentTransaction

FENCES: Final = "fences"
SPACE_NAME: Final = "space.json"  # in the directory of a space whose name is too long for the name of the directory
SWEPT: Final = 4  # expired documents of a kind that a commit removes, at most


class StoredDocument(NamedTuple):
    """A document, as the content and the name of its file."""

    record: FileRecord
    file: DocumentFile

    @property
    def document(self) -> Document:
        return self.record.document(self.file.rank)


class Changes(NamedTuple):
    """The changes of files of a commit.

    Attributes:
        writes: New contents, by path.
        removes: Files to remove.
        kinds: The directories of the kinds that change.
    """

    writes: dict[str, bytes]
    removes: list[str]
    kinds: list[str]

    @property
    def is_several(self) -> bool:
        """Whether the commit takes more than one rename or removal."""
        return len(self.writes) + len(self.removes) > 1


class FileTransaction(DocumentTransaction):
    """The transaction of a batch of commits. Reads see its own changes. It writes no file.

    In the methods, `directory` is the directory of a kind.
    """

    def __init__(self, disk: DurableDirectory, index: Callable[[str], NameIndex]) -> None:
        self.disk = disk
        self._index = index
        self._stored: dict[tuple[str, str], StoredDocument | None] = {}
        self._fences: dict[str, str | None] = {}
        self._changed: dict[tuple[str, str], StoredDocument | None] = {}
        self._ranks: dict[tuple[str, str], float] = {}  # the highest rank of each group that changes
        self._emptied: set[str] = set()
        self._long_spaces: dict[str, str] = {}  # by their directories

    def savepoint(self) -> tuple[Any, ...]:
        """Return the changes so far, for `restore`."""
        return dict(self._fences), dict(self._changed), dict(self._ranks), set(self._emptied)

    def restore(self, savepoint: tuple[Any, ...]) -> None:
        """Undo the changes since a savepoint."""
        self._fences, self._changed, self._ranks, self._emptied = savepoint

    # -- fences

    def fenced(self, key: str) -> str | None:
        """Return the fencing token of a run, or None."""
        if key in self._fences:
            return self._fences[key]
        relative = _fence_file(key)
        try:
            data = self.disk.read(relative)
        except FileNotFoundError:
            return None
        path = self.disk.path(relative)
        fence = json.loads(unsealed(data, path) + b"}")
        if fence.get("key") != key or not isinstance(fence.get("token"), str):
            raise StorageCorrupt(
                f"{path} must be the fence of {key!r}, got the fence of {fence.get('key')!r}. Move it away."
            )
        token: str = fence["token"]
        return token

    def fence(self, key: str, token: str | None) -> None:
        """Set the fencing token of a run. None removes it."""
        self._fences[key] = token

    # -- documents

    def _on_disk(self, directory: str, key: str) -> StoredDocument | None:
        if (directory, key) not in self._stored:
            index = self._index(directory)
            file = index.file(key)
            self._stored[directory, key] = None if file is None else StoredDocument(index.record(file), file)
        return self._stored[directory, key]

    def _present(self, directory: str, key: str) -> StoredDocument | None:
        return self._changed[directory, key] if (directory, key) in self._changed else self._on_disk(directory, key)

    def _last_rank(self, directory: str, group: str) -> float:
        """Return the highest rank that a group ever had on the disk."""
        return 0.0 if directory in self._emptied else self._index(directory).group(group).last

    def get(self, space: str, kind: str, key: str, now: float) -> Document | None:
        return self._live(directory_of(space, kind), key, now)

    def _live(self, directory: str, key: str, now: float) -> Document | None:
        found = self._present(directory, key)
        if found is None or (found.record.expires is not None and found.record.expires <= now):
            return None
        return found.document

    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        found = self._present(directory_of(space, kind), entry.key)
        return found is not None and (found.record.text, found.record.mark) == (entry.text, entry.mark)

    def next_rank(self, space: str, kind: str, group: str) -> float:
        directory, group = directory_of(space, kind), group_part(group)
        return next_rank(max(self._last_rank(directory, group), self._ranks.get((directory, group), 0.0)))

    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        key, text, version, rank, group, expires = document
        directory, name = directory_of(space, kind), ident(key, group)
        if text_of(part(space)) is None:
            self._long_spaces[directory.rpartition("/")[0]] = space
        stored = self._present(directory, key)
        source = entry or (stored and stored.record)
        words, mark = (source.words, source.mark) if source else ("", 0)
        record = FileRecord(key, group, version, expires, text, words, mark)
        self._change(
            directory, key, StoredDocument(record, DocumentFile(group_part(group), rank, name, name_of(rank, name)))
        )

    def remove(self, space: str, kind: str, key: str) -> None:
        self._change(directory_of(space, kind), key, None)

    def _change(self, directory: str, key: str, found: StoredDocument | None) -> None:
        for each in (self._present(directory, key), found):
            if each is not None:
                group = (directory, each.file.group)
                self._ranks[group] = max(self._ranks.get(group, 0.0), self._last_rank(*group), each.file.rank)
        self._changed[directory, key] = found

    def live_keys(self, space: str, kind: str, group: str | None, now: float) -> list[str]:
        directory = directory_of(space, kind)
        found = [(key, self._live(directory, key, now)) for key in self._keys(directory, group)]
        return [key for key, each in found if each is not None and (group is None or each.group == group)]

    def _keys(self, directory: str, group: str | None = None) -> list[str]:
        index = self._index(directory)
        keys = {index.key(file) for file in index.files(group)}
        return sorted(keys | {key for kind, key in self._changed if kind == directory})

    def drop(self, space: str) -> None:
        space_directory = f"{DOCUMENTS}/{part(space)}"
        stored = {f"{space_directory}/{name}" for name in self.disk.directories(space_directory)}
        for directory in sorted(
            stored | {directory for directory, _ in self._changed if directory.startswith(f"{space_directory}/")}
        ):
            for key in self._keys(directory):
                self._change(directory, key, None)
            self._emptied.add(directory)
        self._ranks = {group: rank for group, rank in self._ranks.items() if group[0] not in self._emptied}

    def remove_expired(self, now: float) -> None:
        """Remove a few expired documents of the kinds that this transaction changes."""
        for directory in sorted({directory for directory, _ in self._changed} - self._emptied):
            for key in self._index(directory).take_expired(SWEPT):
                with contextlib.suppress(StorageError):  # a damaged file must not fail this commit
                    if (
                        (directory, key) not in self._changed
                        and self._on_disk(directory, key)
                        and not self._live(directory, key, now)
                    ):
                        self._change(directory, key, None)

    # -- the files

    def changes(self) -> Changes:
        """Return the changes of files that the transaction takes."""
        writes, removes = dict[str, bytes](), list[str]()
        for key, token in self._fences.items():
            if token is None:
                removes.append(_fence_file(key))
            else:
                writes[_fence_file(key)] = _encode_fence(key, token)
        for directory in self._emptied:
            index = self._index(directory)
            removes += [
                index.path_of(last_file(group)) for group, listing in index.groups().items() if listing.kept_rank
            ]
        written_ranks, removed_ranks = set[tuple[str, str, float]](), set[tuple[str, str, float]]()
        for (directory, key), found in self._changed.items():
            index, stored = self._index(directory), self._on_disk(directory, key)
            if stored is not None:
                removes.append(index.path_of(stored.file))
                removed_ranks.add((directory, stored.file.group, stored.file.rank))
            if found is not None:
                writes[index.path_of(found.file)] = encode_record(found.record)
                written_ranks.add((directory, found.file.group, found.file.rank))
        for (directory, group), rank in self._ranks.items():
            if (directory, group, rank) not in written_ranks and (
                rank > self._last_rank(directory, group) or (directory, group, rank) in removed_ranks
            ):
                writes[self._index(directory).path_of(last_file(group))] = last_record(rank)
        kinds = sorted({directory for directory, _ in self._changed} | self._emptied)
        for directory in sorted({each.rpartition("/")[0] for each in kinds} & self._long_spaces.keys()):
            if SPACE_NAME not in self.disk.names(directory):
                head = {"v": VERSION, "space": self._long_spaces[directory]}
                writes[f"{directory}/{SPACE_NAME}"] = sealed(json.dumps(head).encode()[:-1])
        return Changes(writes, [each for each in removes if each not in writes], kinds)


def _fence_file(key: str) -> str:
    return f"{FENCES}/{part(key)}.json"


def _encode_fence(key: str, token: str) -> bytes:
    return sealed(json.dumps({"v": VERSION, "key": key, "token": token}).encode()[:-1])
