"""What a claim writes without waiting for it, and the places of its records in the journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import cast

from .._core.clock import Clock
from .._engines.base import Committer, Engine, Guard, Op
from .._journal.record import ATTEMPT, RESUMED, Record, with_beginning
from ..errors import StorageClosed


def records_of(ops: Sequence[Op]) -> list[Record]:
    return [op.args[1] for op in ops if op.name == "journal.append"]


class WriteBuffer:
    """Writes that wait for a commit to travel with: a flush of their own would hold up the next one."""

    def __init__(self, run_id: str, claim_id: str, state: Committer, clock: Clock, linger: float) -> None:
        self.run_id: str = run_id
        self.claim_id: str = claim_id
        self.clock: Clock = clock
        self.guard: Guard = Guard(run_id, claim_id)
        #: Notes wait this long, in seconds, before they are written by themselves; 0 where none waits.
        self.max_delay: float = linger
        self._state = state
        self._buffered: list[Op] = []
        self._timer: asyncio.TimerHandle | None = None  # writes the notes by themselves
        self._seq = 0  # the place of the next record

    def next_seq(self) -> int:
        seq = self._seq
        self._seq = seq + 1
        return seq

    def is_newest(self, records: Sequence[Record]) -> bool:
        """Whether no record has a place after these: a repeat would land behind it, out of its order."""
        return not records or max(record.seq for record in records) + 1 == self._seq

    def _schedule_flush(self, ops: Sequence[Op]) -> None:
        self._buffered += ops
        if self._timer is None:
            self._timer = self.clock.call_later(self.max_delay, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._buffered:
            notes, self._buffered = self._buffered, []
            with contextlib.suppress(StorageClosed):
                cast(Engine, self._state).commit_nowait(self.guard, notes)

    def _requeue(self, notes: Sequence[Op], seq: int) -> None:
        """Have notes wait again: the commit that they went with was refused, and the run goes on."""
        if self._seq != seq:  # behind what was written since
            notes = [
                Op(op.name, (self.run_id, op.args[1]._replace(seq=self.next_seq())))
                if op.name == "journal.append" else op
                for op in notes
            ]  # fmt: skip
        later, self._buffered = self._buffered, [*notes]
        self._schedule_flush(later)

    def withdraw(self, record: Record) -> bool:
        """Leave out a record that was noted, if it still waits: another one will stand for it."""
        notes = self._buffered
        for place in range(len(notes) - 1, -1, -1):
            op = notes[place]
            if op.name == "journal.append" and op.args[1] is record:
                del notes[place]
                if record.seq + 1 == self._seq:
                    self._seq = record.seq
                return True
        return False

    def merge_begin_and_end(self, end: Record) -> Record:
        """The end of an attempt, standing for its beginning as well where that still waits: nothing came between."""
        notes = self._buffered
        if len(notes) != 2 or notes[0].name != "journal.append" or notes[1].name != "state.status":
            return end
        began: Record = notes[0].args[1]
        # Its event gets this record's time: not where that is far from the truth.
        if began.kind not in (ATTEMPT, RESUMED) or end.t - began.t > self.max_delay:
            return end
        if self._seq != end.seq + 1 or end.seq != began.seq + 1:
            return end
        del notes[0]
        self._seq = end.seq
        return with_beginning(end, began)
