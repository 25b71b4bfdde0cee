"""Nineteen defects of backends, most of them races of two objects, and which of them the kit finds."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.events import Guard, Op
from agent_runtime_core.queue import RunRow
from agent_runtime_core.state import EffectExists, Record
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.testing.contracts import concurrency, events, queue, races, state
from agent_runtime_core.testing.contracts.checks import turns
from tests.contract.third_party.their_bus import TheirBus
from tests.contract.third_party.their_queue import TheirQueue, TheirRows
from tests.contract.third_party.their_store import TheirStore

PAGE = Path(__file__).parents[2] / "docs/guide/write-a-backend.md"
LAG = 3  # loop iterations between a read and a write of one transaction
ARRIVALS = itertools.count(1)  # as a sequence of a database, which no transaction takes back


class DriverError(Exception):
    """What a driver raises for a conflict of two transactions."""


class Server:
    """What the objects of one store share: its rows, and the lock of its transactions."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.flushed = copy.deepcopy(rows)
        self.lock = asyncio.Lock()
        self.created = self.cut = False
        self.locks: dict[str, object] = {}  # the transaction that has locked a run
        self.waiting: dict[object, str] = {}  # the run that a transaction waits for


class OnServer:
    """A backend without a defect, whose transactions take a while: `again` opens a second object on its server."""

    def __init__(self, server: Server | None = None, **options: Any) -> None:
        self.server: Any = server
        self.is_open = False
        super().__init__(**options)
        self.is_open = True

    @property
    def store(self) -> Any:
        return self.server.rows

    @store.setter
    def store(self, rows: Any) -> None:
        if self.server is None:
            self.server = Server(rows)
        elif self.is_open:  # the constructor of a second object replaces nothing
            self.server.rows = rows

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        writing = asyncio.ensure_future(self.transaction(guard, ops))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise

    async def transaction(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        async with self.server.lock:
            await turns(LAG)
            return await self.write(guard, ops)

    async def write(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        results: list[Any] = await super().commit(guard, ops)  # type: ignore[misc]
        return results

    def is_stale(self, guard: Guard | None) -> bool:
        return guard is not None and self.store.claims.get(guard.key) != guard.token


class Numbered(TheirRows):
    def add(self, row: RunRow) -> RunRow:
        self.tx.arrived = next(ARRIVALS) - 1
        return super().add(row)


class Queue(OnServer, TheirQueue):
    rows = Numbered


class Bus(OnServer, TheirBus): ...


class Store(OnServer, TheirStore): ...


def again(backend: Any) -> Any:
    return type(backend)(backend.server, clock=backend.clock)


# -- what reads, waits and writes without a lock


class UnlockedFence(OnServer):
    async def transaction(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        stale = self.is_stale(guard)
        await turns(LAG)
        return await self.write(guard if stale else None, ops)


class UnlockedFenceOfABus(UnlockedFence, TheirBus): ...


class UnlockedFenceOfAStore(UnlockedFence, TheirStore): ...


class Unlocked(Queue):
    """Transactions of one kind read a snapshot, and write the rows that they changed."""

    def is_unlocked(self, op: Op) -> bool:
        raise NotImplementedError

    def check(self, before: Any, row: RunRow) -> None:
        """Raise what the indexes of the database find when a row is stored."""

    async def transaction(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if guard is not None or not self.is_unlocked(ops[0]):
            return await super().transaction(guard, ops)
        before = self.store.copy()
        work = before.copy()
        results = [self.operations[name](work, *args) for name, args in ops]
        await turns(LAG)
        changed = [row for run_id, row in work.runs.items() if before.runs.get(run_id) is not row]
        for row in changed:
            self.check(before, row)
        self.store.runs.update((row.run_id, row) for row in changed)
        self.store.claims.update((row.run_id, row.claim_id) for row in changed if row.claim_id)
        return results


class UnlockedConcurrencyKeys(Unlocked):
    def is_unlocked(self, op: Op) -> bool:
        return op.name == "queue.insert" and bool(op.args[0].concurrency_key)


class UnlockedClaims(Unlocked):
    def is_unlocked(self, op: Op) -> bool:
        return op.name == "queue.claim"


class RaisesUniqueViolations(Unlocked):
    def is_unlocked(self, op: Op) -> bool:
        return op.name == "queue.insert" and bool(op.args[0].idem_key)

    def check(self, before: Any, row: RunRow) -> None:
        keys = [(each.idem_key, each.tenant) for each in self.store.runs.values()]
        if row.run_id not in before.runs and (row.idem_key, row.tenant) in keys:
            raise DriverError("duplicate key value violates unique constraint runs_idem_key")


class RaisesUniqueSequences(Bus):
    async def transaction(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if guard is not None or ops[0].name != "events.publish":
            return await super().transaction(guard, ops)
        heads = dict(self.store.heads)
        await turns(LAG)
        if any(self.store.heads.get(op.args[0]) != heads.get(op.args[0]) for op in ops):
            raise DriverError("duplicate key value violates unique constraint events_pkey")
        return await self.write(guard, ops)


class UnlockedEffects(Store):
    async def transaction(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if ops[0].name != "effect.begin":
            return await super().transaction(guard, ops)
        row, *_ = ops[0].args
        if any(each[:3] == row[:3] and each[3] != row[3] for each in self.store.effects):
            raise EffectExists
        await turns(LAG)
        return await self.write(guard, [Op("effect.put", op.args) for op in ops])


class RaisesDeadlocks(Bus):
    """Locks the runs of a commit in the order of its operations."""

    async def transaction(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        me, server = object(), self.server
        try:
            for op in ops:
                while (owner := server.locks.setdefault(op.args[0], me)) is not me:
                    if server.locks.get(server.waiting.get(owner, "")) is me:
                        raise DriverError("deadlock detected")
                    server.waiting[me] = op.args[0]
                    await asyncio.sleep(0)
                server.waiting.pop(me, None)
                await turns(LAG)
            return await self.write(guard, ops)
        finally:
            server.waiting.pop(me, None)
            server.locks = {key: owner for key, owner in server.locks.items() if owner is not me}


class DirtyReads(Store):
    """Readers see what is not committed."""

    async def write(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if self.is_stale(guard):
            return await super().write(guard, ops)
        before, results = copy.deepcopy(self.store), list[Any]()
        try:
            for op in ops:
                results.append(self.apply(op))
                await asyncio.sleep(0)
        except BaseException:
            self.store = before
            raise
        return results


class CreatesTablesTwice(Bus):
    async def transaction(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if not self.server.created:
            await turns(LAG)
            if self.server.created:
                raise DriverError('relation "events" already exists')
            self.server.created = True
        return await super().transaction(guard, ops)


# -- what one object keeps for itself


class CachesRows(Queue):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cache: dict[Any, Any] = {}

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self.cache.clear()
        return await super().commit(guard, ops)

    async def read(self, what: str, *args: Any) -> Any:
        if what != "row":
            return await super().read(what, *args)
        if args not in self.cache:
            self.cache[args] = await super().read(what, *args)
        return self.cache[args]


class FencesOfOneObject(Store):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mine: dict[str, str] = {}

    async def write(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self.store.claims, shared = self.mine, self.store.claims
        try:
            return await super().write(guard, ops)
        finally:
            self.store.claims, self.mine = shared, self.store.claims


class LeasesByWallClock(Queue):
    """Each machine measures leases by its own wall clock."""

    def lease_now(self) -> float:
        return self.clock.wall()


# -- what concerns one commit


class ParsesContents(Store):
    """As a jsonb column does."""

    async def write(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().write(guard, [self.parsed(op) for op in ops])

    def parsed(self, op: Op) -> Op:
        if op.name != "journal.append" or op.args[1].result is None:
            return op
        record: Record = op.args[1]
        return Op(op.name, (op.args[0], record._replace(result=json.dumps(json.loads(record.result or "")))))


class BlocksTheLoop(Store):
    """A driver without threads, and one round trip for each operation."""

    async def write(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        time.sleep(len(ops) * 1e-4)
        return await super().write(guard, ops)


class TornByCancel(Bus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        async with self.server.lock:
            await turns(LAG)
            results = await self.write(guard, ops[:1])
            await asyncio.sleep(0)
            return results + (await self.write(None, ops[1:]) if ops[1:] else [])


class ForgetsReplies(Bus):
    def repeated(self, guard: Guard, op: Op) -> list[int] | bool:
        raise LeaseLost(guard.key, guard.token)


# -- what the kit does not find


class WritesLater(Store):
    """Returns the results before they are durable."""

    async def close(self) -> None:
        self.server.flushed = copy.deepcopy(self.store)
        await super().close()

    def crash(self) -> None:
        self.server.rows = copy.deepcopy(self.server.flushed)


class RepeatsBlindly(Store):
    """Repeats a commit whose reply was lost, without looking whether it was applied."""

    async def write(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        results = await super().write(guard, ops)
        return await super().write(guard, ops) if self.server.cut else results


FOUND: list[tuple[Callable[..., Any], Any]] = [
    (UnlockedFenceOfABus, races.a_claim_that_is_superseded_through_the_other_bus_writes_before_or_not_at_all),
    (UnlockedFenceOfAStore, races.a_claim_that_is_superseded_through_the_other_store_writes_before_or_not_at_all),
    (UnlockedConcurrencyKeys, races.of_runs_enqueued_together_with_one_key_one_is_active),
    (UnlockedClaims, concurrency.of_two_claimers_one_gets_the_run),
    (RaisesUniqueViolations, races.of_runs_enqueued_together_with_one_idempotency_key_one_is_stored),
    (RaisesUniqueSequences, races.an_event_published_through_both_is_stored_once),
    (UnlockedEffects, races.an_effect_is_begun_through_one_of_two_objects),
    (RaisesDeadlocks, races.commits_that_write_the_same_logs_in_another_order_are_applied),
    (DirtyReads, races.a_reader_sees_all_of_a_commit_or_nothing_of_it),
    (CreatesTablesTwice, races.objects_that_open_an_empty_bus_together_use_it),
    (CachesRows, concurrency.a_claim_through_one_is_over_for_the_other),
    (FencesOfOneObject, concurrency.a_journal_is_one_through_both),
    (LeasesByWallClock, races.wall_clocks_that_differ_move_no_lease),
    (ParsesContents, state.contents_come_back_letter_by_letter),
    (BlocksTheLoop, state.the_event_loop_goes_on_while_a_commit_waits),
    (TornByCancel, events.a_writer_that_is_cancelled_wrote_all_or_nothing),
    (ForgetsReplies, events.a_stale_claim_is_refused),
]
#: Defects that the kit does not find, and the sentence of the page that says so.
LISTED = {
    WritesLater: "A commit that returns before it is durable",
    RepeatsBlindly: "A commit that is repeated after a lost reply",
}


@pytest.mark.parametrize(("defect", "case"), FOUND, ids=[defect.__name__ for defect, _ in FOUND])
async def test_the_kit_finds(defect: Any, case: Any) -> None:
    with pytest.raises((AssertionError, LeaseLost)):
        await case(*((defect, again) if case in (*races.QUEUE, *races.EVENTS, *races.STATE) else (defect,)))


@pytest.mark.parametrize(
    ("kit", "make"), [(queue, Queue), (events, Bus), (state, Store)], ids=["queue", "bus", "store"]
)
async def test_the_kit_accepts_a_backend_without_a_defect(kit: Any, make: Any) -> None:
    await kit.check(make, again=again)


@pytest.mark.parametrize("defect", LISTED, ids=lambda defect: defect.__name__)
async def test_what_the_kit_does_not_find_is_on_the_page(defect: Any) -> None:
    await state.check(defect, again=again)
    assert LISTED[defect] in PAGE.read_text("utf-8")
    assert len(FOUND) + len(LISTED) == 19


async def test_what_the_kit_does_not_find_is_a_defect() -> None:
    append = [Op("journal.append", ("run", Record(-1, "done", "a")))]
    later = WritesLater(clock=VirtualClock())
    await later.commit(None, append)
    later.crash()
    assert await again(later).read("records", "run", -1) == [], "a committed record is lost"
    blind = RepeatsBlindly(clock=VirtualClock())
    blind.server.cut = True
    await blind.commit(None, append)
    assert len(await blind.read("records", "run", -1)) == 2, "one commit, two records"
