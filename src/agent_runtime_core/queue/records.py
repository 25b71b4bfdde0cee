"""What a queue moves: the row of a run, a message of its mailbox, and what changes a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .._core.codec.json import same_tree
from .._core.former_names import keep_former_names
from ..errors import IdempotencyConflict, StorageCorrupt, UnserialisableResult, brief

LIVE = ("pending", "running", "waiting")
QUEUED_BEHIND, SET_ASIDE = 1, 2  # see RunRow.held
LIMITS = "limits"  # the kind of a mailbox message that sets limits of its run
CANCELLED_BY_CALLER = "cancel"  # the reason of a run that was cancelled under no claim


class RowChanged(Exception):
    """The row is no longer as the writer saw it; nothing was written: look again and decide anew."""

    def __str__(self) -> str:
        return super().__str__() or "the row is not as its writer saw it; nothing was written: look, and decide anew"


_Made = TypeVar("_Made")


class RunRow(NamedTuple):
    """A run as its queue knows it. Times are wall seconds, but for `lease_until`, which is the engine's lease clock."""

    run_id: str
    agent: str
    input: str = "{}"
    digest: str = ""  # of agent and input: what an idempotency key must agree with
    metadata: str = "{}"
    priority: int = 0
    created_at: float = 0.0
    due_at: float = 0.0  # 0: now; else a delayed or waiting run becomes ready then
    expires_at: float | None = None
    deadline: float | None = None
    run_key: str | None = None
    idem_key: str | None = None
    parent_id: str | None = None
    lane: str | None = None  # the concurrency key: of its live runs one at a time is not held
    origin: str = ""  # "inline": only its own process or an explicit call may take it
    held: int = 0  # pending, and BEHIND the one that has its lane, or ASIDE: inline, and nobody waits to go on with it
    status: str = "pending"
    generation: int = 1
    failures: int = 0
    crashes: int = 0
    stalls: int = 0  # crashes in a row
    mark: int = -1  # steps recorded at the last look of a claim; -1: none, and no claim has ended it
    parked: int = 0  # it waited since it was last claimed
    reason: str = ""  # what it waits for, or why it ended
    claim_id: str = ""  # the last claim, current while running
    worker: str = ""
    holder: str = ""
    lease_until: float = 0.0
    claimed_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    updated_at: float = 0.0
    cancel_at: float | None = None
    output: str | None = None
    error: str | None = None
    mail_seq: int = 0
    n: int = 0  # order of arrival, set by the store

    @property
    def attempt(self) -> int:
        return 1 + self.failures + self.crashes

    def with_values(self, **values: Any) -> RunRow:
        """The row with other values; `_replace` looks at all of its fields by name."""
        cells = list(self)
        for name, value in values.items():
            cells[_PLACE[name]] = value
        return tuple.__new__(RunRow, cells)

    def decoded(self, column: str, made: Callable[[Any], _Made]) -> _Made:
        """What is made of that column; StorageCorrupt, which names run and column, where it cannot be."""
        value = self[_PLACE[column]]
        try:
            return made(value)
        except UnserialisableResult:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise damaged(self.run_id, column, value) from error


_PLACE = {name: place for place, name in enumerate(RunRow._fields)}


def damaged(run_id: object, column: str, value: object) -> StorageCorrupt:
    """That a column holds what was never written there."""
    return StorageCorrupt(
        f"run {brief(run_id)}: {column} {brief(value)} is not what was written; it is left as it is: restore a backup"
    )


class RunFilter(NamedTuple):
    """Which rows to list, in order of arrival; `after` is the n of the last one seen."""

    statuses: tuple[str, ...] | None = None
    agent: str | None = None
    since: float = 0.0  # created at or after, wall seconds
    ended_before: float | None = None
    after: int = 0
    limit: int = 1000

    def admits(self, row: RunRow) -> bool:
        return (
            (self.statuses is None or row.status in self.statuses)
            and (self.agent is None or row.agent == self.agent)
            and row.created_at >= self.since
            and (self.ended_before is None or (row.ended_at is not None and row.ended_at < self.ended_before))
            and row.n > self.after
        )


class RunSnapshot(NamedTuple):
    """What a holder or a waiter watches of a run."""

    status: str
    claim_id: str
    mail_seq: int
    cancelled: bool


class ClaimRequest(NamedTuple):
    """One ticket (a fresh ULID) per run wanted; a run's claim id is its ticket, lifted above its last claim."""

    tickets: tuple[str, ...]
    worker: str
    holder: str
    lease_until: float
    lease_now: float
    wall: float
    agents: tuple[str, ...] | None
    ready_only: bool = False  # ready runs only: no look at expired leases and timers
    wait_name: str | None = None  # where it gets nothing, it stands under this name, as far as a queue has such claims,
    wait_seconds: float = 0.0  # for so long; what stood under that name before is over


class RunUpdate(NamedTuple):
    """How a claim leaves its run. `cursor` >= 0: refuse (RowChanged) if the mailbox has moved past it.

    A run that was asked to cancel does not become waiting (RowChanged), and is pending without delay. With `renew`,
    a ticket, one that stays running goes on under a new claim id, and all that the old one asked for is refused.
    """

    claim_id: str
    status: str
    now: float
    due_at: float = 0.0
    parked: int = 0
    reason: str = ""
    failures: int = 0
    crashes: int = 0
    stalls: int = 0
    mark: int = -1
    output: str | None = None
    error: str | None = None
    cursor: int = -1
    renew: str = ""


class MailboxMessage(NamedTuple):
    """A message for a run: kind is signal, child, cancel or limits; `msg_id` makes a repeat harmless."""

    kind: str
    name: str
    payload: str
    msg_id: str
    t: float
    seq: int = 0  # 1, 2, … per run, set by the store


keep_former_names(RunRow, changed="with_values", told="decoded")
keep_former_names(ClaimRequest, light="ready_only", seconds="wait_seconds", standing="wait_name")


def as_claimed(row: RunRow, ticket: str, want: ClaimRequest) -> RunRow:
    """The row under a new claim; taking it from a holder that never let go counts as a crash, here and at once."""
    crash = 1 if row.status == "running" else 0
    return row.with_values(
        status="running",
        claim_id=ticket,
        worker=want.worker,
        holder=want.holder,
        lease_until=want.lease_until,
        claimed_at=want.wall,
        started_at=row.started_at or want.wall,
        updated_at=want.wall,
        due_at=0.0,
        held=0,
        crashes=row.crashes + crash,
        stalls=row.stalls + crash,
        parked=0 if crash else row.parked,
    )


def as_reopened(row: RunRow, now: float) -> RunRow:
    """The row in a new generation: counters reset, what ended it forgotten."""
    return row.with_values(
        status="pending", generation=row.generation + 1, failures=0, crashes=0, stalls=0, mark=-1, parked=0,
        reason="", ended_at=None, expires_at=None, cancel_at=None, output=None, error=None, due_at=0.0, updated_at=now,
    )  # fmt: skip


def as_abandoned(row: RunRow, now: float) -> RunRow:
    """The row of an inline run that its process let fall, out of the way of its lane until somebody takes it again."""
    crash = 1 if row.status == "running" else 0
    return row.with_values(
        status="pending", held=SET_ASIDE, lease_until=0.0, updated_at=now, crashes=row.crashes + crash,
        stalls=row.stalls + crash, parked=0 if crash else row.parked,
    )  # fmt: skip


def as_updated(row: RunRow, how: RunUpdate) -> RunRow:
    ended = how.now if how.status not in LIVE else None
    return row.with_values(
        status=how.status, due_at=how.due_at, parked=how.parked, reason=how.reason, failures=how.failures,
        crashes=how.crashes, stalls=how.stalls, mark=how.mark, output=how.output, error=how.error,
        ended_at=ended, updated_at=how.now, lease_until=row.lease_until if how.status == "running" else 0.0,
    )  # fmt: skip


def same_run(asked: RunRow, stored: RunRow) -> None:
    """Refuse a stored run of another agent or input under the same id or key, or of another key under that id."""
    from_key = asked.run_id != stored.run_id
    if not same_input(asked, stored):
        differs = (
            f"agent {stored.agent!r}, now {asked.agent!r}"
            if asked.agent != stored.agent
            else f"input {stored.input:.80}, now {asked.input:.80}"
        )
    elif asked.idem_key not in (None, stored.idem_key) and not from_key:
        # The key would stand for nothing: whoever came with it alone would get another run.
        differs = f"idempotency key {stored.idem_key!r}, now {asked.idem_key!r}"
    else:
        return
    what = f"idempotency key {asked.idem_key!r}" if from_key else f"run id {asked.run_key or asked.run_id}"
    raise IdempotencyConflict(f"{what} was used before with {differs}; use another one for another run")


def same_input(asked: RunRow, stored: RunRow) -> bool:
    """Whether two runs are of one agent and one input; the order of its keys is none of it, but part of the digest."""
    if asked.digest == stored.digest:
        return True
    return asked.agent == stored.agent and same_tree(asked.input, stored.input)
