"""A queue in the memory of this process."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar

from .._core.clock import SYSTEM, Clock
from .._engines.backend import MemoryBackend, OperationSets, Reads
from .._engines.memory import MemoryEngine, MemoryTx
from .base import MAX_RETRIES, RunQueue
from .rate_limits import Rate
from .records import (
    LIVE,
    QUEUED_BEHIND,
    SET_ASIDE,
    ClaimRequest,
    MailboxMessage,
    ProcessRow,
    RunCounts,
    RunFilter,
    RunRow,
    RunSnapshot,
    is_rate_limited,
)
from .transitions import RunTransitions, operation_set

TABLES = (
    "runs", "ready", "due", "running", "keys", "children", "count", "mail", "heads", "behind", "inline", "processes",
    "shared", "limited", "turns", "clock",
)  # fmt: skip


class MemoryTransitions(RunTransitions):
    """Rows in dicts.

    An entry of a heap may be outdated, so it is compared with its row when it is at the top.
    """

    tx: MemoryTx

    def get(self, run_id: str) -> RunRow | None:
        return self.tx.tables["runs"].get(run_id)

    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        return self.get(self.tx.tables["keys"].get((idem_key, tenant), ""))

    def add(self, row: RunRow) -> RunRow:
        tables, put = self.tx.tables, self.tx.put
        last = tables["count"].get("", 0)
        if not row.arrival:
            row = row.with_values(arrival=last + 1)
        # A rollback keeps the heap entries of the row, so it does not reset the counter. Otherwise these entries would
        # match the next row.
        if row.arrival > last:
            tables["count"][""] = row.arrival
        if row.idem_key is not None:
            put(tables["keys"], (row.idem_key, row.tenant), row.run_id)
        if row.parent_id is not None:
            put(tables["children"], row.parent_id, (*tables["children"].get(row.parent_id, ()), row.run_id))
        self.save(row)
        return row

    def add_copied(self, row: RunRow) -> None:
        self.add(row)

    def keep_arrival(self, last: int) -> None:
        self.tx.tables["count"][""] = max(_last_arrival(self.tx), last)

    def save(self, row: RunRow) -> None:
        tables = self.tx.tables
        if row.concurrency_key is not None:
            self._index_in_group(row, (row.concurrency_key, row.tenant))
        self.tx.put(tables["runs"], row.run_id, row)
        if row.status == "pending" and row.due_at == 0 and not row.blocked:
            heapq.heappush(tables["ready"].setdefault(row.agent, []), (-row.priority, row.arrival, row.run_id))
            if row.turn is not None:
                turns, _ = tables["turns"].setdefault((row.agent, row.priority), ({}, []))
                heapq.heappush(turns.setdefault(row.turn, []), (-row.priority, row.arrival, row.run_id))
        elif row.status in ("pending", "waiting") and row.due_at > 0:
            heapq.heappush(tables["due"].setdefault("", []), (row.due_at, row.run_id))
            if is_rate_limited(row):
                limited = tables["limited"].setdefault((row.rate, row.agent), [])
                heapq.heappush(limited, (-row.priority, row.arrival, row.run_id))
        if row.status == "running":
            self.tx.put(tables["running"], row.run_id, None)
        else:
            self.tx.drop(tables["running"], row.run_id)

    def replace_contents(self, row: RunRow) -> None:
        self.tx.put(self.tx.tables["runs"], row.run_id, row)  # without new entries in the heaps

    def _index_in_group(self, row: RunRow, group: tuple[str, str]) -> None:
        """Update the indexes of a concurrency key and tenant."""
        tables, is_active = self.tx.tables, row.status in LIVE and not row.blocked
        heads: tuple[str, ...] = tables["heads"].get(group, ())
        if is_active and row.run_id not in heads:
            self.tx.put(tables["heads"], group, (*heads, row.run_id))
        elif not is_active and heads == (row.run_id,):
            self.tx.drop(tables["heads"], group)
        elif not is_active and row.run_id in heads:
            self.tx.put(tables["heads"], group, tuple(run_id for run_id in heads if run_id != row.run_id))
        if is_active and row.origin:
            self.tx.put(tables["inline"], row.run_id, None)
        else:
            self.tx.drop(tables["inline"], row.run_id)
        if _is_queued(row) and not _is_queued(self.get(row.run_id)):
            heapq.heappush(tables["behind"].setdefault(group, []), (-row.priority, row.arrival, row.run_id))

    def move(self, row: RunRow, after: RunRow) -> None:
        tables = self.tx.tables
        if row.idem_key is not None:
            self.tx.drop(tables["keys"], (row.idem_key, row.tenant))
            self.tx.put(tables["keys"], (row.idem_key, after.tenant), row.run_id)
        if row.concurrency_key is not None:
            # Of no group: `save` must not take it for a row that is in the list of its group already.
            self.save(row.with_values(blocked=SET_ASIDE))
        self.save(after)

    def drop(self, row: RunRow) -> None:
        tables = self.tx.tables
        if row.concurrency_key is not None and self.next_in_group(row.concurrency_key, row.tenant) is None:
            self.tx.drop(tables["behind"], (row.concurrency_key, row.tenant))
        for table in ("runs", "mail"):
            self.tx.drop(tables[table], row.run_id)
        if row.idem_key is not None:
            self.tx.drop(tables["keys"], (row.idem_key, row.tenant))
        if row.parent_id is not None:
            siblings = tuple(child for child in tables["children"].get(row.parent_id, ()) if child != row.run_id)
            if siblings:
                self.tx.put(tables["children"], row.parent_id, siblings)
            else:
                self.tx.drop(tables["children"], row.parent_id)

    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        due = self.tx.tables["due"].get("", [])
        groups: dict[tuple[str, str], None] = {}
        while due and due[0][0] <= wall:
            at, run_id = self.tx.pop(due)
            row = self.get(run_id)
            if row is not None and _is_due(row, at):
                self.save(row.with_values(status="pending", due_at=0.0, updated_at=row.due_at))
                if row.concurrency_key is not None and row.blocked == QUEUED_BEHIND:
                    groups[row.concurrency_key, row.tenant] = None
        return tuple(groups)

    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        running = (self.tx.tables["runs"][run_id] for run_id in self.tx.tables["running"])
        found = (
            row for row in running if row.lease_until < want.lease_now and row.origin == "" and want.admits(row.agent)
        )
        return heapq.nsmallest(limit, found, key=lambda row: row.lease_until)

    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        heaps = self.tx.tables["ready"]
        found: dict[str, RunRow] = {}  # a run that was saved twice is listed twice
        while len(found) < limit:
            tops = [
                heap
                for agent in (want.agents or [*filter(want.admits, heaps)])
                if (heap := self._without_outdated(heaps.get(agent)))
            ]
            if not tops:
                break
            run_id = self.tx.pop(min(tops))[2]
            found[run_id] = self.tx.tables["runs"][run_id]
        return [*found.values()]

    def next_turn(self, want: ClaimRequest, priority: int, after: str | None) -> RunRow | None:
        tables, found = self.tx.tables, list[tuple[str, int, str]]()
        for agent in want.agents or [*filter(want.admits, tables["ready"])]:
            turns, in_order = tables["turns"].get((agent, priority), ({}, []))
            if len(in_order) != len(turns):  # turns are new, or were restored by a rollback
                in_order[:] = sorted(turns)
            at = 0 if after is None else bisect_right(in_order, after)
            while at < len(in_order):
                if heap := self._without_outdated(turns[in_order[at]]):
                    found.append((in_order[at], heap[0][1], heap[0][2]))
                    break
                self.tx.drop(turns, in_order.pop(at))
        return self.get(min(found)[2]) if found else None

    def active_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        return next(iter(self.all_active_in_group(concurrency_key, tenant, 1)), None)

    def all_active_in_group(self, concurrency_key: str, tenant: str, limit: int) -> Sequence[RunRow]:
        heads: tuple[str, ...] = self.tx.tables["heads"].get((concurrency_key, tenant), ())
        rows = (row for run_id in heads if (row := self.get(run_id)) is not None)
        return heapq.nsmallest(limit, rows, key=lambda row: row.arrival)

    def next_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        heap = self.tx.tables["behind"].get((concurrency_key, tenant), [])
        while heap:
            row = self.get(heap[0][2])
            if row is not None and _is_queued(row) and (row.arrival, row.tenant) == (heap[0][1], tenant):
                return row
            self.tx.pop(heap)
        return None

    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        inline = (self.tx.tables["runs"][run_id] for run_id in self.tx.tables["inline"])
        return [row for row in inline if row.status != "waiting" and row.lease_until < want.lease_now]

    def _without_outdated(self, heap: list[tuple[int, int, str]] | None) -> list[tuple[int, int, str]] | None:
        """Return the heap after removing outdated entries from its top."""
        while heap:
            row = self.get(heap[0][2])
            if row is not None and (row.status, row.due_at, row.blocked, row.arrival, row.origin) == (
                "pending", 0, 0, heap[0][1], "",
            ):  # fmt: skip
                break
            self.tx.pop(heap)
        return heap

    def message_number(self, run_id: str, msg_id: str) -> int | None:
        mail: MailboxMessage | None = self.tx.tables["mail"].get(run_id, {}).get(msg_id)
        return None if mail is None else mail.seq

    def add_message(self, run_id: str, mail: MailboxMessage) -> None:
        self.tx.add(self.tx.dict_in(self.tx.tables["mail"], run_id), mail.msg_id, mail)

    def replace_message(self, run_id: str, old: MailboxMessage, new: MailboxMessage) -> bool:
        box: dict[str, MailboxMessage] = self.tx.tables["mail"].get(run_id, {})
        if box.get(old.msg_id) != old:
            return False
        self.tx.put(box, old.msg_id, new)
        return True

    def save_process(self, row: ProcessRow, kept: float) -> None:
        rows: dict[str, ProcessRow] = self.tx.tables["processes"]
        for process_id in [each.process_id for each in rows.values() if each.seen_at < row.seen_at - kept]:
            self.tx.drop(rows, process_id)
        self.tx.put(rows, row.process_id, row)

    def drop_process(self, process_id: str) -> None:
        self.tx.drop(self.tx.tables["processes"], process_id)

    def shared(self, name: str) -> str | None:
        state: str | None = self.tx.tables["shared"].get(name)
        return state

    def save_shared(self, name: str, state: str | None) -> None:
        if state is None:
            self.tx.drop(self.tx.tables["shared"], name)
        else:
            self.tx.put(self.tx.tables["shared"], name, state)

    def shared_states(self, prefix: str) -> Mapping[str, str]:
        return _shared(self.tx, prefix)

    def clock_seen(self) -> dict[str, float]:
        seen: dict[str, float] = self.tx.tables["clock"]
        return seen

    def bring_forward(self, name: str, seconds: float) -> None:
        limited = self.tx.tables["limited"]
        heaps = [heap for (rate, _), heap in limited.items() if Rate.read(rate).name == name]
        for run_id in {run_id for heap in heaps for _, _, run_id in heap}:
            row = self.get(run_id)
            if row is not None and is_rate_limited(row) and Rate.read(row.rate or "").name == name:
                self.save(row.with_values(due_at=row.due_at - seconds))

    def next_rate_limited(self, rate: str, agent: str) -> RunRow | None:
        heap = self.tx.tables["limited"].get((rate, agent), [])
        while heap:
            row = self.get(heap[0][2])
            if row is not None and is_rate_limited(row) and row.arrival == heap[0][1] and row.rate == rate:
                return row
            self.tx.pop(heap)
        return None


def _is_queued(row: RunRow | None) -> bool:
    """Return whether a row waits for the active run of its concurrency key."""
    return row is not None and row.blocked == QUEUED_BEHIND and row.due_at == 0


def _is_due(row: RunRow | None, at: float) -> bool:
    return row is not None and row.due_at == at and row.status in ("pending", "waiting")


def _get(tx: MemoryTx, run_id: str, tenant: str = "") -> RunRow | None:
    row = MemoryTransitions(tx).get(run_id)
    return row if row is None or tenant in ("", row.tenant) else None


def _find(tx: MemoryTx, wanted: RunFilter) -> list[RunRow]:
    return wanted.listed(tx.tables["runs"].values())


def _counts(tx: MemoryTx, tenant: str | None = None) -> RunCounts:
    return RunCounts.of(tx.tables["runs"].values(), tenant)


def _children(tx: MemoryTx, run_id: str) -> list[RunRow]:
    runs = tx.tables["runs"]
    return [runs[child] for child in tx.tables["children"].get(run_id, ())]


def _mail(tx: MemoryTx, run_id: str, after: int) -> list[MailboxMessage]:
    box: dict[str, MailboxMessage] = tx.tables["mail"].get(run_id, {})
    new = [*takewhile(lambda mail: mail.seq > after, reversed(box.values()))]
    return new[::-1]


def _news(tx: MemoryTx, run_ids: Sequence[str]) -> dict[str, RunSnapshot]:
    rows = (tx.tables["runs"].get(run_id) for run_id in run_ids)
    return {
        r.run_id: RunSnapshot(r.status, r.claim_id, r.mail_seq, r.cancel_at is not None) for r in rows if r is not None
    }


def _next_due(tx: MemoryTx) -> float | None:
    due = tx.tables["due"].get("", [])
    while due:
        at, run_id = due[0]
        if _is_due(tx.tables["runs"].get(run_id), at):
            return float(at)
        tx.pop(due)
    return None


def _last_arrival(tx: MemoryTx) -> int:
    last: int = tx.tables["count"].get("", 0)
    return last


def _processes(tx: MemoryTx) -> list[ProcessRow]:
    return [*tx.tables["processes"].values()]


def _shared(tx: MemoryTx, prefix: str) -> dict[str, str]:
    return {name: state for name, state in sorted(tx.tables["shared"].items()) if name.startswith(prefix)}


class InMemoryQueue(MemoryBackend, RunQueue):
    """A queue in the memory of this process. Its runs are lost when the process ends."""

    operation_sets: ClassVar[OperationSets] = (operation_set(MemoryTransitions, tables=TABLES),)

    reads: ClassVar[Reads] = {
        "row": _get,
        "find": _find,
        "counts": _counts,
        "children": _children,
        "mail": _mail,
        "news": _news,
        "next_due": _next_due,
        "processes": _processes,
        "last_arrival": _last_arrival,
        "shared": _shared,
    }

    keeps_processes = True
    keeps_limits = True

    def __init__(
        self, max_retries: int = MAX_RETRIES, *, engine: MemoryEngine | None = None, clock: Clock = SYSTEM,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(engine=engine, clock=clock, max_retries=max_retries, **options)

    def clear(self) -> None:
        """Delete all runs."""
        for table in TABLES:
            self.engine.tables[table].clear()
