"""Delete runs that have finished."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from .._engines.base import FORGET, Committer, Op
from .._engines.payloads import UNREADABLE
from .._execution.claim_writer import ClaimWriter
from .._execution.effects import has_joined, join_lineage, stored_origin
from .._execution.step_journal import StepJournal
from ..queue.records import LIVE, RowChanged, RunFilter, RunRow
from ..status import RunStatus
from .backends import Backends
from .pools import drop_unused


async def vacuum(
    backends: Backends, retention: Mapping[str, float], stores: Sequence[Committer] = (), compact: bool | None = None,
    *, dry_run: bool = False,
) -> int:  # fmt: skip
    """Delete finished runs older than their status's retention in seconds, or only count them; return how many."""
    queue = backends.queue
    deleted, now = 0, queue.clock.wall()
    for status, age in retention.items():
        # By pages, each after the last page: a row that a damaged index lists and cannot find is not read forever.
        wanted = RunFilter((RunStatus(status).value,), ended_before=now - age, limit=200)
        while (rows := await queue.find(wanted)) and rows[-1].arrival > wanted.after:
            for row in rows:
                # It was resumed since. Or without its key it cannot be deleted before its children.
                with contextlib.suppress(RowChanged, *UNREADABLE):
                    if not dry_run:
                        await forget(backends, row, stores)
                    deleted += 1
            wanted = wanted._replace(after=rows[-1].arrival)
    if dry_run:
        return deleted
    await drop_unused(queue)
    for commits in {id(backend.commits): backend.commits for backend in backends}.values():
        compacts = getattr(commits, "compact", None)
        if compacts is not None and (compact or (compact is None and deleted)):
            await (compacts(always=True) if compact else compacts())
    return deleted


async def forget(backends: Backends, seen: RunRow, stores: Sequence[Committer] = ()) -> None:
    """Delete a finished run with its journal, events and messages.

    Args:
        backends: Where the run is stored.
        seen: The run as it was read.
        stores: Further stores, which delete the fence of its last claim.

    Raises:
        RowChanged: The run is live, or was restarted since it was read.
    """
    run_id = seen.run_id
    # Read again: the first read may be old, and another run may have the id now.
    row = await backends.queue.row(run_id)
    if row is None or row.status in LIVE or (row.generation, row.arrival) != (seen.generation, seen.arrival):
        raise RowChanged
    lineages = [run_id]
    if row.parent_id is not None or await backends.state.effects(run_id, "", ""):
        await _record_lineages_of_children(backends, row)
        lineages = [*dict.fromkeys((run_id, await stored_origin(backends.state, run_id)))]
    leave = [Op("effect.leave", (each, run_id)) for each in lineages]
    # The queue's row is deleted last: after a crash in between the next `vacuum` finds it again. On SQLite, the journal
    # is found by it.
    queue, last = backends.queue.commits, list[Op]()
    for backend, name in ((backends.state, "state.delete"), (backends.bus, "events.delete")):
        ops, commits = [Op(name, (run_id,)), *(leave if backend is backends.state else ())], backend.commits
        if commits is queue:
            last += ops
        else:
            await commits.commit(None, [*ops, Op(FORGET, (run_id,))])
    await queue.commit(None, [*last, Op("queue.delete", (run_id, row.generation, row.arrival))])
    if backends.state.commits is not queue:  # it may have become a member again while its row was there
        await backends.state.commits.commit(None, leave)
    for commits in stores:
        if commits is not queue:
            await commits.commit(None, [Op(FORGET, (run_id,))])


async def _record_lineages_of_children(backends: Backends, parent: RunRow) -> None:
    """Record the lineages of children that are kept longer than their parent, since they are found by its journal."""
    queue = backends.queue
    wanted = RunFilter(parent=parent.run_id, limit=200)
    while children := await queue.find(wanted):
        for child in children:
            if await has_joined(backends.state, child.run_id):
                continue
            # Without its records: only records of a fork name a lineage, and no fork has a parent.
            await join_lineage(StepJournal(ClaimWriter(child, *backends, queue.clock), []))
        wanted = wanted._replace(after=children[-1].arrival)
