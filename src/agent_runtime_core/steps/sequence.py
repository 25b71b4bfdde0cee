"""Run a sequential step list: one commit for each step, which also records the start of the next step."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Mapping, Sequence
from itertools import islice
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final, cast

from .._core.codec.json import decode
from .._execution.journal_view import StateText
from .._execution.step import DEFAULT_OPTIONS, StepFunction, call_in_thread
from .._execution.step_runner import StepCall, run_step
from .._journal.record import Record
from ..errors import JournalMismatch, StepCancelledError
from .model import Results, State, Step, extended_text, is_plain_state, state_text
from .step_list import StepListRun

_EMPTY: Final = 2  # characters of the text of an empty state


class StepSequence(StepListRun):
    """One pass of a step list, in its order."""

    async def run(self, steps: Sequence[Step], initial_state: Mapping[str, Any] | None, resume: bool) -> dict[str, Any]:
        """Run the steps that are not recorded yet. Returns all results by name of the step."""
        head = await self._prepare(steps, initial_state, resume)
        journal, work, seal, cancelled = self.journal, self.work, self._seal, self.ctx.cancelled
        try:
            if head:
                self._skip(head)
            # This loop has no helper coroutine: it would run again for every await of a step or its commit.
            for index, step in enumerate(islice(self.steps, len(head), None), len(head)):
                if self.carried is None and (record := self._recorded(step)) is not None:
                    self._skip({index: record})
                    continue
                if cancelled():
                    raise StepCancelledError(step.name)
                if self.skips:
                    await self._flush_skips()
                self._set_step(index, step)
                try:
                    result = await run_step(journal, work, seal)
                except BaseException:
                    self._reset_state()  # drop the changes of the failed step
                    raise
                self._step_completed(step, result)
            await self._flush_skips()
            await self._write_deferred()
        finally:
            if self.progress.custom_state is self.state:
                self.progress.custom_state = dict(self.state)
        return self.results

    async def _prepare(
        self, steps: Sequence[Step], initial_state: Mapping[str, Any] | None, resume: bool
    ) -> Mapping[int, Record]:
        """Identify the list and load its state. Returns the records of its first steps by position."""
        await self.open(steps, resume)
        self.merges_starts: bool = self.journal.writer.has_journal
        self.carried: str | None = None  # the name of the step whose start is in the last record
        # One object for all steps, since only one step runs at a time.
        self.work: StepCall = StepCall(
            "",
            self.key,
            self.journal.writer.watched(self._call),
            DEFAULT_OPTIONS,
            total=self.total,
            digest=self.number,
            info=self.info,
        )
        head = self._recorded_head()
        self._load_state(initial_state)
        return head

    def _recorded_head(self) -> dict[int, Record]:
        """Return the records of the first steps, up to the first step without a record. On a resume, these are all.

        Raises:
            JournalMismatch: An earlier claim recorded other steps for this list.
        """
        steps, journal, key = self.steps, self.journal, self.key
        own = journal.view.listed(key).get(self.number, ()) if self.is_ordered else ()
        same = 0  # usually all of them
        for step, record in zip(steps, own, strict=False):
            if step.name != record.name or record.pos != same:
                break
            same += 1
        self._check_recorded(own[same:])
        found = dict(enumerate(own[:same]))
        for position in range(same, self.total):
            if (recorded := self._recorded(steps[position])) is None:
                break
            found[position] = recorded
        return found

    def _check_recorded(self, records: Sequence[Record]) -> None:
        """Check that the list contains the steps of these records in the same positions."""
        steps, total = self.steps, self.total
        for record in records:
            name, position = record.name, record.pos
            found = steps[position].name if position < total else None
            if found != name and name not in self.journal.view.former_names(found or ""):
                fix = f", or call ctx.renamed({name!r}, {found!r}) before it" if found is not None else ""
                self.journal.unexpected = record
                raise JournalMismatch(
                    f"position {position} of the list must be step {name!r}, which has a saved result, got "
                    f"{'no step' if found is None else repr(found)}. Restore the old list{fix}",
                    recorded=name,
                    found=found,
                )

    def _load_state(self, initial_state: Mapping[str, Any] | None) -> None:
        self._begin_state(initial_state)
        self.text: StateText = StateText(self.state_text)  # of the state that was last committed
        #: Its values, if they are plain, as `extended_text` needs them. `sealed` contains the values of the next state.
        self.known: dict[str, Any] = {}
        self.extends: bool = False
        earlier = self.journal.writer.earlier
        #: The results as the steps read them.
        self.readable_results: Results = Results(ChainMap(self.results, earlier) if earlier else self.results)
        self._reset_state()

    def _reset_state(self) -> None:
        """Set the state to what was last committed, in new objects: a step may still refer to the old objects."""
        values = cast("dict[str, Any]", decode(str(self.text)))
        self.state: State = State(values, self.readable_results)
        self.progress.custom_state = self.state

    def _set_step(self, index: int, step: Step) -> None:
        """Make `work` the call of this step."""
        journal = self.journal
        function, work = step.function(), self.work
        self.step: Step = step
        self.function: StepFunction = function
        work.name = name = (
            journal.view.journal_name(step.name, self.key) if journal.view.former_names_by_name else step.name
        )
        work.options, work.encode, work.decode = step.options(), function.encode, function.decode
        work.position = index
        work.start_recorded = self.carried == name
        work.state = str(self.text) if self.has_unrecorded_state else None

    def _step_completed(self, step: Step, result: Any) -> None:
        journal = self.journal
        self.results[step.name] = result
        if not step.checkpoint:
            journal.view.completed[self.work.name, self.key] = self.record
        if self.changed is not None:
            self.text = self.changed
            journal.view.states.set(self.key, self.number, self.record.seq, self.record.state or "", self.changed)
        self.known = self.sealed
        if not self.sealed and self.text.size > _EMPTY:
            self._reset_state()
        elif self.changed is not None:  # a step that ended may still refer to the old object
            self.state = State(self.sealed, self.readable_results)
            self.progress.custom_state = self.state
        journal.advance()
        self._completed(step)

    def _call(self, attempt: int) -> Awaitable[Any]:
        """Make one attempt of the present step, with the state that was last committed."""
        if attempt > 1:
            self._reset_state()
        # (ctx, state) are positional arguments: no context parameter needs to be filled.
        if not self.function.is_async:
            return call_in_thread(self.step.fn, (self.ctx, self.state))
        awaitable: Awaitable[Any] = self.step.fn(self.ctx, self.state)
        return awaitable

    def _seal(self, work: StepCall, text: str, attempt: int, ms: int) -> Sequence[Record]:
        """Return the records to write for the present step, as in `step_runner.Seal`."""
        self.changed: StateText | None = None
        self.sealed: dict[str, Any] = {}
        if self.state or self.text.size > _EMPTY:
            self._encode_state(work)
        if self.has_unrecorded_state and self.changed is None:
            self.changed = self.text
        next_start = self._start_of(work.position + 1)
        recorded = None if self.changed is None else self._recorded_state(self.changed)
        self.record: Record = self.journal.records.completed(work, text, attempt, ms, state=recorded, next=next_start)
        if not self.step.checkpoint:
            return self._defer(self.record)
        return self._with_deferred(self.record) if self.deferred else (self.record,)

    def _encode_state(self, work: StepCall) -> None:
        """Set `changed` to the text of the state if it differs from the last text.

        The values are copied now: the next step gets what was encoded, if other code changes them during the commit.
        """
        redaction, values = self.journal.redaction, dict(self.state)
        new = None if redaction is not None else extended_text(self.text, self.known, values)
        self.extends = new is not None
        if new is None:
            owner = f"step {work.name!r} of run {self.journal.writer.run_id}"
            text = state_text(values, self.step.name, redaction, owner)
            if redaction is None and is_plain_state(values, text):
                self.sealed = values
            new = self.text if text == str(self.text) else StateText(text)
        else:
            self.sealed = values
        self.changed = None if new is self.text else new

    def _recorded_state(self, state: StateText) -> str:
        """Return what the record of the present step contains for this state."""
        if not self.journal.writer.has_journal:
            return str(state)
        return self.journal.view.states.to_record(
            self.key, state, self.text if self.extends and state is not self.text else None
        )

    def _start_of(self, index: int) -> str | None:
        """Return the encoded start of a step for the record before it; None if the start needs its own record."""
        journal = self.journal
        self.carried = None
        if index >= self.total or not self.merges_starts or self.ctx.control.cancelled:
            return None
        step = self.steps[index]
        name = journal.view.journal_name(step.name, self.key) if journal.view.former_names_by_name else step.name
        identity = (name, self.key)
        if identity in journal.view.completed or identity in journal.view.started or not self.step.checkpoint:
            return None
        if step.on_in_doubt != "retry":
            return None  # a run that stops between the two steps would leave a step in doubt that never started
        self.carried = name
        description = "" if step.description is None else f',"description":{quote(step.description)}'
        return f'{{"name":{quote(name)},"key":{self.quoted_key},"pos":{index},"tries":{step.retries + 1}{description}}}'
