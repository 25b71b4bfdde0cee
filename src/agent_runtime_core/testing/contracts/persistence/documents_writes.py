"""Document stores: single documents, versions and ranks."""

from __future__ import annotations

import asyncio

from ....persistence.documents.base import (
    Document,
    DocumentMissing,
    Entry,
    VersionConflict,
)
from ..checks import Cases, refused, same
from .documents_fixtures import HOSTILE, WRITERS, Case, Make, keys_of, opened, raised

CASES: Cases[Case] = Cases()


@CASES
async def a_stored_document_is_returned(make: Make) -> None:
    async with opened(make) as table:
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
    async with opened(make) as table:
        await table.write(*(table.put(Entry(key, text)) for key, text in texts.items()))
        found = {document.key: document.text for document in await table.many(list(texts))}
        for key, text in texts.items():
            same(found[key], text, f"the text {key!r}")


@CASES
async def keys_and_groups_are_distinct(make: Make) -> None:
    async with opened(make) as table:
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
    async with opened(make) as table:
        await table.write(*(table.put(Entry(key, key)) for key in "abc"))
        same(keys_of(await table.many(["c", "x", "a"])), ["c", "a"], "existing documents of three keys")
        same(await table.many([]), [], "none of no keys")


@CASES
async def delete_returns_whether_the_document_existed(make: Make) -> None:
    async with opened(make) as table:
        await table.write(table.put(Entry("a", "A")))
        same(
            await table.write(table.delete("a"), table.delete("a"), table.delete("b")), [True, False, False], "results"
        )
        same((await table.get("a"), await table.find()), (None, []), "the remaining documents")
        same(
            (await table.write(table.put(Entry("a", "B"))))[0][0],
            1,
            "the version of a deleted document that is stored again",
        )


@CASES
async def a_put_expects_what_its_writer_has_seen(make: Make) -> None:
    async with opened(make) as table:
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
    async with opened(make) as table:
        await table.write(table.put(Entry("a", "A")))
        seen = await table.get("a")
        for text in "BA":
            await table.write(table.put(Entry("a", text)))
        with refused(VersionConflict, "a put that expects the version of the same text of before"):
            await table.write(table.put(Entry("a", "C"), seen.version if seen else None))
        same(await table.get("a"), Document("a", "A", 3, 1.0), "the document")


@CASES
async def a_repeated_put_succeeds_once_more(make: Make) -> None:
    async with opened(make) as table:
        for text, expect in (("1", 0), ("2", 1)):
            op = table.put(Entry("a", text, rank=5), expect)
            first = await table.write(op)
            same(await table.write(op), first, f"the result of a repeat that expects {expect}")
        same(await table.get("a"), Document("a", "2", 2, 5.0), "the document")
        with refused(VersionConflict, "another put of the same text"):
            await table.write(table.put(Entry("a", "2", rank=5), 1))


@CASES
async def one_of_many_concurrent_writers_succeeds(make: Make) -> None:
    async with opened(make) as table:
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

    async with opened(make) as table:
        await asyncio.gather(*(table.change("n", more) for _ in range(WRITERS)))
        there = await table.get("n")
        same(there and (there.text, there.version), (str(WRITERS), WRITERS), "a counter")
        same((await table.change("n", lambda _: None)), there, "the result of no change")


@CASES
async def add_does_not_replace_a_document(make: Make) -> None:
    async with opened(make) as table:
        same(await table.write(table.add(Entry("a", "A", "g"))), [1.0], "the rank of an added document")
        same(await table.write(table.add(Entry("a", "B", "h"))), [None], "the result for a taken key")
        same(await table.find(), [Document("a", "A", 1, 1.0, "g")], "the stored documents")


@CASES
async def ranks_of_concurrent_writers_have_no_gap(make: Make) -> None:
    async with opened(make) as table:
        ops = [table.add(Entry(f"{group}{n}", "", group)) for n in range(WRITERS) for group in "gh"]
        answers = await asyncio.gather(*(table.write(op) for op in ops))
        for i, group in enumerate("gh"):
            ranks = sorted(rank for [rank] in answers[i::2])
            same(ranks, [float(n + 1) for n in range(WRITERS)], f"ranks of the group {group}")
            same([each.rank for each in await table.find(group)], ranks, f"ranks of the documents of {group}")


@CASES
async def a_new_document_gets_a_rank_after_all_others(make: Make) -> None:
    async with opened(make) as table:
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
    async with opened(make) as table:
        await table.write(table.put(Entry("a", "", rank=-100)))
        same(await table.write(table.add(Entry("b", ""))), [1.0], "the rank after -100")


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
        [first] = await table.write(table.add(Entry("after", "")))
        [second] = await table.write(table.add(Entry("after that", "")))
        same(1e300 < first < second, True, f"whether {first!r} and {second!r} are above 1e300")


@CASES
async def touching_never_lowers_a_rank(make: Make) -> None:
    async with opened(make) as table:
        await table.write(table.put(Entry("a", "A", "g", 5)), table.put(Entry("b", "B", "g", 6)))
        same(await table.write(table.touch("a", 7)), [None], "the result")
        same(keys_of(await table.find("g")), ["b", "a"], "the order")
        await table.write(table.touch("a", 7), table.touch("a", 6.5))
        same(await table.get("a"), Document("a", "A", 1, 7.0, "g"), "the document after a lower one")
        with refused(DocumentMissing, "touching a missing document"):
            await table.write(table.touch("x", 1))
        same(await table.write(table.add(Entry("c", "", "g"))), [8.0], "the rank after it")
