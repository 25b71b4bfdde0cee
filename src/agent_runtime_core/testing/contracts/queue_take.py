"""One run claimed at once, or opened again, and the ways its status goes."""

from __future__ import annotations

import asyncio
import contextlib

from ..._engines.base import Op
from ...errors import LeaseLost
from ...queue.base import RunQueue
from ...queue.records import RowChanged, RunRow
from ...status import TERMINAL, TRANSITIONS, RunStatus
from .checks import Cases, refused, same
from .queue_fixtures import LEASE, Case, Make, add, hold, leave, one, opened

CASES: Cases[Case] = Cases()


@CASES
async def take_claims_that_one_run(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = queue.new_row("job", "agent", {"n": 1}, origin="inline")
        way = {"insert": True, "reopen": True}
        same(await queue.take(row, "w", LEASE, insert=False, reopen=True), ("unknown", None), "an unknown run")
        outcome, mine = await queue.take(row, "w", LEASE, **way)
        assert mine is not None
        same((outcome, mine.status, mine.attempt, mine.worker), ("claimed", "running", 1, "w"), "a new run")
        other = queue.new_row("job", "agent", {"n": 2}, origin="inline")
        same((await queue.take(other, "w2", LEASE, **way))[0], "conflict", "the same id with another input")
        clock.advance(1)
        outcome, there = await queue.take(row, "w2", LEASE, **way)
        same((outcome, there and there.worker), ("held", "w"), "a run that is held")
        same(there, await queue.require(mine.run_id), "its row, stored claimed")
        same(there, mine, "its row, as it was answered")
        clock.advance(LEASE + 1)
        same(await queue.claim("w2"), None, "a worker's claim on a run that its own process recovers")
        outcome, again = await queue.take(row, "w2", LEASE, **way)
        assert again is not None
        same((outcome, again.crashes, again.claim_id > mine.claim_id), ("claimed", 1, True), "a run that was dropped")
        await leave(queue, again, "succeeded")
        same((await queue.take(row, "w", LEASE, **way))[0], "ended", "a run that succeeded")


@CASES
async def take_opens_an_ended_run_only_when_told(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = queue.new_row("job", "agent", {})
        _, mine = await queue.take(row, "w", LEASE, insert=True, reopen=True)
        assert mine is not None
        await leave(queue, mine, "failed", failures=2)
        same((await queue.take(row, "w", LEASE, insert=True, reopen=False))[0], "ended", "without being told")
        outcome, again = await queue.take(row, "w", LEASE, insert=True, reopen=True)
        assert again is not None
        same((outcome, again.generation, again.attempt), ("claimed", 2, 1), "when told")


@CASES
async def racing_takers_of_one_run_make_one_claim(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = queue.new_row("job", "agent", {})
        answers = await asyncio.gather(*(queue.take(row, f"w{n}", LEASE, insert=True, reopen=True) for n in range(16)))
        same(sorted(outcome for outcome, _ in answers), ["claimed"] + ["held"] * 15, "the answers to 16 takers")


@CASES
async def an_ended_run_is_reopened_as_a_new_generation(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        await queue.cancel(row.run_id)
        await leave(queue, row, "dead", crashes=3, stalls=3, mark=4, failures=1, reason="Poisoned", error='"x"')
        clock.advance(1)
        op = Op("queue.reopen", (row.run_id, ("dead", "failed"), clock.wall()))
        reopened: RunRow = (await queue.commits.commit(None, [op]))[0]
        same(reopened, await queue.require(row.run_id), "the answer and the row")
        same((reopened.status, reopened.generation, reopened.attempt, reopened.stalls, reopened.mark),
             ("pending", 2, 1, 0, -1), "its status, generation and counters")  # fmt: skip
        left = (reopened.reason, reopened.error, reopened.ended_at, reopened.cancel_at)
        same(left, ("", None, None, None), "what is left of its end")
        with refused(RowChanged, "reopening a run that is pending"):
            await queue.commits.commit(None, [op])
        again = await one(queue, "w")
        same(again.claim_id > row.claim_id, True, "that its claim ids go on growing")


async def _stand(queue: RunQueue, status: RunStatus, agent: str) -> RunRow:
    """A run of its own agent that stands at `status`."""
    [run_id] = await add(queue, agent)
    if status is not RunStatus.PENDING:
        row = await one(queue, "w", LEASE, agent_keys=[agent])
        if status is not RunStatus.RUNNING:
            await leave(queue, row, status.value)
    return await queue.require(run_id)


async def _without_a_door(queue: RunQueue, row: RunRow, way: str) -> None:
    match way:
        case "claim":
            await queue.claim("w2", agent_keys=[row.agent])
        case "cancel":
            await queue.cancel(row.run_id)
        case "post":
            await queue.post(row.run_id, "signal", "go", "1")
        case status if row.status == "running":
            await leave(queue, row, status)
        case status:
            with refused(LeaseLost, f"going from {row.status} to {status} with the last claim"):
                await leave(queue, row, status)


async def _through_a_door(queue: RunQueue, row: RunRow, way: str) -> None:
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
                row = await _stand(queue, old, f"agent{count}")
                clock.advance(1)  # the same end at the same instant would be the repeat of a lost reply
                door = way in ("take", "reopen")
                await (_through_a_door if door else _without_a_door)(queue, row, way)
                reached[door].add((await queue.require(row.run_id)).status)
            for door, what in ((False, "by itself"), (True, "through an explicit door")):
                expected = {new.value for new, explicit in TRANSITIONS[old].items() if explicit is door}
                found = reached[door] - {old.value} - (reached[False] if door else set())
                same(found, expected, f"where a run that is {old.value} gets {what}")


@CASES
async def an_end_is_written_only_from_what_was_seen(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        for expected in (("pending", "waiting"), ()):
            with refused(RowChanged, "ending a run that is not as expected"):
                await queue.commits.commit(
                    None, [Op("queue.end", (row.run_id, expected, "cancelled", clock.wall(), "cancel"))]
                )
        with refused(RowChanged, "ending an unknown run"):
            await queue.commits.commit(None, [Op("queue.end", ("nobody", ("pending",), "cancelled", 0.0, ""))])
        same(await queue.require(row.run_id), row, "the row")
