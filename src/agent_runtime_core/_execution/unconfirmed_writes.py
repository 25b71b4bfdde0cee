"""Commits of one claim whose outcome is unknown, and how they are resolved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .._journal.record import DONE, STARTED, Record
from ..errors import StorageBusy
from .journal_view import JournalView, as_concurrent
from .record_factory import RecordFactory
from .run_writer import OUTCOME_UNKNOWN, StepWriter, UnconfirmedWrite
from .step_keys import StepKeys
from .step_scope import Identity, StepScope


class UnconfirmedWrites:
    """Finds out whether unconfirmed writes were applied, and writes again what was not.

    Attributes:
        pending: The unconfirmed writes, oldest first. It is always the same list.
        failed_attempts: The number of the last failed attempt of each step that this claim has recorded.
    """

    def __init__(self, writer: StepWriter, records: RecordFactory, keys: StepKeys, view: JournalView) -> None:
        self.pending: list[UnconfirmedWrite] = writer.unconfirmed
        self.failed_attempts: dict[Identity, int] = {}
        self._writer = writer
        self._records = records
        self._keys = keys
        self._view = view

    def add(self, records: Sequence[Record], *, repeatable: bool = True) -> None:
        """Note that the commit of these records has an unknown outcome.

        Args:
            records: The records.
            repeatable: They are all that the commit contained, so it can be written again.
        """
        self.pending.append(UnconfirmedWrite(records, repeatable=repeatable))

    async def after_pending(self, records: Sequence[Record]) -> Sequence[Record]:
        """Resolve all pending writes. Returns these records with numbers after theirs."""
        await self.resolve()
        return self._records.renumbered(records)

    async def write_failed(
        self, records: Sequence[Record], error: BaseException, outer: StepScope | None
    ) -> BaseException | None:
        """Write the ends of steps again whose commit raised `error`, if the outcome is unknown.

        Args:
            records: The ends, the newest last.
            error: What their commit raised.
            outer: The step around them, or None.

        Returns:
            None if the records are in the journal now. The error to raise if the commit was refused.

        Raises:
            BaseException: The outcome is still unknown. The next call of the newest step gets the same key.
        """
        if isinstance(error, StorageBusy) and error.tries == 1 and self._writer.is_newest(records):
            try:
                await self._writer.append(*records)
                self._view.add(records)
                return None
            except BaseException as later:  # noqa: BLE001 - returned or raised below
                if isinstance(later, StorageBusy):
                    later.tries += error.tries
                error = later
        if not isinstance(error, OUTCOME_UNKNOWN):
            return error
        self.add(records)
        try:
            if isinstance(error, asyncio.CancelledError) or self._writer.is_newest(records):
                raise error  # the writer has repeated the commit already
            await self.resolve()
        except BaseException:
            self._keys.reuse_key(records[-1].name, records[-1].key, records[-1].digest, outer)
            raise
        return None

    async def resolve(self) -> None:
        """Find out which pending writes were applied, and write again those that were not.

        Call it before a step is looked up: a step that has run must not run again. Call it before a record is
        written: the record must not come before the results that it depends on.
        """
        async with self._keys.exclusive("", "questions"):
            while self.pending:
                write = self.pending[0]
                records = write.records
                applied = await self._writer.confirm_record(records[-1])
                if applied is not None:
                    self._view.add(records := (*records[:-1], applied))
                    if not write.reported:
                        await self._writer.publish_events(*records)
                elif write.repeatable and (records := self.renumbered(records)):
                    self.pending[0] = write._replace(records=records)
                    await self._writer.append(*records, reported=write.reported)
                    self._view.add(records)
                del self.pending[0]

    def renumbered(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return the same records with numbers after records that were to follow them.

        They are marked as concurrent steps, since their order in the journal shows nothing about the code. The start
        of a step whose end or failure is in the journal is left out.
        """
        completed, failed = self._view.completed, self.failed_attempts
        kept = [
            each
            for each in records
            if each.kind != STARTED or (each[2:4] not in completed and each.attempt > failed.get(each[2:4], 0))
        ]
        return [
            as_concurrent(each) if each.kind in (STARTED, DONE) else each for each in self._records.renumbered(kept)
        ]

    async def resolve_at_end(self, error: BaseException | None) -> None:
        """Resolve all pending writes at the end of an attempt, so that the next one need not repeat the steps.

        Args:
            error: What the attempt raised; None if it returned. The result was built on the pending writes, so it
                must not be recorded if they cannot be resolved.
        """
        if self.pending and (error is None or isinstance(error, Exception)):
            try:
                await self.resolve()
            except Exception:
                if error is None:
                    raise
