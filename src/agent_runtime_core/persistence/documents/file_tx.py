"""A commit on files while it is being made: what it reads, what it will have changed, and the operations."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ..._engines.base import FENCE_APPLIED, FENCE_OPS, NotApplied
from ...errors import StorageCorrupt, StorageError
from .base import Absent, Changed, Document, Entry, behind, touched
from .file_disk import Disk
from .file_form import VERSION, Page, sealed, unsealed, written
from .file_names import ident, name_of, part
from .file_shelf import DOCUMENTS, LAST, Place, Shelf, directory_of, group_part, last_page

FENCES: Final = "fences"
SWEPT: Final = 4  # expired documents of a kind that a commit removes, at most


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
    """Reads see what the commit changed itself; nothing is written before all of it is known.

    `at` is the directory of a kind.
    """

    def __init__(self, disk: Disk, shelf: Callable[[str], Shelf]) -> None:
        self.disk = disk
        self._shelf = shelf
        self._fences: dict[str, str | None] = {}
        self._read: dict[tuple[str, str], Held | None] = {}
        self._changed: dict[tuple[str, str], Held | None] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._emptied: set[str] = set()

    def saved(self) -> tuple[Any, ...]:
        """What it has changed so far."""
        return dict(self._fences), dict(self._changed), dict(self._last), set(self._emptied)

    def restore(self, saved: tuple[Any, ...]) -> None:
        self._fences, self._changed, self._last, self._emptied = saved

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

    def _stored(self, at: str, key: str) -> Held | None:
        if (at, key) not in self._read:
            shelf = self._shelf(at)
            place = shelf.place(key)
            self._read[at, key] = None if place is None else Held.of(shelf.page(place), place)
        return self._read[at, key]

    def one(self, at: str, key: str, now: float) -> Document | None:
        """The document, unless it has expired."""
        held = self._changed[at, key] if (at, key) in self._changed else self._stored(at, key)
        if held is None or (held.document.expires is not None and held.document.expires <= now):
            return None
        return held.document

    def behind(self, at: str, group: str) -> float:
        last = 0.0 if at in self._emptied else self._shelf(at).last(group_part(group))
        return behind(max(last, self._last.get((at, group), 0.0)))

    def keep(self, at: str, document: Document, entry: Entry | None = None) -> None:
        """`entry` None: it keeps its words and its mark."""
        if entry is not None:
            self._stored(at, document.key)
            held = Held(document, entry.words, entry.mark)
        else:
            there = self._changed.get((at, document.key)) or self._stored(at, document.key)
            held = Held(document) if there is None else there._replace(document=document)
        self._changed[at, document.key] = held
        self._last[at, document.group] = max(self._last.get((at, document.group), 0.0), document.rank)

    def landed(self, at: str, entry: Entry) -> bool:
        """Whether what is there comes from this very write."""
        held = self._changed[at, entry.key] if (at, entry.key) in self._changed else self._stored(at, entry.key)
        return held is not None and (held.document.text, held.mark) == (entry.text, entry.mark)

    def drop(self, at: str, key: str) -> None:
        self._stored(at, key)
        self._changed[at, key] = None

    def live(self, at: str, group: str | None, now: float) -> list[str]:
        """The keys that there are."""
        found = [(key, self.one(at, key, now)) for key in self._keys(at, group)]
        return [key for key, each in found if each is not None and (group is None or each.group == group)]

    def _keys(self, at: str, group: str | None = None) -> list[str]:
        shelf = self._shelf(at)
        keys = {shelf.key(place) for place in shelf.places(group)}
        return sorted(keys | {key for kind, key in self._changed if kind == at})

    def empty(self, space: str) -> None:
        """Drop all there is in the directory of a space, as if it had never been."""
        stored = {f"{space}/{name}" for name in self.disk.directories(space)}
        for at in sorted(stored | {at for at, _ in self._changed if at.startswith(f"{space}/")}):
            for key in self._keys(at):
                self.drop(at, key)
            self._emptied.add(at)
        self._last = {(at, group): rank for (at, group), rank in self._last.items() if not at.startswith(f"{space}/")}

    def sweep(self, now: float) -> None:
        """Take a few expired documents along, of the kinds that change anyway."""
        for at in sorted({at for at, _ in self._changed} - self._emptied):
            for key in self._shelf(at).some_expired(SWEPT):
                with contextlib.suppress(StorageError):  # it is no matter of this commit
                    if (at, key) not in self._changed and self._stored(at, key) and self.one(at, key, now) is None:
                        self.drop(at, key)

    # -- what has to be done

    def steps(self) -> tuple[list[Write | Move | Remove], list[Edit]]:
        """The changes to the files, those that remove last, and to the shelves."""
        steps: list[Write | Move | Remove] = []
        edits: list[Edit] = []
        for key, token in self._fences.items():
            data = None if token is None else _fence(key, token)
            steps.append(Remove(_fence_file(key)) if data is None else Write(_fence_file(key), data))
        for at in self._emptied:
            self._forget_ranks(self._shelf(at), steps, edits)
        for (at, key), held in self._changed.items():
            _document(self._shelf(at), key, self._stored(at, key), held, steps, edits)
        for shelf, last in list(self._lasts(edits)):
            steps.append(Write(shelf.file_of(last), last_page(last.rank)))
            edits.append(Edit(shelf, None, last))
        steps.sort(key=lambda each: isinstance(each, Remove))
        return steps, edits

    @staticmethod
    def _forget_ranks(shelf: Shelf, steps: list[Write | Move | Remove], edits: list[Edit]) -> None:
        for group in shelf.groups():
            mark = Place(group, 0.0, "", LAST)
            steps.append(Remove(shelf.file_of(mark)))
            edits.append(Edit(shelf, mark, None))

    def _lasts(self, edits: list[Edit]) -> Iterator[tuple[Shelf, Place]]:
        """Where the highest rank of a group has to be kept, which no document has any more."""
        high = {(self._shelf(at), group_part(group)): rank for (at, group), rank in self._last.items()}
        for shelf, group in {*high, *((each.shelf, each.old.group) for each in edits if each.old is not None)}:
            if shelf.directory not in self._emptied:
                high[shelf, group] = max(high.get((shelf, group), 0.0), shelf.last(group))
        for (shelf, group), rank in high.items():
            mine = [each for each in edits if each.shelf is shelf]
            left = max(
                (each.old.rank for each in mine if each.old is not None and each.old.group == group), default=0.0
            )
            kept = max(
                (each.new.rank for each in mine if each.new is not None and each.new.group == group), default=0.0
            )
            if kept < rank and (rank > shelf.last(group) or left >= rank or shelf.directory in self._emptied):
                yield shelf, Place(group, rank, "", LAST)


class Held(NamedTuple):
    """A document, what a search finds it by, and the mark of its write."""

    document: Document
    words: str = ""
    mark: int = 0

    @classmethod
    def of(cls, page: Page, place: Place) -> Held:
        return cls(page.document(place.rank), page.words, page.mark)


def _document(
    shelf: Shelf, key: str, stored: Held | None, held: Held | None, steps: list[Write | Move | Remove],
    edits: list[Edit],
) -> None:  # fmt: skip
    """What is to be done about one document."""
    old = shelf.place(key)
    if held is None:
        if old is not None:
            steps.append(Remove(shelf.file_of(old)))
            edits.append(Edit(shelf, old, None))
        return
    document = held.document
    name = ident(key, document.group)
    new = Place(group_part(document.group), document.rank, name, name_of(document.rank, name))
    edits.append(Edit(shelf, old, new))
    if old is not None and stored is not None and stored.document._replace(rank=document.rank) == document:
        if old.name != new.name:
            steps.append(Move(shelf.file_of(old), shelf.file_of(new)))
        if stored[1:] == held[1:]:
            return
    page = Page(key, document.group, document.version, document.expires, document.text, held.words, held.mark)
    steps.append(Write(shelf.file_of(new), written(page)))
    if old is not None and shelf.file_of(old) != shelf.file_of(new):
        steps.append(Remove(shelf.file_of(old)))


def _fence_file(key: str) -> str:
    return f"{FENCES}/{part(key)}.json"


def _fence(key: str, token: str) -> bytes:
    return sealed(json.dumps({"v": VERSION, "key": key, "token": token}).encode()[:-1])


def put(tx: FileTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    at = directory_of(space, kind)
    there = tx.one(at, entry.key, now)
    version = 0 if there is None else there.version
    if expect is not None and expect != version:
        if there is not None and version == expect + 1 and tx.landed(at, entry):
            return version, there.rank
        raise Changed
    rank = entry.rank
    if rank is None:
        rank = there.rank if there is not None and there.group == entry.group else tx.behind(at, entry.group)
    rank = float(rank)
    tx.keep(at, Document(entry.key, entry.text, version + 1, rank, entry.group, entry.expires), entry)
    return version + 1, rank


def add(tx: FileTx, space: str, kind: str, entry: Entry, now: float) -> float | None:
    if tx.one(directory_of(space, kind), entry.key, now) is not None:
        return None
    return put(tx, space, kind, entry, 0, now)[1]


def touch(tx: FileTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float) -> None:
    there = tx.one(directory_of(space, kind), key, now)
    if there is None:
        raise Absent
    moved = touched(there, rank, expires)
    if moved != there:
        tx.keep(directory_of(space, kind), moved)


def delete(tx: FileTx, space: str, kind: str, key: str, now: float) -> bool:
    there = tx.one(directory_of(space, kind), key, now)
    if there is not None:
        tx.drop(directory_of(space, kind), key)
    return there is not None


def clear(tx: FileTx, space: str, kind: str, group: str | None, now: float) -> int:
    keys = tx.live(directory_of(space, kind), group, now)
    for key in keys:
        tx.drop(directory_of(space, kind), key)
    return len(keys)


def drop(tx: FileTx, space: str, now: float) -> None:
    tx.empty(f"{DOCUMENTS}/{part(space)}")


def was_put(tx: FileTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    at = directory_of(space, kind)
    there = tx.one(at, entry.key, now)
    if there is None or not tx.landed(at, entry) or (expect is not None and there.version != expect + 1):
        raise NotApplied
    return there.version, there.rank


def was_added(tx: FileTx, space: str, kind: str, entry: Entry, now: float) -> float:
    return was_put(tx, space, kind, entry, None, now)[1]


def was_touched(tx: FileTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float) -> None:
    there = tx.one(directory_of(space, kind), key, now)
    if there is None or touched(there, rank, expires) != there:
        raise NotApplied


def was_deleted(tx: FileTx, space: str, kind: str, key: str, now: float) -> bool:
    if tx.one(directory_of(space, kind), key, now) is not None:
        raise NotApplied
    return True


OPS: Final[Mapping[str, Callable[..., Any]]] = {
    **FENCE_OPS,
    "documents.put": put,
    "documents.add": add,
    "documents.touch": touch,
    "documents.delete": delete,
    "documents.clear": clear,
    "documents.drop": drop,
}
APPLIED: Final[Mapping[str, Callable[..., Any]]] = {
    **FENCE_APPLIED,
    "documents.put": was_put,
    "documents.add": was_added,
    "documents.touch": was_touched,
    "documents.delete": was_deleted,
}
