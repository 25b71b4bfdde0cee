"""The common part of sequential step lists and DAGs: the identity of a list, its state and its deferred records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any, cast

from .._core.codec.json import decode, decode_all
from .._execution.journal_view import CONCURRENT_INFO, TASK_LIST_PREFIX
from .._execution.run_writer import StepWriter
from .._execution.step_journal import StepJournal
from .._journal.record import RESET, SKIPPED, Record
from .model import ExecutionState, Step, name_of, state_text


@dataclass(eq=False, repr=False)
class ListOptions:
    """What all lists of one executor share.

    Attributes:
        ctx: The context of the run.
        max_concurrency: How many steps or items run at the same time.
        state: The progress of the present list.
        added: Values that were added to the state since the last step succeeded.
    """

    ctx: Any
    max_concurrency: int
    state: ExecutionState = field(default_factory=ExecutionState)
    added: dict[str, Any] = field(default_factory=dict)


class StepListRun:
    """One pass of a step list. Call `open` first.

    Attributes:
        progress: The progress of the list, as the executor shows it.
        results: Results by name of the step.
        skips: The steps with saved results whose events are not published yet, as JSON.
        key: The step key of all steps of the list.
        number: Identifies the list under this key.
        info: The `info` of the records of its steps.
        is_ordered: The list is outside of steps, so a resumed run reaches its lists in the same order.
        deferred: Ends of steps that wait for the next checkpoint.
        state_text: The encoded state that was last committed.
        has_unrecorded_state: The next record of the list must contain the state it began with.
    """

    def __init__(self, options: ListOptions, journal: StepJournal[StepWriter], scope: str) -> None:
        self.options: ListOptions = options
        self.ctx: Any = options.ctx
        self.journal: StepJournal[StepWriter] = journal
        self.scope: str = scope
        self.progress: ExecutionState = options.state
        self.results: dict[str, Any] = {}
        self.skips: list[str] = []

    async def open(self, steps: Sequence[Step], resume: bool) -> None:
        """Identify the list by its scope, by how often that was restarted, and by its number there.

        A list inside a step belongs to that step, because a resumed run does not run the code of completed steps. Its
        number does not depend on the order of lists: each attempt of the step may run other lists.

        Args:
            steps: The steps.
            resume: False restarts the lists of this scope.
        """
        journal, suffix = self.journal, self.journal.keys.scope_suffix()
        scope = f"x:{self.scope}{suffix}"
        if not resume:
            journal.view.resets[scope] = journal.view.resets.get(scope, 0) + 1
            await journal.writer.buffer(journal.records.boundary(RESET, key=scope))
        self.key: str = f"{scope}:{journal.view.resets.get(scope, 0)}"
        self.quoted_key: str = quote(self.key)
        # If an earlier list of this claim failed before its next checkpoint, this list writes its deferred records.
        self.deferred: list[Record] = journal.deferred.setdefault(self.key, [])
        self.info: str | None = CONCURRENT_INFO if journal.in_child_task() else None
        self.steps: Sequence[Step] = steps
        self.total: int = len(steps)
        self.is_ordered: bool = not suffix
        # A list that failed and runs again under this claim keeps its number: on a resume it may not fail.
        names = tuple(map(name_of, steps))
        if self.is_ordered and self.info is None:
            numbers = journal.lists.setdefault(scope, {})
            self.number: str = str(numbers.setdefault(names, len(numbers)))
        else:
            self.number = journal.task_lists.get((self.key, *names)) or self._number_by_names(names)
        if journal.unconfirmed.pending:
            await journal.unconfirmed.resolve()

    def _number_by_names(self, names: Sequence[str]) -> str:
        """Return the number of a list inside a step or in a task that is not the main task.

        A resumed run may reach such lists in another order, so the list is identified by the names of its steps. A
        recorded list with some of these steps and others is this list before the code was changed.
        """
        journal = self.journal
        recorded, left = journal.view.unmatched(self.key)
        known = (recorded.get(each) for name in names for each in (name, *journal.view.former_names(name)))
        # A new number contains the length of the journal, so it differs from all numbers of earlier claims.
        number = next(
            (each for each in known if each in left),
            f"{TASK_LIST_PREFIX}{journal.view.length}.{len(journal.task_lists)}",
        )
        left.discard(number)
        journal.task_lists[self.key, *names] = number
        return number

    def _begin_state(self, initial: Mapping[str, Any] | None) -> None:
        """Set the state to what this list last committed.

        A new list starts with the state of the list before it, the values that were added since, and `initial`.
        """
        journal, options, progress = self.journal, self.options, self.progress
        states = journal.view.states
        before, own = states.before(self.key), states.of(self.key, self.number)
        if own is None:
            previous = progress.custom_state if before is None else cast("dict[str, Any]", decode(before))
            values = {**previous, **options.added, **(initial or {})}
            own = state_text(values, None, journal.redaction, f"run {journal.writer.run_id}")
            self.has_unrecorded_state: bool = own != (before or "{}") or self.info is not None or not self.is_ordered
        else:
            options.added, self.has_unrecorded_state = {}, not states.is_recorded(self.key, self.number)
        self.state_text: str = own
        progress.completed_steps, progress.step_results, progress.current_step_index = [], self.results, 0

    def _recorded(self, step: Step) -> Record | None:
        journal = self.journal
        return (
            journal.lookup(step.name, self.key)
            if journal.view.former_names_by_name
            else journal.view.completed.get((step.name, self.key))
        )

    def _skip(self, found: Mapping[int, Record]) -> None:
        """Use the saved results of the steps at these positions."""
        steps, records = [self.steps[position] for position in found], list(found.values())
        names, key = [step.name for step in steps], self.quoted_key
        results = recorded_results(decoders(steps), records)
        self.results.update(zip(names, results, strict=True))
        self.progress.completed_steps += names
        self.skips += [f"[{quote(record.name)},{key},{position}]" for position, record in found.items()]
        self.progress.current_step_index = len(self.progress.completed_steps)
        self.journal.advance(*records)

    async def _flush_skips(self) -> None:
        """Publish the events of the steps that were skipped because they have saved results."""
        if self.skips:
            record = self.journal.records.boundary(SKIPPED, nev=len(self.skips), total=self.total)
            record = record._replace(info=f'{{"steps":[{",".join(self.skips)}]}}')
            self.skips = []
            await self.journal.writer.buffer(record)

    def _with_deferred(self, *records: Record) -> Sequence[Record]:
        """Return the deferred records and `records`.

        They are numbered now, so that their numbers increase in the order of their events.
        """
        deferred = self.deferred.copy()
        self.deferred.clear()
        return self.journal.records.renumbered((*deferred, *records))

    def _defer(self, record: Record) -> Sequence[Record]:
        """Keep a record until the next checkpoint. Returns what to write now."""
        if self.journal.writer.has_journal:
            self.deferred.append(record)
            return ()
        # Its event is emitted now. The result is not saved, because the record contains no key.
        self.deferred.append(record._replace(nev=0))
        return (record._replace(key=""),)

    async def _write_deferred(self) -> None:
        """Write the records that are still deferred at the end of the list."""
        if self.deferred:
            records = self._with_deferred()
            await self.journal.write(records, records, None)

    def _completed(self, step: Step) -> None:
        self.has_unrecorded_state = False
        if self.options.added:
            self.options.added = {}
        completed = self.progress.completed_steps
        completed.append(step.name)
        self.progress.current_step_index = len(completed)


def decoders(steps: Sequence[Step]) -> list[Callable[[str], Any]]:
    """Return the decoder for the result of each step. Consecutive steps with the same function are inspected once."""
    found: list[Callable[[str], Any]] = []
    last: Step | None = None
    for step in steps:
        if last is None or step.fn is not last.fn or step.returns is not last.returns:
            decoder, last = step.function().decode, step
        found.append(decoder)
    return found


def recorded_results(decoders: Sequence[Callable[[str], Any]], records: Sequence[Record]) -> list[Any]:
    """Decode the results of these records, each with its decoder."""
    if decoders.count(decode) == len(decoders):
        return decode_all(["null" if record.result is None else record.result for record in records])
    return [
        None if record.result is None else read(record.result) for read, record in zip(decoders, records, strict=True)
    ]
