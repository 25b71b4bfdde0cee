"""Encode all stored contents again, with the current key of the payload codec.

Each write replaces a stored text only if it is still the text that was read, so that no other write is lost. Texts that
the current key encrypted are left, so that an interrupted call can be repeated.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, Final, NamedTuple

from .._core.arguments import checked_int
from .._core.payload_codec import key_id_of
from .._core.validation import must
from .._engines.base import Backend, Op
from .._engines.payloads import Payloads
from .._journal.record import TOGETHER, Record, decode_record, encode_record
from ..errors import StorageCorrupt, UnknownEncryptionKey
from ..events.event import EventRows, StoredEvent, sequence_after
from ..persistence.documents.base import Collection, DocumentStore, UndecodedCollection
from ..persistence.manager import open_document_store
from ..queue.records import MailboxMessage, RunFilter, RunRow, contents_of
from ..state.base import CALLED, CHILD, MEMBER, EffectRow
from .backends import Backends
from .runner import AgentRunner
from .search_index import SearchIndex

BATCH: Final = 500
_PAGE: Final = 100  # runs, events or documents in one read
_AT_ONCE: Final = 16  # runs; their reads and commits share round trips
_MOST_BYTES: Final = 1 << 20  # of new texts in one commit
_TRIES: Final = 5  # for texts that other writers change at the same time
_FILES: Final = "files:///"
_UNREADABLE: Final = (UnknownEncryptionKey, StorageCorrupt)
_NO_OPERATIONS: Final = "{} has no operations to replace contents"


@dataclass
class Reencryption:
    """What `reencrypt` did.

    Attributes:
        current: The id of the key that encrypts, None for a codec whose texts do not name their key.
        digest_key_id: The id of the key that digests need too, even if it encrypted no text.
        texts: How many texts were encoded again.
        runs: How many runs were looked at.
        keys: How many stored texts are now encrypted with each key, by key id. All keys of the codec are listed.
        plain: How many stored texts are not encrypted.
        skipped: The ids of the runs that a worker owned. Their texts were counted, and left as they are.
        not_supported: Why a component could not be encoded again, by its name. Its texts were not counted.
        unreadable: Why a text could not be decoded, by its place. It was left as it is.
    """

    current: str | None = None
    digest_key_id: str | None = None
    texts: int = 0
    runs: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    plain: int = 0
    skipped: list[str] = field(default_factory=list)
    not_supported: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


class Change(NamedTuple):
    """Something that is stored, before and after; with its texts before and after."""

    old: Any
    new: Any
    texts: Sequence[tuple[str | None, str | None]]


Find = Callable[[], Awaitable[list[Change]]]
Commit = Callable[[Sequence[Change]], Awaitable[Sequence[bool]]]


async def reencrypt(
    store: AgentRunner | str | os.PathLike[str], *, batch: int = BATCH, compact: bool = False
) -> Reencryption:
    """Encode all contents of a store again, with the current key of the configured `payload_codec`.

    It may be interrupted at any time, and called again. Texts that are not encrypted are encrypted.

    Args:
        store: The path or URL of a store, `files:///path` for a directory of documents, or a runner.
        batch: How many texts are in one commit, at most.
        compact: Whether to write SQLite files again afterwards, so that their free pages do not hold the old texts
            any more. No process can write to the file during that time.

    Returns:
        What was encoded, and what is left.

    Raises:
        InvalidArgument: No `payload_codec` is set.
        NotSupported: The store was opened read-only.
    """
    batch = checked_int("batch", batch)
    if isinstance(store, AgentRunner):
        store.backends.require_writable()
        stores = store.document_stores()
        result = await _reencrypt(store.backends, stores, batch)
        if compact:
            await _compact([*store.backends, *stores])
        return result
    if not (url := os.fspath(store)).startswith(_FILES):
        async with AgentRunner.open(url) as runner:
            return await reencrypt(runner, batch=batch, compact=compact)
    documents = open_document_store(url)
    try:
        return await _reencrypt(None, [documents], batch)
    finally:
        await documents.close()


async def _compact(backends: Sequence[Backend]) -> None:
    for commits in {id(each.commits): each.commits for each in backends}.values():
        if (compacts := getattr(commits, "compact", None)) is not None:
            await compacts(always=True)


async def _reencrypt(backends: Backends | None, stores: Sequence[DocumentStore], batch: int) -> Reencryption:
    every: list[Backend] = [*(backends or ()), *stores]
    payloads = [each.payloads for each in every if each.payloads is not None]
    if len(payloads) < len(every):
        fix = "Set AGENT_RUNTIME_PAYLOAD_CODEC to module:name, or call configure(payload_codec=…) first"
        raise must("payload_codec", "be a payload codec", None, fix)
    work = _Work(payloads[0], batch)
    if backends is not None:
        await SearchIndex(backends.queue, backends.state).drop()  # it has the contents as they were
        await _Runs(work, backends).reencrypt()
    # Each of the six stores of a manager may use a separate document store for the same place.
    places = {getattr(each, "root", None) or id(each.commits): each for each in stores}
    for documents in places.values():
        await _Documents(work, documents).reencrypt()
    return work.result


class _Work:
    """Encodes texts again, commits them in batches, and counts them."""

    def __init__(self, payloads: Payloads, batch: int) -> None:
        self.payloads = payloads
        self.batch = batch
        self.page: int = min(batch, _PAGE)
        #: Without it, all texts are encoded again.
        self._current = key_id_of(payloads.encode("text", "", "probe"))
        self.result = Reencryption(self._current, payloads.digest_key_id, keys=dict.fromkeys(payloads.key_ids, 0))

    def is_current(self, text: str | None) -> bool:
        """Return whether the current key encrypted a text, or there is nothing to encrypt."""
        return text is None or text == "{}" or (self._current is not None and key_id_of(text) == self._current)

    def renewed(self, kind: str, owner: str, text: str) -> str:
        """Return the text as the current key encrypts it, or unchanged if it cannot be decoded."""
        if self.is_current(text):
            return text
        try:
            return self.payloads.encode(kind, owner, self.payloads.decode(kind, owner, text))
        except _UNREADABLE as error:
            self.result.unreadable[f"{kind} {owner}"] = str(error)
            return text

    def renewed_optional(self, kind: str, owner: str, text: str | None) -> str | None:
        return None if text is None else self.renewed(kind, owner, text)

    def renewed_payload(self, kind: str, run_id: str, old: MailboxMessage | StoredEvent) -> Change:
        """Return a message or an event of a run, and what replaces it."""
        text = self.renewed(kind, run_id, old.payload)
        return Change(old, old._replace(payload=text), [(old.payload, text)])

    def renewed_record(self, run_id: str, old: Record) -> Change:
        """Return a record and what replaces it."""
        plain = [value for name in TOGETHER if name != "info" and (value := getattr(old, name)) is not None]
        new = old
        if plain or not (self.is_current(old.result) and self.is_current(old.info)):
            try:
                new = encode_record(self.payloads, run_id, decode_record(self.payloads, run_id, old))
            except _UNREADABLE as error:
                self.result.unreadable[f"record {old.seq} of run {run_id}"] = str(error)
        together = [(value, value if new is old else None) for value in plain]
        return Change(old, new, [(old.result, new.result), (old.info, new.info), *together])

    async def apply(self, find: Find, commit: Commit | None) -> bool:
        """Commit what `find` returns, and return whether nothing is left. Without `commit`, only count it."""
        for left in reversed(range(_TRIES)):
            changes = await find()
            written = set[int]() if commit is None else await self._written(changes, commit)
            rejected = [at for at, each in enumerate(changes) if each.old != each.new and at not in written]
            if commit is None or not rejected or not left:
                break
        for at, each in enumerate(changes):
            self._count(new if at in written else old for old, new in each.texts)
        return not rejected

    async def _written(self, changes: Sequence[Change], commit: Commit) -> set[int]:
        """Commit changes, and return the positions of those that were applied."""
        written = set[int]()
        for places in self._parts(changes):
            done = await commit([changes[at] for at in places])
            for at in compress(places, done):
                written.add(at)
                self.result.texts += sum(old != new for old, new in changes[at].texts)
        return written

    def _parts(self, changes: Sequence[Change]) -> Iterator[list[int]]:
        """Yield the positions of changes, as many as one commit may have."""
        part, size = list[int](), 0
        for at, each in enumerate(changes):
            if each.old == each.new:
                continue
            length = sum(len(new or "") for _, new in each.texts)
            if part and (len(part) == self.batch or size + length > _MOST_BYTES):
                yield part
                part, size = [], 0
            part.append(at)
            size += length
        if part:
            yield part

    def _count(self, texts: Iterable[str | None]) -> None:
        """Count stored texts by their keys."""
        ids = Counter(key_id_of(text) for text in texts if text is not None and text != "{}")
        plain, keys = ids.pop(None, 0), self.result.keys
        self.result.plain += plain if self._current is not None else 0
        for key_id, times in ids.items():
            keys[str(key_id)] = keys.get(str(key_id), 0) + times


class _Runs:
    """Encodes the contents of runs again: their rows, messages, journals, checkpoints, effects and events."""

    def __init__(self, work: _Work, backends: Backends) -> None:
        self._work = work
        self._queue, self._bus, self._state = backends
        self._lineages = set[str]()  # whose rows of deleted runs were read
        for what, backend in zip(("queue", "events", "state"), backends, strict=True):
            if not backend.rewrites:
                work.result.not_supported[what] = _NO_OPERATIONS.format(type(backend).__name__)

    async def reencrypt(self) -> None:
        """Encode the contents of all runs, in order of arrival."""
        wanted, result = RunFilter(limit=self._work.page), self._work.result
        while rows := await self._queue.read("find", wanted):
            for start in range(0, len(rows), _AT_ONCE):
                part = rows[start : start + _AT_ONCE]
                done = await self._reencrypt_together(part)
                result.skipped += [
                    row.run_key or row.run_id for row, is_done in zip(part, done, strict=True) if not is_done
                ]
            result.runs += len(rows)
            wanted = wanted._replace(after=rows[-1].arrival)

    async def _reencrypt_together(self, rows: Sequence[RunRow]) -> list[bool]:
        running = [asyncio.create_task(self._reencrypt_run(row)) for row in rows]
        try:
            return await asyncio.gather(*running)
        finally:  # after an error, the others must have ended before the caller closes the store
            for each in running:
                each.cancel()
            await asyncio.wait(running)

    async def _reencrypt_run(self, row: RunRow) -> bool:
        """Encode the contents of a run, and return whether that is done: no worker owned it."""
        run_id, writes, origins = row.run_id, not await self._is_owned(row), list[str]()
        parts: list[tuple[Find, Commit]] = []
        if self._queue.rewrites:
            parts += [
                (partial(self._row, run_id), partial(self._commit_row, run_id)),
                (partial(self._messages, run_id), _pairs(self._queue, "queue.rewrite_mail", run_id)),
            ]
        if self._state.rewrites:
            parts += [
                (partial(self._records, run_id), _pairs(self._state, "journal.rewrite", run_id)),
                (partial(self._checkpoint, run_id), _each(self._state, "state.rewrite", run_id)),
            ]
            origins = await self._origins(run_id)
            parts += [
                (partial(self._effects, origin, run_id), _each(self._state, "effect.rewrite")) for origin in origins
            ]
        done = writes
        for find, commit in parts:
            # A worker that claimed the run since does not matter: no text is replaced that it wrote.
            done &= await self._work.apply(find, commit if writes else None)
        self._lineages.update(origins)
        return await self._reencrypt_events(run_id, writes) and done

    async def _is_owned(self, row: RunRow) -> bool:
        """Return whether a worker holds the run under a live lease."""
        if row.status != "running":
            return False
        lease_now = self._queue.expiry_now()
        if not self._queue.rewrites:
            return row.lease_until >= lease_now
        same = contents_of(row)
        op = Op("queue.rewrite", (row.run_id, same, same, lease_now))
        return bool((await self._queue.commits.commit(None, [op]))[0] == "owned")

    async def _row(self, run_id: str) -> list[Change]:
        row: RunRow | None = await self._queue.read("row", run_id)
        if row is None:
            return []
        renewed = partial(self._work.renewed_optional, owner=run_id)
        old = contents_of(row)
        new = (
            renewed("input of run", text=row.input),
            self._work.payloads.keyed_digest(row.digest),
            *(renewed(f"{name} of run", text=getattr(row, name)) for name in ("metadata", "output", "error")),
        )
        return [Change(old, new, [(old[at], new[at]) for at in (0, 2, 3, 4)])]  # without the digest

    async def _commit_row(self, run_id: str, changes: Sequence[Change]) -> Sequence[bool]:
        lease_now = self._queue.expiry_now()
        ops = [Op("queue.rewrite", (run_id, each.old, each.new, lease_now)) for each in changes]
        return [outcome == "rewritten" for outcome in await self._queue.commits.commit(None, ops)]

    async def _messages(self, run_id: str) -> list[Change]:
        found: list[MailboxMessage] = await self._queue.read("mail", run_id, 0)
        return [self._work.renewed_payload("message of run", run_id, old) for old in found]

    async def _records(self, run_id: str) -> list[Change]:
        found: list[Record] = await self._state.read("records", run_id, -1)
        return [self._work.renewed_record(run_id, record) for record in found]

    async def _checkpoint(self, run_id: str) -> list[Change]:
        old: str | None = (await self._state.read("state", run_id)).checkpoint
        new = self._work.renewed_optional("checkpoint of run", run_id, old)
        return [Change((old,), (new,), [(old, new)])]

    async def _origins(self, run_id: str) -> list[str]:
        """Return the run, and the first runs of its lineage and of lineages of deleted runs that are kept for it."""
        found = [run_id]
        found += [row.result for row in await self._state.read("effects", run_id, "", ("",)) if row.result is not None]
        for origin in found:
            rows: list[EffectRow] = await self._state.read("effects", origin, "", (CHILD,))
            found += [row.run_id for row in rows if row.run_id not in self._lineages]
        return [*dict.fromkeys(found)]

    async def _effects(self, origin: str, run_id: str) -> list[Change]:
        """Return the rows of a run in a lineage. For the first run of a lineage this includes rows of deleted runs."""
        found: list[EffectRow] = []
        for key, digest in await self._state.read("effect_keys", origin):
            found += [row for row in await self._state.read("effects", origin, key, (digest,)) if row.digest == digest]
        mine = [row for row in found if row.run_id == run_id]
        if origin not in self._lineages:
            others = [row for row in found if row.run_id != run_id]
            runs = {row.run_id for row in others if row.status != CALLED}
            gone = {each for each in runs if await self._queue.read("row", each) is None}
            mine += [row for row in others if row.status == CALLED or row.run_id in gone]
        return [self._renewed_effect(row) for row in mine]

    def _renewed_effect(self, old: EffectRow) -> Change:
        if old.status in (MEMBER, CHILD):
            return Change((old,), (old,), [])
        text = self._work.renewed_optional("effect of run", old.run_id, old.result)
        new = old._replace(digest=self._work.payloads.keyed_digest(old.digest), result=text)
        return Change((old,), (new,), [(old.result, text)])

    async def _reencrypt_events(self, run_id: str, writes: bool) -> bool:
        if not self._bus.rewrites:
            return True
        done, since, page = True, 0, EventRows([], False, 0)
        commit = _pairs(self._bus, "events.rewrite", run_id) if writes else None

        async def find() -> list[Change]:
            nonlocal page
            page = await self._bus.stored_rows(run_id, since, self._work.page)
            stored = [row for row in page if isinstance(row, StoredEvent)]
            return [self._work.renewed_payload("event of run", run_id, old) for old in stored]

        while True:
            done &= await self._work.apply(find, commit)
            if not page.more:
                return done
            since = sequence_after(page[-1])


def _pairs(backend: Backend, name: str, run_id: str) -> Commit:
    """Return what commits changes with one operation that takes pairs of an old and a new value."""

    async def commit(changes: Sequence[Change]) -> Sequence[bool]:
        op = Op(name, (run_id, tuple((each.old, each.new) for each in changes)))
        done: Sequence[bool] = (await backend.commits.commit(None, [op]))[0]
        return done

    return commit


def _each(backend: Backend, name: str, *before: Any) -> Commit:
    """Return what commits changes with an operation for each. Their old and new values are tuples of arguments."""

    async def commit(changes: Sequence[Change]) -> Sequence[bool]:
        return await backend.commits.commit(None, [Op(name, (*before, *each.old, *each.new)) for each in changes])

    return commit


class _Documents:
    """Encodes the documents of all kinds in all spaces of a store again."""

    def __init__(self, work: _Work, documents: DocumentStore) -> None:
        self._work = work
        self._documents = documents
        place = getattr(documents.commits, "location", "") or getattr(documents, "root", "")
        self._name: str = f"documents in {place}" if place else "documents"

    async def reencrypt(self) -> None:
        """Encode all documents again."""
        result, documents = self._work.result, self._documents
        if not documents.rewrites:
            result.not_supported[self._name] = _NO_OPERATIONS.format(type(documents).__name__)
            return
        for space, kind in await documents.read("kinds"):
            if space is None or kind is None:
                result.not_supported[self._name] = "an earlier release has not stored the long name of a space"
                continue
            try:
                await self._reencrypt_kind(UndecodedCollection(documents, space, kind))
            except StorageCorrupt as error:
                result.unreadable[f"documents {space}/{kind}"] = str(error)

    async def _reencrypt_kind(self, stored: Collection) -> None:
        work, documents, space, kind = self._work, stored.documents, stored.space, stored.kind
        # The words of a document are as secret as its text, unless the codec allows them.
        words = () if work.payloads.searchable else await documents.read("words", space, kind, documents.clock.wall())
        worded, keys = {key for key, _, _ in words}, list[str]()

        async def find() -> list[Change]:
            changes = []
            for old in await stored.many(keys):
                text = work.renewed("document", f"{space}/{kind}/{old.key}", old.text)
                change = Change((old.key, old.text, False), (old.key, text, old.key in worded), [(old.text, text)])
                changes.append(change)
            return changes

        async def commit(changes: Sequence[Change]) -> Sequence[bool]:
            now, keeps_words = documents.clock.wall(), work.payloads.searchable
            ops = [
                Op("documents.rewrite", (space, kind, *each.old[:2], each.new[1], keeps_words, now)) for each in changes
            ]
            return await documents.commits.commit(None, ops)

        async for page in stored.pages(size=work.page):
            keys[:] = [each.key for each in page]
            await work.apply(find, commit)
