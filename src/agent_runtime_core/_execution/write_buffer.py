"""Buffered writes of one claim, and the numbers of its records."""

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
    """Return the records that these operations append."""
    return [op.args[1] for op in ops if op.name == "journal.append"]


class WriteBuffer:
    """Operations that are written with the next commit of the claim, or by a timer.

    A commit of their own would delay the commit after it.

    Attributes:
        guard: The guard of the writes.
        max_delay: Seconds until the timer writes the operations; 0 if none are buffered.
        ops: The buffered operations, oldest first.
    """

    def __init__(self, guard: Guard, state: Committer, clock: Clock, max_delay: float) -> None:
        self.guard: Guard = guard
        self.max_delay: float = max_delay
        self.ops: list[Op] = []
        self._state = state
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._next_seq = 0
        self._merged: Record | None = None  # the beginning of an attempt that `merge_begin_and_end` has removed

    # -- the numbers of records

    def next_seq(self) -> int:
        """Return the number of the next record."""
        seq = self._next_seq
        self._next_seq = seq + 1
        return seq

    def start_at(self, seq: int) -> None:
        """Give the next record this number."""
        self._next_seq = seq

    def is_newest(self, records: Sequence[Record]) -> bool:
        """Whether no record has a higher number than these.

        Otherwise, repeating their commit could write them after a later record.
        """
        return not records or max(record.seq for record in records) + 1 == self._next_seq

    # -- buffered operations

    def add(self, ops: Sequence[Op]) -> None:
        """Buffer operations; start the timer if it is not running."""
        self.ops += ops
        if self._timer is None:
            self._timer = self._clock.call_later(self.max_delay, self.flush)

    def flush(self) -> None:
        """Hand the buffered operations to the engine now, without waiting for the commit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.ops:
            ops = self.take()[0]
            with contextlib.suppress(StorageClosed):
                cast(Engine, self._state).commit_nowait(self.guard, ops)

    def take(self) -> tuple[list[Op], int]:
        """Remove the buffered operations. Returns what `put_back` takes if their commit is refused."""
        ops, self.ops = self.ops, []
        return ops, self._next_seq

    def put_back(self, ops: Sequence[Op], seq: int) -> None:
        """Buffer operations again, before all others: the commit that contained them was refused.

        `seq` is the number of the next record at the time of `take`. Records get new numbers if others were numbered
        since.
        """
        if self._next_seq != seq:
            ops = [
                Op(op.name, (self.guard.key, op.args[1]._replace(seq=self.next_seq())))
                if op.name == "journal.append" else op
                for op in ops
            ]  # fmt: skip
        later, self.ops = self.ops, [*ops]
        self.add(later)

    def withdraw(self, record: Record) -> bool:
        """Remove a buffered record, because another one will stand for it too. Returns whether it was still there."""
        ops = self.ops
        for index in range(len(ops) - 1, -1, -1):
            op = ops[index]
            if op.name == "journal.append" and op.args[1] is record:
                del ops[index]
                if record.seq + 1 == self._next_seq:
                    self._next_seq = record.seq
                return True
        return False

    def drop_status(self) -> None:
        """Remove buffered statuses of the run: another status replaces them before anything can read them."""
        self.ops = [op for op in self.ops if op.name != "state.status"]

    def merge_begin_and_end(self, end: Record) -> Record:
        """Return the record of an attempt's end, extended by its beginning if only that is still buffered."""
        ops = self.ops
        if len(ops) != 2 or ops[0].name != "journal.append" or ops[1].name != "state.status":
            return end
        began: Record = ops[0].args[1]
        # The event of the beginning gets the time of this record, which must not be far off.
        if began.kind not in (ATTEMPT, RESUMED) or end.t - began.t > self.max_delay:
            return end
        if self._next_seq != end.seq + 1 or end.seq != began.seq + 1:
            return end
        del ops[0]
        self._next_seq, self._merged = end.seq, began
        return with_beginning(end, began)

    def unmerge(self) -> None:
        """Buffer the beginning of an attempt again, because the record that contained it was not written."""
        if self._merged is not None:
            self.add([Op("journal.append", (self.guard.key, self._merged))])
            self._merged = None
