"""Start, watch, cancel and delete turns. Each turn is a run."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from .._core.clock import aware
from .._core.codec.json import encode
from .._core.ids import run_uuid, stored_id, trace_id
from .._core.log import log
from .._core.settings import DURATION, POSITIVE, SECONDS, check_known
from .._core.validation import sentence
from ..errors import InvalidArgument, InvalidTurn, UnknownRun, UnserialisableResult
from ..events.event import Event
from ..interfaces import LLMClient
from ..llm._retries import Breakers
from ..planning.agent import built_in_tools
from ..planning.plan import BasePlanner, checked_planner, registry_of
from ..planning.rule_planner import RuleBasedPlanner
from ..queue.records import RunRow
from ..registry import Preferring
from ..runner.runner import AgentRunner
from ..runner.settings import RunInfo
from ..status import TERMINAL, RunStatus, StepStatus
from ..tools.base import BaseTool
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .context_manager import ContextManager
from .event_topics import EventPublisherSubscriber, next_unless
from .events import RESULTS, TURNS, AuditEvent, EventEnvelope, StepResultChunk, TurnEvent, invalid
from .hooks import Hooks, TurnLog
from .personality import PackSet, PersonalityInstance, PersonalityPackManager
from .planner import PlanExecutor
from .processor import StepProcessor
from .services import TurnServices
from .settings import ConfigLoader, ProviderSteps, Settings, TurnSettings
from .turn import StepMetrics, StepState, Turn
from .turn_run import FROM_TOPIC, StepAgent, TurnAgent, finish_turn, turn_of

_INPUT = ("conversation_id", "user_id", "personality")
_NOT_OPTIONS = {"agent_key", "input", "run_id"}  # arguments of `submit` that the turn itself sets


class TurnManager:
    """Starts turns on a runner whose workers execute them.

    A turn is a run of an agent with the key `key`. Its id, durability, cancellation, retries, limits, `trace_id` and
    its order after other turns of its conversation come from the run. Create a manager in every process whose workers
    execute turns.

    Args:
        runner: Stores and executes the turns.
        planner: Makes the plans; by default a RuleBasedPlanner.
        packs: The personalities; by default the packs of `config`.
        config: A ConfigLoader, whose settings are read once for each turn, or fixed Settings.
        tools: The tools of plans; by default the tools of the runner, or without any a calculator and a to-do store.
        client: The model client for every personality; by default each personality uses the client of its provider.
        hooks: Objects with on_turn_start, on_plan_ready, on_step_start, on_step_end, on_turn_end or on_error.
        remote_steps: Whether each step is a child run; by default as in `config`.
        max_in_flight: Steps that run at the same time in this process; by default as in `config`.
        provider_steps: The steps that provider workers execute; by default as in `config`.
        step_tries: Attempts of each step, including the first.
        backoff_base: Seconds before the second attempt of a step; doubled for each later attempt.
        breakers: The circuit breakers of clients without their own.
        key: The agent key of the turns.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import AgentRunner
        >>> from agent_runtime_core.turns import TurnManager
        >>> async def main():
        ...     async with AgentRunner.open("memory://") as runner:
        ...         turn = await TurnManager(runner).run_turn("add 3 and 4")
        ...         return turn.status.value, turn.steps[0].result
        >>> asyncio.run(main())
        ('succeeded', 7)
    """

    def __init__(
        self,
        runner: AgentRunner,
        *,
        planner: BasePlanner | None = None,
        packs: PersonalityPackManager | PackSet | None = None,
        config: ConfigLoader | Settings | None = None,
        tools: ToolRegistry | Iterable[Tool | BaseTool] | None = None,
        client: LLMClient | None = None,
        hooks: Iterable[Any] = (),
        remote_steps: bool | None = None,
        max_in_flight: int | None = None,
        provider_steps: ProviderSteps | None = None,
        step_tries: int = 3,
        backoff_base: float = 1.0,
        breakers: Breakers | None = None,
        key: str = "turn",
    ) -> None:
        POSITIVE.check("step_tries", step_tries)
        SECONDS.check("backoff_base", backoff_base)
        self.runner = runner
        self._config, self._packs = config, packs
        self._overrides: dict[str, Any] = {
            name: value
            for name, value in (
                ("remote_steps", remote_steps),
                ("max_in_flight", max_in_flight),
                ("provider_steps", provider_steps),
            )
            if value is not None
        }
        clock = runner.queue.clock
        self.topics: EventPublisherSubscriber = EventPublisherSubscriber(
            runner.event_bus, runner.state_store, tracer=lambda: runner.tracer
        )
        self.contexts: ContextManager = ContextManager(lambda: runner.persistence, clock=clock)
        self.hooks: Hooks = Hooks(hooks)
        self.processor: StepProcessor = StepProcessor(
            self.topics, self.hooks, clock=clock, max_in_flight=self.settings.turns.max_in_flight, breakers=breakers
        )
        if tools is None:
            tools = runner.tools if runner.tools.list_tools() else built_in_tools()
        self._services = TurnServices(
            key=key, plans=PlanExecutor(RuleBasedPlanner() if planner is None else checked_planner(planner)),
            processor=self.processor, contexts=self.contexts, topics=self.topics, hooks=self.hooks,
            tools=registry_of(tools), settings=lambda: self.settings, personality=self._personality, client=client,
            max_retries=runner.config.max_retries, step_tries=step_tries, backoff_base=backoff_base,
        )  # fmt: skip
        # Runners may share a registry: each runner prefers the agents of its manager.
        known = runner.registry if isinstance(runner.registry, Preferring) else Preferring(runner.registry)
        runner.registry = known
        for agent in (TurnAgent(self._services), StepAgent(self._services)):
            known.unregister(agent.key)  # of an earlier manager
            known.register(agent)
            known.prefer(agent)

    @property
    def settings(self) -> Settings:
        """The present settings, with the arguments of this manager applied."""
        config = self._config
        now = config.current if isinstance(config, ConfigLoader) else config or Settings()
        return replace(now, turns=replace(now.turns, **self._overrides)) if self._overrides else now

    @property
    def key(self) -> str:
        """The agent key of the turns."""
        return self._services.key

    @property
    def max_unsent_bytes(self) -> int | None:
        """Bytes that a reader may lag before a turn waits; None means the runner's setting."""
        configured = self.settings.turns.max_unsent_bytes
        return configured if configured != TurnSettings.max_unsent_bytes else None

    def _personality(self, settings: Settings, name: str | None) -> PersonalityInstance:
        packs = self._packs
        if packs is None:
            return settings.packs.get(name)
        return (packs.current if isinstance(packs, PersonalityPackManager) else packs).get(name)

    # -- starting

    async def start_turn(self, turn: TurnEvent | Mapping[str, Any] | str, **options: Any) -> Turn:
        """Store a turn for a worker. A second call with the same `turn_id` returns the same turn.

        Args:
            turn: The event, its dict, or the text of a user message.
            **options: Options of `runner.submit`: priority, delay, deadline and so on.

        Returns:
            The turn, once it is durable.

        Raises:
            InvalidTurn: Names the field that is invalid; its `status_code` is 422.
            IdempotencyConflict: `turn_id` is already used by another turn.
            UnknownSetting: An option does not exist.
        """
        if options:
            known = inspect.signature(self.runner.submit).parameters.keys() - _NOT_OPTIONS
            for name in options:
                check_known(name, known, "start_turn()", "option")
        if options.get("parent_run_id") is not None:
            options["tenant"] = (
                await self.runner.tenant_of_new_run(options.get("tenant"), options["parent_run_id"]) or None
            )
        stored, _ = await self.runner.insert_run(self.new_run(turn, **options))
        return await self.get_turn(stored.run_id)

    def new_run(self, turn: TurnEvent | Mapping[str, Any] | str, **options: Any) -> RunRow:
        """Return the row of a new turn, checked. Nothing is stored; arguments and errors as for `start_turn`."""
        event = _of_tenant(self._checked_event(turn), options.pop("tenant", None))
        input_, metadata, run_id = self._run_arguments(event)
        metadata |= options.pop("metadata", None) or {}
        with _naming_invalid_field(event):
            return self.runner.new_run(
                self._services.key, input_, run_id=run_id, metadata=metadata, tenant=event.tenant, **options
            )

    async def run_turn(self, turn: TurnEvent | Mapping[str, Any] | str) -> Turn:
        """Execute a turn in this process and return it when it is finished. Raises the errors of `start_turn`.

        Args:
            turn: The event, its dict, or the text of a user message.

        Returns:
            The finished turn.
        """
        event = self._checked_event(turn)
        input_, metadata, run_id = self._run_arguments(event)
        with _naming_invalid_field(event):
            done = await self.runner.execute(self._services.key, run_id, input_, metadata, tenant=event.tenant)
        assert done.run_id is not None
        return await self.get_turn(done.run_id)

    def _checked_event(self, turn: TurnEvent | Mapping[str, Any] | str) -> TurnEvent:
        """Return the event. Raise InvalidTurn if it is invalid or names an unknown personality."""
        event = TurnEvent.of(turn)
        if event.personality is not None:
            try:
                self._personality(self.settings, event.personality)
            except InvalidArgument as error:
                raise InvalidTurn("personality", str(error)) from None
        return event

    def _run_arguments(self, event: TurnEvent) -> tuple[dict[str, Any], dict[str, Any], UUID | str]:
        """Return input, metadata and id of the turn's run."""
        run_id: UUID | str
        try:
            run_id, run_key = run_uuid(event.turn_id, self.runner.queue.clock, event.tenant or "")
        except InvalidArgument as error:
            raise InvalidTurn("turn_id", str(error).removeprefix("run_id ")) from None
        input_: dict[str, Any] = {"messages": event.messages, "params": event.params}
        input_ |= {name: value for name in _INPUT if (value := getattr(event, name)) is not None}
        metadata = dict(event.metadata)
        if event.trace_id is not None:
            metadata["parent_trace_id"] = event.trace_id
        if run_key is not None:
            metadata["turn_key"] = run_key
            if event.tenant is not None:
                run_id = run_key  # the row contains it, so that callers without a tenant find the turn by its name
        return input_, metadata, run_id

    # -- reading and ending

    async def get_turn(self, turn_id: UUID | str, *, tenant: str | None = None) -> Turn:
        """Return the present state of a turn.

        Args:
            turn_id: The turn.
            tenant: The tenant whose turn it is, as in `runner.get_run`. Every method that takes a turn id takes it too.

        Raises:
            UnknownRun: There is no turn with this id.
        """
        info = await self._info(turn_id, tenant)
        turn = await self.contexts.for_tenant(info.tenant).get_turn(str(info.run_id))
        if turn is None:
            turn = turn_of(str(info.run_id), trace_id(info.run_id), info.input, info.metadata, info.tenant)
        turn.created_at = info.created_at
        turn.status = info.status
        if info.status in TERMINAL:
            turn.updated_at = info.ended_at or turn.updated_at
            if info.status is not RunStatus.SUCCEEDED:
                finish_turn(turn, await self.runner.wait(info.run_id))
                turn.error = turn.error or {"type": info.reason or info.status.value, "message": "", "details": {}}
        return turn

    async def _info(self, turn_id: UUID | str, tenant: str | None) -> RunInfo:
        info = await self.runner.get_run(turn_id, tenant=tenant)
        if info.agent_key != self._services.key:
            raise UnknownRun(
                f"run {str(turn_id)!r} must be a turn, got a run of agent {info.agent_key!r}. Use runner.get_run()."
            )
        return info

    async def wait(self, turn_id: UUID | str, timeout: float | None = None, *, tenant: str | None = None) -> Turn:
        """Return the turn when it is finished.

        Args:
            turn_id: The id of the turn.
            timeout: Seconds to wait, or None for no limit.
            tenant: The tenant, as in `get_turn`.

        Raises:
            TimeoutError: It is not finished after `timeout` seconds. None waits without a limit.
        """
        await self.runner.wait(turn_id, timeout, tenant=tenant)
        return await self.get_turn(turn_id, tenant=tenant)

    async def cancel(self, turn_id: UUID | str, *, wait: bool = False, tenant: str | None = None) -> bool | RunStatus:
        """Cancel the turn and its steps, like `runner.cancel`.

        Args:
            turn_id: The id of the turn.
            wait: Wait until the turn is finished.
            tenant: The tenant, as in `get_turn`.

        Returns:
            As `runner.cancel`: whether the request is stored; with `wait`, the final status.
        """
        info = await self._info(turn_id, tenant)
        return await self.runner.cancel(info.run_id, wait=wait)

    async def discard(self, turn_id: UUID | str, *, tenant: str | None = None) -> None:
        """Delete a finished turn: its run and its saved state. The topics keep their events.

        Args:
            turn_id: The id of the turn.
            tenant: The tenant, as in `get_turn`.

        Raises:
            IllegalTransition: The turn is not finished.
        """
        info = await self._info(turn_id, tenant)
        await self.runner.discard(info.run_id)
        await self.contexts.for_tenant(info.tenant).forget_turn(str(info.run_id))

    async def vacuum(self, older_than: float) -> int:
        """Delete old events of all topics and free their space. `runner.vacuum` deletes the runs of turns.

        Keep events longer than a turn may last. A resumed turn publishes again what it published before, and a deleted
        event can no longer be recognized as a duplicate.

        Args:
            older_than: Seconds.

        Returns:
            The number of deleted events.
        """
        DURATION.check("older_than", older_than)
        # A time before the epoch may be outside the range of datetime.
        deleted = await self.topics.trim(before=max(self.runner.queue.clock.wall() - older_than, 0.0))
        compact = getattr(self.runner.event_bus.commits, "compact", None)
        if deleted and compact is not None:
            await compact()
        return deleted

    async def stream(
        self, turn_id: UUID | str, since_sequence: int = 0, *, backpressure: bool = False, tenant: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the turn's events, stored events and then new events, until it is finished; like `runner.stream`.

        With `backpressure`, the limit is `max_unsent_bytes` of `[turns]` unless that is the default.

        Args:
            turn_id: The id of the turn.
            since_sequence: The sequence number of the first event.
            backpressure: As in `runner.stream`.
            tenant: The tenant, as in `get_turn`.
        """
        stream = self.runner.stream(
            turn_id, since_sequence, backpressure, max_unsent_bytes=self.max_unsent_bytes, tenant=tenant
        )
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                yield event

    # -- events

    async def handle_step_result_event(self, envelope: EventEnvelope) -> Turn | None:
        """Save the result of a step from its event. The process that executes the turn does not need this.

        Duplicates, pieces of a result, and results for a finished step change nothing.

        Returns:
            The turn, or None if it is not stored here.

        Raises:
            InvalidTurn: The envelope is not a step result of a turn.
        """
        if not isinstance(envelope, EventEnvelope):
            raise invalid("envelope", "be an EventEnvelope from a topic", envelope)
        chunk, turn_id = envelope.payload, envelope.turn_id
        if not isinstance(chunk, StepResultChunk) or turn_id is None:
            raise invalid("payload", "be a step result of a turn", envelope.type, f"Pass an event of {RESULTS}")
        contexts = self.contexts.for_tenant(envelope.tenant)
        turn = await contexts.get_turn(turn_id)
        state = None if turn is None else turn.step(chunk.step_number)
        if turn is None or state is None or not chunk.final or _is_outdated(state, chunk):
            return turn

        def apply(turn: Turn) -> None:
            state = turn.step(chunk.step_number)
            if state is None or _is_outdated(state, chunk):
                return
            state.status, state.result, state.error = StepStatus(chunk.status), chunk.result, chunk.error
            state.attempt, state.metrics = chunk.attempt, StepMetrics.from_dict(chunk.metrics)
            state.apart = None
            turn.updated_at = aware(self.runner.queue.clock.wall())

        return await contexts.change_turn(turn_id, apply)

    async def consume(self, *, consumer: str = "turns", stop: asyncio.Event | None = None) -> None:
        """Start the turns that are published on agent.turns, until `stop` is set or the caller is cancelled.

        The offset is committed after the run is stored. A crash in between starts the same turn again, which changes
        nothing. An invalid request is logged and published on agent.audit.

        Args:
            consumer: The name that the offset is stored under.
            stop: Ends the loop when it is set.
        """
        following = self.topics.subscribe(TURNS, consumer=consumer)
        async with contextlib.aclosing(following):
            while (envelope := await _next(following, stop)) is not None:
                await self.start_published(envelope)
                assert envelope.offset is not None
                await self.topics.commit(TURNS, consumer, envelope.offset)

    async def _was_started(self, turn_id: str, tenant: str) -> bool:
        """Return whether the turn was started. Turns that did not start from the topic publish their event too."""
        try:
            row = await self.runner.queue.row(stored_id(turn_id, tenant))
        except InvalidArgument:
            return False
        return row is not None and row.tenant == tenant

    async def start_published(self, envelope: EventEnvelope) -> None:
        """Start the turn that an envelope of agent.turns requests, once; report an invalid envelope on agent.audit."""
        if not isinstance(envelope.payload, TurnEvent):
            return
        event = envelope.payload
        turn_id = event.turn_id or envelope.turn_id or f"turn:{envelope.event_id}"
        tenant = envelope.tenant or event.tenant
        if await self._was_started(turn_id, tenant or ""):
            return
        try:
            event = _of_tenant(event, tenant)
            event = replace(event, turn_id=turn_id, metadata={**event.metadata, FROM_TOPIC: True})
            turn = await self.start_turn(event)
            TurnLog(turn.trace_id, turn.id).info("started from topic %s, offset %s", TURNS, envelope.offset)
        except InvalidArgument as error:
            log.warning("turn %s of topic %s rejected: %s", turn_id, TURNS, error)
            details = {"event_id": envelope.event_id, "error": str(error), "field": getattr(error, "field", None)}
            await self.topics.tell(
                AuditEvent(action="turn.refused", details=details), event_id=f"refused:{envelope.event_id}",
                turn_id=envelope.turn_id, trace_id=envelope.trace_id, tenant=tenant,
            )  # fmt: skip


def _of_tenant(event: TurnEvent, tenant: str | None) -> TurnEvent:
    """Return the event of a turn of a tenant. If None, of the tenant that the event names, if any."""
    if tenant is None or event.tenant == tenant:
        return event
    if event.tenant is not None:
        raise invalid("tenant", f"be {tenant!r}, as its sender says", event.tenant)
    return replace(event, tenant=tenant)


def _is_outdated(state: StepState, chunk: StepResultChunk) -> bool:
    """Return whether the step is at or after this result. A failed step may still get results of later attempts."""
    if state.status is StepStatus.FAILED:
        return state.attempt > chunk.attempt or (chunk.status == "failed" and state.attempt == chunk.attempt)
    return state.ended or state.attempt > chunk.attempt


@contextlib.contextmanager
def _naming_invalid_field(event: TurnEvent) -> Iterator[None]:
    """Raise InvalidTurn, with the field, for a value that cannot be stored."""
    try:
        yield
    except UnserialisableResult as error:
        for name in ("messages", "params", "metadata"):
            try:
                encode(getattr(event, name))
            except UnserialisableResult as invalid:
                raise InvalidTurn(invalid.path.replace("$", name, 1), sentence(invalid.reason)) from None
        raise InvalidTurn("turn", str(error)) from None


async def _next(following: AsyncIterator[EventEnvelope], stop: asyncio.Event | None) -> EventEnvelope | None:
    """Return the next event, or None once `stop` is set."""
    if stop is None:
        return await anext(following)
    return None if stop.is_set() else await next_unless(following, stop.wait())
