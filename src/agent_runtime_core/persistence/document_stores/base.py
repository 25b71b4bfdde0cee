"""The base of the six stores: where their documents are, and the kinds of documents."""

from __future__ import annotations

import copy
import datetime as _dt
import json
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypedDict, TypeVar, Unpack, cast
from uuid import UUID

from ..._core.arguments import checked_tenant
from ..._core.clock import SYSTEM, Clock
from ..._core.ids import new_ulid
from ..._core.log import log
from ..._core.validation import did_you_mean, must, type_name
from ..._engines.base import Op
from ...config import get_config
from ...errors import StorageError
from ..documents.base import Collection, Document, DocumentStore, Entry, storable
from ..models import Scope, moment, new_id

E = TypeVar("E", bound=Enum)

# Some backends truncate a string at NUL, and lone surrogates cannot be encoded as UTF-8. Both are escaped.
_ESCAPED = re.compile("[\x00\x1b\ud800-\udfff]")
_ESCAPE = re.compile("\x1b([0-9a-f]{4})")


def choice(kind: type[E], value: Any, what: str) -> E:
    """Return the member of an enumeration for a member or its value.

    Raises:
        InvalidArgument: There is no such member.
    """
    try:
        return kind(value)
    except Exception:  # noqa: BLE001 - ValueError, or an error of the value's repr, which Enum calls
        hint = did_you_mean(value, [str(each.value) for each in kind])
        raise must(what, f"be {type_name(kind)}", value, hint) from None


def seconds_of(when: Any, what: str) -> float:
    """Return the seconds since the epoch.

    Raises:
        InvalidArgument: `when` is not a datetime.
    """
    if not isinstance(when, _dt.datetime):
        raise must(what, "be a datetime", when)
    return moment(when)


def check_model(kind: type[Any], model: Any) -> None:
    if not isinstance(model, kind):
        raise must(kind.__name__.lower(), f"be {type_name(kind)}", model)


def check_link(other: Any, name: str) -> None:
    """Check a reference to another object.

    Raises:
        InvalidArgument: It is neither None, nor a UUID, nor a string.
    """
    if not isinstance(other, UUID | str | None):
        raise must(name, "be a UUID or None", other)


def check_count(count: Any, name: str) -> None:
    """Check a limit or an offset.

    Raises:
        InvalidArgument: It is neither None nor an integer of at least 0.
    """
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise must(name, "be an integer of at least 0", count)


def stored_key(key: Any, what: str = "key") -> str:
    """Return the document key of a string that is not empty. A prefix of the string becomes a prefix of the key."""
    if not isinstance(key, str) or not key:
        raise must(what, "be a non-empty string", key)
    return escaped(key)


def escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"\x1b{ord(found[0]):04x}", text)


def original(key: str) -> str:
    """Undo `escaped`."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), key)


def id_text(value: Any, what: str) -> str:
    """Return a UUID, or a string that is a UUID, as a string.

    Raises:
        InvalidArgument: It is not a UUID.
    """
    if isinstance(value, UUID):
        return str(value)
    try:
        return str(UUID(value))
    except (TypeError, ValueError, AttributeError):
        raise must(f"the id of a {what}", "be a UUID", value) from None


T = TypeVar("T")

#: Seconds after its last write that a session is kept, if it can outlive its process.
SESSION_TTL = 30 * 24 * 3600.0

# Kinds of documents. The names are part of every stored file.
MEMORY: Final = "memory"  # key: the key
PREFERENCE: Final = "preference"  # key: the key
CONVERSATION: Final = "conversation"  # key: its id; rank: updated_at
MESSAGE: Final = "message"  # key: "<conversation id>/<message id>"; group: the conversation's id
TASK_LIST: Final = "task_list"  # key: its id; rank: updated_at; group: the conversation's id
TASK: Final = "task"  # key: its id; group: the list's id


class HomeOptions(TypedDict, total=False):
    """The options that the stores of all backends have.

    Attributes:
        session_id: Names the session. By default a new session, which ends when the store is closed.
        project: Separates projects that share a document store.
        session_ttl: Seconds after its last write that a session is kept, if it can outlive its process.
        clock: By default the clock of the engine.
    """

    session_id: str | None
    project: str
    session_ttl: float
    clock: Clock


class DocumentHome:
    """The document stores of the three scopes, and the part of them that belongs to this project and session.

    Args:
        sessions_expire: Whether a session can outlive its process, so that its documents need a time to live.
        closes_documents: Whether `close` closes the document stores, because they were opened for this home.
        session_id: See `HomeOptions`.
        project: See `HomeOptions`.
        session_ttl: See `HomeOptions`.
        clock: See `HomeOptions`.
    """

    def __init__(
        self, *, sessions_expire: bool = False, closes_documents: bool = True, session_id: str | None = None,
        project: str = "", session_ttl: float = SESSION_TTL, clock: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        for name, text in (("session_id", session_id or ""), ("project", project)):
            storable(text, name, "store")
        self.clock: Clock = clock
        self.sessions_expire = sessions_expire
        self.closes_documents = closes_documents
        #: Whether other homes may use the session too. Then `close` does not delete it.
        self.shared_session: bool = session_id is not None
        self.session_id: str = session_id if session_id is not None else new_ulid(clock)
        self.project = project
        self.session_ttl = session_ttl
        #: Whose documents this home contains; "" for documents without a tenant.
        self.tenant: str = ""
        self._begun_sessions: set[str] = set()  # the spaces of the session, which the homes of all tenants share
        self._closed = False

    def for_tenant(self, tenant: str) -> Self:
        """Return the part of the same document stores that belongs to a tenant. Only this home closes the stores.

        Raises:
            InvalidArgument: This home is the part of another tenant.
        """
        if self.tenant not in ("", tenant):
            raise must("tenant", f"be {self.tenant!r}, whose stores these are", tenant)
        home = copy.copy(self)
        home.tenant = tenant
        return home

    def keep_in(
        self, documents: DocumentStore, *, in_home: DocumentStore | None = None, in_session: DocumentStore | None = None
    ) -> Self:
        """Use a document store for all scopes, or others for Scope.GLOBAL and Scope.SESSION. Return this home."""
        self._documents = {
            Scope.GLOBAL: in_home or documents,
            Scope.PROJECT: documents,
            Scope.SESSION: in_session or documents,
        }
        if self.clock is SYSTEM:
            self.clock = documents.clock
        get_config().encode_contents(*self.document_stores())
        return self

    def documents(self, scope: Scope) -> DocumentStore:
        """Return the document store of a scope."""
        return self._documents[scope]

    def expires(self, scope: Scope) -> float | None:
        """Return the seconds after its last write that a document is kept. None if it does not expire."""
        return self.session_ttl if self.sessions_expire and scope is Scope.SESSION else None

    def table(self, scope: Scope | None, kind: str, default: Scope = Scope.PROJECT) -> Collection:
        """Return the documents of one kind in a scope."""
        where = default if scope is None else _scope(scope)
        space = self.space(where)
        if self.tenant:
            # The length says where the tenant ends, whatever characters it and the name of the scope contain.
            space = f"tenant:{len(self.tenant)}:{self.tenant}:{space}"
        if where is Scope.SESSION:
            self._begun_sessions.add(space)
        return Collection(self.documents(where), space, kind, self.expires(where))

    def space(self, scope: Scope) -> str:
        """Return the name of a scope in its document store. A tenant's name is added to it."""
        match scope:
            case Scope.GLOBAL:
                return "global"
            case Scope.PROJECT:
                return f"project:{self.project}" if self.project else "project"
            case Scope.SESSION:
                return f"session:{self.session_id}"

    def document_stores(self) -> list[DocumentStore]:
        """Return the document stores, each once."""
        return list({id(each): each for each in self._documents.values()}.values())

    async def close(self) -> None:
        """Close the document stores. A session that only this home uses is deleted. A second call does nothing.

        The home of a tenant closes nothing: the home that it was made from closes the stores for all tenants.
        """
        if self._closed or self.tenant:
            return
        self._closed = True
        try:
            for space in () if self.shared_session else sorted(self._begun_sessions):
                await self._end_session(space)
        finally:
            for documents in self.document_stores() if self.closes_documents else ():
                await documents.close()

    async def _end_session(self, space: str) -> None:
        try:
            await self.documents(Scope.SESSION).drop(space)
        except StorageError as error:
            if self.expires(Scope.SESSION) is None:
                raise
            log.warning("session %s could not be deleted; it expires by itself: %s", self.session_id, error)


def of_space(known: dict[str, T], space: str, make: Callable[[], T], most: int) -> T:
    """Return what `known` contains for a space, or else what `make` returns.

    Only `most` spaces are kept, and the space that was used longest ago is dropped: every tenant adds spaces.
    """
    known[space] = found = known.pop(space, None) or make()
    while len(known) > most:
        known.pop(next(iter(known)), None)
    return found


def _scope(scope: Any) -> Scope:
    try:
        return Scope(scope)
    except Exception:  # noqa: BLE001 - ValueError, or what the repr raises that Enum puts into it
        raise must("scope", "be Scope.GLOBAL, Scope.PROJECT or Scope.SESSION", scope) from None


class DocumentBackedStore:
    """The base of a store that keeps its models as documents.

    A technology adds the place, which opens the document stores: `class SQLiteTaskStore(SQLitePlace, StoredTasks)`.

    Args:
        documents: A document store, which `close` leaves open, or a home.
        **options: See `HomeOptions`.
    """

    def __init__(self, documents: DocumentStore | DocumentHome, **options: Unpack[HomeOptions]) -> None:
        if isinstance(documents, DocumentStore):
            home = DocumentHome(sessions_expire=True, closes_documents=False, **options)
            documents = home.keep_in(documents)
        self.home: DocumentHome = documents
        self.clock: Clock = self.home.clock

    def for_tenant(self, tenant: str | None) -> Self:
        """Return this store with only the documents of a tenant. It shares the connections, and closes nothing.

        Args:
            tenant: The tenant. None returns this store.

        Raises:
            InvalidArgument: This store is the store of another tenant.
        """
        if not (name := checked_tenant(tenant)):
            return self
        store = copy.copy(self)  # with the same caches, whose keys contain the space
        store.home = self.home.for_tenant(name)
        return store

    def documents(self, scope: Scope) -> DocumentStore:
        """Return the document store of a scope.

        Args:
            scope: The scope.
        """
        return self.home.documents(scope)

    async def close(self) -> None:
        """Close the document stores. A session that only this store uses is deleted."""
        await self.home.close()


def ranks_for(keys: Sequence[str], present: Mapping[str, float]) -> dict[str, float | None]:
    """Return an ascending rank for each key, in the order of `keys`.

    New keys at the end get None: the store assigns a rank after all others.

    Args:
        keys: The keys in the wanted order.
        present: The ranks that documents have now.
    """
    ranked = [key for key in keys if key in present]
    if not ranked:
        return dict.fromkeys(keys)
    span = keys[: keys.index(ranked[-1]) + 1]
    assigned = dict(zip(ranked, sorted(present[key] for key in ranked), strict=True))
    ranks = _interpolated(span, assigned)
    if any(after <= before for before, after in pairwise(ranks)):
        ranks = _spread(len(span), min(assigned.values()), max(assigned.values()))
    return {**dict.fromkeys(keys), **dict(zip(span, ranks, strict=True))}


def _interpolated(span: Sequence[str], assigned: Mapping[str, float]) -> list[float]:
    """Space new ranks evenly between their neighbors. Ranks before the first neighbor are 1 apart."""
    ranks: list[float] = []
    pending = 0
    for key in span:
        if key not in assigned:
            pending += 1
            continue
        end = assigned[key]
        start = ranks[-1] if ranks else end - pending - 1
        ranks += [start + (end - start) * n / (pending + 1) for n in range(1, pending + 1)]
        ranks.append(end)
        pending = 0
    return ranks


def _spread(count: int, low: float, high: float) -> list[float]:
    """Space all ranks evenly from `low` to `high`, if no number is left between two neighbors."""
    step = (high - low) / max(count - 1, 1)
    if low + step <= low or high - step >= high:
        step = 1.0
    return [low + step * n for n in range(count)]


class IdentityMap(Generic[T]):
    """Values by the identity of objects. A value is dropped with its object.

    The objects need not be hashable. A copy of an object is not found.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def remember(self, thing: Any, value: T) -> None:
        """Set the value of an object."""
        object_id = id(thing)
        self._entries[object_id] = (weakref.ref(thing, lambda _: self._entries.pop(object_id, None)), value)

    def of(self, thing: Any) -> T | None:
        """Return the value of an object, or None."""
        ref, value = self._entries.get(id(thing), (None, None))
        return value if ref is not None and ref() is thing else None

    def __len__(self) -> int:
        return len(self._entries)


def three_way_merge(mine: str, base: str | None, theirs: str | None) -> str:
    """Return `theirs` with the fields in which `mine` differs from `base`. All are JSON objects.

    If `base` or `theirs` is None, return `mine`.
    """
    if base is None or theirs is None:
        return mine
    if mine == base:
        return theirs
    return json.dumps(json.loads(theirs) | changed_fields(mine, base), separators=(",", ":"))


def changed_fields(mine: str, base: str) -> dict[str, Any]:
    """Return the fields in which `mine` differs from `base`."""
    new, old = json.loads(mine), json.loads(base)
    # The JSON texts are compared, because 1 == 1.0 == True.
    return {name: each for name, each in new.items() if json.dumps(each) != json.dumps(old.get(name))}


KEPT = 500  # entries that are kept. A reader that falls further behind loads all documents again
PART = 1000  # keys in one entry, and documents in one page of a load


class LogCursor(NamedTuple):
    """The last entry that was read."""

    rank: float
    key: str


class ChangeLog:
    """Entries with the keys of changed documents. An entry is written in the same commit as its change.

    Entries are documents of the kind `<kind>_change`. The store assigns their ranks. Old entries are deleted as new
    entries are written.
    """

    def __init__(self, table: Collection) -> None:
        self._entries = replace(table, kind=f"{table.kind}_change")

    def note(self, keys: Iterable[str]) -> list[Op]:
        """Return operations that log the change of documents. They must be the last operations of the same commit."""
        changed = list(keys)
        parts = [changed[start : start + PART] for start in range(0, len(changed), PART)]
        return [self._entries.add(Entry(new_id().hex, json.dumps(part))) for part in parts]

    async def trim(self, ranks: Iterable[float]) -> None:
        """Delete old entries at every `KEPT`-th entry. `ranks` are the results of the operations of `note`."""
        for rank in ranks:
            if rank % KEPT == 0 and rank > KEPT:
                async for page in self._entries.pages(high=rank - KEPT):
                    await self._entries.write(*(self._entries.delete(each.key) for each in page))

    async def last(self) -> LogCursor | None:
        """Return the last entry, or None if there is none."""
        found = await self._entries.find(descending=True, limit=1)
        return _cursor(found[0]) if found else None

    async def since(self, cursor: LogCursor | None) -> tuple[set[str], LogCursor | None] | None:
        """Return the keys that changed after `cursor`, and the last entry. None if those entries were deleted."""
        if cursor is None:
            return None if await self._entries.find(limit=1) else (set(), None)
        found = await self._entries.find(low=cursor.rank)
        if not found or _cursor(found[0]) != cursor:
            return None
        keys = {key for each in found[1:] for key in cast("list[str]", json.loads(each.text))}
        return keys, _cursor(found[-1])


def _cursor(document: Document) -> LogCursor:
    return LogCursor(document.rank, document.key)


class DocumentIndex(Protocol):
    """An index in memory of documents."""

    async def load(self, documents: Sequence[Document]) -> None:
        """Add documents to a new index that no other task uses yet."""

    async def add(self, documents: Sequence[Document]) -> None:
        """Add documents, or replace those with the same keys."""

    def drop(self, key: str) -> None: ...


I = TypeVar("I", bound=DocumentIndex)  # noqa: E741 - an index


class TrackedIndex(Generic[I]):
    """An index in memory of all documents of a table. It is loaded once, then updated from the change log."""

    def __init__(self, table: Collection, log: ChangeLog, new: Callable[[], I]) -> None:
        self._table, self._log, self._new = table, log, new
        self.index: I | None = None
        self._cursor: LogCursor | None = None

    async def current(self) -> I:
        """Return the index with all changes that were committed before this call."""
        index = self.index
        changes = None if index is None else await self._log.since(self._cursor)
        if index is None or changes is None:
            cursor, index = await self._log.last(), self._new()
            async for page in self._table.pages(size=PART):
                await index.load(page)
            self.index, self._cursor = index, cursor
            return index
        keys, cursor = changes
        await self.read(index, keys)
        if index is self.index:
            self._cursor = cursor
        return index

    async def read(self, index: I, keys: set[str]) -> None:
        """Read documents again, and update the index."""
        found = await self._table.many(sorted(keys))
        for key in keys - {each.key for each in found}:
            index.drop(key)
        await index.add(found)
