"""Document stores: queries and full-text search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ....persistence.documents.base import (
    Collection,
    Document,
    Entry,
)
from ..checks import Cases, same
from .documents_fixtures import Case, Make, keys_of, opened

CASES: Cases[Case] = Cases()


@CASES
async def find_returns_the_documents_of_the_query(make: Make) -> None:
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
async def a_prefix_is_not_a_pattern(make: Make) -> None:
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
async def many_documents_are_returned_completely(make: Make) -> None:
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
        same(await table.write(table.clear()), [count], "the result of clearing them")
        same(await table.find(), [], "the remaining documents")


@CASES
async def words_match_in_any_case_and_order(make: Make) -> None:
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
            same(keys_of(found), expected, f"results for {query!r}")
        same(await table.search("zurich"), [Document("trip", "TRIP", 1, 1.0)], "a found document")


@CASES
async def every_string_is_a_valid_query(make: Make) -> None:
    async with opened(make) as table:
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
async def the_index_follows_the_documents(make: Make) -> None:
    async with opened(make) as table:
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
