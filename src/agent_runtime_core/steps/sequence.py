"""A chain of steps over the journal: one commit per step, which carries the start of the next."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Mapping, Sequence
from itertools import islice
from json.encoder import encode_basestring_ascii as quote
from typing import Any, cast

from .._core.codec.json import decode
from .._execution.step_function import StepFunction, call_in_thread
from .._execution.step_policy import DEFAULT_POLICY
from .._execution.step_runner import StepCall, run_step
from .._journal.record import Record
from ..errors import JournalMismatch, StepCancelledError
from .model import Results, State, Step, is_its_text, state_text
from .step_list import StepListRun


class StepSequence(StepListRun):
    """One pass of one list, in its order."""

    async def run(self, steps: Sequence[Step], initial_state: Mapping[str, Any] | None, resume: bool) -> dict[str, Any]:
        head = await self._prepare(steps, initial_state, resume)
        journal, work, seal, cancelled = self.journal, self.work, self._seal, self.ctx.cancelled
        try:
            if head:
                self._skip(head)
            # In here: each coroutine around a step is gone through whenever the step, or its commit, goes on.
            for index, step in enumerate(islice(self.steps, len(head), None), len(head)):
                if self.carried is None and (record := self._recorded(step)) is not None:
                    self._skip({index: record})
                    continue
                if cancelled():
                    raise StepCancelledError(step.name)
                if self.skips:
                    await self._flush_skips()
                self._go_to(index, step)
                try:
                    result = await run_step(journal, work, seal)
                except BaseException:
                    self._new_state()  # what a step that failed has changed is not kept
                    raise
                self._performed(index, step, result)
            await self._flush_skips()
            await self._write_deferred()
        finally:
            if self.kept.custom_state is self.state:
                self.kept.custom_state = dict(self.state)
        return self.results

    async def _prepare(
        self, steps: Sequence[Step], initial_state: Mapping[str, Any] | None, resume: bool
    ) -> Mapping[int, Record]:
        """Know the list, and its state; the records of its first steps."""
        await self.open(steps, resume)
        self.carries: bool = self.journal.writer.has_journal
        self.carried: str | None = None  # the step whose start the last record carries
        # One for all steps, which come one after the other.
        self.work: StepCall = StepCall(
            "",
            self.key,
            self.journal.writer.watched(self._try),
            DEFAULT_POLICY,
            total=self.total,
            digest=self.number,
            info=self.info,
        )
        head = self._head()
        self._load(initial_state)
        return head

    def _head(self) -> dict[int, Record]:
        """The records of the list's first steps, as far as all have one: on a resume, all that has been done.

        JournalMismatch for a list that is not the one whose steps an earlier claim recorded at this place.
        """
        steps, journal, key = self.steps, self.journal, self.key
        own = journal.view.listed(key).get(self.number, ()) if self.placed else ()
        same = 0  # mostly they are all the same
        for step, record in zip(steps, own, strict=False):
            if step.name != record.name or record.pos != same:
                break
            same += 1
        self._match(own[same:])
        found = dict(enumerate(own[:same]))
        for place in range(same, self.total):
            if (there := self._recorded(steps[place])) is None:
                break
            found[place] = there
        return found

    def _match(self, recorded: Sequence[Record]) -> None:
        """Refuse these records of the list where it has other steps in their places."""
        steps, total = self.steps, self.total
        for record in recorded:
            name, place = record.name, record.pos
            found = steps[place].name if place < total else None
            if found != name and name not in self.journal.view.former_names(found or ""):
                way = f", or say ctx.renamed({name!r}, {found!r}) before it" if found is not None else ""
                raise JournalMismatch(
                    f"the journal has step {name!r} at place {place} of this list, the code now has "
                    f"{found!r} there: restore the old list{way}",
                    recorded=name,
                    found=found,
                )

    def _load(self, initial_state: Mapping[str, Any] | None) -> None:
        self._begin_state(initial_state)
        earlier = self.journal.writer.earlier
        # As its steps may read them.
        self.read: Results = Results(ChainMap(self.results, earlier) if earlier else self.results)
        self._new_state()

    def _new_state(self) -> None:
        """The state as last committed, free of anything a step still holds on to."""
        values = cast("dict[str, Any]", decode(self.state_text)) if self.state_text != "{}" else {}
        self.state: State = State(values, self.read)
        self.kept.custom_state = self.state

    def _go_to(self, index: int, step: Step) -> None:
        journal = self.journal
        how, work = step.callee(), self.work
        self.step: Step = step
        self.how: StepFunction = how
        work.name = name = (
            journal.view.journal_name(step.name, self.key) if journal.view.former_names_by_name else step.name
        )
        work.policy, work.encode, work.decode = step.policy(), how.encode, how.decode
        work.position, work.description = index, step.description
        work.start_recorded = self.carried == name
        work.state = self.state_text if self.unreported else None

    def _performed(self, index: int, step: Step, result: Any) -> None:
        journal = self.journal
        self.results[step.name] = result
        if not step.checkpoint:
            journal.view.completed[self.work.name, self.key] = self.sealed
        if self.changed is not None:
            self.state_text: str = self.changed
            journal.view.set_state(self.key, self.number, self.sealed, self.changed)
        if self.changed is not None or (self.state and not is_its_text(self.state)):
            self._new_state()
        journal.advance()
        self._completed(step)

    def _try(self, attempt: int) -> Awaitable[Any]:
        """One try of the present step, which sees the state as last committed."""
        if attempt > 1:
            self._new_state()
        # (ctx, state) by place: nothing is to be injected.
        if not self.how.is_async:
            return call_in_thread(self.step.fn, (self.ctx, self.state))
        made: Awaitable[Any] = self.step.fn(self.ctx, self.state)
        return made

    def _seal(self, work: StepCall, text: str, attempt: int, ms: int) -> Sequence[Record]:
        self.changed: str | None = None
        if self.state or self.state_text != "{}":
            left = state_text(self.state, self.step.name)
            if left != self.state_text:
                self.changed = left
        if self.unreported and self.changed is None:
            self.changed = self.state_text
        after = self._after(work.position + 1)
        self.sealed: Record = self.journal.records.completed(work, text, attempt, ms, state=self.changed, next=after)
        if not self.step.checkpoint:
            return self._defer(self.sealed)
        return self._with_deferred(self.sealed) if self.deferred else (self.sealed,)

    def _after(self, index: int) -> str | None:
        """The next step's start, for this step's record to carry."""
        journal = self.journal
        self.carried = None
        if index >= self.total or not self.carries or self.ctx.control.cancelled:
            return None
        step = self.steps[index]
        name = journal.view.journal_name(step.name, self.key) if journal.view.former_names_by_name else step.name
        identity = (name, self.key)
        if identity in journal.view.completed or identity in journal.view.started or not self.step.checkpoint:
            return None
        if step.on_in_doubt != "retry":
            return None  # a run that stops between the two must not leave a doubt about a step nobody began
        self.carried = name
        about = "" if step.description is None else f',"description":{quote(step.description)}'
        return f'{{"name":{quote(name)},"key":{self.quoted_key},"pos":{index},"tries":{step.retries + 1}{about}}}'
