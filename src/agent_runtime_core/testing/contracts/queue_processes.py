"""Rows of processes, and runs that are to be cancelled and whose claim is over."""

from __future__ import annotations

from typing import Any

from ..._engines.base import Op
from ...errors import LeaseLost
from ...queue.base import RunQueue
from ...queue.records import ABANDONED, ProcessRow, RowChanged, RunRow
from .checks import Cases, refused, same
from .queue_fixtures import LEASE, Case, Make, add, claim_new, names, one, opened, settle

CASES: Cases[Case] = Cases()

DAY = 86_400.0


def _row(queue: RunQueue, process_id: str, **values: Any) -> ProcessRow:
    now = queue.clock.wall()
    row = ProcessRow(process_id, "w", "host", 7, now, "1.0", ("a", 'b "c"'), 2, "", now, queue.lease_now() + 40)
    return row._replace(**values)


async def _save(queue: RunQueue, *rows: ProcessRow) -> None:
    await queue.commits.commit(None, [Op("queue.save_process", (row, DAY)) for row in rows])


async def _rows(queue: RunQueue) -> list[ProcessRow]:
    rows: list[ProcessRow] = await queue.read("processes")
    return sorted(rows)


@CASES
async def the_row_of_a_process_is_replaced_and_deleted(make: Make) -> None:
    async with opened(make) as (queue, clock):
        if not queue.keeps_processes:
            return
        same(await _rows(queue), [], "the processes of a new queue")
        one_row, other = _row(queue, "p1"), _row(queue, "p2", agents=(), slots=0)
        await _save(queue, one_row, other)
        same(await _rows(queue), [one_row, other], "two stored processes")
        clock.advance(20.5)
        later = _row(queue, "p1", started_at=one_row.started_at, agents=("c",))
        await _save(queue, later)
        same(await _rows(queue), [later, other], "the processes after one of them has renewed its row")
        for process_id in ("p1", "unknown"):
            await queue.commits.commit(None, [Op("queue.drop_process", (process_id,))])
        same(await _rows(queue), [other], "the processes after one of them was deleted")


@CASES
async def a_process_that_was_not_seen_for_a_day_is_deleted_by_the_next_one(make: Make) -> None:
    async with opened(make) as (queue, clock):
        if not queue.keeps_processes:
            return
        await _save(queue, _row(queue, "old"))
        clock.advance(DAY)
        await _save(queue, _row(queue, "p1"))
        same([row.process_id for row in await _rows(queue)], ["old", "p1"], "the processes after a day")
        clock.advance(1)
        await _save(queue, _row(queue, "p1"))
        same([row.process_id for row in await _rows(queue)], ["p1"], "the processes after a day and a second")


def _check(queue: RunQueue, row: RunRow, since: float = 0.0, *, required: bool = False) -> Op:
    want = queue.claim_request("w", 1, (), 0)
    want = want._replace(lease_now=want.lease_now - since)
    return Op("queue.abandoned", (row.run_id, row.claim_id, want, required))


async def _is_abandoned(queue: RunQueue, row: RunRow, since: float = 0.0) -> bool:
    found: bool = (await queue.commits.commit(None, [_check(queue, row, since)]))[0]
    return found


def _end(queue: RunQueue, row: RunRow) -> list[Op]:
    ended = Op("queue.end", (row.run_id, ("running",), "cancelled", queue.clock.wall(), ABANDONED))
    return [_check(queue, row, required=True), ended]


@CASES
async def a_run_is_abandoned_if_it_is_to_be_cancelled_and_its_claim_is_over(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        clock.advance(LEASE + 1)
        same(await _is_abandoned(queue, row), False, "abandoned without a request to cancel")
        row = await one(queue, "w2")
        await queue.cancel(row.run_id)
        same(await _is_abandoned(queue, row), False, "abandoned during the lease")
        with refused(RowChanged, "ending a run during its lease"):
            await queue.commits.commit(None, _end(queue, row))
        clock.advance(LEASE + 1)
        same(await _is_abandoned(queue, row), True, "abandoned after the lease")
        same(await _is_abandoned(queue, row, 0.5), True, "abandoned half a second ago")
        same(await _is_abandoned(queue, row, 2), False, "abandoned two seconds ago")
        other = row.with_values(claim_id=f"7{row.claim_id[1:]}")
        same(await _is_abandoned(queue, other), False, "abandoned by another claim")
        same(await _is_abandoned(queue, row.with_values(run_id="unknown")), False, "an unknown run abandoned")
        await settle(queue, row, "pending")
        same(await _is_abandoned(queue, row), False, "a released run abandoned")


@CASES
async def who_ends_an_abandoned_run_ends_its_claim_and_frees_its_key(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue, "a", concurrency_key="k")
        await add(queue, "b", concurrency_key="k")
        await queue.cancel(row.run_id)
        clock.advance(LEASE + 1)
        await queue.commits.commit(None, _end(queue, row))
        ended = await queue.require(row.run_id)
        same((ended.status, ended.reason, ended.crashes), ("cancelled", ABANDONED, 0), "the ended run")
        for _ in range(2):
            with refused(RowChanged, "ending it again"):
                await queue.commits.commit(None, _end(queue, row))
        with refused(LeaseLost, "a late write of its claim"):
            await settle(queue, row, "succeeded")
        same(names(await queue.claim_rows("w2", LEASE, limit=2)), ["b"], "the runs that are claimed next")


@CASES
async def a_worker_that_claims_an_abandoned_run_first_keeps_it(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        await queue.cancel(row.run_id)
        clock.advance(LEASE + 1)
        [new] = await queue.claim_rows("w2", LEASE)
        [other] = await add(queue, "other")
        with refused(RowChanged, "ending a run that was claimed"):
            await queue.commits.commit(None, [queue.post_op(other, "signal", "go", "1"), *_end(queue, row)])
        same(await queue.mail(other), [], "the mailbox in the refused commit")
        same((await queue.require(row.run_id)).claim_id, new.claim_id, "the claim of the run")
        await settle(queue, new, "cancelled")
