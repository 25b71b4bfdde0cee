"""One claimed run, driven until it is ended, parked, given back or lost."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, cast
from uuid import UUID

from .._clock import Clock, aware
from .._engines.base import Op
from .._ids import new_ulid
from .._json import decode, encode
from ..backends import Backends
from ..book import Book
from ..context import Context
from ..errors import (
    AgentRuntimeError,
    IdempotencyConflict,
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    MissingDependency,
    NotSupported,
    OutputMismatch,
    Postponed,
    ProviderError,
    RateLimited,
    StepCancelledError,
    StepInDoubt,
    StorageBusy,
    StorageFull,
    UnknownPrice,
    UnserialisableResult,
    shortened,
    text_of,
)
from ..interfaces import AgentRuntime, ErrorInfo, RunResult
from ..journal.record import ATTEMPT, ENDED, RESUMED, Record
from ..ledger import Ledger
from ..outcome import Before, decode_result, encode_result, error_payload
from ..persistence.claim import CLAIM, Claim
from ..queue.row import LIVE, ClaimRequest, Moved, RunRow, Settle
from ..retry import run_backoff
from ..status import RunStatus
from ..tools.deadline import let_go
from ..waits import Chronicle, Place, Services
from .ending import Ending, said_at_end, tell_of_end
from .heart import Heart, Held
from .settings import RunnerConfig

log: logging.Logger = logging.getLogger("agent_runtime_core")

POISON = 3  # crashes in a row without a new record, after which a run is dead
AFTER_OUTAGE = 5.0  # seconds until a run is taken up again that a store kept from going on
POSTPONED_APART = 0.2  # of the time that a run is put off for, added by chance
#: The run goes on when they are over.
OUTAGES = (LeaseLost, StorageBusy, StorageFull)
#: Another attempt would only fail the same way.
FINAL_ERRORS = (
    JournalMismatch, StepInDoubt, UnserialisableResult, InvalidArgument, NotSupported, LimitExceeded, UnknownPrice,
    OutputMismatch, MissingDependency, IdempotencyConflict,
)  # fmt: skip


#: The runs with a concurrency key that this task is part of, by key: what it executes must not wait for them.
TURNS: ContextVar[Mapping[str, str]] = ContextVar("agent_runtime_core_turns")


class Drive:
    """One claim on one run. `inline`: attempts go on here, each under a claim id of its own, and not by the queue."""

    def __init__(
        self, row: RunRow, agent: AgentRuntime, backends: Backends, config: RunnerConfig, heart: Heart,
        services: Services, *, inline: bool = False,
    ) -> None:  # fmt: skip
        self.row: RunRow = row
        self.agent: AgentRuntime = agent
        self.config: RunnerConfig = config
        self.heart: Heart = heart
        self.services: Services = services
        self.backends: Backends = backends
        self.inline: bool = inline
        self.clock: Clock = backends.queue.clock
        self.ledger: Ledger = self._ledger()
        self.place: Place = Place()
        self.entered: bool = False  # whether anything was done under this claim
        self.lost: bool = False
        self.handing_back: bool = False
        #: The row is being left: that it is no longer running is our own doing, and nothing to be told of.
        self.leaving: bool = False
        #: How a worker claims its next run in the commit that ends this one, and starts what it got.
        self.next_claim: Callable[[], ClaimRequest | None] | None = None
        self.start: Callable[[list[RunRow]], None] | None = None
        self.ended: RunResult | None = None
        self.tracing: bool = False
        make = services.chronicle
        self.chronicle: Chronicle | None = None if make is None else make(row)
        self.begun: bool = row.parked == 1  # whether this attempt is in the journal
        self.ending: Ending | None = agent if isinstance(agent, Ending) else None

    def _ledger(self) -> Ledger:
        ledger = Ledger(self.row, *self.backends, self.clock)
        tracer = self.services.tracer
        if tracer is not None:
            ledger.told = partial(tracer.event, UUID(self.row.run_id))
        return ledger

    async def run(self) -> RunResult | None:
        """The run's result, or None where it has none yet: parked, given back, or lost to another worker."""
        self.entered = True
        self._hold()
        self._trace_start()
        try:
            return await self._run()
        except (LeaseLost, Moved):
            log.warning("run %s was lost by claim %s: another worker holds it, or it has ended", *self.ledger.guard)
            return None
        except (Exception, asyncio.CancelledError) as error:
            # After an error of our own a worker keeps the lease: it is the pause before the run is tried again.
            if self.inline or isinstance(error, asyncio.CancelledError):
                await self.abandon()
            elif isinstance(error, StorageBusy | StorageFull):  # what is damaged is no better later
                await self._put_off(error)
            raise
        finally:
            self.place.sealed = True
            self.heart.drop(self.row.run_id, self.row.claim_id)
            self._trace_end()
            if self.chronicle is not None and not self.lost:
                await self.chronicle.tell(self.ended)

    def _trace_start(self) -> None:
        tracer, row = self.services.tracer, self.row
        if tracer is None:
            return
        self.tracing = True
        input_ = cast("dict[str, Any]", decode(row.input))
        about = {
            "agent_key": row.agent, "attempt": row.attempt, "conversation_id": input_.get("conversation_id"),
            "metadata": decode(row.metadata), "input": input_.get("messages") or input_,
        }  # fmt: skip
        tracer.start_run(UUID(row.run_id), about)

    def _trace_end(self) -> None:
        tracer, result = self.services.tracer, self.ended
        if tracer is None or not self.tracing:
            return
        self.tracing = False
        if result is None:
            outcome = "waiting" if self.place.parked else "lost" if self.lost else "given back"
            tracer.end_run(UUID(self.row.run_id), outcome)
            return
        about = {"output": result.final_output, "usage": result.usage, "error": error_payload(result.error)}
        tracer.end_run(UUID(self.row.run_id), (result.status or RunStatus.FAILED).value, about)

    def _hold(self) -> None:
        row, config = self.row, self.config
        now = self.clock.boot()
        ends = now + config.run_timeout_seconds + config.grace_seconds
        if self.inline or self.services.park_after is None or self.services.park_after > 0:
            ends = float("inf")  # waiting in place does not count, and the watch on time is the loop's
        loop = asyncio.get_running_loop()
        lose = partial(self._lose, row.claim_id)
        self.heart.hold(Held(row, self.place, loop, ends, self._cancel, lose, self._beaten, now))

    # -- what the heart tells

    def _cancel(self) -> None:
        place = self.place
        if place.cancelled or place.sealed or self.leaving:
            return
        place.cancelled = True
        place.stop()

    def _lose(self, claim_id: str) -> None:
        if claim_id == self.row.claim_id and not self.lost and not self.place.sealed and not self.leaving:
            self.lost = self.place.sealed = True
            self.place.stop()

    def _beaten(self) -> None:
        if not self.place.sealed and not self.leaving:  # on a bus of its own it would come after the end
            now = self.clock.wall()
            self.ledger.told_alive(now, encode({"timestamp": aware(now).isoformat()}))

    def hand_back(self) -> None:
        """Stop the run and give it back for another worker, at no cost to it."""
        self.handing_back = True
        self.place.stop()

    # -- attempts

    async def _run(self) -> RunResult | None:
        while True:
            # A run at its very first claim has no journal: nothing to read, nothing to wait for. One that was claimed
            # before, and given back without a trace, may have one; one that was forked off has, and its mark counts it.
            row = self.row
            anew = row.attempt == 1 and row.generation == 1 and row.mark < 0
            first = anew and not row.parked and row.started_at == row.claimed_at
            records = await self.ledger.open(fresh=first)
            # A claim that was given up knows that it is: it is those that were taken over that may write yet.
            if self.chronicle is not None and (row.stalls or row.generation > 1):
                await self.chronicle.fence(self._claim())
            book = Book(self.ledger, records)
            early = await self._before(book)
            if early is not None:
                return early
            await self._begin(book)
            outcome = await self._attempt(book)
            if outcome is not _AGAIN:
                result: RunResult | None = outcome
                return result
            # What the failed attempt left running may not write beside the next one.
            self.ledger.retire()
            self.ledger = self._ledger()

    async def _before(self, book: Book) -> RunResult | None:
        """How the run ends without running any code, if it does."""
        row = self.row
        if book.ended is not None and book.ended.attempt == row.generation:
            return await self._close(book.ended)
        if row.stalls and await self._poisoned(len(book.done)):
            dead = ErrorInfo("Poisoned", f"{POISON} crashes in a row without progress", retriable=False)
            return await self._end(RunStatus.DEAD, RunResult(usage=book.spent(), error=dead), error_payload(dead) or {})
        now = self.clock.wall()
        if row.cancel_at is not None or self.place.cancelled:
            return await self._end(RunStatus.CANCELLED, RunResult(), {})
        if row.expires_at is not None and now > row.expires_at and book.length == 0:
            return await self._late(
                "Expired", f"the run was not begun within {row.expires_at - row.created_at:g} s", {}
            )
        if row.deadline is not None and now >= row.deadline:
            return await self._past_deadline(row.deadline)
        return None

    async def _past_deadline(self, deadline: float, ctx: Context | None = None) -> RunResult:
        return await self._late("DeadlineExceeded", "the run's deadline has passed", {"deadline": deadline}, ctx)

    async def _poisoned(self, recorded: int) -> bool:
        """Count a crash as one more in a row, or as the first since the run got further; a wake-up is none."""
        row = self.row
        stalls = int(not row.parked) if recorded > max(row.mark, 0) else row.stalls
        if stalls >= POISON and not self.inline:
            return True
        await self._keep(stalls=stalls, mark=recorded)
        return False

    async def _keep(self, **changes: Any) -> None:
        """Change counters of the row under this claim."""
        how = self.backends.queue.keep(self.row, self.row.claim_id)._replace(status="running", **changes)
        row: RunRow = (await self.ledger.settle(how))[0]
        self.row = row.changed(parked=self.row.parked)

    async def _renew(self, **changes: Any) -> None:
        """Go on under a new claim: what the last attempt asked for, and got no answer to, is not to land any more."""
        self.leaving = True  # until the heart knows
        await self._keep(renew=new_ulid(self.clock), **changes)
        self._hold()
        self.leaving = False

    async def _begin(self, book: Book) -> None:
        row = self.row
        kind, info = (RESUMED, {"reason": row.reason}) if row.parked else (ATTEMPT, None)
        self.begun = True
        record = book.boundary_record(kind, self.row.agent, attempt=row.attempt, nev=1, info=info)
        await self.ledger.status(RunStatus.RUNNING.value, record)

    async def _attempt(self, book: Book) -> Any:
        """One attempt of the agent's `run`, and what came of it."""
        ctx = Context(self.row, book, self.services, self.place)
        if self.chronicle is not None and (refusal := await self._stored(self.chronicle.load(ctx))) is not None:
            return await self._raised(ctx, refusal)
        self.place.task = task = self._enter(ctx)
        if self.place.cancelled or self.lost or self.handing_back:
            task.cancel()
        try:
            on_time = await self._in_time(task)
        except asyncio.CancelledError:
            # The caller of execute() was cancelled: the run goes back, unless that was meant for it.
            task.cancel()
            await let_go(task, self._what)
            if self.place.cancelled:
                with contextlib.suppress(LeaseLost, Moved):
                    await self._cancelled(ctx)
            raise
        if self.lost or self.place.parked:
            await let_go(task, self._what)
            return None
        if not on_time:
            return await self._not_on_time(ctx, task)
        if task.cancelled():
            return await self._stopped(ctx)
        error = task.exception()
        if error is None:
            return await self._returned(ctx, task.result())
        if isinstance(error, (LeaseLost, KeyboardInterrupt, SystemExit)):
            raise error
        return await self._raised(ctx, error)

    def _enter(self, ctx: Context) -> asyncio.Task[Any]:
        """The task of the agent's code, which knows whose claim it writes under and whose turn it is part of."""
        around = copy_context()
        around.run(CLAIM.set, self._claim())
        if self.row.lane is not None:
            around.run(TURNS.set, {**TURNS.get({}), self.row.lane: self.row.run_id})
        return around.run(self._entered, ctx)

    def _entered(self, ctx: Context) -> asyncio.Task[Any]:
        try:
            work: Any = self.agent.run(ctx)
        except Exception as error:  # noqa: BLE001 - a plain function may raise anything before there is a task
            work = _raising(error)
        if not inspect.isawaitable(work):
            said = f"run() of agent {self.row.agent!r} gave {work!r:.80} and nothing to await: write async def run"
            work = _raising(InvalidArgument(said))
        return asyncio.ensure_future(work)

    def _claim(self) -> Claim:
        """The claim of the present attempt, for stores that are not the run's own."""
        ledger, place = self.ledger, self.place
        return Claim(lambda: ledger.guard, self.backends.queue.commits, lambda: place.sealed)

    async def _stored(self, doing: Awaitable[None]) -> Exception | None:
        """Have stores do something under the claim of this run; what is wrong with it, if anything is.

        That a store is away, or the claim lost, is no fault of the run, and raised.
        """
        token = CLAIM.set(self._claim())
        try:
            await doing
        except OUTAGES:
            raise
        except Exception as error:  # noqa: BLE001 - somebody else's store may raise anything
            return error
        finally:
            CLAIM.reset(token)
        return None

    async def _not_on_time(self, ctx: Context, task: asyncio.Task[Any]) -> RunResult | None:
        place = self.place
        if place.cancelled:
            return await self._cancelled(ctx)
        if self.handing_back:
            await self._give_back()
            return None
        task.cancel()
        await let_go(task, self._what)
        if place.cancelled:
            return await self._cancelled(ctx)
        if self.row.deadline is not None and self.clock.wall() >= self.row.deadline:
            return await self._past_deadline(self.row.deadline, ctx)
        limit = self.config.run_timeout_seconds
        return await self._late("TimedOut", f"the attempt took more than {limit:g} s", {"timeout_seconds": limit}, ctx)

    @property
    def _what(self) -> str:
        return f"run {self.row.run_id} of agent {self.row.agent!r}"

    async def _in_time(self, task: asyncio.Task[Any]) -> bool:
        """Wait for the attempt; False when its time under the claim is up, or when it will not stop."""
        boot, place, deadline = self.clock.boot, self.place, self.row.deadline
        loop, ends = asyncio.get_running_loop(), boot() + self.config.run_timeout_seconds - place.waited
        task.add_done_callback(lambda _: place.wake())
        while True:
            waited = place.waited + (boot() - place.waiting_since if place.waiting_since is not None else 0.0)
            left = ends + waited - boot()
            if left <= 0 and place.waiting_since is None:
                return False
            if deadline is not None:
                left = min(left, deadline - self.clock.wall())
                if deadline <= self.clock.wall():
                    return False
            # One future and one timer: asyncio.wait would cost a run more than all else here.
            timer = loop.call_later(max(left, 0.05), place.wake)
            try:
                await place.woken()
            finally:
                timer.cancel()
            if task.done():
                return True
            if place.stopped:
                # Told to stop and still there: it gets a grace, then it is left to itself.
                return await let_go(task, self._what)

    # -- ends

    async def _returned(self, ctx: Context, result: Any) -> Any:
        if not isinstance(result, RunResult):
            error = InvalidArgument(f"agent {self.row.agent!r} returned {result!r:.80}, not a RunResult")
            return await self._raised(ctx, error)
        if result.error is not None:
            if not isinstance(result.error, ErrorInfo):
                said = f"the error that agent {self.row.agent!r} returned is an ErrorInfo, not {result.error!r:.80}"
                return await self._raised(ctx, InvalidArgument(said))
            return await self._failed(result, result.error)
        if self.chronicle is not None and (refusal := await self._stored(self.chronicle.keep(result))) is not None:
            return await self._raised(ctx, refusal)
        try:
            return await self._end(RunStatus.SUCCEEDED, result)
        except UnserialisableResult as error:
            return await self._raised(ctx, error)

    async def _stopped(self, ctx: Context) -> Any:
        """The task was cancelled, by one of us or by the agent's own code."""
        if self.place.cancelled:
            return await self._cancelled(ctx)
        if self.handing_back:
            await self._give_back()
            return None
        error = ErrorInfo("CancelledError", "the agent's own code cancelled it")
        return await self._failed(used(ctx), error)

    async def _cancelled(self, ctx: Context) -> RunResult:
        hook: Callable[[Context], Any] | None = getattr(self.agent, "cancel", None)
        if hook is not None:
            try:
                await hook(ctx)
            except Exception:  # a hook that fails does not keep a run from being cancelled
                log.exception("cancel() of agent %r failed", self.row.agent)
        return await self._end(RunStatus.CANCELLED, used(ctx), {})

    async def _late(self, kind: str, message: str, info: dict[str, Any], ctx: Context | None = None) -> RunResult:
        result = RunResult() if ctx is None else used(ctx)
        result.error = ErrorInfo(kind, message, retriable=False)
        return await self._end(RunStatus.TIMED_OUT, result, info)

    async def _raised(self, ctx: Context, error: BaseException) -> Any:
        if isinstance(error, StepCancelledError) and self.place.cancelled:
            return await self._cancelled(ctx)
        if isinstance(error, Postponed):
            return await self._postponed(error, error.after)
        if isinstance(error, RateLimited) and error.retriable:
            # Asked for longer than any attempt is waited for, it is a failure: `execute` would wait in its place.
            after = error.retry_after or 0.0
            if 0 < after <= self.config.retry_backoff_max:
                return await self._postponed(error, after)
        info: ErrorInfo | None = None
        hook = getattr(self.agent, "on_error", None)
        if hook is not None:
            try:
                info = await hook(ctx, error)
            except Exception:  # a hook that fails must not hide the error it was asked about
                log.exception("on_error() of agent %r failed", self.row.agent)
        if info is not None and not isinstance(info, ErrorInfo):
            log.error("on_error() of agent %r gave %.80r, not an ErrorInfo or None", self.row.agent, info)
            info = None
        if info is None:
            info = describe(error)
        if isinstance(error, FINAL_ERRORS) or (isinstance(error, ProviderError) and not error.retriable):
            info.retriable = False
        partial = error.result if isinstance(error, LimitExceeded | OutputMismatch) else None
        return await self._failed(partial if isinstance(partial, RunResult) else used(ctx), info)

    async def _postponed(self, error: BaseException, seconds: float) -> Any:
        """Take the run up again later, as if this attempt had never been."""
        # Not all those put off by the same failure at the same moment.
        after = seconds * (1 + self.clock.random.uniform(0, POSTPONED_APART))
        log.info("%s is taken up again in %g s: %s", self._what, after, error)
        if self.inline:
            await self._renew(stalls=self.row.stalls)
            await self._pause(after)
            self.row = self.row.changed(parked=1, reason=type(error).__name__)
            return _AGAIN
        self.leaving = True
        how = self._settle(
            "pending", due_at=self.clock.wall() + after, parked=1, stalls=self.row.stalls, reason=type(error).__name__
        )
        await self.ledger.settle(how)
        return None

    async def _failed(self, result: RunResult, error: ErrorInfo) -> Any:
        error = recordable(error)
        if not error.retriable or self.row.attempt >= self.config.max_retries:
            result.error = error
            try:
                return await self._end(RunStatus.FAILED, result, error_payload(error) or {})
            except UnserialisableResult as refusal:  # what it gave besides; that it failed is told all the same
                error.details = {**error.details, "left_out": str(refusal)}
                return await self._end(RunStatus.FAILED, RunResult(error=error), error_payload(error) or {})
        delay = run_backoff(self.config.retry_backoff_base, self.row.attempt, self.config.retry_backoff_max)
        log.info("attempt %d of %s failed (%s); again in %g s", self.row.attempt, self._what, error.message, delay)
        text = encode(error_payload(error))
        if self.inline:
            await self._renew(failures=self.row.failures + 1, stalls=0, error=text)
            self.row = self.row.changed(parked=0)
            await self._pause(delay)
            return _AGAIN
        self.leaving = True
        how = self._settle("pending")._replace(
            due_at=self.clock.wall() + delay if delay else 0.0, failures=self.row.failures + 1, error=text
        )
        await self.ledger.settle(how)
        return None

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless told to stop."""
        sleep = asyncio.ensure_future(self.clock.sleep(seconds))
        sleep.add_done_callback(lambda _: self.place.wake())
        try:
            while not sleep.done() and not self.place.stopped:
                await self.place.woken()
        finally:
            sleep.cancel()

    def _settle(
        self, status: str, *, stalls: int = 0, reason: str = "", due_at: float = 0.0, parked: int = 0
    ) -> Settle:
        row = self.row
        return Settle(
            row.claim_id, status, self.clock.wall(), due_at, parked, reason, row.failures, row.crashes, stalls, row.mark
        )

    async def _give_back(self) -> None:
        """Release the claim as if it had never been: no attempt is used, and the next one resumes."""
        self.leaving = True
        how = self._settle("pending", parked=int(self.begun), stalls=self.row.stalls, reason="handed back")
        await self.ledger.settle(how)

    async def _put_off(self, error: Exception) -> None:
        """Give the run back for later: that a store was away is no crash of the run.

        Only the queue is told: it may be another store, and answer.
        """
        self.leaving = True
        how = self._settle(
            "pending", due_at=self.clock.wall() + AFTER_OUTAGE, parked=int(self.begun), stalls=self.row.stalls,
            reason=type(error).__name__,
        )  # fmt: skip
        with contextlib.suppress(AgentRuntimeError, Moved):
            await self.backends.queue.settle(self.row.run_id, how)

    async def abandon(self) -> None:
        """Give the run back if that can be: whoever takes it up again need not wait for the lease to run out."""
        with contextlib.suppress(AgentRuntimeError, Moved):
            await self._give_back()

    async def put_back(self) -> None:
        """Give back a claim that was never entered: only the queue knows of it, and the run is as it was before."""
        self.entered = True
        row = self.row
        how = self._settle("pending", stalls=row.stalls, parked=row.parked, reason=row.reason)
        with contextlib.suppress(AgentRuntimeError, Moved):
            await self.backends.queue.settle(row.run_id, how)

    async def _end(self, status: RunStatus, result: RunResult, event: dict[str, Any] | None = None) -> RunResult:
        """End the run; `event` is what its last event tells, which for a success is the result itself."""
        row = self.row
        result.status, result.run_id = status, UUID(row.run_id)
        before = None if self.chronicle is None else self.chronicle.before(result)
        text, info = encode_result(result, before), encode(event) if event else None
        record = Record(
            self.ledger.next_seq(), ENDED, status.value, "", row.generation, row.claim_id, self.clock.wall(),
            text, info=info, nev=1,
        )  # fmt: skip
        reason = "" if result.error is None else result.error.type
        how = self._settle(status.value, stalls=row.stalls, reason=reason)
        ops = self._tell_parent(result, before)
        if status is RunStatus.CANCELLED:
            ops += await self._cancel_children()
        events = [] if self.ending is None else await self._said(self.ending, result)
        await self._settle_last(how, [record], ops, events)
        self.ended = result
        return result

    async def _said(self, agent: Ending, result: RunResult) -> list[Op]:
        """What the agent adds to this end, which it is told of."""
        token = CLAIM.set(self._claim())
        try:
            said = await said_at_end(agent, self.row, result)
            await tell_of_end(agent, self.row, result)
        finally:
            CLAIM.reset(token)
        return said

    async def _cancel_children(self) -> list[Op]:
        """For those that came after whoever cancelled this run had looked for them."""
        queue = self.backends.queue
        live = [child for child in await queue.children(self.row.run_id) if child.status in LIVE]
        return [queue.post_op(child.run_id, "cancel", "", "null", f"cancel:{child.generation}") for child in live]

    async def _settle_last(
        self, how: Settle, records: Sequence[Record], ops: list[Op], events: Sequence[Op] = ()
    ) -> None:
        """End the run, and in the same commit claim the next one for the worker, if it wants one."""
        self.leaving = True
        want = self.next_claim() if self.next_claim is not None else None
        if want is None:
            await self.ledger.settle(how, records, ops, events=events)
            return
        try:
            claim = Op("queue.claim", (want,))
            claimed = (await self.ledger.settle(how, records, [*ops, claim], events=events))[-1]
        except (StorageBusy, asyncio.CancelledError) as error:
            # Whether the next one was claimed is not known: it goes back, and this end is made sure of.
            with contextlib.suppress(AgentRuntimeError):
                await self.backends.queue.unclaim(want.tickets)
            if isinstance(error, asyncio.CancelledError):
                raise
            await self.ledger.settle(how, records, ops, events=events)
        else:
            assert self.start is not None
            self.start(claimed)

    def _tell_parent(self, result: RunResult, before: Before | None = None) -> list[Op]:
        row = self.row
        if row.parent_id is None:
            return []
        payload = encode_result(result, before)
        msg_id = f"end:{row.run_id}:{row.generation}"
        return [self.backends.queue.post_op(row.parent_id, "child", row.run_id, payload, msg_id)]

    async def _close(self, ended: Record) -> RunResult:
        """The journal is finished but the row is not: an earlier claim fell between the two."""
        result = decode_result(ended.result or "{}")
        events = [] if self.ending is None else await self._said(self.ending, result)
        await self.ledger.settle(self._settle(ended.name), ops=self._tell_parent(result), events=events)
        self.ended = result if self.chronicle is None else await self.chronicle.recall(ended.result or "{}")
        return self.ended


def recordable(error: ErrorInfo) -> ErrorInfo:
    """The error as a record can hold it: what has no JSON form, or is too long, is left out."""
    try:
        encode(error_payload(error))
    except UnserialisableResult as refusal:
        kind, message, stack = (shortened(str(each)) for each in (error.type, error.message, error.stack))
        return ErrorInfo(kind, message, stack, bool(error.retriable), {"left_out": str(refusal)})
    return error


async def _raising(error: Exception) -> None:
    raise error


def used(ctx: Context) -> RunResult:
    """The result of a run that has none, with what its agent loops used."""
    return RunResult(usage=ctx.used)


def describe(error: BaseException) -> ErrorInfo:
    return ErrorInfo(type(error).__name__, text_of(error), shortened("".join(traceback.format_exception(error))))


class _Again:
    """Another attempt follows here."""


_AGAIN = _Again()
