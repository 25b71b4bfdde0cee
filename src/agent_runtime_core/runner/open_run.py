"""The door for durable steps alone: a run without an agent, in this process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from .._execution.context import Context
from .._execution.read_only_writer import ReadOnlyWriter
from .._execution.result_codec import error_payload
from .._execution.run_writer import RunWriter
from .._execution.step_journal import StepJournal
from ..errors import LeaseLost, Postponed, RunFailed, StorageClosed, deciding_error
from ..interfaces import AgentRuntime, RunContext, RunResult, describe
from ..persistence.fencing import CURRENT_CLAIM, FencedWrites
from ..portal import call, takes_function
from ..queue.records import RunRow
from ..status import RunStatus
from .arguments import run_busy_error
from .execution import RunExecution
from .outcomes import partial_result
from .runner import AgentRunner
from .settings import RunnerConfig

P = ParamSpec("P")
T = TypeVar("T")

AGENT = "open_run"


class _InlineAgent(AgentRuntime):
    """Stands where an agent would: the code is the caller's block."""

    key = AGENT

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult()


class OpenRunSession(RunExecution):
    """A claim whose code is the caller's."""

    async def enter(self, ended: bool) -> Context:
        writer: RunWriter = self.writer
        if not ended:
            self._log_claim()
            self._register()
            self._trace_start()
        else:
            writer = ReadOnlyWriter(self.row, *self.backends, self.clock)
        book = StepJournal(writer, await writer.open(), self.control)
        self.finished: bool = ended
        if not ended:
            early = await self.end_without_running(book)
            if early is not None:
                early.raise_for_status()
                self.finished = True
            else:
                await self._begin(book)
        self.control.task = asyncio.current_task()
        self.ctx: Context = Context(self.row, book, self.services, self.control, await self._overrides())
        self.claim: FencedWrites = self._fenced_writes()
        return self.ctx

    async def leave(self, error: BaseException | None) -> None:
        """Commit how the block ended; raises what its caller should see instead of `error`."""
        place = self.control
        if self.finished:
            return
        task = asyncio.current_task()
        cause = None if error is None else deciding_error(error)
        ours = isinstance(cause, asyncio.CancelledError) and place.cancel_requested
        if ours and task is not None:
            task.uncancel()
        if self.lost:
            raise LeaseLost(*self.writer.guard) from error
        if place.cancelled:
            await self.end(RunStatus.CANCELLED, partial_result(self.ctx), {})
            if isinstance(cause, asyncio.CancelledError) and not ours:
                return  # somebody else's, which goes on
            raise RunFailed(f"run {self.row.run_id} was cancelled", RunStatus.CANCELLED.value) from error
        await self.ctx.journal.unconfirmed.resolve_at_end(error)
        if error is None:
            await self.end(RunStatus.SUCCEEDED, partial_result(self.ctx))
        elif isinstance(cause, Postponed):
            await self.release()  # the next open_run() of it resumes
        elif isinstance(cause, Exception) and not isinstance(cause, LeaseLost):
            result = partial_result(self.ctx)
            result.error = info = describe(error)
            await self.end(RunStatus.FAILED, result, error_payload(info) or {})
        elif not isinstance(cause, LeaseLost):
            await self.release()

    def _lose(self, claim_id: str) -> None:
        super()._lose(claim_id)
        if self.lost:
            self.control.refusal = lambda: LeaseLost(*self.writer.guard)

    def _closed_error(self) -> StorageClosed:
        run = self.row.run_key or self.row.run_id
        return StorageClosed(f"the block of run {run} was left: call its context inside, or open the run again")

    def close(self) -> None:
        self.control.closed = True
        self.control.refusal = self._closed_error
        self.heartbeat.drop(self.row.run_id, self.row.claim_id)
        self._trace_end()


async def _open(
    path_or_url: str | os.PathLike[str],
    run_id: UUID | str | None,
    input: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    config: RunnerConfig | None,
    durability: str | None,
    concurrency_key: str | None,
) -> tuple[AgentRunner, OpenRunSession, Context]:
    config = config or RunnerConfig(worker_id=f"open_run-{os.getpid()}", run_timeout_seconds=1e9, max_retries=1)
    # The block has no agent, and no result whose messages could be appended to a conversation.
    runner = AgentRunner.open(path_or_url, config=config, durability=durability, persistence=None)
    try:
        row = runner.queue.new_row(
            run_id, AGENT, input or {}, metadata, concurrency_key=concurrency_key, origin="inline"
        )
        outcome, there = await runner.claim_run(row)
        assert there is not None
        if outcome in ("held", "behind"):
            raise run_busy_error(outcome, there)
        door = _new_session(runner, there)
        try:
            return runner, door, await door.enter(outcome == "ended")
        except BaseException:
            await door.try_release()
            door.close()
            raise
    except BaseException:
        await runner.close()
        raise


def _new_session(runner: AgentRunner, row: RunRow) -> OpenRunSession:
    services = runner.services(inline=True)
    return OpenRunSession(row, _InlineAgent(), runner.backends, runner.config, runner.heartbeat, services, inline=True)


async def _close(runner: AgentRunner, door: OpenRunSession, error: BaseException | None) -> None:
    try:
        try:
            if waiting := door.ctx.waiting_tasks:
                await door.cancel_all(waiting)  # nothing ends these waits after the block
        finally:
            await door.leave(error)
    finally:
        door.close()
        await runner.close()


@asynccontextmanager
async def open_run(
    path_or_url: str | os.PathLike[str],
    run_id: UUID | str | None = None,
    *,
    input: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    config: RunnerConfig | None = None,
    durability: str | None = None,
    concurrency_key: str | None = None,
) -> AsyncIterator[Context]:
    """A run of your own code: `async with open_run("jobs.db", run_id="nightly") as ctx`.

    A clean exit commits succeeded, an exception failed; the same id opens the run again, its recorded
    steps kept, also after it succeeded (then nothing can be added). Cancelling gives the run back.
    RunBusy(worker, since) while another live process holds it, or another run has the turn of its
    `concurrency_key`; IdempotencyConflict with another input. There is no time limit but your own.
    `durability` as in `AgentRunner.open`.
    """
    runner, door, ctx = await _open(path_or_url, run_id, input, metadata, config, durability, concurrency_key)
    outer = CURRENT_CLAIM.get()
    CURRENT_CLAIM.set(door.claim)
    try:
        yield ctx
    except BaseException as error:
        await _close(runner, door, error)
        raise
    else:
        await _close(runner, door, None)
    finally:
        CURRENT_CLAIM.set(outer)  # and not reset: a generator may be closed in another context


class SyncRun:
    """A run of your own code for callers without an event loop."""

    def __init__(self, ctx: Context, claim: FencedWrites) -> None:
        self.ctx: Context = ctx
        self._claim = claim

    def call(self, fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run.call(executor.run, steps)`: await a coroutine function of this run, and give its result."""
        takes_function("run.call", fn)

        async def run() -> T:
            self.ctx.control.task = asyncio.current_task()
            CURRENT_CLAIM.set(self._claim)
            return await fn(*args, **kwargs)

        return call(run)


@contextmanager
def open_run_sync(
    path_or_url: str | os.PathLike[str],
    run_id: UUID | str | None = None,
    *,
    input: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    config: RunnerConfig | None = None,
    durability: str | None = None,
    concurrency_key: str | None = None,
) -> Iterator[SyncRun]:
    """`open_run` for callers without an event loop: `with open_run_sync("jobs.db", run_id="nightly") as run`."""
    runner, door, ctx = call(_open, path_or_url, run_id, input, metadata, config, durability, concurrency_key)
    try:
        yield SyncRun(ctx, door.claim)
    except BaseException as error:
        # A generator that was not used up is closed while the interpreter shuts down. Nothing can be written then, and
        # the end of the process releases the run.
        if not sys.is_finalizing():
            call(_close, runner, door, error)
        raise
    call(_close, runner, door, None)
