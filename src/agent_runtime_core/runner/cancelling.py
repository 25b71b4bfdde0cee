"""Cancelling a run and what it called, in one commit of the queue."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from .._engines.base import Op
from .._json import encode
from ..backends import Backends
from ..interfaces import RunResult
from ..journal.record import ENDED, Record
from ..outcome import encode_result, payload_of
from ..queue.base import RunQueue
from ..queue.row import LIVE, RunRow
from ..status import RunStatus


async def cancel_tree(backends: Backends, row: RunRow) -> bool:
    """Cancel a run and what it called; False if it ended meanwhile, Moved if it is elsewhere by now."""
    queue = backends.queue
    tree = [row]
    for each in tree:
        tree += [child for child in await queue.children(each.run_id) if child.status in LIVE]
    now = queue.clock.wall()
    ends, queue_ops = [], []
    for each in tree:
        if each.status == "running":
            queue_ops.append(queue.post_op(each.run_id, "cancel", "", "null", f"cancel:{each.generation}"))
            continue
        queue_ops.append(Op("queue.end", (each.run_id, (each.status,), "cancelled", now, "cancel")))
        result = RunResult(status=RunStatus.CANCELLED, run_id=UUID(each.run_id))
        if each is row and each.parent_id is not None:
            queue_ops.append(_told_parent(queue, each, each.parent_id, result))
        ends.append((each, result))
    state_ops, event_ops = [], []
    for each, result in ends:
        state_ops += _ended(each, result, now)
        if not _derives(backends):
            event_ops.append(
                Op("events.publish", (each.run_id, ((f"end:{each.generation}", "run.cancelled", "{}", now),)))
            )
    first = (await _write_freely(backends, queue_ops, state_ops, event_ops))[0]
    return row.status != "running" or first[0] in LIVE


def _told_parent(queue: RunQueue, row: RunRow, parent: str, result: RunResult) -> Op:
    return queue.post_op(parent, "child", row.run_id, encode(payload_of(result)), f"end:{row.run_id}:{row.generation}")


def _ended(row: RunRow, result: RunResult, now: float) -> list[Op]:
    record = Record(
        -1, ENDED, "cancelled", attempt=row.generation, t=now, result=encode_result(result), info="{}", nev=1
    )
    return [Op("journal.append", (row.run_id, record)), Op("state.status", (row.run_id, "cancelled", now))]


def _derives(backends: Backends) -> bool:
    return backends.bus.derives and backends.bus.commits is backends.state.commits


async def _write_freely(backends: Backends, queue: list[Op], state: list[Op], events: list[Op]) -> list[Any]:
    """Commit under no claim: the queue decides first, on one engine all together. The queue's results."""
    parts: list[tuple[Any, list[Op]]] = []
    for target, ops in (
        (backends.queue.commits, queue), (backends.state.commits, state), (backends.bus.commits, events),
    ):  # fmt: skip
        if parts and parts[-1][0] is target:
            parts[-1][1].extend(ops)
        elif ops:
            parts.append((target, list(ops)))
    results = [await target.commit(None, ops) for target, ops in parts]
    return cast("list[Any]", results[0])
