"""A queue on `TheirEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agent_runtime_core.queue import (
    ClaimRequest,
    MailboxMessage,
    RunCounts,
    RunFilter,
    RunQueue,
    RunRow,
    RunSnapshot,
    RunTransitions,
    operation_set,
)
from tests.contract.third_party.their_engine import TheirBackend, rows

PLACES = ", ".join("?" * len(RunRow._fields))
OF_GROUP = "WHERE concurrency_key = ? AND tenant = ? AND ended_at IS NULL AND blocked"
LAPSED = "status IN ('pending', 'running') AND concurrency_key IS NOT NULL AND origin <> '' AND blocked = 0"


def found(source: Any, where: str, *values: Any) -> list[RunRow]:
    return rows(source, RunRow, f"SELECT * FROM runs {where}", *values)


def one(source: Any, where: str, *values: Any) -> RunRow | None:
    return next(iter(found(source, where, *values)), None)


class TheirSQLRows(RunTransitions):
    def get(self, run_id: str) -> RunRow | None:
        return one(self.tx, "WHERE run_id = ?", run_id)

    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        return one(self.tx, "WHERE idem_key = ? AND tenant = ?", idem_key, tenant)

    def add(self, row: RunRow) -> RunRow:
        row = row._replace(arrival=self.tx.conn.execute("INSERT INTO arrivals DEFAULT VALUES").lastrowid)
        self.save(row)
        return row

    def save(self, row: RunRow) -> None:
        self.tx.conn.execute(f"REPLACE INTO runs VALUES ({PLACES})", row)

    def move(self, row: RunRow, after: RunRow) -> None:
        self.save(after)

    def drop(self, row: RunRow) -> None:
        for table in ("runs", "mail"):
            self.tx.conn.execute(f"DELETE FROM {table} WHERE run_id = ?", (row.run_id,))

    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        due = found(self.tx, "WHERE status IN ('pending', 'waiting') AND due_at > 0 AND due_at <= ?", wall)
        for row in due:
            self.save(row._replace(status="pending", due_at=0.0, updated_at=row.due_at))
        return list({(row.concurrency_key, row.tenant) for row in due if row.concurrency_key and row.blocked == 1})

    def _wanted(self, want: ClaimRequest, where: str, order: str, *values: Any) -> list[RunRow]:
        stored = (agent for (agent,) in self.tx.conn.execute("SELECT DISTINCT agent FROM runs"))
        agents = [*filter(want.admits, stored)]
        where, values = f"{where} AND agent IN ({', '.join('?' * len(agents))})", (*values, *agents)
        return found(self.tx, f"WHERE origin = '' AND {where} ORDER BY {order}", *values)

    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        ready = "status = 'pending' AND due_at = 0 AND blocked = 0"
        return self._wanted(want, ready, f"priority DESC, arrival LIMIT {limit}")

    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        expired = "status = 'running' AND lease_until < ?"
        return self._wanted(want, expired, f"lease_until LIMIT {limit}", want.lease_now)

    def active_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        return one(self.tx, f"{OF_GROUP} = 0", concurrency_key, tenant)

    def next_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        queued = f"{OF_GROUP} = 1 AND due_at = 0 ORDER BY priority DESC, arrival"
        return one(self.tx, queued, concurrency_key, tenant)

    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        return found(self.tx, f"WHERE {LAPSED} AND lease_until < ?", want.lease_now)

    def message_number(self, run_id: str, msg_id: str) -> int | None:
        query = "SELECT seq FROM mail WHERE run_id = ? AND msg_id = ?"
        return next(iter(rows(self.tx, int, query, run_id, msg_id)), None)

    def add_message(self, run_id: str, message: MailboxMessage) -> None:
        self.tx.conn.execute("INSERT INTO mail VALUES (?, ?, ?, ?, ?, ?, ?)", (run_id, *message))


def row(view: Any, run_id: str, tenant: str = "") -> RunRow | None:
    return one(view, "WHERE run_id = ? AND ? IN ('', tenant)", run_id, tenant)


def mail(view: Any, run_id: str, after: int) -> list[MailboxMessage]:
    query = f"SELECT {', '.join(MailboxMessage._fields)} FROM mail WHERE run_id = ? AND seq > ? ORDER BY seq"
    return rows(view, MailboxMessage, query, run_id, after)


def news(view: Any, run_ids: Sequence[str]) -> dict[str, RunSnapshot]:
    there = [each for run_id in run_ids if (each := row(view, run_id)) is not None]
    return {r.run_id: RunSnapshot(r.status, r.claim_id, r.mail_seq, r.cancel_at is not None) for r in there}


class TheirSQLQueue(TheirBackend, RunQueue):
    operation_sets = (operation_set(TheirSQLRows),)
    reads: ClassVar[Any] = {
        "row": row,
        "mail": mail,
        "news": news,
        "find": lambda view, wanted: RunFilter.listed(wanted, found(view, "")),
        "counts": lambda view, *tenant: RunCounts.of(found(view, ""), *tenant),
        "children": lambda view, run_id: found(view, "WHERE parent_id = ?", run_id),
        "next_due": lambda view: view.execute("SELECT min(due_at) FROM runs WHERE due_at > 0").fetchone()[0],
    }
