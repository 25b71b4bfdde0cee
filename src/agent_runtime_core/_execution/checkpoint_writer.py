"""Record steps for a context without a journal: its checkpoint keeps results, and its `emit` receives events."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final, Protocol

from .._core.clock import Clock
from .._core.codec.json import decode, encode, plain_text
from .._core.context_vars import start_soon
from .._core.event_types import EventType
from .._core.timeouts import wait_cancelled
from .._engines.base import Op
from .._journal.record import DONE, FAILED, Record, derived_events
from ..errors import StepCancelledError
from .run_writer import StepWriter, UnconfirmedWrite
from .step import CURRENT_STEP, Identity
from .step_journal import StepJournal

LIST_KEY: Final = "x::0"  # of the steps of a list without a separate scope
_ONLY_IN_JOURNALS: Final = ("step_id", "trace_id", "input_changed")


class SavedState(Protocol):
    """The state of a `StepExecutor`, which is saved under a key of the checkpoint."""

    completed_steps: list[str]
    current_step_index: int
    step_results: dict[str, Any]
    custom_state: dict[str, Any]

    def to_dict(self) -> dict[str, Any]: ...


class CheckpointWriter:
    """Writes for a list, a map or an agent loop what a `ClaimWriter` writes for a run.

    No start is stored: an interrupted step runs again, whatever its `on_in_doubt` says. Only the results in `labels`
    are stored, each under its label.
    """

    has_journal: bool = False
    redaction: None = None
    run_id: str = ""
    claim_id: str = ""
    max_delay: float = -1.0  # below 0, so that the start of a step is never merged into its end
    closed_error: None = None
    outlast: None = None

    def __init__(
        self, ctx: Any, key: str = "", poll_interval: float = 0.5, labels: Mapping[Identity, str] | None = None
    ) -> None:
        self.clock: Clock = _PollingClock(self)
        self.unconfirmed: list[UnconfirmedWrite] = []
        self.next_seq: Callable[[], int] = count().__next__
        self.state: SavedState | None = None
        self.results: dict[str, str] = {}  # JSON texts by label
        self.earlier: dict[str, Any] = {}  # the loaded results, which steps of a list can read
        self.custom_state: str = "{}"
        self._ctx, self._key, self._poll_interval = ctx, key, poll_interval
        self._labels: Mapping[Identity, str] = labels or {}
        self._saving = asyncio.Lock()

    def load(self, state: SavedState) -> None:
        """Continue with a saved or new state."""
        self.state = state
        # A state that was written by hand may name its completed steps without results.
        results = dict.fromkeys(state.completed_steps) | state.step_results
        self.results = {label: _as_text(value) for label, value in results.items()}
        self.earlier = {label: decode(text) for label, text in self.results.items()}
        self.custom_state = _as_text(state.custom_state)

    def records(self) -> list[Record]:
        """Return the saved results of the list or map as journal records."""
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
            if record.state is not None:  # of a start too: in a DAG, only the first start contains the state
                self.custom_state = record.state
            if record.kind == DONE and (label := self._labels.get((record.name, record.key))) is not None:
                self._keep(label, record)
                kept = True
        if kept:
            await self._save()

    async def append(self, *records: Record, queue: Sequence[Op] = (), reported: bool = False) -> None:
        await self.record(records)

    async def buffer(self, *records: Record) -> None:
        await self.record(records)

    async def publish_events(self, *records: Record) -> None:
        """Do nothing: `record` emits the events itself."""

    async def confirm_record(self, record: Record) -> Record | None:
        """Return None: no write is ever unconfirmed, since none is repeated."""
        return None

    def withdraw(self, record: Record) -> bool:
        """Return False: no record is buffered."""
        return False

    def is_newest(self, records: Sequence[Record]) -> bool:
        """Return True: a write that failed is not repeated, since the context may have emitted its events."""
        return True

    async def _emit(self, record: Record) -> None:
        if record.kind == FAILED and (record.key.startswith("k:") or '"StepCancelledError"' in (record.info or "")):
            return  # a call in an agent loop produces no events of steps, and a cancelled step did not fail
        for kind, payload in derived_events("", record):
            fields = {name: value for name, value in payload.items() if name not in _ONLY_IN_JOURNALS}
            await self._ctx.emit(EventType(kind), fields)

    def _keep(self, label: str, record: Record) -> None:
        assert self.state is not None  # else no step would be labeled
        self.results[label] = record.result or "null"
        self.state.completed_steps.append(label)
        if record.key == LIST_KEY:
            self.state.current_step_index = sum(each in self.results for each in self._labels.values())

    async def _save(self) -> None:
        assert self.state is not None
        async with self._saving:  # else an older state could be saved last
            whole = dict(await self._ctx.get_state() or {})
            whole[self._key] = self.state.to_dict() | {
                "step_results": {label: json.loads(text) for label, text in self.results.items()},
                "custom_state": json.loads(self.custom_state),
            }
            await self._ctx.checkpoint(whole)

    def watched(self, call: Callable[[int], Awaitable[Any]]) -> Callable[[int], Awaitable[Any]]:
        """Return `call`, made to end when the context is cancelled."""
        return lambda attempt: self.unless_cancelled(call(attempt))

    async def unless_cancelled(self, work: Awaitable[Any]) -> Any:
        """Return the result of `work`.

        Raises:
            StepCancelledError: The context was cancelled. It is polled every `poll_interval` seconds.
        """
        scope = CURRENT_STEP.get()
        name = "" if scope is None else scope.name
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

    def __init__(self, writer: CheckpointWriter) -> None:
        super().__init__()
        self._writer = writer

    async def sleep(self, seconds: float) -> None:
        await self._writer.unless_cancelled(asyncio.sleep(seconds))


def unsaved_steps(ctx: Any) -> StepJournal[StepWriter]:
    """Return a journal for an agent loop in a context without a journal: events are emitted, and no result is saved.

    A context in which several loops run may have a `StepKeys` as `step_keys`. Then they have different keys.
    """
    return StepJournal(CheckpointWriter(ctx), (), keys=getattr(ctx, "step_keys", None))


def _as_text(value: Any) -> str:
    """Encode a saved value: plain JSON as it is, other values of the context's store with their types."""
    try:
        return plain_text(value)
    except (TypeError, ValueError):
        return encode(value, max_bytes=sys.maxsize)
