"""Fencing of event buses: current and superseded claims, repeated commits, atomic commits."""

from __future__ import annotations

import asyncio
import contextlib
from uuid import UUID

from ..._engines.base import FORGET, INSTALL, Guard, Op, end_fence
from ...errors import LeaseLost
from ...events.base import DELETE, TRIM
from .checks import Cases, cancelled_while_it_writes, refused, same, turns
from .events_fixtures import OTHER, RUN, Case, Make, fill, opened, sequences

CASES: Cases[Case] = Cases()


@CASES
async def a_stale_claim_is_refused(make: Make) -> None:
    async with opened(make) as bus:
        with refused(LeaseLost, "a claim that was never installed"):
            await bus.publish(RUN, "tick", {}, claim="01A")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        await bus.publish(RUN, "tick", {}, claim="01A", event_id="mine")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01B"))])
        with refused(LeaseLost, "a superseded claim"):
            await bus.publish(RUN, "tick", {}, claim="01A", event_id="late")
        with refused(LeaseLost, "installing an older claim"):
            await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        repeated = await bus.publish(RUN, "tick", {}, claim="01A", event_id="mine")
        same(repeated.sequence, 0, "the repeat of an applied write")
        same((await bus.publish(RUN, "tick", {}, claim="01B")).sequence, 1, "a write under the current claim")
        same((await bus.publish(RUN, "tick", {})).sequence, 2, "an administrator's write")
        same(sequences(await bus.get_events(RUN)), [0, 1, 2], "the log")


@CASES
async def every_write_is_refused_under_a_stale_claim(make: Make) -> None:
    async with opened(make) as bus:
        await fill(bus, 3)
        ops = [bus.publishing(RUN, [("late", "tick", {})]), Op(DELETE, (str(RUN),)), Op(TRIM, (str(RUN), 2))]
        ops += [Op(INSTALL, (str(RUN), "01D")), Op(FORGET, (str(RUN),))]

        async def late(claim: str, when: str) -> None:
            for op in ops:
                with refused(LeaseLost, f"{op.name} under a claim {when}"):
                    await bus.commits.commit(Guard(str(RUN), claim), [op])

        await late("01A", "before any claim is installed")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01B"))])
        await late("01A", "less than the installed one")
        await late("01C", "greater than the installed one")
        same(sequences(await bus.get_events(RUN)), [0, 1, 2], "the log")
        same((await bus.publish(RUN, "tick", {}, claim="01B")).sequence, 3, "a write under the current claim")


@CASES
async def a_claim_counts_for_its_own_run_whichever_is_written(make: Make) -> None:
    async with opened(make) as bus:
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A")), Op(INSTALL, (str(OTHER), "01B"))])
        event = bus.publishing(OTHER, [("a", "tick", {})])
        with refused(LeaseLost, "a write guarded by another run, with a claim id of the written run"):
            await bus.commits.commit(Guard(str(RUN), "01B"), [event])
        same(await bus.get_events(OTHER), [], "the log")
        same(
            await bus.commits.commit(Guard(str(RUN), "01A"), [event]),
            [[0]],
            "a write guarded by the valid claim of another run",
        )


@CASES
async def a_repeat_is_answered_only_where_all_of_it_was_written(make: Make) -> None:
    async with opened(make) as bus:
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        await bus.publish(RUN, "tick", {}, claim="01A", event_id="a")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01B"))])
        stale, again = Guard(str(RUN), "01A"), bus.publishing(RUN, [("a", "tick", {})])
        same(await bus.commits.commit(stale, [again]), [[0]], "the repeat of an applied commit")
        for what, more in (
            ("an event", bus.publishing(RUN, [("new", "tick", {})])),
            ("a batch of an old event and a new one", bus.publishing(RUN, [("a", "tick", {}), ("new", "tick", {})])),
            ("the deletion of the log", Op(DELETE, (str(RUN),))),
            ("the trimming of the log", Op(TRIM, (str(RUN), 1))),
        ):
            with refused(LeaseLost, f"a repeated commit with {what} added"):
                await bus.commits.commit(stale, [again, more])
        same(sequences(await bus.get_events(RUN)), [0], "the log")
        same(await bus.published(RUN), frozenset("a"), "published ids")


@CASES
async def a_claim_may_be_carried_here_again_and_is_forgotten(make: Make) -> None:
    async with opened(make) as bus:
        install = Op(INSTALL, (str(RUN), "01B"))
        for _ in range(2):  # the first answer was lost
            same(await bus.commits.commit(None, [install]), [True], "the result of installing a claim")
        await bus.publish(RUN, "tick", {}, claim="01B")
        for _ in range(2):
            await bus.commits.commit(None, [Op(FORGET, (str(RUN),))])
        with refused(LeaseLost, "a write after the claim was forgotten"):
            await bus.publish(RUN, "tick", {}, claim="01B")
        same(await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))]), [True], "a lesser claim after that")


@CASES
async def a_claim_that_is_superseded_while_it_writes_writes_before_or_not_at_all(make: Make) -> None:
    async with opened(make) as bus:
        for n in range(12):
            run_id, seen = UUID(int=n + 1), list[int]()
            await bus.commits.commit(None, [Op(INSTALL, (str(run_id), "01A"))])

            async def supersede(run_id: UUID = run_id, seen: list[int] = seen, n: int = n) -> None:
                await turns(n // 2)
                await bus.commits.commit(None, [Op(INSTALL, (str(run_id), "01B"))])
                seen += sequences(await bus.get_events(run_id))

            async def write(run_id: UUID = run_id, n: int = n) -> None:
                await turns(n % 2)
                with contextlib.suppress(LeaseLost):
                    await bus.publish(run_id, "tick", {}, claim="01A")

            await asyncio.gather(supersede(), write())
            same(sequences(await bus.get_events(run_id)), seen, "the log after the next claim has read it")


@CASES
async def a_writer_that_is_cancelled_wrote_all_or_nothing(make: Make) -> None:
    async with opened(make) as bus:
        for iterations in range(8):
            run_id, other = UUID(int=iterations + 1), UUID(int=iterations + 101)
            events = [bus.publishing(run_id, [(f"{m}.{n}", "tick", {}) for n in range(3)]) for m in range(2)]
            writing = asyncio.ensure_future(
                bus.commits.commit(None, [*events, bus.publishing(other, [("a", "tick", {})])])
            )
            await turns(iterations)
            writing.cancel()
            await asyncio.wait({writing})
            found = sequences(await bus.get_events(run_id))
            same(found in ([], [*range(6)]), True, f"whether all six events are stored or none, got {found}")
            same(
                sequences(await bus.get_events(other)),
                [0] if found else [],
                "the log of another run in the same commit",
            )
            same((await bus.publish(run_id, "tick", {})).sequence, len(found), "the next sequence")


@CASES
async def a_writer_that_is_cancelled_does_not_go_on(make: Make) -> None:
    async with opened(make) as bus:
        await cancelled_while_it_writes(
            lambda number: bus.commits.commit(None, [bus.publishing(UUID(int=number + 1), [("e", "tick", {})])])
        )


@CASES
async def an_end_that_puts_a_fence_behind_itself_may_be_repeated(make: Make) -> None:
    async with opened(make) as bus:
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        ops = [bus.publishing(RUN, [("end", "run.succeeded", {})]), end_fence(str(RUN), "01A")]
        guard = Guard(str(RUN), "01A")
        same(await bus.commits.commit(guard, ops), [[0], True], "the result of the commit")
        same(await bus.commits.commit(guard, ops), [[0], True], "the result of the repeated commit")
        with refused(LeaseLost, "a write after the final record"):
            await bus.publish(RUN, "tick", {}, claim="01A")
        with refused(LeaseLost, "installing the claim again after its final record"):
            await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01B"))])
        same(sequences(await bus.get_events(RUN)), [0], "the log")


@CASES
async def a_commit_is_all_or_nothing(make: Make) -> None:
    async with opened(make) as bus:
        await bus.commits.commit(None, [Op(INSTALL, (str(OTHER), "01B"))])
        ops = [bus.publishing(RUN, [("a", "tick", {})]), Op(INSTALL, (str(OTHER), "01A"))]
        with refused(LeaseLost, "a rejected operation"):
            await bus.commits.commit(None, ops)
        same(await bus.get_events(RUN), [], "the log after a refused commit")
        same((await bus.publish(RUN, "tick", {})).sequence, 0, "the first sequence after it")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        ops = [Op(INSTALL, (str(RUN), "01B")), Op(DELETE, (str(RUN),)), Op(FORGET, (str(RUN),)), ops[-1]]
        for first in range(3):
            with refused(LeaseLost, f"a rejected operation after {ops[first].name}"):
                await bus.commits.commit(None, ops[first:])
            same(
                len(await bus.get_events(RUN)),
                first + 1,
                f"the number of events after {ops[first].name} was rolled back",
            )
            await bus.publish(RUN, "tick", {}, claim="01A")
