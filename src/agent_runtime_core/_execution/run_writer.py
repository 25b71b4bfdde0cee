"""Interfaces of the objects that write for the steps and the context of a run, and the writer that writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, Final, NamedTuple, NoReturn, Protocol

from .._core.clock import Clock
from .._core.codec.json import encode
from .._core.redaction import Redaction
from .._engines.base import Op
from .._journal.record import STARTED, Record
from ..errors import IllegalTransition, StorageBusy
from ..events.base import EventBus
from ..queue.base import RunQueue
from ..queue.records import RunRow, RunUpdate
from ..state.base import CALLED, EffectRow, StateStore

#: After these errors a commit may or may not have been applied.
OUTCOME_UNKNOWN: Final = (StorageBusy, asyncio.CancelledError)

Row = tuple[str, str, str, float]  # an event to publish: its id, type, encoded payload and wall time


class UnconfirmedWrite(NamedTuple):
    """Records whose commit ended with an unknown outcome."""

    records: Sequence[Record]
    reported: bool = False  # `on_events` received their events when they were buffered
    repeatable: bool = True  # `records` is all that the commit contained, so it can be written again


class ChildCall(NamedTuple):
    """The call of a child run whose caller passed no key.

    Attributes:
        caller: The run that called it.
        origin: The first run of the lineage of the caller.
        names: The names of the call: the name in the journal of the caller first.
        input: A digest of the input.
        copied: The lineages of children whose results were copied to the caller.
        lineage: The lineage of the child: the first run that was called in this position.
    """

    caller: str
    origin: str
    names: list[str]
    input: str
    copied: set[str]
    lineage: str

    def key(self, name: str, effect: EffectRow) -> str:
        """Return the key under which calls of that name have their rows of this effect."""
        return f"{name}\t{effect.key}"

    def row(self, effect: EffectRow, t: float) -> EffectRow:
        """Return the row by which other calls find this effect. It is in the lineage of the caller."""
        about = encode([effect.origin, self.caller, self.input, self.lineage])
        key = self.key(self.names[0], effect)
        return EffectRow(self.origin, key, effect.digest, effect.run_id, CALLED, about, t, effect.arrival)


class StepWriter(Protocol):
    """Writes the records of steps: to the journal of a run, or to the checkpoint of another context."""

    @property
    def has_journal(self) -> bool:
        """Whether the starts of steps are stored."""

    @property
    def earlier(self) -> dict[str, Any]:
        """Results of other lists that the steps of a list can read."""

    @property
    def redaction(self) -> Redaction | None:
        """Redacts what is recorded; None without `redact_stored`."""

    @property
    def run_id(self) -> str: ...

    @property
    def claim_id(self) -> str: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def max_delay(self) -> float:
        """Seconds that a buffered record may wait for a commit; 0 if none waits."""

    @property
    def outlast(self) -> Callable[[float], Awaitable[bool]] | None:
        """Waits during an outage before a commit is repeated; None if an outage is raised."""

    @property
    def closed_error(self) -> Callable[[str], Exception] | None:
        """Why the step of that name must not start; None if steps may start."""

    @property
    def unconfirmed(self) -> list[UnconfirmedWrite]:
        """The unconfirmed writes, oldest first. It is always the same list."""

    @property
    def next_seq(self) -> Callable[[], int]:
        """Returns the number of the next record."""

    def is_newest(self, records: Sequence[Record], /) -> bool:
        """Whether these are the highest numbers, so that writing these records again keeps the order of the journal."""

    def withdraw(self, record: Record, /) -> bool:
        """Remove a buffered record that was not committed yet; whether it was."""

    def watched(self, call: Callable[[int], Awaitable[Any]], /) -> Callable[[int], Awaitable[Any]]:
        """Return `call`, made to end when the run is cancelled."""

    def record(self, records: Sequence[Record], /) -> Awaitable[Any]:
        """Make the ends of steps durable."""

    async def append(self, *records: Record, queue: Sequence[Op] = (), reported: bool = False) -> Any:
        """Make records durable, in one commit with these operations of the queue if one engine stores both."""

    async def buffer(self, *records: Record) -> None:
        """Write records with the next commit, without waiting for it."""

    async def publish_events(self, *records: Record) -> None:
        """Publish the events of records that are in the journal already."""

    async def confirm_record(self, record: Record, /) -> Record | None:
        """Return the record in the journal; None if it is not there and cannot land later."""


class RunWriter(StepWriter, Protocol):
    """Writes for one claim on a run; `open` it before the first read."""

    @property
    def queue(self) -> RunQueue: ...

    @property
    def bus(self) -> EventBus: ...

    @property
    def state(self) -> StateStore: ...

    @property
    def effects(self) -> dict[tuple[str, ...], EffectRow]:
        """Rows of the guarded steps that this claim started, and of approvals, by the identity of their records."""

    @property
    def reservations(self) -> dict[tuple[str, str], list[str]]:
        """The pools in which calls have open reservations, by the identity of their steps."""

    async def with_next_record(self, identity: tuple[str, str], ops: list[Op], /) -> None:
        """Have operations of the queue committed with the next end of a step, which closes its reservations."""

    async def later(self, op: Op, /) -> None:
        """Write an operation of the queue with the next commit, without waiting for it."""

    parent_id: str | None
    caller_id: str | None
    mail_seq: int
    arrival: int
    call: ChildCall | None

    @property
    def input(self) -> str:
        """The input of the run, as JSON."""

    async def open(self, *, fresh: bool = False) -> list[Record]:
        """Prepare the engines for this claim, and return the records of the journal."""

    async def write(
        self, state: Sequence[Op] = (), events: Sequence[Op] = (), queue: Sequence[Op] = ()
    ) -> list[list[Any]]:
        """Commit operations of the three stores. Returns their results in that order."""

    async def emit(self, rows: Sequence[Row], /) -> list[int]:
        """Publish events. Returns their sequence numbers when they are durable."""

    def count_mail(self, receive: Callable[[int], None], /) -> None:
        """Have `receive` called with the number of messages in the run's mailbox when the end of a step is written."""

    async def ask(self, row: Row, name: str, request_id: str, /) -> int:
        """Publish a question to a person and post it to the run's mailbox. Returns its number there."""

    async def checkpoint(self, text: str, mark: str, row: Row, /) -> None:
        """Save a checkpoint and publish its event."""

    async def status(self, status: str, *records: Record) -> None:
        """Write the status of the run, and records that belong to it, without waiting for the commit."""

    async def transact(self, fn: Any, args: tuple[Any, ...], record: Record, seal: Any, /) -> str | None:
        """Run `fn` inside the commit that also writes its record. Returns the recorded result."""

    async def update_run(
        self, how: RunUpdate, records: Sequence[Record] = (), ops: Sequence[Op] = (), *, events: Sequence[Op] = ()
    ) -> list[Any]:
        """Update the row of the run, together with these records and operations."""


# -- the writer of a succeeded run


class ReadOnlyWriter:
    """Answers from the journal. Every write raises IllegalTransition, except those that a replay repeats.

    Events, checkpoints, and records of skipped steps are ignored: the replayed code writes them again.
    """

    has_journal: Final = True
    earlier: Final[dict[str, Any]] = {}
    max_delay: Final = 0.0
    redaction: Final = None
    outlast: Final = None

    def __init__(self, row: RunRow, queue: RunQueue, bus: EventBus, state: StateStore, clock: Clock) -> None:
        self.run_id: str = row.run_id
        self._name = row.run_key or row.run_id  # as the caller named the run
        self.claim_id: str = row.claim_id
        self.parent_id: str | None = None  # to join the lineage of a child would be a write
        self.arrival: int = row.arrival
        self.mail_seq: int = row.mail_seq
        self.caller_id: str | None = row.parent_id
        self.input: str = row.input
        self.call: ChildCall | None = None
        self.queue: RunQueue = queue
        self.bus: EventBus = bus
        self.state: StateStore = state
        self.clock: Clock = clock
        self.unconfirmed: list[UnconfirmedWrite] = []
        self.effects: dict[tuple[str, ...], EffectRow] = {}
        self.reservations: dict[tuple[str, str], list[str]] = {}
        self.next_seq: Callable[[], int] = count().__next__

    async def open(self, *, fresh: bool = False) -> list[Record]:
        """Return the records of the journal."""
        return await self.state.records(self.run_id)

    def closed_error(self, name: str) -> IllegalTransition:
        """Return the error of a write that is named `name`."""
        return IllegalTransition(
            f"run {self._name!r} has succeeded, so {name!r} cannot be added to it. Use another run_id"
        )

    def is_newest(self, records: Sequence[Record]) -> bool:
        return True

    def withdraw(self, record: Record) -> bool:
        return False

    def watched(self, call: Callable[[int], Awaitable[Any]]) -> Callable[[int], Awaitable[Any]]:
        return call

    def count_mail(self, receive: Callable[[int], None]) -> None:
        return

    # -- what a replay repeats

    async def buffer(self, *records: Record) -> None:
        for record in records:
            if record.kind == STARTED:  # of a wait, or a child
                raise self.closed_error(record.name)

    async def emit(self, rows: Sequence[Row]) -> list[int]:
        return [0 for _ in rows]

    async def ask(self, row: Row, name: str, request_id: str) -> int:
        return 0

    async def checkpoint(self, text: str, mark: str, row: Row) -> None:
        return

    # -- what would add to the run

    def record(self, records: Sequence[Record]) -> Awaitable[Any]:
        return self.append(*records)

    async def append(self, *records: Record, queue: Sequence[Op] = (), reported: bool = False) -> NoReturn:
        raise self.closed_error(records[0].name)

    async def publish_events(self, *records: Record) -> NoReturn:
        raise self.closed_error(records[0].name)

    async def confirm_record(self, record: Record) -> NoReturn:
        raise self.closed_error(record.name)

    async def transact(self, fn: Any, args: tuple[Any, ...], record: Record, seal: Any) -> NoReturn:
        raise self.closed_error(record.name)

    async def write(self, state: Sequence[Op] = (), events: Sequence[Op] = (), queue: Sequence[Op] = ()) -> NoReturn:
        raise self.closed_error(next(iter((*state, *events, *queue))).name)

    async def with_next_record(self, identity: tuple[str, str], ops: list[Op]) -> NoReturn:
        raise self.closed_error(identity[0])

    async def later(self, op: Op) -> NoReturn:
        raise self.closed_error(op.name)

    async def status(self, status: str, *records: Record) -> NoReturn:
        raise self.closed_error(status)

    async def update_run(
        self, how: RunUpdate, records: Sequence[Record] = (), ops: Sequence[Op] = (), *, events: Sequence[Op] = ()
    ) -> NoReturn:
        raise self.closed_error(how.status)
