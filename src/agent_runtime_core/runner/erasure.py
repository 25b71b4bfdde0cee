"""Erase what tenants, conversations and runs have stored, with the child runs and forks of these runs.

What is found by a run is erased before the row of that run, and a child run or fork before the run that it comes from.
So an interrupted call can be repeated: it finds the rest.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID, uuid5

from .._core.arguments import checked_tenant
from .._core.ids import conversation_id, conversation_name, stored_id
from .._core.validation import Shown, must
from .._engines.base import Committer, Op
from .._engines.payloads import why_unreadable
from .._execution.effects import FORKED_FROM, stored_origin
from .._journal.record import Record
from ..errors import MOST_NAMED, IllegalTransition, InvalidArgument, StorageBusy, UnknownRun
from ..events.base import REWRITE
from ..events.event import TOPICS, StoredEvent, sequence_after, topic_log
from ..persistence.document_stores.base import CONVERSATION, MEMORY, MESSAGE, PREFERENCE, TASK, TASK_LIST, ChangeLog
from ..persistence.document_stores.conversations import read_back
from ..persistence.documents.base import Collection, Document, DocumentStore, UndecodedCollection
from ..persistence.manager import PersistenceManager
from ..persistence.models import AuditEntry, AuditEventType, Conversation, ConversationMessage
from ..queue.records import LIVE, RowChanged, RunFilter, RunRow, unreadable
from ..state.base import CHILD, ERASED, MEMBER, EffectRow, erased_effect
from .backends import Backends
from .retention import forget
from .search_index import SearchIndex

#: In place of the text of a message whose run was erased, in a conversation that stays.
BLANK: Final = "(erased)"
_PAGE: Final = 200  # runs, events or documents in one read
_ROUNDS: Final = 5  # looks for runs that were submitted while others were erased
_PART: Final = 100  # documents in one commit
_UUID: Final = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OF_TENANT: Final = re.compile("tenant:([0-9]+):")
_EMBEDDING: Final = "embedding"
#: Kinds of documents whose text names no run and no conversation, or names them where nobody can tell.
_UNLINKED: Final = (MEMORY, PREFERENCE, "fact")
#: Fields that name a run, a conversation, or the document that a document was made of.
_LINKS: Final = ("run_id", "conversation_id", "conversation_ids", "source_id", "parent_conversation_id")
#: In this order, so that documents which the others belong to come first.
_FIRST: Final = (CONVERSATION, TASK_LIST, MESSAGE, "summary")


@dataclass
class Erasure:
    """What `runner.erase` erased, or would erase.

    Attributes:
        dry_run: Nothing was erased.
        runs: How many runs, with child runs and forks.
        live: How many of these runs had not finished.
        records: How many records of their journals.
        events: How many of their events.
        messages: How many messages of their mailboxes.
        effects: How many results of guarded steps and approvals. Their digests stay, so that no run repeats them.
        topic_events: How many events of turns in the topics.
        blanked: How many messages of theirs in conversations that stay. Their texts were replaced.
        documents: How many documents, by kind.
        unknown: The runs that were named and are not stored.
        left: Why something is still stored, by its place.
        audited: Whether the audit store contains a record of it.
    """

    dry_run: bool = False
    runs: int = 0
    live: int = 0
    records: int = 0
    events: int = 0
    messages: int = 0
    effects: int = 0
    topic_events: int = 0
    blanked: int = 0
    documents: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    audited: bool = False

    def counts(self) -> dict[str, Any]:
        """Return the numbers, without contents and names."""
        return {name: value for name, value in vars(self).items() if type(value) in (int, dict) and name != "left"}


@dataclass
class StoreParts:
    """The parts of the store of a runner.

    Attributes:
        backends: The queue, the events and the state.
        stores: The document stores of the runner; none if it uses the stores of the process.
        manager: The manager of these stores.
        fenced: Further stores, which know the claims of runs.
        end: Cancels the run in a row, and waits until it ends, or deletes the schedule in the row.
    """

    backends: Backends
    stores: Sequence[DocumentStore]
    manager: PersistenceManager | None
    fenced: Sequence[Committer]
    end: Callable[[RunRow], Awaitable[object]]


async def erase(
    place: StoreParts, tenant: str | None, conversation: UUID | str | None, run_ids: UUID | str | Sequence[UUID | str],
    cancel: bool, dry_run: bool, compact: bool | None,
) -> Erasure:  # fmt: skip
    """Erase a tenant, or a conversation and runs. See `AgentRunner.erase`."""
    run_ids = [run_ids] if isinstance(run_ids, UUID | str) else [*run_ids]
    if conversation is not None and conversation_id(conversation) is None:
        raise must("conversation", "be the name or the id of a conversation", conversation)
    if tenant is None and conversation is None and not run_ids:
        fix = "Pass tenant= (--tenant), conversation= (--conversation) or run_ids= (--run)"
        raise must("erase", "be given a target", Shown("none"), fix)
    work = _Erasing(place, checked_tenant(tenant), tenant, conversation, run_ids, dry_run)
    if dry_run:
        await work.erase(await work.find())
        return work.done
    tree = await work.find()
    await work.end(tree, cancel=cancel)
    await work.audit("erasure started")
    async with work.overwriting():
        await work.erase(tree)
        for _ in range(_ROUNDS):
            if not (tree := await work.find()):  # else they were submitted since
                break
            await work.end(tree, cancel=cancel)
            await work.erase(tree)
        else:
            work.name_left(await work.find())
        await work.forget()
    await work.compact(compact)
    await work.audit("erasure finished", work.done.counts())
    return work.done


class _Erasing:
    def __init__(
        self, place: StoreParts, owner: str, tenant: str | None, conversation: UUID | str | None,
        run_ids: Sequence[UUID | str], dry_run: bool,
    ) -> None:  # fmt: skip
        self._place, self._owner, self._tenant = place, owner, tenant
        self._queue, self._bus, self._state = place.backends
        self._conversation, self._run_ids, self._dry_run = conversation, run_ids, dry_run
        #: Whether all of the tenant is erased, and not only what of it is named.
        self._whole: bool = conversation is None and not run_ids
        self._lineages: set[str] = set()  # whose effects are erased
        self._named: dict[str, str] = {}  # the ids of the runs that are named, by their names
        self._conversations: set[str] = set()
        self._ids: defaultdict[str, set[str]] = defaultdict(set)  # of runs and conversations, by tenant
        self.done = Erasure(dry_run)

    # -- runs

    async def find(self) -> list[RunRow]:
        """Return the runs to erase, each before its child runs and forks."""
        found = {row.run_id: row for row in await self._roots()}
        rows = [*found.values()]
        for row in rows:
            self._ids[row.tenant].add(row.run_id)
            for each in (*await self._queue.children(row.run_id), *await self._forks(row)):
                if each.tenant != row.tenant:
                    self._leave(each, f"belongs to another tenant, and has contents of run {_name(row)!r}")
                elif each.run_id not in found:
                    found[each.run_id] = each
                    rows.append(each)
        for row in rows:
            if row.parent_id not in (None, *found) and (parent := await self._queue.row(row.parent_id or "")):
                self._leave(parent, f"has the result of its child run {_name(row)!r}")
        return rows

    def name_left(self, rows: Iterable[RunRow]) -> None:
        """Name runs that are still stored."""
        for row in rows:
            self._leave(row, "was not erased, because it is submitted again each time, or its row is damaged")

    def _leave(self, row: RunRow, why: str) -> None:
        self.done.left[f"run {_name(row)!r}"] = why

    async def _roots(self) -> list[RunRow]:
        found = list[RunRow]()
        if self._whole:
            return await self._rows(RunFilter(tenant=self._owner))
        for name in self._run_ids:
            try:
                found.append(await self._queue.require(name, self._tenant))
            except UnknownRun:
                if str(name) not in self._named:
                    self.done.unknown.append(str(name))
                # An interrupted call may have left something that names it.
                self._ids[self._owner].add(self._named.setdefault(str(name), stored_id(name, self._owner)))
            else:
                self._named[str(name)] = found[-1].run_id
        if self._conversation is not None:
            found += await self._runs_of_conversation(self._conversation)
        return found

    async def _rows(self, wanted: RunFilter) -> list[RunRow]:
        found = list[RunRow]()
        wanted = wanted._replace(light=True, limit=_PAGE)
        while rows := await self._queue.find(wanted):
            found += rows
            wanted = wanted._replace(after=rows[-1].arrival)
        return found

    async def _runs_of_conversation(self, named: UUID | str) -> list[RunRow]:
        """Return the runs that name the conversation or a fork of it."""
        uuid, headers = str(conversation_id(named)), await self._headers(self._owner)
        ids = _with_forks(headers, {uuid})
        names = {**dict.fromkeys(ids), uuid: conversation_name(named)}
        names |= {str(each.id): each.name for each in headers if str(each.id) in ids and each.name}
        self._conversations |= ids
        self._ids[self._owner] |= ids
        if None in names.values():  # a run may name it in a way that is not stored with it
            rows = await self._rows(RunFilter(tenant=self._owner))
            return [row for row in rows if str(conversation_id(row.conversation)) in ids]
        wanted = (RunFilter(tenant=self._owner, conversation=each) for each in {*names.values(), *ids})
        return [row for each in wanted for row in await self._rows(each)]

    async def _forks(self, row: RunRow) -> list[RunRow]:
        """Return the forks of a run, which are members of its lineage."""
        origin = await stored_origin(self._state, row.run_id)
        found = list[RunRow]()
        for member in {each.run_id for each in await self._state.effects(origin, "", "")} - {row.run_id}:
            if (fork := await self._queue.row(member)) is None:
                continue
            if why_unreadable("metadata", fork.metadata) is not None:
                if origin == row.run_id:
                    found.append(fork)
                else:
                    self._leave(fork, f"may be a fork of run {_name(row)!r}: its key is missing here")
            elif (json.loads(fork.metadata).get(FORKED_FROM) or {}).get("run_id") == row.run_id:
                found.append(fork)
        return found

    async def end(self, rows: Sequence[RunRow], *, cancel: bool) -> None:
        """Cancel live runs, and wait until they have ended.

        Raises:
            IllegalTransition: A run is live, and `cancel` is not set. Nothing was changed.
            UnknownEncryptionKey: This process cannot read a run, so it cannot find what belongs to it.
        """
        for row in rows:
            now = await self._queue.row(row.run_id)
            if now is not None and (error := unreadable(now)) is not None:
                raise error
        live = [row for row in rows if row.status in LIVE]
        self.done.live += len(live)
        if live and not cancel:
            names = ", ".join(repr(_name(row)) for row in live[:MOST_NAMED]) + ", …" * (len(live) > MOST_NAMED)
            what = "run has" if len(live) == 1 else "runs have"
            raise IllegalTransition(
                f"{len(live)} {what} not finished and cannot be erased: {names}. Wait, or cancel them with cancel=True "
                "(--cancel)"
            )
        for row in live:
            with contextlib.suppress(UnknownRun):
                await self._place.end(row)

    async def erase(self, rows: Sequence[RunRow]) -> None:
        """Erase these runs, and what names them."""
        done = self.done
        if self._dry_run:
            done.live = sum(row.status in LIVE for row in rows)
        self._lineages.clear()
        await self._blank_messages(rows)
        for documents in self._places():
            await self._erase_documents(documents)
        await self._erase_topics()
        for row in reversed(rows):
            await self._erase_run(row)

    async def _erase_run(self, row: RunRow) -> None:
        done, run_id = self.done, row.run_id
        now = await self._queue.row(run_id)
        if now is None:
            return
        records, messages = len(await self._state.read("records", run_id, -1)), len(await self._queue.mail(run_id))
        events = await self._count_events(run_id)
        await self._erase_effects(run_id)
        if not self._dry_run:
            try:
                await forget(self._place.backends, now, self._place.fenced)
            except RowChanged:  # it was resumed since: the next look finds it
                return
        done.runs, done.records, done.messages = done.runs + 1, done.records + records, done.messages + messages
        done.events += events

    async def _count_events(self, run_id: str) -> int:
        found, since = 0, 0
        while page := await self._bus.stored_rows(run_id, since, _PAGE):
            found += sum(each.nev if isinstance(each, Record) else 1 for each in page)
            if not page.more:
                break
            since = sequence_after(page[-1])
        return found

    async def _erase_effects(self, run_id: str) -> None:
        """Delete the results in the ledger of effects, and keep their digests for good."""
        state = self._state
        if not state.rewrites:
            self.done.left["effects"] = f"{type(state).__name__} has no operations to replace contents"
            return
        origins = [run_id, await stored_origin(state, run_id)]
        for origin in origins:
            if origin in self._lineages:
                continue
            self._lineages.add(origin)
            rows = [row async for row in self._lineage(origin)]
            origins += [row.run_id for row in rows if row.status == CHILD]
            gone = await self._gone(rows)
            effects = [row for row in rows if row.status not in (MEMBER, CHILD) and row.run_id in gone]
            ops = [Op("effect.rewrite", (row, new)) for row in effects if (new := erased_effect(row)) != row]
            self.done.effects += len(ops)
            if ops and not self._dry_run:
                ops.append(Op("effect.put", (EffectRow(origin, "", "", ERASED, MEMBER),)))
                await state.commits.commit(None, ops)

    async def _lineage(self, origin: str) -> AsyncIterator[EffectRow]:
        for key, digest in await self._state.read("effect_keys", origin):
            for row in await self._state.read("effects", origin, key, (digest,)):
                if (row.key, row.digest) == (key, digest):
                    yield row

    async def _gone(self, rows: Sequence[EffectRow]) -> set[str]:
        """Return the runs of a lineage that are erased; without another member also those that were deleted before."""
        erased = set[str]().union(*self._ids.values())
        other = {row.run_id for row in rows} - erased
        deleted = {each for each in other if await self._queue.row(each) is None}
        members = {row.run_id for row in rows if row.status == MEMBER}
        return erased if members - erased - deleted else erased | deleted

    # -- topics

    async def _erase_topics(self) -> None:
        """Empty the events of turns. They keep their numbers and ids, so that no resumed turn publishes them again."""
        bus = self._bus
        for topic in TOPICS:
            log, since = str(topic_log(topic)), 0
            while page := await bus.stored_rows(log, since, _PAGE):
                changes = [
                    (each, each._replace(payload="{}"))
                    for each in page
                    if isinstance(each, StoredEvent) and each.payload != "{}" and self._is_erased(log, each)
                ]
                if changes and not bus.rewrites:
                    self.done.left["topics"] = f"{type(bus).__name__} has no operations to replace contents"
                    return
                self.done.topic_events += len(changes)
                if changes and not self._dry_run:
                    await bus.commits.commit(None, [Op(REWRITE, (log, tuple(changes)))])
                if not page.more:
                    break
                since = sequence_after(page[-1])

    def _is_erased(self, log: str, event: StoredEvent) -> bool:
        payloads = self._bus.payloads
        text = event.payload if payloads is None else payloads.decode("event of run", log, event.payload)
        envelope = json.loads(text)
        tenant, turn = envelope.get("tenant") or "", envelope.get("turn_id")
        if self._whole:
            return bool(tenant == self._owner)
        with contextlib.suppress(InvalidArgument):
            return turn is not None and stored_id(turn, tenant) in self._ids.get(tenant, ())
        return False

    # -- documents

    def _places(self) -> Iterable[DocumentStore]:
        """Return the document stores. The six stores of a manager may each have an object for the same place."""
        return {getattr(each, "root", None) or id(each.commits): each for each in self._place.stores}.values()

    async def _headers(self, tenant: str) -> list[Conversation]:
        """Return the conversations of a tenant, of all scopes, without their messages."""
        found = list[Conversation]()
        for documents in self._places():
            for space, kind in await documents.read("kinds"):
                if kind == CONVERSATION and _owner_of(space) == tenant:
                    async for page in Collection(documents, space, kind).pages(size=_PAGE):
                        found += [read_back(each, []) for each in page]
        return found

    async def _erase_documents(self, documents: DocumentStore) -> None:
        kinds, spaces, linked = await documents.read("kinds"), dict[str, None](), list[tuple[Collection, list[str]]]()
        first = [each for kind in _FIRST for each in kinds if each[1] == kind]
        for space, kind in (*first, *(each for each in kinds if each not in first)):
            owner = _owner_of(space)
            if space is None or kind is None:
                self.done.left["documents"] = "an earlier release has not stored the long name of a space"
            elif self._whole and owner == self._owner:
                spaces[space] = None
                async for page in UndecodedCollection(documents, space, kind).pages(size=_PAGE):
                    self._count(kind, len(page))
            elif owner is not None and owner in self._ids:
                table = Collection(documents, space, kind)
                if keys := await self._linked(table, self._ids[owner]):
                    linked.append((table, keys))
        discard = getattr(documents, "discard_index", _nothing)
        if self._dry_run or not (spaces or linked):
            return
        await discard()
        for space in spaces:
            await documents.drop(space)
        for table, keys in reversed(linked):  # what others are found by is deleted last
            await _delete(table, keys)
        await discard()  # a search may have made it again

    def _count(self, kind: str, number: int) -> None:
        if number and not kind.endswith("_change"):  # the log of changes
            self.done.documents[kind] = self.done.documents.get(kind, 0) + number

    async def _linked(self, table: Collection, ids: set[str]) -> list[str]:
        """Return the keys of documents that name a run, a conversation or such a document, and add them to `ids`."""
        keys = list[str]()
        if table.kind == MESSAGE:
            stored = UndecodedCollection(table.documents, table.space, table.kind)
            for conversation in sorted(self._conversations & ids):
                keys += [each.key for each in await stored.find(conversation)]
        else:
            async for page in table.pages(size=_PAGE):
                keys += [each.key for each in page if _is_linked(table.kind, each, ids)]
        self._count(table.kind, len(keys))
        ids.update(found for key in keys for found in _UUID.findall(key))
        return keys

    async def _blank_messages(self, rows: Sequence[RunRow]) -> None:
        """Replace the texts that erased runs have appended to conversations which stay.

        The messages are not deleted: later runs of the conversation begin at these messages.
        """
        manager, runs = self._place.manager, defaultdict[tuple[str, str], set[str]](set)
        for row in rows:
            named = conversation_id(row.conversation)
            if named is not None and not self._whole and str(named) not in self._conversations:
                runs[row.tenant, str(named)].add(row.run_id)
        if manager is None:
            return
        for (tenant, uuid), of_runs in runs.items():
            store = manager.for_tenant(tenant or None).conversations
            for each in sorted(_with_forks(await self._headers(tenant), {uuid})):
                conversation = await store.get(UUID(each))
                blanked = 0 if conversation is None else _blank(conversation.messages, of_runs)
                self.done.blanked += blanked
                if conversation is not None and blanked and not self._dry_run:
                    await store.save(conversation)

    # -- the file, and the audit store

    async def forget(self) -> None:
        """Remove what the full-text index still contains of deleted runs."""
        await SearchIndex(self._queue, self._state).forget()

    @contextlib.asynccontextmanager
    async def overwriting(self) -> AsyncIterator[None]:
        """Have SQLite overwrite what is deleted in the block."""
        modes = list[tuple[Any, str]]()
        try:
            for engine in self._engines():
                if (choose := getattr(engine, "set_secure_delete", None)) is not None:
                    modes.append((choose, await choose("ON")))
            yield
        finally:
            for choose, mode in modes:
                await choose(mode)

    def _engines(self) -> list[Any]:
        backends = (*self._place.backends, *self._place.stores)
        return [*{getattr(each.commits, "location", id(each.commits)): each.commits for each in backends}.values()]

    async def compact(self, compact: bool | None) -> None:
        """Remove what the free pages and the log of a SQLite file still hold."""
        for engine in self._engines():
            if (empty := getattr(engine, "empty_log", None)) is None:
                continue
            try:
                if compact is False or not await engine.compact(always=compact is True):
                    why = "was not compacted, so free pages may have texts that were changed or deleted before"
                    self.done.left[engine.location] = (
                        f"{why}. Stop the workers, and erase with compact=True (--compact)"
                    )
                if not await empty():
                    why = (
                        "has a log that a reader still needs, and that may have erased texts. Close it, and erase again"
                    )
                    self.done.left[engine.location] = why
            except StorageBusy as error:
                self.done.left[engine.location] = str(error)

    async def audit(self, action: str, counts: dict[str, Any] | None = None) -> None:
        """Store which erasure it is in the audit store, without contents."""
        manager = self._place.manager
        store = manager.audit if manager is not None and manager.has_audit() else None
        if store is None:
            return
        of: dict[str, str] = {} if self._tenant is None or self._whole else {"tenant": self._tenant}
        targets = [{"kind": "tenant", "id": self._owner}] if self._whole else []
        targets += [{"kind": "run", "id": each} | of for each in self._named.values()]
        if self._conversation is not None:
            targets.append({"kind": "conversation", "id": str(conversation_id(self._conversation))} | of)
        details = {"erased": targets} | ({} if counts is None else {"counts": counts})
        await store.log_event(
            AuditEntry(event_type=AuditEventType.CUSTOM, action=action, actor_type="operator", details=details)
        )
        self.done.audited = True


def _name(row: RunRow) -> str:
    return row.run_key or row.run_id


async def _nothing() -> None:
    """Do nothing, for a document store without an index."""


async def _delete(table: Collection, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), _PART):
        part = keys[start : start + _PART]
        # Other processes have an index of these documents in memory, and follow the log of changes.
        changes = ChangeLog(table).note(part) if table.kind in (TASK, _EMBEDDING) else []
        await table.documents.commits.commit(None, [*map(table.delete, part), *changes])


def _owner_of(space: str | None) -> str | None:
    """Return the tenant whose documents a space contains, "" for none. None if the documents do not belong to runs."""
    if space is None or space.partition(":")[0] == "langgraph":
        return None
    found = _OF_TENANT.match(space)
    return "" if found is None else space[found.end() : found.end() + int(found[1])]


def _with_forks(headers: Sequence[Conversation], ids: set[str]) -> set[str]:
    """Return the ids of conversations and of their forks, which contain copies of their messages."""
    while more := {str(each.id) for each in headers if str(each.parent_conversation_id) in ids} - ids:
        ids = ids | more
    return ids


def _is_linked(kind: str, document: Document, ids: set[str]) -> bool:
    if not ids.isdisjoint(_UUID.findall(f"{document.key} {document.group}")):
        return True
    if kind in _UNLINKED or not document.text.startswith("{"):
        return False
    fields = json.loads(document.text)
    return not ids.isdisjoint(_UUID.findall(json.dumps([fields.get(name) for name in _LINKS])))


def _blank(messages: Iterable[ConversationMessage], run_ids: set[str]) -> int:
    """Replace the texts of messages that these runs have appended; return how many there are."""
    messages, blanked = [*messages], 0
    # A message of an earlier release does not name its run, but its id is made of it.
    own = {
        uuid5(UUID(run), f"{kind}:{n}") for run in run_ids for kind in ("message", "sent") for n in range(len(messages))
    }
    for message in messages:
        is_own = message.id in own or (message.run_id is not None and str(message.run_id) in run_ids)
        if is_own and message.content != BLANK:
            message.content, message.metadata, message.usage = BLANK, {}, {}
            message.tool_calls = [replace(call, arguments={}) for call in message.tool_calls]
            blanked += 1
    return blanked
