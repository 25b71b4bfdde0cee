"""Effects, which the runs of a lineage share."""

from __future__ import annotations

import asyncio
from typing import Any

from ..._engines.base import Op
from ...errors import LeaseLost
from ...state.base import APPROVED, BEGUN, CHILD, HAPPENED, MEMBER, EffectExists, EffectRow, StateStore
from .checks import Cases, refused, same
from .state_fixtures import NEW, OLD, RUN, Case, Make, append, install, opened, record, write

CASES: Cases[Case] = Cases()

ORIGIN, FORK, THIRD = "origin", "fork", "third"


def row(run_id: str, status: str = BEGUN, key: str = "pay\ts:0", digest: str = "d", **more: Any) -> EffectRow:
    return EffectRow(more.pop("origin", ORIGIN), key, digest, run_id, status, **more)


async def begin(store: StateStore, *rows: EffectRow) -> None:
    await write(store, *(Op("effect.begin", (each,)) for each in rows))


async def put(store: StateStore, *rows: EffectRow) -> None:
    await write(store, *(Op("effect.put", (each,)) for each in rows))


async def found(store: StateStore, of: EffectRow) -> list[EffectRow]:
    return await store.effects(*of[:3])


@CASES
async def an_effect_is_begun_by_one_run(make: Make) -> None:
    async with opened(make) as store:
        first = row(ORIGIN, t=1.5)
        same(await found(store, first), [], "the rows of an effect that no run has started")
        await begin(store, first)
        await begin(store, row(ORIGIN, t=2.0))
        same(await found(store, first), [first], "the row after its run started it twice")
        with refused(EffectExists, "an effect that another run has started"):
            await begin(store, row(FORK))
        await put(store, done := row(ORIGIN, HAPPENED, result='{"n":1}', t=3.0))
        with refused(EffectExists, "an effect that another run has completed"):
            await begin(store, row(FORK))
        await begin(store, row(ORIGIN, t=4.0))
        same(await found(store, first), [done], "the row of a completed effect")
        for other in (row(FORK, key="pay\ts:1"), row(FORK, digest=""), row(FORK, origin=FORK)):
            await begin(store, other)
            same(await found(store, other), [other], "the row of another key, digest or origin")


@CASES
async def a_refused_effect_leaves_nothing_of_its_commit(make: Make) -> None:
    async with opened(make) as store:
        await begin(store, row(ORIGIN))
        ops = [Op("journal.append", (str(RUN), record(0))), Op("state.status", (str(RUN), "running", 1.0))]
        with refused(EffectExists, "a commit with an effect that another run has started"):
            await write(store, *ops, Op("effect.begin", (row(FORK),)))
        same((await store.records(RUN), await store.get_run_status(RUN)), ([], None), "the data of the rejected commit")
        same(await append(store, record(1)), [1], "the position of the run's next record")


@CASES
async def each_run_has_a_row_of_its_own(make: Make) -> None:
    async with opened(make) as store:
        other = row(ORIGIN, HAPPENED, result='"é\\ud800\\u0000"', t=1.0)
        mine = row(FORK, HAPPENED, result="x" * 70_000, t=1790000000.123456)
        await put(store, other, row(FORK, t=2.0), mine)
        same(await found(store, mine), [other, mine], "the rows of two runs")
        await begin(store, row(FORK, t=9.0))
        await put(store, approved := row(ORIGIN, APPROVED, "signal:pay\tw:0", "", result="true", t=4.0))
        same(await found(store, approved), [approved], "the row of an approval")
        drop = Op("effect.drop", (mine,))
        await write(store, drop)
        await write(store, drop, Op("effect.drop", (row(THIRD),)))
        same(await found(store, mine), [other], "the rows after one run deleted its own")
        with refused(EffectExists, "an effect that another run has completed"):
            await begin(store, row(FORK))
        await write(store, Op("effect.drop", (other,)))
        await begin(store, row(FORK))


@CASES
async def an_effect_has_several_digests(make: Make) -> None:
    """With a codec, a store contains digests of several keys. Operations pass the other digests of the same effect."""
    plain, old, new, lost = "d", "h.0a.d", "h.0b.d", "h.0c.d"

    async def stored(store: StateStore, *digests: str) -> list[str]:
        rows = await store.read("effects", ORIGIN, row(ORIGIN).key, digests or (new, old, plain))
        return sorted(each.digest for each in rows)

    async with opened(make) as store:
        for known, others in ((plain, (new, old)), (old, (new, plain)), (new, (old, plain))):
            await store.commit(None, [Op("effect.begin", (row(ORIGIN, digest=known),))])
            mine = Op("effect.begin", (row(ORIGIN, digest=others[0]), (known, *others[1:])))
            await store.commit(None, [mine])
            same(await stored(store), [known], "the row after its run started it again with another key")
            with refused(EffectExists, f"an effect that another run has started, with digest {known!r}"):
                await store.commit(None, [Op("effect.begin", (row(FORK, digest=others[0]), (known, *others[1:])))])
            await store.commit(None, [Op("effect.put", (row(ORIGIN, HAPPENED, digest=others[0]), (known,)))])
            same(await stored(store), [others[0]], "the row after its run completed it with another key")
            await store.commit(None, [Op("effect.drop", (row(ORIGIN, digest=known), (others[0],)))])
            same(await stored(store), [], "the row after it was deleted with another key")
        await store.commit(None, [Op("effect.put", (row(ORIGIN, digest=lost),))])
        same(await stored(store, new, plain), [lost], "a row with a digest that cannot be compared")
        same(await stored(store, plain), [lost], "a row with a keyed digest, for a process without a codec")
        same(await stored(store, new, plain, "h.0c.other"), [], "a row with another digest of a known key")
        same(await stored(store, "", "h.0c."), [], "a row with a digest, for an effect without one")
        with refused(EffectExists, "an effect that another run has started, with a digest that cannot be compared"):
            await store.commit(None, [Op("effect.begin", (row(FORK, digest=new), (plain,)))])
        await store.commit(None, [Op("effect.begin", (row(ORIGIN, digest=new), (plain,)))])
        same(await stored(store), [new, lost], "the rows of a run under two keys, one of which is unknown")


@CASES
async def another_run_may_have_the_id_of_a_deleted_one(make: Make) -> None:
    async with opened(make) as store:
        await put(store, before := row(ORIGIN, HAPPENED, arrival=1, t=1.0))
        with refused(EffectExists, "an effect that a deleted run with the same id has completed"):
            await begin(store, row(ORIGIN, arrival=2))
        await put(store, again := row(ORIGIN, arrival=2, t=2.0))
        same(await found(store, before), [before, again], "the rows of two runs with the same id")
        await write(store, Op("effect.drop", (again,)))
        same(await found(store, before), [before], "the row of the deleted run")


@CASES
async def of_two_runs_one_begins_an_effect(make: Make) -> None:
    async def one(store: StateStore, run_id: str, number: int) -> bool:
        try:
            await begin(store, row(run_id, key=f"pay\ts:{number}"))
        except EffectExists:
            return False
        return True

    async with opened(make) as store:
        for number in range(8):
            started = await asyncio.gather(*(one(store, run_id, number) for run_id in (ORIGIN, FORK, THIRD)))
            same(started.count(True), 1, "the number of three runs that started an effect")


@CASES
async def an_effect_that_was_written_may_be_repeated(make: Make) -> None:
    async with opened(make) as store:
        await install(store, OLD)
        identity = row(ORIGIN)
        started, ended = Op("effect.begin", (row(ORIGIN, t=1.0),)), Op("effect.put", (row(ORIGIN, HAPPENED, t=2.0),))
        for op in (started, ended, Op("effect.drop", (identity,))):
            same(await write(store, op, claim=OLD), [None], f"the result of {op.name}")
            before = await found(store, row(ORIGIN))
            await install(store, NEW)
            same(await write(store, op, claim=OLD), [None], f"the result of a repeated {op.name}")
            same(await found(store, row(ORIGIN)), before, f"the row after a repeated {op.name}")
            await write(store, Op("fence.forget", (str(RUN),)))
            await install(store, OLD)
        await install(store, NEW)
        for op in (started, ended):
            with refused(LeaseLost, f"{op.name} that was never applied"):
                await write(store, op, claim=OLD)
        await put(store, row(ORIGIN, t=1.0))
        for op in (ended, Op("effect.drop", (identity,))):
            with refused(LeaseLost, f"{op.name} that was never applied, over another row"):
                await write(store, op, claim=OLD)
        same(await found(store, row(ORIGIN)), [row(ORIGIN, t=1.0)], "the row")


@CASES
async def effects_go_with_the_last_run_of_their_lineage(make: Make) -> None:
    def member(run_id: str) -> EffectRow:
        return EffectRow(ORIGIN, "", "", run_id, MEMBER)

    async def leave(store: StateStore, origin: str, run_id: str) -> list[EffectRow]:
        await write(store, Op("effect.leave", (origin, run_id)))
        return await found(store, row(ORIGIN))

    async with opened(make) as store:
        await begin(store, mine := row(ORIGIN), alone := row(THIRD, origin=THIRD))
        await put(store, member(ORIGIN), member(FORK))
        same(await leave(store, THIRD, THIRD), [mine], "the rows of a lineage after a run of another one was deleted")
        same(await found(store, alone), [], "the rows of a run that was never forked, after it was deleted")
        same(await leave(store, ORIGIN, ORIGIN), [mine], "the rows after the first run was deleted")
        same(await leave(store, ORIGIN, THIRD), [mine], "the rows after a run outside the lineage was deleted")
        await write(store, Op("state.delete", (ORIGIN,)))
        same(await found(store, mine), [mine], "the rows after the state of the first run was deleted")
        same(await leave(store, ORIGIN, FORK), [], "the rows after the last run was deleted")
        same(await leave(store, ORIGIN, FORK), [], "the rows after a repeated delete")


@CASES
async def effects_of_a_child_are_kept_for_the_lineage_of_its_caller(make: Make) -> None:
    child, grandchild = "child", "grandchild"

    def adopted(origin: str, of: str) -> list[EffectRow]:
        return [EffectRow(of, "", "", origin, MEMBER), EffectRow(origin, "", CHILD, of, CHILD)]

    async with opened(make) as store:
        rows = [row(each, origin=each) for each in (ORIGIN, child, grandchild)]
        await begin(store, *rows)
        for lineage, caller in ((child, ORIGIN), (grandchild, child)):
            await put(store, *adopted(caller, lineage), EffectRow(lineage, "", "", lineage, MEMBER))
        await put(store, EffectRow(ORIGIN, "", "", ORIGIN, MEMBER), EffectRow(ORIGIN, "", "", FORK, MEMBER))

        async def leave(origin: str, run_id: str) -> list[bool]:
            await write(store, Op("effect.leave", (origin, run_id)))
            return [bool(await found(store, each)) for each in rows]

        same(await leave(child, child), [True, True, True], "the rows after the child was deleted")
        same(
            await leave(ORIGIN, ORIGIN), [True, True, True], "the rows after its caller was deleted, but no fork of it"
        )
        same(await leave(ORIGIN, FORK), [False, False, True], "the rows after the last run of the lineage was deleted")
        same(await leave(grandchild, grandchild), [False, False, False], "the rows after the last run was deleted")
        for each in (ORIGIN, child, grandchild):
            for digest in ("", CHILD):
                same(await store.effects(each, "", digest), [], f"rows of the lineage {each!r}")
