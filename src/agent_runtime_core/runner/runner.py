"""Execute runs in this process, and process queued runs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime as _dt
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from uuid import UUID

from .._core.arguments import checked_tenant
from .._core.clock import Clock
from .._core.codec.json import decode
from .._core.context_vars import start_helper
from .._core.ids import known_uuid
from .._core.log import log
from .._core.per_loop import PerLoop, call_in_loop
from .._core.run_tasks import Monitor
from .._core.threads import in_thread
from .._core.validation import must, type_name, unknown
from .._execution.result_codec import decode_result, omitted_history_in
from .._execution.run_control import Services, Stop, with_traceparent
from ..config import SETTINGS, get_config
from ..errors import StorageCorrupt, UnknownAgent, UnknownRun
from ..events.base import EventBus
from ..interfaces import AgentRuntime, RunResult, TraceSink
from ..limits import ALL_AGENTS, RateLimit
from ..portal import call
from ..queue.base import RunQueue
from ..queue.records import RunRow, same_run
from ..registry import DEFAULT, Registry, key_of
from ..state.base import StateStore
from ..tools.registry import ToolRegistry
from ..tracing.tracer import Tracer
from .backends import configured, open_url, opening, traced
from .execution import ENCLOSING_RUNS, HELD_CONCURRENCY_KEYS, RunExecution
from .heartbeat import Heartbeat
from .left_runs import LeftRuns
from .processes import ListedProcess, ProcessInfo, processes
from .run_client import RunClient
from .run_watcher import CHECK_INTERVAL, closed
from .schedules import Schedules
from .settings import SHUTDOWN_SECONDS, RunnerConfig, check_parts, checked_input, concurrency_key_of, run_busy_error
from .signals import SHARED
from .worker import Lifespans, Worker

if TYPE_CHECKING:
    from ..persistence.manager import PersistenceManager


MAX_REFUSED_CLAIMS = 3  # claims of a run in a row whose writes are refused although no other process owns the run

_warned: set[str] = set()


class _InlineRun(NamedTuple):
    """A run that is executed in its caller's task."""

    execution: RunExecution
    within: tuple[str, ...]  # the runs that its caller is part of
    loop: asyncio.AbstractEventLoop

    def release(self) -> None:
        if not self.execution.control.release_requested:
            call_in_loop(self.loop, self.execution.claim.request_release)


class InlineRuns:
    """The runs that one runner executes in tasks of their callers, in all event loops."""

    def __init__(self, clock: Clock, grace: float) -> None:
        self._clock, self._grace = clock, grace
        self._runs: set[_InlineRun] = set()
        self._waiting: set[Callable[[], object]] = set()  # called whenever a run ends
        self._lock = threading.Lock()

    def begin(self, execution: RunExecution) -> _InlineRun:
        """Track a run until `end`."""
        held = _InlineRun(execution, ENCLOSING_RUNS.get(()), asyncio.get_running_loop())
        with self._lock:
            self._runs.add(held)
        return held

    def end(self, held: _InlineRun) -> None:
        """Track a run no longer."""
        with self._lock:
            self._runs.discard(held)
            waiting = tuple(self._waiting)
        for wake in waiting:
            wake()

    async def stop(self, until: float) -> None:
        """Let the runs finish until `until` by the monotonic clock, then release them.

        Runs that only wait are released now.

        Runs that this task is part of are released without waiting, because it cannot wait for itself. They can write
        nothing from then on.
        """
        enclosing, now = ENCLOSING_RUNS.get(()), self._clock.monotonic
        while (others := self._others(enclosing)) and now() < until:
            for held in _outermost(others):
                if _only_waits(held, others):
                    held.release()
            await self._wait_for_one(others, min(0.1, self._grace))
        until = now() + SHUTDOWN_SECONDS + self._grace / 5
        while others := self._others(enclosing):
            for held in _outermost(others):
                held.release()
            if not await self._wait_for_one(others, max(until - now(), 0)):
                break
        here = asyncio.get_running_loop()
        for held in [each for each in self._all() if each.loop is here]:
            held.execution.control.release_requested = True
            held.execution.control.stop(Stop.RELEASE)
            await held.execution.claim.try_release()

    async def _wait_for_one(self, held: list[_InlineRun], seconds: float) -> bool:
        """Wait until a run ends; return False if none did within that many seconds."""
        loop, one_ended = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            call_in_loop(loop, one_ended.set)

        with self._lock:
            self._waiting.add(wake)
            if not self._runs.issuperset(held):
                one_ended.set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await one_ended.wait()
        finally:
            with self._lock:
                self._waiting.discard(wake)
        return one_ended.is_set()

    def _all(self) -> list[_InlineRun]:
        with self._lock:
            return [held for held in self._runs if not held.loop.is_closed()]

    def _others(self, enclosing: tuple[str, ...]) -> list[_InlineRun]:
        return [held for held in self._all() if held.execution.claim.row.run_id not in enclosing]


def _outermost(held: list[_InlineRun]) -> list[_InlineRun]:
    """Return the runs that none of the others executes. Stopping a run stops its inline children, without a failure."""
    run_ids = {each.execution.claim.row.run_id for each in held}
    return [each for each in held if run_ids.isdisjoint(each.within)]


def _only_waits(held: _InlineRun, others: list[_InlineRun]) -> bool:
    """Return whether neither the run nor one of its inline children works."""
    run_id = held.execution.claim.row.run_id
    family = [each for each in others if each is held or run_id in each.within]
    return all(each.execution.control.paused_at is not None for each in family)


class _OfThread:
    """A connection on which the thread of the caller executes an insertion, after its event loop prepared that."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.insertion: Any = None


class AgentRunner(RunClient):
    """Executes runs of registered agents, and submits, watches, cancels and repairs them.

    `AgentRunner.open("agents.db")` is the durable set-up in one line. Runs in memory are lost with the process.
    `portal.call` calls every coroutine of a runner from code without an event loop.

    Args:
        queue: Which runs there are, and who executes them. None means the configured queue; the same goes for
            `event_bus` and `state_store`.
        event_bus: The events of runs.
        state_store: The journals of runs.
        config: Settings of this runner. By default the settings of the process.
        tools: The tools of agents that define no tools.
        trace_sinks: Receive traces of runs. They cannot delay a run.
        persistence: The manager of further stores. A run with a `conversation_id` starts with the earlier messages of
            that conversation, and its new messages are appended when it succeeds. An audit store records what runs do.
            By default, a runner with a URL (from `open` or `backend_url`) keeps conversations, and nothing else, at
            that URL. A runner without a URL keeps none and logs one warning per agent. None keeps none, without a
            warning.
        registry: The agents. By default those registered in this process.

    Raises:
        InvalidArgument: An argument is not of its type.

    Examples:
        >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
        >>> class Double(AgentRuntime):
        ...     key = "double"
        ...     def run(self, ctx):
        ...         return RunResult(final_output={"n": ctx.params["n"] * 2})
        >>> AgentRunner.open("memory://").execute_sync(Double(), params={"n": 21}).final_output
        {'n': 42}
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
            ("queue", queue, RunQueue),
            ("event_bus", event_bus, EventBus),
            ("state_store", state_store, StateStore),
        ):
            if given is not None and not isinstance(given, kind):
                raise must(what, f"be {type_name(kind)}", given, f"Extend {kind.__name__} to write a custom one")
        settings = get_config()
        config = config or RunnerConfig.of(settings)
        if queue is not None and queue.limits_retries:
            config = replace(config, max_retries=min(config.max_retries, queue.max_retries))
        with opening() as opened:
            backends = configured(settings, queue, event_bus, state_store, max_retries=config.max_retries)
            for given, backend in zip((queue, event_bus, state_store), backends, strict=True):
                if given is None:
                    opened(backend)
            settings.encode_contents(*backends)
            super().__init__(backends, config.on(backends.queue), registry, persistence)
            at_url = settings.backend_url is not None and not (queue or event_bus or state_store)
            self.stores_at_url: bool = at_url and backends.hold_documents
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
        read_only: bool = False,
    ) -> AgentRunner:
        """Create a runner whose runs are stored in a SQLite file, Redis, PostgreSQL or memory.

        Args:
            path_or_url: The path of a SQLite file, `sqlite:///path`, `redis://host`, `postgresql://host/database`,
                `memory://`, or a URL whose scheme an installed package adds.
            config: As in `AgentRunner`, like the other arguments.
            tools: As in `AgentRunner`.
            trace_sinks: As in `AgentRunner`.
            persistence: As in `AgentRunner`.
            registry: As in `AgentRunner`.
            durability: "full" survives a power loss, "normal" a crash of the process. None means the configured
                durability.
            read_only: Only read. Every method that writes raises NotSupported. A SQLite file must exist, and neither
                it nor its directory is written: no lock, log or other file is created. A file that workers have open
                is read through their log, without making them wait, and `stream` and `wait` see new events within
                about 0.1 seconds. A file that SQLite cannot read without writing (a log without its `-shm`), or
                that an earlier release wrote, is copied to a temporary directory, which `close` deletes; later
                commits are not seen there. Open a file under the name that its workers use. On PostgreSQL no table is
                created, and a role that only reads suffices.

        Returns:
            The runner. Close it with `await runner.close()`, or use it in `async with`.

        Raises:
            InvalidArgument: An argument is invalid. With `read_only`, there is no such file, or it is no store.
            StorageCorrupt: The file is no database.
            StorageTooNew: A later version of this library wrote the file.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         return await runner.runs()
            >>> asyncio.run(main())
            []
        """
        check_parts(config, tools, trace_sinks, persistence)
        if not isinstance(read_only, bool):
            raise must("read_only", "be True or False", read_only)
        settings = get_config()
        config = config or RunnerConfig.of(settings)
        durability = settings.durability if durability is None else durability
        with opening() as opened:
            opened_backends = open_url(
                path_or_url, durability=durability, max_retries=config.max_retries, read_only=read_only
            )
            for backend in opened_backends:
                opened(backend)
            runner = cls(
                *opened_backends,
                config,
                tools=tools,
                trace_sinks=trace_sinks,
                persistence=persistence,
                registry=registry,
            )
        runner.stores_at_url = opened_backends.hold_documents
        return runner

    def worker_for(self, registry: Registry) -> AgentRunner:
        """Create a second runner for other agents on the same backends and stores. Closing it leaves those open.

        Args:
            registry: The agents of the second runner.

        Returns:
            The second runner.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> from agent_runtime_core.registry import Registry
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         second = runner.worker_for(Registry())
            ...         await second.submit("report", run_id="report-1")
            ...         return (await runner.get_run("report-1")).run_key
            >>> asyncio.run(main())
            'report-1'
        """
        if self.stores_at_url and self._stores is None:
            _ = self.persistence  # so that this runner opens the stores, and closes them
        other = copy.copy(self)
        other.registry, other._borrowed = registry, True
        other._prepare()
        return other

    beside = worker_for  # its name in 0.6.0

    def add_trace_sink(self, sink: TraceSink) -> None:
        """Pass traces to one more sink. Runs that this runner already executes may be left out.

        Args:
            sink: The trace sink.

        Raises:
            InvalidArgument: It is no trace sink.
        """
        SETTINGS["trace_sinks"].check("trace_sinks", [sink])
        if self.tracer is None:
            self.tracer = Tracer(clock=self.queue.clock, redaction=self.queue.sink_redaction)
            self._services_cache.clear()
        self.tracer.add(sink)

    def _prepare(self) -> None:
        super()._prepare()
        self._process: ListedProcess = ListedProcess(self.queue, self.config, lambda: self.registry.keys())
        self.heartbeat: Heartbeat = Heartbeat(self.queue, self.config, self._process.operations)
        self._left_runs: LeftRuns = LeftRuns(self.queue, self.config, self._process)
        self._lifespans: Lifespans = Lifespans(lambda: max(self.config.grace_seconds, SHUTDOWN_SECONDS))
        self._services_cache: dict[bool, Services] = {}  # the latest, by whether a run is inline
        self._warned_agents: set[str] = set()
        self.schedules: Schedules = Schedules(self.queue, self.new_run, self._require_writable)
        self._worker: Worker = Worker(
            self.queue,
            self.config,
            lambda: self.registry,
            self.new_execution,
            self._process,
            partial(self._lifespans.leave, idle_only=True),
            self.schedules.fire,
        )
        self._monitor: PerLoop[Monitor] = PerLoop(partial(Monitor, clock=self.queue.clock))
        self._inline_runs: InlineRuns = InlineRuns(self.queue.clock, self.config.grace_seconds)
        if not self.backends.durable and "memory" not in _warned:
            _warned.add("memory")
            log.info(
                "runs are stored in memory and end with this process; AgentRunner.open('agents.db') stores "
                "them in a file"
            )

    async def __aenter__(self) -> AgentRunner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop `run_loop`, release active runs, and close the backends.

        Active runs get `grace_seconds` to finish, including runs of `execute`, except runs that only wait. Calls that
        still wait for a run or execute one raise StorageClosed.
        """
        until = self.queue.clock.monotonic() + self.config.grace_seconds
        await self._worker.close()
        await self._inline_runs.stop(until)
        self._closed = True
        await self._lifespans.leave()
        self.heartbeat.stop()
        await self._process.leave()
        self.watcher.close()
        async with AsyncExitStack() as closing:  # each is closed, even if closing another fails
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
        """Return the agent itself, or the registered agent with that key.

        Args:
            agent: An agent or its key.

        Raises:
            UnknownAgent: No such agent is registered. The message names the nearest key.
        """
        if not isinstance(agent, str):
            key_of(agent)
            return agent
        found = self.registry.get(agent)
        if found is None:
            fix = "Register agents with register_runtime(agent)"
            raise UnknownAgent(unknown("agent", agent, self.registry.keys(), fix))
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
        tenant: str | None = None,
        input: Mapping[str, Any] | None = None,
        concurrency_limit: int = 1,
        tags: Iterable[str] = (),
    ) -> RunResult:
        """Execute a run in this process, with the retries of a worker, and return its result.

        A run id that succeeded returns the saved result. A run id that crashed or failed resumes.

        Args:
            agent: The agent, or the key of a registered agent.
            run_id: Names the run. None makes a new id.
            input_data: The same as `input`.
            metadata: Stored with the run.
            params: Merged into the "params" of the input.
            raise_on_error: Raise RunFailed unless the run succeeded.
            if_running: While another process executes the run, or another run holds its concurrency slot: "wait" for
                it, or "raise" RunBusy. Code of the same run, or of a run with that key, always gets RunBusy, because
                it would wait for itself. Without a `concurrency_key`, a run of the same conversation shares the slot.
            recover: If this process dies, the next `execute` resumes the run ("inline"), or a "worker" does.
            parent_run_id: The run that this is a child of.
            concurrency_key: As in `submit`.
            deadline: Wall time at which the run is stopped, as in `submit`. It is stored with a new run, and replaces
                the deadline of a stored run for this call. If a run cannot resume before the deadline, it ends as timed
                out immediately.
            tenant: As in `submit`.
            input: The run's input.
            concurrency_limit: As in `submit`.
            tags: As in `submit`.

        Returns:
            The result of the run.

        Raises:
            IdempotencyConflict: The run id belongs to a run with another agent or input.
            InvalidArgument: An argument is invalid, or both `input` and `input_data` are passed.
            RunBusy: See `if_running`.
            TimeoutError: The deadline passed while another process executed the run, or another run held its slot.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Double(AgentRuntime):
            ...     key = "double"
            ...     async def run(self, ctx):
            ...         return RunResult(final_output={"n": 2 * ctx.params["n"]})
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         result = await runner.execute(Double(), run_id="double-1", params={"n": 21})
            ...         return result.final_output, result.run_key
            >>> asyncio.run(main())
            ({'n': 42}, 'double-1')
        """
        self._require_writable()
        if if_running not in ("wait", "raise"):
            raise must("if_running", "be 'wait' or 'raise'", if_running)
        if recover not in ("inline", "worker"):
            raise must("recover", "be 'inline' or 'worker'", recover)
        runtime = self.agent(agent)
        result = await self._execute_new(
            runtime, run_id, checked_input(input, params, input_data), recover, if_running, parent_run_id,
            await self.tenant_of_new_run(tenant, parent_run_id), concurrency_key, metadata=metadata, deadline=deadline,
            concurrency_limit=concurrency_limit, tags=tags,
        )  # fmt: skip
        return result.raise_for_status() if raise_on_error else result

    async def tenant_of_new_run(self, tenant: str | None, parent: UUID | str | None) -> str:
        """Return the stored tenant of a new run: the tenant that the caller names, or else its parent's tenant.

        Args:
            tenant: The tenant that the caller passed, or None.
            parent: The parent run, or None.
        """
        owner = "" if tenant is None else checked_tenant(tenant)
        if parent is None or owner:
            return owner
        found = await self.queue.row(parent)
        return "" if found is None else found.tenant

    async def _free_key(self, key: str, tenant: str, *, chosen: bool) -> str | None:
        """Return the run's concurrency key; None within a run that holds the slot of the same conversation."""
        if (enclosing := await self._enclosing_run(key, tenant)) is None:
            return key
        if chosen:
            raise run_busy_error("behind", enclosing, self.queue.clock.wall())
        return None

    async def _execute_new(
        self, runtime: AgentRuntime, run_id: UUID | str | None, input_: Mapping[str, Any], recover: str,
        if_running: str, parent: UUID | str | None, tenant: str, concurrency_key: str | None = None,
        *, metadata: Mapping[str, Any] | None = None, deadline: _dt.datetime | float | None = None,
        concurrency_limit: int = 1, tags: Iterable[str] = (),
    ) -> RunResult:  # fmt: skip
        key = concurrency_key_of(concurrency_key, input_, parent)
        if key and isinstance(key, str):
            key = await self._free_key(key, tenant, chosen=bool(concurrency_key))
        row = self.backends.queue.new_row(
            run_id, runtime.key, input_, with_traceparent(metadata, self.tracer), parent_run_id=parent,
            concurrency_key=key, deadline=deadline, origin="inline" if recover == "inline" else "", tenant=tenant,
            concurrency_limit=concurrency_limit, tags=tags,
        )  # fmt: skip
        reopen, refused, refusals = True, "", 0
        while True:
            self._refuse_closed()
            outcome, there = await self.claim_run(row, reopen=reopen, wait=if_running == "wait")
            assert there is not None
            reopen = False  # if the run ends from now on, that is the result and not a reason to restart it
            if outcome == "claimed":
                if row.deadline is not None:
                    there = there.with_values(deadline=row.deadline)
                execution = self.new_execution(there, runtime, inline=True)
                held = self._inline_runs.begin(execution)
                try:
                    result = await execution.run()
                finally:
                    self._inline_runs.end(held)
                if result is not None:
                    return result
                if execution.control.release_requested:
                    raise closed()
                refused = "" if execution.control.lost else execution.claim.row.claim_id
            elif outcome == "ended":
                return await self._result(there)
            elif outcome == "held" and there.claim_id == refused:
                await execution.claim.try_release()
                refusals += 1
                if refusals >= MAX_REFUSED_CLAIMS:
                    raise StorageCorrupt(
                        f"run {there.run_key or there.run_id!r}: writes under its claims are rejected as if they were "
                        "lost, and no other process has the run. The store is damaged (restore a backup), or runs of "
                        "this id in another queue write to the same stores"
                    )
            else:
                if if_running == "raise" or there.run_id in ENCLOSING_RUNS.get(()):
                    raise run_busy_error(outcome, there, self.queue.clock.wall())
                if (ended := await self._wait_for_turn(row, outcome, there)) is not None:
                    return await self._result(ended)

    async def _wait_for_turn(self, row: RunRow, outcome: str, there: RunRow) -> RunRow | None:
        """Wait for the process that executes the run, or for the run with its concurrency slot.

        Returns:
            The run's row if it is finished; None if it must be claimed again, at the latest after `CHECK_INTERVAL`.
        """
        at_most = CHECK_INTERVAL
        if row.deadline is not None:
            at_most = min(at_most, row.deadline - self.queue.clock.wall())
            if at_most <= 0:
                busy = run_busy_error(outcome, there, self.queue.clock.wall())
                raise TimeoutError(f"deadline of run {row.run_key or row.run_id!r} passed: {busy}")
        if outcome != "behind":
            return await self._until_ended(row.run_id, at_most=at_most)
        with contextlib.suppress(UnknownRun):  # it ended and was deleted
            await self._until_ended(there.run_id, at_most=at_most)
        return None

    async def _enclosing_run(self, key: str, tenant: str) -> RunRow | None:
        """Return the run that holds that concurrency slot and that this task is part of: it must not be waited for."""
        run_id = HELD_CONCURRENCY_KEYS.get({}).get((key, tenant))
        row = await self.queue.row(run_id) if run_id is not None else None
        return row if row is not None and row.status == "running" else None

    async def claim_run(self, row: RunRow, *, reopen: bool = True, wait: bool = False) -> tuple[str, RunRow | None]:
        """Claim `row` for this process.

        Args:
            row: The run. It is stored if it is new.
            reopen: Restart a run that ended without success.
            wait: Queue the run for its concurrency slot until it is claimed again.

        Returns:
            "claimed", "held" by another process, or "ended", with the stored row; or "behind", with the row of the
            run that holds its concurrency slot.

        Raises:
            IdempotencyConflict: The id belongs to another run.
        """
        config = self.config
        outcome, there = await self.backends.queue.take(
            row, config.worker_id, config.lease_ttl_seconds, insert=True, reopen=reopen, wait=wait
        )
        if outcome == "conflict":
            assert there is not None
            same_run(row, there)
        return outcome, there

    def new_execution(self, row: RunRow, runtime: AgentRuntime, *, inline: bool) -> RunExecution:
        """Create the execution of a claimed run."""
        services, own = self.services(inline=inline, agent=runtime), self.registry.time_limits(runtime)
        config = replace(self.config, **own) if own else self.config  # the only place where these limits are combined
        left_runs = None if inline else self._left_runs
        return RunExecution(
            row,
            runtime,
            self.backends,
            config,
            self.heartbeat,
            services,
            inline=inline,
            own_limits=own,
            left_runs=left_runs,
        )

    def services(self, *, inline: bool, agent: AgentRuntime | None = None) -> Services:
        """Return what contexts of such runs use of this runner."""
        own = getattr(agent, "tools", None)
        tools = own if isinstance(own, ToolRegistry) else self.tools
        services = self._services_cache.get(inline)
        if services is None or services.tools is not tools:
            services = self._services_cache[inline] = self._services(tools, inline)
        return services

    def _services(self, tools: ToolRegistry, inline: bool) -> Services:
        recorder, not_kept = self._conversation_services()
        return Services(
            clock=self.queue.clock,
            tools=tools,
            monitor=self._monitor,
            park_after=None if inline else self.config.park_after,
            run_child=self._run_child_here if inline else None,
            limits=self.config.limits,
            tracer=self.tracer,
            persistence=lambda: self.persistence,
            recorder=recorder,
            not_kept=not_kept,
            enter_lifespan=self._lifespans.enter,
            slots=None if inline else self._worker.slots,
            backpressure=self._flow.outlet,
            warned_agents=self._warned_agents,
        )

    async def _run_child_here(
        self, agent: AgentRuntime | str, run_id: str, input: dict[str, Any], parent: str, recover: str, tenant: str
    ) -> RunResult:
        there = await self.queue.row(run_id)
        if there is not None and there.parent_id == parent:
            input = cast("dict[str, Any]", decode(there.input))  # it resumes with its first input
            tenant = there.tenant  # a run and its child runs are given to a tenant one after the other
            if there.agent != (agent if isinstance(agent, str) else key_of(agent)):
                agent = there.agent  # `ctx.renamed` gave it another key since
        result = await self._execute_new(self.agent(agent), run_id, input, recover, "wait", parent, tenant)
        if not input.get("conversation_id"):
            return result
        # The parent records only the new messages of a child: the record of a long history refers to the rest.
        record = await self.state_store.ending(run_id)
        text = "{}" if record is None else record.result or "{}"
        return result if omitted_history_in(text) is None else decode_result(text)

    # -- through the queue

    async def processes(self) -> list[ProcessInfo]:
        """List the processes that claim runs from this store, the oldest first.

        A runner is listed from the start of its `run_loop`, or from the first heartbeat of a run that it executes,
        until it is closed. A process that was killed is listed for a day, and is not `living`.

        Returns:
            The processes; none for a queue that keeps no list of them.
        """
        return await processes(self.queue)

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
        traceparent: str | None = None,
        params: Mapping[str, Any] | None = None,
        tenant: str | None = None,
        connection: Any = None,
        tags: Iterable[str] = (),
        concurrency_limit: int = 1,
        rate_limit: RateLimit | None = None,
    ) -> UUID:
        """Store a run for a worker.

        Args:
            agent_key: The agent or its key. Workers that have registered the key execute the run.
            input: The run's input.
            run_id: Names the run. None makes a new id.
            idempotency_key: With the key of a stored run, that run's id is returned. So it is with its `run_id`.
            priority: A 32-bit integer. Runs with a greater priority are claimed first.
            delay: Seconds from now until the run may start.
            expires_in: Seconds from now after which the run is not started any more.
            deadline: Wall time at which the run is stopped.
            parent_run_id: The run that this is a child of.
            metadata: Stored with the run.
            concurrency_key: 1 to 512 characters. Runs with the same key execute one at a time, or as many as
                `concurrency_limit` allows. None means the conversation of an input with a `conversation_id`, and no key
                for a child run. "" means no key.
            traceparent: The span that the run's spans belong to, as a W3C `traceparent`. If None, the current span, if
                a trace sink knows it. It is stored in the metadata.
            params: Merged into the "params" of the input.
            tenant: Whose run it is: 1 to 128 characters. `run_id`, `idempotency_key`, `concurrency_key` and the
                conversation of the input are names within the tenant, so that two tenants can use the same names. Child
                runs and forks have the tenant of their run. None means the tenant of `parent_run_id`, or no tenant.
            connection: A connection of psycopg or asyncpg, or a connection or session of SQLAlchemy, to the PostgreSQL
                database of this runner. The run is stored in its open transaction, and exists if you commit.
                `submit_sync` also takes the connection of Django.
            tags: At most 32 tags of 1 to 128 characters. `runs(tag=…)` finds the runs with a tag. The tags are stored
                in the metadata, and forks have the tags of their run.
            concurrency_limit: The run is active while fewer other runs of its concurrency key than this are.
            rate_limit: How many runs start in a period. None: the limit of the agent, if it is registered here, or else
                of the `RunnerConfig`. The run has one limit, which is stored with it.

        Returns:
            The run's id, once the run is durable; with `connection`, once it is part of your transaction.

        Raises:
            IdempotencyConflict: The run id or the key belongs to a run with another agent or input.
            InvalidArgument: An argument is invalid, or `connection` is not in a transaction or belongs to another
                database.
            NotSupported: `connection` is passed, and the runs are not on PostgreSQL.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         run_id = await runner.submit("report", {"month": "May"}, priority=5)
            ...         return (await runner.get_run(run_id)).status.value
            >>> asyncio.run(main())
            'pending'
        """
        row = self.new_run(
            agent_key, input, run_id=run_id, metadata=metadata, priority=priority, delay=delay,
            idempotency_key=idempotency_key, expires_in=expires_in, deadline=deadline, parent_run_id=parent_run_id,
            concurrency_key=concurrency_key, traceparent=traceparent, params=params,
            concurrency_limit=concurrency_limit, rate_limit=rate_limit, tags=tags,
            tenant=await self.tenant_of_new_run(tenant, parent_run_id),
        )  # fmt: skip
        if connection is None:
            stored, _ = await self.insert_run(row)
        elif isinstance(connection, _OfThread):
            connection.insertion = await self.queue.insertion(row, connection.connection, sync=True)
            stored = row
        else:
            stored = await (await self.queue.insertion(row, connection, sync=False)).run()
        return stored.decoded("run_id", known_uuid)

    def new_run(self, agent_key: str | AgentRuntime, input: Mapping[str, Any] | None = None, **options: Any) -> RunRow:
        """Return the row of a new run, checked and encoded. Nothing is stored; arguments as for `submit`.

        Args:
            agent_key: The agent or its key.
            input: The input of the run.
            **options: The other arguments of `submit`.
        """
        self._require_writable()
        key = agent_key if isinstance(agent_key, str) else key_of(agent_key)
        input = checked_input(input, options.pop("params", None))
        options["concurrency_key"] = concurrency_key_of(
            options.get("concurrency_key"), input, options.get("parent_run_id")
        )
        if options.get("rate_limit") is None:
            own = self.registry.rate_limits.get(key)
            if not isinstance(agent_key, str):
                own = getattr(agent_key, "rate_limit", None)
            limit = self.config.rate_limit
            if own is None and limit is not None and limit.key is None:
                limit = replace(limit, key=ALL_AGENTS)
            options["rate_limit"] = limit if own is None else own
        if (turns := self.config.take_turns) is not None:
            options["turn"] = (turns(input) or "") if callable(turns) else options.get("tenant") or ""
        metadata = with_traceparent(options.pop("metadata", None), self.tracer, options.pop("traceparent", None))
        return self.queue.new_row(options.pop("run_id", None), key, input, metadata, **options)

    async def insert_run(self, row: RunRow) -> tuple[RunRow, bool]:
        """Store a row of `new_run`. Return the stored row, and whether this call stored it."""
        stored = await self.queue.insert(row)
        return stored, (stored.run_id, stored.created_at) == (row.run_id, row.created_at)

    async def run_once(self) -> bool:
        """Claim one run of a registered agent and execute it; return False if there was none.

        Returns:
            Whether a run was claimed and executed.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         return await runner.run_once()
            >>> asyncio.run(main())
            False
        """
        self._require_writable()
        return await self._worker.once()

    async def run_loop(self, poll_interval: float = 1.0, *, concurrency: int = 1, handle_signals: bool = True) -> None:
        """Claim and execute runs until `stop()` is called, or SIGTERM or SIGINT arrives.

        Then it claims no more runs, lets active runs finish for `grace_seconds`, and releases the rest. A second
        signal or call of `stop()` skips the wait.

        Args:
            poll_interval: Seconds between two looks at the queue, at most.
            concurrency: How many runs execute at the same time. A run that waits does not count.
            handle_signals: Whether SIGTERM and SIGINT stop the loop. All loops of the process share them. When the
                last loop ends, the handlers that were installed before are restored and receive the signals. Handlers
                are installed only while a loop runs in the main thread.

        Raises:
            StorageClosed: The runner was closed.
            InvalidArgument: An argument is invalid, or a loop of the runner already runs.
        """
        self.backends.require_writable()
        declared = self.schedules.declared(map(self.agent, self.registry.keys()))
        putting = start_helper(self.schedules.put_declared(declared))
        try:
            await self._worker.loop(poll_interval, concurrency, handle_signals)
        finally:
            with contextlib.suppress(RuntimeError):  # an abandoned event loop is closed
                putting.cancel()

    def stop(self) -> None:
        """Stop `run_loop`: claim nothing new and let active runs finish. Thread-safe.

        If no `run_loop` is running, the next loop stops.
        """
        self._worker.stop()

    # -- without a loop

    def execute_sync(self, *args: Any, **kwargs: Any) -> RunResult:
        """`execute` for code without an event loop, or in a thread next to a loop.

        Args:
            *args: The arguments of `execute`.
            **kwargs: The keyword arguments of `execute`.

        Returns:
            What `execute` returns.

        Examples:
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Hello(AgentRuntime):
            ...     key = "hello"
            ...     def run(self, ctx):
            ...         return RunResult(final_output={"response": f"Hello, {ctx.params['name']}!"})
            >>> runner = AgentRunner.open("memory://")
            >>> runner.execute_sync(Hello(), params={"name": "Ada"}).final_output
            {'response': 'Hello, Ada!'}
        """
        return call(self.execute, *args, **kwargs)

    def submit_sync(self, *args: Any, **kwargs: Any) -> UUID:
        """`submit` for code without an event loop, or in a thread next to a loop.

        With `connection`, your thread executes the statement, so the connection may belong to it.

        Args:
            *args: The arguments of `submit`.
            **kwargs: The keyword arguments of `submit`.

        Returns:
            What `submit` returns.

        Examples:
            >>> from agent_runtime_core import AgentRunner
            >>> runner = AgentRunner.open("memory://")
            >>> first = runner.submit_sync("report", {"month": "May"}, run_id="report-1")
            >>> first == runner.submit_sync("report", {"month": "May"}, run_id="report-1")
            True
        """
        connection = kwargs.pop("connection", None)
        if connection is None:
            return call(self.submit, *args, **kwargs)
        of_thread = _OfThread(connection)
        call(self.submit, *args, connection=of_thread, **kwargs)
        return of_thread.insertion.run_sync(call).decoded("run_id", known_uuid)  # type: ignore[no-any-return]
