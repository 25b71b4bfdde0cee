"""The runner: it executes runs, and works them off."""

from __future__ import annotations

import contextlib
import copy
import datetime as _dt
import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import UUID

from .._core.arguments import mapping
from .._core.codec.json import decode
from .._core.per_loop import PerLoop
from .._core.run_tasks import Monitor
from .._core.threads import in_thread
from .._execution.result_codec import decode_result, omitted_history_in
from .._execution.run_control import Services
from ..config import get_config
from ..errors import InvalidArgument, StorageCorrupt, UnknownAgent, UnknownRun, brief
from ..events.base import EventBus
from ..interfaces import AgentRuntime, RunResult, TraceSink
from ..portal import call
from ..queue.base import RunQueue
from ..queue.records import RunRow, same_run
from ..registry import DEFAULT, Registry, key_of
from ..state.base import StateStore
from ..tools.registry import ToolRegistry
from ..tracing.tracer import Tracer
from .arguments import backend_label, check_messages, check_parts, concurrency_key_of, run_busy_error
from .backends import configured, open_url, opening, traced
from .execution import ENCLOSING_RUNS, HELD_CONCURRENCY_KEYS, RunExecution
from .heartbeat import Heartbeat
from .inline_runs import InlineRuns
from .run_client import RunClient
from .run_watcher import CHECK_INTERVAL, closed
from .settings import RunnerConfig
from .signals import SHARED
from .worker import Worker

if TYPE_CHECKING:
    from ..persistence.manager import PersistenceManager

log: logging.Logger = logging.getLogger("agent_runtime_core")

MAX_REFUSED_CLAIMS = 3  # claims of a run in a row whose writes are refused though nobody else has it

_warned: set[str] = set()


class AgentRunner(RunClient):
    """Executes runs of registered agents, and submits, watches, cancels and repairs them.

    Backends that are not given come from the configuration; in memory, nothing outlives the process.
    `AgentRunner.open("agents.db")` is the durable set-up in one line. `tools` are those of agents that
    have none of their own. `trace_sinks` hear what happens, and cannot delay a run. Every
    coroutine of it can be reached without a loop through `portal.call`.

    `persistence` is the manager of the stores that the runner uses: a run that names a `conversation_id` starts with
    the earlier messages of that conversation, its new messages are appended when it succeeds, and an audit store
    among them records what runs do. By default a runner that `open` or `backend_url` gave a URL keeps conversations,
    and nothing else, in the stores at that URL. A runner without a URL keeps none and logs one warning per agent. With
    None it keeps none and logs nothing.
    """

    def __init__(
        self,
        queue: RunQueue | None = None,
        event_bus: EventBus | None = None,
        state_store: StateStore | None = None,
        config: RunnerConfig | None = None,
        *,
        tools: ToolRegistry | None = None,
        trace_sinks: Sequence[TraceSink] = (),
        persistence: PersistenceManager | Literal["default"] | None = "default",
        registry: Registry = DEFAULT,
    ) -> None:
        check_parts(config, tools, trace_sinks, persistence)
        for what, given, kind in (
            ("queue", queue, RunQueue), ("event_bus", event_bus, EventBus), ("state_store", state_store, StateStore),
        ):  # fmt: skip
            if given is not None and not isinstance(given, kind):
                raise InvalidArgument(f"{what} is {backend_label(kind)}, not {brief(given)}")
        settings = get_config()
        config = config or RunnerConfig.of(settings)
        if queue is not None and queue.limits_retries:
            config = replace(config, max_retries=min(config.max_retries, queue.max_retries))
        with opening() as opened:
            backends = configured(settings, queue, event_bus, state_store, max_retries=config.max_retries)
            for given, backend in zip((queue, event_bus, state_store), backends, strict=True):
                if given is None:
                    opened(backend)
            super().__init__(backends, config, registry, persistence)
            self._has_store_url = settings.backend_url is not None and not (queue or event_bus or state_store)
            self.tools: ToolRegistry = tools if tools is not None else ToolRegistry()
            self.tracer: Tracer | None = traced(settings, trace_sinks, backends.queue.clock)
            self._borrowed: bool = False  # the backends are another runner's
            self._prepare()

    @classmethod
    def open(
        cls,
        path_or_url: str | os.PathLike[str],
        *,
        config: RunnerConfig | None = None,
        tools: ToolRegistry | None = None,
        trace_sinks: Sequence[TraceSink] = (),
        persistence: PersistenceManager | Literal["default"] | None = "default",
        registry: Registry = DEFAULT,
        durability: str | None = None,
    ) -> AgentRunner:
        """A runner on a SQLite file (a path or sqlite:///path), or on memory://; all three backends there.

        `durability` "full" survives a power loss, "normal" a crash of the process; None is the configured one.
        """
        check_parts(config, tools, trace_sinks, persistence)
        settings = get_config()
        config = config or RunnerConfig.of(settings)
        durability = settings.durability if durability is None else durability
        with opening() as opened:
            places = open_url(path_or_url, durability=durability, max_retries=config.max_retries)
            for backend in places:
                opened(backend)
            runner = cls(
                *places, config, tools=tools, trace_sinks=trace_sinks, persistence=persistence, registry=registry
            )
        runner._has_store_url = True
        return runner

    def worker_for(self, registry: Registry) -> AgentRunner:
        """A worker for other agents on the same backends and stores; closing it leaves those open."""
        if self._has_store_url and self._stores is None:
            _ = self.persistence  # made once, and closed by this one
        other = copy.copy(self)
        other.registry, other._borrowed = registry, True
        other._prepare()
        return other

    beside = worker_for  # its name in 0.6.0

    def _prepare(self) -> None:
        super()._prepare()
        self.heartbeat: Heartbeat = Heartbeat(self.queue, self.config)
        self._services_cache: dict[bool, Services] = {}  # the latest, for runs in place and for those of a worker
        self._worker: Worker = Worker(self.queue, self.config, lambda: self.registry, self.new_execution)
        self._monitor: PerLoop[Monitor] = PerLoop(partial(Monitor, clock=self.queue.clock))
        self._inline_runs: InlineRuns = InlineRuns(self.queue.clock, self.config.grace_seconds)
        if not self.backends.durable and "memory" not in _warned:
            _warned.add("memory")
            log.info(
                "runs are kept in memory: nothing outlives this process (AgentRunner.open('agents.db') keeps them)"
            )

    async def __aenter__(self) -> AgentRunner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop working, give back what runs, and let go of the backends; a `run_loop` that is going ends.

        What runs has `grace_seconds` to finish, in `execute` too, unless it only waits. Whoever still waits here for a
        run, or executes one, gets StorageClosed.
        """
        until = self.queue.clock.boot() + self.config.grace_seconds
        await self._worker.close()
        await self._inline_runs.stop(until)
        self._let_go = True
        self.heartbeat.stop()
        self.watcher.close()
        async with AsyncExitStack() as closing:  # the last first, and each of them whatever becomes of the others
            closing.callback(SHARED.closed, self._worker)
            if self._borrowed:
                return
            if self.tracer is not None:
                closing.push_async_callback(in_thread, self.tracer.close)
            if self._own_stores is not None:
                closing.push_async_callback(self._own_stores.close)
            closing.push_async_callback(self.backends.close)

    # -- executing here

    def agent(self, agent: AgentRuntime | str) -> AgentRuntime:
        """The agent itself, or the registered one of that key; UnknownAgent names the nearest."""
        if not isinstance(agent, str):
            key_of(agent)
            return agent
        found = self.registry.get(agent)
        if found is None:
            near = difflib.get_close_matches(agent[:100], self.registry.keys(), n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownAgent(
                f"no agent {brief(agent)} is registered in this process; register it first: register_runtime(…){hint}"
            )
        return found

    async def execute(
        self,
        agent: AgentRuntime | str,
        run_id: UUID | str | None = None,
        input_data: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        raise_on_error: bool = False,
        if_running: str = "wait",
        recover: str = "inline",
        parent_run_id: UUID | str | None = None,
        concurrency_key: str | None = None,
        deadline: _dt.datetime | float | None = None,
    ) -> RunResult:
        """Run now, in this process, retrying as a worker would; a RunResult for every ending.

        The same id returns the record after a success, resumes after a crash or a failure, and waits for
        the result while another live process holds the run (`if_running="raise"`: RunBusy). Another agent
        or input under it is an IdempotencyConflict. With `recover="worker"` workers take the run over if
        this process dies; otherwise the next `execute` does. While another run has the turn of its
        `concurrency_key` (as in `submit`) it waits, or raises RunBusy, in the same way. Within a run of
        that key, which would wait for itself, it is a RunBusy, as it is within the run of that id; within one
        of the same conversation, whose key was not given, it is part of that run's turn.

        `deadline` is a wall time at which the run is stopped, as in `submit`. It is stored with a new run. For a run
        that is stored already it replaces the stored one during this call. A run that cannot resume before it, because
        its provider is down, ends timed out at once. While another process executes the run, or another run holds the
        slot of its concurrency key, the call raises TimeoutError at the deadline.
        """
        self._refuse_closed()
        if if_running not in ("wait", "raise"):
            raise InvalidArgument(f"if_running is 'wait' or 'raise', not {brief(if_running)}")
        if recover not in ("inline", "worker"):
            raise InvalidArgument(f"recover is 'inline' or 'worker', not {brief(recover)}")
        runtime = self.agent(agent)
        input_ = mapping("input_data", input_data)
        check_messages(input_)
        if more := mapping("params", params):
            input_["params"] = {**mapping("input_data['params']", input_.get("params")), **more}
        lane = concurrency_key_of(concurrency_key, input_, parent_run_id)
        if lane and isinstance(lane, str) and (mine := await self._enclosing_run(lane)) is not None:
            if concurrency_key:
                raise run_busy_error("behind", mine)
            lane = None
        row = self.queue.new_row(
            run_id, runtime.key, input_, metadata, parent_run_id=parent_run_id,
            concurrency_key=lane, deadline=deadline,
            origin="inline" if recover == "inline" else "",
        )  # fmt: skip
        result = await self._execute(row, runtime, if_running)
        return result.raise_for_status() if raise_on_error else result

    async def _execute(self, row: RunRow, runtime: AgentRuntime, if_running: str) -> RunResult:
        reopen, refused, refusals = True, "", 0
        while True:
            self._refuse_closed()
            outcome, there = await self.claim_run(row, reopen=reopen, wait=if_running == "wait")
            # An end that comes from now on is the answer, and no reason to begin anew.
            reopen = False
            if outcome == "claimed":
                assert there is not None
                if row.deadline is not None:
                    there = there.with_values(deadline=row.deadline)
                drive = self.new_execution(there, runtime, inline=True)
                with self._inline_runs.executing(drive):
                    result = await drive.run()
                if result is not None:
                    return result
                if drive.control.release_requested:
                    raise closed()
                refused = "" if drive.control.lost else drive.row.claim_id
            elif outcome == "ended":
                assert there is not None
                return await self._result(there)
            else:
                assert there is not None
                if outcome == "held" and there.claim_id == refused:
                    await drive.claim.try_release()
                    refusals += 1
                    if refusals < MAX_REFUSED_CLAIMS:
                        continue
                    raise StorageCorrupt(
                        f"run {there.run_id}: what is written under its claims is refused as if they were lost, though "
                        "nobody else has the run: the store is damaged (restore a backup), or runs of this id in "
                        "another queue write to the same stores"
                    )
                if if_running == "raise" or there.run_id in ENCLOSING_RUNS.get(()):
                    raise run_busy_error(outcome, there)
                at_most = CHECK_INTERVAL
                if row.deadline is not None:
                    at_most = min(at_most, row.deadline - self.queue.clock.wall())
                    if at_most <= 0:
                        raise TimeoutError(
                            f"the deadline of run {row.run_key or row.run_id} passed: {run_busy_error(outcome, there)}"
                        )
                if outcome == "behind":
                    with contextlib.suppress(UnknownRun):  # ended, and deleted since
                        await self._until_ended(there.run_id, at_most=at_most)
                elif (ended := await self._until_ended(row.run_id, at_most=at_most)) is not None:
                    return await self._result(ended)

    async def _enclosing_run(self, lane: str) -> RunRow | None:
        """The run that has the turn of that key and that this task is part of: to wait for it would be for ever."""
        run_id = HELD_CONCURRENCY_KEYS.get({}).get(lane)
        row = await self.queue.row(run_id) if run_id is not None else None
        return row if row is not None and row.status == "running" else None

    async def claim_run(self, row: RunRow, *, reopen: bool = True, wait: bool = False) -> tuple[str, RunRow | None]:
        """Claim `row` for this process: "claimed", "held" or "ended", and what is stored; IdempotencyConflict.

        Or "behind", and the row in front; with `wait` it has a place in its lane until it is taken again.
        """
        config = self.config
        outcome, there = await self.queue.take(
            row, config.worker_id, config.lease_ttl_seconds, insert=True, reopen=reopen, wait=wait
        )
        if outcome == "conflict":
            assert there is not None
            same_run(row, there)
        return outcome, there

    def new_execution(self, row: RunRow, runtime: AgentRuntime, *, inline: bool) -> RunExecution:
        services = self.services(inline=inline, agent=runtime)
        return RunExecution(row, runtime, self.backends, self.config, self.heartbeat, services, inline=inline)

    def services(self, *, inline: bool, agent: AgentRuntime | None = None) -> Services:
        own = getattr(agent, "tools", None)
        tools = own if isinstance(own, ToolRegistry) else self.tools
        lent = self._services_cache.get(inline)
        if lent is None or lent.tools is not tools:
            lent = self._services_cache[inline] = self._services(tools, inline)
        return lent

    def _services(self, tools: ToolRegistry, inline: bool) -> Services:
        chronicle, not_kept = self._conversation_services()
        return Services(
            clock=self.queue.clock,
            tools=tools,
            monitor=self._monitor,
            park_after=None if inline else self.config.park_after,
            run_child=self._run_child_here if inline else None,
            limits=self.config.limits,
            tracer=self.tracer,
            persistence=lambda: self.persistence,
            recorder=chronicle,
            not_kept=not_kept,
            slots=None if inline else self._worker.slots,
            backpressure=self._flow.published,
        )

    async def _run_child_here(
        self, agent: AgentRuntime | str, run_id: str, input: dict[str, Any], parent: str, recover: str
    ) -> RunResult:
        there = await self.queue.row(run_id)
        if there is not None and there.parent_id == parent:
            input = cast("dict[str, Any]", decode(there.input))  # it goes on with what it was called with
        result = await self.execute(agent, run_id, input, parent_run_id=parent, recover=recover)
        if not input.get("conversation_id"):
            return result
        # The parent records only the new messages of a child: the record of a long history refers to the rest.
        record = await self.state_store.ending(run_id)
        text = "{}" if record is None else record.result or "{}"
        return result if omitted_history_in(text) is None else decode_result(text)

    # -- through the queue

    async def submit(
        self,
        agent_key: str | AgentRuntime,
        input: Mapping[str, Any] | None = None,
        *,
        run_id: UUID | str | None = None,
        idempotency_key: str | None = None,
        priority: int = 0,
        delay: float = 0,
        expires_in: float | None = None,
        deadline: _dt.datetime | float | None = None,
        parent_run_id: UUID | str | None = None,
        metadata: Mapping[str, Any] | None = None,
        concurrency_key: str | None = None,
    ) -> UUID:
        """Store a run for a worker, and give its id once it is durable.

        `priority` is a whole number of 32 bits, and greater ones go first. `delay` and `expires_in` are seconds
        from now (a run not begun by then is not begun), `deadline` a wall time at which it is stopped. The same
        id or idempotency key gives the run there is. An agent nobody here registered stays queued for a worker
        that knows it. Runs of one `concurrency_key` (1 to 512 characters) execute one at a time. By default that
        is the conversation of an input with a `conversation_id`, but not for a child run; "" is none.
        """
        self._refuse_closed()
        key = agent_key if isinstance(agent_key, str) else key_of(agent_key)
        input = {} if input is None else input
        check_messages(input)
        run = await self.queue.enqueue(
            run_id, key, input, metadata, priority, delay=delay, idempotency_key=idempotency_key,
            expires_in=expires_in, deadline=deadline, parent_run_id=parent_run_id,
            concurrency_key=concurrency_key_of(concurrency_key, input, parent_run_id),
        )  # fmt: skip
        return run.run_id

    async def run_once(self) -> bool:
        """Claim one run of a registered agent and drive it; False when there was none."""
        self._refuse_closed()
        return await self._worker.once()

    async def run_loop(self, poll_interval: float = 1.0, *, concurrency: int = 1, handle_signals: bool = True) -> None:
        """Claim and execute runs until `stop()` is called, or SIGTERM or SIGINT arrives.

        Then it claims no more runs, lets active runs finish for `grace_seconds`, and releases the rest. A second
        signal or call of `stop()` skips the wait.

        Args:
            poll_interval: Seconds between two looks at the queue, at most.
            concurrency: How many runs execute at once. A run that waits does not count.
            handle_signals: Whether SIGTERM and SIGINT stop the loop. All loops of the process share them. When the
                last loop has drained, the handlers that were installed before are restored and receive the signals.
                Handlers are installed only while a loop runs in the main thread.

        Raises:
            StorageClosed: The runner was closed.
            InvalidArgument: An argument is invalid, or the runner has a loop already.
        """
        await self._worker.loop(poll_interval, concurrency, handle_signals)

    def stop(self) -> None:
        """Make `run_loop` stop claiming and drain; from any thread. The next one, where none is under way."""
        self._worker.stop()

    # -- without a loop

    def execute_sync(self, *args: Any, **kwargs: Any) -> RunResult:
        """`execute` for callers without an event loop, or beside one."""
        return call(self.execute, *args, **kwargs)

    def submit_sync(self, *args: Any, **kwargs: Any) -> UUID:
        """`submit` for callers without an event loop, or beside one."""
        return call(self.submit, *args, **kwargs)
