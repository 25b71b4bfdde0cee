"""Journals: exact records, positions, repeats and final records."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from ..._engines.base import Guard, Op
from ..._journal.record import DONE, ENDED, STARTED, Record
from ...errors import LeaseLost
from ...state.base import RunEnd
from .checks import Cases, refused, same
from .state_fixtures import NEW, OLD, OTHER, RUN, Case, Make, append, install, opened, record

CASES: Cases[Case] = Cases()

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
            await store.commits.commit(None, [Op("state.status", (str(RUN), text, 9.0))])
            same(await store.get_run_status(RUN), text, "the status")
            with refused(LeaseLost, f"the status {other!a}, which was not written, repeated where {text!a} is"):
                await store.commits.commit(Guard(str(RUN), OLD), [Op("state.status", (str(RUN), other, 9.0))])
            await store.save_checkpoint(RUN, {text: [other]})
            same(await store.get_checkpoint(RUN), {text: [other]}, "the checkpoint")


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
        same(
            await append(store, record(6, "failed", kind=ENDED)),
            [6],
            "the position of a final record after a longer gap",
        )
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
        same(
            await append(store, by_claim, end._replace(attempt=3)),
            [3, 4],
            "a final record without a claim, after one by a claim",
        )
        same([each.kind for each in await store.records(RUN)], [DONE, *[ENDED] * 4], "the journal")
        same(
            await append(store, end._replace(attempt=3, claim_id=OLD)),
            [5],
            "the position of a final record by a claim after that",
        )
        await append(store, end._replace(attempt=4))
        same(
            await append(store, record(-1, claim="")._replace(attempt=4)),
            [7],
            "the position of another record after a final record",
        )


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
        same(
            {each.name: each.seq for each in journal},
            {f"s{n}": positions[n][0] for n in range(32)},
            "the position of each record",
        )


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
