"""Document stores: atomic commits, deletion and expiry."""

from __future__ import annotations

from typing import Any

from ...._engines.base import INSTALL, Op
from ....errors import InvalidArgument, LeaseLost
from ....persistence.documents.base import Collection, Document, DocumentMissing, Entry, VersionConflict
from ...clock import VirtualClock
from ..checks import Cases, refused, same
from .fixtures import NEW, OLD, RUN, Case, Make, advance, collection, keys_of

CASES: Cases[Case] = Cases()


@CASES
async def a_group_is_cleared_alone(make: Make) -> None:
    async with collection(make) as table:
        await table.write(*(table.add(Entry(f"{group}{n}", "", group)) for group in "ghi" for n in range(3)))
        same(await table.write(table.clear("g"), table.clear("g"), table.clear("none")), [3, 0, 0], "results")
        same(keys_of(await table.find()), ["h0", "i0", "h1", "i1", "h2", "i2"], "the remaining documents")
        same(await table.write(table.delete("h0"), table.clear()), [True, 5], "the result of clearing all")
        same((await table.find(), await table.get("i0")), ([], None), "the remaining documents")
        later = await table.write(table.put(Entry("h0", "again"), 0))
        same(later, [(1, (await _rank(table, "h0")))], "the result of a later put")


async def _rank(table: Collection, key: str) -> float:
    document = await table.get(key)
    return -1.0 if document is None else document.rank


@CASES
async def operations_see_the_earlier_ones_of_their_commit(make: Make) -> None:
    async with collection(make) as table:
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
        same((answers[0][0], answers[1][0], answers[2:6]), (1, 2, [None, True, 1.0, 1]), "results")
        same(answers[6:], [(1, 2.0), None, 10.0], "more results")
        same([(each.key, each.rank) for each in await table.find()], [("b", 2.0), ("a", 9.0), ("c", 10.0)], "in order")
        same(await table.write(table.clear(), table.put(Entry("a", "7"), 0), table.clear(), table.add(Entry("z", ""))),
             [3, (1, 1.0), 1, (await _rank(table, "z"))], "results with clear in between")  # fmt: skip
        same(keys_of(await table.find()), ["z"], "the remaining documents")


@CASES
async def kinds_and_spaces_are_separate(make: Make) -> None:
    async with collection(make) as table:
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
            same([found.text for found in await each.find()], [str(n)], f"documents in {each.space!r}, {each.kind!r}")
        await table.write(table.clear())
        same([len(await each.find()) for each in tables], [0] + [1] * len(names), "counts after one kind is cleared")


@CASES
async def a_space_is_dropped_with_all_its_kinds(make: Make) -> None:
    async with collection(make) as table:
        store = table.documents
        mine = [Collection(store, "session:1", kind, 60.0) for kind in ("a", "b")]
        others = [Collection(store, "session:11", "a"), Collection(store, "session", "a"), table]
        for each in [*mine, *others]:
            await each.write(each.put(Entry("k", "t", "g", words="word")), each.put(Entry("l", "t")))
        await store.drop("session:1")
        await store.drop("session:2")
        for each in mine:
            left = (await each.find(), await each.get("k"), await each.search("word"))
            same(left, ([], None, []), f"documents in {each.kind}")
            same(await each.write(each.put(Entry("k", "new"), 0)), [(1, 1.0)], "the result of a put after that")
        same([len(await each.find()) for each in others], [2, 2, 2], "documents in other spaces")


@CASES
async def an_expired_document_is_absent(make: Make) -> None:
    async with collection(make) as table:
        now = table.documents.clock.wall()
        soon, late = now + 10, now + 100
        await table.write(
            *(table.put(Entry(f"s{n}", "", "g", expires=soon, words="word")) for n in range(30)),
            table.put(Entry("late", "", "g", expires=late, words="word")),
            table.put(Entry("ever", "", "g")),
        )
        advance(table, 9.5)
        same(len(await table.find("g")), 32, "the number of documents before they expire")
        advance(table, 0.5)
        same(keys_of(await table.find("g")), ["late", "ever"], "documents that have not expired")
        same(keys_of(await table.find(prefix="s")), [], "documents whose key begins with s")
        same(keys_of(await table.find(offset=1, limit=1)), ["ever"], "the second of them")
        same(keys_of(await table.many(["s1", "late"])), ["late"], "those of two keys")
        same(keys_of(await table.search("word")), ["late"], "documents found by a word")
        same(await table.write(table.delete("s1")), [False], "the result of deleting one")
        with refused(DocumentMissing, "touching one"):
            await table.write(table.touch("s2", 99))
        with refused(VersionConflict, "a put that expects one"):
            await table.write(table.put(Entry("s3", "x"), 1))
        same((await table.write(table.put(Entry("s3", "x", "h"), 0)))[0], (1, 1.0), "the result of a put of a new one")
        same(await table.write(table.add(Entry("s4", "y", "h"))), [2.0], "the result of adding one")
        same(await table.get("s4"), Document("s4", "y", 1, 2.0, "h"), "the added document")
        same(await table.write(table.clear("g")), [2], "the number of deleted documents")
        advance(table, 1000)
        same(sorted(keys_of(await table.find())), ["s3", "s4"], "the remaining documents")


@CASES
async def a_put_replaces_the_time_of_expiry(make: Make) -> None:
    async with collection(make) as table:
        now = table.documents.clock.wall()
        await table.write(*(table.put(Entry(key, "", expires=now + 10)) for key in "abc"))
        await table.write(table.put(Entry("a", "A")), table.put(Entry("b", "B", expires=now + 50)))
        advance(table, 20)
        for n in range(10):
            await table.write(table.put(Entry(f"other{n}", "")))
        same(keys_of(await table.many("abc")), ["a", "b"], "those that were put again")
        advance(table, 40)
        same(keys_of(await table.many("abc")), ["a"], "documents after more time")


@CASES
async def a_time_to_live_begins_at_the_last_write(make: Make) -> None:
    async with collection(make) as table:
        brief = Collection(table.documents, "session:x", "thing", 60.0)
        await brief.write(*(brief.put(Entry(key, "")) for key in "abc"))
        advance(table, 50)
        await brief.write(brief.put(Entry("a", "A")), brief.touch("b", 1))
        advance(table, 50)
        same(keys_of(await brief.find()), ["a", "b"], "those that were written to")
        advance(table, 20)
        same(await brief.find(), [], "documents after more time")


@CASES
async def a_commit_is_all_or_nothing(make: Make) -> None:
    async with collection(make) as table:
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
                same(after, before, f"the stored documents after {count} operations and {failing.name}")
        same(await table.search("word"), [], "results for a word of a rejected commit")
        same(await table.write(table.add(Entry("c", "", "g"))), [3.0], "the next rank")


@CASES
async def a_value_that_cannot_be_stored_is_rejected(make: Make) -> None:
    async with collection(make) as table:
        for entry in (
            Entry("half \ud800", ""), Entry("k", "half \udc00"), Entry("k", "", "half \ud800"),
            Entry(None, ""), Entry("k", b""),  # type: ignore[arg-type]
            Entry("k", "", rank=float("nan")), Entry("k", "", rank=float("inf")), Entry("k", "", rank=-2e300),
            Entry("k", "", expires=float("nan")), Entry("k", "", rank="1"),  # type: ignore[arg-type]
        ):  # fmt: skip
            with refused(InvalidArgument, f"a put of {entry!a:.80}"):
                await table.write(table.put(entry))
        with refused(InvalidArgument, "a key that is no string"):
            await table.get(1)  # type: ignore[arg-type]
        with refused(InvalidArgument, "a negative limit"):
            await table.find(limit=-1)
        with refused(InvalidArgument, "a negative offset"):
            await table.find(offset=-1)
        same(await table.find(), [], "the stored documents")


@CASES
async def random_commits_have_the_expected_results(make: Make) -> None:
    async with collection(make) as table:
        tables = [table, Collection(table.documents, "project", "other")]
        commits = _RandomCommits(tables, VirtualClock(seed=5).random)
        for _ in range(150):
            await commits.commit()
        for each in tables:
            await commits.compare(each)


class _RandomCommits:
    """Random commits, and the documents that must result."""

    def __init__(self, tables: list[Collection], chance: Any) -> None:
        self.tables, self.chance = tables, chance
        self.there: dict[str, dict[str, Document]] = {table.kind: {} for table in tables}

    async def commit(self) -> None:
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
                same(answer, wanted, f"the result of {op!r} in {ops!r}")
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
                # With a rank, because the rank of a new document after deletions is not specified.
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
        same(await table.many([each.key for each in there]), there, "documents by their keys")
