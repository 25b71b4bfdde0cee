"""What a claim does with its run's journal: which step comes next, and what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from .._core.ids import unbroken
from .._engines.base import Op
from .._journal.record import DONE, FAILED, RETRYING, STARTED, Record
from ..errors import JournalMismatch, StorageBusy
from .claim_writer import OUTCOME_UNKNOWN, ClaimWriter, UnconfirmedWrite
from .journal_view import MAIN_TASK, ONLY_STEP, JournalView, as_concurrent, was_concurrent
from .step_keys import CURRENT_STEP, Identity, StepScope
from .usage import NestedUsage

_SEQ = itemgetter(0)


def _nobody() -> Any:
    return None


class StepJournal(JournalView):
    """The journal as the steps of one claim see it, and their way to write to it."""

    def __init__(self, ledger: ClaimWriter, records: Sequence[Record]) -> None:
        super().__init__(ledger, records)
        self.lists: dict[str, dict[tuple[str, ...], int]] = {}  # numbers of the step lists it has run, by scope
        self.task_lists: dict[tuple[str, ...], str] = {}  # and of those in tasks of their own, by key and names
        self.deferred: dict[str, list[Record]] = {}  # ends of steps that wait for a checkpoint, by key of their list
        self.maps: dict[str, list[str | None]] = {}  # digests of their items, of the maps it has run
        self.carried: set[Identity] = set()  # items of maps whose start is in a record of this claim, and not yet begun
        self.boundary: int = 0  # how many steps this claim has passed
        self.emitted: int = 0  # how many events since then
        self.running_steps: int = 0  # steps in flight; see `step_left`
        self.on_idle: Callable[[], None] | None = None  # hears that the last of them has ended
        self.slot_released: bool = False  # the run has left its slot, and comes back to it before a step begins
        self.unconfirmed: list[UnconfirmedWrite] = ledger.unconfirmed  # to be settled before anything else is asked
        self._nested_usage: NestedUsage = NestedUsage(self.completed)
        self._next = 0  # of the imperative steps in their order
        self._came = -1  # position of the last record this claim has come to
        self._failed_tries: dict[Identity, int] = {}  # the last of each step that this claim has recorded
        #: The context that owns this book. It knows the book; held here too, each run would wait for the garbage
        #: collector.
        self.owner: Callable[[], Any] = _nobody

    async def review(self, name: str, key: str, start: int, read: Callable[[Any], Any]) -> Any:
        """What people say of a step in doubt since the record `start`; `read` makes its result of what they give."""
        owner = self.owner()
        if owner is None:
            raise JournalMismatch(f"step {name!r} is in doubt and nobody here can be asked")
        return await owner.waits.review(name, key, start, read)

    async def regain_slot(self) -> None:
        """Have a slot again for what the run goes on with."""
        if self.slot_released and (owner := self.owner()) is not None:
            await owner.waits.regain_slot()

    def step_finished(self) -> None:
        """A step is no longer in flight."""
        self.running_steps -= 1
        if not self.running_steps and self.on_idle is not None:
            self.on_idle()

    def about_failure(self, outer: StepScope | None, others: int) -> dict[str, Any]:
        """What the record of a failure says of a step in the frame `outer`, with so many others in flight."""
        if (outer is None or outer.book is not self) and not self.in_child_task():
            return {MAIN_TASK: True}
        return {} if others else {ONLY_STEP: True}

    def is_concurrent(self) -> bool:
        """Whether the code that asks runs beside other code of its run: with a step in flight, or in a task of its own,
        whose turn may come sooner or later the next time."""
        return self.running_steps > 0 or self.in_child_task()

    def in_child_task(self) -> bool:
        """Whether the code that asks runs in a task of its own: what it records does not show that the code of the run
        went on."""
        owner = self.owner()
        return owner is not None and not owner.control.in_main_task

    def key_for(self, space: str, name: str, key: str | None, mark: str | None = None) -> str:
        """The key of a use of `name`: its caller's own, or by its turn."""
        if key is not None:
            return f"k:{unbroken(f'the key of {name!r}', key)}"
        return self.next_key(space, name, mark)

    # -- what is recorded

    def is_unclaimed(self, name: str, key: str) -> bool:
        """Whether that step is not recorded, and nobody does it now."""
        return (name, key) not in self.locked_keys and self.lookup(name, key) is None

    def check_order(self, name: str, record: Record | None) -> None:
        """Refuse an imperative step that is not the one recorded at this place.

        Steps that ran beside others have no place of their own and are matched by identity alone.
        """
        if self._next >= len(self._ordered):
            return
        expected = self._ordered[self._next]
        if record is expected:
            self._next += 1
            return
        if record is not None and was_concurrent(record):
            return
        if self.is_concurrent():
            if record is not None:
                self._ordered.remove(record)
            return
        raise JournalMismatch(
            f"the journal has step {expected.name!r} at this place, the code now asks for {name!r}: "
            f"restore the old order, or say ctx.renamed({expected.name!r}, {name!r}) before it",
            recorded=expected.name,
            found=name,
        )

    @property
    def is_replaying(self) -> bool:
        """Whether there are records that this claim has not come to yet."""
        return self._came < self._last

    def advance(self, *recorded: Record) -> None:
        """Steps have their results, from these records, or one has it from a new one: later events belong to the next
        stretch of code."""
        frame = CURRENT_STEP.get()
        if frame is None or frame.book is not self:  # what runs inside of a step is not passed again on a resume
            self.boundary += len(recorded) or 1
            self.emitted = 0
        if recorded and (usage := self._nested_usage.usage_of(recorded, self.ledger.claim_id)):
            self.owner().budget.recalled(usage)
        # A recorded step answers for those that ran inside it, which nobody asks for any more.
        self._came = max(self._came, *map(_SEQ, recorded)) if recorded else self._last

    # -- writing

    def value_record(
        self, name: str, key: str, result: str | None, info: str | None = None, mark: str | None = None
    ) -> Record:
        """A DONE record that stands for no events: of a wait, a child, a recorded value."""
        ledger = self.ledger
        record = Record(
            ledger.next_seq(), DONE, name, key, 1, ledger.claim_id, self.wall(), result, info=info, digest=mark
        )
        return as_concurrent(record) if self.in_child_task() else record

    def defer_until_checkpoint(self, records: Sequence[Record]) -> None:
        """Have ends of steps wait for the next checkpoint of their list: they did not land with this one."""
        for record in reversed(records):
            self.deferred.setdefault(record.key, []).insert(0, record)

    async def write(
        self, records: Sequence[Record], waited: Sequence[Record], outer: StepScope | None, *, lazy: bool = False
    ) -> None:
        """Append these ends of steps in the step `outer`, of which some had `waited` for a checkpoint.

        With `lazy` they may be written with the next record.
        """
        try:
            if lazy:
                await self.ledger.buffer(*records)
            else:
                if self.unconfirmed:
                    records = await self.after_pending(records)
                await self.ledger.record(records)
        except BaseException as error:  # noqa: BLE001 - raised there
            await self.write_failed(records, waited, error, outer)
        else:
            last = records[-1]
            self.completed[last.name, last.key] = last

    async def write_failed(
        self, records: Sequence[Record], waited: Sequence[Record], error: BaseException, outer: StepScope | None
    ) -> None:
        """The commit of these ended in `error`: raise that, unless they are in the journal after all.

        Where there was no answer it is a question, and the next use of their names is theirs. What was refused has not
        ended, and what had waited for it waits for another one.
        """
        if not self.ledger.has_journal:
            raise error
        if isinstance(error, StorageBusy) and error.tries == 1 and self.ledger.is_newest(records):
            try:
                await self.ledger.append(*records)
                return self.add(records)
            except BaseException as later:  # noqa: BLE001 - raised below
                if isinstance(later, StorageBusy):
                    later.tries += error.tries
                error = later
        if not isinstance(error, OUTCOME_UNKNOWN):
            self.defer_until_checkpoint(waited)
            raise error
        self.unconfirmed.append(UnconfirmedWrite(records))
        try:
            if isinstance(error, asyncio.CancelledError) or self.ledger.is_newest(records):
                raise error  # it was repeated as often as is worth it
            await self.resolve_unconfirmed()
        except BaseException:
            self.reuse_key(records[-1].name, records[-1].key, records[-1].digest, outer)
            raise

    async def publish(self, record: Record, queue: Sequence[Op] = ()) -> bool:
        """Append a record that is no end of a step, with what must land in the queue together with it.

        Where that was not answered and others have taken later places, it is looked for behind them. False where it
        is there, and on an engine of its own the queue may not have its part.
        """
        if record.kind in (RETRYING, FAILED):
            self._failed_tries[record.name, record.key] = record.attempt
        try:
            await self.ledger.append(record, queue=queue)
            return True
        except StorageBusy:
            if self.ledger.is_newest((record,)):
                raise  # it was repeated as often as is worth it
        if await self.ledger.confirm_record(record) is not None:
            await self.ledger.publish_events(record)
            return False
        await self.ledger.append(*self.renumbered((record,)), queue=queue)
        return True

    async def after_pending(self, records: Sequence[Record]) -> Sequence[Record]:
        """The same behind all that is in question."""
        await self.resolve_unconfirmed()
        return self.renumbered(records)

    async def resolve_unconfirmed(self) -> None:
        """Find out of the commits that nobody heard of whether they landed, and write again what did not.

        So whoever asks for a step that has run is answered, and nothing is recorded behind what it was built on.
        """
        async with self.exclusive("", "questions"):
            while self.unconfirmed:
                question = self.unconfirmed[0]
                records = question.records
                landed = await self.ledger.confirm_record(records[-1])
                if landed is not None:
                    self.add(records := (*records[:-1], landed))
                    if not question.noted:
                        await self.ledger.publish_events(*records)
                elif question.whole and (records := self.renumbered_late(records)):
                    self.unconfirmed[0] = question._replace(records=records)
                    await self.ledger.append(*records, noted=question.noted)
                    self.add(records)
                del self.unconfirmed[0]

    def renumbered_late(self, records: Sequence[Record]) -> Sequence[Record]:
        """These in places behind others that were to come after them: there they are as of steps beside those, and a
        start whose end or failure is there is none any more."""
        failed = self._failed_tries
        started = [
            each
            for each in records
            if each.kind != STARTED or (each[2:4] not in self.completed and each.attempt > failed.get(each[2:4], 0))
        ]
        return [as_concurrent(each) if each.kind in (STARTED, DONE) else each for each in self.renumbered(started)]

    async def resolve_at_end(self, error: BaseException | None) -> None:
        """Settle all questions at the end of an attempt, which came to `error`: its result was built on what they are
        of, and the next one need not do that again."""
        if self.unconfirmed and (error is None or isinstance(error, Exception)):
            try:
                await self.resolve_unconfirmed()
            except Exception:
                if error is None:
                    raise
