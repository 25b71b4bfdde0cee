"""A queue as somebody else would write it: rows in dicts, one change at a time, copies to go back to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.queue import (
    ClaimRequest,
    Guard,
    MailboxMessage,
    NotApplied,
    Op,
    RunCounts,
    RunFilter,
    RunQueue,
    RunRow,
    RunSnapshot,
    RunTransitions,
    operations,
    replays,
)


class Store:
    """What is kept: rows by run id, mailboxes, and the claim that may write each run."""

    def __init__(self) -> None:
        self.runs: dict[str, RunRow] = {}
        self.mail: dict[str, tuple[MailboxMessage, ...]] = {}
        self.claims: dict[str, str] = {}
        self.arrived = 0

    def copy(self) -> Store:
        copy = Store()
        copy.runs, copy.mail = dict(self.runs), dict(self.mail)
        copy.claims, copy.arrived = dict(self.claims), self.arrived
        return copy


class TheirRows(RunTransitions):
    """Rows of one store; the transitions themselves are inherited."""

    tx: Store

    def get(self, run_id: str) -> RunRow | None:
        return self.tx.runs.get(run_id)

    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        wanted = (idem_key, tenant)
        return next((row for row in self.tx.runs.values() if (row.idem_key, row.tenant) == wanted), None)

    def add(self, row: RunRow) -> RunRow:
        self.tx.arrived += 1
        self.tx.runs[row.run_id] = row = row._replace(arrival=self.tx.arrived)
        return row

    def save(self, row: RunRow) -> None:
        self.tx.runs[row.run_id] = row

    def drop(self, row: RunRow) -> None:
        del self.tx.runs[row.run_id]
        self.tx.mail.pop(row.run_id, None)

    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        due = [row for row in self.tx.runs.values() if 0 < row.due_at <= wall]
        self.tx.runs.update(
            (row.run_id, row._replace(status="pending", due_at=0.0, updated_at=row.due_at)) for row in due
        )
        return list({(key, row.tenant): 1 for row in due if (key := row.concurrency_key) and row.blocked == 1})

    def _wanted(self, want: ClaimRequest, status: str) -> list[RunRow]:
        rows = [row for row in self.tx.runs.values() if row.status == status]
        return [row for row in rows if want.admits(row.agent)]

    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        running = sorted(self._wanted(want, "running"), key=lambda row: row.lease_until)
        return [row for row in running if row.origin == "" and row.lease_until < want.lease_now][:limit]

    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        due = [row for row in self._wanted(want, "pending") if (row.origin, row.due_at, row.blocked) == ("", 0, 0)]
        return sorted(due, key=lambda row: (-row.priority, row.arrival))[:limit]

    def _group(self, concurrency_key: str, tenant: str, blocked: int) -> list[RunRow]:
        wanted, rows = (concurrency_key, tenant, blocked, None), self.tx.runs.values()
        return [row for row in rows if (row.concurrency_key, row.tenant, row.blocked, row.ended_at) == wanted]

    def active_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        return next(iter(self._group(concurrency_key, tenant, 0)), None)

    def next_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        due = [row for row in self._group(concurrency_key, tenant, 1) if row.due_at == 0]
        return min(due, key=lambda row: (-row.priority, row.arrival), default=None)

    def move(self, row: RunRow, after: RunRow) -> None:
        self.save(after)

    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        rows = [row for row in self.tx.runs.values() if row.concurrency_key and row.origin and not row.blocked]
        return [row for row in rows if row.status in ("pending", "running") and row.lease_until < want.lease_now]

    def message_number(self, run_id: str, msg_id: str) -> int | None:
        return next((mail.seq for mail in self.tx.mail.get(run_id, ()) if mail.msg_id == msg_id), None)

    def add_message(self, run_id: str, mail: MailboxMessage) -> None:
        self.tx.mail[run_id] = (*self.tx.mail.get(run_id, ()), mail)

    def fence(self, run_id: str, token: str | None) -> None:
        self.tx.claims.pop(run_id, None)
        if token is not None:
            self.tx.claims[run_id] = token

    def notify(self, topic: str) -> None:
        """Nobody listens: workers poll."""


class TheirQueue(RunQueue):
    """The queue itself: one commit at a time, since nothing in it awaits."""

    rows: type[TheirRows] = TheirRows

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.store = Store()
        self.operations, self.replays = operations(self.rows), replays(self.rows)

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if guard is not None and self.store.claims.get(guard.key) != guard.token:
            try:
                return [self.replays[name](self.store, *args) for name, args in ops]
            except (KeyError, NotApplied):
                raise LeaseLost(guard.key, guard.token) from None
        work = self.store.copy()
        answers = [self.operations[name](work, *args) for name, args in ops]
        self.store = work
        return answers

    async def read(self, what: str, *args: Any) -> Any:
        runs = self.store.runs
        match what, args:
            case "row", (run_id, *tenant):
                row = runs.get(run_id)
                return row if row is None or tenant in ([], [row.tenant]) else None
            case "find", (RunFilter() as wanted,):
                return wanted.listed(runs.values())
            case "counts", tenant:
                return RunCounts.of(runs.values(), *tenant)
            case "children", (run_id,):
                return [row for row in runs.values() if row.parent_id == run_id]
            case "mail", (run_id, after):
                return [each for each in self.store.mail.get(run_id, ()) if each.seq > after]
            case "news", (run_ids,):
                rows = [runs[run_id] for run_id in run_ids if run_id in runs]
                return {r.run_id: RunSnapshot(r.status, r.claim_id, r.mail_seq, r.cancel_at is not None) for r in rows}
        assert what == "next_due"
        return min((row.due_at for row in runs.values() if row.due_at > 0), default=None)
