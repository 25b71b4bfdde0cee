"""Fencing of state stores: current and superseded claims, repeated commits, atomic commits."""

from __future__ import annotations

import asyncio
import contextlib
from uuid import UUID

from ..._engines.base import FORGET, INSTALL, Guard, Op, end_fence
from ..._journal.record import ENDED, Record
from ...errors import LeaseLost
from ...state.base import StateRow, StateStore
from .checks import Cases, cancelled_while_it_writes, refused, same, turns
from .state_fixtures import NEW, NEWER, NEWEST, OLD, OTHER, RUN, Case, Make, append, install, opened, record

CASES: Cases[Case] = Cases()


@CASES
async def a_stale_claim_writes_nothing(make: Make) -> None:
    async def late(store: StateStore, claim: str, when: str) -> None:
        before = (await store.records(RUN), await store.state(str(RUN)))
        with refused(LeaseLost, f"save_checkpoint {when}"):
            await store.save_checkpoint(RUN, {"late": 1}, claim=claim)
        with refused(LeaseLost, f"update_run_status {when}"):
            await store.update_run_status(RUN, "late", claim=claim)
        for op in (
            Op("journal.append", (str(RUN), record(len(before[0]), "late", claim=claim))),
            Op("state.delete", (str(RUN),)),
            Op(INSTALL, (str(RUN), NEWEST)),
            Op(FORGET, (str(RUN),)),
        ):
            with refused(LeaseLost, f"{op.name} {when}"):
                await store.commits.commit(Guard(str(RUN), claim), [op])
        same((await store.records(RUN), await store.state(str(RUN))), before, f"the stored data after writes {when}")

    async with opened(make) as store:
        await late(store, OLD, "before any claim")
        await install(store, OLD)
        await late(store, NEW, "by a greater claim that was never installed")
        await append(store, record(0), claim=OLD)
        await store.save_checkpoint(RUN, {"n": 1}, claim=OLD)
        await store.update_run_status(RUN, "running", claim=OLD)
        await install(store, NEW)
        await late(store, OLD, "after a newer claim")
        await late(store, NEWER, "by an even greater claim that was never installed")
        await append(store, record(1, claim=NEW), claim=NEW)
        await store.save_checkpoint(RUN, {"n": 2}, claim=NEW)
        await store.update_run_status(RUN, "administrator")
        same(len(await store.records(RUN)), 2, "the number of records")
        row = await store.state(str(RUN))
        same((row.checkpoint, row.status), ('{"n":2}', "administrator"), "the state")


@CASES
async def a_claim_counts_for_its_own_run_whichever_is_written(make: Make) -> None:
    async with opened(make) as store:
        await install(store, OLD)
        await install(store, NEW, OTHER)
        written = Op("journal.append", (str(OTHER), record(0)))
        with refused(LeaseLost, "a write guarded by another run, with a claim id of the written run"):
            await store.commits.commit(Guard(str(RUN), NEW), [written])
        same(await store.records(OTHER), [], "the journal")
        same(
            await store.commits.commit(Guard(str(RUN), OLD), [written]),
            [0],
            "a write guarded by the valid claim of another run",
        )


@CASES
async def only_a_greater_claim_is_installed(make: Make) -> None:
    async with opened(make) as store:
        await install(store, NEW)
        await install(store, NEW)
        with refused(LeaseLost, "installing an older claim"):
            await install(store, OLD)
        await store.update_run_status(RUN, "running", claim=NEW)
        await install(store, OLD, run=OTHER)
        await store.update_run_status(OTHER, "running", claim=OLD)
        await store.commits.commit(None, [Op(FORGET, (str(RUN),))])
        with refused(LeaseLost, "a write after the claim was forgotten"):
            await store.update_run_status(RUN, "late", claim=NEW)
        await install(store, OLD)


@CASES
async def a_lost_reply_is_repeated_without_harm(make: Make) -> None:
    async with opened(make) as store:
        await install(store, OLD)
        ops = [Op("journal.append", (str(RUN), record(n))) for n in range(2)]
        ops.append(Op("state.status", (str(RUN), "succeeded", 9.0)))
        guard = Guard(str(RUN), OLD)
        same(await store.commits.commit(guard, ops), [0, 1, None], "the result of the commit")
        same(
            await store.commits.commit(guard, ops),
            [0, 1, None],
            "the result of the repeated commit under the current claim",
        )
        await install(store, NEW)
        same(
            await store.commits.commit(guard, ops),
            [0, 1, None],
            "the result of the repeated commit after a newer claim",
        )
        same(len(await store.records(RUN)), 2, "the number of records")
        saved, other = (Op("state.checkpoint", (str(RUN), '{"n":1}', "m", t)) for t in (11.0, 12.0))
        for _ in range(2):
            same(await store.commits.commit(Guard(str(RUN), NEW), [saved]), [None], "the result of saving a checkpoint")
            await install(store, NEWER)
        with refused(LeaseLost, "a checkpoint that was not saved, with the text of a saved one"):
            await store.commits.commit(Guard(str(RUN), NEW), [other])
        same((await store.state(str(RUN))).t, 11.0, "the time of the checkpoint")
        await store.commits.commit(None, [ops[-1]])
        for more in (
            Op("journal.append", (str(RUN), record(2))),
            Op("journal.append", (str(RUN), record(0, claim=NEW))),
            Op("state.status", (str(RUN), "succeeded", 10.0)),
        ):
            with refused(LeaseLost, f"a repeat with {more.name} {more.args[1]!r:.40} added"):
                await store.commits.commit(guard, [*ops, more])
        same(len(await store.records(RUN)), 2, "the number of records after that")


@CASES
async def an_end_that_puts_a_fence_behind_itself_may_be_repeated(make: Make) -> None:
    async with opened(make) as store:
        await install(store, OLD)
        ops = [Op("journal.append", (str(RUN), record(0, "succeeded", kind=ENDED)))]
        ops += [Op("state.status", (str(RUN), "succeeded", 9.0)), end_fence(str(RUN), OLD)]
        guard = Guard(str(RUN), OLD)
        same(await store.commits.commit(guard, ops), [0, None, True], "the result of the commit")
        same(await store.commits.commit(guard, ops), [0, None, True], "the result of the repeated commit")
        with refused(LeaseLost, "a write after the final record"):
            await append(store, record(1, "late"), claim=OLD)
        with refused(LeaseLost, "installing the claim again after its final record"):
            await install(store, OLD)
        await install(store, NEW)
        same(len(await store.records(RUN)), 1, "the number of records")


@CASES
async def a_commit_is_all_or_nothing(make: Make) -> None:
    async with opened(make) as store:
        await install(store, NEW, run=OTHER)
        await store.save_checkpoint(RUN, {"n": 1})
        ops = [
            Op("journal.append", (str(RUN), record(0))),
            Op("state.checkpoint", (str(RUN), '{"n":2}', None, 5.0)),
            Op("state.status", (str(RUN), "running", 5.0)),
            Op(INSTALL, (str(OTHER), OLD)),
        ]
        with refused(LeaseLost, "a commit whose last operation is rejected"):
            await store.commits.commit(None, ops)
        same(await store.records(RUN), [], "the journal")
        row = await store.state(str(RUN))
        same((row.checkpoint, row.status), ('{"n":1}', None), "the state")
        await install(store, OLD)
        before = [Op(INSTALL, (str(RUN), NEW)), Op("state.delete", (str(RUN),)), Op(FORGET, (str(RUN),))]
        for n, first in enumerate(before):
            with refused(LeaseLost, f"a rejected operation after {first.name}"):
                await store.commits.commit(None, [first, ops[-1]])
            await append(store, record(n), claim=OLD)
            found = (len(await store.records(RUN)), (await store.state(str(RUN))).checkpoint)
            same(found, (n + 1, '{"n":1}'), f"the stored data after {first.name} was rolled back")


@CASES
async def a_writer_that_is_cancelled_wrote_all_or_nothing(make: Make) -> None:
    async with opened(make) as store:
        for iterations in range(8):
            run = UUID(int=iterations + 1)
            ops = [Op("journal.append", (str(run), record(n))) for n in range(3)]
            writing = asyncio.ensure_future(
                store.commits.commit(None, [*ops, Op("state.status", (str(run), "running", 9.0))])
            )
            await turns(iterations)
            writing.cancel()
            await asyncio.wait({writing})
            found = (len(await store.records(run)), await store.get_run_status(run))
            same(
                found in ((0, None), (3, "running")), True, f"whether all of a commit is stored or nothing, got {found}"
            )
            same(await append(store, record(-1), run=run), [found[0]], "the position of the next record")


@CASES
async def a_writer_that_is_cancelled_does_not_go_on(make: Make) -> None:
    async with opened(make) as store:
        await cancelled_while_it_writes(
            lambda number: store.commits.commit(None, [Op("state.status", (str(UUID(int=number + 1)), "running", 9.0))])
        )


@CASES
async def a_claim_that_is_superseded_while_it_writes_writes_before_or_not_at_all(make: Make) -> None:
    async with opened(make) as store:
        for n in range(12):
            run, seen = UUID(int=n + 1), list[Record]()
            await install(store, OLD, run)

            async def supersede(run: UUID = run, seen: list[Record] = seen, n: int = n) -> None:
                await turns(n // 2)
                await install(store, NEW, run)
                seen += await store.records(run)

            async def write(run: UUID = run, n: int = n) -> None:
                await turns(n % 2)
                with contextlib.suppress(LeaseLost):
                    await append(store, record(0), claim=OLD, run=run)

            await asyncio.gather(supersede(), write())
            same(await store.records(run), seen, "the journal after the next claim has read it")


@CASES
async def a_deleted_run_is_gone(make: Make) -> None:
    async with opened(make) as store:
        await install(store, OLD, OTHER)
        await install(store, NEW)
        for run in (RUN, OTHER):
            await append(store, record(0), record(1, "succeeded", kind=ENDED), run=run)
            await store.save_checkpoint(run, {"n": 1})
            await store.update_run_status(run, "succeeded")
        await store.commits.commit(None, [Op("state.delete", (str(RUN),))])
        await store.commits.commit(None, [Op("state.delete", (str(RUN),))])
        same((await store.records(RUN), await store.ending(str(RUN))), ([], None), "the journal")
        same(await store.state(str(RUN)), StateRow(), "the state")
        same(len(await store.records(OTHER)), 2, "the journal of another run")
        await store.update_run_status(OTHER, "running", claim=OLD)
        with refused(LeaseLost, "installing an older claim after the run was deleted"):
            await install(store, OLD)
        same(await append(store, record(-1, "anew"), claim=NEW), [0], "the first position of a new journal")
