"""Each promise of documents, broken on purpose, is found by the case that guards it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_runtime_core._engines.base import INSTALL, Guard, Op
from agent_runtime_core._engines.memory import MemoryTx
from agent_runtime_core.persistence.documents import memory
from agent_runtime_core.persistence.documents.base import (
    Document,
    DocumentMissing,
    Entry,
    Query,
    VersionConflict,
    next_rank,
)
from agent_runtime_core.persistence.documents.memory import CONCERN, MemoryDocuments
from agent_runtime_core.testing.contracts.persistence.documents import CASES

Ops = dict[str, Callable[..., Any]]
ALL = {case.__name__: case for case in CASES}


def broken(
    ops: Ops | None = None, reads: Ops | None = None, applied: Ops | None = None, **methods: Any
) -> type[MemoryDocuments]:
    concern = dataclasses.replace(
        CONCERN, operations={**CONCERN.operations, **(ops or {})}, replays={**CONCERN.replays, **(applied or {})}
    )
    members = {"operation_sets": (concern,), "reads": {**MemoryDocuments.reads, **(reads or {})}, **methods}
    return type("Broken", (MemoryDocuments,), members)


def put(tx: MemoryTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> Any:
    return CONCERN.operations["documents.put"](tx, space, kind, entry, expect, now)


def _expects_nothing(tx: MemoryTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> Any:
    return put(tx, space, kind, entry, None, now)


def _same_text_is_same_write(tx: MemoryTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> Any:
    there = memory._one(tx, (space, kind), entry.key, now)
    if there is not None and expect is not None and there.version == expect + 1 and there.text == entry.text:
        return there.version, there.rank
    return put(tx, space, kind, entry, expect, now)


def _no_repeat(tx: MemoryTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> Any:
    there = memory._one(tx, (space, kind), entry.key, now)
    if expect is not None and expect != (there.version if there else 0):
        raise VersionConflict
    return put(tx, space, kind, entry, expect, now)


def _version_of_text(tx: MemoryTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> Any:
    _, rank = put(tx, space, kind, entry, expect, now)
    there = tx.tables["documents"][space, kind]
    tx.put(there, entry.key, there[entry.key]._replace(version=1 if entry.text == "A" else there[entry.key].version))
    return there[entry.key].version, rank


def _ranks_of_the_kind(tx: MemoryTx, space: str, kind: str, entry: Entry, now: float) -> Any:
    if entry.rank is None:
        ranks = tx.tables["document_ranks"]
        last = max((rank for at, rank in ranks.items() if at[:2] == (space, kind)), default=0.0)
        entry = entry._replace(rank=next_rank(last))
    return CONCERN.operations["documents.add"](tx, space, kind, entry, now)


def _adds_over(tx: MemoryTx, space: str, kind: str, entry: Entry, now: float) -> Any:
    return put(tx, space, kind, entry, None, now)[1]


def _touch_lowers(tx: MemoryTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float) -> Any:
    there = memory._one(tx, (space, kind), key, now)
    if there is None:
        raise DocumentMissing
    memory.MemoryTransaction(tx).store(space, kind, there._replace(rank=rank))


def _touch_forgets_the_end(
    tx: MemoryTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> Any:
    CONCERN.operations["documents.touch"](tx, space, kind, key, rank, None, now)


def _clears_all(tx: MemoryTx, space: str, kind: str, group: str | None, now: float) -> Any:
    return CONCERN.operations["documents.clear"](tx, space, kind, None, now)


def _drops_one_kind(tx: MemoryTx, space: str, now: float) -> Any:
    CONCERN.operations["documents.clear"](tx, space, "a", None, now)


def _never_expires(tx: MemoryTx, query: Query) -> list[Document]:
    return memory._find(tx, query._replace(now=0.0))


def _pattern(tx: MemoryTx, query: Query) -> list[Document]:
    return memory._find(tx, query._replace(prefix=query.prefix.rstrip("%_*")))


def _high_is_in(tx: MemoryTx, query: Query) -> list[Document]:
    return memory._find(tx, query._replace(high=None if query.high is None else next_rank(query.high)))


def _offset_is_dropped(tx: MemoryTx, query: Query) -> list[Document]:
    return memory._find(tx, query._replace(offset=0))


def _keys_upwards(tx: MemoryTx, query: Query) -> list[Document]:
    found = memory._find(tx, query._replace(descending=False, offset=0, limit=None))
    found.sort(key=lambda each: each.rank, reverse=query.descending)
    return found[query.offset :][: query.limit]


def _any_order(tx: MemoryTx, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    return memory._get(tx, space, kind, sorted(keys), now)


def _folded_keys(tx: MemoryTx, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    there = {key.lower(): each for key, each in memory._live(tx, (space, kind), now).items()}
    return [there[key.lower()] for key in keys if key.lower() in there]


def _any_word(tx: MemoryTx, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
    return [(key, rank, f"{words} zurich") for key, rank, words in memory._words(tx, space, kind, now)]


def _words_of_old(tx: MemoryTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> Any:
    old = tx.tables["document_notes"].get((space, kind), {}).get(entry.key, ("", 0))[0]
    return put(tx, space, kind, entry._replace(words=f"{old} {entry.words}".strip()), expect, now)


async def _no_guard(self: MemoryDocuments, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
    return await self.engine.commit(None, ops)


async def _no_install(self: MemoryDocuments, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
    if len(ops) > 1 and ops[0].name == INSTALL:
        return [True, *await self.engine.commit(guard, ops[1:])]
    return await self.engine.commit(guard, ops)


async def _one_by_one(self: MemoryDocuments, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
    return [(await self.engine.commit(guard, [op]))[0] for op in ops]


class _Itself:
    """Not the engine, so that the methods above are asked."""

    def __get__(self, store: MemoryDocuments | None, cls: type) -> Any:
        return store


DEFECTS: list[tuple[type[MemoryDocuments], str]] = [
    (broken({"documents.put": _expects_nothing}), "one_of_many_concurrent_writers_succeeds"),
    (broken({"documents.put": _same_text_is_same_write}), "a_repeated_put_succeeds_once_more"),
    (broken({"documents.put": _no_repeat}), "a_repeated_put_succeeds_once_more"),
    (broken({"documents.put": _version_of_text}), "an_equal_text_is_not_the_same_version"),
    (broken({"documents.add": _ranks_of_the_kind}), "ranks_of_concurrent_writers_have_no_gap"),
    (broken({"documents.add": _adds_over}), "add_does_not_replace_a_document"),
    (broken({"documents.touch": _touch_lowers}), "touching_never_lowers_a_rank"),
    (broken({"documents.touch": _touch_forgets_the_end}), "a_time_to_live_begins_at_the_last_write"),
    (broken({"documents.clear": _clears_all}), "a_group_is_cleared_alone"),
    (broken({"documents.drop": _drops_one_kind}), "a_space_is_dropped_with_all_its_kinds"),
    (broken(reads={"find": _never_expires}), "an_expired_document_is_absent"),
    (broken(reads={"find": _pattern}), "a_prefix_is_not_a_pattern"),
    (broken(reads={"find": _high_is_in}), "ranks_of_any_size_are_in_order"),
    (broken(reads={"find": _offset_is_dropped}), "find_returns_the_documents_of_the_query"),
    (broken(reads={"find": _keys_upwards}), "find_returns_the_documents_of_the_query"),
    (broken(reads={"get": _any_order}), "documents_are_returned_in_the_order_of_the_keys"),
    (broken(reads={"get": _folded_keys}), "keys_and_groups_are_distinct"),
    (broken(reads={"words": _any_word}), "words_match_in_any_case_and_order"),
    (broken({"documents.put": _words_of_old}), "the_index_follows_the_documents"),
    (broken(commits=_Itself(), commit=_no_guard), "a_superseded_claim_writes_nothing"),
    (broken(applied={"documents.put": lambda *_: (1, 1.0)}), "a_superseded_claim_writes_nothing"),
    (broken(applied={"documents.touch": lambda *_: None}), "a_write_may_be_repeated_after_a_lost_reply"),
    (broken(commits=_Itself(), commit=_one_by_one), "a_commit_is_all_or_nothing"),
    (broken(commits=_Itself(), commit=_no_install), "a_stale_worker_writes_nothing"),
]


@pytest.mark.parametrize(("store", "name"), DEFECTS)
async def test_a_defect_is_found(store: type[MemoryDocuments], name: str) -> None:
    await ALL[name](MemoryDocuments)
    with pytest.raises(Exception) as found:  # noqa: PT011 - an AssertionError, or what the store should not have raised
        await ALL[name](store)
    assert not isinstance(found.value, TypeError | AttributeError | NameError)
