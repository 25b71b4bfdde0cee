"""The writer of a run that has succeeded: its journal can be read, and nothing can be added."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, Final, NoReturn

from .._core.clock import Clock
from .._engines.base import Op
from .._journal.record import STARTED, Record
from ..errors import IllegalTransition
from ..events.base import EventBus
from ..queue.base import RunQueue
from ..queue.records import RunRow, RunUpdate
from ..state.base import EffectRow, StateStore
from .run_writer import ChildCall, Row, UnconfirmedWrite


class ReadOnlyWriter:
    """Answers from the journal. Every write raises IllegalTransition, except those that a replay repeats.

    Events, checkpoints, and records of skipped steps are ignored: the replayed code writes them again.
    """

    has_journal: Final = True
    earlier: Final[dict[str, Any]] = {}
    max_delay: Final = 0.0
    redaction: Final = None

    def __init__(self, row: RunRow, queue: RunQueue, bus: EventBus, state: StateStore, clock: Clock) -> None:
        self.run_id: str = row.run_id
        self._name = row.run_key or row.run_id  # as the caller named the run
        self.claim_id: str = row.claim_id
        self.parent_id: str | None = None  # to join the lineage of a child would be a write
        self.arrival: int = row.arrival
        self.input: str = row.input
        self.call: ChildCall | None = None
        self.queue: RunQueue = queue
        self.bus: EventBus = bus
        self.state: StateStore = state
        self.clock: Clock = clock
        self.unconfirmed: list[UnconfirmedWrite] = []
        self.effects: dict[tuple[str, ...], EffectRow] = {}
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

    async def status(self, status: str, *records: Record) -> NoReturn:
        raise self.closed_error(status)

    async def update_run(
        self, how: RunUpdate, records: Sequence[Record] = (), ops: Sequence[Op] = (), *, events: Sequence[Op] = ()
    ) -> NoReturn:
        raise self.closed_error(how.status)
