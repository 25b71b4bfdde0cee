"""The journal of one claim as its steps use it: which step comes next, and what is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeGuard, TypeVar

from .._core.ids import unbroken
from .._core.redaction import Redaction
from .._core.traceparent import RunTrace
from .._engines.base import Op
from .._journal.record import FAILED, RETRYING, Record
from ..errors import JournalMismatch, StorageBusy
from .journal_view import MAIN_TASK, ONLY_STEP, JournalView, as_concurrent, was_concurrent
from .record_factory import RecordFactory
from .run_control import RunControl
from .run_writer import RunWriter, StepWriter
from .step_keys import StepKeys
from .step_scope import CURRENT_STEP, SCOPE_SUFFIX, Identity, JournalToken, StepScope, scope_id
from .unconfirmed_writes import UnconfirmedWrites
from .usage import RecordedUsage

_SEQ = itemgetter(0)

#: Makes one attempt of a step. Receives its number, counted from 1.
StepAttempt = Callable[[int], Awaitable[Any]]

W_co = TypeVar("W_co", bound=StepWriter, covariant=True)


class StepJournal(Generic[W_co]):
    """What the steps of one claim read from the journal of their run, and their way to write to it.

    Attributes:
        writer: Writes for the claim.
        redaction: Redacts what is recorded; None without `redact_stored`.
        records: Builds the records.
        keys: Gives steps their keys.
        view: The records, as read at the start and added since.
        unconfirmed: Commits with an unknown outcome.
        control: What the journal shares with the context and the runner.
        token: Identifies this journal in a `StepScope`.
        boundary: How many steps this claim has completed or replayed, outside of other steps.
        emitted: How many events the code has published since the last of them.
        running_steps: How many steps run now.
        on_idle: Called when the last running step has ended.
        slot_released: The run has released its slot. It regains one before a step starts.
        deferred: Ends of steps that wait for the next checkpoint of their list, by key of the list.
        lists: Numbers of the step lists that this claim has run, by scope and names of the steps.
        task_lists: The same for lists in tasks of their own, by key and names.
        doubts_met: Guarded steps in doubt that the code of this claim has called.
        maps: Digests of the items of the maps that this claim has run.
        carried: Items of maps that have not started and whose start is in a record of this claim.
        trace: The place of the execution in its trace; None if there are no trace sinks.
        around_step: Wraps the call of each attempt of a step; None if no trace sink wants that.
    """

    def __init__(self, writer: W_co, records: Sequence[Record], control: RunControl | None = None) -> None:
        self.writer: W_co = writer
        self.redaction: Redaction | None = writer.redaction
        self.control: RunControl = RunControl() if control is None else control
        self.records: RecordFactory = RecordFactory(writer)
        self.keys: StepKeys = StepKeys(writer.run_id)
        self.view: JournalView = JournalView(writer.run_id, records, self.records.wall)
        self.unconfirmed: UnconfirmedWrites = UnconfirmedWrites(writer, self.records, self.keys, self.view)
        # Called for each step.
        self.token: JournalToken = self.keys.token
        self.lookup: Callable[[str, str], Record | None] = self.view.lookup
        self.boundary: int = 0
        self.emitted: int = 0
        self.running_steps: int = 0
        self.on_idle: Callable[[], None] | None = None
        self.slot_released: bool = False
        self.deferred: dict[str, list[Record]] = {}
        self.lists: dict[str, dict[tuple[str, ...], int]] = {}
        self.task_lists: dict[tuple[str, ...], str] = {}
        self.maps: dict[str, list[str | None]] = {}
        self.carried: set[Identity] = set()
        self.doubts_met: set[Identity] = set()
        self.trace: RunTrace | None = None
        self.around_step: Callable[[StepScope, StepAttempt], StepAttempt] | None = None
        self._recorded_usage = RecordedUsage(self.view.completed)
        self._next_ordered = 0  # the index of the next step in `view.ordered`
        self._last_read = records[-1].seq if records else -1  # the number of the last record of earlier claims
        self._replayed_seq = -1  # the number of the last record that this claim has replayed
        self._replayed_in_main_task = -1  # the same for the main task of the run

    # -- running steps

    async def regain_slot(self) -> None:
        """Wait until the run has a slot, if it has released its slot."""
        if self.slot_released:
            await self.control.regain_slot()

    def step_finished(self) -> None:
        """Count one running step less."""
        self.running_steps -= 1
        if not self.running_steps and self.on_idle is not None:
            self.on_idle()

    def is_concurrent(self) -> bool:
        """Whether the calling code runs while a step runs, or in a task that is not the main task of the run.

        The same holds for code in a task of a framework, which a resumed run may not repeat. The order of such code
        may be another one after a resume.
        """
        return self.running_steps > 0 or not self.control.in_main_task or self.keys.task_scope() is not None

    def in_child_task(self) -> bool:
        """Whether the calling code runs in a task that is not the main task of the run.

        Its records do not show that the code of the run continued after an earlier failure.
        """
        return not self.control.in_main_task

    def about_failure(self, outer: StepScope | None, others: int) -> dict[str, Any]:
        """Return what the record of a failure says about its step.

        Args:
            outer: The step around it, or None.
            others: How many other steps run.
        """
        if (outer is None or outer.token is not self.token) and self.control.in_main_task:
            return {MAIN_TASK: True}
        return {} if others else {ONLY_STEP: True}

    # -- reading

    def key_for(self, space: str, name: str, key: str | None, arguments_digest: str | None = None) -> str:
        """Return the step key of a call of `name`: made of `key`, or of how often `name` was called."""
        if key is not None:
            return f"k:{unbroken(f'key of {name!r}', key)}"
        return self.keys.next_key(space, name, arguments_digest)

    def is_unclaimed(self, name: str, key: str) -> bool:
        """Whether that step is not recorded and no task runs it."""
        return (name, key) not in self.keys.locked_keys and self.lookup(name, key) is None

    def check_order(self, name: str, record: Record | None) -> None:
        """Check that an imperative step is the next one in the journal.

        Concurrent steps have no order. They are matched by name and key alone.

        Args:
            name: The name of the step.
            record: Its record, or None.

        Raises:
            JournalMismatch: The journal has another step next.
        """
        ordered = self.view.ordered
        if self._next_ordered >= len(ordered):
            return
        expected = ordered[self._next_ordered]
        if record is expected:
            self._next_ordered += 1
            return
        if record is not None and was_concurrent(record):
            return
        if self.is_concurrent():
            if record is not None:
                ordered.remove(record)
            return
        raise JournalMismatch(
            f"the next step must be {expected.name!r}, which the journal has in this position, got {name!r}. "
            f"If the step was renamed, call ctx.renamed({expected.name!r}, {name!r}) before it. If {name!r} is new, "
            "run it only if await ctx.patched('NAME') is True",
            recorded=expected.name,
            found=name,
        )

    @property
    def is_replaying(self) -> bool:
        """Whether the journal has records that this claim has not replayed yet."""
        return self._replayed_seq < self.view.last_seq

    def advance(self, *recorded: Record) -> None:
        """Note that the code has received the results of these records, or of a step that was recorded just now."""
        scope = CURRENT_STEP.get()
        if scope is None or scope.token is not self.token:  # code inside a completed step does not run on a resume
            self.boundary += len(recorded) or 1
            self.emitted = 0
        if recorded and (usage := self._recorded_usage.usage_of(recorded, self.writer.claim_id)):
            self.control.add_recorded_usage(usage)
        # On replay the code of a recorded step does not run, so steps nested in it are replayed as well.
        if not recorded:
            self._replayed_seq = self.view.last_seq
            return
        newest = max(map(_SEQ, recorded))
        self._replayed_seq = max(self._replayed_seq, newest)
        if newest > self._replayed_in_main_task and self.control.in_main_task:
            self._replayed_in_main_task = newest

    def recall_tasks(self) -> None:
        """Count what steps in tasks of a framework have charged, because a resumed run may not repeat these tasks.

        A step that is repeated from its record later is not counted again.
        """
        view = self.view
        steps = {scope_id(*each) for each in (*view.completed, *view.started, *view.ended_tries)}
        inside = ((SCOPE_SUFFIX.search(key), record) for (_, key), record in view.completed.items() if "@" in key)
        records = [record for found, record in inside if found is not None and found[1] not in steps]
        if usage := self._recorded_usage.usage_of(records, self.writer.claim_id):
            self.control.add_recorded_usage(usage)

    def has_later_records(self) -> bool:
        """Whether an earlier claim recorded something that the main task of the run has not reached yet.

        While other tasks run, their steps are left out, because they have no order relative to the main task. New
        records of this claim do not count either.
        """
        view, reached = self.view, self._replayed_in_main_task
        ahead = (each for each, seq in view.started.items() if reached < seq <= self._last_read)
        if any(each not in view.completed and each not in self.doubts_met for each in ahead):
            return True
        later = [each for each in view.completed.values() if reached < each.seq <= view.last_seq]
        if not all(map(was_concurrent, later)):
            return True
        # Without other tasks, what was not replayed belongs to tasks that the code starts later.
        return any(each.seq > self._replayed_seq for each in later) and not self.control.other_tasks()

    # -- writing

    def value_record(
        self, name: str, key: str, result: str | None, info: str | None = None, digest: str | None = None
    ) -> Record:
        """Return a DONE record without events: of a wait, a child run or a recorded value."""
        record = self.records.value(name, key, result, info, digest)
        return record if self.control.in_main_task else as_concurrent(record)

    def defer_until_checkpoint(self, records: Sequence[Record]) -> None:
        """Write these ends of steps with the next checkpoint of their list, before all others that wait for it."""
        for record in reversed(records):
            self.deferred.setdefault(record.key, []).insert(0, record)

    async def write(
        self, records: Sequence[Record], deferred: Sequence[Record], outer: StepScope | None, *, lazy: bool = False
    ) -> None:
        """Append the ends of steps.

        Args:
            records: The ends, the newest last.
            deferred: Those of them that waited for a checkpoint.
            outer: The step around them, or None.
            lazy: Write them with the next record, without waiting for the commit.

        Raises:
            Exception: The commit failed, and the records are not in the journal. If it was refused, the deferred
                records wait for another checkpoint. If the outcome is unknown, the next call of the newest step gets
                the same key.
        """
        try:
            if lazy:
                await self.writer.buffer(*records)
            else:
                if self.unconfirmed.pending:
                    records = await self.unconfirmed.after_pending(records)
                await self.writer.record(records)
        except BaseException as error:  # noqa: BLE001 - _write_failed raises it
            await self._write_failed(records, deferred, error, outer)
        else:
            last = records[-1]
            self.view.completed[last.name, last.key] = last

    async def _write_failed(
        self, records: Sequence[Record], deferred: Sequence[Record], error: BaseException, outer: StepScope | None
    ) -> None:
        """Raise the error of a write, unless its records are in the journal."""
        if not self.writer.has_journal:
            raise error
        refused = await self.unconfirmed.write_failed(records, error, outer)
        if refused is not None:
            self.defer_until_checkpoint(deferred)
            raise refused

    async def publish(self, record: Record, queue: Sequence[Op] = ()) -> bool:
        """Append a record that is not the end of a step.

        Args:
            record: The record.
            queue: Operations for the same commit, if one engine has the journal and the queue.

        Returns:
            False if the commit had an unknown outcome and the record is in the journal. If the queue has an engine of
            its own, its operations may be missing then.
        """
        if record.kind in (RETRYING, FAILED):
            self.unconfirmed.failed_attempts[record.name, record.key] = record.attempt
        try:
            await self.writer.append(record, queue=queue)
            return True
        except StorageBusy:
            if self.writer.is_newest((record,)):
                raise  # the writer has repeated the commit already
        if await self.writer.confirm_record(record) is not None:
            await self.writer.publish_events(record)
            return False
        await self.writer.append(*self.unconfirmed.renumbered((record,)), queue=queue)
        return True


#: The journal of a run. Others, of a step list over a checkpoint, have only a `StepWriter`.
RunJournal = StepJournal[RunWriter]


def has_run(journal: StepJournal[StepWriter]) -> TypeGuard[RunJournal]:
    """Whether the journal is that of a run."""
    return journal.writer.has_journal
