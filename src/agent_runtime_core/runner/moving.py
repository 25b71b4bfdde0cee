"""Move a store to another store: copy all that it contains, as it is stored, and let no process write to the old store.

Both stores have a mark during the move, which is a fence of the whole store: a commit is applied only if its guard is
the mark. So the old store does not change while it is read, and no worker claims a run of the new store that is not
complete. At the end the new store loses its mark, and the mark of the old store names the new store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from .._core.ids import new_ulid
from .._core.validation import Shown, must
from .._engines.base import FORGET, INSTALL, MARK, Engine, Guard, Op, about_mark, moved, moving_mark
from ..errors import MOST_NAMED, InvalidArgument, LeaseLost, NotSupported, StorageCorrupt
from ..events.base import COPY
from ..events.event import StoredEvent, sequence_after
from ..persistence.documents.base import Document, DocumentStore, UndecodedCollection
from ..queue.records import RunFilter, RunRow, contents_of
from ..state.base import StateRow
from .processes import processes
from .runner import AgentRunner

_PAGE: Final = 200  # runs, events or documents in one read
_AT_ONCE: Final = 16  # runs; their reads and commits share round trips
_MOST_BYTES: Final = 1 << 20  # of texts in one commit
_MOST_ITEMS: Final = 500  # records, events, messages or documents in one operation

_Item = TypeVar("_Item", bound=tuple[Any, ...])


@dataclass
class Move:
    """What `move_store` did.

    Attributes:
        source: The old store.
        target: The new store.
        counts: How many items of each kind the new store got: runs, records, messages, events, checkpoints, effects
            and documents. Empty if an earlier call finished the move.
        digests: SHA-256 of the items of each kind, which is the same for both stores.
    """

    source: str
    target: str
    counts: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


async def move_store(source: AgentRunner, target: AgentRunner, *, force: bool = False) -> Move:
    """Copy everything in a store to an empty store, and refuse all later writes to the old store.

    If it is interrupted, call it again with the same stores. Contents that a payload codec encoded are copied as they
    are, so no codec is needed. Leases and the rows of processes are not copied.

    Args:
        source: A runner on the old store. It executes no run.
        target: A runner on the new store: an empty store, or what an interrupted call left.
        force: Move the store although workers use it. Their attempts end without a result in either store, and what
            their steps did since the last record is in doubt.

    Raises:
        InvalidArgument: Workers use the old store, or the new store is not empty.
        NotSupported: The components of a store are not on one engine, or are in memory.
        StorageMoved: The old store was moved to another store, or was given up since.
        StorageCorrupt: The new store does not contain what the old store does.
    """
    old, new = _Side.of("source", source), _Side.of("target", target)
    if old.engine is new.engine:
        raise must("target", "be another store than the source", new.name)
    mark = await old.mark()
    if mark is None:
        mark = await _begin(old, new, force)
    about = about_mark(mark)
    if about.get("to") != new.name:
        raise moved(old.name, mark)
    move, token = Move(old.name, new.name), mark.partition(" ")[0][:-1]
    filling = moving_mark(f"{token}1", source=old.name)
    there = await new.mark()
    if not about["done"]:
        old.guard = Guard(MARK, mark)
        if there is None:
            if not force:  # a worker may have claimed a run before the mark
                await _lifted_if_refused(old, _refuse_living(old))
            await _require_empty(new)
            await new.commit(None, [Op(INSTALL, (MARK, filling))])
            new.guard = Guard(MARK, filling)
            await _lifted_if_refused(new, _require_empty(new))
        elif there != filling:
            raise moved(new.name, there)
        new.guard = Guard(MARK, filling)
        await _Copy(old, new, about["at"], about["shift"]).copy(move)
        await old.commit(old.guard, [Op(INSTALL, (MARK, moving_mark(f"{token}2", **{**about, "done": True})))])
        there = filling
    if there == filling:
        await new.commit(Guard(MARK, filling), [Op(FORGET, (MARK,))])
    return move


async def give_up_move(source: AgentRunner) -> None:
    """Let a store accept writes again after a move that was not finished. The new store stays unusable: delete it.

    Raises:
        InvalidArgument: There is no unfinished move of the store.
    """
    old = _Side.of("source", source)
    mark = await old.mark()
    about = {} if mark is None else about_mark(mark)
    if mark is None or about.get("done", True):
        fix = f"To move back, copy {about['to']} to a new store" if "to" in about else ""
        got = f"a finished move to {about['to']}" if "to" in about else "none"
        raise must(f"the move of {old.name}", "be one that was not finished", Shown(got), fix)
    await old.commit(Guard(MARK, mark), [Op(FORGET, (MARK,))])


async def _begin(old: _Side, new: _Side, force: bool) -> str:
    """Mark the old store, and return the mark."""
    if (there := await new.mark()) is not None:
        raise moved(new.name, there)
    await _require_empty(new)
    if not force:
        await _refuse_living(old)
    shift = round(await new.engine.store_wall() - await old.engine.store_wall())
    mark = moving_mark(
        f"{new_ulid(old.queue.clock)}:1", to=new.name, done=False, at=old.queue.clock.wall(), shift=shift
    )
    await old.commit(None, [Op(INSTALL, (MARK, mark))])
    return mark


async def _lifted_if_refused(side: _Side, check: Any) -> None:
    """Await a check that follows the mark of a store. If it refuses the move, the store loses the mark."""
    try:
        await check
    except InvalidArgument:
        await side.commit(side.guard, [Op(FORGET, (MARK,))])
        raise


async def _refuse_living(old: _Side) -> None:
    workers = [
        f"worker {each.worker} (pid {each.pid} on {each.host})" for each in (await processes(old.queue)) if each.living
    ]
    owned = [
        f"run {row.run_key or row.run_id} of worker {row.worker}"
        async for rows in old.rows("running")
        for row in rows
        if await old.is_owned(row)
    ]
    if found := [*workers, *owned]:
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        got = Shown(f"{', '.join(found[:MOST_NAMED])}{more}")
        raise must(f"store {old.name}", "be used by no worker while it is moved", got, "Stop the workers first")


async def _require_empty(new: _Side) -> None:
    if await new.has_contents():
        fix = "Name a new file, a Redis database or prefix without keys, or a new schema of PostgreSQL"
        raise must("the target of a move", "be an empty store", Shown(f"{new.name} with contents"), fix)


@dataclass
class _Side:
    """One of the two stores: the components of a runner, which share an engine."""

    name: str
    engine: Engine
    queue: Any
    bus: Any
    state: Any
    documents: DocumentStore
    #: The mark, once this move set it.
    guard: Guard | None = None

    @classmethod
    def of(cls, what: str, runner: AgentRunner) -> _Side:
        """Return the side of a runner.

        Raises:
            NotSupported: It cannot be moved.
        """
        engine: Any = getattr(runner.queue, "engine", None)
        runner.backends.require_writable()
        one = all(getattr(each, "engine", None) is engine and each.copies for each in runner.backends)
        if not one or not isinstance(engine, Engine) or not runner.backends.durable:
            got = ", ".join(type(each).__name__ for each in runner.backends)
            fix = "Open both stores with AgentRunner.open(url)"
            raise NotSupported(
                str(must(what, "be one SQLite file, one Redis server or one PostgreSQL database", Shown(got), fix))
            )
        documents = [each for each in runner.document_stores() if getattr(each, "engine", None) is engine]
        if not documents:
            fix = "Open the store without persistence="
            raise NotSupported(str(must(what, "be a runner with the documents of its store", Shown("none"), fix)))
        return cls(_name_of(engine), engine, *runner.backends, documents[0])

    async def mark(self) -> str | None:
        return await self.engine.fence_of(MARK)

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Commit to the engine itself, past a payload codec."""
        try:
            return await self.engine.commit(guard, ops)
        except LeaseLost as error:
            if (mark := await self.mark()) is not None:
                raise moved(self.name, mark) from error
            got, fix = Shown("a move that another process gave up"), "Start it again"
            raise must(f"copy of {self.name}", "continue the move that it began", got, fix) from error

    async def rows(self, *statuses: str) -> AsyncIterator[list[RunRow]]:
        """Yield the rows of all runs as they are stored, in order of arrival."""
        wanted = RunFilter(statuses or None, limit=_PAGE)
        while rows := await self.queue.read("find", wanted):
            yield rows
            wanted = wanted._replace(after=rows[-1].arrival)

    async def is_owned(self, row: RunRow) -> bool:
        """Return whether a live claim holds a running run."""
        same = contents_of(row)
        op = Op("queue.rewrite", (row.run_id, same, same, self.queue.expiry_now()))
        return bool((await self.commit(self.guard, [op]))[0] == "owned")

    async def has_contents(self) -> bool:
        found = await self.queue.read("find", RunFilter(limit=1)) or await self.other_ids(())
        return bool(found or await self.documents.read("kinds"))

    async def other_ids(self, run_ids: Iterable[str]) -> list[str]:
        """Return the ids without a row: topics, and runs that another store queues."""
        found = {*await self.state.read("ids"), *await self.bus.read("ids")}
        return sorted(found.difference(run_ids))

    async def contents(self, run_id: str) -> _Contents:
        effects = []
        for key, digest in await self.state.read("effect_keys", run_id):
            rows = await self.state.read("effects", run_id, key, (digest,))
            effects += [row for row in rows if row.digest == digest]
        events, since = [], 0
        while page := await self.bus.stored_rows(run_id, since, _PAGE):
            events += [each for each in page if isinstance(each, StoredEvent)]
            since = sequence_after(page[-1])
            if not page.more:
                break
        state: StateRow = await self.state.read("state", run_id)
        effects.sort(key=lambda row: (row.key, row.digest, row.run_id, row.arrival))
        messages, records = await self.queue.read("mail", run_id, 0), await self.state.read("records", run_id, -1)
        return _Contents(messages, records, events, [state] if any(state) else [], effects)

    async def stored_documents(self, at: float) -> AsyncIterator[list[tuple[str, str, Document, str]]]:
        """Yield pages of all documents that exist at that time: space, kind, document and its words."""
        for space, kind in sorted(await self.documents.read("kinds")):
            words = {key: text for key, _, text in await self.documents.read("words", space, kind, at)}
            async for page in _StoredAt(self.documents, space, kind, at=at).pages(size=_PAGE):
                yield [(space, kind, each, words.get(each.key, "")) for each in page]


class _Contents(NamedTuple):
    """What a store contains of one run, or of a topic, in addition to its row."""

    messages: list[Any]
    records: list[Any]
    events: list[StoredEvent]
    checkpoints: list[StateRow]
    effects: list[Any]

    def comparable(self) -> _Contents:
        """Return what must be the same in both stores. On SQLite the row contains the run's status, and "" is None."""
        records = [[cell or None for cell in record] for record in self.records]
        states = [row._replace(status=None) for row in self.checkpoints]
        return self._replace(records=records, checkpoints=[row for row in states if any(row)])


@dataclass(frozen=True)
class _StoredAt(UndecodedCollection):
    """Documents as they are stored, and as they were at one time: none expires during a move."""

    at: float = 0.0

    def _now(self) -> float:
        return self.at


class _Copy:
    """Copies what a store contains to another store, and compares both.

    Args:
        old: The store that is read.
        new: The store that is written.
        at: The time at which the move began, by which documents expire.
        shift: How many seconds the clock of the new store is ahead of the clock of the old store.
    """

    def __init__(self, old: _Side, new: _Side, at: float, shift: int) -> None:
        self._old, self._new = old, new
        self._at, self._shift = at, shift

    async def copy(self, move: Move) -> None:
        """Copy everything, and note the counts and digests.

        Raises:
            StorageCorrupt: The new store contains something else afterwards.
        """
        run_ids = set[str]()
        async for rows in self._old.rows():
            run_ids.update(row.run_id for row in rows)
            for start in range(0, len(rows), _AT_ONCE):
                await _together(self._copy_run(row.run_id, row) for row in rows[start : start + _AT_ONCE])
        others = await self._old.other_ids(run_ids)
        for start in range(0, len(others), _AT_ONCE):
            await _together(self._copy_run(each, None) for each in others[start : start + _AT_ONCE])
        async for documents in self._old.stored_documents(self._at):
            await self._commit(Op("documents.copy", (*each, self._at)) for each in documents)
        await self._commit([Op("queue.keep_arrival", (await self._old.queue.read("last_arrival"),))])
        found, wanted = await self._digests(self._new, 0), await self._digests(self._old, self._shift)
        if differing := [kind for kind in wanted if found[kind] != wanted[kind]]:
            raise StorageCorrupt(
                f"{self._new.name} does not contain the same {', '.join(differing)} as {self._old.name}. Give up the "
                f"move with agent-runtime copy {self._old.name} --undo, and report this as a bug"
            )
        move.counts = {kind: count for kind, (count, _) in wanted.items()}
        move.digests = {kind: digest for kind, (_, digest) in wanted.items()}

    async def _copy_run(self, run_id: str, row: RunRow | None) -> None:
        contents = await self._old.contents(run_id)
        there = None if row is None else await self._new.queue.read("row", run_id)
        if there is not None and (await self._new.contents(run_id)).comparable() == contents.comparable():
            return  # by an earlier call
        await self._commit(self._operations(run_id, row, contents))

    def _operations(self, run_id: str, row: RunRow | None, contents: _Contents) -> Iterator[Op]:
        """Yield what stores a run. The row comes first: the number of a journal on SQLite is the number of its row."""
        if row is not None:
            copied = _copied(row, self._shift)
            for messages in _parts(contents.messages) if contents.messages else [[]]:
                yield Op("queue.copy", (copied, messages))
        for records in _parts(contents.records):
            yield Op("journal.copy", (run_id, records))
        for events in _parts(contents.events):
            yield Op(COPY, (run_id, events))
        for state in contents.checkpoints:
            yield Op("state.copy", (run_id, state))
        for effect in contents.effects:
            yield Op("effect.put", (effect,))

    async def _commit(self, operations: Iterable[Op]) -> None:
        """Commit operations in order, many in one commit."""
        group, size = list[Op](), 0
        for op in operations:
            length = _size(op.args)
            if group and (size + length > _MOST_BYTES or len(group) == _MOST_ITEMS):
                await self._new.commit(self._new.guard, group)
                group, size = [], 0
            group.append(op)
            size += length
        if group:
            await self._new.commit(self._new.guard, group)

    async def _digests(self, side: _Side, shift: int) -> dict[str, tuple[int, str]]:
        """Return the count and the digest of each kind."""
        kinds = _Digests(("runs", *_Contents._fields, "documents"))
        run_ids = set[str]()
        async for rows in side.rows():
            for start in range(0, len(rows), _AT_ONCE):
                part = rows[start : start + _AT_ONCE]
                found = await _together(side.contents(row.run_id) for row in part)
                for row, contents in zip(part, found, strict=True):
                    run_ids.add(row.run_id)
                    kinds.add("runs", [_copied(row, shift)])
                    kinds.add_contents(row.run_id, contents)
        for run_id in await side.other_ids(run_ids):
            kinds.add_contents(run_id, await side.contents(run_id))
        async for documents in side.stored_documents(self._at):
            kinds.add("documents", documents)
        return kinds.found()


class _Digests:
    """Counts items by kind, and computes a digest of each kind."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._digests = {kind: hashlib.sha256() for kind in kinds}
        self._counts = dict.fromkeys(kinds, 0)

    def add(self, kind: str, items: Sequence[Any], owner: str = "") -> None:
        for item in items:
            self._digests[kind].update(json.dumps((owner, item)).encode() + b"\n")
        self._counts[kind] += len(items)

    def add_contents(self, owner: str, contents: _Contents) -> None:
        for kind, items in contents.comparable()._asdict().items():
            self.add(kind, items, owner)

    def found(self) -> dict[str, tuple[int, str]]:
        return {kind: (self._counts[kind], digest.hexdigest()) for kind, digest in self._digests.items()}


def _copied(row: RunRow, shift: int) -> RunRow:
    """Return a row for another store: its lease is ended, and it is due by the clock of that store."""
    lease_until, due_at = -1.0 if row.lease_until else 0.0, row.due_at + shift if row.due_at > 0 else 0.0
    return row.with_values(holder="", lease_until=lease_until, due_at=due_at)


def _parts(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Yield parts of a list that one operation may have."""
    part, size = list[_Item](), 0
    for item in items:
        length = _size(item)
        if part and (size + length > _MOST_BYTES or len(part) == _MOST_ITEMS):
            yield part
            part, size = [], 0
        part.append(item)
        size += length
    if part:
        yield part


def _size(value: object) -> int:
    """Return about how many characters a value contains."""
    if isinstance(value, str):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, tuple | list) else 8


async def _together(calls: Iterable[Any]) -> list[Any]:
    """Await calls at the same time. After an error the others have ended, so that their store can be closed."""
    running = [asyncio.ensure_future(each) for each in calls]
    try:
        return await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()
        await asyncio.wait(running)


def _name_of(engine: Any) -> str:
    """Return the name of a store in messages and marks: what opens it, without a password."""
    place = getattr(engine, "place", None)
    return str(engine.location) if place is None else place.shown()
