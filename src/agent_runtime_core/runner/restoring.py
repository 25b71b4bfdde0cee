"""Mark the runs of a store that was restored from a copy, and confirm that the copy lacks nothing of a run."""

from __future__ import annotations

from typing import Final

from .._core.codec.json import encode
from .._core.event_types import EventType
from .._core.ids import new_ulid
from .._core.validation import Shown, must
from .._execution.claim_writer import publish_op
from ..queue.records import LIVE, RESTORED, RunFilter
from .processes import processes
from .runner import AgentRunner

_PAGE: Final = 200  # runs in one read


async def mark_restored(runner: AgentRunner, *, force: bool = False) -> int:
    """Mark each run that has not ended: it may have done more than the store knows. Return how many there are.

    From then on, each guarded step that such a run starts without a record is in doubt, until a person confirms the run
    with `confirm_restored`.

    Args:
        runner: A runner on the store, in which no worker executes runs.
        force: Mark them although workers seem to live.

    Raises:
        InvalidArgument: A worker lives, according to the store.
    """
    living = [each.worker for each in await processes(runner.queue) if each.living and each.slots]
    if living and not force:
        raise must("the store", "have no living workers", Shown(", ".join(living)), "Stop them first")
    epoch, marked, queue = new_ulid(runner.queue.clock), 0, runner.queue
    payload = encode({"epoch": epoch})
    wanted = RunFilter(tuple(LIVE), limit=_PAGE)
    while rows := await queue.find(wanted):
        for row in rows:
            event = (f"restored:{epoch}", EventType.RUN_RESTORED.value, payload, queue.clock.wall())
            await runner.event_bus.commits.commit(None, [publish_op(row.run_id, [event])])
            await queue.commits.commit(None, [queue.post_op(row.run_id, RESTORED, "", payload, f"restored:{epoch}")])
            marked += 1
        wanted = wanted._replace(after=rows[-1].arrival)
    return marked


async def confirm_restored(
    runner: AgentRunner, run_id: str, *, by: str | None = None, tenant: str | None = None
) -> bool:
    """Note that a run had done nothing more than the restored store knows. Return whether the run was resumed.

    A run that has ended without success is resumed, because it has perhaps failed with a step in doubt.

    Args:
        runner: A runner on the store.
        run_id: The run, by its id or its key.
        by: Who confirms it.
        tenant: The tenant of the run.
    """
    row = await runner.queue.require(run_id, tenant)
    if row.status not in LIVE:
        await runner.resume(row.run_id, by=by, restored=True)
        return True
    queue = runner.queue
    ops = [queue.confirmed_op(row.run_id), *queue.acted_ops(row.run_id, "confirm", by, new_ulid(queue.clock))]
    await queue.commits.commit(None, ops)
    return False
