"""`take`, reopening, and the table of status transitions."""

from __future__ import annotations

import asyncio
import contextlib

from ..._engines.base import Op
from ...errors import LeaseLost
from ...queue.base import RunQueue
from ...queue.records import RowChanged, RunRow
from ...status import TERMINAL, TRANSITIONS, RunStatus
from .checks import Cases, refused, same
from .queue_fixtures import LEASE, Case, Make, add, claim_new, one, opened, settle

CASES: Cases[Case] = Cases()


@CASES
async def take_claims_that_one_run(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = queue.new_row("job", "agent", {"n": 1}, origin="inline")
        options = {"insert": True, "reopen": True}
        same(await queue.take(row, "w", LEASE, insert=False, reopen=True), ("unknown", None), "take of an unknown run")
        outcome, mine = await queue.take(row, "w", LEASE, **options)
        assert mine is not None
        same((outcome, mine.status, mine.attempt, mine.worker), ("claimed", "running", 1, "w"), "take of a new run")
        other = queue.new_row("job", "agent", {"n": 2}, origin="inline")
        same((await queue.take(other, "w2", LEASE, **options))[0], "conflict", "take of the same id with another input")
        clock.advance(1)
        outcome, there = await queue.take(row, "w2", LEASE, **options)
        same((outcome, there and there.worker), ("held", "w"), "take of a claimed run")
        same(there, await queue.require(mine.run_id), "the returned row, compared with the stored row")
        same(there, mine, "the returned row, compared with that of the first take")
        clock.advance(LEASE + 1)
        same(await queue.claim("w2"), None, "a worker's claim of an inline run with an expired lease")
        outcome, again = await queue.take(row, "w2", LEASE, **options)
        assert again is not None
        same(
            (outcome, again.crashes, again.claim_id > mine.claim_id),
            ("claimed", 1, True),
            "take of a run with an expired lease",
        )
        await settle(queue, again, "succeeded")
        same((await queue.take(row, "w", LEASE, **options))[0], "ended", "take of a succeeded run")


@CASES
async def take_opens_an_ended_run_only_when_told(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = queue.new_row("job", "agent", {})
        _, mine = await queue.take(row, "w", LEASE, insert=True, reopen=True)
        assert mine is not None
        await settle(queue, mine, "failed", failures=2)
        same(
            (await queue.take(row, "w", LEASE, insert=True, reopen=False))[0],
            "ended",
            "take of a failed run with reopen=False",
        )
        outcome, again = await queue.take(row, "w", LEASE, insert=True, reopen=True)
        assert again is not None
        same((outcome, again.generation, again.attempt), ("claimed", 2, 1), "take of a failed run with reopen=True")


@CASES
async def racing_takers_of_one_run_make_one_claim(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = queue.new_row("job", "agent", {})
        answers = await asyncio.gather(*(queue.take(row, f"w{n}", LEASE, insert=True, reopen=True) for n in range(16)))
        same(
            sorted(outcome for outcome, _ in answers),
            ["claimed"] + ["held"] * 15,
            "the outcomes of 16 concurrent takes",
        )


@CASES
async def an_ended_run_is_reopened_as_a_new_generation(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        await queue.cancel(row.run_id)
        counters = {"crashes": 3, "crashes_in_row": 3, "min_step_count": 4, "failures": 1}
        await settle(queue, row, "dead", **counters, reason="Poisoned", error='"x"')
        clock.advance(1)
        op = Op("queue.reopen", (row.run_id, ("dead", "failed"), clock.wall()))
        reopened: RunRow = (await queue.commits.commit(None, [op]))[0]
        same(reopened, await queue.require(row.run_id), "the returned row, compared with the stored row")
        same((reopened.status, reopened.generation, reopened.attempt, reopened.crashes_in_row, reopened.min_step_count),
             ("pending", 2, 1, 0, -1), "its status, generation and counters")  # fmt: skip
        left = (reopened.reason, reopened.error, reopened.ended_at, reopened.cancel_at)
        same(left, ("", None, None, None), "the columns of the former final status")
        with refused(RowChanged, "reopening a run that is pending"):
            await queue.commits.commit(None, [op])
        again = await one(queue, "w")
        same(again.claim_id > row.claim_id, True, "whether its claim ids keep growing")


async def _make_run(queue: RunQueue, status: RunStatus, agent: str) -> RunRow:
    """Make a run of agent `agent` with this status."""
    [run_id] = await add(queue, agent)
    if status is not RunStatus.PENDING:
        row = await one(queue, "w", LEASE, agent_keys=[agent])
        if status is not RunStatus.RUNNING:
            await settle(queue, row, status.value)
    return await queue.require(run_id)


async def _implicitly(queue: RunQueue, row: RunRow, way: str) -> None:
    match way:
        case "claim":
            await queue.claim("w2", agent_keys=[row.agent])
        case "cancel":
            await queue.cancel(row.run_id)
        case "post":
            await queue.post(row.run_id, "signal", "go", "1")
        case status if row.status == "running":
            await settle(queue, row, status)
        case status:
            with refused(LeaseLost, f"a write of {status} by the last claim of a run that is {row.status}"):
                await settle(queue, row, status)


async def _explicitly(queue: RunQueue, row: RunRow, way: str) -> None:
    if way == "take":
        await queue.take(row, "w2", LEASE, insert=False, reopen=True)
        return
    ended = tuple(status for status in TERMINAL if status != "succeeded")
    with contextlib.suppress(RowChanged):
        await queue.commits.commit(None, [Op("queue.reopen", (row.run_id, ended, queue.clock.wall()))])


@CASES
async def a_run_moves_only_along_the_table_of_transitions(make: Make) -> None:
    async with opened(make) as (queue, clock):
        count = 0
        for old in RunStatus:
            reached: dict[bool, set[str]] = {False: set(), True: set()}
            for way in ("claim", "cancel", "post", *(status.value for status in RunStatus), "take", "reopen"):
                count += 1
                row = await _make_run(queue, old, f"agent{count}")
                clock.advance(1)  # the same status at the same time would count as a repeated commit
                explicit = way in ("take", "reopen")
                await (_explicitly if explicit else _implicitly)(queue, row, way)
                reached[explicit].add((await queue.require(row.run_id)).status)
            for explicit, what in ((False, "without"), (True, "with")):
                expected = {new.value for new, needs_call in TRANSITIONS[old].items() if needs_call is explicit}
                found = reached[explicit] - {old.value} - (reached[False] if explicit else set())
                same(found, expected, f"the statuses that a {old.value} run can reach {what} an explicit call")


@CASES
async def an_end_is_written_only_from_what_was_seen(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        for expected in (("pending", "waiting"), ()):
            with refused(RowChanged, "queue.end of a run with another status than expected"):
                await queue.commits.commit(
                    None, [Op("queue.end", (row.run_id, expected, "cancelled", clock.wall(), "cancel"))]
                )
        with refused(RowChanged, "queue.end of an unknown run"):
            await queue.commits.commit(None, [Op("queue.end", ("unknown", ("pending",), "cancelled", 0.0, ""))])
        same(await queue.require(row.run_id), row, "the row")
