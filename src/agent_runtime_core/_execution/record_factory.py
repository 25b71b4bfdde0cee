"""Journal records of the steps of one claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .._core.codec.json import encode
from .._journal.record import DONE, STARTED, Record, start_events, with_start_info
from .run_writer import StepWriter


class CompletedStep(Protocol):
    """What a DONE record takes from its step."""

    name: str
    key: str
    position: int
    total: int
    info: str | None
    digest: str | None
    no_events: bool
    start_record: Record | None  # the record of its start, which may still be buffered

    @property
    def options(self) -> Any: ...


class RecordFactory:
    """Builds journal records, and numbers them.

    Attributes:
        position: The position of the last imperative step, child run or wait, counted over the run.
        wall: Returns the wall time in seconds.
    """

    def __init__(self, writer: StepWriter) -> None:
        self.position: int = 0
        self.wall: Callable[[], float] = writer.clock.wall
        self._writer = writer
        self._next_seq, self._claim_id = writer.next_seq, writer.claim_id

    def next_position(self) -> int:
        """Return the position of the next imperative step, child run or wait."""
        self.position += 1
        return self.position

    def started(
        self, name: str, key: str, *, attempt: int = 1, pos: int = 0, total: int = 0, tries: int = 1,
        info: dict[str, Any] | None = None, digest: str | None = None, quiet: bool = False, state: str | None = None,
    ) -> Record:  # fmt: skip
        """Return a STARTED record; a `quiet` one has no events."""
        events = 0 if quiet else start_events(total)
        # Does what the constructor of a NamedTuple does, but faster.
        record: Record = tuple.__new__(
            Record,
            (
                self._next_seq(), STARTED, name, key, attempt, self._claim_id, self.wall(), None, None, state, pos,
                total, tries, 0, encode(info) if info else None, None, digest, -1, events,
            ),
        )  # fmt: skip
        return record

    def completed(
        self, step: CompletedStep, result: str | None, attempt: int = 1, ms: int = 0, *, state: str | None = None,
        next: str | None = None,
    ) -> Record:  # fmt: skip
        """Return the DONE record of a step.

        If the record of the step's start is still in the write buffer, this removes it, and the DONE record stands for
        both.

        Args:
            step: The step.
            result: Its encoded result.
            attempt: The number of the attempt that succeeded.
            ms: The duration of that attempt in milliseconds.
            state: The encoded state of its list, if the step has changed it.
            next: The start of the step after it, encoded, if this record contains it.
        """
        writer, total, info = self._writer, step.total, step.info
        events = 0 if step.no_events else 1 if next is None else 3 if total else 2
        start = step.start_record
        # The events of a start in this record get the time of this record, which must not be far off.
        if start is not None and start.nev and ms <= writer.max_delay * 1000 and writer.withdraw(start):
            info = with_start_info(info, start)
            events += start.nev
        # Does what the constructor of a NamedTuple does, but faster.
        record: Record = tuple.__new__(
            Record,
            (
                self._next_seq(), DONE, step.name, step.key, attempt, self._claim_id, self.wall(), result, None,
                state, step.position, total, step.options.retries + 1, ms, info, next, step.digest, -1, events,
            ),
        )  # fmt: skip
        return record

    def completion(self, step: CompletedStep, text: str, attempt: int, ms: int) -> tuple[Record]:
        """Return the records to write at the end of a step: only its DONE record."""
        return (self.completed(step, text, attempt, ms),)

    def value(
        self, name: str, key: str, result: str | None, info: str | None, digest: str | None, pos: int = 0
    ) -> Record:
        """Return a DONE record without events: of a wait, a child run or a recorded value."""
        return Record(
            self._next_seq(), DONE, name, key, 1, self._claim_id, self.wall(), result, pos=pos, info=info, digest=digest
        )

    def failed(
        self, kind: str, name: str, key: str, *, attempt: int, pos: int, total: int, tries: int, info: dict[str, Any],
        quiet: bool = False,
    ) -> Record:  # fmt: skip
        """Return a RETRYING or FAILED record; a `quiet` one has no events."""
        return Record(
            self._next_seq(), kind, name, key, attempt, self._claim_id, self.wall(),
            pos=pos, total=total, tries=tries, info=encode(info), nev=0 if quiet else 1,
        )  # fmt: skip

    def boundary(
        self, kind: str, name: str = "", key: str = "", *, attempt: int = 0, nev: int = 0, total: int = 0,
        info: dict[str, Any] | None = None,
    ) -> Record:  # fmt: skip
        """Return a record of the run itself, which has `nev` events."""
        return Record(
            self._next_seq(), kind, name, key, attempt, self._claim_id, self.wall(), total=total,
            info=encode(info) if info else None, nev=nev,
        )  # fmt: skip

    def renumbered(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return the same records with new numbers, higher than all earlier ones."""
        next_seq = self._next_seq
        return [each._replace(seq=next_seq()) for each in records]
