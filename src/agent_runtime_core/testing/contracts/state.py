"""Conformance tests for state stores. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make(**options)` returns a new and empty store with these options (`clock`). A failing case raises AssertionError, or
the unexpected error of the store. `check(make, again=again)` also runs the cases with several objects on one store.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
import json
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

from ..._core.ids import run_uuid
from ..._engines.base import FORGET, INSTALL, Op, end_fence
from ..._journal.record import DONE, ENDED, STARTED, Record
from ...errors import InvalidArgument, LeaseLost, UnserialisableResult
from ...state.base import EffectRow, RunEnd, StateRow, StateStore
from ...status import RunStatus
from .checks import CONTENTS, Cases, accepted, cancelled_while_it_writes, keeps_the_loop_free, refused, same, turns
from .races import STATE
from .state_effects import CASES as EFFECTS
from .state_effects import found, put
from .state_fixtures import NEW, NEWER, NEWEST, OLD, OTHER, RUN, Case, Make, append, install, opened, record, write

__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases(EFFECTS, several=STATE)
check: Callable[..., Awaitable[None]] = CASES.check


@CASES
async def commits_are_applied_in_the_order_of_the_calls(make: Make) -> None:
    async with opened(make) as store:
        await install(store, NEW)
        commits = [append(store, record(n, claim=NEW), claim=NEW) for n in range(40)]
        with accepted("40 records whose commits are requested at the same time"):
            same(await asyncio.gather(*commits), [[n] for n in range(40)], "the positions of the records")


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
        same(await store.get_checkpoint(RUN), None, "the checkpoint of a run with only a status")
        await store.save_checkpoint(RUN, {"n": 1})
        same(await store.get_run_status(RUN), "running", "the status after a checkpoint")
        await store.update_run_status(str(RUN), "succeeded")
        stored = (await store.get_run_status(RUN), await store.get_checkpoint(RUN))
        same(stored, ("succeeded", {"n": 1}), "the status and the checkpoint")
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
        same(await store.get_run_status(RUN), "succeeded", "the status written as a RunStatus")
        for wrong in ("", None, 3):
            with refused(InvalidArgument, f"the status {wrong!r}"):
                await store.update_run_status(RUN, wrong)  # type: ignore[arg-type]
        same(await store.get_run_status(RUN), "succeeded", "the status after that")


@CASES
async def a_mark_is_kept_with_its_checkpoint(make: Make) -> None:
    async with opened(make) as store:
        await write(store, Op("state.checkpoint", (str(RUN), '{"n":1}', "b:3", 5.0)))
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
        with refused(UnserialisableResult, "a checkpoint that is not JSON-serializable"):
            await store.save_checkpoint(RUN, {"x": object()})
        with refused(InvalidArgument, "a checkpoint that is not a dict"):
            await store.save_checkpoint(RUN, [1])  # type: ignore[arg-type]
        for run_id in (None, "", 5):
            with refused(InvalidArgument, f"the checkpoint of run {run_id!r}"):
                await store.get_checkpoint(run_id)  # type: ignore[arg-type]
        same(await store.get_checkpoint(RUN), {"n": 1}, "the checkpoint")


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
                await write(store, op, claim=claim)
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
            await write(store, written, claim=NEW)
        same(await store.records(OTHER), [], "the journal")
        same(await write(store, written, claim=OLD), [0], "a write guarded by the valid claim of another run")


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
        await write(store, Op(FORGET, (str(RUN),)))
        with refused(LeaseLost, "a write after the claim was forgotten"):
            await store.update_run_status(RUN, "late", claim=NEW)
        await install(store, OLD)


@CASES
async def a_lost_reply_is_repeated_without_harm(make: Make) -> None:
    async with opened(make) as store:
        await install(store, OLD)
        ops = [Op("journal.append", (str(RUN), record(n))) for n in range(2)]
        ops.append(Op("state.status", (str(RUN), "succeeded", 9.0)))
        same(await write(store, *ops, claim=OLD), [0, 1, None], "the result of the commit")
        same(await write(store, *ops, claim=OLD), [0, 1, None], "the repeated commit under the current claim")
        await install(store, NEW)
        same(await write(store, *ops, claim=OLD), [0, 1, None], "the repeated commit after a newer claim")
        same(len(await store.records(RUN)), 2, "the number of records")
        saved, other = (Op("state.checkpoint", (str(RUN), '{"n":1}', "m", t)) for t in (11.0, 12.0))
        for _ in range(2):
            same(await write(store, saved, claim=NEW), [None], "the result of saving a checkpoint")
            await install(store, NEWER)
        with refused(LeaseLost, "a checkpoint that was not saved, with the text of a saved one"):
            await write(store, other, claim=NEW)
        same((await store.state(str(RUN))).t, 11.0, "the time of the checkpoint")
        await store.commits.commit(None, [ops[-1]])
        for more in (
            Op("journal.append", (str(RUN), record(2))),
            Op("journal.append", (str(RUN), record(0, claim=NEW))),
            Op("state.status", (str(RUN), "succeeded", 10.0)),
        ):
            with refused(LeaseLost, f"a repeat with {more.name} {more.args[1]!r:.40} added"):
                await write(store, *ops, more, claim=OLD)
        same(len(await store.records(RUN)), 2, "the number of records after that")


@CASES
async def an_end_that_puts_a_fence_behind_itself_may_be_repeated(make: Make) -> None:
    async with opened(make) as store:
        await install(store, OLD)
        ops = [Op("journal.append", (str(RUN), record(0, "succeeded", kind=ENDED)))]
        ops += [Op("state.status", (str(RUN), "succeeded", 9.0)), end_fence(str(RUN), OLD)]
        same(await write(store, *ops, claim=OLD), [0, None, True], "the result of the commit")
        same(await write(store, *ops, claim=OLD), [0, None, True], "the result of the repeated commit")
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
            await write(store, *ops)
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
            writing = asyncio.ensure_future(write(store, *ops, Op("state.status", (str(run), "running", 9.0))))
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
            lambda number: write(store, Op("state.status", (str(UUID(int=number + 1)), "running", 9.0)))
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
        await write(store, Op("state.delete", (str(RUN),)))
        await write(store, Op("state.delete", (str(RUN),)))
        same((await store.records(RUN), await store.ending(str(RUN))), ([], None), "the journal")
        same(await store.state(str(RUN)), StateRow(), "the state")
        same(len(await store.records(OTHER)), 2, "the journal of another run")
        await store.update_run_status(OTHER, "running", claim=OLD)
        with refused(LeaseLost, "installing an older claim after the run was deleted"):
            await install(store, OLD)
        same(await append(store, record(-1, "anew"), claim=NEW), [0], "the first position of a new journal")


#: Each differs from the next only beyond Latin-1, beyond 16 bits, after a NUL, or in its line end.
TEXTS = ("注文", "見積", "\U0001f600a", "\U0001f601a", "a\0b", "a\0c", "a\r\nb", "a\nb", "a\rb")


@CASES
async def a_journal_is_read_in_order(make: Make) -> None:
    async with opened(make) as store:
        same(await store.records(RUN), [], "the journal of an unknown run")
        for first in (0, 3, 6):
            positions = await append(store, *(record(n) for n in range(first, first + 3)))
            same(positions, [first, first + 1, first + 2], "the returned positions")
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
            with refused(LeaseLost, f"the position of the key {text!a} again, for {other!a}"):
                await append(store, record(TEXTS.index(text), text)._replace(key=f"k:{other}"))
            await write(store, Op("state.status", (str(RUN), text, 9.0)))
            same(await store.get_run_status(RUN), text, "the status")
            with refused(LeaseLost, f"the status {other!a}, which was not written, repeated where {text!a} is"):
                await write(store, Op("state.status", (str(RUN), other, 9.0)), claim=OLD)
            await store.save_checkpoint(RUN, {text: [other]})
            same(await store.get_checkpoint(RUN), {text: [other]}, "the checkpoint")


@CASES
async def contents_come_back_letter_by_letter(make: Make) -> None:
    async with opened(make) as store:
        for n, text in enumerate(CONTENTS):
            full = record(n, result=text, error=text, state=text, info=text, next=text)
            await append(store, full)
            same((await store.records(RUN, n - 1))[0]._replace(ev=-1), full, "a record")
            await write(store, Op("state.checkpoint", (str(RUN), text, None, 5.0)))
            same((await store.state(str(RUN))).checkpoint, text, "a checkpoint")
            effect = EffectRow(str(RUN), f"e{n}", "", str(RUN), "done", text, 1.0)
            await put(store, effect)
            same(await found(store, effect), [effect], "an effect")


@CASES
async def the_event_loop_goes_on_while_a_commit_waits(make: Make) -> None:
    async with opened(make) as store:
        numbers = itertools.count()

        async def fill(count: int) -> None:
            run = UUID(int=next(numbers))
            await append(store, *(record(n) for n in range(count)), run=run)
            await store.records(run)

        await keeps_the_loop_free(fill, 1000, "records")


@CASES
async def the_store_chooses_the_next_position_for_minus_one(make: Make) -> None:
    async with opened(make) as store:
        same(await append(store, record(-1, "a"), record(-1, "b")), [0, 1], "the returned positions")
        same(await append(store, record(-1, "c")), [2], "the returned position")
        same([each.seq for each in await store.records(RUN)], [0, 1, 2], "positions in the journal")
        same([each.name for each in await store.records(RUN)], ["a", "b", "c"], "the position of each record")


@CASES
async def a_position_may_be_left_out(make: Make) -> None:
    async with opened(make) as store:
        same(await append(store, record(0), record(2)), [0, 2], "the returned positions")
        same(await append(store, record(-1, "next")), [3], "the chosen position after a gap")
        same(await append(store, record(6, "failed", kind=ENDED)), [6], "the position of a final record after a gap")
        same([each.seq for each in await store.records(RUN)], [0, 2, 3, 6], "positions in the journal")
        same([each.seq for each in await store.records(RUN, 1)], [2, 3, 6], "the positions after a missing one")
        same([each.seq for each in await store.records(RUN, 2)], [3, 6], "the positions after an existing one")
        found = await store.ending(str(RUN))
        same(found and found.seq, 6, "the position of the final record")
        same(await append(store, record(2)), [2], "the position of a repeated record")
        with refused(LeaseLost, "another record at an existing position"):
            await append(store, record(2, claim=NEW))
        await install(store, NEW)
        same(await append(store, record(2), claim=OLD), [2], "a repeated append of a superseded claim")
        with refused(LeaseLost, "a new record of a superseded claim at a missing position"):
            await append(store, record(1), claim=OLD)
        same(await append(store, record(4), run=OTHER), [4], "a position that is not 0 in an empty journal")


@CASES
async def an_end_under_no_claim_is_there_once_for_each_generation(make: Make) -> None:
    async with opened(make) as store:
        end = record(-1, "cancelled", kind=ENDED, claim="")._replace(attempt=1, nev=1)
        await append(store, record(0, "a"))
        same([await append(store, end) for _ in range(2)], [[1], [1]], "the returned positions for one final record")
        same(await append(store, end._replace(attempt=2)), [2], "the position of the next generation's final record")
        by_claim = end._replace(seq=3, attempt=3, claim_id=OLD)
        same(await append(store, by_claim, end._replace(attempt=3)), [3, 4], "a final record without a claim")
        same([each.kind for each in await store.records(RUN)], [DONE, *[ENDED] * 4], "the journal")
        same(
            await append(store, end._replace(attempt=3, claim_id=OLD)),
            [5],
            "the position of a final record by a claim after that",
        )
        await append(store, end._replace(attempt=4))
        same(await append(store, record(-1, claim="")._replace(attempt=4)), [7], "the position of a later record")


@CASES
async def a_position_is_written_once(make: Make) -> None:
    async with opened(make) as store:
        await append(store, record(0, "a", result="1"))
        await append(store, record(0, "a", result="1"))
        same([each.result for each in await store.records(RUN)], ["1"], "the journal after a repeat")
        for other in (
            record(0, "a", claim=NEW),
            record(0, "a", kind=STARTED),
            record(0, "a")._replace(key="c:1"),
            record(0, "a")._replace(key="C:0"),
        ):
            with refused(LeaseLost, f"position 0 again, {other.kind} {other.key} by {other.claim_id}"):
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
            same(await append(store, other, claim=OLD), [0], "the returned position for the same record")
        await install(store, NEW)
        for other in others:
            same(await append(store, other, claim=OLD), [0], "the returned position after the claim was superseded")
        same([each._replace(ev=-1) for each in await store.records(RUN)], [first], "the journal after all of these")


@CASES
async def racing_writers_of_a_journal_leave_no_gap(make: Make) -> None:
    async with opened(make) as store:
        positions = await asyncio.gather(*(append(store, record(-1, f"s{n}")) for n in range(32)))
        same(sorted(seq for [seq] in positions), list(range(32)), "the returned positions")
        journal = await store.records(RUN)
        same([each.seq for each in journal], list(range(32)), "positions in the journal")
        kept = {each.name: each.seq for each in journal}
        same(kept, {f"s{n}": positions[n][0] for n in range(32)}, "the position of each record")


@CASES
async def the_ending_is_the_last_one(make: Make) -> None:
    async with opened(make) as store:
        same(await store.ending(str(RUN)), None, "the final record of an unknown run")
        await append(store, record(0), record(1, "failed", kind=ENDED), record(2))
        found = await store.ending(str(RUN))
        same(found and (found.seq, found.name), (1, "failed"), "the final record")
        await append(store, record(3), record(4, "succeeded", kind=ENDED), record(5))
        found = await store.ending(str(RUN))
        same(found and (found.seq, found.name), (4, "succeeded"), "the final record after a second one")
        same(await store.ending(str(OTHER)), None, "the final record of another run")


@CASES
async def endings_are_read_for_many_runs(make: Make) -> None:
    error = {"type": "Broken", "message": "näh", "details": {"end": [1]}}
    usage = {"total_tokens": 12, "cost_usd": 0.0123456789}
    result = {"status": "failed", "final_messages": ["m" * 40_000], "usage": usage, "error": error}
    info = json.dumps({**error, "began": ["attempt", "a", 1, {}], "end": {"usage": usage}})
    timed_out = json.dumps({"timeout_seconds": 3, "end": {"error": error}})
    async with opened(make) as store:
        same(await store.endings([]), {}, "the ends of no runs")
        same(await store.endings([str(RUN)]), {}, "the end of an unknown run")
        await append(store, record(0), record(1, "failed", kind=ENDED, result=json.dumps(result), info=info), record(2))
        await append(store, record(0), run=OTHER)
        found = await store.endings([str(RUN), str(OTHER)])
        same([*found], [str(RUN)], "the runs that have ended")
        same(_values(found[str(RUN)]), ("failed", 1, error, usage), "the end of a run")
        older = record(3, "failed", kind=ENDED, result=json.dumps(result))._replace(attempt=2)
        await append(store, older)
        await append(store, record(1, "timed_out", kind=ENDED, result="{}", info=timed_out), run=OTHER)
        found = await store.endings([str(OTHER), str(RUN)])
        same(_values(found[str(RUN)]), ("failed", 2, error, usage), "an end without a copy of its error and usage")
        same(_values(found[str(OTHER)]), ("timed_out", 1, error, None), "the end of a run that timed out")
        await append(store, record(4, "cancelled", kind=ENDED, result="{}", info="{}"))
        found = await store.endings([str(RUN)])
        same(_values(found[str(RUN)]), ("cancelled", 1, None, None), "an end without error and usage")


def _values(end: RunEnd) -> tuple[Any, ...]:
    error, usage = (None if text is None else json.loads(text) for text in end[2:])
    return end.status, end.generation, error, usage


@CASES
async def a_long_journal_is_read_whole(make: Make) -> None:
    async with opened(make) as store:
        await append(store, *(record(n) for n in range(3000)))
        same([each.seq for each in await store.records(RUN)], list(range(3000)), "3,000 records read at once")
        same(len(await store.records(RUN, 499)), 2500, "the number of records after position 499")
