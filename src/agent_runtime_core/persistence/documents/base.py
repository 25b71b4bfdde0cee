"""Documents: texts with a key, a version, a group and a rank, which all stores of this package are made of.

A *space* is a scope of one owner ("global", "project", "session:<id>"), a *kind* one sort of document in it
("message", "fact"). Keys are unique within a kind. Within a kind documents are in order of (rank, key).
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..._core.clock import SYSTEM, Clock
from ..._core.lazy_import import lazily
from ..._engines.base import Backend, Op
from ...errors import InvalidArgument, StorageBusy, brief
from ..fencing import CURRENT_CLAIM
from .full_text import best, folded, words_of

T = TypeVar("T")

CHANGE_TRIES = 100  # a change that meets another one each time is given up after so many
MOST_RANK = 1e300  # either way: there is always one behind it
MARK_BITS = 52  # so that a double holds it
PAGE = 500  # documents in one page, if the caller does not say how many
FOUND = 20  # documents that a search answers with, where it is not said


class Document(NamedTuple):
    """A stored text. `version` is 1 at first and one more at each put; `expires` is the wall time of its end."""

    key: str
    text: str
    version: int = 1
    rank: float = 0.0
    group: str = ""
    expires: float | None = None


class Entry(NamedTuple):
    """A text to be stored.

    `rank` None: behind all others of its group, which are counted from 1, or where the document is already.
    `words` is the text that a full-text search finds it by; "" nothing. `mark` tells this write from another one of
    the same text; the table gives it.
    """

    key: str
    text: str
    group: str = ""
    rank: float | None = None
    expires: float | None = None
    words: str = ""
    mark: int = 0


class Query(NamedTuple):
    """Which documents of a kind: of a group, with keys that begin so, of ranks from `low` to below `high`."""

    space: str
    kind: str
    now: float
    group: str | None = None
    prefix: str = ""
    low: float | None = None
    high: float | None = None
    descending: bool = False
    offset: int = 0
    limit: int | None = None


class VersionConflict(Exception):
    """The document is not of the version that the writer has seen: it looks again."""


class DocumentMissing(Exception):
    """There is no such document to be touched."""


def touched(document: Document, rank: float, expires: float | None) -> Document:
    """The document, of that rank at least, and not to expire before then."""
    end = document.expires
    if end is not None and expires is not None:
        end = max(end, expires)
    return document._replace(rank=max(document.rank, float(rank)), expires=end)


def next_rank(last: float) -> float:
    """The rank behind that one."""
    return last + 1.0 if last + 1.0 > last else last * (1 + 2**-52)


class DocumentStore(Backend):
    """Where documents are kept.

    What it guarantees, on every backend:

    1. A commit is applied whole or not at all, also when the process is killed in it.
    2. Two writers of one document never both succeed on the same `expect`; no two documents of a group
       get the same rank from one that was left to the store.
    3. A write under a claim that was superseded is refused with LeaseLost.
    4. What is past its `expires` is absent, to readers and to writers.
    5. What is found and cannot be read is an error that names it (StorageCorrupt, StorageTooNew): never overwritten.
       What a damaged index or list of kinds does not lead to any more is absent.

    A backend brings two methods. `commit(guard, ops)` applies, besides the fences `fence.install` and `fence.forget`,

    - `documents.put(space, kind, Entry, expect, now)` -> (version, rank); `expect` None: whatever is there, 0: nothing
      is, else that version, or Changed. A put whose text and mark are there at version `expect` + 1 has happened
      already.
    - `documents.add(space, kind, Entry, now)` -> its rank, or None where the key is taken (nothing changes).
    - `documents.touch(space, kind, key, rank, expires, now)`: its rank is at least that from now on, and if it
      expires, not before `expires`; Absent.
    - `documents.delete(space, kind, key, now)` -> whether it was there.
    - `documents.clear(space, kind, group, now)` -> how many there were; `group` None: all of the kind.
    - `documents.drop(space, now)`: there is nothing of any kind in the space any more.

    `read(what, ...)` answers get(space, kind, keys, now), the documents that are there, in the order of `keys`;
    find(Query); words(space, kind, now), (key, rank, words) of each document that has any.

    The words of an entry come to a backend as `words.folded` makes them. A document that was deleted and is made
    anew begins at version 1 again.
    """

    def __init__(self, *, clock: Clock = SYSTEM) -> None:
        self.clock = clock

    @abstractmethod
    async def read(self, what: str, *args: Any) -> Any:
        """Return what is stored, as the class describes it for each `what`."""

    async def close(self) -> None:
        """Close what this store holds. A second call does nothing."""

    async def write(self, *ops: Op) -> list[Any]:
        """Commit `ops` for the run whose code this is called from, or for nobody in particular."""
        claim = CURRENT_CLAIM.get()
        return await (self.commits.commit(None, ops) if claim is None else claim.commit(self.commits, ops))

    async def drop(self, space: str) -> None:
        """Delete all documents of a space, whoever's code this is called from."""
        await self.commits.commit(None, [Op("documents.drop", (space, self.clock.wall()))])

    async def search(self, space: str, kind: str, words: str, limit: int | None) -> list[Document]:
        """Documents whose `words` hold every word of these, the last of them perhaps as the start of one, best first.

        Here it looks at all documents of the kind that have words, and the best are those that have the most of
        them, then the newest. A backend with an index asks that.
        """
        now = self.clock.wall()
        keys = best(words_of(words), await self.read("words", space, kind, now), limit)
        found: list[Document] = await self.read("get", space, kind, tuple(keys), now) if keys else []
        return found


@dataclass(frozen=True)
class Collection:
    """One kind of documents in one space. `ttl`: seconds after its last write that a document is kept."""

    documents: DocumentStore
    space: str
    kind: str
    ttl: float | None = None

    def _now(self) -> float:
        return self.documents.clock.wall()

    def _end(self, now: float) -> float | None:
        return None if self.ttl is None else now + self.ttl

    def _entry(self, entry: Entry, now: float) -> Entry:
        storable(entry.key, "key", self.kind)
        storable(entry.group, "group", self.kind)
        storable(entry.text, "text", self.kind)
        _number(entry.rank, "rank", entry.key)
        _number(entry.expires, "expires", entry.key)
        end = self._end(now)
        if end is not None:
            entry = entry._replace(expires=end if entry.expires is None else min(end, entry.expires))
        mark = self.documents.clock.random.getrandbits(MARK_BITS)
        return entry._replace(words=folded(entry.words) if entry.words else "", mark=mark)

    # -- operations, to be written together

    def put(self, entry: Entry, expect: int | None = None) -> Op:
        now = self._now()
        return Op("documents.put", (self.space, self.kind, self._entry(entry, now), expect, now))

    def add(self, entry: Entry) -> Op:
        now = self._now()
        return Op("documents.add", (self.space, self.kind, self._entry(entry, now), now))

    def touch(self, key: str, rank: float) -> Op:
        now = self._now()
        storable(key, "key", self.kind)
        _number(rank, "rank", key)
        return Op("documents.touch", (self.space, self.kind, key, rank, self._end(now), now))

    def delete(self, key: str) -> Op:
        storable(key, "key", self.kind)
        return Op("documents.delete", (self.space, self.kind, key, self._now()))

    def clear(self, group: str | None = None) -> Op:
        return Op("documents.clear", (self.space, self.kind, group, self._now()))

    async def write(self, *ops: Op) -> list[Any]:
        """Commit operations of this and other tables of the same store, all or nothing."""
        return await self.documents.write(*ops)

    # -- reads

    async def get(self, key: str) -> Document | None:
        found = await self.many([key])
        return found[0] if found else None

    async def many(self, keys: Sequence[str]) -> list[Document]:
        """The documents there are of these keys, in that order."""
        for key in keys:
            storable(key, "key", self.kind)
        if not keys:
            return []
        found: list[Document] = await self.documents.read("get", self.space, self.kind, tuple(keys), self._now())
        return found

    async def find(
        self, group: str | None = None, *, prefix: str = "", low: float | None = None, high: float | None = None,
        descending: bool = False, offset: int = 0, limit: int | None = None,
    ) -> list[Document]:  # fmt: skip
        """Documents in order of (rank, key), or in the opposite one."""
        if offset < 0 or (limit is not None and limit < 0):
            raise InvalidArgument(f"offset and limit are 0 or more, not {offset} and {limit}")
        storable(prefix, "prefix", self.kind)
        query = Query(self.space, self.kind, self._now(), group, prefix, low, high, descending, offset, limit)
        found: list[Document] = await self.documents.read("find", query)
        return found

    async def pages(
        self, group: str | None = None, *, low: float | None = None, high: float | None = None,
        descending: bool = False, size: int = PAGE,
    ) -> AsyncIterator[list[Document]]:  # fmt: skip
        """Yield documents in order of rank, about `size` at a time, each once while other writers change the table.

        A page begins at the rank at which the last one ended. An offset would move with each write.
        """
        edge: set[str] = set()  # keys of the last rank that were yielded already
        while True:
            limit = size + len(edge)
            found = await self.find(group, low=low, high=high, descending=descending, limit=limit)
            if fresh := [each for each in found if each.key not in edge]:
                yield fresh
            if len(found) < limit:
                return
            rank = found[-1].rank
            edge = {each.key for each in found if each.rank == rank}
            low, high = (low, math.nextafter(rank, math.inf)) if descending else (rank, high)

    async def search(self, words: str, *, limit: int | None = FOUND) -> list[Document]:
        """Documents whose `words` hold every word of these, best first; nothing where there is no word in them."""
        return await self.documents.search(self.space, self.kind, words, limit)

    async def change(self, key: str, fn: Callable[[Document | None], Entry | None], *also: Op) -> Document | None:
        """Put what `fn` makes of the document, and commit `also` with it; what it made it of.

        Repeated where somebody else was faster, so `fn` does nothing but decide; None from it changes nothing.
        StorageBusy: somebody else always was.
        """

        async def attempt() -> Document | None:
            there = await self.get(key)
            entry = fn(there)
            if entry is not None:
                await self.write(self.put(entry, there.version if there is not None else 0), *also)
            return there

        return await retry_conflicts(f"{self.kind} {key!a:.60}", attempt)


async def retry_conflicts(what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeat `attempt` while another writer is faster. StorageBusy: it was each time."""
    for _ in range(CHANGE_TRIES):
        with contextlib.suppress(VersionConflict, DocumentMissing):
            return await attempt()
    raise StorageBusy(f"{what} was changed by others {CHANGE_TRIES} times in a row; try again")


def storable(text: Any, what: str, kind: str) -> None:
    """InvalidArgument for what is no text, or one that UTF-8 cannot say."""
    if not isinstance(text, str):
        raise InvalidArgument(f"the {what} of a {kind} is a str, not {brief(text)}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"the {what} of a {kind} has half of a surrogate pair in it: {text!a:.80}") from None


def _number(value: Any, what: str, key: str) -> None:
    if value is not None and not (isinstance(value, int | float) and -MOST_RANK <= value <= MOST_RANK):
        raise InvalidArgument(f"the {what} of {brief(key)} is a number within {MOST_RANK:g}, not {brief(value)}")


#: Names of 0.6.0.
_RENAMED = {"Absent": "DocumentMissing", "Changed": "VersionConflict", "Table": "Collection"}


def __getattr__(name: str) -> object:
    return lazily(__name__, {}, name, _RENAMED)
