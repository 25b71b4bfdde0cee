"""Run a DAG of steps: one commit for each step, which also records the start of the next step."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, cast

from .._core.codec.json import decode, encode
from .._execution.step import call_in_thread
from .._execution.step_runner import StepCall, run_step
from .._journal.record import SKIPPED, Record
from ..errors import JournalMismatch, StepCancelledError
from .graph import Graph
from .model import ReadOnlyState, Step
from .step_list import StepListRun
from .worker_pool import Next, WorkerPool


class GraphRun(StepListRun):
    """One pass of a step list with dependencies."""

    async def run(self, graph: Graph, initial_state: Mapping[str, Any] | None, resume: bool) -> dict[str, Any]:
        """Run the steps that are not recorded yet. Returns all results by name of the step."""
        self.graph: Graph = graph
        await self.open(graph.steps, resume)
        if self.is_ordered:
            self._check_recorded()
        self._load_state(initial_state)
        try:
            await self._run_steps()
        finally:
            if self.progress.custom_state is self.shown_state:
                self.progress.custom_state = dict(self.shown_state)
        return {step.name: self.results[step.name] for step in self.steps}

    async def _run_steps(self) -> None:
        graph = self.graph
        self.skipped: set[int] = set()  # steps that do not run because a dependency failed; published already
        positions = enumerate(self.steps)
        if found := {position: record for position, step in positions if (record := self._recorded(step)) is not None}:
            self._skip(found)
        await self._flush_skips()
        recorded = {graph.positions[name] for name in self.results}
        #: Additional fields of the starts of steps: how many steps are completed, in the order of the journal.
        self.start_info: dict[str, Any] = {"completed": len(recorded)}
        graph.begin(recorded)
        self.pool: WorkerPool = WorkerPool(graph, self.options.max_concurrency, self._run_step, self._skip_dependents)
        await self.pool.work()
        await self._write_deferred()

    def _check_recorded(self) -> None:
        """Check that the list contains all steps that an earlier claim recorded; order and dependencies may change."""
        journal = self.journal
        names = {
            old for step in self.steps for old in journal.view.former_names(step.name)
        } | self.graph.positions.keys()
        for record in journal.view.listed(self.key).get(self.number, ()):
            if (name := record.name) in names:
                continue
            present = self.steps[record.pos].name if record.pos < self.total else None
            found = present if present is not None and (present, self.key) not in journal.view.completed else None
            new_name = "its new name" if found is None else repr(found)
            journal.unexpected = record
            raise JournalMismatch(
                f"the list must have step {name!r}, which has a saved result, got none. Restore the step, or call "
                f"ctx.renamed({name!r}, {new_name}) before the list",
                recorded=name,
                found=found,
            )

    def _load_state(self, initial_state: Mapping[str, Any] | None) -> None:
        self._begin_state(initial_state)
        #: What the executor shows while the list runs. It is read-only, like the state that the steps see.
        self.shown_state: ReadOnlyState = ReadOnlyState(cast("dict[str, Any]", decode(self.state_text)), {})
        self.progress.custom_state = self.shown_state

    async def _run_step(self, position: int, started: bool) -> Next:
        """Run a step. Returns the next step for this worker, and whether its start is recorded."""
        step, journal, graph = self.steps[position], self.journal, self.graph
        if self.ctx.cancelled():
            raise StepCancelledError(step.name)
        function = step.function()
        following: Next = (None, False)
        record: Record | None = None

        def seal(work: StepCall, text: str, attempt: int, ms: int) -> Sequence[Record]:
            nonlocal following, record
            self.start_info["completed"] += 1
            # The result is not durable yet, so only a step whose start is in the same commit may depend on it.
            next_start, first = None, None if self.pool.stopped else graph.next_after(position)
            if first is not None and step.checkpoint and journal.writer.has_journal and not self.ctx.cancelled():
                next_start = self._start_of(first)
            following = (first, next_start is not None)
            record = journal.records.completed(work, text, attempt, ms, state=work.state, next=next_start)
            return self._records_to_write(step, record)

        work = StepCall(
            journal.view.journal_name(step.name, self.key),
            self.key,
            journal.writer.watched(lambda attempt: self._call(position)),
            step.options(),
            encode=function.encode,
            decode=function.decode,
            position=position,
            total=self.total,
            digest=self.number,
            info=self.info,
            start_recorded=started,
            start_info=self.start_info,
            needs=graph.needs[position],
        )
        if self.has_unrecorded_state:
            work.state = self.state_text
            self.has_unrecorded_state: bool = False
        self.results[step.name] = await run_step(journal, work, seal)
        if record is not None and work.state is not None:
            journal.view.states.set(self.key, self.number, record.seq, work.state, work.state)
        journal.advance()
        self._completed(step)
        graph.finished(position)
        return following

    def _call(self, position: int) -> Awaitable[Any]:
        step = self.steps[position]
        values = cast("dict[str, Any]", decode(self.state_text))
        state = ReadOnlyState(values, self.graph.results(position, self.results))
        # (ctx, state) are positional arguments: no context parameter needs to be filled.
        return (
            cast("Awaitable[Any]", step.fn(self.ctx, state))
            if step.function().is_async
            else call_in_thread(step.fn, (self.ctx, state))
        )

    def _records_to_write(self, step: Step, record: Record) -> Sequence[Record]:
        """Return the record of a step and what is deferred; nothing if the step itself is deferred."""
        if not step.checkpoint:
            self.journal.view.completed[record.name, self.key] = record
            return self._defer(record)
        return self._with_deferred(record) if self.deferred else (record,)

    def _start_of(self, position: int) -> str | None:
        """Return the encoded start of a step for the record before it; None if the start needs its own record."""
        step, journal = self.steps[position], self.journal
        name = journal.view.journal_name(step.name, self.key)
        if (name, self.key) in journal.view.started:
            return None
        if step.on_in_doubt != "retry":
            return None  # a run that stops between the two steps would leave a step in doubt that never started
        start: dict[str, Any] = {"name": name, "key": self.key, "tries": step.retries + 1, **self.start_info}
        if needs := self.graph.needs[position]:
            start["needs"] = needs
        if step.description is not None:
            start["description"] = step.description
        return encode({**start, "pos": position})

    async def _skip_dependents(self, position: int) -> None:
        """Publish that the dependents of a failed step do not run."""
        completed = {self.graph.positions[name] for name in self.results}
        skipped = sorted(self.graph.dependents(position) - completed - self.skipped)
        self.skipped.update(skipped)
        if skipped:
            reason = {"reason": "dependency_failed", "dependency": self.steps[position].name}
            journal = self.journal
            listed = [
                [journal.view.journal_name(self.steps[each].name, self.key), self.key, each, reason] for each in skipped
            ]
            record = journal.records.boundary(SKIPPED, nev=len(skipped), total=self.total, info={"steps": listed})
            await journal.writer.buffer(record)
