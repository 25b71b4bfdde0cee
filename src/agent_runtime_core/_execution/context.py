"""The run context that agents get: steps, waits, child runs, events and checkpoints, all under one claim."""

from __future__ import annotations

import asyncio
import datetime as _dt
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from uuid import UUID
from weakref import ref

from .._core.arguments import run_input, scheduled_at
from .._core.clock import Clock, aware
from .._core.codec.json import decode, decode_dict, digest, encode_as
from .._core.event_types import RUNNER_TYPES, EventType
from .._core.ids import RunTrace, known_uuid, trace_id
from .._core.ids import conversation_id as conversation_id
from .._core.settings import COUNT, number
from .._core.typed_steps import takes_options_of, typed_step
from .._core.validation import Shown, must, type_name
from ..config import get_config
from ..errors import NotSupported
from ..events.base import checked_event_name
from ..events.event import AGENT_MARK, warn_of_runner_type
from ..interfaces import AgentRuntime, RunContext, RunResult
from ..limits import COUNTED, Budget, RunLimits
from ..llm._finish_reasons import normal_reason
from ..llm._prices import cost_usd as price_in_usd
from ..portal import run_and_wait
from ..queue.contents import TAGS
from ..queue.records import RunRow
from ..tools.registry import ToolRegistry
from ..tracing.tracer import Tracer
from .context_steps import ContextSteps
from .mailbox import Inbox
from .pools import RunPools
from .run_control import RunControl, Services, TextOutlet
from .step import DEFAULT_OPTIONS, StepOptions, StepScope, cached_step_function, step_function
from .step_journal import RunJournal, StepAttempt
from .sync_context import blocking_form
from .usage import add_charge
from .waits import Waits

if TYPE_CHECKING:
    from ..persistence.manager import PersistenceManager


# -- charging


class ChargedContext(Protocol):
    """What is used of the context of a run."""

    @property
    def journal(self) -> RunJournal: ...

    @property
    def control(self) -> RunControl: ...

    @property
    def budget(self) -> Budget: ...

    @property
    def pools(self) -> RunPools: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def traced(self) -> bool: ...

    def trace(self, kind: str, payload: dict[str, Any]) -> None: ...


def charge_of(
    model: str, input_tokens: int, output_tokens: int, cost_usd: float | None, turns: int, tool_calls: int
) -> dict[str, Any]:
    """Return the usage that `ctx.charge` counts."""
    given = {"input_tokens": input_tokens, "output_tokens": output_tokens, "turns": turns, "tool_calls": tool_calls}
    for name, value in given.items():
        COUNT.check(name, value)
    number().or_none("").check("cost_usd", cost_usd)
    tokens = {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }
    if cost_usd is None and model:
        cost_usd = price_in_usd(tokens, model, get_config().model_prices)
    usage = {**tokens, "turns": turns, "tool_calls": tool_calls, "cost_usd": cost_usd}
    return {name: value for name, value in usage.items() if value}


def charge_trace(step_id: str, model: str, charged: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the trace of a model call that `ctx.charge` counts. Only its usage is known."""
    return {
        "step_id": step_id, "parent_id": None, "attempt": None, "model": model, "provider": None,
        "input": None, "output": None,
        "usage": {name: value for name, value in charged.items() if name in COUNTED},
        "cost_usd": charged.get("cost_usd"), "started_at": now, "ended_at": now, "error": None, "model_parameters": {},
    }  # fmt: skip


def charge(ctx: ChargedContext, model: str, charged: dict[str, Any], trace: Mapping[str, Any] | None = None) -> None:
    """Count `charged` against the limits of the run, as part of the step that the calling code is in.

    Raises:
        LimitExceeded: A limit of the run is exceeded now. What was charged stays counted.
        InvalidArgument: The calling code is in no step, or its step ended.
    """
    scope, loop = ctx.journal.keys.scope(), ctx.control.loop
    if loop is None or not loop.is_running() or _on(loop):
        _count(ctx, scope, model, charged, trace)
        return

    async def count() -> None:  # other code of the run counts on the event loop
        _count(ctx, scope, model, charged, trace)

    run_and_wait(loop, count, (), {})


def _on(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _count(
    ctx: ChargedContext, scope: StepScope | None, model: str, charged: dict[str, Any], trace: Mapping[str, Any] | None
) -> None:
    if scope is None or scope.ended:
        got = "a call between steps" if scope is None else "a call after its step has ended"
        fix = "Move the model call and ctx.charge(...) into a ctx.step"
        raise must("ctx.charge()", "be called inside a step", Shown(got), fix)
    add_charge(scope, model, charged)
    ctx.budget.recalled(charged)
    if ctx.budget.strictest.pools:
        _ = ctx.pools  # from now on, the ends of steps count what they have charged
    if charged.get("turns") and ctx.traced:
        fields = {**charge_trace(scope.step_id, model, charged, ctx.clock.wall()), **(trace or {})}
        ctx.trace("llm.call", fields | {"finish_reason": normal_reason(fields.get("finish_reason"))})
    if (error := ctx.budget.exceeded()) is not None:
        raise error


T = TypeVar("T")

_DELTA = EventType.ASSISTANT_DELTA.value


class Context:
    """The run context of one run under one claim; agents rely on `interfaces.RunContext`.

    Its steps are done by `ContextSteps` and its waits by `Waits`. Neither refers to the context: a circle of references
    would keep each finished run until the garbage collector finds it.

    Args:
        row: The row of the run.
        journal: The journal of the run.
        services: What the context uses of its runner.
        control: Stops the code of the run.
        overrides: Limits that `resume` or `requeue` set for the run.
    """

    def __init__(
        self,
        row: RunRow,
        journal: RunJournal,
        services: Services,
        control: RunControl,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.journal: RunJournal = journal
        self.control: RunControl = control
        self._row, self._services = row, services
        self._writer, self._clock = journal.writer, services.clock
        self._steps = ContextSteps(journal, control)
        self._waits: Waits | None = None
        self._outlet: TextOutlet | None = None  # of the first piece of an answer on
        control.context = ref(self)
        _make_steps_current(journal, services.tracer)
        input_, metadata = cast("tuple[dict[str, Any], dict[str, Any]]", (decode(row.input), decode(row.metadata)))
        metadata.pop(TAGS, None)  # or a run that is submitted with this metadata would be rejected
        self.run_id: UUID = known_uuid(row.run_id)
        self.run_key: str | None = row.run_key
        self.tenant: str | None = row.tenant or None
        self._tenant_stores: PersistenceManager | None = None
        self.input = input_
        self.input_messages: list[Any] = input_.get("messages") or []
        self.params: dict[str, Any] = input_.get("params") or {}
        self.conversation_id: UUID | None = conversation_id(input_.get("conversation_id"))
        self.metadata: dict[str, Any] = metadata
        self.attempt: int = row.attempt
        self.failures: int = row.failures  # of earlier attempts; the other attempts crashed
        #: Whether the agent keeps the conversation of this run itself; see `own_conversation`.
        self.owns_conversation: bool = False
        #: The messages of the run's conversation and its own messages, once they are loaded.
        self.history: list[Any] | None = None
        #: Whether the store of conversations was unavailable, so that the history may lack its last messages.
        self.history_stale: bool = False
        self._budget: Budget | None = None
        self._overrides = overrides  # limits that `resume` or `requeue` set for this run
        self.tools: ToolRegistry = services.tools

    @property
    def blocking_form(self) -> Any:
        """This context for a plain function in a thread: a `SyncRunContext`."""
        return blocking_form(self)

    @property
    def scheduled_at(self) -> _dt.datetime | None:
        return scheduled_at(self.metadata)

    @property
    def tool_registry(self) -> ToolRegistry:
        return self.tools

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def initial_messages(self) -> list[Any]:
        """The messages that the run began with, even if its agent changed `input_messages` since."""
        if self.history is not None:
            return self.history
        return cast("dict[str, Any]", decode(self._row.input)).get("messages") or []

    @property
    def persistence(self) -> PersistenceManager:
        """Conversations, tasks, memory, preferences, knowledge and audit, written under this run's claim."""
        stores = self._services.persistence
        if stores is None:
            raise NotSupported(
                "this context has no stores. Get a context from a runner, or its stores from runner.services()"
            )
        if self.tenant is None:
            return stores()
        if self._tenant_stores is None:
            self._tenant_stores = stores().for_tenant(self.tenant)
        return self._tenant_stores

    @property
    def waits(self) -> Waits:
        """The waits of this run, made at the first use: most runs have none."""
        if self._waits is None:
            self._waits = Waits(self.journal, self._row, self._services, self.control, self._steps.where)
        return self._waits

    @property
    def inbox(self) -> Inbox:
        """The messages that were sent to the agent of this run."""
        return self.waits.inbox

    @property
    def messages_read(self) -> int:
        """The number of the last mailbox message that this claim read."""
        return 0 if self._waits is None else self._waits.messages_read

    @property
    def waiting_tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that are inside a wait of this run."""
        return [] if self._waits is None else self._waits.tasks

    @property
    def pools(self) -> RunPools:
        """What this run reserves in the pools that it shares with other runs."""
        if self.journal.pools is None:
            self.journal.pools = RunPools(self.journal.writer, self.tenant, self.control)
        return self.journal.pools

    @property
    def budget(self) -> Budget:
        """What all agent loops of this run together may use, by the limits of its runner and of its input."""
        if self._budget is None:
            of_runner = RunLimits.of(self._services.limits)
            limits = of_runner.stricter(self.input.get("limits"))
            self._budget = Budget(limits, overrides=self._overrides, of_runner=of_runner.pools)
            # Of earlier claims, whose code does not run again.
            for charged in self.journal.view.charged_by_failures.values():
                self._budget.recalled(charged)
        return self._budget

    @property
    def trace_id(self) -> str:
        return trace_id(self.run_id)

    @property
    def _scope(self) -> StepScope | None:
        return self._steps.scope

    @property
    def step_id(self) -> str | None:
        """The step this code runs in, or None between steps."""
        scope = self._scope
        return None if scope is None else scope.step_id

    @property
    def idempotency_key(self) -> str | None:
        """`run_id:step_id`, the same on every attempt of the step this code runs in; None between steps."""
        step = self.step_id
        return None if step is None else f"{self.run_id}:{step}"

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of all agent loops of this run so far; empty before the first loop."""
        if self._budget is None and not self.journal.view.charged_by_failures:
            return {}
        return self.budget.reported_usage() if self.budget.begun else {}

    def cancelled(self) -> bool:
        """Return whether the run is being cancelled."""
        return self.control.cancelled and self.control.cut_off()

    def is_cancelled(self) -> bool:
        """Return whether the run is being cancelled. False in the agent's `cancel` hook, which may work."""
        return self.cancelled()

    def charge(
        self, *, model: str = "", input_tokens: int = 0, output_tokens: int = 0, cost_usd: float | None = None,
        turns: int = 1, tool_calls: int = 0, trace: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Count a model call that this library did not make, against the limits of the run.

            async def ask(question: str) -> str:
                answer = await client.ask(question)
                current_run().charge(model="m-1", input_tokens=answer.input, output_tokens=answer.output)
                return answer.text

        What is counted belongs to the enclosing step: a resumed run counts it again from the record of the step,
        without calling the function. It is part of the usage of the run's result, and of an `llm.call` trace.

        Args:
            model: The model. Its price in `model_prices` gives the cost, if you pass none.
            input_tokens: Tokens of the prompt.
            output_tokens: Tokens of the answer.
            cost_usd: The cost in USD.
            turns: How many model calls to count; 0 for what is no model call.
            tool_calls: How many tool calls to count.
            trace: Further fields of the trace: `provider`, `input` and `output` in OpenAI's chat format,
                `finish_reason`, `started_at` in seconds since 1970. They are not stored.

        Raises:
            LimitExceeded: The run now used more than a limit of it allows. The call is counted.
            InvalidArgument: The call is between steps, where a resumed run would count it twice, or after the end of
                the step, or a number is negative.
        """
        charge(self, model, charge_of(model, input_tokens, output_tokens, cost_usd, turns, tool_calls), trace)

    def check_limits(self) -> None:
        """Raise if a limit of the run is reached, so that no further model call may begin.

        Raises:
            LimitExceeded: A limit is reached.
        """
        self.budget.before_turn()

    @property
    def traceparent(self) -> str | None:
        """The span of the step this code runs in, or of the run, as a W3C `traceparent`.

        None if no trace sink sends spans that others can continue.
        """
        trace, scope, tracer = self.journal.trace, self._scope, self._services.tracer
        if trace is None or tracer is None or not tracer.activates:
            return None
        return (trace.execution if scope is None else trace.step(scope.step_id, scope.attempt)).text

    def trace(self, kind: str, payload: dict[str, Any]) -> None:
        """Report something to the trace sinks that is no event of the run.

            ctx.trace("cache.hit", {"key": key})

        Nothing is stored, and a resumed run that executes the code again reports it again.

        Args:
            kind: What it is. Sinks get it as the event type.
            payload: Its fields. With the kind "llm.call", sinks show a model call: `model`, `provider`, `input`,
                `output`, `usage` (`prompt_tokens`, `completion_tokens`, `total_tokens`), `cost_usd`, `started_at` and
                `ended_at` in seconds since 1970, `error`.
        """
        tracer = self._services.tracer
        if tracer is not None:
            tracer.event(self.run_id, kind, payload)

    @property
    def traced(self) -> bool:
        """Whether there is a trace sink."""
        return self._services.tracer is not None

    @property
    def traces_contents(self) -> bool:
        """Whether a trace sink uses contents."""
        return self._services.tracer is not None and self._services.tracer.contents

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
            got = Shown(f"a call inside step {self._scope.name!r}")
            fix = "Call it before the step: a resumed run does not execute a completed step again"
            raise must("ctx.own_conversation()", "be called between steps", got, fix)
        self.owns_conversation = True

    # -- steps and recorded values

    def renamed(self, old: str, new: str) -> None:
        """Declare that the step, agent of a child run, signal or approval recorded as `old` is called `new` now.

        Call it before the first call of that name. Both may have had other names before.

        Args:
            old: The recorded name.
            new: The name in the present code.
        """
        self._steps.renamed(old, new)

    async def patched(self, name: str) -> bool:
        """Return whether this run takes the changed code, and record that decision.

            if await ctx.patched("check-stock"):
                await ctx.step("check", check)

        True for a run that comes here for the first time, and from then on for that run. False for a run that went past
        this point before the change: there are later saved results in it, or a started step without a result. A run
        makes one decision for each name, in the first call of an execution.

        Args:
            name: Name of the change. Use a new name for each change.

        Raises:
            InvalidArgument: The call is inside a step, or in a task that the run started.
        """
        await self.control.ensure_open()
        return await self._steps.patched(name)

    @typed_step
    @takes_options_of(RunContext.step)
    async def step(self, name: str, fn: Callable[..., Any], *args: Any, key: str | None = None, **options: Any) -> Any:
        if self.control.refuses:
            await self.control.refuse(name)
        if not options:
            return await self._steps.step(self, name, key, fn, args, cached_step_function(fn), DEFAULT_OPTIONS)
        given = StepOptions.of("step", options)
        function = step_function(fn, given.returns, given.max_result_bytes)
        return await self._steps.step(self, name, key, fn, args, function, given)

    async def transaction(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """Run `fn(conn, *args)` inside the commit that saves its result: exactly once.

        On SQLite, `conn.execute` and `conn.executemany` reach the file with the journal. On PostgreSQL, `conn` is a
        `psycopg.Connection` to the database with the journal, whose `transaction()` sets a savepoint. The tables of
        this library are rejected.

        Args:
            name: Name of the step.
            fn: A plain function. On SQLite it runs on the writer thread, and more than one second of SQL is
                interrupted. On PostgreSQL it runs in a separate thread, and a statement of more than 10 seconds is
                interrupted.
            *args: Its arguments after the connection.

        Returns:
            The saved result.

        Raises:
            NotSupported: if the journal is not on SQLite or PostgreSQL.
            StepExecutionError: if the function failed. Nothing of it is committed.
        """
        if self.control.refuses:
            await self.control.refuse(name)
        return await self._steps.transaction(name, fn, *args)

    async def recorded_value(self, name: str, make: Callable[[], Awaitable[Any]], key: str | None = None) -> Any:
        """Return what `make()` returned when the run first called this.

        Args:
            name: Name of the value.
            make: Makes the value.
            key: Identifies the call instead of the number of its use, as for `step`.
        """
        await self.control.ensure_open()
        return await self._steps.recorded_value(name, make, key)

    def started_without(self, name: str) -> bool:
        """Return whether the run recorded steps, but no `recorded_value` of that name.

        Args:
            name: Name of the value.
        """
        return self._steps.started_without(name)

    async def now(self, *, key: str | None = None) -> _dt.datetime:
        """Return the time in UTC, the same again when the run is resumed; `key` as for `step`.

        Args:
            key: Identifies the call instead of the number of its use, as for `step`.
        """
        return cast("_dt.datetime", await self._made("now", lambda: aware(self._clock.wall()), key))

    async def random(self, *, key: str | None = None) -> float:
        """Return a number in [0, 1), the same again when the run is resumed; `key` as for `step`.

        Args:
            key: Identifies the call instead of the number of its use, as for `step`.
        """
        return cast("float", await self._made("random", self._clock.random.random, key))

    async def uuid4(self, *, key: str | None = None) -> UUID:
        """Return a random UUID, the same again when the run is resumed; `key` as for `step`.

        Args:
            key: Identifies the call instead of the number of its use, as for `step`.
        """
        bits = self._clock.random.getrandbits
        return cast("UUID", await self._made("uuid4", lambda: UUID(int=bits(128), version=4), key))

    async def _made(self, name: str, make: Callable[[], Any], key: str | None) -> Any:
        async def made() -> Any:
            return make()

        return await self.recorded_value(name, made, key)

    # -- events and checkpoints

    async def emit(self, event_type: EventType | str, payload: dict[str, Any] | None = None) -> None:
        """Publish an event of this run; returns when it is durable.

        Code between steps that runs again when the run is resumed publishes each event once. An event with a type of
        the runner, such as `run.succeeded`, is stored with `Event.from_agent`, and changes nothing about the run.

        Args:
            event_type: An `EventType`, or a name that you choose.
            payload: The fields of the event, which must be JSON-serializable.

        Raises:
            InvalidArgument: if the payload is no dict, or the name is empty, too long or not printable.
        """
        if self.control.refuses:
            await self.control.refuse()
        kind = checked_event_name("event_type", event_type)
        if payload is not None and not isinstance(payload, dict):
            raise must("payload", "be a dict", Shown(type_name(type(payload))))
        outlet = self._text_outlet() if kind == _DELTA else None
        text = None if outlet is None or payload is None else payload.get("delta")
        if outlet is not None and isinstance(text, str) and len(text) > outlet.longest:
            for piece in outlet.pieces(text):
                await self._publish(kind, {**(payload or {}), "delta": piece}, outlet)
        else:
            await self._publish(kind, payload or {}, outlet)
        if kind in RUNNER_TYPES and self._row.agent not in self._services.warned_agents:
            self._services.warned_agents.add(self._row.agent)
            warn_of_runner_type(kind, f"run {self._row.run_key or self._row.run_id!r} of agent {self._row.agent!r}")

    async def _publish(self, kind: str, payload: dict[str, Any], outlet: TextOutlet | None) -> None:
        row = self._event(kind, payload)
        if row is None:
            return
        [sequence] = await self._writer.emit([row])
        if outlet is not None and (full := outlet.published(sequence, len(row[2].encode()))) is not None:
            await self._wait_for_readers(full)

    def _text_outlet(self) -> TextOutlet | None:
        """Return where pieces of an answer are published; None without backpressure."""
        if self._outlet is None and self._services.backpressure is not None:
            self._outlet = self._services.backpressure(self._row.run_id)
        return self._outlet

    async def _wait_for_readers(self, until: asyncio.Future[None]) -> None:
        """Wait for a reader that lags too much. The time does not count against the run's time limit."""
        control = self.control
        paused_here = control.paused_at is None
        if paused_here:
            control.pause_timer(self._clock.monotonic())
        try:
            await until
        finally:
            if paused_here:
                control.resume_timer(self._clock.monotonic())

    def _event(self, kind: str, payload: dict[str, Any]) -> tuple[str, str, str, float] | None:
        """Return the row of an event: id, type, payload and time. None while code replays what it published before."""
        scope, journal = self._scope, self.journal
        if journal.redaction is not None and kind != EventType.STATE_CHECKPOINT.value:
            payload = journal.redaction.stored_copy("event", payload, f"run {self._row.run_id}")
        if scope is not None:
            payload = {**self._steps.where(), **payload}
            position = f"s:{scope.step_id}:{self._writer.claim_id}.{scope.attempt}:{scope.emitted}"
            scope.emitted += 1
        elif (task := journal.keys.task_scope()) is not None:
            # A resumed run does not repeat the tasks that are done, so what it publishes is always new.
            position = f"t:{task.scope_id}:{self._writer.claim_id}:{task.emitted}"
            task.emitted += 1
        elif journal.is_replaying:
            return None
        else:
            position = f"b:{journal.boundary}:{journal.emitted}:{self._row.generation}.{self._row.failures}"
            journal.emitted += 1
        text = encode_as("payload", payload)
        mark = AGENT_MARK if kind in RUNNER_TYPES else ""
        return (f"{mark}{position}:{digest(kind + text)[:8]}", kind, text, self._clock.wall())

    async def checkpoint(self, state: dict[str, Any]) -> None:
        """Save `state` for `get_state`, and publish it as a STATE_CHECKPOINT event.

        Args:
            state: A JSON-serializable dict. It replaces the last checkpoint.

        Raises:
            InvalidArgument: `state` is not a dict.
        """
        await self.control.ensure_open()
        if not isinstance(state, dict):
            raise must("state", "be a dict", state)
        text = encode_as("state", state)
        if (redaction := self.journal.redaction) is not None:
            text = redaction.stored_dict("state", text, f"run {self._row.run_id}")
            state = decode_dict(text)
        row = self._event(EventType.STATE_CHECKPOINT.value, {"state": state})
        if row is not None:
            await self._writer.checkpoint(text, row[0], row)

    async def get_state(self) -> dict[str, Any] | None:
        """Return the last checkpoint, or None."""
        await self.control.ensure_open()
        return await self._writer.state.get_checkpoint(self._row.run_id)

    # -- waits and child runs

    async def sleep(self, seconds: float, *, key: str | None = None) -> None:
        """Wait for `seconds`. A run that is resumed in that time waits only for the rest.

        Args:
            seconds: At least 0.
            key: Identifies the wait instead of the number of its use. Sleeps that run at the same time need keys.
        """
        await self.control.ensure_open()
        await self.waits.sleep(seconds, key)

    async def wait_for_signal(self, name: str, *, timeout: float | None = None, key: str | None = None) -> Any:
        """Return the payload of the next signal of that name, waiting for it if there is none.

        Args:
            name: Name of the signal.
            timeout: Seconds to wait, None for no limit.
            key: As for `sleep`.

        Raises:
            WaitTimeout: after `timeout` seconds. A resumed run gets the same error again.
        """
        await self.control.ensure_open()
        return await self.waits.signal(name, timeout, key)

    async def approve(
        self, name: str, details: Any = None, *, schema: dict[str, Any] | None = None, timeout: float | None = None,
        key: str | None = None,
    ) -> Any:  # fmt: skip
        """Publish a request for a decision, and return the answer of `runner.approve`.

        The request is an "approval.requested" event. A resumed run identifies an approval by its name and how often it
        used that name before, or by `key`.

        Args:
            name: Name of the approval.
            details: What the decision is about.
            schema: JSON Schema of the answer. `runner.approve` checks answers against it.
            timeout: Seconds to wait, None for no limit.
            key: Identifies the approval instead of the number of its use.

        Returns:
            The answer, which matches `schema`.

        Raises:
            WaitTimeout: after `timeout` seconds. A resumed run gets the same error again.
        """
        await self.control.ensure_open()
        return await self.waits.approve(name, details, schema, timeout, key)

    async def messages(self, timeout: float | None = 0, *, key: str | None = None) -> list[dict[str, Any]]:
        """Return the messages of `runner.send` for this run since the last call; an empty list if none arrived.

        They are recorded: a resumed run gets the same messages. An agent loop takes the messages that arrive while it
        runs, before its next model call.

        Args:
            timeout: Seconds to wait for a first message, None for no limit. 0 only looks.
            key: As for `sleep`.

        Returns:
            The messages in the order in which they were sent; none after `timeout`.
        """
        await self.control.ensure_open()
        return await self.waits.messages(timeout, key)

    async def call(
        self, agent: AgentRuntime | str, input: Mapping[str, Any] | None = None, *, key: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> RunResult:  # fmt: skip
        """Run another agent as a child run and return its result.

        The run id of the child is the same on every attempt of this run, so the child never runs twice.

        Args:
            agent: The agent, or its key.
            input: Input of the child run.
            key: Identifies the call instead of the number of its use. Calls of one agent that run at the same time
                need keys.
            params: Merged into the "params" of the input.

        Returns:
            The result of the child run, which succeeded.

        Raises:
            RunFailed: if the child does not succeed.
        """
        await self.control.ensure_open()
        return await self.waits.child(agent, run_input(input, params), key)


RunContextImpl = Context
"""The name of this class in 0.5.2."""


def _make_steps_current(journal: RunJournal, tracer: Tracer | None) -> None:
    """Let the trace sinks make the span of each step current while its function runs."""
    if tracer is not None and tracer.activates and journal.trace is not None:
        journal.around_step = partial(_around, tracer, journal.trace)


def _around(tracer: Tracer, trace: RunTrace, scope: StepScope, call: StepAttempt) -> StepAttempt:
    async def current(attempt: int) -> Any:
        with tracer.activated(trace.step(scope.step_id, attempt).text):
            return await call(attempt)

    return current
