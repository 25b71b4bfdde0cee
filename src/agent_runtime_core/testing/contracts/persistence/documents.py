"""Conformance tests for document stores. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make(**options)` returns a new and empty document store with those options, such as `clock`. A failing case raises
AssertionError, or the unexpected error of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from ...._engines.base import FORGET, INSTALL, Committer, Guard, Op
from ...._engines.memory import MemoryEngine
from ....errors import LeaseLost
from ....persistence.documents.base import Collection, Document, DocumentMissing, Entry, VersionConflict
from ....persistence.fencing import CURRENT_CLAIM, FencedWrites
from ..checks import Cases, refused, same
from .documents_commits import CASES as COMMITS
from .fixtures import HOSTILE, NEW, OLD, OTHER_RUN, RUN, WRITERS, Case, Make, collection, keys_of, raised

__all__ = ["CASES", "Case", "Make", "check", "rejects_a_stale_worker"]

CASES: Cases[Case] = Cases(COMMITS)
check: Callable[[Make], Awaitable[None]] = CASES.check


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
    async with collection(make) as table:
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
    async with collection(make) as table:
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
    """Check that only the later of two claims on a run writes. The queue is on `home`."""
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
    async with collection(make) as table:
        await rejects_a_stale_worker(table, table.documents.commits, "the same engine")
        await rejects_a_stale_worker(table, MemoryEngine(), "another engine")


@CASES
async def the_first_write_of_a_newer_claim_excludes_the_older_claim(make: Make) -> None:
    async with collection(make) as table:
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
    async with collection(make) as table:
        for home in (table.documents.commits, MemoryEngine()):
            await install(table, OLD)
            claim = FencedWrites(lambda: Guard(RUN, OLD), home, lambda: True)
            with claimed(claim), refused(LeaseLost, "a write after the attempt"):
                await table.write(table.put(Entry("a", "")))
            released = FencedWrites(lambda: Guard(RUN, ""), home)
            with claimed(released), refused(LeaseLost, "a write after the claim was released"):
                await table.write(table.put(Entry("a", "")))
        same(await table.find(), [], "the stored documents")


@CASES
async def find_returns_the_documents_of_the_query(make: Make) -> None:
    async with collection(make) as table:
        entries = [Entry(f"{'pq'[n % 2]}{n % 7}{n}", str(n), "gh"[n % 3 == 0], float(n % 5)) for n in range(60)]
        await table.write(*(table.put(entry) for entry in entries))
        there = [Document(each.key, each.text, 1, each.rank or 0.0, each.group) for each in entries]
        there.sort(key=lambda each: (each.rank, each.key))
        for asked in _questions():
            same(await table.find(**asked), _expected(there, **asked), f"find({asked})")


def _questions() -> Iterator[dict[str, Any]]:
    for group in (None, "g", "h", "none"):
        for prefix in ("", "p", "q3", "x"):
            for low, high in ((None, None), (1, None), (None, 3), (1, 4), (3, 1)):
                for page in ({}, {"limit": 0}, {"limit": 4}, {"offset": 3}, {"offset": 2, "limit": 5}, {"offset": 99}):
                    for descending in (False, True):
                        where = {"group": group, "prefix": prefix, "low": low, "high": high}
                        yield {**where, "descending": descending, **page}


def _expected(
    there: Sequence[Document], *, group: str | None, prefix: str, low: float | None, high: float | None,
    descending: bool, offset: int = 0, limit: int | None = None,
) -> list[Document]:  # fmt: skip
    found = [
        each
        for each in there
        if group in (None, each.group)
        and each.key.startswith(prefix)
        and (low is None or each.rank >= low)
        and (high is None or each.rank < high)
    ]
    found = found[::-1] if descending else found
    return found[offset:] if limit is None else found[offset : offset + limit]


@CASES
async def a_prefix_is_not_a_pattern(make: Make) -> None:
    keys = [
        "a", "a%", "a%b", "a_", "a_b", "axb", "a*", "a*b", "a[", "a[b]", "a?", "a\\", "A%", "é", "éa", "e\u0301a", "Éa",
        "日本", "日本語", "日", "\ud7ff", "\ud7ffa", "\ue000", "\U0010ffff", "\U0010ffff\U0010ffffa", "z",
    ]  # fmt: skip
    async with collection(make) as table:
        await table.write(*(table.put(Entry(key, "", "g", 0)) for key in keys))
        for prefix in [*keys, "", "a%%", "日本語です", "\U0010ffff\U0010ffff"]:
            there = sorted(key for key in keys if key.startswith(prefix))
            same(keys_of(await table.find(prefix=prefix)), there, f"keys that begin with {prefix!r}")
            same(keys_of(await table.find("g", prefix=prefix, low=0)), there, f"those of a group, with {prefix!r}")


@CASES
async def many_documents_are_returned_completely(make: Make) -> None:
    async with collection(make) as table:
        count = 2_500
        for start in range(0, count, 500):
            entries = (Entry(f"k{n:05}", "t" * (n % 300), "g", float(n // 100)) for n in range(start, start + 500))
            await table.write(*(table.put(entry) for entry in entries))
        expected = [f"k{n:05}" for n in range(count)]
        found = await table.find("g")
        same(keys_of(found), expected, "the keys of a large group")
        same([len(each.text) for each in found], [n % 300 for n in range(count)], "the lengths of its texts")
        same(keys_of(await table.find(descending=True)), expected[::-1], "the keys of a large kind, downwards")
        same(keys_of(await table.find("g", offset=1_200, limit=900)), expected[1_200:2_100], "a part of them")
        same(keys_of(await table.many(expected)), expected, "all of them by their keys")
        same(await table.write(table.clear()), [count], "the result of clearing them")
        same(await table.find(), [], "the remaining documents")


@CASES
async def words_match_in_any_case_and_order(make: Make) -> None:
    async with collection(make) as table:
        texts = {
            "trip": "We fly to Zürich on Monday, at 10:30. ZÜRICH is cold!",
            "food": "The menu: crème brûlée, dim sum & 北京烤鸭",
            "code": "SELECT * FROM t WHERE x='NEAR' AND NOT y -- a_b",
            "none": "",
        }
        for key, words in texts.items():
            await table.write(table.put(Entry(key, key.upper(), words=words)))
        for query, expected in {
            "zürich": ["trip"], "ZURICH monday": ["trip"], "monday tuesday": [], "mon": ["trip"], "mon fly": [],
            "BRÛLÉE": ["food"], "brulee creme": ["food"], "北京": ["food"], "烤": ["food"], "南": [], "10": ["trip"],
            "near": ["code"], "select from": ["code"], "a b": ["code"], "": [], "  ": [], "!?": [],
        }.items():  # fmt: skip
            found = await table.search(query)
            same(keys_of(found), expected, f"results for {query!r}")
        same(await table.search("zurich"), [Document("trip", "TRIP", 1, 1.0)], "a found document")


@CASES
async def every_string_is_a_valid_query(make: Make) -> None:
    async with collection(make) as table:
        await table.write(table.put(Entry("a", "", words="near or and not text column words place")))
        for query in (
            '"', "''", '"near', "near(", "NEAR(a b, 5)", "text:near", "words : near", "{place} : 1", "near*", "*",
            "^near", "a AND", "OR", "NOT", "a -b", "+", "near + or", "(", ")", "\\", "%", "\x00", "near\x00or",
            "\ud800", "; DROP TABLE", "x" * 5000, "near " * 3000, "👩‍👩‍👧", "place:1 OR 1",
        ):  # fmt: skip
            await table.search(query)
        same(keys_of(await table.search("NEAR AND or")), ["a"], "results for words that are operators elsewhere")


@CASES
async def the_best_match_is_first(make: Make) -> None:
    async with collection(make) as table:
        for n in range(9):
            await table.write(table.put(Entry(f"k{n}", "", words=f"filler text number {n} about other things")))
        await table.write(
            table.put(Entry("one", "", words="tea and other drinks and more of them")),
            table.put(Entry("four", "", words="tea tea tea tea and other drinks more")),
        )
        same(keys_of(await table.search("tea")), ["four", "one"], "the order")
        same(keys_of(await table.search("tea", limit=1)), ["four"], "the best one")
        await table.write(*(table.put(Entry(f"same{n}", "", words="coffee")) for n in range(3)))
        same(keys_of(await table.search("coffee")), ["same2", "same1", "same0"], "of equal ones, the newest first")


@CASES
async def the_index_follows_the_documents(make: Make) -> None:
    async with collection(make) as table:
        other = Collection(table.documents, "project", "other")
        await table.write(table.put(Entry("a", "", words="red green")), other.put(Entry("o", "", words="red")))
        same(keys_of(await table.search("red")), ["a"], "the first result")
        await table.write(table.put(Entry("a", "", words="green blue")), table.add(Entry("b", "", "g", words="blue")))
        same((await table.search("red"), sorted(keys_of(await table.search("blue")))), ([], ["a", "b"]), "after a put")
        await table.write(table.touch("a", 9))
        same(keys_of(await table.search("green")), ["a"], "after a touch")
        await table.write(table.put(Entry("a", "")), table.clear("g"))
        same((await table.search("green"), await table.search("blue")), ([], []), "after they are gone")
        await table.write(table.put(Entry("a", "", words="blue")), table.delete("a"))
        same((await table.search("blue"), keys_of(await other.search("red"))), ([], ["o"]), "after all are gone")


@CASES
async def a_stored_document_is_returned(make: Make) -> None:
    async with collection(make) as table:
        same(await table.get("a"), None, "an unknown document")
        same(await table.write(table.put(Entry("a", "A", "g", 2.5))), [(1, 2.5)], "the result of a put")
        same(await table.get("a"), Document("a", "A", 1, 2.5, "g", None), "the document")
        same(await table.write(table.put(Entry("a", "AA", "g", 1.5))), [(2, 1.5)], "the result of a second one")
        same(await table.get("a"), Document("a", "AA", 2, 1.5, "g", None), "the document after that")
        end = table.documents.clock.wall() + 60
        await table.write(table.put(Entry("a", "", "h", -1.0, end)))
        same(await table.get("a"), Document("a", "", 3, -1.0, "h", end), "the document in another group")
        same((await table.find("g"), keys_of(await table.find("h"))), ([], ["a"]), "the groups")


@CASES
async def texts_are_stored_exactly(make: Make) -> None:
    texts = {
        "large": "0123456789abcdef" * 65_536,
        "wide": "é日👩‍👩‍👧" * 20_000,
        "quotes": "'\"\\/\b\f\n\r\t",
        "controls": "".join(map(chr, range(32))) + "\x7f\x85\u2028",
        "json": '{"a": [1, 2.50, null, "\\u00e9"]}',
        "empty": "",
    }
    async with collection(make) as table:
        await table.write(*(table.put(Entry(key, text)) for key, text in texts.items()))
        found = {document.key: document.text for document in await table.many(list(texts))}
        for key, text in texts.items():
            same(found[key], text, f"the text {key!r}")


@CASES
async def keys_and_groups_are_distinct(make: Make) -> None:
    async with collection(make) as table:
        same(len(set(HOSTILE)), len(HOSTILE), "the number of keys")
        for n, key in enumerate(HOSTILE):
            same(await table.write(table.put(Entry(key, str(n), key))), [(1, 1.0)], f"the result for {key!r}")
        for n, key in enumerate(HOSTILE):
            document = Document(key, str(n), 1, 1.0, key)
            same(await table.get(key), document, f"the document {key!r}")
            same(await table.find(key), [document], f"the group {key!r}")
        same(keys_of(await table.many(HOSTILE)), list(HOSTILE), "all of them, in their order")
        same(keys_of(await table.find()), sorted(HOSTILE), "those of equal ranks, in order of their keys")
        for n, key in enumerate(HOSTILE):
            same(await table.write(table.delete(key)), [True], f"the result of deleting {key!r}")
            same(len(await table.find()), len(HOSTILE) - n - 1, "how many are left")


@CASES
async def documents_are_returned_in_the_order_of_the_keys(make: Make) -> None:
    async with collection(make) as table:
        await table.write(*(table.put(Entry(key, key)) for key in "abc"))
        same(keys_of(await table.many(["c", "x", "a"])), ["c", "a"], "existing documents of three keys")
        same(await table.many([]), [], "none of no keys")


@CASES
async def delete_returns_whether_the_document_existed(make: Make) -> None:
    async with collection(make) as table:
        await table.write(table.put(Entry("a", "A")))
        same(
            await table.write(table.delete("a"), table.delete("a"), table.delete("b")), [True, False, False], "results"
        )
        same((await table.get("a"), await table.find()), (None, []), "the remaining documents")
        same((await table.write(table.put(Entry("a", "B"))))[0][0], 1, "the version of a deleted document, again")


@CASES
async def a_put_expects_what_its_writer_has_seen(make: Make) -> None:
    async with collection(make) as table:
        same(await table.write(table.put(Entry("a", "1"), 0)), [(1, 1.0)], "a new document")
        same(await table.write(table.put(Entry("a", "2"), 1)), [(2, 1.0)], "the next version")
        for expect in (0, 1, 3, 7):
            with refused(VersionConflict, f"a put that expects version {expect} but finds 2"):
                await table.write(table.put(Entry("a", "x"), expect))
        with refused(VersionConflict, "a put that expects version 1 but finds no document"):
            await table.write(table.put(Entry("b", "x"), 1))
        same((await table.many(["a", "b"])), [Document("a", "2", 2, 1.0)], "the stored documents")


@CASES
async def an_equal_text_is_not_the_same_version(make: Make) -> None:
    async with collection(make) as table:
        await table.write(table.put(Entry("a", "A")))
        seen = await table.get("a")
        for text in "BA":
            await table.write(table.put(Entry("a", text)))
        with refused(VersionConflict, "a put that expects the version of the same text of before"):
            await table.write(table.put(Entry("a", "C"), seen.version if seen else None))
        same(await table.get("a"), Document("a", "A", 3, 1.0), "the document")


@CASES
async def a_repeated_put_succeeds_once_more(make: Make) -> None:
    async with collection(make) as table:
        for text, expect in (("1", 0), ("2", 1)):
            op = table.put(Entry("a", text, rank=5), expect)
            first = await table.write(op)
            same(await table.write(op), first, f"the result of a repeat that expects {expect}")
        same(await table.get("a"), Document("a", "2", 2, 5.0), "the document")
        with refused(VersionConflict, "another put of the same text"):
            await table.write(table.put(Entry("a", "2", rank=5), 1))


@CASES
async def one_of_many_concurrent_writers_succeeds(make: Make) -> None:
    async with collection(make) as table:
        for expect in (0, 1, 2):
            puts = [table.put(Entry("a", f"{expect}-{n}"), expect) for n in range(WRITERS)]
            errors = await asyncio.gather(*(raised(table.write(op)) for op in puts))
            won = [n for n, error in enumerate(errors) if error is None]
            same(len(won), 1, f"how many of {WRITERS} writers that expect version {expect} win")
            same({type(error) for error in errors if error}, {VersionConflict}, "the errors of the others")
            there = await table.get("a")
            same(there and (there.version, there.text), (expect + 1, f"{expect}-{won[0]}"), "the winner's text")


@CASES
async def concurrent_changes_are_all_applied(make: Make) -> None:
    def more(there: Document | None) -> Entry:
        return Entry("n", str(int(there.text if there else "0") + 1))

    async with collection(make) as table:
        await asyncio.gather(*(table.change("n", more) for _ in range(WRITERS)))
        there = await table.get("n")
        same(there and (there.text, there.version), (str(WRITERS), WRITERS), "a counter")
        same((await table.change("n", lambda _: None)), there, "the result of no change")


@CASES
async def add_does_not_replace_a_document(make: Make) -> None:
    async with collection(make) as table:
        same(await table.write(table.add(Entry("a", "A", "g"))), [1.0], "the rank of an added document")
        same(await table.write(table.add(Entry("a", "B", "h"))), [None], "the result for a taken key")
        same(await table.find(), [Document("a", "A", 1, 1.0, "g")], "the stored documents")


@CASES
async def ranks_of_concurrent_writers_have_no_gap(make: Make) -> None:
    async with collection(make) as table:
        ops = [table.add(Entry(f"{group}{n}", "", group)) for n in range(WRITERS) for group in "gh"]
        answers = await asyncio.gather(*(table.write(op) for op in ops))
        for i, group in enumerate("gh"):
            ranks = sorted(rank for [rank] in answers[i::2])
            same(ranks, [float(n + 1) for n in range(WRITERS)], f"ranks of the group {group}")
            same([each.rank for each in await table.find(group)], ranks, f"ranks of the documents of {group}")


@CASES
async def a_new_document_gets_a_rank_after_all_others(make: Make) -> None:
    async with collection(make) as table:
        same(
            await table.write(*(table.add(Entry(key, "", "g")) for key in "abc")), [1.0, 2.0, 3.0], "three in a commit"
        )
        same(await table.write(table.put(Entry("b", "B", "g"))), [(2, 2.0)], "a stored document keeps its rank")
        same(await table.write(table.put(Entry("x", "", "g", -7.5))), [(1, -7.5)], "one with a rank of its own")
        same(await table.write(table.add(Entry("d", "", "g", 10))), [10.0], "one with a greater rank of its own")
        same(await table.write(table.add(Entry("e", "", "g"))), [11.0], "the document after it")
        same(await table.write(table.add(Entry("f", "", "h"))), [1.0], "the first of another group")
        same(await table.write(table.put(Entry("f", "", "g"))), [(2, 12.0)], "a document moved from another group")
        same(keys_of(await table.find("g")), list("xabcdef"), "the group")
        await table.write(table.delete("d"), table.delete("f"))
        [rank] = await table.write(table.add(Entry("y", "", "g")))
        same(keys_of(await table.find("g"))[-1], "y", f"the last one, of rank {rank}")


@CASES
async def a_group_of_low_ranks_begins_at_one(make: Make) -> None:
    async with collection(make) as table:
        await table.write(table.put(Entry("a", "", rank=-100)))
        same(await table.write(table.add(Entry("b", ""))), [1.0], "the rank after -100")


@CASES
async def ranks_of_any_size_are_in_order(make: Make) -> None:
    ranks = [-1e300, -1.5e18, -3, -2.5, -1e-300, 0, 5e-324, 0.1, 0.1 + 2**-56, 1, 1e9 + 0.25, 1.8e18, 2.0**53, 1e300]
    async with collection(make) as table:
        for n in (8, 3, 12, 0, 5, 13, 1, 10, 7, 2, 4, 9, 6, 11):
            await table.write(table.put(Entry(str(n), "", rank=ranks[n])))
        found = await table.find()
        same([each.rank for each in found], sorted(map(float, ranks)), "ranks")
        same(await table.find(descending=True), found[::-1], "the opposite order")
        for low, high in ((-3, 0.1), (0, 1), (5e-324, 1e300), (-1e300, -1e300), (1e300, None), (None, -1e-300)):
            there = [each for each in found if (low is None or each.rank >= low) and (high is None or each.rank < high)]
            same(await table.find(low=low, high=high), there, f"ranks from {low} to below {high}")
        [first] = await table.write(table.add(Entry("after", "")))
        [second] = await table.write(table.add(Entry("after that", "")))
        same(1e300 < first < second, True, f"whether {first!r} and {second!r} are above 1e300")


@CASES
async def touching_never_lowers_a_rank(make: Make) -> None:
    async with collection(make) as table:
        await table.write(table.put(Entry("a", "A", "g", 5)), table.put(Entry("b", "B", "g", 6)))
        same(await table.write(table.touch("a", 7)), [None], "the result")
        same(keys_of(await table.find("g")), ["b", "a"], "the order")
        await table.write(table.touch("a", 7), table.touch("a", 6.5))
        same(await table.get("a"), Document("a", "A", 1, 7.0, "g"), "the document after a lower one")
        with refused(DocumentMissing, "touching a missing document"):
            await table.write(table.touch("x", 1))
        same(await table.write(table.add(Entry("c", "", "g"))), [8.0], "the rank after it")
