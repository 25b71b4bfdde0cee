"""The contract of document stores. All stores of this package keep their models as documents.

A document is a text with a key, a version, a group and a rank. A *space* is the scope of one owner: "global",
"project", or "session:<id>". A *kind* is a type of document in a space, for example "message" or "fact". Keys are
unique within a kind. The documents of a kind are sorted by (rank, key).
"""

from __future__ import annotations

import contextlib
import math
import re
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..._core.clock import SYSTEM, Clock
from ..._core.context_vars import claimed_run
from ..._core.lazy_exports import lazy_exports
from ..._core.payload_codec import encrypted_without_codec
from ..._core.validation import Shown, must
from ..._engines.base import Backend, Guard, Op
from ..._engines.payloads import UNREADABLE, PayloadFields, Payloads
from ...errors import NotSupported, StorageBusy, brief
from ..fencing import CURRENT_CLAIM


class Document(NamedTuple):
    """A stored document.

    Attributes:
        key: Unique within its kind.
        text: The content.
        version: 1 at first, plus 1 for each put.
        rank: The position in its kind.
        group: The group, or an empty string.
        expires: The time at which it expires, in seconds since the epoch. If None, it does not expire.
    """

    key: str
    text: str
    version: int = 1
    rank: float = 0.0
    group: str = ""
    expires: float | None = None


class Entry(NamedTuple):
    """A document to store.

    Attributes:
        key: Unique within its kind.
        text: The content.
        group: The group, or an empty string.
        rank: The position in its kind. None keeps the rank of a stored document of the same group. A new document gets
            a rank after all others of its group, from 1.
        expires: The time at which it expires, in seconds since the epoch. If None, it does not expire.
        words: The text that a full-text search matches. An empty string is never found.
        mark: A random id of this write, which `Collection` sets. It identifies a repeated write.
    """

    key: str
    text: str
    group: str = ""
    rank: float | None = None
    expires: float | None = None
    words: str = ""
    mark: int = 0


class Query(NamedTuple):
    """A query for documents of a kind.

    Attributes:
        space: The space.
        kind: The kind.
        now: The current time, in seconds since the epoch.
        group: Only documents of this group. If None, of all groups.
        prefix: Only documents whose key begins with it.
        low: The smallest rank, inclusive.
        high: The greatest rank, exclusive.
        descending: Return the documents in descending order.
        offset: Skip this many documents.
        limit: Return at most this many documents. If None, all.
    """

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

    def listed(self, documents: Iterable[Document]) -> list[Document]:
        """Return the documents, all of this space and kind, that the query finds, in its order.

        For a store without indexes.

        Args:
            documents: All documents of this space and kind.
        """
        found = sorted(filter(self.admits, documents), key=lambda each: (each.rank, each.key), reverse=self.descending)
        return found[self.offset :][: self.limit]

    def admits(self, document: Document) -> bool:
        """Return whether a document is not expired, and matches the group, the prefix and a rank of the query.

        Args:
            document: The document.
        """
        return (
            (document.expires is None or document.expires > self.now)
            and (self.group is None or document.group == self.group)
            and document.key.startswith(self.prefix)
            and (self.low is None or document.rank >= self.low)
            and (self.high is None or document.rank < self.high)
        )


def _owner(space: str, kind: str, key: str) -> str:
    return f"{space}/{kind}/{key}"


def _encode_entry(payloads: Payloads, args: Any) -> tuple[Any, ...]:
    space, kind, entry, *rest = args
    text = payloads.encode("document", _owner(space, kind, entry.key), entry.text)
    return space, kind, entry._replace(text=text, words=entry.words if payloads.searchable else ""), *rest


def _decoded(payloads: Payloads | None, owner: str, text: str) -> str:
    if payloads is not None:
        return payloads.decode("document", owner, text)
    if (error := encrypted_without_codec(f"document {owner}", text)) is not None:
        raise error
    return text


FIELDS = PayloadFields({"documents.put": _encode_entry, "documents.add": _encode_entry})


T = TypeVar("T")

CHANGE_TRIES = 100  # attempts of a change that conflicts each time
MOST_RANK = 1e300  # the largest absolute rank, so that a greater one always exists
MARK_BITS = 52  # a double, which Lua uses for numbers, holds such an integer exactly
PAGE = 500  # documents in one page, by default
SEARCH_LIMIT = 20  # documents that a search returns, by default


class VersionConflict(Exception):
    """The stored version of the document is not the version that the writer read. The writer must read it again."""


class DocumentMissing(Exception):
    """The document to touch does not exist."""


def touched(document: Document, rank: float, expires: float | None) -> Document:
    """Return a document with at least this rank, that does not expire before this time."""
    end = document.expires
    if end is not None and expires is not None:
        end = max(end, expires)
    return document._replace(rank=max(document.rank, float(rank)), expires=end)


def next_rank(last: float) -> float:
    """Return a rank greater than `last`."""
    return last + 1.0 if last + 1.0 > last else last * (1 + 2**-52)


class DocumentStore(Backend):
    """Stores documents.

    Guarantees, on every backend:

    1. A commit is applied completely or not at all, even if the process is killed during it.
    2. Two writers of one document never both succeed with the same `expect`. The store never assigns the same rank to
       two documents of a group.
    3. A write under a superseded claim raises LeaseLost.
    4. A document past its `expires` is absent, for readers and for writers.
    5. A document that is found but cannot be read raises StorageCorrupt or StorageTooNew, which name it. It is never
       overwritten. A document that a damaged index or list of kinds no longer contains is absent.

    A backend implements two methods. `commit(guard, ops)` applies the fences `fence.install` and `fence.forget`, and:

    - `documents.put(space, kind, Entry, expect, now)` returns (version, rank). With `expect` None it replaces any
      document. With 0 there must be none, and with a number that version, or it raises VersionConflict. If the stored
      document's version is `expect` + 1, with the same text and mark, the put was already applied, and succeeds.
    - `documents.add(space, kind, Entry, now)` returns the rank, or None if the key exists. Then nothing changes.
    - `documents.touch(space, kind, key, rank, expires, now)` raises the rank to at least `rank`. A document that
      expires does not expire before `expires`. It raises DocumentMissing.
    - `documents.delete(space, kind, key, now)` returns whether the document existed.
    - `documents.clear(space, kind, group, now)` deletes a group and returns how many documents were in it. If `group`
      is None, it deletes all documents of the kind.
    - `documents.drop(space, now)` deletes all documents of the space.

    `read(what, ...)` implements:

    - `get(space, kind, keys, now)` returns the existing documents, in the order of `keys`.
    - `find(Query)` returns the documents of a query.
    - `words(space, kind, now)` returns (key, rank, words) of each document with words.

    A backend receives the words of an entry folded, separated by spaces. If a document was deleted and is stored again,
    its version is 1 again.

    Args:
        clock: The clock of the store.
    """

    payload_fields = FIELDS

    def __init__(self, *, clock: Clock = SYSTEM) -> None:
        self.clock = clock

    @abstractmethod
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Apply operations, all or nothing.

        Args:
            guard: Apply them only if this claim is valid. If None, always.
            ops: The operations.

        Returns:
            The result of each operation.

        Raises:
            LeaseLost: The claim was superseded or released.
            VersionConflict: A put found another version than it expects.
            DocumentMissing: A touch found no document.
        """

    @abstractmethod
    async def read(self, what: str, *args: Any) -> Any:
        """Execute the read `what` with its arguments, and return its result.

        Args:
            what: The name of the read.
            *args: Its arguments.

        Returns:
            Its result.
        """

    async def write(self, *ops: Op) -> list[Any]:
        """Commit `ops` under the claim of the run that calls this, if a run does.

        Args:
            *ops: The operations.

        Returns:
            The result of each operation.

        Raises:
            LeaseLost: The claim of the run was superseded or released.
        """
        claim = CURRENT_CLAIM.get()
        return await (self.commits.commit(None, ops) if claim is None else claim.commit(self.commits, ops))

    async def drop(self, space: str) -> None:
        """Delete all documents of a space, without a claim.

        Args:
            space: The space.
        """
        await self.commits.commit(None, [Op("documents.drop", (space, self.clock.wall()))])

    async def search(self, space: str, kind: str, words: str, limit: int | None) -> list[Document]:
        """Return at most `limit` documents that contain all `words`, the best match first.

        The last word also matches words that begin with it. Documents with the most matching words come first, then
        the newest. Here all documents of the kind that have words are read. A backend may use a full-text index.

        Args:
            space: The space.
            kind: The kind.
            words: The words to search for.
            limit: At most this many documents. If None, all.
        """
        now = self.clock.wall()
        keys = best(words_of(words), await self.read("words", space, kind, now), limit)
        found: list[Document] = await self.read("get", space, kind, tuple(keys), now) if keys else []
        return found


@dataclass(frozen=True)
class Collection:
    """The documents of one kind in one space.

    Attributes:
        documents: The document store.
        space: The space.
        kind: The kind.
        ttl: Seconds after its last write that a document is kept. If None, it does not expire.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core.persistence import Collection, Entry, InMemoryMemoryStore, Scope
        >>> async def main():
        ...     notes = Collection(InMemoryMemoryStore().documents(Scope.PROJECT), "project", "note")
        ...     await notes.write(notes.put(Entry("n-1", "Buy milk")))
        ...     return (await notes.get("n-1")).text
        >>> asyncio.run(main())
        'Buy milk'
    """

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

    # -- operations, for `write`

    def put(self, entry: Entry, expect: int | None = None) -> Op:
        """Store a document. `expect` is the version to replace, 0 for none, or None for any.

        Args:
            entry: The document to store.
            expect: The version to replace, 0 for none, or None for any.

        Returns:
            The operation, for `write`.
        """
        now = self._now()
        return Op("documents.put", (self.space, self.kind, self._entry(entry, now), expect, now))

    def add(self, entry: Entry) -> Op:
        """Store a document, unless its key exists.

        Args:
            entry: The document to store.

        Returns:
            The operation, for `write`.
        """
        now = self._now()
        return Op("documents.add", (self.space, self.kind, self._entry(entry, now), now))

    def touch(self, key: str, rank: float) -> Op:
        """Raise the rank of a document to at least `rank`, and extend its lifetime.

        Args:
            key: The key of the document.
            rank: The rank that it gets at least.

        Returns:
            The operation, for `write`.
        """
        now = self._now()
        storable(key, "key", self.kind)
        _number(rank, "rank", key)
        return Op("documents.touch", (self.space, self.kind, key, rank, self._end(now), now))

    def delete(self, key: str) -> Op:
        """Delete a document.

        Args:
            key: The key of the document.

        Returns:
            The operation, for `write`.
        """
        storable(key, "key", self.kind)
        return Op("documents.delete", (self.space, self.kind, key, self._now()))

    def clear(self, group: str | None = None) -> Op:
        """Delete the documents of a group, or of the kind.

        Args:
            group: Delete only the documents of this group. If None, delete all documents of the kind.

        Returns:
            The operation, for `write`.
        """
        return Op("documents.clear", (self.space, self.kind, group, self._now()))

    async def write(self, *ops: Op) -> list[Any]:
        """Commit operations of collections of the same store, all or nothing. Return the result of each operation.

        Args:
            *ops: The operations.

        Returns:
            The result of each operation.
        """
        return await self.documents.write(*ops)

    # -- reads

    def _decoded(self, found: Iterable[Document]) -> list[Document]:
        """Return stored documents as their readers get them.

        If the code of a run needs a document that this process cannot read, its attempt is stopped: code that catches
        the error would continue as if there were no document.

        Raises:
            UnknownEncryptionKey: A document is encrypted with a key that this process does not have.
            NotDecoded: The codec refuses a document.
        """
        payloads, space, kind = self.documents.payloads, self.space, self.kind
        try:
            return [each._replace(text=_decoded(payloads, _owner(space, kind, each.key), each.text)) for each in found]
        except UNREADABLE as error:
            if (run := claimed_run()) is not None:
                run.lacks_key(error)
            raise

    async def get(self, key: str) -> Document | None:
        """Return a document, or None if there is none.

        Args:
            key: The key of the document.
        """
        found = await self.many([key])
        return found[0] if found else None

    async def many(self, keys: Sequence[str]) -> list[Document]:
        """Return the existing documents with these keys, in their order.

        Args:
            keys: The keys.
        """
        for key in keys:
            storable(key, "key", self.kind)
        if not keys:
            return []
        found: list[Document] = await self.documents.read("get", self.space, self.kind, tuple(keys), self._now())
        return self._decoded(found)

    async def find(
        self, group: str | None = None, *, prefix: str = "", low: float | None = None, high: float | None = None,
        descending: bool = False, offset: int = 0, limit: int | None = None,
    ) -> list[Document]:  # fmt: skip
        """Return documents, sorted by (rank, key).

        Args:
            group: Only documents of this group. If None, of all groups.
            prefix: Only documents whose key begins with it.
            low: The smallest rank, inclusive.
            high: The greatest rank, exclusive.
            descending: Return the documents in descending order.
            offset: Skip this many documents.
            limit: Return at most this many documents. If None, all.

        Raises:
            InvalidArgument: `offset` or `limit` is negative.
        """
        if offset < 0 or (limit is not None and limit < 0):
            raise must("offset and limit", "be at least 0", Shown(f"{offset} and {limit}"))
        storable(prefix, "prefix", self.kind)
        query = Query(self.space, self.kind, self._now(), group, prefix, low, high, descending, offset, limit)
        found: list[Document] = await self.documents.read("find", query)
        return self._decoded(found)

    async def pages(
        self, group: str | None = None, *, low: float | None = None, high: float | None = None,
        descending: bool = False, size: int = PAGE,
    ) -> AsyncIterator[list[Document]]:  # fmt: skip
        """Yield documents in order of rank, in pages of about `size`.

        Each document is yielded once, even if other writers change the collection. For that a page begins at the rank
        at which the previous page ended; an offset would change its meaning with each write.

        Args:
            group: Only documents of this group. If None, of all groups.
            low: The smallest rank, inclusive.
            high: The greatest rank, exclusive.
            descending: Yield the documents in descending order.
            size: About how many documents are in a page.
        """
        last_keys: set[str] = set()  # keys with the last rank that were already yielded
        while True:
            limit = size + len(last_keys)
            found = await self.find(group, low=low, high=high, descending=descending, limit=limit)
            if new := [each for each in found if each.key not in last_keys]:
                yield new
            if len(found) < limit:
                return
            rank = found[-1].rank
            last_keys = {each.key for each in found if each.rank == rank}
            low, high = (low, math.nextafter(rank, math.inf)) if descending else (rank, high)

    async def search(self, words: str, *, limit: int | None = SEARCH_LIMIT) -> list[Document]:
        """Return at most `limit` documents that contain all `words`, the best match first.

        If `words` contains no word, nothing is found.

        Args:
            words: The words to search for.
            limit: At most this many documents. If None, all.

        Raises:
            NotSupported: A payload codec encodes the documents, so their words are not stored.
        """
        payloads = self.documents.payloads
        if payloads is not None and not payloads.searchable:
            raise NotSupported(
                "documents that a payload codec encodes cannot be searched, because their words are not stored. "
                "Use AESGCMCodec(searchable=True) to store them, unencrypted"
            )
        return self._decoded(await self.documents.search(self.space, self.kind, words, limit))

    async def change(self, key: str, fn: Callable[[Document | None], Entry | None], *also: Op) -> Document | None:
        """Replace a document by `fn(document)`, as a compare-and-set.

        Args:
            key: The key of the document.
            fn: Receives the stored document, or None, and returns the new document. If it returns None, nothing
                changes. It is called again after a conflict, so it must not cause side effects.
            *also: Operations for the same commit.

        Returns:
            The document that was passed to `fn` last.

        Raises:
            StorageBusy: Each of 100 attempts conflicted with another writer.
        """

        async def attempt() -> Document | None:
            stored = await self.get(key)
            entry = fn(stored)
            if entry is not None:
                await self.write(self.put(entry, stored.version if stored is not None else 0), *also)
            return stored

        return await retry_conflicts(f"{self.kind} {key!a:.60}", attempt)


class UndecodedCollection(Collection):
    """Documents as they are stored, for code that needs no key of the payload codec."""

    def _decoded(self, found: Iterable[Document]) -> list[Document]:
        return [*found]


async def retry_conflicts(what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeat `attempt` while it conflicts with another writer.

    Raises:
        StorageBusy: Each of 100 attempts conflicted. The message begins with `what`.
    """
    for _ in range(CHANGE_TRIES):
        with contextlib.suppress(VersionConflict, DocumentMissing):
            return await attempt()
    raise StorageBusy(f"{what} was changed by other writers during {CHANGE_TRIES} attempts in a row. Try again.")


def storable(text: Any, what: str, kind: str) -> None:
    """Check that a value can be stored as text.

    Raises:
        InvalidArgument: It is not a string, or it contains a lone surrogate, which UTF-8 cannot encode.
    """
    if not isinstance(text, str):
        raise must(f"the {what} of a {kind}", "be a string", text)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            fix = "Encode the string with errors='replace'"
            raise must(f"the {what} of a {kind}", "not have a lone surrogate", Shown(f"{text!a:.80}"), fix) from None


def _number(value: Any, what: str, key: str) -> None:
    if value is not None and not (isinstance(value, int | float) and -MOST_RANK <= value <= MOST_RANK):
        raise must(f"the {what} of {brief(key)}", f"be a number from -{MOST_RANK:g} to {MOST_RANK:g}", value)


#: Names of 0.6.0.
if not TYPE_CHECKING:
    __getattr__ = lazy_exports(
        __name__, {}, renamed={"Absent": "DocumentMissing", "Changed": "VersionConflict", "Table": "Collection"}
    )[1]


LONGEST = 100_000  # characters of a text that are searchable

# A run of letters and digits is a word. In scripts without spaces between words, each character is a word.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")
_MARKS = re.compile("[\u0300-\u036f]")


def words_of(text: str) -> list[str]:
    """Return the words of a text in order, without case and accents."""
    text = text[:LONGEST]
    if not text.isascii():
        text = _MARKS.sub("", unicodedata.normalize("NFKD", text))
    return _WORD.findall(text.casefold())


def folded(text: str) -> str:
    """Return the words of a text, separated by spaces."""
    return " ".join(words_of(text))


def best(wanted: Sequence[str], texts: Iterable[tuple[str, float, str]], limit: int | None) -> list[str]:
    """Return at most `limit` keys of the texts that contain all words of `wanted`.

    The texts with the most matching words come first, then those with the highest rank.

    Args:
        wanted: The words. The last word also matches words that begin with it.
        texts: (key, rank, folded words) of each text.
        limit: At most this many keys. If None, all.
    """
    if not wanted:
        return []
    complete_words, last_word = set(wanted[:-1]), wanted[-1]
    found = []
    for key, rank, words in texts:
        if all(word in words for word in wanted):  # as a part of any word: a fast check that excludes most texts
            counts = Counter(words.split(" "))
            hits = [counts[word] for word in complete_words]
            hits.append(sum(count for word, count in counts.items() if word.startswith(last_word)))
            if all(hits):
                found.append((-sum(hits), -rank, key))
    return [key for _, _, key in sorted(found)[:limit]]


def text_in(content: Any) -> str:
    """Return a string itself. Of a list or dict, return all strings in it except keys, each on a line."""
    found: list[str] = []
    remaining = [content]
    while remaining:
        each = remaining.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict):
            remaining.extend(reversed(each.values()))
        elif isinstance(each, list | tuple):
            remaining.extend(reversed(each))
    return "\n".join(found)
