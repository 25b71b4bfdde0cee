"""Cases for the document stores of this package, which keep the documents of the other stores.

`make(**options)` returns a new and empty document store each time, constructed with those options (`clock`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from agent_runtime_core._engines.base import FORGET, INSTALL, Committer, Guard, Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.errors import InvalidArgument, LeaseLost
from agent_runtime_core.persistence.documents.base import (
    Collection,
    Document,
    DocumentMissing,
    DocumentStore,
    Entry,
    VersionConflict,
)
from agent_runtime_core.persistence.fencing import CURRENT_CLAIM, FencedWrites
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.testing.contracts.checks import PATIENCE, Cases, refused, same

Make = Callable[..., DocumentStore]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()

RUN, OTHER_RUN = "0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b01", "0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2b02"
OLD, NEW = "01HZX000000000000000000001", "01HZX000000000000000000002"
WRITERS = 32

#: Keys that a file system, a pattern, a separator or a script could take for something else; all are different.
HOSTILE = (
    "", " ", ".", "..", "../up", "/root", "a/b", "a_b", "a\\b", "con", "CON", "nul.txt", "key", "KEY", "Key", "%", "_",
    "*", "[", "[a-z]", "?", "'", '"', "`", ";--", "{arc}", "{}", ":", "a:b", "a|b", "0", "00", "-1", "1e3", "null",
    "\t", "\n", "\r\n", "\x01", "\x7f", "é", "e\u0301", "ß", "SS", "Ω", "\u2126", "\u202eabc", "\ufeff", "\uffff",
    "\U0010ffff", "👩‍👩‍👧", "🏳️‍🌈" * 20, "日本語", "x" * 300, "é" * 300, "x" * 299 + "y", "~", "a" * 64, "a" * 65,
)  # fmt: skip


@contextlib.asynccontextmanager
async def opened(make: Make) -> AsyncIterator[Collection]:
    """The table of a kind, of a new store whose clock is virtual."""
    store = make(clock=VirtualClock())
    try:
        async with asyncio.timeout(PATIENCE):
            yield Collection(store, "project", "thing")
    finally:
        await store.close()


def keys_of(documents: Sequence[Document]) -> list[str]:
    return [document.key for document in documents]


def advance(table: Collection, seconds: float) -> None:
    clock = table.documents.clock
    assert isinstance(clock, VirtualClock)
    clock.advance(seconds)


async def raised(writing: Awaitable[Any]) -> Exception | None:
    try:
        await writing
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return error
    return None


# -- one document


@CASES
async def what_was_put_comes_back(make: Make) -> None:
    async with opened(make) as table:
        same(await table.get("a"), None, "an unknown document")
        same(await table.write(table.put(Entry("a", "A", "g", 2.5))), [(1, 2.5)], "the answer to a put")
        same(await table.get("a"), Document("a", "A", 1, 2.5, "g", None), "the document")
        same(await table.write(table.put(Entry("a", "AA", "g", 1.5))), [(2, 1.5)], "the answer to a second one")
        same(await table.get("a"), Document("a", "AA", 2, 1.5, "g", None), "the document after that")
        end = table.documents.clock.wall() + 60
        await table.write(table.put(Entry("a", "", "h", -1.0, end)))
        same(await table.get("a"), Document("a", "", 3, -1.0, "h", end), "the document in another group")
        same((await table.find("g"), keys_of(await table.find("h"))), ([], ["a"]), "the groups")


@CASES
async def texts_come_back_as_they_were(make: Make) -> None:
    texts = {
        "large": "0123456789abcdef" * 65_536,
        "wide": "é日👩‍👩‍👧" * 20_000,
        "quotes": "'\"\\/\b\f\n\r\t",
        "controls": "".join(map(chr, range(32))) + "\x7f\x85\u2028",
        "json": '{"a": [1, 2.50, null, "\\u00e9"]}',
        "empty": "",
    }
    async with opened(make) as table:
        await table.write(*(table.put(Entry(key, text)) for key, text in texts.items()))
        found = {document.key: document.text for document in await table.many(list(texts))}
        for key, text in texts.items():
            same(found[key], text, f"the text {key!r}")


@CASES
async def keys_and_groups_are_told_apart(make: Make) -> None:
    async with opened(make) as table:
        same(len(set(HOSTILE)), len(HOSTILE), "how many keys there are")
        for n, key in enumerate(HOSTILE):
            same(await table.write(table.put(Entry(key, str(n), key))), [(1, 1.0)], f"the answer for {key!r}")
        for n, key in enumerate(HOSTILE):
            document = Document(key, str(n), 1, 1.0, key)
            same(await table.get(key), document, f"the document {key!r}")
            same(await table.find(key), [document], f"the group {key!r}")
        same(keys_of(await table.many(HOSTILE)), list(HOSTILE), "all of them, in their order")
        same(keys_of(await table.find()), sorted(HOSTILE), "those of equal ranks, in order of their keys")
        for n, key in enumerate(HOSTILE):
            same(await table.write(table.delete(key)), [True], f"the answer to deleting {key!r}")
            same(len(await table.find()), len(HOSTILE) - n - 1, "how many are left")


@CASES
async def get_answers_in_the_order_of_the_keys(make: Make) -> None:
    async with opened(make) as table:
        await table.write(*(table.put(Entry(key, key)) for key in "abc"))
        same(keys_of(await table.many(["c", "x", "a"])), ["c", "a"], "those there are of three keys")
        same(await table.many([]), [], "none of no keys")


@CASES
async def deleting_is_told(make: Make) -> None:
    async with opened(make) as table:
        await table.write(table.put(Entry("a", "A")))
        same(
            await table.write(table.delete("a"), table.delete("a"), table.delete("b")), [True, False, False], "answers"
        )
        same((await table.get("a"), await table.find()), (None, []), "what is left")
        same((await table.write(table.put(Entry("a", "B"))))[0][0], 1, "the version of one that is put anew")


# -- versions


@CASES
async def a_put_expects_what_its_writer_has_seen(make: Make) -> None:
    async with opened(make) as table:
        same(await table.write(table.put(Entry("a", "1"), 0)), [(1, 1.0)], "a new document")
        same(await table.write(table.put(Entry("a", "2"), 1)), [(2, 1.0)], "the next version")
        for expect in (0, 1, 3, 7):
            with refused(VersionConflict, f"a put that expects version {expect} where 2 is there"):
                await table.write(table.put(Entry("a", "x"), expect))
        with refused(VersionConflict, "a put that expects version 1 where nothing is there"):
            await table.write(table.put(Entry("b", "x"), 1))
        same((await table.many(["a", "b"])), [Document("a", "2", 2, 1.0)], "what is there")


@CASES
async def a_text_that_was_there_before_is_no_version_that_was(make: Make) -> None:
    async with opened(make) as table:
        await table.write(table.put(Entry("a", "A")))
        seen = await table.get("a")
        for text in "BA":
            await table.write(table.put(Entry("a", text)))
        with refused(VersionConflict, "a put that expects the version of the same text of before"):
            await table.write(table.put(Entry("a", "C"), seen.version if seen else None))
        same(await table.get("a"), Document("a", "A", 3, 1.0), "the document")


@CASES
async def a_repeated_put_has_happened_already(make: Make) -> None:
    async with opened(make) as table:
        for text, expect in (("1", 0), ("2", 1)):
            op = table.put(Entry("a", text, rank=5), expect)
            first = await table.write(op)
            same(await table.write(op), first, f"the answer to a repeat that expects {expect}")
        same(await table.get("a"), Document("a", "2", 2, 5.0), "the document")
        with refused(VersionConflict, "another put of the same text"):
            await table.write(table.put(Entry("a", "2", rank=5), 1))


@CASES
async def of_racing_writers_one_wins(make: Make) -> None:
    async with opened(make) as table:
        for expect in (0, 1, 2):
            puts = [table.put(Entry("a", f"{expect}-{n}"), expect) for n in range(WRITERS)]
            errors = await asyncio.gather(*(raised(table.write(op)) for op in puts))
            won = [n for n, error in enumerate(errors) if error is None]
            same(len(won), 1, f"how many of {WRITERS} writers that expect version {expect} win")
            same({type(error) for error in errors if error}, {VersionConflict}, "what the others are told")
            there = await table.get("a")
            same(there and (there.version, there.text), (expect + 1, f"{expect}-{won[0]}"), "the winner's text")


@CASES
async def changes_of_many_are_all_made(make: Make) -> None:
    def more(there: Document | None) -> Entry:
        return Entry("n", str(int(there.text if there else "0") + 1))

    async with opened(make) as table:
        await asyncio.gather(*(table.change("n", more) for _ in range(WRITERS)))
        there = await table.get("n")
        same(there and (there.text, there.version), (str(WRITERS), WRITERS), "a counter")
        same((await table.change("n", lambda _: None)), there, "the answer to no change")


@CASES
async def a_taken_key_is_left_as_it_is(make: Make) -> None:
    async with opened(make) as table:
        same(await table.write(table.add(Entry("a", "A", "g"))), [1.0], "the rank of an added document")
        same(await table.write(table.add(Entry("a", "B", "h"))), [None], "the answer for a taken key")
        same(await table.find(), [Document("a", "A", 1, 1.0, "g")], "what is there")


# -- ranks


@CASES
async def ranks_of_racing_writers_have_no_gap(make: Make) -> None:
    async with opened(make) as table:
        ops = [table.add(Entry(f"{group}{n}", "", group)) for n in range(WRITERS) for group in "gh"]
        answers = await asyncio.gather(*(table.write(op) for op in ops))
        for i, group in enumerate("gh"):
            ranks = sorted(rank for [rank] in answers[i::2])
            same(ranks, [float(n + 1) for n in range(WRITERS)], f"ranks of the group {group}")
            same([each.rank for each in await table.find(group)], ranks, f"ranks of the documents of {group}")


@CASES
async def ranks_are_given_behind_all_that_are_there(make: Make) -> None:
    async with opened(make) as table:
        same(
            await table.write(*(table.add(Entry(key, "", "g")) for key in "abc")), [1.0, 2.0, 3.0], "three in a commit"
        )
        same(await table.write(table.put(Entry("b", "B", "g"))), [(2, 2.0)], "one that is there stays where it is")
        same(await table.write(table.put(Entry("x", "", "g", -7.5))), [(1, -7.5)], "one with a rank of its own")
        same(await table.write(table.add(Entry("d", "", "g", 10))), [10.0], "one with a greater rank of its own")
        same(await table.write(table.add(Entry("e", "", "g"))), [11.0], "the one behind it")
        same(await table.write(table.add(Entry("f", "", "h"))), [1.0], "the first of another group")
        same(await table.write(table.put(Entry("f", "", "g"))), [(2, 12.0)], "one that comes from another group")
        same(keys_of(await table.find("g")), list("xabcdef"), "the group")
        await table.write(table.delete("d"), table.delete("f"))
        [rank] = await table.write(table.add(Entry("y", "", "g")))
        same(keys_of(await table.find("g"))[-1], "y", f"the last one, of rank {rank}")


@CASES
async def a_group_of_low_ranks_begins_at_one(make: Make) -> None:
    async with opened(make) as table:
        await table.write(table.put(Entry("a", "", rank=-100)))
        same(await table.write(table.add(Entry("b", ""))), [1.0], "the rank behind one of -100")


@CASES
async def ranks_of_any_size_are_in_order(make: Make) -> None:
    ranks = [-1e300, -1.5e18, -3, -2.5, -1e-300, 0, 5e-324, 0.1, 0.1 + 2**-56, 1, 1e9 + 0.25, 1.8e18, 2.0**53, 1e300]
    async with opened(make) as table:
        for n in (8, 3, 12, 0, 5, 13, 1, 10, 7, 2, 4, 9, 6, 11):
            await table.write(table.put(Entry(str(n), "", rank=ranks[n])))
        found = await table.find()
        same([each.rank for each in found], sorted(map(float, ranks)), "ranks")
        same(await table.find(descending=True), found[::-1], "the opposite order")
        for low, high in ((-3, 0.1), (0, 1), (5e-324, 1e300), (-1e300, -1e300), (1e300, None), (None, -1e-300)):
            there = [each for each in found if (low is None or each.rank >= low) and (high is None or each.rank < high)]
            same(await table.find(low=low, high=high), there, f"ranks from {low} to below {high}")
        [first] = await table.write(table.add(Entry("behind", "")))
        [second] = await table.write(table.add(Entry("behind that", "")))
        same(1e300 < first < second, True, f"whether {first!r} and {second!r} are behind 1e300")


@CASES
async def touching_never_lowers_a_rank(make: Make) -> None:
    async with opened(make) as table:
        await table.write(table.put(Entry("a", "A", "g", 5)), table.put(Entry("b", "B", "g", 6)))
        same(await table.write(table.touch("a", 7)), [None], "the answer")
        same(keys_of(await table.find("g")), ["b", "a"], "the order")
        await table.write(table.touch("a", 7), table.touch("a", 6.5))
        same(await table.get("a"), Document("a", "A", 1, 7.0, "g"), "the document after a lower one")
        with refused(DocumentMissing, "touching what is not there"):
            await table.write(table.touch("x", 1))
        same(await table.write(table.add(Entry("c", "", "g"))), [8.0], "the rank behind it")


# -- finding


@CASES
async def found_is_what_is_asked_for(make: Make) -> None:
    async with opened(make) as table:
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
async def a_prefix_is_no_pattern(make: Make) -> None:
    keys = [
        "a", "a%", "a%b", "a_", "a_b", "axb", "a*", "a*b", "a[", "a[b]", "a?", "a\\", "A%", "é", "éa", "e\u0301a", "Éa",
        "日本", "日本語", "日", "\ud7ff", "\ud7ffa", "\ue000", "\U0010ffff", "\U0010ffff\U0010ffffa", "z",
    ]  # fmt: skip
    async with opened(make) as table:
        await table.write(*(table.put(Entry(key, "", "g", 0)) for key in keys))
        for prefix in [*keys, "", "a%%", "日本語です", "\U0010ffff\U0010ffff"]:
            there = sorted(key for key in keys if key.startswith(prefix))
            same(keys_of(await table.find(prefix=prefix)), there, f"keys that begin with {prefix!r}")
            same(keys_of(await table.find("g", prefix=prefix, low=0)), there, f"those of a group, with {prefix!r}")


@CASES
async def many_documents_are_found_whole(make: Make) -> None:
    async with opened(make) as table:
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
        same(await table.write(table.clear()), [count], "the answer to clearing them")
        same(await table.find(), [], "what is left")


# -- clearing


@CASES
async def a_group_is_cleared_alone(make: Make) -> None:
    async with opened(make) as table:
        await table.write(*(table.add(Entry(f"{group}{n}", "", group)) for group in "ghi" for n in range(3)))
        same(await table.write(table.clear("g"), table.clear("g"), table.clear("none")), [3, 0, 0], "answers")
        same(keys_of(await table.find()), ["h0", "i0", "h1", "i1", "h2", "i2"], "what is left")
        same(await table.write(table.delete("h0"), table.clear()), [True, 5], "the answer to clearing all")
        same((await table.find(), await table.get("i0")), ([], None), "what is left of all")
        same(
            await table.write(table.put(Entry("h0", "anew"), 0)), [(1, (await _rank(table, "h0")))], "what comes after"
        )


async def _rank(table: Collection, key: str) -> float:
    document = await table.get(key)
    return -1.0 if document is None else document.rank


@CASES
async def operations_of_a_commit_see_those_before_them(make: Make) -> None:
    async with opened(make) as table:
        await table.write(table.put(Entry("old", "", "g")))
        answers = await table.write(
            table.put(Entry("a", "1", "g"), 0),
            table.put(Entry("a", "2", "g"), 1),
            table.add(Entry("a", "3", "g")),
            table.delete("a"),
            table.add(Entry("a", "4", "h")),
            table.clear("g"),
            table.put(Entry("b", "5", "h")),
            table.touch("a", 9),
            table.add(Entry("c", "6", "h")),
        )
        same((answers[0][0], answers[1][0], answers[2:6]), (1, 2, [None, True, 1.0, 1]), "answers")
        same(answers[6:], [(1, 2.0), None, 10.0], "more answers")
        same([(each.key, each.rank) for each in await table.find()], [("b", 2.0), ("a", 9.0), ("c", 10.0)], "in order")
        same(await table.write(table.clear(), table.put(Entry("a", "7"), 0), table.clear(), table.add(Entry("z", ""))),
             [3, (1, 1.0), 1, (await _rank(table, "z"))], "answers with clearing between")  # fmt: skip
        same(keys_of(await table.find()), ["z"], "what is left")


@CASES
async def kinds_and_spaces_are_told_apart(make: Make) -> None:
    async with opened(make) as table:
        store = table.documents
        names = [
            ("a", "b"),
            ("ab", ""),
            ("a:b", "c"),
            ("a", "b:c"),
            ("1:a", "b"),
            ("project", "other"),
            ("other", "thing"),
        ]
        tables = [table, *(Collection(store, space, kind) for space, kind in names)]
        for n, each in enumerate(tables):
            await each.write(each.put(Entry("key", str(n))))
        for n, each in enumerate(tables):
            same([found.text for found in await each.find()], [str(n)], f"what is in {each.space!r}, {each.kind!r}")
        await table.write(table.clear())
        same(
            [len(await each.find()) for each in tables],
            [0] + [1] * len(names),
            "how many there are after one is cleared",
        )


@CASES
async def a_space_is_dropped_with_all_its_kinds(make: Make) -> None:
    async with opened(make) as table:
        store = table.documents
        mine = [Collection(store, "session:1", kind, 60.0) for kind in ("a", "b")]
        others = [Collection(store, "session:11", "a"), Collection(store, "session", "a"), table]
        for each in [*mine, *others]:
            await each.write(each.put(Entry("k", "t", "g", words="word")), each.put(Entry("l", "t")))
        await store.drop("session:1")
        await store.drop("session:2")
        for each in mine:
            same(
                (await each.find(), await each.get("k"), await each.search("word")),
                ([], None, []),
                f"what is in {each.kind}",
            )
            same(await each.write(each.put(Entry("k", "new"), 0)), [(1, 1.0)], "the answer to a put after that")
        same([len(await each.find()) for each in others], [2, 2, 2], "what is in other spaces")


# -- time


@CASES
async def what_has_expired_is_absent(make: Make) -> None:
    async with opened(make) as table:
        now = table.documents.clock.wall()
        soon, late = now + 10, now + 100
        await table.write(
            *(table.put(Entry(f"s{n}", "", "g", expires=soon, words="word")) for n in range(30)),
            table.put(Entry("late", "", "g", expires=late, words="word")),
            table.put(Entry("ever", "", "g")),
        )
        advance(table, 9.5)
        same(len(await table.find("g")), 32, "how many there are just before")
        advance(table, 0.5)
        same(keys_of(await table.find("g")), ["late", "ever"], "those there are at the end of the others")
        same(keys_of(await table.find(prefix="s")), [], "those with keys that begin so")
        same(keys_of(await table.find(offset=1, limit=1)), ["ever"], "the second of them")
        same(keys_of(await table.many(["s1", "late"])), ["late"], "those of two keys")
        same(keys_of(await table.search("word")), ["late"], "those that are found by a word")
        same(await table.write(table.delete("s1")), [False], "the answer to deleting one")
        with refused(DocumentMissing, "touching one"):
            await table.write(table.touch("s2", 99))
        with refused(VersionConflict, "a put that expects one"):
            await table.write(table.put(Entry("s3", "x"), 1))
        same((await table.write(table.put(Entry("s3", "x", "h"), 0)))[0], (1, 1.0), "the answer to a put of a new one")
        same(await table.write(table.add(Entry("s4", "y", "h"))), [2.0], "the answer to adding one")
        same(await table.get("s4"), Document("s4", "y", 1, 2.0, "h"), "the added document")
        same(await table.write(table.clear("g")), [2], "how many there were in the group")
        advance(table, 1000)
        same(sorted(keys_of(await table.find())), ["s3", "s4"], "what is left")


@CASES
async def a_put_says_anew_when_it_expires(make: Make) -> None:
    async with opened(make) as table:
        now = table.documents.clock.wall()
        await table.write(*(table.put(Entry(key, "", expires=now + 10)) for key in "abc"))
        await table.write(table.put(Entry("a", "A")), table.put(Entry("b", "B", expires=now + 50)))
        advance(table, 20)
        for n in range(10):
            await table.write(table.put(Entry(f"other{n}", "")))
        same(keys_of(await table.many("abc")), ["a", "b"], "those that were put again")
        advance(table, 40)
        same(keys_of(await table.many("abc")), ["a"], "those after another time")


@CASES
async def documents_with_a_time_to_live_live_from_their_last_write(make: Make) -> None:
    async with opened(make) as table:
        brief = Collection(table.documents, "session:x", "thing", 60.0)
        await brief.write(*(brief.put(Entry(key, "")) for key in "abc"))
        advance(table, 50)
        await brief.write(brief.put(Entry("a", "A")), brief.touch("b", 1))
        advance(table, 50)
        same(keys_of(await brief.find()), ["a", "b"], "those that were written to")
        advance(table, 20)
        same(await brief.find(), [], "those after another time")


# -- all or nothing


@CASES
async def a_commit_is_all_or_nothing(make: Make) -> None:
    async with opened(make) as table:
        other = Collection(table.documents, "project", "other")
        await table.write(table.put(Entry("a", "A", "g")), table.put(Entry("b", "B", "g")), other.put(Entry("o", "")))
        before = (await table.find(), await other.find())
        ops = [
            table.put(Entry("a", "x", "h", words="word")), table.add(Entry("c", "x", "g")), table.delete("b"),
            table.touch("c", 99), other.clear(), table.clear("h"), other.put(Entry("new", "")), table.clear(),
            Op("documents.drop", ("project", 0.0)),
        ]  # fmt: skip
        last = [
            (VersionConflict, table.put(Entry("a", "x"), 99)),
            (DocumentMissing, table.touch("none", 1)),
            (LeaseLost, Op(INSTALL, (RUN, OLD))),
        ]
        await table.documents.commits.commit(None, [Op(INSTALL, (RUN, NEW))])
        for count in range(1, len(ops) + 1):
            for error, failing in last:
                with refused(error, f"{count} operations and a failing one"):
                    await table.write(*ops[:count], failing)
                after = (await table.find(), await other.find())
                same(after, before, f"what is there after {count} operations and {failing.name}")
        same(await table.search("word"), [], "what is found by a word of what never was")
        same(await table.write(table.add(Entry("c", "", "g"))), [3.0], "the next rank")


@CASES
async def what_cannot_be_stored_is_refused_by_name(make: Make) -> None:
    async with opened(make) as table:
        for entry in (
            Entry("half \ud800", ""), Entry("k", "half \udc00"), Entry("k", "", "half \ud800"),
            Entry(None, ""), Entry("k", b""),  # type: ignore[arg-type]
            Entry("k", "", rank=float("nan")), Entry("k", "", rank=float("inf")), Entry("k", "", rank=-2e300),
            Entry("k", "", expires=float("nan")), Entry("k", "", rank="1"),  # type: ignore[arg-type]
        ):  # fmt: skip
            with refused(InvalidArgument, f"a put of {entry!a:.80}"):
                await table.write(table.put(entry))
        with refused(InvalidArgument, "a key that is no text"):
            await table.get(1)  # type: ignore[arg-type]
        with refused(InvalidArgument, "a negative limit"):
            await table.find(limit=-1)
        with refused(InvalidArgument, "a negative offset"):
            await table.find(offset=-1)
        same(await table.find(), [], "what is there")


@CASES
async def a_long_story_is_told_as_it_was(make: Make) -> None:
    async with opened(make) as table:
        tables = [table, Collection(table.documents, "project", "other")]
        story = _Story(tables, VirtualClock(seed=5).random)
        for _ in range(150):
            await story.go_on()
        for each in tables:
            await story.compare(each)


class _Story:
    """Commits by chance, and what they must come to."""

    def __init__(self, tables: list[Collection], chance: Any) -> None:
        self.tables, self.chance = tables, chance
        self.there: dict[str, dict[str, Document]] = {table.kind: {} for table in tables}

    async def go_on(self) -> None:
        chance = self.chance
        before = {kind: dict(there) for kind, there in self.there.items()}
        steps = [self._step(chance.choice(self.tables)) for _ in range(chance.randrange(1, 6))]
        ops, expected = [op for op, _ in steps], [answer for _, answer in steps]
        failing = next((answer for answer in expected if isinstance(answer, type)), None)
        if failing is not None:
            self.there = before
            with refused(failing, f"{ops!r}"):
                await self.tables[0].write(*ops)
        else:
            for op, answer, wanted in zip(ops, await self.tables[0].write(*ops), expected, strict=True):
                same(answer, wanted, f"the answer to {op!r} in {ops!r}")
        if chance.random() < 0.2:
            advance(self.tables[0], 1.0)
        await self.compare(chance.choice(self.tables))

    def _live(self, table: Collection) -> dict[str, Document]:
        now = table.documents.clock.wall()
        there = self.there[table.kind]
        for key in [key for key, each in there.items() if each.expires is not None and each.expires <= now]:
            del there[key]
        return there

    def _step(self, table: Collection) -> tuple[Op, Any]:
        chance, there = self.chance, self._live(table)
        key, group = f"k{chance.randrange(12)}", chance.choice("gh")
        known = there.get(key)
        match chance.choices(("put", "add", "touch", "delete", "clear", "all"), (9, 5, 3, 4, 1, 0.3))[0]:
            case "put" | "add" as what:
                # Ranks of their own: which one is given after deletions is no promise.
                end = table.documents.clock.wall() + chance.randrange(1, 9) if chance.random() < 0.3 else None
                entry = Entry(key, chance.choice("abc"), group, float(chance.randrange(5)), end)
                expect = None if chance.random() < 0.7 or what == "add" else chance.randrange(3)
                version = known.version if known else 0
                if what == "add" and known:
                    return table.add(entry), None
                if expect not in (None, version):
                    return table.put(entry, expect), VersionConflict
                rank = entry.rank or 0.0
                there[key] = Document(key, entry.text, version + 1, rank, group, end)
                return (table.add(entry), rank) if what == "add" else (table.put(entry, expect), (version + 1, rank))
            case "touch":
                rank = float(chance.randrange(9))
                if known:
                    there[key] = known._replace(rank=max(rank, known.rank))
                return table.touch(key, rank), None if known else DocumentMissing
            case "delete":
                return table.delete(key), there.pop(key, None) is not None
            case what:
                gone = [each.key for each in there.values() if what == "all" or each.group == group]
                for each in gone:
                    del there[each]
                return table.clear(None if what == "all" else group), len(gone)

    async def compare(self, table: Collection) -> None:
        there = sorted(self._live(table).values(), key=lambda each: (each.rank, each.key))
        same(await table.find(), there, f"all of {table.kind}")
        group = self.chance.choice("gh")
        mine = [each for each in there if each.group == group]
        same(await table.find(group, descending=True), mine[::-1], f"the group {group} of {table.kind}")
        same(await table.many([each.key for each in there]), there, "those of their keys")


# -- words


@CASES
async def words_are_found_in_any_case_and_order(make: Make) -> None:
    async with opened(make) as table:
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
            same(keys_of(found), expected, f"what is found by {query!r}")
        same(await table.search("zurich"), [Document("trip", "TRIP", 1, 1.0)], "a found document")


@CASES
async def no_query_is_a_mistake(make: Make) -> None:
    async with opened(make) as table:
        await table.write(table.put(Entry("a", "", words="near or and not text column words place")))
        for query in (
            '"', "''", '"near', "near(", "NEAR(a b, 5)", "text:near", "words : near", "{place} : 1", "near*", "*",
            "^near", "a AND", "OR", "NOT", "a -b", "+", "near + or", "(", ")", "\\", "%", "\x00", "near\x00or",
            "\ud800", "; DROP TABLE", "x" * 5000, "near " * 3000, "👩‍👩‍👧", "place:1 OR 1",
        ):  # fmt: skip
            await table.search(query)
        same(keys_of(await table.search("NEAR AND or")), ["a"], "what is found by words that are operators elsewhere")


@CASES
async def the_best_is_found_first(make: Make) -> None:
    async with opened(make) as table:
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
async def words_follow_their_document(make: Make) -> None:
    async with opened(make) as table:
        other = Collection(table.documents, "project", "other")
        await table.write(table.put(Entry("a", "", words="red green")), other.put(Entry("o", "", words="red")))
        same(keys_of(await table.search("red")), ["a"], "what is found at first")
        await table.write(table.put(Entry("a", "", words="green blue")), table.add(Entry("b", "", "g", words="blue")))
        same((await table.search("red"), sorted(keys_of(await table.search("blue")))), ([], ["a", "b"]), "after a put")
        await table.write(table.touch("a", 9))
        same(keys_of(await table.search("green")), ["a"], "after a touch")
        await table.write(table.put(Entry("a", "")), table.clear("g"))
        same((await table.search("green"), await table.search("blue")), ([], []), "after they are gone")
        await table.write(table.put(Entry("a", "", words="blue")), table.delete("a"))
        same((await table.search("blue"), keys_of(await other.search("red"))), ([], ["o"]), "after all are gone")


# -- fences


def guarded(table: Collection) -> dict[str, list[Op]]:
    """Writes that change something, by name, beside a document "a" of group "g"."""
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
                same(await table.find(), before, f"what is there after {name} {when}")

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
        same(await table.search("word"), [], "what is found by a word that is gone")


@CASES
async def a_lost_reply_is_repeated_without_harm(make: Make) -> None:
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
        same(await commits.commit(guard, ops), first, "the answer once the claim was superseded")
        for name, late in guarded(table).items():
            with refused(LeaseLost, f"a repeat with {name} added"):
                await commits.commit(guard, [*ops, *late])
        same(await table.find(), before, "what is there")


# -- the claim of the run


@contextlib.contextmanager
def claimed(claim: FencedWrites) -> Iterator[None]:
    token = CURRENT_CLAIM.set(claim)
    try:
        yield
    finally:
        CURRENT_CLAIM.reset(token)


async def refuses_a_zombie(table: Collection, home: Committer, where: str) -> None:
    """Of two claims on a run, the queue of which is on `home`, only the later one writes."""
    run = f"{RUN} on {where}"
    old, new = (FencedWrites(lambda token=token: Guard(run, token), home) for token in (OLD, NEW))  # type: ignore[misc]
    await home.commit(None, [Op(INSTALL, (run, OLD))])
    with claimed(old):
        await table.write(table.put(Entry("a", "A", "g")))
    await home.commit(None, [Op(INSTALL, (run, NEW))])
    await new.install(table.documents.commits)
    before = await table.find()
    for name, ops in guarded(table).items():
        with claimed(old), refused(LeaseLost, f"{name} of a zombie, the queue on {where}"):
            await table.write(*ops)
        same(await table.find(), before, f"what is there after {name}")
    with claimed(old), refused(LeaseLost, f"a change by a zombie, the queue on {where}"):
        await table.change("a", lambda _: Entry("a", "late"))
    with claimed(new):
        await table.write(table.put(Entry("a", "B", "g")))
    await table.write(table.put(Entry("a", "C", "g")))
    same([each.text for each in await table.find()], ["C"], "what the others wrote")


@CASES
async def a_zombie_writes_nothing(make: Make) -> None:
    async with opened(make) as table:
        await refuses_a_zombie(table, table.documents.commits, "the same engine")
        await refuses_a_zombie(table, MemoryEngine(), "another engine")


@CASES
async def the_first_write_of_a_newer_claim_shuts_out_the_older(make: Make) -> None:
    async with opened(make) as table:
        home = MemoryEngine()
        old, new = (FencedWrites(lambda token=token: Guard(RUN, token), home) for token in (OLD, NEW))  # type: ignore[misc]
        with claimed(old):
            same(await table.write(table.add(Entry("a", ""))), [1.0], "the answer under the older claim")
        with claimed(new):
            same(await table.write(table.add(Entry("b", ""))), [2.0], "the answer under the newer one")
        with claimed(old), refused(LeaseLost, "a write under the older claim after that"):
            await table.write(table.add(Entry("c", "")))
        same(keys_of(await table.find()), ["a", "b"], "what is there")


@CASES
async def what_an_attempt_left_running_writes_nothing(make: Make) -> None:
    async with opened(make) as table:
        for home in (table.documents.commits, MemoryEngine()):
            await install(table, OLD)
            claim = FencedWrites(lambda: Guard(RUN, OLD), home, lambda: True)
            with claimed(claim), refused(LeaseLost, "a write after the attempt"):
                await table.write(table.put(Entry("a", "")))
            released = FencedWrites(lambda: Guard(RUN, ""), home)
            with claimed(released), refused(LeaseLost, "a write after the claim was let go of"):
                await table.write(table.put(Entry("a", "")))
        same(await table.find(), [], "what is there")
