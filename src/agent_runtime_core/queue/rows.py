"""The transitions of a run's row, decided once; a backend brings the row store they work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._engines.base import Concern, NotApplied, always
from .._ids import above
from .row import LIVE, ClaimRequest, Mail, Moved, RunRow, Settle, claimed, reopened, settled


class Rows(ABC):
    """Rows and mailboxes inside one open transaction.

    Its abstract methods only move rows; whatever they see and write must be one transaction, all or
    nothing. `save` replaces what may change of the row with that `n`, and keeps the row where
    `ready`, `expired` and `promote` look for it.
    """

    def __init__(self, tx: Any) -> None:
        self.tx = tx

    # -- what a backend brings

    @abstractmethod
    def get(self, run_id: str) -> RunRow | None: ...

    @abstractmethod
    def by_key(self, idem_key: str) -> RunRow | None: ...

    @abstractmethod
    def add(self, row: RunRow) -> RunRow:
        """Store a new row; returns it with its `n`, greater than all before."""

    @abstractmethod
    def save(self, row: RunRow) -> None: ...

    @abstractmethod
    def drop(self, row: RunRow) -> None:
        """Delete the row and its mailbox."""

    @abstractmethod
    def promote(self, wall: float) -> None:
        """Make delayed and waiting rows whose `due_at` has come pending, with `due_at` 0."""

    @abstractmethod
    def expired(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        """Running rows with no origin, of the wanted agents, whose lease is over or whose holder is dead."""

    @abstractmethod
    def ready(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        """Pending rows with no origin, of the wanted agents, that are due: greatest priority first, then smallest n."""

    @abstractmethod
    def mailed(self, run_id: str, msg_id: str) -> int | None:
        """The seq of that message, if it is in the mailbox."""

    @abstractmethod
    def add_mail(self, run_id: str, mail: Mail) -> None: ...

    def dead(self, holder: str) -> bool:
        """Whether that process is known to be gone."""
        return False

    def fence(self, run_id: str, token: str | None) -> None:
        self.tx.fence(run_id, token)

    def ring(self, topic: str) -> None:
        self.tx.ring(topic)

    # -- the operations

    def _save(self, row: RunRow) -> RunRow:
        self.save(row)
        self.ring("work" if row.status in LIVE else "done")
        return row

    def _expect(self, run_id: str, statuses: Sequence[str]) -> RunRow:
        row = self.get(run_id)
        if row is None or row.status not in statuses:
            raise Moved
        return row

    def insert(self, row: RunRow) -> RunRow:
        """Store the row unless its id or key is there already; what is stored."""
        there = self._there(row)
        if there is not None:
            return there
        self.ring("work")
        return self.add(row)

    def _there(self, row: RunRow) -> RunRow | None:
        there = self.get(row.run_id)
        return self.by_key(row.idem_key) if there is None and row.idem_key is not None else there

    def insert_applied(self, row: RunRow) -> RunRow:
        there = self._there(row)
        if there is None:
            raise NotApplied
        return there

    def _claim(self, row: RunRow, ticket: str, want: ClaimRequest) -> RunRow:
        row = claimed(row, above(ticket, row.claim_id), want)
        self.save(row)
        self.fence(row.run_id, row.claim_id)
        return row

    def claim(self, want: ClaimRequest) -> list[RunRow]:
        """Claim as many runs as there are tickets: first those whose holder let them fall."""
        found: list[RunRow] = []
        if not want.light:
            self.promote(want.wall)
            found = self.expired(want, len(want.tickets))
        if len(found) < len(want.tickets):
            found = found + self.ready(want, len(want.tickets) - len(found))
        return [self._claim(row, ticket, want) for row, ticket in zip(found, want.tickets, strict=False)]

    def claim_applied(self, want: ClaimRequest) -> list[RunRow]:
        # What it got is not known any more: its caller gives back whatever the tickets hold.
        return []

    def take(self, row: RunRow, insert: bool, reopen: bool, want: ClaimRequest) -> tuple[str, RunRow | None]:
        """Claim that one run, storing it first if new: ("claimed", "held", "ended", "conflict" or "unknown", row)."""
        there = self.get(row.run_id)
        if there is None:
            if not insert:
                return ("unknown", None)
            there = self.insert(row)
            if there.run_id != row.run_id:
                return ("conflict", there)
        elif insert and row.digest != there.digest:
            return ("conflict", there)
        if there.status == "running" and there.lease_until >= want.lease_now and not self.dead(there.holder):
            return ("held", there)
        if there.status not in LIVE:
            if there.status == "succeeded" or not reopen:
                return ("ended", there)
            there = reopened(there, want.wall)
        return ("claimed", self._claim(there.changed(origin=row.origin), want.tickets[0], want))

    def settle(self, run_id: str, how: Settle) -> RunRow:
        """Leave a claimed run as `how` says."""
        row = self._expect(run_id, ("running",))
        if row.claim_id != how.claim_id or 0 <= how.cursor != row.mail_seq:
            raise Moved
        if row.cancel_at is not None and how.status in ("waiting", "pending"):
            # Its next claim cancels it, so that is not put off; what waits is about to hear of it.
            if how.status == "waiting":
                raise Moved
            how = how._replace(due_at=0.0)
        if how.status != "running":
            self.fence(run_id, None)
        if how.status == "running":
            row = settled(row, how)
            self.save(row)
            return row
        return self._save(settled(row, how))

    def settle_applied(self, run_id: str, how: Settle) -> RunRow:
        row = self.get(run_id)
        if row is None or (row.claim_id, row.status, row.updated_at) != (how.claim_id, how.status, how.now):
            raise NotApplied
        return row

    def beat(self, claims: Sequence[tuple[str, str]], lease_until: float) -> list[tuple[bool, bool]]:
        """Extend the leases of (run_id, claim_id) pairs: for each (still held, cancel requested)."""
        answers = []
        for run_id, claim_id in claims:
            row = self.get(run_id)
            held = row is not None and row.status == "running" and row.claim_id == claim_id
            if row is not None and held:
                self.save(row.changed(lease_until=lease_until))
            answers.append((held, row is not None and row.cancel_at is not None))
        return answers

    def post(self, run_id: str, mail: Mail) -> tuple[str, int]:
        """Put a message into a live run's mailbox and wake it: (its status before, the message's seq or 0)."""
        row = self.get(run_id)
        if row is None:
            return ("unknown", 0)
        seq = self.mailed(run_id, mail.msg_id)
        if seq is not None or row.status not in LIVE:
            return (row.status, seq or 0)
        seq = row.mail_seq + 1
        self.add_mail(run_id, mail._replace(seq=seq))
        after = row.changed(mail_seq=seq)
        if mail.kind == "cancel" and row.cancel_at is None:
            # No later claim runs its code: any worker may end it, should its own process be gone or let go of it.
            after = after.changed(cancel_at=mail.t, origin="")
        if row.status == "waiting":
            after = after.changed(status="pending", due_at=0.0)
        self._save(after)
        self.ring("mail")
        return (row.status, seq)

    def post_applied(self, run_id: str, mail: Mail) -> tuple[str, int]:
        row, seq = self.get(run_id), self.mailed(run_id, mail.msg_id)
        if row is not None and row.status in LIVE and seq is None:
            raise NotApplied
        return ("unknown" if row is None else row.status, seq or 0)

    def end(self, run_id: str, expect: Sequence[str], status: str, now: float, reason: str) -> RunRow:
        """End a run that nobody holds."""
        row = self._expect(run_id, expect)
        self.fence(run_id, None)
        self.ring("mail")
        return self._save(row.changed(status=status, due_at=0.0, reason=reason, ended_at=now, updated_at=now))

    def reopen(self, run_id: str, expect: Sequence[str], now: float) -> RunRow:
        """Make an ended run pending in a new generation."""
        return self._save(reopened(self._expect(run_id, expect), now).changed(origin=""))

    def delete(self, run_id: str) -> None:
        """Forget an ended run."""
        row = self.get(run_id)
        if row is None:
            return
        if row.status in LIVE:
            raise Moved
        self.drop(row)
        self.fence(run_id, None)


OPS = ("insert", "claim", "take", "settle", "beat", "post", "end", "reopen", "delete")


def operations(rows: Callable[[Any], Rows]) -> Mapping[str, Callable[..., Any]]:
    """The queue's operations over a kind of row store, by name: each takes the transaction and its arguments."""
    return {f"queue.{verb}": _bound(rows, verb) for verb in OPS}


def replays(rows: Callable[[Any], Rows]) -> Mapping[str, Callable[..., Any]]:
    """What answers for operations that a superseded claim has applied before, by name; each may raise NotApplied."""
    return {f"queue.{verb}": _bound(rows, f"{verb}_applied") for verb in ("insert", "claim", "settle", "post")}


def _bound(rows: Callable[[Any], Rows], method: str) -> Callable[..., Any]:
    def run(tx: Any, *args: Any) -> Any:
        return getattr(rows(tx), method)(*args)

    return run


def concern(rows: Callable[[Any], Rows], migrations: Sequence[str] = (), tables: Sequence[str] = ()) -> Concern:
    return Concern("queue", operations(rows), replays(rows), migrations, tables, lengthy={"queue.delete": always})
