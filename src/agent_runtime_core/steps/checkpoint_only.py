"""Steps over a context that has no journal: its checkpoint keeps their results, and its `emit` gets their events."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final, cast

from .._clock import Clock
from .._contexts import start_soon
from .._core.timeouts import wait_cancelled
from .._json import decode, encode, plain_text
from ..book import Book
from ..errors import InvalidArgument, StepCancelledError, brief
from ..event_types import EventType
from ..journal.record import DONE, FAILED, Record, expand
from ..ledger import Ledger, Question
from ..uses import FRAME, Identity
from .model import ExecutionState, Step

LIST_KEY: Final = "x::0"  # of the steps of a list without a scope of its own
_ONLY_IN_JOURNALS: Final = ("step_id", "trace_id", "input_changed")


class CheckpointLedger:
    """Writes for a list, a map or an agent loop what a `Ledger` writes for a run.

    No start is stored: an interrupted step runs again, whatever its `on_in_doubt` says. Only the results in `labels`
    are stored, each under its label.
    """

    has_journal: bool = False
    run_id: str = ""
    claim_id: str = ""
    linger: float = -1.0  # below 0, so that the start of a step is never merged into its end
    refusal: None = None

    def __init__(
        self, ctx: Any, key: str = "", poll_interval: float = 0.5, labels: Mapping[Identity, str] | None = None
    ) -> None:
        self.clock: Clock = _PollingClock(self)
        self.questions: list[Question] = []
        self.next_seq = count().__next__
        self.state: ExecutionState = ExecutionState()
        self.results: dict[str, str] = {}  # JSON texts by label
        self.earlier: dict[str, Any] = {}  # the loaded ones, which steps of a list can read
        self.custom_state: str = "{}"
        self._ctx, self._key, self._poll_interval = ctx, key, poll_interval
        self._labels: Mapping[Identity, str] = labels or {}
        self._saving = asyncio.Lock()

    async def load(self) -> bool:
        """Read what the checkpoint has under the key. Returns whether it has anything."""
        saved = (await self._ctx.get_state() or {}).get(self._key)
        try:
            self.state = state = ExecutionState.from_dict(saved or {})
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"the checkpoint's {self._key!r} must be the state of a StepExecutor, got {brief(saved)}. Pass another "
                "checkpoint_key=, or restart with run(steps, resume=False)"
            ) from error
        # A state that was written by hand may name its completed steps without results.
        results = dict.fromkeys(state.completed_steps) | state.step_results
        self.results = {label: _as_text(value) for label, value in results.items()}
        self.earlier = {label: decode(text) for label, text in self.results.items()}
        self.custom_state = _as_text(state.custom_state)
        return saved is not None

    def records(self) -> list[Record]:
        """The journal records of what is done of the list or map."""
        return [
            Record(self.next_seq(), DONE, name, key, 1, result=self.results[label])
            for (name, key), label in self._labels.items()
            if label in self.results
        ]

    async def record(self, records: Sequence[Record]) -> None:
        """Emit the events of these records, and save the results in them."""
        kept = False
        for record in records:
            await self._emit(record)
            if record.state is not None:  # of a start too: in a graph, only the first one has it
                self.custom_state = record.state
            if record.kind == DONE and (label := self._labels.get((record.name, record.key))) is not None:
                self._keep(label, record)
                kept = True
        if kept:
            await self._save()

    async def append(self, *records: Record, queue: object = ()) -> None:
        await self.record(records)

    note = append

    def is_newest(self, records: object) -> bool:
        """Return True: a write that failed is not repeated, since the context may have emitted its events."""
        return True

    async def _emit(self, record: Record) -> None:
        if record.kind == FAILED and (record.key.startswith("k:") or '"StepCancelledError"' in (record.info or "")):
            return  # a call in an agent loop has no events of steps, and a cancelled step has not failed
        for kind, payload in expand("", record):
            told = {name: value for name, value in payload.items() if name not in _ONLY_IN_JOURNALS}
            await self._ctx.emit(EventType(kind), told)

    def _keep(self, label: str, record: Record) -> None:
        self.results[label] = record.result or "null"
        self.state.completed_steps.append(label)
        if record.key == LIST_KEY:
            self.state.current_step_index = sum(each in self.results for each in self._labels.values())

    async def _save(self) -> None:
        async with self._saving:  # else an older state could be the last one saved
            whole = dict(await self._ctx.get_state() or {})
            whole[self._key] = self.state.to_dict() | {
                "step_results": {label: json.loads(text) for label, text in self.results.items()},
                "custom_state": json.loads(self.custom_state),
            }
            await self._ctx.checkpoint(whole)

    def watched(self, call: Callable[[int], Awaitable[Any]]) -> Callable[[int], Awaitable[Any]]:
        """The call of a step, ended when the context is cancelled."""
        return lambda attempt: self.unless_cancelled(call(attempt))

    async def unless_cancelled(self, work: Awaitable[Any]) -> Any:
        """The result of `work`. Raises StepCancelledError soon after the context was cancelled."""
        frame = FRAME.get()
        name = "" if frame is None else frame.name
        task = start_soon(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._poll_interval))[0]:
                if self._ctx.cancelled():
                    raise StepCancelledError(name)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await wait_cancelled((task,), f"step {name!r}")


class _PollingClock(Clock):
    """A clock whose sleep ends when the context is cancelled."""

    def __init__(self, ledger: CheckpointLedger) -> None:
        super().__init__()
        self._ledger = ledger

    async def sleep(self, seconds: float) -> None:
        await self._ledger.unless_cancelled(asyncio.sleep(seconds))


async def open_checkpoint(
    ctx: Any, key: str, poll_interval: float, labels: Mapping[Identity, str], shown: ExecutionState, resume: bool
) -> tuple[Book, ExecutionState]:
    """The steps of a list or map over the checkpoint of `ctx`, and their state."""
    ledger = CheckpointLedger(ctx, key, poll_interval, labels)
    saved = resume and await ledger.load()
    book = Book(cast("Ledger", ledger), records := ledger.records())
    if not resume:
        book.resets["x:"] = -1  # the list adds 1: its steps have LIST_KEY also after a restart
    if saved:
        book.states[LIST_KEY] = -1, ledger.custom_state
        if records:
            book.keep_state(LIST_KEY, "0", records[-1], ledger.custom_state)
    custom = cast("dict[str, Any]", decode(ledger.custom_state)) if saved else shown.custom_state
    state = ledger.state
    return book, ExecutionState(state.execution_id, started_at=state.started_at, custom_state=custom)


def unsaved_steps(ctx: Any) -> Book:
    """The calls of an agent loop: their events are emitted, and no result is saved."""
    return Book(cast("Ledger", CheckpointLedger(ctx)), ())


def labels_of(steps: Iterable[Step]) -> dict[Identity, str]:
    """The labels of the steps of a list: their names."""
    return {(step.name, LIST_KEY): step.name for step in steps}


def _as_text(value: Any) -> str:
    """The text of a saved value: in its form, or as it is where the context's store keeps values."""
    try:
        return plain_text(value)
    except (TypeError, ValueError):
        return encode(value, max_bytes=sys.maxsize)
