"""Store the conversation and the audit entries of a run in the stores of its runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast
from uuid import UUID, uuid5

from .._core.codec.json import decode_known
from .._core.log import log
from .._engines.base import Committer
from .._execution.context import Context, conversation_id
from .._execution.loop_messages import loop_turns
from .._execution.result_codec import OmittedHistory, decode_result, omitted_history_in
from .._journal.record import event_id
from ..errors import LeaseLost, UnserialisableResult, holds
from ..events.event import Event, id_of
from ..interfaces import RunResult
from ..persistence.base.audit import AuditStore
from ..persistence.fencing import FencedWrites
from ..persistence.manager import PersistenceManager
from ..persistence.models import AuditEntry, AuditEventType, ErrorRecord, ErrorSeverity, PerformanceMetric, moment
from ..queue.records import RunRow
from .backends import Backends
from .completion_hooks import HistoryReader
from .conversation_history import ConversationHistory, restore_history

MAX_ENTRIES_READ = 100_000  # entries of one run that are read to find the missing entries

_ENTRIES = {
    "run.started": (AuditEventType.AGENT_START, "started"),
    "run.resumed": (AuditEventType.AGENT_START, "resumed"),
    "run.succeeded": (AuditEventType.AGENT_END, "succeeded"),
    "run.cancelled": (AuditEventType.AGENT_END, "cancelled"),
    "run.timed_out": (AuditEventType.AGENT_ERROR, "timed out"),
    "run.failed": (AuditEventType.AGENT_ERROR, "failed"),
    "tool.call": (AuditEventType.TOOL_CALL, "called"),
    "tool.result": (AuditEventType.TOOL_RESULT, "returned"),
    "state.checkpoint": (AuditEventType.CHECKPOINT_SAVED, "saved a checkpoint"),
    "assistant.message": (AuditEventType.MESSAGE_SENT, "answered"),
}
_ENDS = ("run.succeeded", "run.cancelled", "run.timed_out", "run.failed")
_TOKENS = {"prompt_tokens": "tokens", "completion_tokens": "tokens", "total_tokens": "tokens", "cost_usd": "USD"}


class StoredRunRecorder:
    """The `RunRecorder` of one claim. See there for its methods."""

    def __init__(self, stores: PersistenceManager, backends: Backends, row: RunRow, *, audited: bool = True) -> None:
        self.stores: PersistenceManager = stores
        self.backends: Backends = backends
        self.row: RunRow = row
        self.audited: bool = audited
        self.history: ConversationHistory | None = None
        self.ctx: Context | None = None

    async def fence(self, claim: FencedWrites) -> None:
        """Have every store that the run may write to refuse the run's earlier claims."""
        fenced: list[Committer] = []
        for documents in self.stores.document_stores():
            target = documents.commits
            if not any(target is each for each in fenced):
                fenced.append(target)
                await claim.install(target)

    async def load(self, ctx: Context, reader: HistoryReader | None = None) -> None:
        """Load the earlier messages of the conversation into the context; `reader` reads them, or is None."""
        self.ctx = ctx
        if ctx.conversation_id is not None:
            self.history = ConversationHistory(
                self.stores.conversations, ctx.conversation_id, self.row, self.backends.queue.clock
            )
            await self.history.load(ctx, None if reader is None else reader.read_history)

    async def save(self, result: RunResult) -> None:
        """Append the run's new messages to the conversation."""
        if self.history is not None and not self._owned:
            await self.history.save(result)

    async def keep(
        self, result: RunResult, sent: Sequence[dict[str, Any]], *, rejected: bool, unanswered: bool
    ) -> None:
        """Append the complete turns of a run that did not succeed, and the user's messages."""
        if self._owned:
            return
        given = cast("dict[str, Any]", decode_known(self.row.input))
        named = conversation_id(given.get("conversation_id"))
        if named is None:
            return
        records = await self.backends.state.records(self.row.run_id)
        if self.ctx is not None:  # also contains what is not written yet
            records = [*records, *self.ctx.journal.view.completed.values()]
        turns = [*loop_turns(records, _known)]
        if any(each.owned for each in turns):
            return
        if (history := self.history) is None:
            history = ConversationHistory(self.stores.conversations, named, self.row, self.backends.queue.clock)
            if not await history.load_recorded(records, given.get("messages") or []):
                return  # its code never started
        await history.keep(turns, sent, result, rejected=rejected, unanswered=unanswered)

    def omitted_history(self, result: RunResult) -> OmittedHistory | None:
        """Return which messages of a result need not be recorded, because the conversation contains them."""
        # An agent that stores the conversation itself may change it, and the saved result must stay the same.
        return None if self.history is None or self._owned else self.history.omitted(result)

    @property
    def _owned(self) -> bool:
        """Whether the agent stores the conversation itself."""
        return self.ctx is not None and self.ctx.owns_conversation

    async def restore(self, text: str) -> RunResult:
        """Return a saved result, with the messages that it refers to."""
        result, omitted = decode_result(text), omitted_history_in(text)
        return result if omitted is None else await restore_history(self.stores.conversations, result, omitted)

    async def audit(self, result: RunResult | None) -> None:
        """Write to the audit store what happened; `result` is the result of a finished run."""
        audit = self.stores.audit if self.audited and self.stores.has_audit() else None
        if audit is not None:
            named = cast("dict[str, Any]", decode_known(self.row.input)).get("conversation_id")
            await AuditLog(audit, self.backends, self.row, conversation_id(named)).write(result)


def _known(text: str | None) -> Any:
    return None if text is None else decode_known(text)


class AuditLog:
    """Writes entries, errors and metrics of one run to an audit store, under one claim.

    They are made of the run's events. How the run started and finished is taken only from events that follow from
    records of its journal, because other code may publish events of the same types. Each entry has an id made of the
    run's id and the event's number. So an entry that an earlier claim wrote is not written again, and a missing entry
    is added. The failure of an audit store is logged, and fails no run.
    """

    def __init__(self, store: AuditStore, backends: Backends, row: RunRow, conversation_id: UUID | None) -> None:
        self.store: AuditStore = store
        self.backends: Backends = backends
        self.row: RunRow = row
        self.run_id: UUID = UUID(row.run_id)
        self._about: dict[str, Any] = {
            "conversation_id": conversation_id,
            "run_id": self.run_id,
            "agent_key": row.agent,
        }

    async def write(self, result: RunResult | None) -> None:
        """Write entries for the events without entries, and the metrics of a finished run.

        Raises:
            LeaseLost: The store refused the claim. Other errors are logged.
        """
        try:
            await self._write_all(result)
        except Exception as error:  # a custom store may raise anything, and the run is not affected
            if holds(error, LeaseLost):
                raise
            log.exception("audit log of run %s (agent %s) failed", self.row.run_key or self.row.run_id, self.row.agent)

    async def _write_all(self, result: RunResult | None) -> None:
        known = {each.id for each in await self.store.get_events(run_id=self.run_id, limit=MAX_ENTRIES_READ)}
        events = await self._events()
        if result is None and events and events[-1].event_type in _ENDS:
            events = events[:-1]  # the claim that finishes the run writes its end, with the metrics
        for event in events:
            if event.event_type in _ENTRIES and self._id(event.sequence) not in known:
                if result is not None and event is events[-1]:
                    await self._write_metrics(result, event)  # before the last entry, which marks the run as written
                await self._write(event, events)

    async def _events(self) -> list[Event]:
        """Return the run's events, without run.* events that follow from no record of its journal."""
        bus, state = self.backends.bus, self.backends.state
        numbers, ids = set[int](), set[str]()
        for record in await state.records(self.row.run_id):
            numbers.update(range(record.ev, record.ev + record.nev))
            ids.update(event_id(record, index) for index in range(max(record.nev, 1)))
        derived = bus.derives and bus.commits is state.commits
        return [
            event
            for event in await bus.get_events(self.run_id)
            if not event.event_type.startswith("run.")
            or (event.sequence in numbers if derived else id_of(event) in ids)
        ]

    def _id(self, what: object) -> UUID:
        return uuid5(self.run_id, f"audit:{what}")

    async def _write(self, event: Event, events: Sequence[Event]) -> None:
        kind, action = _ENTRIES[event.event_type]
        payload = event.payload
        tool = payload.get("tool_name")
        what = f"tool {tool!r}" if tool else f"agent {self.row.agent!r}"
        failed = payload.get("error") if event.event_type == "tool.result" else None
        if failed is not None:
            kind, action = AuditEventType.TOOL_ERROR, "failed"
            await self._error(event, "ToolError", str(failed), ErrorSeverity.WARNING, {"tool_name": tool})
        if event.event_type in ("run.failed", "run.timed_out"):
            worst = ErrorSeverity.CRITICAL if payload.get("type") == "Poisoned" else ErrorSeverity.ERROR
            kinds = payload.get("type") or "TimedOut"
            await self._error(event, kinds, payload.get("message", ""), worst, payload.get("details") or {})
        if event.event_type == "tool.result":
            await self._write_duration(event, events)
        entry = AuditEntry(
            id=self._id(event.sequence), event_type=kind, timestamp=event.timestamp,
            action=f"{what} {action}", details=dict(payload), actor_id=self.row.agent, **self._about,
        )  # fmt: skip
        try:
            await self.store.log_event(entry)
        except UnserialisableResult as refusal:  # the payload may be larger than an entry can be
            await self.store.log_event(replace(entry, details={"left_out": str(refusal)}))

    async def _error(
        self, event: Event, kind: str, message: str, severity: ErrorSeverity, context: dict[str, Any]
    ) -> None:
        await self.store.log_error(
            ErrorRecord(
                id=self._id(f"{event.sequence}:error"), timestamp=event.timestamp, severity=severity, error_type=kind,
                message=message, stack_trace=event.payload.get("stack") or None, context=context, **self._about,
            )
        )  # fmt: skip

    async def _write_duration(self, event: Event, events: Sequence[Event]) -> None:
        call_id = event.payload.get("tool_call_id")
        calls = [
            each
            for each in events
            if each.event_type == "tool.call"
            and each.payload.get("tool_call_id") == call_id
            and each.sequence < event.sequence
        ]
        if calls:
            ms = (moment(event.timestamp) - moment(calls[-1].timestamp)) * 1000
            tags = {"tool": event.payload.get("tool_name")}
            await self._metric(f"{event.sequence}:ms", "tool_duration_ms", ms, "ms", event, tags)

    async def _write_metrics(self, result: RunResult, last: Event) -> None:
        tags = {"status": result.status.value if result.status is not None else ""}
        ms = (moment(last.timestamp) - self.row.created_at) * 1000
        figures = [("run_duration_ms", ms, "ms"), ("run_attempts", self.row.attempt, "attempts")]
        figures += [
            (name, value, unit)
            for name, unit in _TOKENS.items()
            if isinstance(value := (result.usage or {}).get(name), (int, float)) and not isinstance(value, bool)
        ]
        for name, value, unit in figures:
            await self._metric(f"{last.sequence}:{name}", name, value, unit, last, tags)

    async def _metric(self, what: str, name: str, value: float, unit: str, event: Event, tags: dict[str, Any]) -> None:
        metric = PerformanceMetric(
            id=self._id(what), name=name, value=float(value), unit=unit, timestamp=event.timestamp, tags=tags,
            **self._about,
        )  # fmt: skip
        await self.store.record_metric(metric)
