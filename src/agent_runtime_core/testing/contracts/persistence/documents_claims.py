"""Document stores: fences, and writes under the claim of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...._engines.base import FORGET, INSTALL, Committer, Guard, Op
from ...._engines.memory import MemoryEngine
from ....errors import LeaseLost
from ....persistence.documents.base import (
    Collection,
    Entry,
)
from ....persistence.fencing import CURRENT_CLAIM, FencedWrites
from ..checks import Cases, refused, same
from .documents_fixtures import NEW, OLD, OTHER_RUN, RUN, Case, Make, keys_of, opened

CASES: Cases[Case] = Cases()


def guarded(table: Collection) -> dict[str, list[Op]]:
    """Return writes by name. Each changes something, if document "a" of group "g" is stored."""
    return {
        "put": [table.put(Entry("a", "late"))],
        "put new": [table.put(Entry("late", ""), 0)],
        "add": [table.add(Entry("late", "", "g"))],
        "touch": [table.touch("a", 99)],
        "delete": [table.delete("a")],
        "clear": [table.clear()],
        "clear a group": [table.clear("g")],
        "drop": [Op("documents.drop", (table.space, 0.0))],
        "several": [table.put(Entry("a", "late")), table.delete("a"), table.add(Entry("late", ""))],
    }


async def install(table: Collection, token: str, run: str = RUN) -> None:
    await table.documents.commits.commit(None, [Op(INSTALL, (run, token))])


@CASES
async def a_superseded_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as table:
        commits = table.documents.commits
        await table.write(table.put(Entry("a", "A", "g", words="word")))
        before = await table.find()

        async def late(when: str) -> None:
            for name, ops in guarded(table).items():
                with refused(LeaseLost, f"{name} {when}"):
                    await commits.commit(Guard(RUN, OLD), ops)
                same(await table.find(), before, f"the stored documents after {name} {when}")

        await late("before any claim")
        await install(table, NEW, OTHER_RUN)
        await install(table, NEW)
        await late("after a newer claim")
        await commits.commit(None, [Op(FORGET, (RUN,))])
        await late("after the end")
        await install(table, NEW)
        same(
            await commits.commit(Guard(RUN, NEW), [table.put(Entry("a", "B", "g"))]), [(2, 1.0)], "a write of the newer"
        )
        same(await table.search("word"), [], "results for a word that is gone")


@CASES
async def a_write_may_be_repeated_after_a_lost_reply(make: Make) -> None:
    async with opened(make) as table:
        guard, commits = Guard(RUN, OLD), table.documents.commits
        await table.write(table.put(Entry("gone", "")), table.put(Entry("moved", "", "m", 1)))
        await install(table, OLD)
        ops = [
            table.put(Entry("a", "1"), 0), table.put(Entry("b", "2")), table.add(Entry("c", "3", "g")),
            table.touch("moved", 5), table.delete("gone"),
        ]  # fmt: skip
        first = await commits.commit(guard, ops)
        await install(table, NEW)
        before = await table.find()
        same(await commits.commit(guard, ops), first, "the result after the claim was superseded")
        for name, late in guarded(table).items():
            with refused(LeaseLost, f"a repeat with {name} added"):
                await commits.commit(guard, [*ops, *late])
        same(await table.find(), before, "the stored documents")


@contextlib.contextmanager
def claimed(claim: FencedWrites) -> Iterator[None]:
    token = CURRENT_CLAIM.set(claim)
    try:
        yield
    finally:
        CURRENT_CLAIM.reset(token)


async def rejects_a_stale_worker(table: Collection, home: Committer, where: str) -> None:
    """Check that of two claims on a run, only the later one writes. The queue is on `home`."""
    run = f"{RUN} on {where}"
    old, new = (FencedWrites(lambda token=token: Guard(run, token), home) for token in (OLD, NEW))  # type: ignore[misc]
    await home.commit(None, [Op(INSTALL, (run, OLD))])
    with claimed(old):
        await table.write(table.put(Entry("a", "A", "g")))
    await home.commit(None, [Op(INSTALL, (run, NEW))])
    await new.install(table.documents.commits)
    before = await table.find()
    for name, ops in guarded(table).items():
        with claimed(old), refused(LeaseLost, f"{name} of a stale worker, the queue on {where}"):
            await table.write(*ops)
        same(await table.find(), before, f"the stored documents after {name}")
    with claimed(old), refused(LeaseLost, f"a change by a stale worker, the queue on {where}"):
        await table.change("a", lambda _: Entry("a", "late"))
    with claimed(new):
        await table.write(table.put(Entry("a", "B", "g")))
    await table.write(table.put(Entry("a", "C", "g")))
    same([each.text for each in await table.find()], ["C"], "the documents at the end")


@CASES
async def a_stale_worker_writes_nothing(make: Make) -> None:
    async with opened(make) as table:
        await rejects_a_stale_worker(table, table.documents.commits, "the same engine")
        await rejects_a_stale_worker(table, MemoryEngine(), "another engine")


@CASES
async def the_first_write_of_a_newer_claim_excludes_the_older_claim(make: Make) -> None:
    async with opened(make) as table:
        home = MemoryEngine()
        old, new = (FencedWrites(lambda token=token: Guard(RUN, token), home) for token in (OLD, NEW))  # type: ignore[misc]
        with claimed(old):
            same(await table.write(table.add(Entry("a", ""))), [1.0], "the result under the older claim")
        with claimed(new):
            same(await table.write(table.add(Entry("b", ""))), [2.0], "the result under the newer one")
        with claimed(old), refused(LeaseLost, "a write under the older claim after that"):
            await table.write(table.add(Entry("c", "")))
        same(keys_of(await table.find()), ["a", "b"], "the stored documents")


@CASES
async def code_that_an_ended_attempt_left_running_writes_nothing(make: Make) -> None:
    async with opened(make) as table:
        for home in (table.documents.commits, MemoryEngine()):
            await install(table, OLD)
            claim = FencedWrites(lambda: Guard(RUN, OLD), home, lambda: True)
            with claimed(claim), refused(LeaseLost, "a write after the attempt"):
                await table.write(table.put(Entry("a", "")))
            released = FencedWrites(lambda: Guard(RUN, ""), home)
            with claimed(released), refused(LeaseLost, "a write after the claim was released"):
                await table.write(table.put(Entry("a", "")))
        same(await table.find(), [], "the stored documents")
