"""Cancel a run and its child runs with one commit of the queue, and end those whose claims are over."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple
from uuid import UUID

from .._core.codec.json import encode
from .._core.log import about_run, log
from .._engines.base import LOWEST_TOKEN, Committer, Op, end_fence
from .._execution.claim_writer import BUSY_ATTEMPTS, missing_events
from .._execution.result_codec import encode_result
from .._journal.record import ENDED, Record
from ..errors import LeaseLost, StorageBusy
from ..interfaces import RunResult
from ..queue.records import ABANDONED, CANCELLED_BY_CALLER, LIVE, RowChanged, RunFilter, RunRow
from ..registry import Registry
from ..status import RunStatus
from .backends import Backends
from .completion_hooks import CompletionHook, call_on_end, completion_operations
from .pools import given_back_ops
from .processes import ended_processes, may_be_claimed

_PAGE = 500  # running runs that are read at the same time


class End(NamedTuple):
    """A run that is cancelled without a claim.

    Attributes:
        row: The run.
        result: Its result.
        agent: Its agent, if that defines a completion hook.
        operations: What the completion hook adds.
        event: The payload of its last event.
    """

    row: RunRow
    result: RunResult
    agent: CompletionHook | None
    operations: list[Op]
    event: str


#: Keeps the complete turns of a run in its conversation, before the run ends without a claim.
KeepTurns = Callable[[RunRow], Awaitable[None]]


async def cancel_tree(
    backends: Backends, registry: Registry, row: RunRow, keep: KeepTurns, by: str | None = None
) -> list[RunRow] | None:
    """Cancel a run and its child runs. `by` names who does it.

    Returns:
        The runs that are running, and are asked to stop; None if the run finished in the meantime.

    Raises:
        RowChanged: The run's row changed since it was read.
    """
    queue = backends.queue
    tree, earlier, known = [row], list[RunRow](), {row.run_id}
    for each in tree:
        for child in await queue.children(each.run_id):
            if each.status == "running" and each.cancel_at and child.status in LIVE and not child.cancel_at:
                continue  # submitted since, perhaps by the `cancel` hook, which this call must not disturb
            if child.run_id not in known:  # a caller may name a child of a run as its parent
                known.add(child.run_id)
                (tree if child.status in LIVE else earlier).append(child)
    now = queue.clock.wall()
    ends, queue_ops = [], queue.acted_ops(row.run_id, "cancel", by, f"cancel:{row.generation}")
    for each in tree:
        if each.status == "running":
            queue_ops.append(queue.post_op(each.run_id, "cancel", "", "null", f"cancel:{each.generation}"))
            continue
        # The message about who acts made a waiting run pending.
        expect = (each.status, "pending") if each is row and by is not None else (each.status,)
        queue_ops.append(Op("queue.end", (each.run_id, expect, "cancelled", now, CANCELLED_BY_CALLER)))
        if each.crashes:  # its rate limit may delay it since its process was killed
            queue_ops += await given_back_ops(queue, each.run_id, now)
        end = await _cancelled_end(registry, each, CANCELLED_BY_CALLER)
        if each is row and each.parent_id is not None:
            queue_ops.append(queue.ended_op(each, each.parent_id, encode_result(end.result)))
        ends.append(end)
        # Before the end: after a crash in between, the run is live, and its end corrects the conversation.
        await keep(each)
    separate = not backends.together
    if not separate:
        queue_ops += [op for end in ends for op in _end_operations(backends, end, now)]
    first = (await queue.commits.commit(None, queue_ops))[0]  # this commit decides whether the run is cancelled
    running = [each for each in tree if each.status == "running"]
    for each in running:
        queue.notify_cancelled(each.run_id)
    for end in ends:
        log.info(
            "run %s of agent %r finished: cancelled",
            end.row.run_key or end.row.run_id,
            end.row.agent,
            extra=about_run(end.row.run_id, end.row.attempt, end.row.tenant),
        )
        await _after_end(backends, end, now, recorded=not separate)
    for each in earlier:  # a cancellation before may have been interrupted
        await cancel_with_children(backends, registry, each)
    return running if row.status != "running" or first[0] in LIVE else None


async def _cancelled_end(registry: Registry, row: RunRow, reason: str) -> End:
    event = encode({"hook": "not_run", "worker": row.worker}) if reason == ABANDONED else "{}"
    result, agent = (
        RunResult(status=RunStatus.CANCELLED, run_id=UUID(row.run_id), run_key=row.run_key),
        registry.get(row.agent),
    )
    if not isinstance(agent, CompletionHook):
        return End(row, result, None, [], event)
    return End(row, result, agent, await completion_operations(agent, row, result), event)


async def _after_end(backends: Backends, end: End, now: float, *, recorded: bool) -> None:
    """Record the end unless it is recorded, publish its events if that commit does not, and call the agent's hook.

    Nothing is written if the run was restarted: the journal then belongs to another generation.
    """
    try:
        if not recorded:
            await backends.state.commits.commit(None, _end_operations(backends, end, now))
        if not _events_derived(backends):
            await _publish_repeatedly(backends, end, now)
    except LeaseLost:
        return
    if end.agent is not None:
        await call_on_end(end.agent, end.row, end.result)


async def _publish_repeatedly(backends: Backends, end: End, now: float) -> None:
    """Publish the end of a run. Retried while the bus is busy, because no later code would publish it; idempotent."""
    for _ in range(BUSY_ATTEMPTS):
        try:
            await _publish(backends, end, now)
        except StorageBusy:
            continue
        return
    await _publish(backends, end, now)


async def _publish(backends: Backends, end: End, now: float) -> None:
    """Publish the end of a run, and before it the events that a claim which released the run could not publish."""
    row = end.row
    records = await backends.state.records(row.run_id) if row.claimed_at else []
    # Not the end that a claim recorded and could not publish: the run ended in another way.
    records = [each for each in records if each.claim_id and (each.kind != ENDED or each.attempt != row.generation)]
    events = await missing_events(backends.bus, row.run_id, records) if records else []
    events.append((f"end:{row.generation}", "run.cancelled", end.event, now))
    ops = [Op("events.publish", (row.run_id, tuple(events))), *end.operations]
    if backends.bus.commits not in (backends.queue.commits, backends.state.commits):
        ops.insert(0, end_fence(row.run_id, row.claim_id or LOWEST_TOKEN))
    await backends.bus.commits.commit(None, ops)


async def cancel_with_children(
    backends: Backends, registry: Registry, row: RunRow, ancestors: frozenset[str] = frozenset()
) -> None:
    """Complete the cancellation of a run and its child runs, if it was interrupted between two engines.

    Does nothing unless the run was cancelled.
    """
    if row.status != "cancelled" or (backends.together and _events_derived(backends)):
        return
    ancestors |= {row.run_id}
    for child in await backends.queue.children(row.run_id):
        if child.run_id not in ancestors:
            await cancel_with_children(backends, registry, child, ancestors)
    ending = await backends.state.ending(row.run_id)
    by_claim = ending is not None and ending.attempt == row.generation and ending.claim_id != ""
    if by_claim and row.reason not in (CANCELLED_BY_CALLER, ABANDONED):
        return  # its claim writes all of it
    now, end = row.ended_at or backends.queue.clock.wall(), await _cancelled_end(registry, row, row.reason)
    # A claim may have recorded an end, and released the run when it could not publish it.
    recorded = ending is not None and ending.attempt >= row.generation and not by_claim
    await _after_end(backends, end if not recorded else end._replace(agent=None), now, recorded=recorded)


def _end_operations(backends: Backends, end: End, now: float) -> list[Op]:
    """Return the writes to the engine of the state store.

    Another cancellation may write the same: an end without a claim is stored once. The fence refuses late writes of
    the last claim, because no later claim will.
    """
    row = end.row
    record = Record(
        -1, ENDED, "cancelled", attempt=row.generation, t=now, result=encode_result(end.result), info=end.event, nev=1
    )
    status = backends.state.status_ops(backends.queue, row.run_id, "cancelled", now)
    ops = [Op("journal.append", (row.run_id, record)), *status]
    if not backends.together:
        ops.insert(0, end_fence(row.run_id, row.claim_id or LOWEST_TOKEN))
    return [*ops, *end.operations] if _events_derived(backends) else ops


def _events_derived(backends: Backends) -> bool:
    return backends.bus.derives and backends.bus.commits is backends.state.commits


class AbandonedRuns:
    """Ends runs that are to be cancelled and whose claim is over, when no worker takes them over.

    A worker with the agent takes such a run over, so that its `cancel` hook runs. A run that no living worker can take
    over is ended here, and so is a run that no worker takes over within a heartbeat interval. A worker that claims the
    run at the same time wins, or finds that the run ended.

    Args:
        backends: Where the runs are stored.
        registry: Finds agents with a completion hook.
        stores: Further stores, in which the claims of runs may be known.
        interval: Seconds of a heartbeat interval.
        keep: Keeps the complete turns of a run in its conversation.
    """

    def __init__(
        self, backends: Backends, registry: Registry, stores: Sequence[Committer], interval: float, keep: KeepTurns
    ) -> None:
        self._backends, self._registry, self._stores, self._interval = backends, registry, stores, interval
        self._queue, self._keep = backends.queue, keep
        self._over_since: dict[str, float] = {}  # by claim: boot time at which it was first seen that it is over

    def may_be_over(self, row: RunRow) -> bool:
        """Return whether the claim on a running run looks as if it is over, without asking the store."""
        now = self._queue.lease_now()
        # 0: only the clock of the store can tell
        return row.lease_until < now or now == 0 or row.holder in ended_processes(self._queue, [row.holder])

    async def end_tree(self, run_id: str, *, waiting: bool) -> None:
        """End a run and its child runs, as far as they are abandoned now.

        Args:
            run_id: The run.
            waiting: The caller calls this again until the run ends. Otherwise the heartbeat interval is measured
                from the request to cancel.
        """
        row = await self._queue.row(run_id)
        tree, known = ([] if row is None else [row]), {run_id}
        for each in tree:
            if each.status in LIVE or each.status == "cancelled":
                found = [row for row in await self._queue.children(each.run_id) if row.run_id not in known]
                known.update(row.run_id for row in found)
                tree += found
        parents = {each.run_id: each for each in tree}
        for each in reversed(tree):  # children first: a caller that is killed in between cancels the parent again
            if each.status in LIVE and each.cancel_at is None and each.run_id != run_id:
                parent = parents[each.parent_id or ""]
                if parent.status in LIVE and not await self._is_abandoned(parent, waiting):
                    continue  # its `cancel` hook may have called it; otherwise the parent cancels it when it ends
                with contextlib.suppress(RowChanged):  # it was submitted after the tree was cancelled
                    await cancel_tree(self._backends, self._registry, each, self._keep)
                each = await self._queue.row(each.run_id) or each
            if await self._is_abandoned(each, waiting):
                await self._end(each)

    async def end_all(self) -> None:
        """End all running runs that are abandoned, as `end_tree` does for a caller that does not wait."""
        wanted = RunFilter(("running",), limit=_PAGE, light=True)
        while (rows := await self._queue.find(wanted)) and rows[-1].arrival > wanted.after:
            for row in rows:
                if row.cancel_at is not None:
                    await self.end_tree(row.run_id, waiting=False)
            wanted = wanted._replace(after=rows[-1].arrival)

    async def _is_abandoned(self, row: RunRow, waiting: bool) -> bool:
        if row.status not in LIVE or row.cancel_at is None or not await self._is_over(row):
            return False
        if not await may_be_claimed(self._queue, row.agent):
            return True
        clock = self._queue.clock
        if waiting:
            now = clock.boot()
            return now - self._over_since.setdefault(row.run_id + row.claim_id, now) >= self._interval
        return clock.wall() - row.cancel_at >= self._interval and await self._is_over(row, self._interval)

    async def _is_over(self, row: RunRow, since: float = 0.0) -> bool:
        """Return whether no claim holds the run: its lease ended that long ago, or its process ended."""
        if row.status != "running":
            return True
        over: bool = (await self._queue.commits.commit(None, [self._check(row, since, required=False)]))[0]
        # Or no lease would ever be over, if nothing else asks the store.
        self._queue.live_claims.outage.answered(wrote=False)
        return over

    def _check(self, row: RunRow, since: float = 0.0, *, required: bool) -> Op:
        want = self._queue.claim_request(row.worker or "cancel", 1, (), 0)
        want = want._replace(lease_now=want.lease_now - since)
        return Op("queue.abandoned", (row.run_id, row.claim_id, want, required))

    async def _end(self, row: RunRow) -> None:
        backends, queue = self._backends, self._queue
        now, end = queue.clock.wall(), await _cancelled_end(self._registry, row, ABANDONED)
        ops = [Op("queue.end", (row.run_id, (row.status,), "cancelled", now, ABANDONED))]
        if row.parent_id is not None:
            ops.append(queue.ended_op(row, row.parent_id, encode_result(end.result)))
        ops += await given_back_ops(queue, row.run_id, now)
        if backends.together:
            ops += _end_operations(backends, end, now)
        try:
            if row.status == "running":
                await self._end_claim(row)
                ops.insert(0, self._check(row, required=True))
            await self._keep(row)
            await queue.commits.commit(None, ops)
        except (RowChanged, LeaseLost):  # a worker claimed it, or it ended
            return
        log.warning(
            "run %s of agent %r finished: cancelled. Worker %r has ended, and no other worker took the run over, so "
            "its cancel hook did not run", row.run_key or row.run_id, row.agent, row.worker,
            extra=about_run(row.run_id, row.attempt, row.tenant),
        )  # fmt: skip
        await _after_end(backends, end, now, recorded=backends.together)

    async def _end_claim(self, row: RunRow) -> None:
        """End the claim on all engines except the queue's, so that its process can write nothing after the end.

        Raises:
            LeaseLost: A later claim is known there.
        """
        for commits in {
            id(each): each for each in (self._backends.state.commits, self._backends.bus.commits, *self._stores)
        }.values():
            if commits is not self._queue.commits:
                await commits.commit(None, [end_fence(row.run_id, row.claim_id)])
