"""What every state store must do; run each of `CASES` on your own with `await case(make)`.

`make(**options)` gives a new and empty store each time, constructed with those options (`clock`). Where the
store breaks the contract a case raises AssertionError, or the error that the store raised and should not
have; `check(make)` runs them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

from ..._engines.base import FORGET, INSTALL, Guard, Op, behind
from ..._ids import run_uuid
from ...errors import InvalidArgument, LeaseLost, UnserialisableResult
from ...journal.record import DONE, ENDED, STARTED, Record
from ...state.base import StateRow, StateStore
from ...status import RunStatus
from ..clock import VirtualClock
from .checks import PATIENCE, Cases, refused, same, turns
from .several import STATE

Make = Callable[..., StateStore]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases(several=STATE)
check: Callable[..., Awaitable[None]] = CASES.check

RUN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b01")
OTHER = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b02")
#: Each differs from the next only beyond Latin-1, beyond 16 bits, behind a NUL, or in its line end.
TEXTS = ("注文", "見積", "\U0001f600a", "\U0001f601a", "a\0b", "a\0c", "a\r\nb", "a\nb", "a\rb")
OLD, NEW, NEWER, NEWEST = (f"01HZX00000000000000000000{n}" for n in (1, 2, 3, 4))


@contextlib.asynccontextmanager
async def opened(make: Make) -> AsyncIterator[StateStore]:
    store = make(clock=VirtualClock())
    try:
        async with asyncio.timeout(PATIENCE):
            yield store
    finally:
        await store.close()


def record(seq: int, name: str = "", *, kind: str = DONE, claim: str = OLD, **more: Any) -> Record:
    return Record(seq, kind, name or f"step{seq}", "c:0", 1, claim, 1_800_000_000.0 + max(seq, 0), **more)


async def append(store: StateStore, *records: Record, claim: str | None = None, run: UUID = RUN) -> list[Any]:
    guard = None if claim is None else Guard(str(run), claim)
    return await store.commits.commit(guard, [Op("journal.append", (str(run), each)) for each in records])


async def install(store: StateStore, claim: str, run: UUID = RUN) -> None:
    await store.commits.commit(None, [Op(INSTALL, (str(run), claim))])


# -- checkpoint and status


@CASES
async def the_last_checkpoint_is_kept(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get_checkpoint(RUN), None, "the checkpoint of an unknown run")
        await store.save_checkpoint(RUN, {"n": 1})
        await store.save_checkpoint(str(RUN), {"n": 2})
        await store.save_checkpoint(OTHER, {})
        same(await store.get_checkpoint(str(RUN)), {"n": 2}, "the checkpoint of a run")
        same(await store.get_checkpoint(OTHER), {}, "the checkpoint of another run")


@CASES
async def the_status_is_kept_beside_the_checkpoint(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get_run_status(RUN), None, "the status of an unknown run")
        await store.update_run_status(RUN, "running")
        same(await store.get_checkpoint(RUN), None, "the checkpoint of a run that has a status only")
        await store.save_checkpoint(RUN, {"n": 1})
        same(await store.get_run_status(RUN), "running", "the status after a checkpoint")
        await store.update_run_status(str(RUN), "succeeded")
        same((await store.get_run_status(RUN), await store.get_checkpoint(RUN)), ("succeeded", {"n": 1}), "both")
        same(await store.get_run_status(OTHER), None, "the status of another run")


@CASES
async def a_run_is_found_by_the_callers_own_id(make: Make) -> None:
    async with opened(make) as store:
        run_id = run_uuid("run-123", store.clock)[0]
        await store.save_checkpoint("run-123", {"n": 1})
        await store.update_run_status(str(run_id).upper(), "running")
        same(await store.get_checkpoint(run_id), {"n": 1}, "the checkpoint saved under the caller's own id")
        same(await store.get_run_status("run-123"), "running", "the status by the caller's own id")


@CASES
async def a_status_is_a_text(make: Make) -> None:
    async with opened(make) as store:
        await store.update_run_status(RUN, RunStatus.SUCCEEDED)
        same(await store.get_run_status(RUN), "succeeded", "the status given as a RunStatus")
        for wrong in ("", None, 3):
            with refused(InvalidArgument, f"the status {wrong!r}"):
                await store.update_run_status(RUN, wrong)  # type: ignore[arg-type]


@CASES
async def a_mark_is_kept_with_its_checkpoint(make: Make) -> None:
    async with opened(make) as store:
        await store.commits.commit(None, [Op("state.checkpoint", (str(RUN), '{"n":1}', "b:3", 5.0))])
        row = await store.state(str(RUN))
        same((row.checkpoint, row.mark, row.status), ('{"n":1}', "b:3", None), "the state of a run")
        await store.save_checkpoint(RUN, {})
        same((await store.state(str(RUN))).mark, None, "the mark after a checkpoint without one")


@CASES
async def values_come_back_as_they_were(make: Make) -> None:
    value: dict[str, Any] = {
        "tree": {"a": [1, 2.5, True, None, "é\ud800"], "$": "a dollar"},
        "uuid": RUN,
        "when": dt.datetime(2026, 11, 21, 12, 30, 1, 5, tzinfo=dt.UTC),
        "price": Decimal("1.10"),
        "raw": b"\x00\xff",
        "set": {1, 2},
        "pair": (1, "two"),
        "large": "x" * 300_000,
    }
    async with opened(make) as store:
        await store.save_checkpoint(RUN, value)
        found = await store.get_checkpoint(RUN)
        same(found, value, "a checkpoint")
        same([type(each) for each in (found or {}).values()], [type(each) for each in value.values()], "its types")


@CASES
async def a_checkpoint_is_no_alias_of_the_callers(make: Make) -> None:
    async with opened(make) as store:
        mine = {"items": [1]}
        await store.save_checkpoint(RUN, mine)
        mine["items"].append(2)
        first = await store.get_checkpoint(RUN)
        same(first, {"items": [1]}, "the checkpoint after its writer changed its copy")
        assert first is not None
        first["items"].append(3)
        same(await store.get_checkpoint(RUN), {"items": [1]}, "the checkpoint after a reader changed its copy")


@CASES
async def what_cannot_be_stored_is_refused_and_nothing_written(make: Make) -> None:
    async with opened(make) as store:
        await store.save_checkpoint(RUN, {"n": 1})
        with refused(UnserialisableResult, "a checkpoint that has no JSON form"):
            await store.save_checkpoint(RUN, {"x": object()})
        with refused(InvalidArgument, "a checkpoint that is no dict"):
            await store.save_checkpoint(RUN, [1])  # type: ignore[arg-type]
        for status in (None, "", 5):
            with refused(InvalidArgument, f"the status {status!r}"):
                await store.update_run_status(RUN, status)  # type: ignore[arg-type]
        for run_id in (None, "", 5):
            with refused(InvalidArgument, f"the checkpoint of run {run_id!r}"):
                await store.get_checkpoint(run_id)  # type: ignore[arg-type]
        same(await store.get_run_status(RUN), None, "the status")
        same(await store.get_checkpoint(RUN), {"n": 1}, "the checkpoint")


# -- the journal


@CASES
async def a_journal_is_read_in_order(make: Make) -> None:
    async with opened(make) as store:
        same(await store.records(RUN), [], "the journal of an unknown run")
        for first in (0, 3, 6):
            answers = await append(store, *(record(n) for n in range(first, first + 3)))
            same(answers, [first, first + 1, first + 2], "the positions answered")
        await append(store, record(0, "other"), run=OTHER)
        same([each.seq for each in await store.records(RUN)], list(range(9)), "positions in the journal")
        same([each.name for each in await store.records(RUN, 6)], ["step7", "step8"], "the journal past position 6")
        same(await store.records(RUN, 8), [], "the journal past its end")
        same([each.name for each in await store.records(str(OTHER))], ["other"], "the journal of another run")


@CASES
async def a_record_comes_back_as_it_was(make: Make) -> None:
    async with opened(make) as store:
        full = Record(
            0, STARTED, "näme", "k:1", 2, OLD, 1_800_000_000.123456, f'"{"r" * 1_500_000}"', '"e"', '{"s":"\\u0000"}',
            3, 4, 5, 6, '{"i":1}', '{"n":1}', "digest", nev=2,
        )  # fmt: skip
        bare = Record(1, DONE)
        await append(store, full, bare)
        found = [each._replace(ev=-1) for each in await store.records(RUN)]
        same(found, [full, bare], "two records")


@CASES
async def texts_are_kept_whole_and_told_apart(make: Make) -> None:
    async with opened(make) as store:
        records = [record(n, text)._replace(key=f"k:{text}") for n, text in enumerate(TEXTS)]
        await append(store, *records)
        found = [(each.name, each.key) for each in await store.records(RUN)]
        same(found, [(text, f"k:{text}") for text in TEXTS], "names and keys")
        for text, other in itertools.pairwise(TEXTS):
            with refused(LeaseLost, f"the position of the key {text!a} once more, for {other!a}"):
                await append(store, record(TEXTS.index(text), text)._replace(key=f"k:{other}"))
            await store.commits.commit(None, [Op("state.status", (str(RUN), text, 9.0))])
            same(await store.get_run_status(RUN), text, "the status")
            with refused(LeaseLost, f"the status {other!a}, which was not written, repeated where {text!a} is"):
                await store.commits.commit(Guard(str(RUN), OLD), [Op("state.status", (str(RUN), other, 9.0))])
            await store.save_checkpoint(RUN, {text: [other]})
            same(await store.get_checkpoint(RUN), {text: [other]}, "the checkpoint")


@CASES
async def the_store_chooses_the_next_position_for_minus_one(make: Make) -> None:
    async with opened(make) as store:
        same(await append(store, record(-1, "a"), record(-1, "b")), [0, 1], "the positions answered")
        same(await append(store, record(-1, "c")), [2], "the position answered")
        same([each.seq for each in await store.records(RUN)], [0, 1, 2], "positions in the journal")
        same([each.name for each in await store.records(RUN)], ["a", "b", "c"], "who is where")


@CASES
async def a_position_may_be_left_out(make: Make) -> None:
    async with opened(make) as store:
        same(await append(store, record(0), record(2)), [0, 2], "the positions answered")
        same(await append(store, record(-1, "next")), [3], "the position chosen behind one that was left out")
        same(await append(store, record(6, "failed", kind=ENDED)), [6], "the position of an end behind more of them")
        same([each.seq for each in await store.records(RUN)], [0, 2, 3, 6], "positions in the journal")
        same([each.seq for each in await store.records(RUN, 1)], [2, 3, 6], "those past a position that was left out")
        same([each.seq for each in await store.records(RUN, 2)], [3, 6], "those past one that was not")
        found = await store.ending(str(RUN))
        same(found and found.seq, 6, "the position of the ending")
        same(await append(store, record(2)), [2], "the position of a record that is there")
        with refused(LeaseLost, "another record at its position"):
            await append(store, record(2, claim=NEW))
        await install(store, NEW)
        same(await append(store, record(2), claim=OLD), [2], "the repeat of a claim that was superseded")
        with refused(LeaseLost, "what it left out"):
            await append(store, record(1), claim=OLD)
        same(await append(store, record(4), run=OTHER), [4], "a position that is not 0 in an empty journal")


@CASES
async def an_end_under_no_claim_is_there_once_for_each_generation(make: Make) -> None:
    async with opened(make) as store:
        end = record(-1, "cancelled", kind=ENDED, claim="")._replace(attempt=1, nev=1)
        await append(store, record(0, "a"))
        same([await append(store, end) for _ in range(2)], [[1], [1]], "the positions answered for one end")
        same(await append(store, end._replace(attempt=2)), [2], "the position of the next generation's end")
        by_claim = end._replace(seq=3, attempt=3, claim_id=OLD)
        same(await append(store, by_claim, end._replace(attempt=3)), [3, 4], "an end beside one by a claim")
        same([each.kind for each in await store.records(RUN)], [DONE, *[ENDED] * 4], "the journal")
        same(await append(store, end._replace(attempt=3, claim_id=OLD)), [5], "an end by a claim behind that")
        await append(store, end._replace(attempt=4))
        same(await append(store, record(-1, claim="")._replace(attempt=4)), [7], "what is no end, behind an end")


@CASES
async def a_position_is_written_once(make: Make) -> None:
    async with opened(make) as store:
        await append(store, record(0, "a", result="1"))
        await append(store, record(0, "a", result="1"))
        same([each.result for each in await store.records(RUN)], ["1"], "the journal after a repeat")
        for other in (
            record(0, "a", claim=NEW), record(0, "a", kind=STARTED), record(0, "a")._replace(key="c:1"),
            record(0, "a")._replace(key="C:0"),
        ):  # fmt: skip
            with refused(LeaseLost, f"position 0 once more, {other.kind} {other.key} by {other.claim_id}"):
                await append(store, other, record(1, "b", claim=other.claim_id))
            same([(each.name, each.claim_id) for each in await store.records(RUN)], [("a", OLD)], "the journal")


@CASES
async def a_record_stays_as_it_was_first_written(make: Make) -> None:
    async with opened(make) as store:
        first = record(0, "a", result="1")
        others = (first._replace(result="2"), first._replace(t=first.t + 1), first._replace(name="b", result=None))
        await install(store, OLD)
        await append(store, first, claim=OLD)
        for other in others:
            same(await append(store, other, claim=OLD), [0], "the position answered for the same record")
        await install(store, NEW)
        for other in others:
            same(await append(store, other, claim=OLD), [0], "the position answered once the claim was superseded")
        same([each._replace(ev=-1) for each in await store.records(RUN)], [first], "the journal after all of these")


@CASES
async def racing_writers_of_a_journal_leave_no_gap(make: Make) -> None:
    async with opened(make) as store:
        answers = await asyncio.gather(*(append(store, record(-1, f"s{n}")) for n in range(32)))
        same(sorted(seq for [seq] in answers), list(range(32)), "the positions answered")
        journal = await store.records(RUN)
        same([each.seq for each in journal], list(range(32)), "positions in the journal")
        same({each.name: each.seq for each in journal}, {f"s{n}": answers[n][0] for n in range(32)}, "who is where")


@CASES
async def the_ending_is_the_last_one(make: Make) -> None:
    async with opened(make) as store:
        same(await store.ending(str(RUN)), None, "the ending of an unknown run")
        await append(store, record(0), record(1, "failed", kind=ENDED), record(2))
        found = await store.ending(str(RUN))
        same(found and (found.seq, found.name), (1, "failed"), "the ending")
        await append(store, record(3), record(4, "succeeded", kind=ENDED), record(5))
        found = await store.ending(str(RUN))
        same(found and (found.seq, found.name), (4, "succeeded"), "the ending after a second one")
        same(await store.ending(str(OTHER)), None, "the ending of another run")


# -- claims


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
        same((await store.records(RUN), await store.state(str(RUN))), before, f"what is stored {when}")

    async with opened(make) as store:
        await late(store, OLD, "before any claim")
        await install(store, OLD)
        await late(store, NEW, "by a claim that is greater, and was never carried here")
        await append(store, record(0), claim=OLD)
        await store.save_checkpoint(RUN, {"n": 1}, claim=OLD)
        await store.update_run_status(RUN, "running", claim=OLD)
        await install(store, NEW)
        await late(store, OLD, "after a newer claim")
        await late(store, NEWER, "by a claim that is still greater")
        await append(store, record(1, claim=NEW), claim=NEW)
        await store.save_checkpoint(RUN, {"n": 2}, claim=NEW)
        await store.update_run_status(RUN, "administrator")
        same(len(await store.records(RUN)), 2, "the length of the journal")
        row = await store.state(str(RUN))
        same((row.checkpoint, row.status), ('{"n":2}', "administrator"), "the state")


@CASES
async def a_claim_counts_for_its_own_run_whichever_is_written(make: Make) -> None:
    async with opened(make) as store:
        await install(store, OLD)
        await install(store, NEW, OTHER)
        written = Op("journal.append", (str(OTHER), record(0)))
        with refused(LeaseLost, "a write under a claim of the run that is written, in the name of another run"):
            await store.commits.commit(Guard(str(RUN), NEW), [written])
        same(await store.records(OTHER), [], "the journal")
        same(await store.commits.commit(Guard(str(RUN), OLD), [written]), [0], "what a claim of another run writes")


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
        same(await store.commits.commit(guard, ops), [0, 1, None], "the answer")
        same(await store.commits.commit(guard, ops), [0, 1, None], "the answer while the claim holds")
        await install(store, NEW)
        same(await store.commits.commit(guard, ops), [0, 1, None], "the answer once the claim was superseded")
        same(len(await store.records(RUN)), 2, "the length of the journal")
        saved, other = (Op("state.checkpoint", (str(RUN), '{"n":1}', "m", t)) for t in (11.0, 12.0))
        for _ in range(2):
            same(await store.commits.commit(Guard(str(RUN), NEW), [saved]), [None], "the answer to a checkpoint")
            await install(store, NEWER)
        with refused(LeaseLost, "a checkpoint that was not saved, though its text is there"):
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
        same(len(await store.records(RUN)), 2, "the length of the journal after that")


@CASES
async def an_end_that_puts_a_fence_behind_itself_may_be_repeated(make: Make) -> None:
    async with opened(make) as store:
        await install(store, OLD)
        ops = [Op("journal.append", (str(RUN), record(0, "succeeded", kind=ENDED)))]
        ops += [Op("state.status", (str(RUN), "succeeded", 9.0)), behind(str(RUN), OLD)]
        guard = Guard(str(RUN), OLD)
        same(await store.commits.commit(guard, ops), [0, None, True], "the answer")
        same(await store.commits.commit(guard, ops), [0, None, True], "the answer to the repeat")
        with refused(LeaseLost, "what comes behind the end"):
            await append(store, record(1, "late"), claim=OLD)
        with refused(LeaseLost, "the claim itself, carried here behind its end"):
            await install(store, OLD)
        await install(store, NEW)
        same(len(await store.records(RUN)), 1, "the length of the journal")


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
        with refused(LeaseLost, "a commit whose last operation is refused"):
            await store.commits.commit(None, ops)
        same(await store.records(RUN), [], "the journal")
        row = await store.state(str(RUN))
        same((row.checkpoint, row.status), ('{"n":1}', None), "the state")
        await install(store, OLD)
        before = [Op(INSTALL, (str(RUN), NEW)), Op("state.delete", (str(RUN),)), Op(FORGET, (str(RUN),))]
        for n, first in enumerate(before):
            with refused(LeaseLost, f"an operation that is refused behind {first.name}"):
                await store.commits.commit(None, [first, ops[-1]])
            await append(store, record(n), claim=OLD)
            found = (len(await store.records(RUN)), (await store.state(str(RUN))).checkpoint)
            same(found, (n + 1, '{"n":1}'), f"what is there, {first.name} being undone")


@CASES
async def a_writer_that_is_cancelled_wrote_all_or_nothing(make: Make) -> None:
    async with opened(make) as store:
        for patience in range(8):
            run = UUID(int=patience + 1)
            ops = [Op("journal.append", (str(run), record(n))) for n in range(3)]
            writing = asyncio.ensure_future(
                store.commits.commit(None, [*ops, Op("state.status", (str(run), "running", 9.0))])
            )
            await turns(patience)
            writing.cancel()
            await asyncio.wait({writing})
            found = (len(await store.records(run)), await store.get_run_status(run))
            same(found in ((0, None), (3, "running")), True, f"that all of a commit is there or nothing, not {found}")
            same(await append(store, record(-1), run=run), [found[0]], "the position of what is written behind that")


@CASES
async def a_writer_that_is_cancelled_does_not_go_on(make: Make) -> None:
    async with opened(make) as store:
        for patience in range(8):
            status = Op("state.status", (str(UUID(int=patience + 1)), "running", 9.0))

            async def write(status: Op = status) -> None:
                await store.commits.commit(None, [status])
                await turns()  # where the commit did not wait for anything, it is cancelled here

            writing = asyncio.ensure_future(write())
            await turns(patience)
            writing.cancel()
            await asyncio.wait({writing})
            same(writing.cancelled(), True, f"that a writer is cancelled when it was told so after {patience} turns")


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
            same(await store.records(run), seen, "the journal once the next claim has read it")


@CASES
async def a_long_journal_is_read_whole(make: Make) -> None:
    async with opened(make) as store:
        await append(store, *(record(n) for n in range(3000)))
        same([each.seq for each in await store.records(RUN)], list(range(3000)), "3,000 records read at once")
        same(len(await store.records(RUN, 499)), 2500, "how many are past position 499")


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
        with refused(LeaseLost, "an older claim, carried here when the run was deleted"):
            await install(store, OLD)
        same(await append(store, record(-1, "anew"), claim=NEW), [0], "the first position of a new journal")
