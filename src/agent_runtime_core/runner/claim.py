"""A claim on a run as its process holds it: kept alive, and left in one of many ways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

from .._core.clock import Clock, aware
from .._core.codec.json import encode
from .._core.ids import known_uuid, new_ulid
from .._engines.base import Op
from .._execution.claim_writer import Ledger
from .._execution.result_codec import Before, decode_result, encode_result
from .._execution.run_control import Chronicle, Place, Services
from .._journal.record import ENDED, Record
from ..errors import AgentRuntimeError, StorageBusy
from ..interfaces import AgentRuntime, RunResult
from ..persistence.fencing import CLAIM, Claim
from ..queue.records import LIVE, ClaimRequest, Moved, RunRow, Settle
from ..status import RunStatus
from .backends import Backends
from .completion_hooks import Ending, said_at_end, tell_of_end
from .heartbeat import Heart, Held
from .settings import RunnerConfig

log: logging.Logger = logging.getLogger("agent_runtime_core")

NOTICE = 0.05  # seconds that code which looks at ctx.cancelled() has to end by itself before its task is cancelled
AFTER_OUTAGE = 5.0  # seconds until a run is taken up again that a store kept from going on, or a little more
SPREAD = 0.2  # of the time until a run is taken up again, added by chance


class Claimed:
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
        make = services.chronicle
        self.chronicle: Chronicle | None = None if make is None else make(row)
        self.begun: bool = row.parked == 1  # whether this attempt is in the journal
        self.ending: Ending | None = agent if isinstance(agent, Ending) else None

    def _ledger(self) -> Ledger:
        ledger = Ledger(self.row, *self.backends, self.clock)
        tracer = self.services.tracer
        if tracer is not None:
            ledger.told = partial(tracer.event, known_uuid(self.row.run_id))
        return ledger

    def _claim(self) -> Claim:
        """The claim of the present attempt, for stores that are not the run's own."""
        ledger, place = self.ledger, self.place
        return Claim(lambda: ledger.guard, self.backends.queue.commits, lambda: place.sealed)

    # -- kept alive

    def _hold(self) -> None:
        row, config = self.row, self.config
        now = self.clock.boot()
        ends = now + config.run_timeout_seconds + config.grace_seconds
        if self.inline or self.services.park_after is None or self.services.park_after > 0:
            ends = float("inf")  # waiting in place does not count, and the watch on time is the loop's
        loop = asyncio.get_running_loop()
        lose = partial(self._lose, row.claim_id)
        self.heart.hold(Held(row, self.place, loop, ends, self._cancel, lose, self._beaten, now, row.mail_seq))

    def _cancel(self) -> None:
        place = self.place
        if place.cancelled or place.sealed or self.leaving:
            return
        place.cancelled = True
        asyncio.get_running_loop().call_later(NOTICE, self._cut_short)

    def _cut_short(self) -> None:
        if not self.place.sealed and not self.leaving:
            self.place.stop()

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

    # -- kept, for another attempt

    async def _keep(self, **changes: Any) -> None:
        """Change counters of the row under this claim."""
        before = self.row
        how = self._settle("running", **{"stalls": before.stalls, **changes})
        row: RunRow = (await self.ledger.settle(how))[0]
        # The deadline of an `execute` applies to this call only; the stored row has its own.
        self.row = row.changed(parked=before.parked, reason=before.reason, deadline=before.deadline)

    async def _renew(self, **changes: Any) -> None:
        """Go on under a new claim: what the last attempt asked for, and got no answer to, is not to land any more."""
        self.leaving = True  # until the heart knows
        ticket = new_ulid(self.clock)
        try:
            await self._keep(renew=ticket, **changes)
        except (StorageBusy, asyncio.CancelledError):
            # If it came to that, nobody else knows of the new claim.
            with contextlib.suppress(AgentRuntimeError):
                await self.backends.queue.unclaim((ticket,))
            raise
        self._anew()
        self._hold()
        self.leaving = False
        self.heart.look(asyncio.get_running_loop())  # a request to cancel that came meanwhile was not heeded

    def _see(self, **values: Any) -> None:
        """Go on with the row as a worker would claim it now."""
        self.row = self.row.changed(**values)

    def _anew(self) -> None:
        """What the failed attempt left running may not write beside the next one."""
        self.ledger.retire()
        self.ledger = self._ledger()

    def _next_attempt(self) -> None:
        """It is not in the journal yet, and was never parked."""
        self.begun = False
        self._see(parked=0)

    # -- left to others

    def _settle(self, status: str, *, stalls: int = 0, **changes: Any) -> Settle:
        row = self.row
        if status in LIVE:
            # Why the last attempt failed or was deferred, and for how long, must survive a release of the claim.
            changes = {"error": row.error, **changes}
        else:
            # Of an end that was told to the queue alone, nothing is in the journal; that this one is, its mark tells.
            changes["mark"] = max(row.mark, 0)
        return self.backends.queue.keep(row, row.claim_id)._replace(status=status, stalls=stalls, **changes)

    async def _leave(self, how: Settle) -> None:
        self.leaving = True
        await self.ledger.settle(how)

    def _as_it_was(self) -> Settle:
        """Release the claim as if it had never been: no attempt is used, and the next one resumes."""
        return self._settle("pending", parked=int(self.begun), stalls=self.row.stalls, reason="handed back")

    async def _give_back(self) -> None:
        await self._leave(self._as_it_was())

    def _spread(self, seconds: float) -> float:
        """That many seconds and up to a fifth more: what one failure put off together does not come back together."""
        return seconds * (1 + self.clock.random.uniform(0, SPREAD))

    async def _put_off(self, error: Exception) -> None:
        """Give the run back for later: that a store was away is no crash of the run.

        Only the queue is told: it may be another store, and answer.
        """
        self.leaving = True
        how = self._settle(
            "pending", due_at=self.clock.wall() + self._spread(AFTER_OUTAGE), parked=int(self.begun),
            stalls=self.row.stalls, reason=type(error).__name__,
        )  # fmt: skip
        with contextlib.suppress(AgentRuntimeError, Moved):
            await self.backends.queue.settle(self.row.run_id, how)

    async def abandon(self) -> None:
        """Give the run back if that can be: whoever takes it up again need not wait for the lease to run out.

        Where another engine does not know the claim yet, or its end already, the queue alone is told.
        """
        if self.lost:
            return
        with contextlib.suppress(AgentRuntimeError, Moved):
            await self._give_back()
            return
        with contextlib.suppress(AgentRuntimeError, Moved):
            await self.backends.queue.settle(self.row.run_id, self._as_it_was())

    async def put_back(self) -> None:
        """Give back a claim that was never entered: only the queue knows of it, and the run is as it was before."""
        self.entered = True
        row = self.row
        how = self._settle("pending", stalls=row.stalls, parked=row.parked, reason=row.reason)
        with contextlib.suppress(AgentRuntimeError, Moved):
            await self.backends.queue.settle(row.run_id, how)

    # -- ended

    async def _end(self, status: RunStatus, result: RunResult, event: dict[str, Any] | None = None) -> RunResult:
        """End the run; `event` is what its last event tells, which for a success is the result itself."""
        row = self.row
        result = copy(result)  # the agent may give the same one to all of its runs
        result.status, result.run_id = status, known_uuid(row.run_id)
        before = None if self.chronicle is None else self.chronicle.before(result)
        text, info, name = encode_result(result, before), encode(event) if event else None, status.value
        record = Record(
            self.ledger.next_seq(), ENDED, name, "", row.generation, row.claim_id, self.clock.wall(),
            text, info=info, nev=1,
        )  # fmt: skip
        reason = "" if result.error is None else result.error.type
        how = self._settle(name, stalls=row.stalls, reason=reason)
        ops = await self._tell_family(name, result, before)
        events = [] if self.ending is None else await self._said(self.ending, result)
        await self._settle_last(how, [self.ledger.whole(record)], ops, events)
        self.ended = result
        self._log_end(name, reason)
        return result

    def _log_end(self, status: str, error: str) -> None:
        """Log how the run finished: type of its error and no message, which may hold contents."""
        row = self.row
        run, extra = row.run_key or row.run_id, {"run_id": row.run_id}
        if status in (RunStatus.SUCCEEDED, RunStatus.CANCELLED):
            log.info("run %s of agent %r finished: %s", run, row.agent, status, extra=extra)
            return
        if not error.replace(".", "_").isidentifier():  # an agent may put any text into the type of its ErrorInfo
            error = "unnamed error"
        words = {"failed": "failed", "timed_out": "timed out"}.get(status, "is dead")
        log.warning(
            "run %s of agent %r %s: %s in attempt %d", run, row.agent, words, error, row.attempt,
            extra=extra,
        )  # fmt: skip

    async def _said(self, agent: Ending, result: RunResult) -> list[Op]:
        """What the agent adds to this end, which it is told of."""
        token = CLAIM.set(self._claim())
        try:
            said = await said_at_end(agent, self.row, result)
            await tell_of_end(agent, self.row, result)
        finally:
            CLAIM.reset(token)
        return said

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

    async def _tell_family(self, status: str, result: RunResult, before: Before | None = None) -> list[Op]:
        """The run that called this one hears of its end, and those that a cancelled one called end with it: they may
        have come after whoever cancelled it had looked for them."""
        row, queue = self.row, self.backends.queue
        ops = []
        if row.parent_id is not None:
            payload, msg_id = encode_result(result, before), f"end:{row.run_id}:{row.generation}"
            ops.append(queue.post_op(row.parent_id, "child", row.run_id, payload, msg_id))
        if status == RunStatus.CANCELLED:
            live = [child for child in await queue.children(row.run_id) if child.status in LIVE]
            ops += [queue.post_op(child.run_id, "cancel", "", "null", f"cancel:{child.generation}") for child in live]
        return ops

    async def _close(self, ended: Record) -> RunResult:
        """The journal is finished but the row is not: an earlier claim fell between the two."""
        result = decode_result(ended.result or "{}")
        events = [] if self.ending is None else await self._said(self.ending, result)
        ops = await self._tell_family(ended.name, result)
        await self.ledger.settle(self._settle(ended.name), ops=ops, events=events)
        self.ended = result if self.chronicle is None else await self.chronicle.recall(ended.result or "{}")
        self._log_end(ended.name, "" if result.error is None else result.error.type)
        return self.ended
