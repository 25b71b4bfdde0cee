"""A commit on files while it is being made: what it reads, what it will have changed, and the operations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ..._engines.base import FENCE_OPS, NotApplied
from ...errors import InvalidArgument, StorageCorrupt
from .base import Absent, Changed, Document, Entry
from .file_disk import Disk
from .file_form import VERSION, Page, sealed, unsealed, written
from .file_names import ident, name_of, part
from .file_shelf import LAST, Place, Shelf, group_part, last_page

FENCES: Final = "fences"

Kind = tuple[str, str]


class Write(NamedTuple):
    """A file is to hold this."""

    where: str
    data: bytes


class Move(NamedTuple):
    """A file is to have another name."""

    where: str
    target: str


class Remove(NamedTuple):
    where: str


class Edit(NamedTuple):
    """What becomes of one document's place on its shelf."""

    shelf: Shelf
    old: Place | None
    new: Place | None


class FileTx:
    """Reads see what the commit changed itself; nothing is written before all of it is known."""

    def __init__(self, disk: Disk, shelf: Callable[[Kind], Shelf]) -> None:
        self.disk = disk
        self._shelf = shelf
        self._fences: dict[str, str | None] = {}
        self._read: dict[tuple[Kind, str], Document | None] = {}
        self._changed: dict[tuple[Kind, str], tuple[Document | None, str]] = {}
        self._last: dict[tuple[Kind, str], float] = {}

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
        told = json.loads(unsealed(data, path) + b"}")
        if told.get("key") != key or not isinstance(told.get("token"), str):
            raise StorageCorrupt(f"{path} is the fence of {told.get('key')!r}, not of {key!r}: move it away")
        token: str = told["token"]
        return token

    def fence(self, key: str, token: str | None) -> None:
        self._fences[key] = token

    # -- documents

    def _stored(self, at: Kind, key: str) -> Document | None:
        if (at, key) not in self._read:
            shelf = self._shelf(at)
            place = shelf.place(key)
            self._read[at, key] = None if place is None else shelf.document(place)
        return self._read[at, key]

    def one(self, at: Kind, key: str, now: float) -> Document | None:
        """The document, unless it has expired."""
        found = self._changed[at, key][0] if (at, key) in self._changed else self._stored(at, key)
        return None if found is None or (found.expires is not None and found.expires <= now) else found

    def behind(self, at: Kind, group: str) -> float:
        return max(self._shelf(at).last(group_part(group)) + 1.0, self._last.get((at, group), 0.0) + 1.0)

    def keep(self, at: Kind, document: Document, words: str | None = None) -> None:
        """`words` None: those it has."""
        self._stored(at, document.key)
        if words is None:
            words = self._changed.get((at, document.key), (None, ""))[1]
        self._changed[at, document.key] = (document, words)
        self._last[at, document.group] = max(self._last.get((at, document.group), 0.0), document.rank)

    def drop(self, at: Kind, key: str) -> None:
        self._stored(at, key)
        self._changed[at, key] = (None, "")

    def live(self, at: Kind, group: str | None, now: float) -> list[str]:
        """The keys that there are."""
        shelf = self._shelf(at)
        keys = {shelf.page(place).key for place in shelf.places(group)}
        keys.update(key for (kind, key), (document, _) in self._changed.items() if kind == at and document is not None)
        found = [(key, self.one(at, key, now)) for key in sorted(keys)]
        return [key for key, each in found if each is not None and (group is None or each.group == group)]

    # -- what has to be done

    def steps(self) -> tuple[list[Write | Move | Remove], list[Edit]]:
        """The changes to the files, those that remove last, and to the shelves."""
        steps: list[Write | Move | Remove] = []
        edits: list[Edit] = []
        for key, token in self._fences.items():
            data = None if token is None else _fence(key, token)
            steps.append(Remove(_fence_file(key)) if data is None else Write(_fence_file(key), data))
        for (at, key), (document, words) in self._changed.items():
            self._document(self._shelf(at), self._stored(at, key), key, document, words, steps, edits)
        for shelf, last in list(self._lasts(edits)):
            steps.append(Write(shelf.file_of(last), last_page(last.rank)))
            edits.append(Edit(shelf, None, last))
        steps.sort(key=lambda each: isinstance(each, Remove))
        return steps, edits

    def _lasts(self, edits: list[Edit]) -> Iterator[tuple[Shelf, Place]]:
        """Where the highest rank of a group has to be kept, which no document has any more."""
        high = {(each.shelf, each.old.group): each.shelf.last(each.old.group) for each in edits if each.old is not None}
        for (at, group), rank in self._last.items():
            where = (self._shelf(at), group_part(group))
            high[where] = max(rank, where[0].last(where[1]))
        for (shelf, group), rank in high.items():
            mine = [each for each in edits if each.shelf is shelf]
            left = max((each.old.rank for each in mine if each.old is not None and each.old.group == group), default=0.0)
            kept = max((each.new.rank for each in mine if each.new is not None and each.new.group == group), default=0.0)
            if kept < rank and (rank > shelf.last(group) or left >= rank):
                yield shelf, Place(group, rank, "", LAST)

    @staticmethod
    def _document(
        shelf: Shelf, stored: Document | None, key: str, document: Document | None, words: str,
        steps: list[Write | Move | Remove], edits: list[Edit],
    ) -> None:  # fmt: skip
        old = shelf.place(key)
        if document is None:
            if old is not None:
                steps.append(Remove(shelf.file_of(old)))
                edits.append(Edit(shelf, old, None))
            return
        name = ident(key, document.group)
        new = Place(group_part(document.group), document.rank, name, name_of(document.rank, name))
        edits.append(Edit(shelf, old, new))
        if old is not None and stored is not None and stored._replace(rank=document.rank) == document:
            if old.name != new.name:
                steps.append(Move(shelf.file_of(old), shelf.file_of(new)))
            return
        page = Page(key, document.group, document.version, document.expires, document.text, words)
        steps.append(Write(shelf.file_of(new), written(page)))
        if old is not None and shelf.file_of(old) != shelf.file_of(new):
            steps.append(Remove(shelf.file_of(old)))


def _fence_file(key: str) -> str:
    return f"{FENCES}/{part(key)}.json"


def _fence(key: str, token: str) -> bytes:
    return sealed(json.dumps({"v": VERSION, "key": key, "token": token}).encode()[:-1])


def put(tx: FileTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    at = (space, kind)
    there = tx.one(at, entry.key, now)
    version = 0 if there is None else there.version
    if expect is not None and expect != version:
        if there is not None and version == expect + 1 and there.text == entry.text:
            return version, there.rank
        raise Changed
    rank = entry.rank
    if rank is None:
        rank = there.rank if there is not None and there.group == entry.group else tx.behind(at, entry.group)
    elif rank != rank:
        raise InvalidArgument(f"the rank of {kind} {entry.key!r} is not a number: give one that can be compared")
    tx.keep(at, Document(entry.key, entry.text, version + 1, float(rank), entry.group, entry.expires), entry.words)
    return version + 1, float(rank)


def add(tx: FileTx, space: str, kind: str, entry: Entry, now: float) -> float | None:
    if tx.one((space, kind), entry.key, now) is not None:
        return None
    return put(tx, space, kind, entry, 0, now)[1]


def touch(tx: FileTx, space: str, kind: str, key: str, rank: float, now: float) -> None:
    there = tx.one((space, kind), key, now)
    if there is None:
        raise Absent
    if rank > there.rank:
        tx.keep((space, kind), there._replace(rank=float(rank)))


def delete(tx: FileTx, space: str, kind: str, key: str, now: float) -> bool:
    there = tx.one((space, kind), key, now)
    if there is not None:
        tx.drop((space, kind), key)
    return there is not None


def clear(tx: FileTx, space: str, kind: str, group: str | None, now: float) -> int:
    keys = tx.live((space, kind), group, now)
    for key in keys:
        tx.drop((space, kind), key)
    return len(keys)


def was_put(tx: FileTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    there = tx.one((space, kind), entry.key, now)
    if there is None or there.text != entry.text or (expect is not None and there.version != expect + 1):
        raise NotApplied
    return there.version, there.rank


def was_added(tx: FileTx, space: str, kind: str, entry: Entry, now: float) -> float:
    there = tx.one((space, kind), entry.key, now)
    if there is None or there.text != entry.text:
        raise NotApplied
    return there.rank


def was_touched(tx: FileTx, space: str, kind: str, key: str, rank: float, now: float) -> None:
    there = tx.one((space, kind), key, now)
    if there is None or there.rank < rank:
        raise NotApplied


def was_deleted(tx: FileTx, space: str, kind: str, key: str, now: float) -> bool:
    if tx.one((space, kind), key, now) is not None:
        raise NotApplied
    return True


OPS: Final[Mapping[str, Callable[..., Any]]] = {
    **FENCE_OPS,
    "documents.put": put,
    "documents.add": add,
    "documents.touch": touch,
    "documents.delete": delete,
    "documents.clear": clear,
}
APPLIED: Final[Mapping[str, Callable[..., Any]]] = {
    "documents.put": was_put,
    "documents.add": was_added,
    "documents.touch": was_touched,
    "documents.delete": was_deleted,
}
