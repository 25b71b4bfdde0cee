"""Cancelling a run and what it called, in one commit of the queue."""

from __future__ import annotations

import logging
from typing import NamedTuple
from uuid import UUID

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

log: logging.Logger = logging.getLogger("agent_runtime_core")


class End(NamedTuple):
    """One run that is cancelled under no claim, and the agent of it that has a say in that, with what it says."""

    row: RunRow
    result: RunResult
    agent: CompletionHook | None
    said: list[Op]


async def cancel_tree(backends: Backends, registry: Registry, row: RunRow) -> bool:
    """Cancel a run and what it called; False if it ended meanwhile, RowChanged if its row has changed."""
    queue = backends.queue
    tree, earlier, known = [row], list[RunRow](), {row.run_id}
    for each in tree:
        for child in await queue.children(each.run_id):
            if child.run_id not in known:  # whoever submits a run may say that its own child is its parent
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
    apart = not backends.together
    if not apart:
        queue_ops += [op for end in ends for op in _end_operations(backends, end, now)]
    first = (await queue.commits.commit(None, queue_ops))[0]  # the queue decides
    for each in tree:
        if each.status == "running":
            queue.notify_cancelled(each.run_id)
    for end in ends:
        log.info("run %s of agent %r finished: cancelled", end.row.run_key or end.row.run_id, end.row.agent)
        await _after_end(backends, end, now, recorded=not apart)
    for each in earlier:  # by a cancel that may have got no answer half-way
        await cancel_with_children(backends, registry, each)
    return row.status != "running" or first[0] in LIVE


async def _cancelled_end(registry: Registry, row: RunRow) -> End:
    result, agent = RunResult(status=RunStatus.CANCELLED, run_id=UUID(row.run_id)), registry.get(row.agent)
    if not isinstance(agent, CompletionHook):
        return End(row, result, None, [])
    return End(row, result, agent, await completion_operations(agent, row, result))


async def _after_end(backends: Backends, end: End, now: float, *, recorded: bool) -> None:
    """Record the end, unless it is, publish what is not in the commit of that, and let its agent hear of it.

    Not where the run has been begun anew since: then it is the story of another generation that goes on.
    """
    try:
        if not recorded:
            await backends.state.commits.commit(None, _end_operations(backends, end, now))
        if not _events_derived(backends):
            await _published(backends, end, now)
    except LeaseLost:
        return
    if end.agent is not None:
        await call_on_end(end.agent, end.row, end.result)


async def _published(backends: Backends, end: End, now: float) -> None:
    """Nobody comes after this who could publish it: what is not answered is tried again, and is there once."""
    for _ in range(BUSY_ATTEMPTS):
        try:
            await _publish(backends, end, now)
        except StorageBusy:
            continue
        return
    await _publish(backends, end, now)


async def _publish(backends: Backends, end: End, now: float) -> None:
    """The end of a run, and before it what a claim that gave the run back could not publish."""
    row = end.row
    told = await backends.state.records(row.run_id) if row.claimed_at else []
    # Of a claim that recorded an end and could not tell of it, that end: the run has another one.
    told = [each for each in told if each.claim_id and (each.kind != ENDED or each.attempt != row.generation)]
    events = await missing_events(backends.bus, row.run_id, told) if told else []
    events.append((f"end:{row.generation}", "run.cancelled", "{}", now))
    ops = [Op("events.publish", (row.run_id, tuple(events))), *end.said]
    if backends.bus.commits not in (backends.queue.commits, backends.state.commits):
        ops.insert(0, end_fence(row.run_id, row.claim_id or LOWEST_TOKEN))
    await backends.bus.commits.commit(None, ops)


async def cancel_with_children(
    backends: Backends, registry: Registry, row: RunRow, above: frozenset[str] = frozenset()
) -> None:
    """Have it known everywhere that this run, and what it called, was cancelled, if it was: whoever did it may have
    got no answer half-way."""
    if row.status != "cancelled" or (backends.together and _events_derived(backends)):
        return
    above |= {row.run_id}
    for child in await backends.queue.children(row.run_id):
        if child.run_id not in above:
            await cancel_with_children(backends, registry, child, above)
    ending = await backends.state.ending(row.run_id)
    by_claim = ending is not None and ending.attempt == row.generation and ending.claim_id != ""
    if by_claim and row.reason != CANCELLED_BY_CALLER:
        return  # its claim says all of it itself
    now, end = row.ended_at or backends.queue.clock.wall(), await _cancelled_end(registry, row)
    # A claim may have recorded an end, and given the run back when it could not go on to tell of it.
    recorded = ending is not None and ending.attempt >= row.generation and not by_claim
    await _after_end(backends, end if not recorded else end._replace(agent=None), now, recorded=recorded)


def _message_to_parent(queue: RunQueue, row: RunRow, parent: str, result: RunResult) -> Op:
    return queue.post_op(parent, "child", row.run_id, encode_result(result), f"end:{row.run_id}:{row.generation}")


def _end_operations(backends: Backends, end: End, now: float) -> list[Op]:
    """What the state's engine is told. Another cancel may do so too: the end of nobody's claim is there once.

    No claim comes after this one whose fence would keep out what an earlier one is late with.
    """
    row = end.row
    record = Record(
        -1, ENDED, "cancelled", attempt=row.generation, t=now, result=encode_result(end.result), info="{}", nev=1
    )
    ops = [Op("journal.append", (row.run_id, record)), Op("state.status", (row.run_id, "cancelled", now))]
    if not backends.together:
        ops.insert(0, end_fence(row.run_id, row.claim_id or LOWEST_TOKEN))
    return [*ops, *end.said] if _events_derived(backends) else ops


def _events_derived(backends: Backends) -> bool:
    return backends.bus.derives and backends.bus.commits is backends.state.commits
