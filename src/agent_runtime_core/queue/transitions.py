"""The transitions of a run's row, decided once; a backend brings the row store they work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._core.former_names import warn_former
from .._core.ids import above
from .._engines.base import NotApplied, OperationSet, always
from .records import (
    LIVE,
    QUEUED_BEHIND,
    SET_ASIDE,
    ClaimRequest,
    MailboxMessage,
    RowChanged,
    RunRow,
    RunUpdate,
    as_abandoned,
    as_claimed,
    as_reopened,
    as_updated,
)

INLINE_RESERVATION = 5.0  # seconds that an inline run keeps its place in its lane after it was last asked for


#: Methods of `RunTransitions` in 0.6.0, and what they are called now.
_FORMER = {
    "promote": "make_due_ready",
    "expired": "expired_leases",
    "ready": "claimable",
    "head": "active_in_group",
    "behind": "next_in_group",
    "lapsed": "abandoned_inline",
    "mailed": "message_number",
    "add_mail": "add_message",
    "dead": "is_dead",
    "ring": "notify",
}


class RunTransitions(ABC):
    """Rows and mailboxes inside one open transaction.

    Its abstract methods only move rows; whatever they see and write must be one transaction, all or
    nothing. `save` replaces what may change of the row with that `n`, and keeps the row where
    `ready`, `expired`, `promote`, `head`, `behind` and `lapsed` look for it.

    The live runs of a lane: at most one, its *head*, has `held` 0. Whenever there is none, nothing is
    behind either; only what is not due yet, or stands aside, is held without a head.
    """

    def __init__(self, tx: Any) -> None:
        self.tx = tx

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in _FORMER.items():
            if old in cls.__dict__ and new not in cls.__dict__:
                warn_former(cls.__name__, old, new, stacklevel=4)  # past ABCMeta: the line of the class statement
                setattr(cls, new, cls.__dict__[old])

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name):
            if name not in _FORMER:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warn_former(type(self).__name__, name, _FORMER[name])
            return getattr(self, _FORMER[name])

    # -- what a backend brings

    @abstractmethod
    def get(self, run_id: str) -> RunRow | None: ...

    @abstractmethod
    def by_key(self, idem_key: str) -> RunRow | None: ...

    @abstractmethod
    def add(self, row: RunRow) -> RunRow:
        """Store a new row, pending or claimed already; returns it with its `n`, greater than all before."""

    @abstractmethod
    def save(self, row: RunRow) -> None: ...

    @abstractmethod
    def drop(self, row: RunRow) -> None:
        """Delete the row and its mailbox."""

    @abstractmethod
    def make_due_ready(self, wall: float) -> Sequence[str]:
        """Make delayed and waiting rows whose `due_at` has come pending, with `due_at` 0; the lanes of those BEHIND.

        Where that would take long, those of the greatest priorities, and the others with the next claims.
        """

    @abstractmethod
    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        """Running rows with no origin, of the wanted agents, whose lease is over or whose holder is dead."""

    @abstractmethod
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        """Pending rows with no origin, of the wanted agents, that are due and not held.

        Greatest priority first, then smallest n.
        """

    @abstractmethod
    def active_in_group(self, lane: str) -> RunRow | None:
        """The live row of that lane that is not held."""

    @abstractmethod
    def next_in_group(self, lane: str) -> RunRow | None:
        """Of the rows of that lane that are BEHIND and due: the greatest priority, then the smallest n."""

    @abstractmethod
    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        """Rows with a lane and an origin, pending or running, not held, whose lease is over."""

    @abstractmethod
    def message_number(self, run_id: str, msg_id: str) -> int | None:
        """The seq of that message, if it is in the mailbox."""

    @abstractmethod
    def add_message(self, run_id: str, mail: MailboxMessage) -> None: ...

    def is_dead(self, holder: str) -> bool:
        """Whether that process is known to be gone."""
        return False

    def fence(self, run_id: str, token: str | None) -> None:
        self.tx.fence(run_id, token)

    def notify(self, topic: str) -> None:
        self.tx.notify(topic)

    # -- the operations

    def _save(self, row: RunRow) -> RunRow:
        self.save(row)
        self.notify("work" if row.status in LIVE else "done")
        if row.lane is not None and (row.held or row.status not in LIVE):
            self._release(row.lane)
        return row

    def _release(self, lane: str) -> None:
        """Let the next run of a lane go, if no other has the lane."""
        if self.active_in_group(lane) is None and (row := self.next_in_group(lane)) is not None:
            self.save(row.with_values(held=0))
            self.notify("work")

    def _enter_group(self, row: RunRow) -> RunRow:
        """A pending row as it comes into its lane."""
        if row.lane is None:
            return row
        if row.origin:
            return row.with_values(held=SET_ASIDE)
        return row.with_values(
            held=QUEUED_BEHIND if row.due_at > 0 or self.active_in_group(row.lane) is not None else 0
        )

    def _expect(self, run_id: str, statuses: Sequence[str]) -> RunRow:
        row = self.get(run_id)
        if row is None or row.status not in statuses:
            raise RowChanged
        return row

    def insert(self, row: RunRow) -> RunRow:
        """Store the row unless its id or key is there already; what is stored."""
        there = self._existing(row)
        if there is not None:
            return there
        self.notify("work")
        return self.add(self._enter_group(row))

    def _existing(self, row: RunRow) -> RunRow | None:
        there = self.get(row.run_id)
        return self.by_key(row.idem_key) if there is None and row.idem_key is not None else there

    def insert_applied(self, row: RunRow) -> RunRow:
        there = self._existing(row)
        if there is None:
            raise NotApplied
        return there

    def _claim(self, row: RunRow, ticket: str, want: ClaimRequest) -> RunRow:
        row = as_claimed(row, above(ticket, row.claim_id), want)
        if row.n == 0:  # not stored yet
            row = self.add(row)
        else:
            self.save(row)
        self.fence(row.run_id, row.claim_id)
        return row

    def claim(self, want: ClaimRequest) -> list[RunRow]:
        """Claim as many runs as there are tickets: first those whose holder let them fall."""
        found: list[RunRow] = []
        if not want.ready_only:
            for lane in self.make_due_ready(want.wall):
                self._release(lane)
            found = self.expired_leases(want, len(want.tickets))
            for row in self.abandoned_inline(want):
                self._set_aside(row, want)
        if len(found) < len(want.tickets):
            found = found + self.claimable(want, len(want.tickets) - len(found))
        return [self._claim(row, ticket, want) for row, ticket in zip(found, want.tickets, strict=False)]

    def claim_applied(self, want: ClaimRequest) -> list[RunRow]:
        # What it got is not known any more: its caller gives back whatever the tickets hold.
        return []

    def take(
        self, row: RunRow, insert: bool, reopen: bool, want: ClaimRequest, wait: bool = False
    ) -> tuple[str, RunRow | None]:
        """Claim that one run, storing it first if new.

        Answers ("claimed", "held", "ended", "conflict" or "unknown", the row), or "behind" and the row that has
        its lane; then nothing is written, unless it shall `wait`: it is stored, with a place in its lane.
        """
        there = self._existing(row) if insert else self.get(row.run_id)
        if there is None:
            if not insert:
                return ("unknown", None)
            mine = row
        elif there.run_id != row.run_id or (insert and row.digest != there.digest):
            return ("conflict", there)
        elif there.status == "running" and not self._has_ended(there, want):
            return ("held", there)
        elif there.status in LIVE:
            mine = there
        elif there.status == "succeeded" or not reopen:
            return ("ended", there)
        else:
            mine = as_reopened(there, want.wall).with_values(origin=row.origin)
        front = self._active_run(mine, want)
        if front is not None:
            if wait:
                mine = mine.with_values(
                    held=QUEUED_BEHIND, due_at=0.0, origin=mine.origin and row.origin, holder=want.holder,
                    lease_until=want.lease_now + INLINE_RESERVATION,
                )  # fmt: skip
                _ = self.add(mine) if there is None else self.save(mine)
            return ("behind", front)
        return ("claimed", self._claim(mine.with_values(origin=row.origin), want.tickets[0], want))

    def _has_ended(self, row: RunRow, want: ClaimRequest) -> bool:
        """Whether the lease of that row is over, or its holder dead."""
        return row.lease_until < want.lease_now or self.is_dead(row.holder)

    def _active_run(self, row: RunRow, want: ClaimRequest) -> RunRow | None:
        """The run that keeps `row` from its lane; one that its own process let fall does not."""
        while (
            row.lane is not None and (head := self.active_in_group(row.lane)) is not None and head.run_id != row.run_id
        ):
            if not head.origin or head.status == "waiting" or not self._has_ended(head, want):
                return head
            self._set_aside(head, want)
        return None

    def _set_aside(self, row: RunRow, want: ClaimRequest) -> None:
        if row.status == "running":
            self.fence(row.run_id, None)
        self._save(as_abandoned(row, want.wall))

    def settle(self, run_id: str, how: RunUpdate) -> RunRow:
        """Leave a claimed run as `how` says."""
        row = self._expect(run_id, ("running",))
        if row.claim_id != how.claim_id or 0 <= how.cursor != row.mail_seq:
            raise RowChanged
        if row.cancel_at is not None and how.status in ("waiting", "pending"):
            # Its next claim cancels it, so that is not put off; what waits is about to hear of it.
            if how.status == "waiting":
                raise RowChanged
            how = how._replace(due_at=0.0)
        row = as_updated(row, how)
        if how.status == "running":
            if how.renew:
                row = row.with_values(claim_id=above(how.renew, row.claim_id))
                self.fence(run_id, row.claim_id)
            self.save(row)
            return row
        self.fence(run_id, None)
        return self._save(self._enter_group(row) if row.status == "pending" and row.origin else row)

    def settle_applied(self, run_id: str, how: RunUpdate) -> RunRow:
        row = self.get(run_id)
        if row is None or (row.status, row.updated_at) != (how.status, how.now) or not _released_by(row, how):
            raise NotApplied
        return row

    def beat(self, claims: Sequence[tuple[str, str]], lease_until: float) -> list[tuple[bool, bool]]:
        """Extend the leases of (run_id, claim_id) pairs: for each (still held, and asked to cancel)."""
        answers = []
        for run_id, claim_id in claims:
            row = self.get(run_id)
            if row is not None and row.status == "running" and row.claim_id == claim_id:
                self.save(row.with_values(lease_until=lease_until))
                answers.append((True, row.cancel_at is not None))
            else:
                answers.append((False, False))
        return answers

    def post(self, run_id: str, mail: MailboxMessage) -> tuple[str, int]:
        """Put a message into a live run's mailbox and wake it: (its status before, the message's seq or 0)."""
        row = self.get(run_id)
        if row is None:
            return ("unknown", 0)
        seq = self.message_number(run_id, mail.msg_id)
        if seq is not None or row.status not in LIVE:
            return (row.status, seq or 0)
        seq = row.mail_seq + 1
        self.add_message(run_id, mail._replace(seq=seq))
        after = row.with_values(mail_seq=seq)
        if mail.kind == "cancel" and row.cancel_at is None:
            # No later claim runs its code: any worker may end it, should its own process be gone or let go of it.
            after = after.with_values(cancel_at=mail.t, origin="")
            if after.held == SET_ASIDE:
                after = self._enter_group(after)
        if row.status == "waiting":
            after = after.with_values(status="pending", due_at=0.0)
        self._save(after)
        self.notify("mail")
        return (row.status, seq)

    def post_applied(self, run_id: str, mail: MailboxMessage) -> tuple[str, int]:
        row, seq = self.get(run_id), self.message_number(run_id, mail.msg_id)
        if row is not None and row.status in LIVE and seq is None:
            raise NotApplied
        return ("unknown" if row is None else row.status, seq or 0)

    def end(self, run_id: str, expect: Sequence[str], status: str, now: float, reason: str) -> RunRow:
        """End a run that nobody holds."""
        row = self._expect(run_id, expect)
        self.fence(run_id, None)
        self.notify("mail")
        return self._save(
            row.with_values(status=status, held=0, due_at=0.0, reason=reason, ended_at=now, updated_at=now)
        )

    def reopen(self, run_id: str, expect: Sequence[str], now: float) -> RunRow:
        """Make an ended run pending in a new generation."""
        return self._save(self._enter_group(as_reopened(self._expect(run_id, expect), now).with_values(origin="")))

    def delete(self, run_id: str, generation: int, n: int) -> None:
        """Forget the run that has ended in this generation; RowChanged if it lives or is another by now."""
        row = self.get(run_id)
        if row is None:
            return
        if row.status in LIVE or (row.generation, row.n) != (generation, n):
            raise RowChanged
        self.drop(row)
        self.fence(run_id, None)


def _released_by(row: RunRow, how: RunUpdate) -> bool:
    """Whether the row's claim is the one of `how`, or what that went on as."""
    return row.claim_id == (above(how.renew, how.claim_id) if how.renew else how.claim_id)


OPS = ("insert", "claim", "take", "settle", "beat", "post", "end", "reopen", "delete")


def operations(rows: Callable[[Any], RunTransitions]) -> Mapping[str, Callable[..., Any]]:
    """The queue's operations over a kind of row store, by name: each takes the transaction and its arguments."""
    return {f"queue.{verb}": _bound(rows, verb) for verb in OPS}


def replays(rows: Callable[[Any], RunTransitions]) -> Mapping[str, Callable[..., Any]]:
    """What answers for operations that a superseded claim has applied before, by name; each may raise NotApplied."""
    return {f"queue.{verb}": _bound(rows, f"{verb}_applied") for verb in ("insert", "claim", "settle", "post")}


def _bound(rows: Callable[[Any], RunTransitions], method: str) -> Callable[..., Any]:
    def run(tx: Any, *args: Any) -> Any:
        return getattr(rows(tx), method)(*args)

    return run


def operation_set(
    rows: Callable[[Any], RunTransitions], migrations: Sequence[str] = (), tables: Sequence[str] = (),
    fence: Callable[[Any, str], str | None] | None = None,
) -> OperationSet:  # fmt: skip
    lengthy = {"queue.delete": always}
    return OperationSet("queue", operations(rows), replays(rows), migrations, tables, slow=lengthy, fence=fence)
