"""The journal of one claim as its steps use it: which step comes next, what is written, and what is unconfirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import Any, Final, Generic, Protocol, TypeGuard, TypeVar, cast

from .._core.codec.json import encode
from .._core.ids import RunTrace, unbroken
from .._core.redaction import Redaction
from .._engines.base import Op
from .._journal.record import DONE, FAILED, RETRYING, STARTED, Record, start_events, with_start_info
from ..errors import JournalMismatch, StorageBusy, StorageFull
from . import journal_view
from .pools import RunPools
from .run_control import RunControl, Stop
from .run_writer import OUTCOME_UNKNOWN, RunWriter, StepWriter, UnconfirmedWrite
from .step import CURRENT_STEP, SCOPE_SUFFIX, Identity, JournalToken, StepScope, in_own_flow, scope_id
from .step_keys import LineageKeys, StepKeys
from .usage import RecordedUsage

# -- records


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
        """Return a STARTED record; a `quiet` record represents no events."""
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
            state: The encoded state of its list, if the step changed it.
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
        """Return a RETRYING or FAILED record; a `quiet` record represents no events."""
        return Record(
            self._next_seq(), kind, name, key, attempt, self._claim_id, self.wall(),
            pos=pos, total=total, tries=tries, info=encode(info), nev=0 if quiet else 1,
        )  # fmt: skip

    def boundary(
        self, kind: str, name: str = "", key: str = "", *, attempt: int = 0, nev: int = 0, total: int = 0,
        info: dict[str, Any] | None = None,
    ) -> Record:  # fmt: skip
        """Return a record of the run itself, which represents `nev` events."""
        return Record(
            self._next_seq(), kind, name, key, attempt, self._claim_id, self.wall(), total=total,
            info=encode(info) if info else None, nev=nev,
        )  # fmt: skip

    def renumbered(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return the same records with new numbers, higher than all earlier numbers."""
        next_seq = self._next_seq
        return [each._replace(seq=next_seq()) for each in records]


_SEQ = itemgetter(0)

#: Makes one attempt of a step. Receives its number, counted from 1.
StepAttempt = Callable[[int], Awaitable[Any]]

#: By the beginning of a key: the kind of call with the name after the prefix, in the user's words.
_KINDS: Final = (
    ("c:", journal_view.CHILD, "child run", "agent"),
    ("w:", journal_view.SIGNAL, "wait", "signal or approval"),
)

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
        boundary: How many steps this claim completed or replayed, outside of other steps.
        emitted: How many events the code published since the last of them.
        running_steps: How many steps run now.
        on_idle: Called when the last running step ends.
        slot_released: The run released its slot. It regains a slot before a step starts.
        deferred: Ends of steps that wait for the next checkpoint of their list, by key of the list.
        lists: Numbers of the step lists that this claim ran, by scope and names of the steps.
        task_lists: The same for lists in separate tasks, by key and names.
        doubts_met: Guarded steps in doubt that the code of this claim called.
        maps: Digests of the items of the maps that this claim ran.
        carried: Items of maps that are not started and whose start is in a record of this claim.
        trace: The place of the execution in its trace; None if there are no trace sinks.
        around_step: Wraps the call of each attempt of a step; None if no trace sink wants that.
        lineage_keys: The keys of guarded steps in their lineage; None until the first of them.
        executed: This claim called code of a step.
        restored: Runs of the lineage whose store was restored, as this claim found them; None before it looked.
        mismatch: After a JournalMismatch, what must have come and what the code called, in words.
        unexpected: After a JournalMismatch, the record that does not fit the code, or None.
        pools: What the run reserves in pools; None until it reserves or charges something.
    """

    def __init__(
        self, writer: W_co, records: Sequence[Record], control: RunControl | None = None, keys: StepKeys | None = None
    ) -> None:
        self.writer: W_co = writer
        self.redaction: Redaction | None = writer.redaction
        self.control: RunControl = RunControl() if control is None else control
        self.records: RecordFactory = RecordFactory(writer)
        self.keys: StepKeys = StepKeys(writer.run_id) if keys is None else keys
        self.view: journal_view.JournalView = journal_view.JournalView(writer.run_id, records, self.records.wall)
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
        self.lineage_keys: LineageKeys | None = None
        self.executed: bool = False
        self.mismatch: tuple[str, str] | None = None
        self.unexpected: Record | None = None
        self.restored: list[str] | None = None
        self.pools: RunPools | None = None
        self._recorded_before = len(self.view.completed)  # before this claim
        self._recorded_usage = RecordedUsage(self.view.completed)
        self._next_ordered = 0  # the index of the next step in `view.ordered`
        self._last_position = 0  # of the last step in `view.ordered`, or of a later step that was started
        self._asked: dict[StepScope, set[Identity]] = {}  # what of `view.guarded_inside` each step called
        self._repeated: set[Identity] = set()  # what was called without a result and without a place in `view.ordered`
        self._last_read = records[-1].seq if records else -1  # the number of the last record of earlier claims
        self._replayed_seq = -1  # the number of the last record that this claim replayed
        self._replayed_in_main_task = -1  # the same for the main task of the run

    # -- running steps

    async def regain_slot(self) -> None:
        """Wait until the run gets a slot, if it released its slot."""
        if self.slot_released:
            await self.control.regain_slot()

    def step_finished(self) -> None:
        """Count one running step less."""
        self.running_steps -= 1
        if not self.running_steps and self.on_idle is not None:
            self.on_idle()

    def is_concurrent(self) -> bool:
        """Whether the calling code runs while a step runs, or in a task that is not the main task of the run.

        The same holds for code in a task of a framework, which a resumed run may not repeat. The order of such code may
        be different after a resume.
        """
        return self.running_steps > 0 or not self.control.in_main_task or self.keys.task_scope() is not None

    def in_child_task(self) -> bool:
        """Whether the calling code runs in a task that is not the main task of the run.

        Its records do not show that the code of the run continued after an earlier failure.
        """
        return not self.control.in_main_task

    def about_flow(self) -> dict[str, Any]:
        """Return what the record of something guarded says if a step calls it in a task that it started."""
        scope = self.keys.scope()
        return {} if scope is None or in_own_flow(scope) else {journal_view.ASIDE_FIELD: True}

    def about_failure(self, outer: StepScope | None, others: int) -> dict[str, Any]:
        """Return what the record of a failure says about its step.

        Args:
            outer: The step around it, or None.
            others: How many other steps run.
        """
        if (outer is None or outer.token is not self.token) and self.control.in_main_task:
            return {journal_view.MAIN_TASK: True}
        return {} if others else {journal_view.ONLY_STEP: True}

    # -- reading

    def key_for(self, space: str, name: str, key: str | None, arguments_digest: str | None = None) -> str:
        """Return the step key of a call of `name`: made of `key`, or of how often `name` was called."""
        if key is not None:
            return f"k:{unbroken(f'key of {name!r}', key)}"
        return self.keys.next_key(space, name, arguments_digest)

    def is_unclaimed(self, name: str, key: str) -> bool:
        """Whether that step is not recorded and no task runs it."""
        return (name, key) not in self.keys.locked_keys and self.lookup(name, key) is None

    def check_order(self, name: str, key: str, record: Record | None) -> None:
        """Check that an imperative step, a child run or a wait comes next in the journal.

        Concurrent code has no order. It is matched by name and key alone. This also applies to waits of a name that
        concurrent code uses too: their keys are counted together.

        Args:
            name: Its name.
            key: Its key.
            record: Its record, or None.

        Raises:
            JournalMismatch: The next step in the journal is another step.
        """
        ordered, at = self.view.ordered, self._next_ordered
        if at >= len(ordered) or (key[:2] == "w:" and self.view.journal_name(name, key) in self.view.shared_waits):
            return
        if record is ordered[at]:
            self._next_ordered, self._last_position = at + 1, ordered[at].pos
        elif record is None or journal_view.has_place(record):
            self._find_place(name, key, record)

    def _find_place(self, name: str, key: str, record: Record | None) -> None:
        """Find the place in `view.ordered` of something that is not the next there, or raise JournalMismatch."""
        ordered, at, identity = self.view.ordered, self._next_ordered, (self.view.journal_name(name, key), key)
        place = self.view.start_in_order(name, key) if record is None else record
        index = None if place is None else next((i for i, each in enumerate(ordered) if each is place), None)
        if self.is_concurrent():
            if index is not None and index >= at:
                del ordered[index]
            return
        if index is not None and all(each.kind != DONE for each in ordered[at:index]):
            # For what is left out no end is recorded: the code was cut off there, for example by `asyncio.timeout`, and
            # went on.
            self._next_ordered, self._last_position = max(at, index + 1), ordered[index].pos
            return
        if index is None and record is not None:
            return  # recorded by this claim
        if place is None and (identity in self.view.started or identity in self._repeated):
            self._repeated.add(identity)  # a repeated step is no longer in `started`
            return
        rest = [each for each in ordered[at:] if not self.view.is_replaceable(each)]
        if rest and (key[:2] == "w:" or not all(each.kind != DONE and each.key[:2] == "w:" for each in rest)):
            raise self._mismatch(rest[0], name, key)
        # Else it is new, before a wait that still lasts.

    def check_inside(self, name: str, key: str, record: Record | None) -> None:
        """Check that the body of a step called all guarded results inside it before it calls something new.

        Otherwise the new call may be a guarded step under another name. Calls in tasks that the body started have no
        order.

        Raises:
            JournalMismatch: The journal contains a guarded result inside the step, and the body did not call it.
        """
        view, scope = self.view, self.keys.scope()
        saved = None if scope is None else view.guarded_inside.get(scope.scope_id)
        if scope is None or saved is None:
            return
        identity, asked = (view.journal_name(name, key), key), self._asked.setdefault(scope, set())
        asked.add(identity)
        known = identity in view.started or identity in view.ended_tries or identity in self._repeated
        if record is not None or known:
            self._repeated.add(identity)
            return
        left = saved - asked - self.keys.failed_try_keys
        if left and self.keys.task_scope() is None and in_own_flow(scope):
            raise self._mismatch(Record(0, STARTED, *min(left)), name, key, scope)

    def enter(self, name: str, key: str, record: Record | None, *, may_be_lost: bool = False) -> int:
        """Note that the code reaches a child run or a wait, which must be next in the journal.

        Args:
            name: Its name.
            key: Its key.
            record: Its record, or None.
            may_be_lost: It may have ended before, although it is not recorded and later code is: its record is written
                without waiting for the commit.

        Returns:
            Its position; 0 without an order, because it is concurrent or the caller gave it a key.

        Raises:
            JournalMismatch: The next step in the journal is another step.
        """
        counted = key[:2] != "k:"
        if may_be_lost and record is None and (name, key) not in self.view.started:
            counted = counted and self._next_ordered >= len(self.view.ordered)
        try:
            if counted:
                self.check_order(name, key, record)
            if self.view.guarded_inside:
                self.check_inside(name, key, record)
        except JournalMismatch as mismatch:
            self.leave(mismatch)
            raise
        if record is not None:
            self.records.position = max(self.records.position, record.pos)
            self.advance(record)
            return record.pos
        return self.position(name, key) if counted and not self.is_concurrent() else 0

    def position(self, name: str, key: str) -> int:
        """Return the position of a step, child run or wait that starts now.

        If it was started before and cut off, what is after it in the journal stays after it.
        """
        if not self.view.opened:
            return self.records.next_position()
        start = self.view.start_in_order(name, key)
        if start is not None and start.pos >= self._last_position:
            position = start.pos
            self.records.position = max(self.records.position, position)
        else:
            position = self.records.next_position()
        if not self.is_concurrent():
            self._last_position = position
        return position

    def leave(self, mismatch: JournalMismatch) -> None:
        """Stop an attempt that executed nothing yet, so that a worker whose code fits continues the run.

        That is so if the code calls another step than the journal. Other arguments may be an error of this code.
        """
        check, wrote = self.control.is_of_other_code, "" if self.unexpected is None else self.unexpected.claim_id
        if check is None or self.executed or len(self.view.completed) > self._recorded_before:
            return
        if mismatch.recorded != mismatch.found and check(wrote):
            self.control.leave(Stop.OTHER_CODE, mismatch)

    def _mismatch(self, expected: Record, name: str, key: str, inside: StepScope | None = None) -> JournalMismatch:
        """Return the error for a call of `name` where `expected` is in the journal, perhaps inside a step."""
        wanted, recorded, renamed = _in_words(expected.name, expected.key)
        got, found, other = _in_words(name, key)
        self.mismatch, self.unexpected = (wanted, got), expected
        place, state = "the next step", "the journal has in this position"
        fix = f"If {got} is new, run it only if await ctx.patched('NAME') is True"
        if expected.kind != DONE:
            state = "has started and has no saved result"
        if inside is not None:
            place, state = f"the next step inside {inside.name!r}", "an earlier execution of it has called"
            fix = f"If {got} is new, call it after that"
        if renamed and renamed == other:
            fix = f"If the {renamed} was renamed, call ctx.renamed({recorded!r}, {found!r}) before it. {fix}"
        text = f"{place} must be {wanted}, which {state}, got {got}. {fix}"
        return JournalMismatch(text, recorded=recorded, found=found)

    @property
    def is_replaying(self) -> bool:
        """Whether the journal contains records that this claim did not replay yet."""
        return self._replayed_seq < self.view.last_seq

    def advance(self, *recorded: Record) -> None:
        """Note that the code received the results of these records, or of a step that was recorded just now."""
        if self.control.stall_clock is not None:
            self.control.note_progress()  # a replay writes nothing, and some ends of steps are written later
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
        """Whether an earlier claim recorded something that the main task of the run did not reach yet.

        While other tasks run, their steps are left out, because they have no order relative to the main task. New
        records of this claim do not count either.
        """
        view, reached = self.view, self._replayed_in_main_task
        ahead = (each for each, seq in view.started.items() if reached < seq <= self._last_read)
        if any(each not in view.completed and each not in self.doubts_met for each in ahead):
            return True
        later = [each for each in view.completed.values() if reached < each.seq <= view.last_seq]
        if not all(map(journal_view.was_concurrent, later)):
            return True
        # Without other tasks, what was not replayed belongs to tasks that the code starts later.
        return any(each.seq > self._replayed_seq for each in later) and not self.control.other_tasks()

    # -- writing

    def value_record(
        self, name: str, key: str, result: str | None, info: str | None = None, digest: str | None = None, pos: int = 0
    ) -> Record:
        """Return a DONE record without events: of a wait, a child run or a recorded value."""
        record = self.records.value(name, key, result, info, digest, pos)
        return record if self.control.in_main_task else journal_view.as_concurrent(record)

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
            deferred: Ends in `records` that waited for a checkpoint.
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

    async def publish(self, record: Record, queue: Sequence[Op] = ()) -> list[Any] | None:
        """Append a record that is not the end of a step.

        Args:
            record: The record.
            queue: Operations for the same commit, if one engine stores the journal and the queue.

        Returns:
            The results of the operations of the queue. None if the outcome of the commit was unknown and the record is
            in the journal: if the queue uses a separate engine, its operations may be missing then.
        """
        if record.kind in (RETRYING, FAILED):
            self.unconfirmed.failed_attempts[record.name, record.key] = record.attempt
        try:
            return cast("list[Any]", await self.writer.append(record, queue=queue))
        except (StorageBusy, StorageFull) as error:
            is_unknown = isinstance(error, StorageBusy)
            if self.writer.is_newest((record,)) or not (is_unknown or self.writer.outlast):
                raise  # the writer repeated the commit already
        if is_unknown and await self.writer.confirm_record(record) is not None:
            await self.writer.publish_events(record)
            return None
        return cast("list[Any]", await self.writer.append(*self.unconfirmed.renumbered((record,)), queue=queue))


def _in_words(name: str, key: str) -> tuple[str, str, str]:
    """Return what this name and key stand for: in the words of an error, its name, and what a user may rename."""
    for space, prefix, kind, renamed in _KINDS:
        if key[:2] in (space, "k:") and name.startswith(prefix):
            own = name.removeprefix(prefix)
            return f"{kind} {own!r}", own, renamed
    return (f"ctx.{name}()", name, "") if key[:2] == "w:" else (repr(name), name, "step")


#: The journal of a run. Others, of a step list over a checkpoint, have only a `StepWriter`.
RunJournal = StepJournal[RunWriter]


def has_run(journal: StepJournal[StepWriter]) -> TypeGuard[RunJournal]:
    """Whether the journal belongs to a run."""
    return journal.writer.has_journal


# -- unconfirmed writes


class UnconfirmedWrites:
    """Finds out whether unconfirmed writes were applied, and writes again what was not.

    Attributes:
        pending: The unconfirmed writes, oldest first. It is always the same list.
        failed_attempts: The number of the last failed attempt of each step that this claim recorded.
    """

    def __init__(
        self, writer: StepWriter, records: RecordFactory, keys: StepKeys, view: journal_view.JournalView
    ) -> None:
        self.pending: list[UnconfirmedWrite] = writer.unconfirmed
        self.failed_attempts: dict[Identity, int] = {}
        self._writer = writer
        self._records = records
        self._keys = keys
        self._view = view

    def add(self, records: Sequence[Record], *, repeatable: bool = True) -> None:
        """Note that the outcome of the commit of these records is unknown.

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
        while isinstance(error, StorageFull) and self._writer.outlast:  # nothing was written
            try:
                if not self._writer.is_newest(records):
                    records = self.renumbered(records)
                await self._writer.append(*records)
                self._view.add(records)
                return None
            except BaseException as later:  # noqa: BLE001 - returned or raised below
                if isinstance(later, StorageFull) and self._writer.is_newest(records):
                    return later  # the writer repeated the commit already
                error = later
        if not isinstance(error, OUTCOME_UNKNOWN):
            return error
        self.add(records)
        try:
            if isinstance(error, asyncio.CancelledError) or self._writer.is_newest(records):
                raise error  # the writer repeated the commit already
            await self.resolve()
        except BaseException:
            self._keys.reuse_key(records[-1].name, records[-1].key, records[-1].digest, outer)
            raise
        return None

    async def resolve(self) -> None:
        """Find out which pending writes were applied, and write again those that were not.

        Call it before a step is looked up: a step that ran must not run again. Call it before a record is
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
            journal_view.as_concurrent(each) if each.kind in (STARTED, DONE) else each
            for each in self._records.renumbered(kept)
        ]

    async def resolve_at_end(self, error: BaseException | None) -> None:
        """Resolve all pending writes at the end of an attempt, so that the next attempt need not repeat the steps.

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
