"""Which documents of one kind there are: read from the names of their files, and kept up to date by a stamp.

The stamp is the file `~stamp` in the directory of the kind. Whoever changes the kind removes it first and writes
another one afterwards, which names the groups that changed, so that nothing else has to be listed again. While there
is none, or where it changed meanwhile, what was read may be half of a change.

The file `~last` in the directory of a group keeps the highest rank there was, where no name tells it.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from ...errors import StorageCorrupt
from .base import Query
from .file_disk import Disk
from .file_form import VERSION, Page, read_page, sealed, unsealed
from .file_names import ident, key_of, parsed, part, text_of

DOCUMENTS: Final = "documents"
STAMP: Final = "~stamp"
LAST: Final = "~last"
_PAST: Final = 64  # changes that a stamp names

_EXPIRED: Final = 1000  # expired documents that are kept in mind, to be removed

Change = tuple[str, frozenset[str]]


class Stamp(NamedTuple):
    """The token of the last change, and those before it, each with the groups it changed."""

    changes: tuple[Change, ...]

    @property
    def token(self) -> str:
        return self.changes[-1][0]

    def since(self, token: str | None) -> frozenset[str] | None:
        """The groups that changed after that one; None: that is no longer known."""
        known = [each for each, _ in self.changes]
        if token not in known:
            return None
        return frozenset[str]().union(*(groups for _, groups in self.changes[known.index(token) + 1 :]))

    def after(self, token: str, groups: frozenset[str]) -> Stamp:
        return Stamp((*self.changes[1 - _PAST :], (token, groups)))

    def data(self) -> bytes:
        return "".join(" ".join((token, *sorted(groups))) + "\n" for token, groups in self.changes).encode()


def read_stamp(disk: Disk, directory: str) -> Stamp | None:
    try:
        data = disk.read(f"{directory}/{STAMP}")
    except FileNotFoundError:
        return None
    words = [line.split(" ") for line in data.decode("ascii", "replace").splitlines() if line]
    changes = tuple((line[0], frozenset(line[1:])) for line in words)
    return Stamp(changes) if changes and data.endswith(b"\n") else None


class Place(NamedTuple):
    """Where a document's file is: in the directory of its group, which is "." for none."""

    group: str
    rank: float
    ident: str
    name: str


_rank = attrgetter("rank")


class Shelf:
    """One kind of documents in one space; used by the threads that read and the one that writes."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self.disk = disk
        self.directory: str = directory
        self.token: str | None = None  # of the stamp that what is known here belongs to
        self.listed: int = 0  # how often names were read from the disk
        self._lock = threading.RLock()
        self._groups: dict[str, dict[str, Place]] = {}
        self._where: dict[str, str] = {}  # the group of those whose name does not begin with it
        self._last: dict[str, float] = {}  # the highest rank that a group ever had
        self._expired: dict[str, None] = {}  # keys of documents that were found to be past their end

    # -- keeping it up to date

    def refresh(self, stamp: Stamp | None) -> None:
        """List again what changed since; everything where that cannot be known."""
        with self._lock:
            if stamp is not None and stamp.token == self.token:
                return
            changed = stamp.since(self.token) if stamp is not None and self.token is not None else None
            self.token = None
            if changed is None:
                self._groups, self._where, self._last = {}, {}, {}
                changed = frozenset([".", *self.disk.directories(self.directory)])
            before = {group: self._groups.pop(group, {}) for group in changed}
            for places in before.values():
                for each in places:
                    self._where.pop(each, None)
            for group, places in before.items():
                self._list(group, {each.name: each for each in places.values()})
            self.token = stamp.token if stamp is not None else None

    def _list(self, group: str, known: Mapping[str, Place]) -> None:
        """Read the names in the directory of a group, of which some are known."""
        self.listed += 1
        found: dict[str, Place] = {}
        names = self.disk.names(self.directory_of(group))
        for name in names:
            place = known.get(name) or self._parsed(group, name)
            if place is None:
                continue
            twin = found.get(place.ident)
            if place.ident[0] == "~":
                twin = twin or self._twin(place.ident)
                self._where[place.ident] = group
            if twin is not None:
                one, other = (self.disk.path(self.file_of(each)) for each in (twin, place))
                raise StorageCorrupt(f"{one} and {other} are one document twice: move one of them away")
            found[place.ident] = place
        if found or group == ".":
            self._groups[group] = found
        ranks = (each.rank for each in found.values())
        self._last[group] = max(self._last_file(self.directory_of(group), names), max(ranks, default=0.0))

    def _parsed(self, group: str, name: str) -> Place | None:
        told = parsed(name)
        if told is not None:
            return Place(group, *told, name)
        path = self.disk.path(f"{self.directory_of(group)}/{name}")
        if name.endswith(".json") and not (group == "." and os.path.isdir(path)):
            raise StorageCorrupt(f"{path} is no document: move it away")
        return None

    def _last_file(self, directory: str, names: Sequence[str]) -> float:
        if LAST not in names:
            return 0.0
        path = self.disk.path(f"{directory}/{LAST}")
        told: float = json.loads(unsealed(self.disk.read(f"{directory}/{LAST}"), path) + b"}").get("last", 0.0)
        return told

    def _twin(self, ident: str) -> Place | None:
        group = self._where.get(ident)
        return None if group is None else self._groups.get(group, {}).get(ident)

    def moved(self, edits: Iterable[tuple[Place | None, Place | None]], stamp: Stamp, listed: int) -> None:
        """The files of documents are now there, and this is the stamp; `listed` is what it was before."""
        with self._lock:
            for old, new in edits:
                self._moved(old, new)
            # What was listed meanwhile may have been half of the change.
            self.token = stamp.token if self.listed == listed else None

    def _moved(self, old: Place | None, new: Place | None) -> None:
        if old is not None and old.name == LAST:
            self._last.pop(old.group, None)
        elif old is not None:
            self._groups.get(old.group, {}).pop(old.ident, None)
            self._where.pop(old.ident, None)
        if new is not None:
            self._last[new.group] = max(self.last(new.group), new.rank)
            if new.name != LAST:
                self._groups.setdefault(new.group, {})[new.ident] = new
            if new.ident.startswith("~"):
                self._where[new.ident] = new.group

    def forget(self) -> None:
        """Trust nothing of what was listed."""
        self.token = None

    # -- looking things up

    def directory_of(self, group: str) -> str:
        return self.directory if group == "." else f"{self.directory}/{group}"

    def file_of(self, place: Place) -> str:
        return f"{self.directory_of(place.group)}/{place.name}"

    def last(self, group: str) -> float:
        """The highest rank that a group ever had, or 0."""
        return self._last.get(group, 0.0)

    def place(self, key: str) -> Place | None:
        with self._lock:
            return self._place(key)

    def _place(self, key: str) -> Place | None:
        whole = ident(key, "")
        if whole in self._where:
            return self._groups[self._where[whole]][whole]
        at = key.find("/", 1)
        while at > 0:
            there = self._groups.get(part(key[:at]), {}).get(ident(key, key[:at]))
            if there is not None:
                return there
            at = key.find("/", at + 1)
        return None

    def places(self, group: str | None) -> list[Place]:
        with self._lock:
            if group is not None:
                return list(self._groups.get(group_part(group), {}).values())
            return [place for each in self._groups.values() for place in each.values()]

    def groups(self) -> list[str]:
        with self._lock:
            return list(self._last)

    def ordered(self, query: Query) -> Iterator[Place]:
        """What the names leave of a query, in order of (rank, key)."""
        low = -math.inf if query.low is None else query.low
        high = math.inf if query.high is None else query.high
        found = [each for each in self.places(query.group) if low <= each.rank < high]
        if query.prefix:
            found = [each for each in found if self.key(each).startswith(query.prefix)]
        found.sort(key=_rank, reverse=query.descending)
        for _, equal in groupby(found, _rank):
            places = list(equal)
            if len(places) > 1:
                places.sort(key=self.key, reverse=query.descending)
            yield from places

    def some_expired(self, most: int) -> list[str]:
        """Keys that may have expired, which are not told again."""
        found = list(self._expired)[:most]
        for key in found:
            self._expired.pop(key, None)
        return found

    # -- reading files

    def key(self, place: Place) -> str:
        """The key of a document, from its name where that can tell."""
        key = key_of(place.ident, text_of(place.group))
        return self.page(place).key if key is None else key

    def page(self, place: Place) -> Page:
        """What stands in a file; StorageCorrupt, StorageTooNew; FileNotFoundError where it was removed meanwhile."""
        where = self.file_of(place)
        path = self.disk.path(where)
        page = read_page(self.disk.read(where), path)
        if (group_part(page.group), ident(page.key, page.group)) != (place.group, place.ident):
            raise StorageCorrupt(
                f"{path} holds {page.key!r} of group {page.group!r}, which does not belong there: move it away"
            )
        return page

    def live(self, places: Iterable[Place | None], now: float) -> Iterator[tuple[Place, Page]]:
        """What stands in those files that are there and have not expired."""
        for place in places:
            if place is not None:
                page = self.page(place)
                if page.expires is None or page.expires > now:
                    yield place, page
                elif len(self._expired) < _EXPIRED:
                    self._expired[page.key] = None


def directory_of(space: str, kind: str) -> str:
    return f"{DOCUMENTS}/{part(space)}/{part(kind)}"


def group_part(group: str) -> str:
    return part(group) if group else "."


def last_page(rank: float) -> bytes:
    return sealed(json.dumps({"v": VERSION, "last": rank}).encode()[:-1])
