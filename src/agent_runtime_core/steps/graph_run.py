"""A graph of steps over the journal: one commit per step, which carries the start of the one that follows it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, cast

from .._core.codec.json import decode, encode
from .._execution.step_function import call_in_thread
from .._execution.step_runner import StepCall, run_step
from .._journal.record import SKIPPED, Record
from ..errors import JournalMismatch, StepCancelledError
from .graph import Graph
from .model import ReadOnlyState, Step
from .step_list import StepListRun
from .worker_pool import Next, WorkerPool


class GraphRun(StepListRun):
    """One pass of a list whose steps say what they depend on."""

    async def run(self, graph: Graph, initial_state: Mapping[str, Any] | None, resume: bool) -> dict[str, Any]:
        self.graph: Graph = graph
        await self.open(graph.steps, resume)
        if self.placed:
            self._match()
        self._load(initial_state)
        try:
            await self._work()
        finally:
            if self.kept.custom_state is self.shown:
                self.kept.custom_state = dict(self.shown)
        return {step.name: self.results[step.name] for step in self.steps}

    async def _work(self) -> None:
        graph = self.graph
        self.told: set[int] = set()  # steps that were told to be left out
        places = enumerate(self.steps)
        if found := {place: record for place, step in places if (record := self._recorded(step)) is not None}:
            self._skip(found)
        await self._flush_skips()
        recorded = {graph.places[name] for name in self.results}
        #: What the start of a step tells besides: how many are done, in the order of the journal.
        self.progress: dict[str, Any] = {"completed": len(recorded)}
        graph.begin(recorded)
        self.crew: WorkerPool = WorkerPool(graph, self.options.max_concurrency, self._one, self._left_out)
        await self.crew.work()
        await self._write_deferred()

    def _match(self) -> None:
        """Refuse a list without a step that an earlier claim recorded of it; their order and edges may change."""
        journal = self.journal
        names = {old for step in self.steps for old in journal.view.former_names(step.name)} | self.graph.places.keys()
        for record in journal.view.listed(self.key).get(self.number, ()):
            if (name := record.name) in names:
                continue
            there = self.steps[record.pos].name if record.pos < self.total else None
            found = there if there is not None and (there, self.key) not in journal.view.completed else None
            way = f"ctx.renamed({name!r}, {found!r})" if found is not None else f"ctx.renamed({name!r}, its new name)"
            raise JournalMismatch(
                f"the journal has step {name!r} of this list, the code has it no more: "
                f"restore it, or say {way} before the list",
                recorded=name,
                found=found,
            )

    def _load(self, initial_state: Mapping[str, Any] | None) -> None:
        self._begin_state(initial_state)
        #: What the executor shows meanwhile: nothing is added to it, as nothing is to that of a step.
        self.shown: ReadOnlyState = ReadOnlyState(cast("dict[str, Any]", decode(self.state_text)), {})
        self.kept.custom_state = self.shown

    async def _one(self, place: int, begun: bool) -> Next:
        """Perform a step; the next one for this worker, and whether its start is recorded."""
        step, journal, graph = self.steps[place], self.journal, self.graph
        if self.ctx.cancelled():
            raise StepCancelledError(step.name)
        how = step.callee()
        following: Next = (None, False)

        def seal(work: StepCall, text: str, attempt: int, ms: int) -> Sequence[Record]:
            nonlocal following
            self.progress["completed"] += 1
            # Not durable yet: only what begins in the same commit may count on it.
            after, first = None, None if self.crew.stopped else graph.next_after(place)
            if first is not None and step.checkpoint and journal.writer.has_journal and not self.ctx.cancelled():
                after = self._start_of(first)
            following = (first, after is not None)
            record = journal.records.completed(work, text, attempt, ms, state=work.state, next=after)
            if work.state is not None:
                journal.view.set_state(self.key, self.number, record, work.state)
            return self._sealed(step, record)

        work = StepCall(
            journal.view.journal_name(step.name, self.key),
            self.key,
            journal.writer.watched(lambda attempt: self._try(place)),
            step.policy(),
            encode=how.encode,
            decode=how.decode,
            position=place,
            total=self.total,
            description=step.description,
            digest=self.number,
            info=self.info,
            start_recorded=begun,
            start_info=self.progress,
        )
        if self.unreported:
            work.state = self.state_text
            self.unreported: bool = False
        self.results[step.name] = await run_step(journal, work, seal)
        journal.advance()
        self._completed(step)
        graph.finished(place)
        return following

    def _try(self, place: int) -> Awaitable[Any]:
        step = self.steps[place]
        values = cast("dict[str, Any]", decode(self.state_text))
        state = ReadOnlyState(values, self.graph.results(place, self.results))
        how = step.callee()
        # (ctx, state) by place: nothing is to be injected.
        return (
            cast("Awaitable[Any]", step.fn(self.ctx, state))
            if how.is_async
            else call_in_thread(step.fn, (self.ctx, state))
        )

    def _sealed(self, step: Step, record: Record) -> Sequence[Record]:
        if not step.checkpoint:
            self.journal.view.completed[record.name, self.key] = record
            return self._defer(record)
        return self._with_deferred(record) if self.deferred else (record,)

    def _start_of(self, place: int) -> str | None:
        """The start of a step, for the record of the one before it to carry."""
        step, journal = self.steps[place], self.journal
        name = journal.view.journal_name(step.name, self.key)
        if (name, self.key) in journal.view.started:
            return None
        if step.on_in_doubt != "retry":
            return None  # a run that stops between the two must not leave a doubt about a step nobody began
        about: dict[str, Any] = {"name": name, "key": self.key, "tries": step.retries + 1, **self.progress}
        if step.description is not None:
            about["description"] = step.description
        return encode({**about, "pos": place})

    async def _left_out(self, place: int) -> None:
        """Tell of the steps that never begin because this one failed."""
        done = {self.graph.places[name] for name in self.results}
        lost = sorted(self.graph.dependents(place) - done - self.told)
        self.told.update(lost)
        if lost:
            why = {"reason": "dependency_failed", "dependency": self.steps[place].name}
            journal = self.journal
            listed = [
                [journal.view.journal_name(self.steps[each].name, self.key), self.key, each, why] for each in lost
            ]
            record = journal.records.boundary(SKIPPED, nev=len(lost), total=self.total, info={"steps": listed})
            await journal.writer.buffer(record)
