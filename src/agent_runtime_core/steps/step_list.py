"""A list of steps over the journal: what a chain and a graph have in common."""

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
    """What the runs of an executor's lists share.

    Attributes:
        ctx: The context of the run.
        max_concurrency: Steps or items that run at once, at most.
        state: The state as steps see it.
        added: What was added to the state since a step has succeeded.
    """

    ctx: Any
    max_concurrency: int
    state: ExecutionState = field(default_factory=ExecutionState)
    added: dict[str, Any] = field(default_factory=dict)


class StepListRun:
    """One pass of one list: `open` before all else."""

    def __init__(self, options: ListOptions, journal: StepJournal[StepWriter], scope: str) -> None:
        self.options: ListOptions = options
        self.ctx: Any = options.ctx
        self.journal: StepJournal[StepWriter] = journal
        self.scope: str = scope
        self.kept: ExecutionState = options.state
        self.results: dict[str, Any] = {}
        self.skips: list[str] = []  # what a record of them tells of each, as JSON

    async def open(self, steps: Sequence[Step], resume: bool) -> None:
        """Know the list by its scope, by how often that was reset, and by its number there.

        A list inside a step is of that step's own: on a resume, those inside recorded steps do not run again. It has
        no place among the others there: each try of that step may come to fewer of them or take another way.
        """
        journal, within = self.journal, self.journal.keys.scope_suffix()
        scope = f"x:{self.scope}{within}"
        if not resume:
            journal.view.resets[scope] = journal.view.resets.get(scope, 0) + 1
            await journal.writer.buffer(journal.records.boundary(RESET, key=scope))
        self.key: str = f"{scope}:{journal.view.resets.get(scope, 0)}"
        self.quoted_key: str = quote(self.key)
        # What an earlier list of this claim left, which failed before its next checkpoint, is for this one to write.
        self.deferred: list[Record] = journal.deferred.setdefault(self.key, [])
        self.info: str | None = CONCURRENT_INFO if journal.in_child_task() else None  # of the records of its steps
        self.steps: Sequence[Step] = steps
        self.total: int = len(steps)
        self.placed: bool = not within
        # One that is run again in this claim, because it failed, is no other: on a resume it may not fail.
        names = tuple(map(name_of, steps))
        if self.placed and self.info is None:
            numbers = journal.lists.setdefault(scope, {})
            self.number: str = str(numbers.setdefault(names, len(numbers)))
        else:
            self.number = journal.task_lists.get((self.key, *names)) or self._apart(names)
        if journal.unconfirmed.pending:
            await journal.unconfirmed.resolve()

    def _apart(self, names: Sequence[str]) -> str:
        """The number of a list in a task of its own or in a step, whose turn may come sooner or later the next time.

        It is known by the names of its steps. A recorded list that has some of them and others too was this one before
        it was changed.
        """
        journal = self.journal
        recorded, left = journal.view.unmatched(self.key)
        known = (recorded.get(each) for name in names for each in (name, *journal.view.former_names(name)))
        # A new one has the length of the journal in it: no number of an earlier claim does.
        number = next(
            (each for each in known if each in left),
            f"{TASK_LIST_PREFIX}{journal.view.length}.{len(journal.task_lists)}",
        )
        left.discard(number)
        journal.task_lists[self.key, *names] = number
        return number

    def _begin_state(self, initial: Mapping[str, Any] | None) -> None:
        """The state as this list last committed it; at first that of the one before it, with what was added since."""
        journal, options, kept = self.journal, self.options, self.kept
        before, own = journal.view.state_before(self.key), journal.view.state_of(self.key, self.number)
        if own is None:
            there = kept.custom_state if before is None else cast("dict[str, Any]", decode(before))
            own = state_text({**there, **options.added, **(initial or {})})
            #: Whether it begins with what only a record of its own can tell the next time.
            self.unreported: bool = own != (before or "{}") or self.info is not None or not self.placed
        else:
            options.added, self.unreported = {}, False
        self.state_text: str = own
        kept.completed_steps, kept.step_results, kept.current_step_index = [], self.results, 0

    def _recorded(self, step: Step) -> Record | None:
        journal = self.journal
        return (
            journal.lookup(step.name, self.key)
            if journal.view.former_names_by_name
            else journal.view.completed.get((step.name, self.key))
        )

    def _skip(self, found: Mapping[int, Record]) -> None:
        """Answer the steps at these places from their records."""
        steps, records = [self.steps[place] for place in found], list(found.values())
        names, key = [step.name for step in steps], self.quoted_key
        results = recorded_results(decoders(steps), records)
        self.results.update(zip(names, results, strict=True))
        self.kept.completed_steps += names
        self.skips += [f"[{quote(record.name)},{key},{place}]" for place, record in found.items()]
        self.kept.current_step_index = len(self.kept.completed_steps)
        self.journal.advance(*records)

    async def _flush_skips(self) -> None:
        if self.skips:
            record = self.journal.records.boundary(SKIPPED, nev=len(self.skips), total=self.total)
            record = record._replace(info=f'{{"steps":[{",".join(self.skips)}]}}')
            self.skips = []
            await self.journal.writer.buffer(record)

    def _with_deferred(self, *records: Record) -> Sequence[Record]:
        """What waited for a checkpoint, and `records`: places are given when they are written, so that they
        grow together with the event numbers.
        """
        deferred = self.deferred.copy()
        self.deferred.clear()
        return self.journal.records.renumbered((*deferred, *records))

    def _defer(self, record: Record) -> Sequence[Record]:
        """Have a record wait for the next checkpoint. Returns what to write now."""
        if self.journal.writer.has_journal:
            self.deferred.append(record)
            return ()
        # Its event is emitted now. Without its key, the result in it is not saved.
        self.deferred.append(record._replace(nev=0))
        return (record._replace(key=""),)

    async def _write_deferred(self) -> None:
        """At the end of the list, what still waits for a checkpoint."""
        if self.deferred:
            records = self._with_deferred()
            await self.journal.write(records, records, None)

    def _completed(self, step: Step) -> None:
        self.unreported = False
        if self.options.added:
            self.options.added = {}
        completed = self.kept.completed_steps
        completed.append(step.name)
        self.kept.current_step_index = len(completed)


def decoders(steps: Sequence[Step]) -> list[Callable[[str], Any]]:
    """How the result of each step is read; looked at once for steps in a row that have one function."""
    found: list[Callable[[str], Any]] = []
    last: Step | None = None
    for step in steps:
        if last is None or step.fn is not last.fn or step.returns is not last.returns:
            decoder, last = step.callee().decode, step
        found.append(decoder)
    return found


def recorded_results(decoders: Sequence[Callable[[str], Any]], records: Sequence[Record]) -> list[Any]:
    """The results in these records, each as its decoder reads it."""
    if decoders.count(decode) == len(decoders):
        return decode_all(["null" if record.result is None else record.result for record in records])
    return [
        None if record.result is None else read(record.result) for read, record in zip(decoders, records, strict=True)
    ]
