"""The runner: every verb on runs, over three backends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as _dt
import difflib
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from .._engines.base import FORGET, Op
from .._ids import run_uuid
from .._json import decode, encode
from ..backends import Backends, configured, open_url, traced
from ..config import get_config
from ..errors import IllegalTransition, InvalidArgument, RunBusy, StorageCorrupt, UnknownAgent, UnknownRun
from ..events.base import Event, EventBus
from ..interfaces import AgentRuntime, ErrorInfo, RunResult, TraceSink
from ..journal.record import ENDED, Record
from ..outcome import decode_result, encode_result, payload_of
from ..portal import call, in_thread
from ..queue.base import RunQueue, same_run
from ..queue.row import LIVE, Moved, RunFilter, RunRow
from ..registry import DEFAULT, Registry
from ..schema import misfit
from ..state.base import StateStore
from ..status import TERMINAL, RunStatus
from ..tools.registry import ToolRegistry
from ..tracing.tracer import Tracer
from ..waits import Services
from .drive import Drive
from .heart import Heart
from .settings import RunInfo, RunnerConfig
from .worker import Worker

log: logging.Logger = logging.getLogger("agent_runtime_core")

LOOK_EVERY = 1.0  # seconds between looks at a run that is waited for, behind the bell
_warned: set[str] = set()


class AgentRunner:
    """Executes runs of registered agents, and submits, watches, cancels and repairs them.

    Backends that are not given come from the configuration; in memory, nothing outlives the process.
    `AgentRunner.open("agents.db")` is the durable set-up in one line. `tools` are those of agents that
    have none of their own. `trace_sinks` hear what happens, and cannot delay a run. Every coroutine of
    it can be reached without a loop through `portal.call`.
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
        registry: Registry = DEFAULT,
    ) -> None:
        settings = get_config()
        self.config: RunnerConfig = config or RunnerConfig.of(settings)
        self.backends: Backends = configured(
            settings, queue, event_bus, state_store, max_retries=self.config.max_retries
        )
        self.tools: ToolRegistry = tools if tools is not None else ToolRegistry()
        self.registry = registry
        self.tracer: Tracer | None = traced(settings, trace_sinks, self.backends.queue.clock)
        self._prepare()

    @classmethod
    def open(
        cls,
        path_or_url: str | os.PathLike[str],
        *,
        config: RunnerConfig | None = None,
        tools: ToolRegistry | None = None,
        trace_sinks: Sequence[TraceSink] = (),
        registry: Registry = DEFAULT,
        durability: str | None = None,
    ) -> AgentRunner:
        """A runner on a SQLite file (a path or sqlite:///path), or on memory://; all three backends there.

        `durability` "full" survives a power loss, "normal" a crash of the process; None is the configured one.
        """
        settings = get_config()
        config = config or RunnerConfig.of(settings)
        durability = settings.durability if durability is None else durability
        places = open_url(path_or_url, durability=durability, max_retries=config.max_retries)
        return cls(*places, config, tools=tools, trace_sinks=trace_sinks, registry=registry)

    def _prepare(self) -> None:
        self.heart: Heart = Heart(self.queue, self.config)
        self._worker = Worker(self)
        if not self.backends.durable and "memory" not in _warned:
            _warned.add("memory")
            log.info(
                "runs are kept in memory: nothing outlives this process (AgentRunner.open('agents.db') keeps them)"
            )

    @property
    def queue(self) -> RunQueue:
        return self.backends.queue

    @property
    def event_bus(self) -> EventBus:
        return self.backends.bus

    @property
    def state_store(self) -> StateStore:
        return self.backends.state

    async def __aenter__(self) -> AgentRunner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop working and let go of the backends."""
        await self._worker.drain()
        self.heart.stop()
        await self.backends.close()
        if self.tracer is not None:
            await in_thread(self.tracer.close)

    # -- executing here

    def agent(self, agent: AgentRuntime | str) -> AgentRuntime:
        """The agent itself, or the registered one of that key; UnknownAgent names the nearest."""
        if not isinstance(agent, str):
            return agent
        found = self.registry.get(agent)
        if found is None:
            near = difflib.get_close_matches(agent, self.registry.keys(), n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownAgent(f"no agent {agent!r} is registered in this process: register_runtime(…) it first{hint}")
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
    ) -> RunResult:
        """Run now, in this process, retrying as a worker would; a RunResult for every ending.

        The same id returns the record after a success, resumes after a crash or a failure, and waits for
        the result while another live process holds the run (`if_running="raise"`: RunBusy). Another agent
        or input under it is an IdempotencyConflict. With `recover="worker"` workers take the run over if
        this process dies; otherwise the next `execute` does.
        """
        if if_running not in ("wait", "raise"):
            raise InvalidArgument(f"if_running is 'wait' or 'raise', not {if_running!r}")
        if recover not in ("inline", "worker"):
            raise InvalidArgument(f"recover is 'inline' or 'worker', not {recover!r}")
        runtime = self.agent(agent)
        input_ = {**(input_data or {})}
        if params:
            input_["params"] = {**input_.get("params", {}), **params}
        row = self.queue.new_row(
            run_id, runtime.key, input_, metadata, parent_run_id=parent_run_id,
            origin="inline" if recover == "inline" else "",
        )  # fmt: skip
        result = await self._execute(row, runtime, if_running)
        return result.raise_for_status() if raise_on_error else result

    async def _execute(self, row: RunRow, runtime: AgentRuntime, if_running: str) -> RunResult:
        reopen = True
        while True:
            outcome, there = await self.take(row, reopen=reopen)
            # An end that comes from now on is the answer, and no reason to begin anew.
            reopen = False
            if outcome == "claimed":
                assert there is not None
                result = await self._drive(there, runtime, inline=True).run()
                if result is not None:
                    return result
            elif outcome == "ended":
                assert there is not None
                return await self._result(there)
            else:
                assert there is not None
                if if_running == "raise":
                    raise RunBusy(there.run_key or there.run_id, there.worker, there.claimed_at)
                ended = await self._until_ended(row.run_id, at_most=LOOK_EVERY)
                if ended is not None:
                    return await self._result(ended)

    async def take(self, row: RunRow, *, reopen: bool = True) -> tuple[str, RunRow | None]:
        """Claim `row` for this process: "claimed", "held" or "ended", and what is stored; IdempotencyConflict."""
        config = self.config
        outcome, there = await self.queue.take(
            row, config.worker_id, config.lease_ttl_seconds, insert=True, reopen=reopen
        )
        if outcome == "conflict":
            assert there is not None
            same_run(row, there)
        return outcome, there

    def _drive(self, row: RunRow, runtime: AgentRuntime, *, inline: bool) -> Drive:
        services = self.services(inline=inline, agent=runtime)
        return Drive(row, runtime, self.backends, self.config, self.heart, services, inline=inline)

    def services(self, *, inline: bool, agent: AgentRuntime | None = None) -> Services:
        own = getattr(agent, "tools", None)
        return Services(
            clock=self.queue.clock,
            tools=own if isinstance(own, ToolRegistry) else self.tools,
            park_after=None if inline else self.config.park_after,
            call_agent=self._call_here if inline else None,
            limits=self.config.limits,
            tracer=self.tracer,
            idle=None if inline else self._worker.idle,
        )

    async def _call_here(self, agent: AgentRuntime | str, run_id: str, input: dict[str, Any], parent: str) -> RunResult:
        return await self.execute(agent, run_id, input, parent_run_id=parent)

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
    ) -> UUID:
        """Store a run for a worker, and give its id once it is durable.

        Greater `priority` first; `delay` and `expires_in` are seconds from now (a run not begun by then is
        not begun), `deadline` a wall time at which it is stopped. The same id or idempotency key gives
        the run there is. An agent nobody here registered stays queued for a worker that knows it.
        """
        key = agent_key if isinstance(agent_key, str) else agent_key.key
        run = await self.queue.enqueue(
            run_id, key, input or {}, metadata, priority, delay=delay, idempotency_key=idempotency_key,
            expires_in=expires_in, deadline=deadline, parent_run_id=parent_run_id,
        )  # fmt: skip
        return run.run_id

    async def run_once(self) -> bool:
        """Claim one run of a registered agent and drive it; False when there was none."""
        return await self._worker.once()

    async def run_loop(self, poll_interval: float = 1.0, *, concurrency: int = 1, handle_signals: bool = True) -> None:
        """Work until `stop()`, up to `concurrency` runs at once.

        SIGTERM and SIGINT stop claiming, let running work finish for `grace_seconds`, then give it back;
        a second signal skips the wait. Signals are only handled in the main thread.
        """
        await self._worker.loop(poll_interval, concurrency, handle_signals)

    def stop(self) -> None:
        """Make `run_loop` stop claiming and drain; from any thread."""
        self._worker.stop()

    # -- asking

    def _key(self, run_id: UUID | str) -> str:
        return str(run_uuid(run_id, self.queue.clock)[0])

    async def _row(self, run_id: UUID | str) -> RunRow:
        row = await self.queue.row(self._key(run_id))
        if row is None:
            raise UnknownRun(f"no run {run_id} is stored here")
        return row

    async def get_run(self, run_id: UUID | str) -> RunInfo:
        """Where a run stands; UnknownRun if it is not stored here."""
        return RunInfo.of(await self._row(run_id))

    async def runs(
        self,
        status: RunStatus | str | None = None,
        agent: str | None = None,
        since: _dt.datetime | float | None = None,
        *,
        limit: int = 1000,
    ) -> list[RunInfo]:
        """Runs in order of arrival, by status, agent key and time of creation; dead letters are status "dead"."""
        statuses = None if status is None else (RunStatus(status).value,)
        after = since.timestamp() if isinstance(since, _dt.datetime) else (since or 0.0)
        return [RunInfo.of(row) for row in await self.queue.find(RunFilter(statuses, agent, after, limit=limit))]

    async def wait(self, run_id: UUID | str, timeout: float | None = None) -> RunResult:
        """The result of a run once it has ended; TimeoutError after `timeout` seconds."""
        await self._row(run_id)
        async with asyncio.timeout(timeout):
            ended = await self._until_ended(self._key(run_id))
        assert ended is not None
        return await self._result(ended)

    async def _until_ended(self, run_id: str, at_most: float | None = None) -> RunRow | None:
        """The run's row once it has ended; None after `at_most` seconds."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        stop = self.queue.listen("done", wake)
        try:
            for _ in range(2) if at_most is not None else iter(int, 1):
                row = await self.queue.must_get(run_id)
                if row.status not in LIVE:
                    return row
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(at_most or LOOK_EVERY):
                        await done.wait()
                done.clear()
            return None
        finally:
            if stop is not None:
                stop()

    async def _result(self, row: RunRow) -> RunResult:
        record = await self.state_store.ending(row.run_id)
        if record is not None and record.attempt == row.generation and record.result is not None:
            return decode_result(record.result)
        if row.status == "succeeded" and row.output is None and await self.state_store.records(row.run_id):
            raise StorageCorrupt(f"run {row.run_id} has succeeded, but the end of its journal is gone: it is damaged")
        # Ended through the queue's own methods, or before its journal could be written.
        output = cast("dict[str, Any]", decode(row.output)) if row.output else {}
        told = decode(row.error) if row.error else None
        error = None if told is None else ErrorInfo(**told) if isinstance(told, dict) else ErrorInfo("Error", str(told))
        return RunResult(output, error=error, status=RunStatus(row.status), run_id=UUID(row.run_id))

    async def stream(self, run_id: UUID | str, since_sequence: int = 0) -> AsyncIterator[Event]:
        """The run's events from `since_sequence` on, replayed and then live, until the run has ended."""
        key = (await self._row(run_id)).run_id
        events = self.event_bus.subscribe(key, since_sequence)
        ended = asyncio.ensure_future(self._until_ended(key))
        upcoming: asyncio.Task[Event] | None = None
        cursor = since_sequence

        def over() -> bool:
            return ended.done() and ended.result() is not None  # a queue that did not answer is no end

        try:
            while True:
                upcoming = upcoming or asyncio.ensure_future(anext(events))
                await asyncio.wait({upcoming} if over() else {upcoming, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not upcoming.done():
                    if over() and cursor >= await self.event_bus.head(key):
                        return
                    await asyncio.wait({upcoming})
                event, upcoming = upcoming.result(), None
                cursor = event.sequence + 1
                yield event
                if over() and cursor >= await self.event_bus.head(key):
                    return
        finally:
            ended.cancel()
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.wait({upcoming})
            await events.aclose()

    # -- acting on runs

    async def cancel(self, run_id: UUID | str, *, wait: bool = False) -> bool | RunStatus:
        """Ask for a run and its children to be cancelled.

        True: the request is recorded. False: the run is over already. With `wait`, the final status.
        """
        recorded = False
        while True:
            row = await self._row(run_id)
            if row.status not in LIVE:
                break
            with contextlib.suppress(Moved):
                recorded = await self._cancel_tree(row)
            if recorded:
                break
        if not wait:
            return recorded
        status = (await self.wait(run_id)).status
        assert status is not None
        return status

    async def _cancel_tree(self, row: RunRow) -> bool:
        """Cancel a run and what it called; False if it ended meanwhile, Moved if it is elsewhere by now."""
        tree = [row]
        for each in tree:
            tree += [child for child in await self.queue.children(each.run_id) if child.status in LIVE]
        now = self.queue.clock.wall()
        ends, queue_ops = [], []
        for each in tree:
            if each.status == "running":
                queue_ops.append(self.queue.post_op(each.run_id, "cancel", "", "null", f"cancel:{each.generation}"))
                continue
            queue_ops.append(Op("queue.end", (each.run_id, (each.status,), "cancelled", now, "cancel")))
            result = RunResult(status=RunStatus.CANCELLED, run_id=UUID(each.run_id))
            if each is row and each.parent_id is not None:
                mail_id = f"end:{each.run_id}:{each.generation}"
                payload = encode(payload_of(result))
                queue_ops.append(self.queue.post_op(each.parent_id, "child", each.run_id, payload, mail_id))
            ends.append((each, result))
        state_ops, event_ops = [], []
        for each, result in ends:
            record = Record(
                -1, ENDED, "cancelled", attempt=each.generation, t=now, result=encode_result(result), info="{}", nev=1
            )
            state_ops.append(Op("journal.append", (each.run_id, record)))
            state_ops.append(Op("state.status", (each.run_id, "cancelled", now)))
            if not self._derives:
                event_ops.append(
                    Op("events.publish", (each.run_id, ((f"end:{each.generation}", "run.cancelled", "{}", now),)))
                )
        first = (await self._write_freely(queue_ops, state_ops, event_ops))[0]
        return row.status != "running" or first[0] in LIVE

    @property
    def _derives(self) -> bool:
        return self.event_bus.derives and self.event_bus.commits is self.state_store.commits

    async def _write_freely(self, queue: list[Op], state: list[Op], events: list[Op]) -> list[Any]:
        """Commit under no claim: the queue decides first, on one engine all together. The queue's results."""
        parts: list[tuple[Any, list[Op]]] = []
        for target, ops in (
            (self.queue.commits, queue), (self.state_store.commits, state), (self.event_bus.commits, events),
        ):  # fmt: skip
            if parts and parts[-1][0] is target:
                parts[-1][1].extend(ops)
            elif ops:
                parts.append((target, list(ops)))
        results = [await target.commit(None, ops) for target, ops in parts]
        return cast("list[Any]", results[0])

    async def signal(
        self, run_id: UUID | str, name: str, payload: Any = None, *, message_id: str | None = None
    ) -> bool:
        """Give a run a signal; kept until it waits for one of that name. False if the run has ended.

        The same `message_id` is delivered once.
        """
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"a signal's name is a text that is not empty, not {name!r}")
        key = self._key(run_id)
        status, _ = await self.queue.post(key, "signal", name, encode(payload), message_id)
        if status == "unknown":
            raise UnknownRun(f"no run {run_id} is stored here")
        return status in LIVE

    async def approve(
        self, run_id: UUID | str, name: str, answer: Any = True, *, message_id: str | None = None
    ) -> bool:
        """Answer `ctx.approve(name, …)`; InvalidArgument if the answer does not fit the schema asked for."""
        for event in reversed(await self.event_bus.get_events(self._key(run_id))):
            if event.event_type == "approval.requested" and event.payload.get("name") == name:
                wrong = misfit(answer, event.payload.get("schema") or {})
                if wrong is not None:
                    raise InvalidArgument(f"the answer to {name!r} does not fit: {wrong}")
                break
        return await self.signal(run_id, name, answer, message_id=message_id)

    async def resume(self, run_id: UUID | str) -> RunInfo:
        """Open a new generation of a run that failed, timed out, was cancelled or is dead: a worker goes on with it.

        Completed steps are kept, counters start anew. IllegalTransition for any other run.
        """
        key = (await self._row(run_id)).run_id
        expect = tuple(status for status in TERMINAL if status != "succeeded")
        now = self.queue.clock.wall()
        try:
            await self.queue.commits.commit(None, [Op("queue.reopen", (key, expect, now))])
        except Moved:
            row = await self._row(run_id)
            raise IllegalTransition(
                f"run {run_id} is {row.status}: only one that failed, timed out, was cancelled or is dead is resumed"
            ) from None
        await self.state_store.update_run_status(key, RunStatus.PENDING.value)
        return await self.get_run(key)

    async def requeue(self, run_id: UUID | str) -> RunInfo:
        """Take a run out of the dead letters: the same as `resume`."""
        return await self.resume(run_id)

    async def vacuum(self, retention: Mapping[str, float] | None = None) -> int:
        """Delete ended runs older than their status's retention (seconds), and give space back; how many.

        Live runs are never deleted. Without `retention` the config's is used; a status it does not name is kept.
        """
        kept = RunnerConfig(retention=retention).retention if retention is not None else self.config.retention
        deleted, now = 0, self.queue.clock.wall()
        for status, age in kept.items():
            while True:
                wanted = RunFilter((RunStatus(status).value,), ended_before=now - age, limit=200)
                rows = await self.queue.find(wanted)
                if not rows:
                    break
                for row in rows:
                    with contextlib.suppress(Moved):  # somebody has resumed it meanwhile
                        await self._forget(row.run_id)
                        deleted += 1
        for backend in self.backends:
            compact = getattr(backend.commits, "compact", None)
            if deleted and compact is not None:
                await compact()
        return deleted

    async def _forget(self, run_id: str) -> None:
        # The queue's row goes last: a crash in between leaves it to be found again.
        queue = self.queue.commits
        last = [Op("queue.delete", (run_id,))]
        for backend, name in ((self.state_store, "state.delete"), (self.event_bus, "events.delete")):
            op, commits = Op(name, (run_id,)), backend.commits
            if commits is queue:
                last.append(op)
            else:
                await commits.commit(None, [op, Op(FORGET, (run_id,))])
        await queue.commit(None, last)

    # -- without a loop

    def execute_sync(self, *args: Any, **kwargs: Any) -> RunResult:
        """`execute` for callers without an event loop, or beside one."""
        return call(self.execute, *args, **kwargs)

    def submit_sync(self, *args: Any, **kwargs: Any) -> UUID:
        """`submit` for callers without an event loop, or beside one."""
        return call(self.submit, *args, **kwargs)

    def wait_sync(self, *args: Any, **kwargs: Any) -> RunResult:
        """`wait` for callers without an event loop, or beside one."""
        return call(self.wait, *args, **kwargs)
