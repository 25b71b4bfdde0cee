"""Steps that the library itself takes for an agent, each under a name and a key of its own: calls of models and tools.

They tell no STEP_* events, and their errors come as they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from .._core.codec.json import decode
from .._core.event_types import EventType
from .._core.ids import step_id
from .._journal.record import Record, is_copied
from ..errors import StepCancelledError
from .checkpoint_writer import unsaved_steps
from .context import Context
from .journal_view import CONCURRENT_INFO
from .run_control import RunControl
from .step_failure import original_error
from .step_journal import StepJournal
from .step_policy import DEFAULT_POLICY, Policy
from .step_runner import StepCall, run_step

#: Told apart from None, which is a result.
UNRECORDED: object = object()


class RecordedCalls:
    """Those of one run, or of one agent loop where the context has no journal: there each step is just performed."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        ours = isinstance(ctx, Context)
        self.journal: StepJournal[Any] = ctx.journal if ours else unsaved_steps(ctx)
        self._place: RunControl = ctx.control if ours else RunControl()

    def recorded(self, name: str, key: str) -> Any:
        """The result of that step, which the run comes to with this; `UNRECORDED` if it has none."""
        record = self._recorded(name, key)
        if record is None:
            return UNRECORDED
        self.journal.advance(record)
        self.journal.records.position = max(self.journal.records.position, record.pos)
        return None if record.result is None else decode(record.result)

    def replayed(self, name: str, key: str) -> Any:
        """The same of a step that the run has yet to come to."""
        record = self._recorded(name, key)
        return UNRECORDED if record is None or record.result is None else decode(record.result)

    def _recorded(self, name: str, key: str) -> Record | None:
        return self.journal.lookup(name, f"k:{key}")

    def duration(self, name: str, key: str) -> float:
        """Seconds that the recorded step took this run; none where another run's was copied."""
        record = self.journal.lookup(name, f"k:{key}")
        return 0.0 if record is None or is_copied(record) else record.ms / 1000

    def event_fields(self, name: str, key: str) -> dict[str, str]:
        """What each event of that step says of it, for those that are told outside of it."""
        if not self.journal.writer.has_journal:
            return {}
        return {"step_id": step_id(str(self._ctx.run_id), name, f"k:{key}"), "trace_id": self._ctx.trace_id}

    def from_fork(self, name: str, key: str) -> bool:
        """Whether that step is recorded, and was paid for by the run that this one was forked from."""
        record = self.journal.lookup(name, f"k:{key}")
        return record is not None and is_copied(record)

    def in_doubt(self, name: str, key: str) -> dict[str, Any] | None:
        """What an earlier life of the run reserved for that step, if it began it and nobody knows how it ended."""
        identity, journal = (name, f"k:{key}"), self.journal
        return (
            journal.view.in_doubt_usage(identity)
            if identity in journal.view.started or identity in journal.view.lost_reservations
            else None
        )

    async def streamed(self, name: str, key: str) -> int:
        """Return how many characters of its answer that step published as ASSISTANT_DELTA events."""
        step = step_id(str(self._ctx.run_id), name, f"k:{key}")
        writer = self.journal.writer
        events = await writer.bus.get_events(writer.run_id)
        deltas = (event.payload for event in events if event.event_type == EventType.ASSISTANT_DELTA.value)
        return sum(len(each["delta"]) for each in deltas if each.get("step_id") == step)

    async def run(
        self, name: str, key: str, call: Callable[[int], Awaitable[Any]], *, policy: Policy = DEFAULT_POLICY,
        tool: dict[str, Any] | None = None, effect: str | None = None, reserve: dict[str, Any] | None = None,
        lazy: bool = False,
    ) -> Any:  # fmt: skip
        """The result of that step, which has no record yet, unless one landed that nobody heard of.

        A `tool` call, {"name", "id", "args"}, tells TOOL_CALL when it starts and TOOL_RESULT when it ends.
        `effect` is the key under which forks know a guarded call.
        `reserve` is kept with its start. The record of a `lazy` one is written together with the next that is not.
        """
        journal, place = self.journal, self._place
        if place.closed:
            await place.raise_closed()
        if place.cancelled:
            raise StepCancelledError(name)
        if journal.unconfirmed.pending:
            await journal.unconfirmed.resolve()
            if (known := self.recorded(name, key)) is not UNRECORDED:
                return known
        if (failure := journal.view.swallowed_failures.pop((name, f"k:{key}"), None)) is not None:
            raise original_error(name, failure)  # the code went on without it
        started: dict[str, Any] | None = {"tool": tool} if tool is not None else None
        if effect is not None:
            started = {**(started or {}), "effect": effect}
        if reserve:
            started = {**(started or {}), "reserve": reserve}
        info = CONCURRENT_INFO if journal.in_child_task() else None
        if tool is not None:
            info = f'{{"tool":{{"name":{quote(tool["name"])},"id":{quote(tool["id"])}}}}}'
        work = StepCall(
            name,
            f"k:{key}",
            call,
            policy,
            position=journal.records.next_position(),
            info=info,
            no_events=tool is None,
            start_info=started,
            raise_unwrapped=True,
            defer_record=lazy,
            adapt_review_result=None if tool is None else _answered,
        )
        value = await run_step(journal, work, journal.records.completion)
        journal.advance()
        return value


def _answered(result: Any) -> dict[str, Any]:
    """What somebody says of a tool call in doubt, as its record."""
    return {"content": str(result), "ok": True, "error": None, "result": result}
