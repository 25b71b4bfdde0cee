"""An agent's view of its run: events, checkpoints, steps, waits, children, all under one claim."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID
from weakref import ref

from .._core.clock import Clock
from .._core.codec.json import decode, digest, encode
from .._core.event_types import EventType
from .._core.ids import known_uuid, trace_id
from ..errors import InvalidArgument, NotSupported, brief
from ..events.base import agent_event_type
from ..interfaces import AgentRuntime, RunResult
from ..limits import Budget, RunLimits
from ..queue.records import RunRow
from ..tools.registry import ToolRegistry
from .context_steps import ContextSteps
from .run_control import RunControl, Services
from .step_journal import RunJournal
from .waits import Waits

if TYPE_CHECKING:
    from ..persistence.manager import PersistenceManager

T = TypeVar("T")

_DELTA = EventType.ASSISTANT_DELTA.value


class Context(ContextSteps):
    """One claim's view of one run; see `interfaces.RunContext` for what agents rely on."""

    def __init__(
        self,
        row: RunRow,
        book: RunJournal,
        services: Services,
        place: RunControl,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(book, services.clock, place)
        self._row, self._services = row, services
        place.context = ref(self)
        input_ = cast("dict[str, Any]", decode(row.input))
        self.run_id: UUID = known_uuid(row.run_id)
        self.run_key: str | None = row.run_key
        self.input = input_
        self.input_messages: list[Any] = input_.get("messages") or []
        self.params: dict[str, Any] = input_.get("params") or {}
        self.conversation_id: UUID | None = conversation_id(input_.get("conversation_id"))
        self.metadata: dict[str, Any] = cast("dict[str, Any]", decode(row.metadata))
        self.attempt: int = row.attempt
        self.failures: int = row.failures  # of the attempts before; the others crashed
        #: Whether the agent keeps the conversation of this run itself; see `own_conversation`.
        self.owns_conversation: bool = False
        #: What was said before in the run's conversation and its own messages, once that was read.
        self.history: list[Any] | None = None
        self._budget: Budget | None = None
        self._overrides = overrides  # limits that `resume` or `requeue` set for this run
        self.tools: ToolRegistry = services.tools
        self._waits: Waits | None = None

    @property
    def tool_registry(self) -> ToolRegistry:
        return self.tools

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def initial_messages(self) -> list[Any]:
        """The messages that the run began with, whatever its agent has made of `input_messages` since."""
        if self.history is not None:
            return self.history
        return cast("dict[str, Any]", decode(self._row.input)).get("messages") or []

    @property
    def persistence(self) -> PersistenceManager:
        """Conversations, tasks, memory, preferences, knowledge and audit, written under this run's claim."""
        stores = self._services.persistence
        if stores is None:
            raise NotSupported("this context was made without stores: runner.services() lends them")
        return stores()

    @property
    def waits(self) -> Waits:
        """The waits of this run; many have none."""
        if self._waits is None:
            self._waits = Waits(self.journal, self._row, self._services, self.control)
        return self._waits

    @property
    def waiting_tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that are inside a wait of this run."""
        return [] if self._waits is None else list(self._waits.waiting_tasks())

    @property
    def budget(self) -> Budget:
        """What all agent loops of this run may use: by its runner's limits and by those of its input."""
        if self._budget is None:
            limits = RunLimits.of(self._services.limits).stricter(self.input.get("limits"))
            self._budget = Budget(limits, overrides=self._overrides)
        return self._budget

    @property
    def trace_id(self) -> str:
        return trace_id(self.run_id)

    @property
    def step_id(self) -> str | None:
        """The step this code runs in, or None between steps."""
        frame = self._scope
        return None if frame is None else frame.step_id

    def where(self) -> dict[str, Any]:
        """What an event says of the step this code runs in; nothing between steps."""
        frame = self._scope
        return {} if frame is None else {"step_id": frame.step_id, "trace_id": self.trace_id}

    @property
    def idempotency_key(self) -> str | None:
        """`run_id:step_id`, the same on every attempt of the step this code runs in; None between steps."""
        step = self.step_id
        return None if step is None else f"{self.run_id}:{step}"

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of all agent loops of this run so far; nothing where there was none."""
        return {} if self._budget is None or not self._budget.begun else self._budget.reported_usage()

    def cancelled(self) -> bool:
        return self.control.cancelled

    def is_cancelled(self) -> bool:
        return self.control.cancelled

    def trace(self, kind: str, payload: dict[str, Any]) -> None:
        """Tell the trace sinks what is no event of the run."""
        tracer = self._services.tracer
        if tracer is not None:
            tracer.event(self.run_id, kind, payload)

    @property
    def traced(self) -> bool:
        """Whether anybody hears of a trace."""
        return self._services.tracer is not None

    def own_conversation(self) -> None:
        """Declare that the agent keeps the conversation itself: the runner appends nothing of this run to it.

        Call it between steps, at any time before `run` returns. Each attempt of the run starts without the
        declaration, so code that calls it on every attempt needs no record of it. `input_messages` stay as they are;
        `input["messages"]` are those that came with the run.

        Raises:
            InvalidArgument: if it is called inside a step. A resumed run does not execute a completed step again, and
                would lose the declaration.
        """
        if self.owns_conversation:
            return
        if self._scope is not None:
            raise InvalidArgument(
                f"ctx.own_conversation() must be called between steps, got a call inside step {self._scope.name!r}. "
                "Call it before the step: a resumed run does not execute a completed step again"
            )
        self.owns_conversation = True

    # -- events and checkpoints

    async def emit(self, event_type: EventType | str, payload: dict[str, Any] | None = None) -> None:
        """Publish an event of this run; returns when it is durable.

        Code between steps that runs again on resume publishes nothing twice.
        """
        if self.control.closed:
            await self.control.raise_closed()
        kind = agent_event_type(event_type)
        if payload is not None and not isinstance(payload, dict):
            raise InvalidArgument(f"an event's payload is a dict, not {type(payload).__name__}")
        row = self._event(kind, payload or {})
        if row is not None:
            [sequence] = await self._ledger.emit([row])
            told = self._services.backpressure
            if told is not None and kind == _DELTA:
                await self._wait_for_readers(told(self._row.run_id, sequence, len(row[2].encode())))

    async def _wait_for_readers(self, until: asyncio.Future[None] | None) -> None:
        """Wait for an output that is too far behind, which is no time of the run's own."""
        place = self.control
        if until is None:
            return
        alone = place.paused_at is None
        if alone:
            place.paused_at = self._clock.boot()
        try:
            await until
        finally:
            if alone and place.paused_at is not None:
                place.paused_seconds += self._clock.boot() - place.paused_at
                place.paused_at = None

    def _event(self, kind: str, payload: dict[str, Any]) -> tuple[str, str, str, float] | None:
        frame, book = self._scope, self.journal
        if frame is not None:
            payload = {**self.where(), **payload}
            mark = f"s:{frame.step_id}:{self._ledger.claim_id}.{frame.attempt}:{frame.emitted}"
            frame.emitted += 1
        elif book.is_replaying:
            return None
        else:
            mark = f"b:{book.boundary}:{book.emitted}:{self._row.generation}.{self._row.failures}"
            book.emitted += 1
        text = encode(payload)
        return (f"{mark}:{digest(kind + text)[:8]}", kind, text, self._clock.wall())

    async def checkpoint(self, state: dict[str, Any]) -> None:
        """Save `state` for `get_state`, and publish it as a STATE_CHECKPOINT event."""
        await self.control.ensure_open()
        if not isinstance(state, dict):
            raise InvalidArgument(f"a checkpoint is a dict, not {type(state).__name__}: {brief(state)}")
        text = encode(state)
        row = self._event(EventType.STATE_CHECKPOINT.value, {"state": state})
        if row is not None:
            await self._ledger.checkpoint(text, row[0], row)

    async def get_state(self) -> dict[str, Any] | None:
        """The last checkpoint, or None."""
        await self.control.ensure_open()
        return await self._ledger.state.get_checkpoint(self._row.run_id)

    # -- waiting

    async def sleep(self, seconds: float, *, key: str | None = None) -> None:
        """Wait; a crash or a park in between does not begin the wait anew. Those that go on side by side need a `key`
        each."""
        await self.control.ensure_open()
        await self.waits.sleep(seconds, key)

    async def wait_for_signal(self, name: str, *, timeout: float | None = None, key: str | None = None) -> Any:
        """The payload of the next signal of that name; WaitTimeout after `timeout` seconds. `key` as for `sleep`."""
        await self.control.ensure_open()
        return await self.waits.signal(name, timeout, key)

    async def approve(
        self,
        name: str,
        details: Any = None,
        *,
        schema: dict[str, Any] | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> Any:
        """Ask for a decision, as an "approval.requested" event, and wait for its answer.

        `schema` (JSON Schema) says what an answer looks like; `runner.approve` checks it. On a resume an
        approval is known by its name and how often that name was used before, or by `key`.
        """
        await self.control.ensure_open()
        return await self.waits.approve(name, details, schema, timeout, key)

    async def call(self, agent: AgentRuntime | str, input: dict[str, Any], *, key: str | None = None) -> RunResult:
        """Run another agent as a child of this run and wait for it; RunFailed unless it succeeds.

        The child has an id of its own that is the same on every attempt, so it is never run twice.
        """
        await self.control.ensure_open()
        return await self.waits.child(agent, input, key)


def conversation_id(value: Any) -> UUID | None:
    """The id of the conversation that a run names; for a text that is no UUID, always the same one. "" names none."""
    if isinstance(value, UUID):
        return value
    if value is None or value == "":
        return None
    try:
        return UUID(str(value))
    except ValueError:
        return UUID(digest(f"conversation:{value}"))


#: The name under which 0.5.2 knew the one concrete context class.
RunContextImpl = Context
