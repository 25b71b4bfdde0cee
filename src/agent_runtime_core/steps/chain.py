"""A list of steps over the journal: one commit per step, which carries the start of the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii as quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from .._json import codec_for, decode, encode
from ..attempts import Callee, Work, call, callee, perform
from ..book import Book
from ..errors import JournalMismatch, StepCancelledError
from ..journal.record import RESET, SKIPPED, Record
from .model import State, Step

if TYPE_CHECKING:
    from .executor import StepExecutor


class Chain:
    """One pass of one list."""

    def __init__(self, executor: StepExecutor, book: Book, scope: str) -> None:
        self.executor, self.book, self.scope = executor, book, scope
        self.results: dict[str, Any] = {}
        self.deferred: list[Record] = []
        self.skips: list[list[Any]] = []

    async def run(self, steps: Sequence[Step], initial_state: Mapping[str, Any] | None, resume: bool) -> dict[str, Any]:
        book, scope = self.book, f"x:{self.scope}"
        if not resume:
            book.resets[scope] = book.resets.get(scope, 0) + 1
            await book.ledger.note(book.boundary_record(RESET, key=scope))
        self.key = f"{scope}:{book.resets.get(scope, 0)}"
        self.steps, self.total = steps, len(steps)
        self.number = str(book.lists.get(scope, 0))
        book.lists[scope] = int(self.number) + 1
        self._match()
        self._load(initial_state)
        for index, step in enumerate(steps):
            record = book.recorded(step.name, self.key)
            if record is not None:
                self._skip(index, step, record)
                continue
            if self.executor.ctx.cancelled():
                raise StepCancelledError(step.name)
            await self._flush_skips()
            await self._perform(index, step)
        await self._flush_skips()
        if self.deferred:
            await self._append(self.deferred.pop())
        return self.results

    def _match(self) -> None:
        """Refuse a list that is not the one whose steps an earlier claim recorded at this place."""
        for (name, key), record in self.book.done.items():
            if key != self.key or record.digest != self.number:
                continue
            found = self.steps[record.pos].name if record.pos < self.total else None
            if found not in (name, *(new for new, old in self.book.renames.items() if old == name)):
                raise JournalMismatch(
                    f"the journal has step {name!r} at place {record.pos} of this list, the code now has "
                    f"{found!r}: restore the old order, or say ctx.renamed({name!r}, {found!r}) before it",
                    recorded=name,
                    found=found,
                )

    def _load(self, initial_state: Mapping[str, Any] | None) -> None:
        self.state_text = self.book.states.get(self.key) or encode(
            {**self.executor.state.custom_state, **(initial_state or {})}
        )
        self._new_state()
        kept = self.executor.state
        kept.completed_steps, kept.step_results, kept.current_step_index = [], self.results, 0

    def _new_state(self) -> None:
        """The state as last committed, free of anything a step still holds on to."""
        values = cast("dict[str, Any]", decode(self.state_text)) if self.state_text != "{}" else {}
        self.state = State(values, MappingProxyType(self.results))
        self.executor.state.custom_state = self.state

    def _skip(self, index: int, step: Step, record: Record) -> None:
        _, from_text = self._codec(step)
        self.results[step.name] = None if record.result is None else from_text(record.result)
        self.skips.append([record.name, record.key, index])
        self.book.passed(recorded=True)
        self._completed(index, step)

    async def _flush_skips(self) -> None:
        if self.skips:
            record = self.book.boundary_record(
                SKIPPED, nev=len(self.skips), total=self.total, info={"steps": self.skips}
            )
            self.skips = []
            await self.book.ledger.note(record)

    def _codec(self, step: Step) -> tuple[Any, Any]:
        how = callee(step.fn)
        return (how.encode, how.decode) if step.returns is None else codec_for(step.returns)

    async def _perform(self, index: int, step: Step) -> None:
        book = self.book
        how = callee(step.fn)
        to_text, from_text = (how.encode, how.decode) if step.returns is None else codec_for(step.returns)
        self.fresh = True
        name = book.former(step.name, self.key)
        work = Work(
            name, self.key, lambda: self._call(step, how), step.policy(), encode=to_text, decode=from_text,
            pos=index, total=self.total, description=step.description, digest=self.number,
            begun=book.carried == (name, self.key),
        )  # fmt: skip
        self.results[step.name] = await perform(book, work, self._finish)
        book.passed(recorded=False)
        self._completed(index, step)

    async def _call(self, step: Step, how: Callee) -> Any:
        if not self.fresh:
            self._new_state()
        self.fresh = False
        return await call(step.fn, how, (self.executor.ctx, self.state), self.executor.ctx)

    async def _finish(self, work: Work, text: str, attempt: int, ms: int) -> None:
        book, state = self.book, self.state
        changed: str | None = None
        if state or self.state_text != "{}":
            state_text = encode(dict(state))
            if state_text != self.state_text:
                changed = state_text
        after = self._after(work.pos + 1)
        record = book.finished(
            work.name, work.key, text, attempt=attempt, state=changed, pos=work.pos, total=self.total,
            tries=work.policy.retries + 1, ms=ms, next=after, digest=self.number,
        )  # fmt: skip
        if self.steps[work.pos].checkpoint:
            await self._append(record)
        else:
            self.deferred.append(record)
        book.done[work.name, work.key] = record
        if changed is not None:
            self.state_text = changed
            book.states[self.key] = changed
            self._new_state()

    async def _append(self, record: Record) -> None:
        if not self.deferred:
            await self.book.ledger.append(record)
            return
        # Places are given when they are written, so that places and event numbers grow together.
        next_seq = self.book.ledger.next_seq
        records = [each._replace(seq=next_seq()) for each in (*self.deferred, record)]
        self.deferred = []
        await self.book.ledger.append(*records)

    def _after(self, index: int) -> str | None:
        """The next step's start, for this step's record to carry."""
        book = self.book
        book.carried = None
        if index >= self.total:
            return None
        step = self.steps[index]
        name = book.former(step.name, self.key)
        identity = (name, self.key)
        if identity in book.done or identity in book.begun or not self.steps[index - 1].checkpoint:
            return None
        book.carried = identity
        about = "" if step.description is None else f',"description":{quote(step.description)}'
        return f'{{"name":{quote(name)},"key":{quote(self.key)},"pos":{index},"tries":{step.retries + 1}{about}}}'

    def _completed(self, index: int, step: Step) -> None:
        kept = self.executor.state
        kept.current_step_index = index + 1
        kept.completed_steps.append(step.name)
