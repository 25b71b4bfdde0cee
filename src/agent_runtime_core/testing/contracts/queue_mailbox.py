"""Cancelling, parking, and mailbox messages."""

from __future__ import annotations

import asyncio
import contextlib
from uuid import UUID

from ...queue.records import MailboxMessage, RowChanged, RunRow, RunSnapshot
from .checks import Cases, refused, same, turns
from .queue_fixtures import LEASE, Case, Make, add, claim_new, drain, names, one, opened, settle

CASES: Cases[Case] = Cases()


# -- cancelling


@CASES
async def a_run_cancelled_before_its_claim_is_skipped(make: Make) -> None:
    async with opened(make) as (queue, clock):
        [gone, _, late] = [*await add(queue, "gone", "stays"), *await add(queue, "late", delay=9)]
        same(await queue.is_cancelled(gone), False, "is_cancelled before")
        same((await queue.cancel(UUID(gone)), await queue.cancel(late)), (True, True), "cancel of queued runs")
        same((await queue.is_cancelled(gone), await queue.is_cancelled(UUID(late))), (True, True), "is_cancelled after")
        clock.advance(10)
        same(names(await drain(queue)), ["stays"], "the claimable runs")
        row = await queue.require(gone)
        same((row.status, row.ended_at is not None), ("cancelled", True), "the row of the cancelled run")
        same(await queue.cancel(gone), False, "cancel of a finished run")
        unknown = (await queue.cancel(UUID(int=5)), await queue.is_cancelled(UUID(int=5)))
        same(unknown, (False, False), "cancel and is_cancelled of an unknown run")


@CASES
async def a_running_run_is_asked_to_stop(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        clock.advance(2)
        same((await queue.cancel(row.run_id), await queue.cancel(row.run_id)), (True, True), "cancel of a running run")
        now = await queue.require(row.run_id)
        same((now.status, now.cancel_at), ("running", clock.wall()), "its row")
        same(await queue.is_cancelled(row.run_id), True, "is_cancelled")
        kinds = {message.kind for message in await queue.mail(row.run_id)}
        same(kinds, {"cancel"}, "the kinds of messages in its mailbox")
        snapshots = await queue.snapshots([row.run_id, str(UUID(int=3))])
        same(snapshots, {row.run_id: RunSnapshot("running", row.claim_id, now.mail_seq, True)}, "its snapshot")
        # A terminal commit that arrives first wins.
        same((await settle(queue, row, "succeeded")).status, "succeeded", "a success after the cancel request")
        same(await queue.cancel(row.run_id), False, "cancel after the end")


@CASES
async def a_run_asked_to_stop_is_not_put_off(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        await queue.cancel(row.run_id)
        with refused(RowChanged, "parking a run with a cancel request"):
            await settle(queue, row, "waiting", parked=1, reason="sleep")
        later = await settle(queue, row, "pending", due_at=clock.wall() + 3600)
        same((later.status, later.due_at), ("pending", 0.0), "the row, released with a delay of an hour")
        same((await one(queue, "w")).cancel_at is not None, True, "whether the next claim has cancel_at")


@CASES
async def a_request_to_stop_outlives_its_worker(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        await queue.cancel(row.run_id)
        clock.advance(LEASE + 1)
        row = await one(queue, "w2")
        same(row.cancel_at is not None, True, "whether the next claim has cancel_at")


# -- waiting and messages


@CASES
async def a_waiting_run_is_claimed_when_its_time_has_come(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        due = clock.wall() + 30 * 86400
        await settle(queue, row, "waiting", due_at=due, parked=1, reason="sleep")
        same(await queue.next_due(), due, "next_due")
        clock.advance(29 * 86400)
        same(await queue.claim("w"), None, "a claim before that time")
        clock.advance(86400)
        again = await one(queue, "w")
        same((again.parked, again.attempt, again.reason), (1, 1, "sleep"), "the row of the next claim")
        clock.advance(LEASE + 1)
        again = await one(queue, "w")
        same((again.parked, again.attempt), (0, 2), "the row of the next claim after a crash")


@CASES
async def a_message_wakes_a_waiting_run(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        await settle(queue, row, "waiting", due_at=clock.wall() + 60, parked=1, cursor=0)
        same(await queue.claim("w"), None, "a claim while it waits")
        same(await queue.post(row.run_id, "signal", "go", '{"n":1}', "m1"), ("waiting", 1), "the result of post")
        same((await queue.require(row.run_id)).status, "pending", "the status after post")
        again = await one(queue, "w", 600)
        same((again.parked, again.attempt, again.mail_seq), (1, 1, 1), "the row of the next claim")
        clock.advance(61)
        same(await queue.claim("w2"), None, "a second claim after its former due time")


@CASES
async def a_message_is_kept_once(make: Make) -> None:
    async with opened(make) as (queue, clock):
        [run_id, other] = await add(queue, "a", "b")
        same(await queue.post(UUID(run_id), "signal", "go", "1", "m1"), ("pending", 1), "the first message")
        same(await queue.post(run_id, "signal", "go", "2"), ("pending", 2), "the second")
        same(await queue.post(run_id, "signal", "go", "3", "m1"), ("pending", 1), "the first message again")
        await queue.post(other, "signal", "go", "0")
        same(
            await queue.post(other, "signal", "go", "4", "m1"), ("pending", 2), "the same message id in another mailbox"
        )
        same([mail.payload for mail in await queue.mail(other)], ["0", "4"], "the other mailbox")
        await queue.claim("w", agent_keys=["a"])
        same(await queue.post(run_id, "child", "x", "5", "m5"), ("running", 3), "a message to a running run")
        box = await queue.mail(run_id)
        same([(m.seq, m.kind, m.name, m.payload) for m in box],
             [(1, "signal", "go", "1"), (2, "signal", "go", "2"), (3, "child", "x", "5")], "the mailbox")  # fmt: skip
        same(box[0], MailboxMessage("signal", "go", "1", "m1", clock.wall(), 1), "its first message")
        same([m.seq for m in await queue.mail(run_id, 2)], [3], "the mailbox after message 2")
        same((await queue.require(run_id)).mail_seq, 3, "mail_seq in the row")


@CASES
async def a_full_mailbox_is_read_in_order(make: Make) -> None:
    async with opened(make) as (queue, _):
        [run_id] = await add(queue, "a")
        for n in range(1200):
            await queue.post(run_id, "signal", f"{1200 - n:04}", "1", f"m{n}")
        same(await queue.post(run_id, "signal", "again", "1", "m0"), ("pending", 1), "the first message again")
        same([m.seq for m in await queue.mail(run_id)], [*range(1, 1201)], "the numbers of all messages")
        same([m.name for m in await queue.mail(run_id, 1198)], ["0002", "0001"], "the last two")


@CASES
async def news_is_told_of_every_run_that_is_asked_about(make: Make) -> None:
    async with opened(make) as (queue, _):
        rows = [await claim_new(queue, f"agent{n}") for n in range(3)]
        await queue.cancel(rows[2].run_id)
        snapshots = await queue.snapshots([row.run_id for row in rows])
        same([snapshots[row.run_id].cancelled for row in rows], [False, False, True], "which snapshots are cancelled")
        same([snapshots[row.run_id].claim_id for row in rows], [row.claim_id for row in rows], "their claim ids")


@CASES
async def a_run_does_not_park_past_a_message(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = await claim_new(queue)
        await queue.post(row.run_id, "signal", "go", "1")
        with refused(RowChanged, "parking with a cursor before the last message"):
            await settle(queue, row, "waiting", parked=1, cursor=0)
        now = await queue.require(row.run_id)
        same((now.status, now.claim_id), ("running", row.claim_id), "the row after the rejected write")
        same((await settle(queue, row, "waiting", parked=1, cursor=1)).status, "waiting", "parking with no new message")


@CASES
async def messages_racing_a_park_are_never_lost(make: Make) -> None:
    async with opened(make) as (queue, _):
        for n in range(12):
            row = await claim_new(queue, f"agent{n}")

            async def park(row: RunRow = row, n: int = n) -> None:
                await turns(n % 4)
                with contextlib.suppress(RowChanged):
                    await settle(queue, row, "waiting", parked=1, cursor=0)

            async def post(row: RunRow = row, n: int = n) -> None:
                await turns(3 - n % 4)
                await queue.post(row.run_id, "signal", "go", str(n))

            await asyncio.gather(park(), post())
            now = await queue.require(row.run_id)
            same(now.status in ("pending", "running"), True, f"whether it is not parked with a message ({now.status})")
            same([m.payload for m in await queue.mail(row.run_id)], [str(n)], "the mailbox")


@CASES
async def a_run_that_is_over_takes_no_message(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = await claim_new(queue)
        await settle(queue, row, "failed")
        same(await queue.post(row.run_id, "signal", "go", "1"), ("failed", 0), "the result of post")
        same(await queue.post(UUID(int=4), "signal", "go", "1"), ("unknown", 0), "a message to an unknown run")
        same(await queue.mail(row.run_id), [], "the mailbox")
