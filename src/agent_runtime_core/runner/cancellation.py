"""Cancel a run and its child runs with one commit of the queue."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from .._core.log import about_run, log
from .._engines.base import LOWEST_TOKEN, Op, end_fence
from .._execution.claim_writer import BUSY_ATTEMPTS
from .._execution.event_publisher import missing_events
from .._execution.result_codec import encode_result
from .._journal.record import ENDED, Record
from ..errors import LeaseLost, StorageBusy
from ..interfaces import RunResult
from ..queue.base import RunQueue
from ..queue.records import CANCELLED_BY_CALLER, LIVE, RunRow
from ..registry import Registry
from ..status import RunStatus
from .backends import Backends
from .completion_hooks import CompletionHook, call_on_end, completion_operations


class End(NamedTuple):
    """A run that is cancelled without a claim; its agent, if that has a completion hook; and what the hook adds."""

    row: RunRow
    result: RunResult
    agent: CompletionHook | None
    operations: list[Op]


async def cancel_tree(backends: Backends, registry: Registry, row: RunRow) -> bool:
    """Cancel a run and its child runs.

    Returns:
        False if the run has finished in the meantime.

    Raises:
        RowChanged: The run's row has changed since it was read.
    """
    queue = backends.queue
    tree, earlier, known = [row], list[RunRow](), {row.run_id}
    for each in tree:
        for child in await queue.children(each.run_id):
            if child.run_id not in known:  # a caller may name a child of a run as its parent
                known.add(child.run_id)
                (tree if child.status in LIVE else earlier).append(child)
    now = queue.clock.wall()
    ends, queue_ops = [], []
    for each in tree:
        if each.status == "running":
            queue_ops.append(queue.post_op(each.run_id, "cancel", "", "null", f"cancel:{each.generation}"))
            continue
        queue_ops.append(Op("queue.end", (each.run_id, (each.status,), "cancelled", now, CANCELLED_BY_CALLER)))
        end = await _cancelled_end(registry, each)
        if each is row and each.parent_id is not None:
            queue_ops.append(_message_to_parent(queue, each, each.parent_id, end.result))
        ends.append(end)
    separate = not backends.together
    if not separate:
        queue_ops += [op for end in ends for op in _end_operations(backends, end, now)]
    first = (await queue.commits.commit(None, queue_ops))[0]  # this commit decides whether the run is cancelled
    for each in tree:
        if each.status == "running":
            queue.notify_cancelled(each.run_id)
    for end in ends:
        log.info(
            "run %s of agent %r finished: cancelled", end.row.run_key or end.row.run_id, end.row.agent,
            extra=about_run(end.row.run_id, end.row.attempt),
        )  # fmt: skip
        await _after_end(backends, end, now, recorded=not separate)
    for each in earlier:  # a cancellation before may have been interrupted
        await cancel_with_children(backends, registry, each)
    return row.status != "running" or first[0] in LIVE


async def _cancelled_end(registry: Registry, row: RunRow) -> End:
    result, agent = (
        RunResult(status=RunStatus.CANCELLED, run_id=UUID(row.run_id), run_key=row.run_key),
        registry.get(row.agent),
    )
    if not isinstance(agent, CompletionHook):
        return End(row, result, None, [])
    return End(row, result, agent, await completion_operations(agent, row, result))


async def _after_end(backends: Backends, end: End, now: float, *, recorded: bool) -> None:
    """Record the end unless it is recorded, publish its events if that commit does not, and call the agent's hook.

    Nothing is written if the run has been restarted: the journal then belongs to another generation.
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
    # Not the end that a claim recorded and could not publish: the run has another end.
    records = [each for each in records if each.claim_id and (each.kind != ENDED or each.attempt != row.generation)]
    events = await missing_events(backends.bus, row.run_id, records) if records else []
    events.append((f"end:{row.generation}", "run.cancelled", "{}", now))
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
    if by_claim and row.reason != CANCELLED_BY_CALLER:
        return  # its claim writes all of it
    now, end = row.ended_at or backends.queue.clock.wall(), await _cancelled_end(registry, row)
    # A claim may have recorded an end, and released the run when it could not publish it.
    recorded = ending is not None and ending.attempt >= row.generation and not by_claim
    await _after_end(backends, end if not recorded else end._replace(agent=None), now, recorded=recorded)


def _message_to_parent(queue: RunQueue, row: RunRow, parent: str, result: RunResult) -> Op:
    return queue.post_op(parent, "child", row.run_id, encode_result(result), f"end:{row.run_id}:{row.generation}")


def _end_operations(backends: Backends, end: End, now: float) -> list[Op]:
    """Return the writes to the engine of the state store.

    Another cancellation may write the same: an end without a claim is stored once. The fence refuses late writes of
    the last claim, because no later claim will.
    """
    row = end.row
    record = Record(
        -1, ENDED, "cancelled", attempt=row.generation, t=now, result=encode_result(end.result), info="{}", nev=1
    )
    ops = [Op("journal.append", (row.run_id, record)), Op("state.status", (row.run_id, "cancelled", now))]
    if not backends.together:
        ops.insert(0, end_fence(row.run_id, row.claim_id or LOWEST_TOKEN))
    return [*ops, *end.operations] if _events_derived(backends) else ops


def _events_derived(backends: Backends) -> bool:
    return backends.bus.derives and backends.bus.commits is backends.state.commits
