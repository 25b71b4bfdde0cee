"""Turns, started, watched and ended: each is a run, with all that runs have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from .._core.clock import aware
from .._core.codec.json import encode
from .._core.context_vars import start_soon
from .._core.ids import run_uuid, trace_id
from .._core.settings import DURATION, POSITIVE, SECONDS
from ..errors import InvalidArgument, InvalidTurn, UnknownRun, UnserialisableResult, brief
from ..events.event import Event
from ..interfaces import LLMClient
from ..llm._circuit_breaker import Breakers
from ..planning.agent import built_in_tools
from ..planning.base import BasePlanner, checked_planner, registry_of
from ..planning.rule_planner import RuleBasedPlanner
from ..registry import Preferring
from ..runner.runner import AgentRunner
from ..runner.settings import RunInfo
from ..status import TERMINAL, RunStatus, StepStatus
from ..tools.base import BaseTool
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .agent import TurnAgent
from .config_loader import ConfigLoader
from .context_manager import ContextManager
from .distributed_steps import StepAgent
from .event_topics import EventPublisherSubscriber
from .events import TURNS, AuditEvent, EventEnvelope, StepResultChunk, TurnEvent
from .hooks import Hooks
from .logs import TurnLog, log
from .personality import PackSet, PersonalityPackManager
from .personality_instance import PersonalityInstance
from .planner import PlanExecutor
from .processor import StepProcessor
from .services import TurnServices
from .settings import Settings, TurnSettings
from .turn import StepMetrics, StepState, Turn
from .turn_records import finish_turn, turn_of
from .turn_run import FROM_TOPIC

_INPUT = ("conversation_id", "user_id", "personality")


class TurnManager:
    """Starts turns, on a runner whose workers carry them out.

    A turn is a run of an agent with the key `key`: its id is the run's, and so are durability, cancelling, retries,
    limits, its place behind other turns of its conversation, and `trace_id`. `planner` is a RuleBasedPlanner by
    default; `tools` those of the runner, else a calculator and a to-do store. `config` is a ConfigLoader, whose
    settings are taken once for each turn, or one Settings; `packs` are the personalities, by default the config's.
    `client` answers for every personality; without it each has the client of its provider. `hooks` are objects with
    on_turn_start, on_plan_ready, on_step_start, on_step_end, on_turn_end or on_error. With `remote_steps` each step
    is a run of its own; None leaves that to the config. Make one in every process whose workers carry out turns.
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
            for name, value in (("remote_steps", remote_steps), ("max_in_flight", max_in_flight))
            if value is not None
        }
        clock = runner.queue.clock
        self.topics: EventPublisherSubscriber = EventPublisherSubscriber(
            runner.event_bus, runner.state_store, tracer=runner.tracer
        )
        self.contexts: ContextManager = ContextManager(lambda: runner.persistence, clock=clock)
        self.hooks: Hooks = Hooks(hooks)
        self.processor: StepProcessor = StepProcessor(
            self.topics, self.hooks, clock=clock, max_in_flight=self.settings.turns.max_in_flight, breakers=breakers
        )
        if tools is None:
            tools = runner.tools if runner.tools.list_tools() else built_in_tools()
        self._parts = TurnServices(
            key=key, plans=PlanExecutor(RuleBasedPlanner() if planner is None else checked_planner(planner)),
            processor=self.processor, contexts=self.contexts, topics=self.topics, hooks=self.hooks,
            tools=registry_of(tools), settings=lambda: self.settings, personality=self._personality, client=client,
            max_retries=runner.config.max_retries, step_tries=step_tries, backoff_base=backoff_base,
        )  # fmt: skip
        # Runners share a registry: another one's manager answers for it, and this one for this runner.
        known = runner.registry if isinstance(runner.registry, Preferring) else Preferring(runner.registry)
        runner.registry = known
        for agent in (TurnAgent(self._parts), StepAgent(self._parts)):
            known.unregister(agent.key)  # of a manager that was there before
            known.register(agent)
            known.prefer(agent)

    @property
    def settings(self) -> Settings:
        """All settings of this moment."""
        config = self._config
        now = config.current if isinstance(config, ConfigLoader) else config or Settings()
        return replace(now, turns=replace(now.turns, **self._overrides)) if self._overrides else now

    def _personality(self, settings: Settings, name: str | None) -> PersonalityInstance:
        packs = self._packs
        if packs is None:
            return settings.packs.get(name)
        return (packs.current if isinstance(packs, PersonalityPackManager) else packs).get(name)

    # -- starting

    async def start_turn(self, turn: TurnEvent | Mapping[str, Any] | str, **options: Any) -> Turn:
        """Store a turn for a worker, and give it once it is durable; the same `turn_id` gives the same turn.

        InvalidTurn (status_code 422) names the field that does not fit; IdempotencyConflict: this turn_id is that of
        another turn. `options` are those of `runner.submit`: priority, delay, deadline and so on.
        """
        event = self._asked(turn)
        input_, metadata, run_id = self._run_of(event)
        metadata |= options.pop("metadata", None) or {}
        with _storing(event):
            stored = await self.runner.submit(self._parts.key, input_, run_id=run_id, metadata=metadata, **options)
        return await self.get_turn(stored)

    async def run_turn(self, turn: TurnEvent | Mapping[str, Any] | str) -> Turn:
        """Carry a turn out here and now, and give it once it has ended; errors as in `start_turn`."""
        event = self._asked(turn)
        input_, metadata, run_id = self._run_of(event)
        with _storing(event):
            done = await self.runner.execute(self._parts.key, run_id, input_, metadata)
        assert done.run_id is not None
        return await self.get_turn(done.run_id)

    def _asked(self, turn: TurnEvent | Mapping[str, Any] | str) -> TurnEvent:
        """What is asked for, if there is the personality that it names."""
        event = TurnEvent.of(turn)
        if event.personality is not None:
            try:
                self._personality(self.settings, event.personality)
            except InvalidArgument as error:
                raise InvalidTurn("personality", str(error)) from None
        return event

    def _run_of(self, event: TurnEvent) -> tuple[dict[str, Any], dict[str, Any], UUID]:
        """Input, metadata and id of the run that the turn is."""
        try:
            run_id, run_key = run_uuid(event.turn_id, self.runner.queue.clock)
        except InvalidArgument as error:
            raise InvalidTurn("turn_id", str(error)) from None
        input_: dict[str, Any] = {"messages": event.messages, "params": event.params}
        input_ |= {name: value for name in _INPUT if (value := getattr(event, name)) is not None}
        metadata = dict(event.metadata)
        if event.trace_id is not None:
            metadata["parent_trace_id"] = event.trace_id
        if run_key is not None:
            metadata["turn_key"] = run_key
        return input_, metadata, run_id

    # -- looking

    async def get_turn(self, turn_id: UUID | str) -> Turn:
        """The turn as it stands; UnknownRun if there is none."""
        info = await self._info(turn_id)
        turn = await self.contexts.get_turn(str(info.run_id))
        if turn is None:
            turn = turn_of(str(info.run_id), trace_id(info.run_id), info.input, info.metadata)
        turn.created_at = info.created_at
        turn.status = info.status
        if info.status in TERMINAL:
            turn.updated_at = info.ended_at or turn.updated_at
            if info.status is not RunStatus.SUCCEEDED:
                finish_turn(turn, await self.runner.wait(info.run_id))
                turn.error = turn.error or {"type": info.reason or info.status.value, "message": "", "details": {}}
        return turn

    async def _info(self, turn_id: UUID | str) -> RunInfo:
        info = await self.runner.get_run(turn_id)
        if info.agent_key != self._parts.key:
            raise UnknownRun(f"run {turn_id} is a run of {info.agent_key!r}, and no turn")
        return info

    async def wait(self, turn_id: UUID | str, timeout: float | None = None) -> Turn:
        """The turn once it has ended; TimeoutError after `timeout` seconds."""
        await self.runner.wait(turn_id, timeout)
        return await self.get_turn(turn_id)

    async def cancel(self, turn_id: UUID | str, *, wait: bool = False) -> bool | RunStatus:
        """As `runner.cancel`: the turn and its steps."""
        await self._info(turn_id)
        return await self.runner.cancel(turn_id, wait=wait)

    async def discard(self, turn_id: UUID | str) -> None:
        """Delete a turn that has ended: its run, and what was saved of it; the topics keep their events.

        IllegalTransition for one that has not ended.
        """
        info = await self._info(turn_id)
        await self.runner.discard(info.run_id)
        await self.contexts.forget_turn(str(info.run_id))

    async def vacuum(self, older_than: float) -> int:
        """Delete the events of all topics that are older than so many seconds, and give space back; how many.

        Keep them for longer than a turn may last: what a turn that is taken up again has told is only known to have
        been told while it is there. The runs of turns are deleted by `runner.vacuum`.
        """
        DURATION.check("older_than", older_than)
        # Nothing is older than the epoch, and no calendar goes back for ever.
        gone = await self.topics.trim(before=max(self.runner.queue.clock.wall() - older_than, 0.0))
        compact = getattr(self.runner.event_bus.commits, "compact", None)
        if gone and compact is not None:
            await compact()
        return gone

    async def stream(
        self, turn_id: UUID | str, since_sequence: int = 0, *, backpressure: bool = False
    ) -> AsyncGenerator[Event, None]:
        """As `runner.stream`: the turn's events, replayed and then live, until it has ended.

        With `backpressure` the `max_unsent_bytes` of `[turns]` hold, where it says other than the default.
        """
        said = self.settings.turns.max_unsent_bytes
        most = said if said != TurnSettings.max_unsent_bytes else None
        events = self.runner.stream(turn_id, since_sequence, backpressure, max_unsent_bytes=most)
        async with contextlib.aclosing(events) as told:
            async for event in told:
                yield event

    # -- events

    async def handle_step_result_event(self, envelope: EventEnvelope) -> Turn | None:
        """Take in the result of a step that arrives by event; the turn, or None if there is no such turn here.

        The same result again, pieces of one, and results of a step that has ended change nothing. In the process
        that carries out the turn there is no need for it.
        """
        if not isinstance(envelope, EventEnvelope):
            raise InvalidTurn("envelope", f"is an EventEnvelope, as topics give it, not {brief(envelope)}")
        chunk, turn_id = envelope.payload, envelope.turn_id
        if not isinstance(chunk, StepResultChunk) or turn_id is None:
            raise InvalidTurn("payload", f"a step result of a turn is wanted, not {envelope.type!r}")
        turn = await self.contexts.get_turn(turn_id)
        state = None if turn is None else turn.step(chunk.step_number)
        if turn is None or state is None or not chunk.final or _is_told(state, chunk):
            return turn

        def take(turn: Turn) -> None:
            state = turn.step(chunk.step_number)
            if state is None or _is_told(state, chunk):
                return
            state.status, state.result, state.error = StepStatus(chunk.status), chunk.result, chunk.error
            state.attempt, state.metrics = chunk.attempt, StepMetrics.from_dict(chunk.metrics)
            state.apart = None
            turn.updated_at = aware(self.runner.queue.clock.wall())

        return await self.contexts.change_turn(turn_id, take)

    async def consume(self, *, consumer: str = "turns", stop: asyncio.Event | None = None) -> None:
        """Start the turns that are published on agent.turns, until `stop` is set, or for ever.

        The place in the topic is kept under the name `consumer` after the run is stored: after a crash in between
        the same turn is started again, and is there already. A malformed one is logged and told on agent.audit.
        """
        following = self.topics.subscribe(TURNS, consumer=consumer)
        async with contextlib.aclosing(following):
            while (envelope := await _next(following, stop)) is not None:
                await self._consumed(envelope)
                assert envelope.offset is not None
                await self.topics.commit(TURNS, consumer, envelope.offset)

    async def _is_there(self, turn_id: str) -> bool:
        """Whether that turn was started: every turn tells of itself on the topic too."""
        try:
            await self.runner.get_run(turn_id)
        except (UnknownRun, InvalidArgument):
            return False
        return True

    async def _consumed(self, envelope: EventEnvelope) -> None:
        if not isinstance(envelope.payload, TurnEvent):
            return
        event = envelope.payload
        turn_id = event.turn_id or envelope.turn_id or f"turn:{envelope.event_id}"
        if await self._is_there(turn_id):
            return
        try:
            event = replace(event, turn_id=turn_id, metadata={**event.metadata, FROM_TOPIC: True})
            turn = await self.start_turn(event)
            TurnLog(turn.trace_id, turn.id).info("turn taken from %s, offset %s", TURNS, envelope.offset)
        except InvalidArgument as error:
            log.warning("turn %s of %s is refused: %s", turn_id, TURNS, error)
            details = {"event_id": envelope.event_id, "error": str(error), "field": getattr(error, "field", None)}
            await self.topics.tell(
                AuditEvent(action="turn.refused", details=details), event_id=f"refused:{envelope.event_id}",
                turn_id=envelope.turn_id, trace_id=envelope.trace_id,
            )  # fmt: skip


def _is_told(state: StepState, chunk: StepResultChunk) -> bool:
    """Whether a result is no news of a step: it has ended otherwise, or is further. One that failed is tried again."""
    if state.status is StepStatus.FAILED:
        return state.attempt > chunk.attempt or (chunk.status == "failed" and state.attempt == chunk.attempt)
    return state.ended or state.attempt > chunk.attempt


@contextlib.contextmanager
def _storing(event: TurnEvent) -> Iterator[None]:
    """A value that cannot be stored is a field of the turn that does not fit."""
    try:
        yield
    except UnserialisableResult as error:
        for name in ("messages", "params", "metadata"):
            try:
                encode(getattr(event, name))
            except UnserialisableResult as wrong:
                raise InvalidTurn(wrong.path.replace("$", name, 1), wrong.reason) from None
        raise InvalidTurn("turn", str(error)) from None


async def _next(following: AsyncIterator[EventEnvelope], stop: asyncio.Event | None) -> EventEnvelope | None:
    """The next event, or None once `stop` is set."""
    if stop is None:
        return await anext(following)
    if stop.is_set():
        return None
    coming: asyncio.Future[EventEnvelope] = start_soon(anext(following))
    stopping: asyncio.Future[Any] = start_soon(stop.wait())
    try:
        await asyncio.wait([coming, stopping], return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        stopping.cancel()
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
