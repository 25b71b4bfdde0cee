"""Embeddings that expire, change in numbers, or are more than there may be; what many values come to."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest

from agent_runtime_core.errors import TooManyVectors
from agent_runtime_core.persistence.backends.memory import InMemoryKnowledgeStore
from agent_runtime_core.persistence.backends.sqlite import SQLitePlace
from agent_runtime_core.persistence.document_stores import knowledge
from agent_runtime_core.persistence.document_stores.audit import summary
from agent_runtime_core.persistence.document_stores.knowledge import StoredKnowledge
from agent_runtime_core.persistence.models import Embedding, Scope
from agent_runtime_core.testing.clock import VirtualClock


class _OnFile(SQLitePlace, StoredKnowledge):
    pass


def circle(n: float) -> list[float]:
    return [math.cos(n), math.sin(n)]


async def test_what_has_expired_is_not_found_though_nobody_says_so(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = _OnFile(path=tmp_path / "a.db", session_id="s", session_ttl=60.0, clock=clock)
    for n in range(6):
        await store.save_embedding(Embedding(vector=circle(n), content=str(n)), Scope.SESSION)
        clock.advance(20)  # 0, 1 and 2 expire, and 3 does now
    found = await store.search_similar(circle(1), 6, Scope.SESSION)
    assert sorted(each.content for each, _ in found) == ["4", "5"]
    clock.advance(20)
    assert [each.content for each, _ in await store.search_similar(circle(4), 1, Scope.SESSION)] == ["5"]
    clock.advance(20)
    assert await store.search_similar(circle(4), 6, Scope.SESSION) == []
    await store.close()


async def test_many_changes_are_read_without_reading_all(tmp_path: Path) -> None:
    mine, theirs = (_OnFile(path=tmp_path / "a.db", durability="normal") for _ in range(2))
    made = [Embedding(vector=circle(n), content=str(n)) for n in range(250)]
    await theirs.save_embedding(made[0])
    assert len(await mine.search_similar(circle(0), 1)) == 1
    index = mine._embeddings(Scope.PROJECT)._index
    for each in made[1:]:
        await theirs.save_embedding(each)
    for n in (7, 120, 249):
        assert [each.content for each, _ in await mine.search_similar(circle(n), 1)] == [str(n)]
    assert mine._embeddings(Scope.PROJECT)._index is index, "the same index, kept up"
    await mine.close()
    await theirs.close()


async def test_room_is_not_measured_at_each_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge, "_MARGIN", 10)
    store = InMemoryKnowledgeStore(max_vectors=35)
    looks = 0
    documents = store.documents(Scope.PROJECT)
    read = documents.read

    async def counted(what: str, *args: object) -> object:
        nonlocal looks
        looks += what == "find"
        return await read(what, *args)

    documents.read = counted  # type: ignore[method-assign]
    for n in range(20):
        await store.save_embedding(Embedding(vector=circle(n), content=str(n)))
    assert looks == 2
    for n in range(15):
        await store.save_embedding(Embedding(vector=circle(n), content=str(n)))
    with pytest.raises(TooManyVectors, match=r"at most 35 embeddings.*vector database"):
        await store.save_embedding(Embedding(vector=circle(1), content=""))


def test_a_summary_agrees_with_the_quantiles_of_the_standard_library() -> None:
    chance = random.Random(2)
    for count in (2, 3, 10, 101, 1000):
        values = [chance.lognormvariate(5, 2) for _ in range(count)]
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        found = summary(values)
        assert [found["p50"], found["p95"], found["p99"]] == pytest.approx([cuts[49], cuts[94], cuts[98]])
        assert found["avg"] == pytest.approx(statistics.fmean(values))
        assert (found["count"], found["min"], found["max"]) == (count, min(values), max(values))


def test_a_sum_past_the_largest_float_is_infinite_and_the_rest_is_not() -> None:
    found = summary([1.7e308, 1.7e308, 1.7e308])
    assert found["sum"] == math.inf
    assert {name: found[name] for name in ("avg", "p50", "p99")} == pytest.approx(
        dict.fromkeys(("avg", "p50", "p99"), 1.7e308)
    )
