"""The records that the steps of one claim write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .._core.codec.json import encode
from .._journal.record import DONE, STARTED, Record, start_events, with_start_info
from .claim_writer import ClaimWriter


class CompletedStep(Protocol):
    """What a DONE record takes from the step it is of."""

    name: str
    key: str
    position: int
    total: int
    info: str | None
    digest: str | None
    no_events: bool
    start_record: Record | None  # its start, which may still wait to be written

    @property
    def policy(self) -> Any: ...


class RecordFactory:
    """Builds the journal records of one claim and numbers them."""

    def __init__(self, ledger: ClaimWriter) -> None:
        self.ledger = ledger
        self.wall: Callable[[], float] = ledger.clock.wall
        self.position: int = 0

    def next_position(self) -> int:
        """The place of the next imperative step among those of the run."""
        self.position += 1
        return self.position

    def started_record(
        self, name: str, key: str, *, attempt: int = 1, pos: int = 0, total: int = 0, tries: int = 1,
        info: dict[str, Any] | None = None, digest: str | None = None, quiet: bool = False, state: str | None = None,
    ) -> Record:  # fmt: skip
        ledger, nev = self.ledger, 0 if quiet else start_events(total)
        # As a NamedTuple itself makes one, only faster.
        record: Record = tuple.__new__(
            Record,
            (
                ledger.next_seq(), STARTED, name, key, attempt, ledger.claim_id, self.wall(), None, None, state, pos,
                total, tries, 0, encode(info) if info else None, None, digest, -1, nev,
            ),
        )  # fmt: skip
        return record

    def completed_record(
        self, work: CompletedStep, result: str | None, attempt: int = 1, ms: int = 0, *, state: str | None = None,
        next: str | None = None,
    ) -> Record:  # fmt: skip
        """The DONE record of a step."""
        ledger, total, info = self.ledger, work.total, work.info
        nev = 0 if work.no_events else 1 if next is None else 3 if total else 2
        start = work.start_record
        # Its events get this record's time: not where that is far from the truth.
        if start is not None and start.nev and ms <= ledger.max_delay * 1000 and ledger.withdraw(start):
            info = with_start_info(info, start)
            nev += start.nev
        # As a NamedTuple itself makes one, only faster.
        record: Record = tuple.__new__(
            Record,
            (
                ledger.next_seq(), DONE, work.name, work.key, attempt, ledger.claim_id, self.wall(), result, None,
                state, work.position, total, work.policy.retries + 1, ms, info, next, work.digest, -1, nev,
            ),
        )  # fmt: skip
        return record

    def completion(self, work: CompletedStep, text: str, attempt: int, ms: int) -> tuple[Record]:
        """All there is to write when a step has ended: its DONE record."""
        return (self.completed_record(work, text, attempt, ms),)

    def failed_record(
        self, kind: str, name: str, key: str, *, attempt: int, pos: int, total: int, tries: int, info: dict[str, Any],
        quiet: bool = False,
    ) -> Record:  # fmt: skip
        """A RETRYING or FAILED record."""
        return Record(
            self.ledger.next_seq(), kind, name, key, attempt, self.ledger.claim_id, self.wall(),
            pos=pos, total=total, tries=tries, info=encode(info), nev=0 if quiet else 1,
        )  # fmt: skip

    def boundary_record(
        self, kind: str, name: str = "", key: str = "", *, attempt: int = 0, nev: int = 0, total: int = 0,
        info: dict[str, Any] | None = None,
    ) -> Record:  # fmt: skip
        """A record of the run itself."""
        return Record(
            self.ledger.next_seq(), kind, name, key, attempt, self.ledger.claim_id, self.wall(), total=total,
            info=encode(info) if info else None, nev=nev,
        )  # fmt: skip

    def renumbered(self, records: Sequence[Record]) -> Sequence[Record]:
        """The same records in new places, behind all others."""
        next_seq = self.ledger.next_seq
        return [each._replace(seq=next_seq()) for each in records]
